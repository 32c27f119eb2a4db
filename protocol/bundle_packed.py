"""The packed form of a bundle: a few counts, then one stream of the adaptive bit coder.

Spec: ``docs/spec/packed-bundle.md``. Legend: R rollouts, G segments, T completion tokens, N head entries.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.bundle_columns import DRAWN, MAX_ROLLOUTS, Draws, Frame, check_most, check_sayable, require, to_bundle
from protocol.bundle_simple import E_BUNDLE_CANONICAL
from protocol.errors import E_TOO_LARGE, PeerFault, code
from protocol.messages import SamplingRules
from protocol.rollout import Bundle

E_BUNDLE_PACKED = code("E_BUNDLE_PACKED", "a packed bundle is cut off, goes on after its end, or is of an unknown kind")

#: First bytes of a packed bundle; no zstd frame begins with them.
MAGIC: Final = b"ASRB\x01"
#: What a token and a head entry are taken to need, in bytes, when counts are held against the limit.
_TOKEN_BYTES: Final = 16
_ENTRY_BYTES: Final = 6
#: Smallest and largest table of slots, as powers of two.
_SLOT_BITS: Final = (12, 20)


def encode_packed(bundle: Bundle) -> bytes | None:
    """The bundle in its packed form, or None if that is larger than the plain numbers or cannot carry its routes.

    Raises:
        ValueError: a head token carries a token code, or nothing to encode (our own bug).
    """
    from protocol import bit_coder, packed_tokens

    check_sayable(bundle)
    if bundle.rollouts[0].routes is not None:
        return None  # expert choices are most of such a bundle, and have the simple form
    frame, draws = Frame.of(bundle), Draws.of(bundle)
    counts = [len(frame.sample), len(frame.segment_start), len(frame.head_length), len(draws.head_id)]
    width = max(1, int(max(draws.head_id.max(), draws.token.max())).bit_length())
    coder = bit_coder.writer(_size(counts[2], counts[3]), _slot_bits(counts[3]))
    for kind, column in enumerate(_frame_columns(frame)):
        packed_tokens.code_column(coder, kind, column)
    packed_tokens.code_tokens(coder, width, _token_columns(frame, draws))
    packed_tokens.code_end(coder, packed_tokens.END)
    stream = bit_coder.written(coder)
    return None if stream is None else MAGIC + bytes([width]) + b"".join(map(_varint, counts)) + stream


def decode_packed(
    data: bytes, rules: SamplingRules, max_bytes: int, most: tuple[int, int] | None = None
) -> Bundle:
    """The bundle in ``data``; memory stays below a small multiple of ``max_bytes``.

    Raises:
        PeerFault: ``E_BUNDLE_PACKED``, ``E_TOO_LARGE``, ``E_BUNDLE_COLUMNS``, ``E_SEGMENTS``,
            ``E_BUNDLE_ROUTES`` (the run asks for some), ``E_BUNDLE_CANONICAL`` or ``E_COUNTS``.
    """
    from protocol import bit_coder, packed_tokens

    width, (rollouts, segments, tokens, entries), stream = _read_counts(data)
    _check_counts(rollouts, segments, tokens, entries, rules, max_bytes)
    check_most(rollouts, tokens, most)
    coder = bit_coder.reader(stream, _slot_bits(entries))
    sizes = (rollouts, rollouts, rollouts, rollouts, segments, segments, segments, tokens)
    columns = [np.zeros(size, np.int64) for size in sizes]
    for kind, column in enumerate(columns):
        packed_tokens.code_column(coder, kind, column)
        _check_not_past(coder)
    frame = _frame(columns)
    frame.check(entries, rules)
    draws = Draws(*(np.zeros(size, np.int64) for size in (tokens, tokens, tokens, tokens, entries, entries)))
    wrong = packed_tokens.code_tokens(coder, width, _token_columns(frame, draws))
    _check_not_past(coder)
    require(wrong < 0, "ranks within their heads", f"a rank past its head at token {wrong}")
    if packed_tokens.code_end(coder, 0) != packed_tokens.END or not bit_coder.ended(coder):
        raise _misfit()
    _check_draws(frame, draws)
    return to_bundle(frame, draws, rules)


def _check_not_past(coder: Any) -> None:
    """A reader that is past its end stopped there: no end can come any more."""
    from protocol import bit_coder

    if bit_coder.past(coder):
        raise _misfit()


def _misfit() -> PeerFault:
    return PeerFault(E_BUNDLE_PACKED, "stream and counts do not fit", expected="a stream that ends with its tokens")


def _size(tokens: int, entries: int) -> int:
    """What the numbers of a bundle are taken to need, in bytes."""
    return _TOKEN_BYTES * tokens + _ENTRY_BYTES * entries


def _slot_bits(entries: int) -> int:
    """Size of the table of slots for this many head entries."""
    return min(max((8 * entries).bit_length(), _SLOT_BITS[0]), _SLOT_BITS[1])


def _frame_columns(frame: Frame) -> list[NDArray[np.int64]]:
    """The frame's columns in their order in the stream; samples as differences."""
    columns = {name: column.astype(np.int64) for name, column in vars(frame).items()}
    columns["sample"] = np.diff(columns["sample"], prepend=0) & 0xFFFFFFFF
    return list(columns.values())


def _frame(columns: list[NDArray[np.int64]]) -> Frame:
    sample, *others = columns
    return Frame(np.cumsum(sample) & 0xFFFFFFFF, *others)


def _token_columns(frame: Frame, draws: Draws) -> Any:
    from protocol.packed_tokens import Tokens

    starts = np.zeros(len(frame.head_length), np.int64)
    ends = np.cumsum(frame.length, dtype=np.int64)
    starts[ends - frame.length] = 1
    return Tokens(starts, frame.head_length.astype(np.int64), *(
        column.astype(np.int64, copy=False) for column in (
            draws.token, draws.rank, draws.tail_code, draws.token_code, draws.head_id, draws.head_code
        )
    ))


# -- counts ------------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; all bytes but the last have their top bit set."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _read_counts(data: bytes) -> tuple[int, list[int], bytes]:
    """(bits of an id, the four counts, the stream)."""
    at, counts = len(MAGIC) + 1, []
    for _ in range(4):
        value, last = 0, 0
        for shift in range(0, 35, 7):
            last = data[at] if at < len(data) else 128
            value, at = value | (last & 127) << shift, at + 1
            if last < 128:
                break
        if last > 127 or (last == 0 and value != 0 and shift > 0):
            raise PeerFault(E_BUNDLE_PACKED, "a count", expected="a number of at most 5 bytes", got=data[:24].hex())
        counts.append(value)
    width = data[len(MAGIC)]
    if data[: len(MAGIC)] != MAGIC or not 1 <= width <= 32:
        raise PeerFault(E_BUNDLE_PACKED, "first bytes", expected=f"{MAGIC.hex()} and 1 to 32", got=data[:6].hex())
    return width, counts, data[at:]


def _check_counts(
    rollouts: int, segments: int, tokens: int, entries: int, rules: SamplingRules, max_bytes: int
) -> None:
    """What the counts may be before anything is allocated."""
    require(1 <= rollouts <= MAX_ROLLOUTS, f"1 to {MAX_ROLLOUTS} rollouts", rollouts)
    most = rollouts * rules.max_new_tokens
    require(rollouts <= tokens <= most, f"{rollouts} to {most} tokens", tokens)
    require(tokens <= entries <= tokens * rules.head_size, f"{tokens} to {tokens * rules.head_size} entries", entries)
    require(segments <= tokens, f"up to {tokens} segments", segments)
    size = _size(tokens, entries)
    if size > max_bytes:
        raise PeerFault(E_TOO_LARGE, "bundle decodes to too much", expected=f"<= {max_bytes} bytes", got=size)


def _check_draws(frame: Frame, draws: Draws) -> None:
    """A token that is recorded as drawn from the tail must not be in its head: there is one way to say a thing."""
    drawn = np.flatnonzero(draws.rank == DRAWN)
    starts = frame.head_starts()
    for t in drawn.tolist():
        if np.any(draws.head_id[starts[t] : starts[t] + frame.head_length[t]] == draws.token[t]):
            raise PeerFault(E_BUNDLE_CANONICAL, f"token {t} is in its head", expected="its rank", got="a tail draw")
