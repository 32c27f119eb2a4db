"""Publishing weights: layout, state root, lossless diffs, anchors, the chain of signed checkpoints and its follower.

A *state* is a dict of bit patterns (``numpy`` unsigned integers), never of floats. Imports ``protocol``, numpy,
zstandard and safetensors; never torch. Specs: ``docs/spec/weights.md``, ``docs/spec/weight-diff.md``.
"""
