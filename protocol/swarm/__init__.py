"""The swarm: nodes find each other, pass on signed heads and exchange chunks, so that the learner's uplink stays flat.

Nothing depends on it for safety: heads are signed, chunks are named by their hash. Only ``protocol.swarm.host`` imports
libp2p. Spec: ``docs/spec/swarm.md``.
"""
