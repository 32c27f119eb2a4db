"""The wire form of a lease's rollouts, for the object store.

Two forms, both read by everybody: the *packed* form is the small one, the *simple* form is a compressed safetensors
file that any tool opens. Spec: ``docs/spec/rollout-bundle.md`` and ``docs/spec/packed-bundle.md``.
"""

from __future__ import annotations

from typing import Final

from protocol.bundle_columns import MAX_ROLLOUTS
from protocol.bundle_packed import MAGIC, decode_packed, encode_packed
from protocol.bundle_simple import decode_simple, encode_simple
from protocol.commitment import bundle_root, rollout_root
from protocol.errors import E_TOO_LARGE, PeerFault
from protocol.messages import SamplingRules
from protocol.rollout import Bundle

__all__ = ["MAX_BYTES", "MAX_ROLLOUTS", "bundle_root", "decode", "encode", "encode_simple", "rollout_root"]

#: Default bound of a bundle, in bytes, packed and not.
MAX_BYTES: Final = 64 * 2**20


def encode(bundle: Bundle) -> bytes:
    """The bundle as bytes: in the packed form, or in the simple one with routes or should packing fail.

    Raises:
        ValueError: a head token carries a token code, or nothing to encode (our own bug).
    """
    return encode_packed(bundle) or encode_simple(bundle)


def decode(
    data: bytes, rules: SamplingRules, *, max_bytes: int = MAX_BYTES, most: tuple[int, int] | None = None
) -> Bundle:
    """The bundle in ``data``; memory stays below a small multiple of ``max_bytes``.

    Checks the form only: heads are for ``sampler.check_head``, draws for ``sampler.replay``.

    Args:
        most: rollouts and tokens that were committed to; what says it holds more is refused before it is decoded.

    Raises:
        PeerFault: ``E_TOO_LARGE``, ``E_BUNDLE_FRAME``, ``E_BUNDLE_HEADER``, ``E_BUNDLE_PACKED``, ``E_BUNDLE_COLUMNS``,
            ``E_BUNDLE_ROUTES``, ``E_SEGMENTS``, ``E_BUNDLE_CANONICAL`` or ``E_COUNTS``.
    """
    if len(data) > max_bytes:
        raise PeerFault(E_TOO_LARGE, "bundle too large", expected=f"<= {max_bytes} bytes", got=f"{len(data)} bytes")
    form = decode_packed if data[:4] == MAGIC[:4] else decode_simple
    return form(data, rules, max_bytes, most)
