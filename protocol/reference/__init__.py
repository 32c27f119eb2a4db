"""The one torch implementation of "log p(token | prefix, checkpoint)".

The verifier judges with it; node and learner use its loader and its bit-pattern copy so that the same weights
mean the same model everywhere. The only place in ``protocol`` that imports torch and transformers.
"""

from protocol.reference.loader import export_state, load_config_model, set_state, usable_device
from protocol.reference.model import LogitsChunk, Recomputation, ReferenceModel

__all__ = [
    "LogitsChunk", "Recomputation", "ReferenceModel", "export_state", "load_config_model", "set_state", "usable_device",
]
