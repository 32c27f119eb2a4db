"""Audits: structural checks, exact sampler replay, recomputation with the model, verdicts with numbers.

Imports ``protocol`` and third parties, no other part. The rule engine (``session``) takes bytes and holds no socket,
no disk and no torch; ``recompute`` holds torch and is imported when the first drawn bundle needs it.
"""
