"""The wire form of a lease's rollouts.

A bundle is one zstd frame around one safetensors file whose columns are packed for compression. Its *content* has one
encoding per value; the decoder writes what it read again and compares. Spec: ``docs/spec/rollout-bundle.md``.

Legend: R rollouts, G segments, T completion tokens, D tail draws, U distinct head ids, N head entries of the bundle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol.commitment import bundle_root, rollout_root
from protocol.errors import E_TOO_LARGE, PeerFault, code
from protocol.head import offsets, token_entries
from protocol.messages import SamplingRules
from protocol.rollout import NO_CODE, Bundle, Finish, Rollout, Segment, SwapMode

__all__ = ["MAX_BYTES", "MAX_ROLLOUTS", "bundle_root", "decode", "encode", "rollout_root"]

E_BUNDLE_FRAME = code("E_BUNDLE_FRAME", "a bundle is not exactly one zstd frame of a declared size")
E_BUNDLE_HEADER = code("E_BUNDLE_HEADER", "a bundle's header is not the one its counts call for")
E_BUNDLE_COLUMNS = code("E_BUNDLE_COLUMNS", "a bundle's columns contradict each other or the run's limits")
E_BUNDLE_CANONICAL = code("E_BUNDLE_CANONICAL", "a bundle's content is not the one encoding of its rollouts")
E_SEGMENTS = code("E_SEGMENTS", "a rollout's segments are not in order, not on the swap grid, or past its end")

#: Default bound of a bundle, in bytes, compressed and not.
MAX_BYTES: Final = 64 * 2**20
#: Most rollouts of a bundle; a lease names no more samples.
MAX_ROLLOUTS: Final = 1024
_MAX_HEADER: Final = 4096
_FORMAT: Final = "assay.rollout-bundle.v1"
_DRAWN: Final = 255  #: rank of a token that was drawn from the tail
_LEVEL: Final = 15  #: of zstd; readers accept any
#: Columns whose last extents are the numbers of ``_Counts``.
_COUNTED: Final = ("sample", "segment_start", "rank", "drawn_id", "dictionary", "head_id")


@dataclass(frozen=True)
class _Counts:
    """The six numbers that fix a bundle's header."""

    rollouts: int
    segments: int
    tokens: int
    drawn: int
    distinct: int
    entries: int

    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (numpy dtype, shape), in file order."""
        r, g, t, d, u, n = self.rollouts, self.segments, self.tokens, self.drawn, self.distinct, self.entries
        return {
            "sample": ("<u4", (r,)), "length": ("<u4", (r,)), "finish": ("u1", (r,)), "segments": ("<u2", (r,)),
            "segment_start": ("<u4", (g,)), "segment_version": ("<u8", (g,)), "segment_mode": ("u1", (g,)),
            "head_length": ("u1", (t,)), "rank": ("u1", (t,)), "tail_code": ("u1", (2, t)),
            "drawn_id": ("u1", (4, d)), "drawn_code": ("u1", (2, d)),
            "dictionary": ("u1", (4, u)), "head_id": ("u1", (4, n)), "head_code": ("u1", (2, n)),
        }

    def header(self) -> bytes:
        """The safetensors header, length prefix included."""
        entries: dict[str, Any] = {"__metadata__": {"format": _FORMAT}}
        end = 0
        for name, (dtype, shape) in self.columns().items():
            start, end = end, end + _size(dtype, shape)
            entries[name] = {"dtype": "U" + str(8 * int(dtype[-1])), "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


Columns = dict[str, NDArray[Any]]


def encode(bundle: Bundle) -> bytes:
    """The bundle as bytes for the object store.

    Raises:
        ValueError: a head token carries a token code, or nothing to encode (our own bug).
    """
    if not bundle.rollouts:
        raise ValueError("a bundle holds at least one rollout")
    for rollout in bundle.rollouts:
        if np.any((token_entries(rollout) >= 0) & (rollout.token_codes != NO_CODE)):
            raise ValueError("a token of the head carries a token code")
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(_content(bundle))


def decode(data: bytes, rules: SamplingRules, *, max_bytes: int = MAX_BYTES) -> Bundle:
    """The bundle in ``data``; memory stays below a small multiple of ``max_bytes``.

    Checks the form only: heads are for ``sampler.check_head``, draws for ``sampler.replay``.

    Raises:
        PeerFault: ``E_TOO_LARGE``, ``E_BUNDLE_FRAME``, ``E_BUNDLE_HEADER``, ``E_BUNDLE_COLUMNS``, ``E_SEGMENTS`` or
            ``E_BUNDLE_CANONICAL``.
    """
    content = _decompress(data, max_bytes)
    bundle = _assemble(_columns(content), rules)
    if _content(bundle) != content:
        raise PeerFault(E_BUNDLE_CANONICAL, "content is not canonical", expected="the encoding of its own rollouts")
    return bundle


# -- writing -----------------------------------------------------------------------------------------------


def _content(bundle: Bundle) -> bytes:
    """The uncompressed safetensors file."""
    columns = _pack(bundle)
    counts = _Counts(*(columns[name].shape[-1] for name in _COUNTED))
    body = [columns[name].astype(dtype, copy=False).tobytes() for name, (dtype, _) in counts.columns().items()]
    return counts.header() + b"".join(body)


def _pack(bundle: Bundle) -> Columns:
    rollouts = bundle.rollouts
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    rank = np.concatenate([_ranks(rollout) for rollout in rollouts])
    drawn = rank == _DRAWN
    token_codes = np.concatenate([rollout.token_codes for rollout in rollouts])
    dictionary, indices = _index(np.concatenate([rollout.head_ids for rollout in rollouts]))
    return {
        "sample": np.array([rollout.sample for rollout in rollouts]),
        "length": np.array([len(rollout) for rollout in rollouts]),
        "finish": np.array([int(rollout.finish) for rollout in rollouts]),
        "segments": np.array([len(rollout.segments) for rollout in rollouts]),
        "segment_start": np.array([segment.start for segment in segments]),
        "segment_version": np.array([segment.version for segment in segments], dtype=np.uint64),
        "segment_mode": np.array([int(segment.mode) for segment in segments]),
        "head_length": np.concatenate([rollout.head_lengths for rollout in rollouts]),
        "rank": rank,
        "tail_code": _planes(np.concatenate([rollout.tail_codes for rollout in rollouts]), "<u2"),
        "drawn_id": _planes(np.concatenate([rollout.tokens for rollout in rollouts])[drawn], "<u4"),
        "drawn_code": _planes(token_codes[drawn], "<u2"),
        "dictionary": _planes(np.diff(dictionary, prepend=np.uint32(0)), "<u4"),
        "head_id": _planes(indices, "<u4"),
        "head_code": _planes(np.concatenate([_code_steps(rollout) for rollout in rollouts]), "<u2"),
    }


def _ranks(rollout: Rollout) -> NDArray[np.uint8]:
    """(T,) index of each token within its head, or ``_DRAWN``."""
    entries = token_entries(rollout)
    ranks: NDArray[np.uint8] = np.where(entries >= 0, entries - offsets(rollout), _DRAWN).astype(np.uint8)
    return ranks


def _index(ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """(U,) distinct ids, the most frequent first, equals by id; (N,) index of each id among them."""
    distinct, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.lexsort((distinct, -counts))
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return distinct[order], places[inverse]


def _code_steps(rollout: Rollout) -> NDArray[np.uint16]:
    """(N,) differences modulo 2^16 of the codes of each head, the first of each from zero."""
    steps = np.diff(rollout.head_codes, prepend=np.uint16(0))
    starts = offsets(rollout)
    steps[starts] = rollout.head_codes[starts]
    return steps


def _planes(values: NDArray[Any], dtype: str) -> NDArray[np.uint8]:
    """(width, n) byte planes, least significant first."""
    width = int(dtype[-1])
    return np.ascontiguousarray(values.astype(dtype, copy=False).view(np.uint8).reshape(-1, width).T)


# -- reading -----------------------------------------------------------------------------------------------


def _decompress(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise PeerFault(E_TOO_LARGE, "bundle too large", expected=f"<= {max_bytes} bytes", got=f"{len(data)} bytes")
    try:
        size = zstandard.frame_content_size(data)
        if size > max_bytes:
            raise PeerFault(E_TOO_LARGE, "bundle decodes to too much", expected=f"<= {max_bytes} bytes",
                            got=f"{size} bytes")
        if size < 0:
            raise PeerFault(E_BUNDLE_FRAME, "bundle hides its size", expected="a frame content size", got="none")
        return zstandard.ZstdDecompressor(max_window_size=2**27).decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PeerFault(E_BUNDLE_FRAME, "bundle does not decompress", expected="one zstd frame", got=error) from None


def _columns(content: bytes) -> Columns:
    """Views of the columns; the header must be, byte for byte, the one that its own counts call for."""
    counts = _read_counts(content)
    header = counts.header()
    if content[: len(header)] != header:
        raise PeerFault(E_BUNDLE_HEADER, "unexpected header", expected=header[8:200], got=content[8:200])
    sizes = [_size(dtype, shape) for dtype, shape in counts.columns().values()]
    if len(content) != len(header) + sum(sizes):
        raise PeerFault(E_BUNDLE_HEADER, "content does not fill its columns", expected=len(header) + sum(sizes),
                        got=len(content))
    columns: Columns = {}
    start = len(header)
    for (name, (dtype, shape)), size in zip(counts.columns().items(), sizes, strict=True):
        columns[name] = np.frombuffer(content[start : start + size], dtype=dtype).reshape(shape)
        start += size
    return columns


def _read_counts(content: bytes) -> _Counts:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= length <= _MAX_HEADER:
        raise PeerFault(E_BUNDLE_HEADER, "header length", expected=f"2 to {_MAX_HEADER} bytes", got=length)
    try:
        header = json.loads(content[8 : 8 + length])
        shapes = [header[name]["shape"][-1] for name in _COUNTED]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise PeerFault(E_BUNDLE_HEADER, "header does not parse", expected="a safetensors header", got=error) from None
    if not all(type(count) is int and 0 <= count <= len(content) for count in shapes):
        raise PeerFault(E_BUNDLE_HEADER, "header counts", expected="counts within the content", got=shapes)
    return _Counts(*shapes)


def _assemble(columns: Columns, rules: SamplingRules) -> Bundle:
    _check_counts(columns, rules)
    drawn = columns["rank"] == _DRAWN
    head_lengths = columns["head_length"]
    head_ids, head_codes = _ids(columns), _codes(columns)
    starts = np.cumsum(head_lengths, dtype=np.int64) - head_lengths
    tokens = head_ids[starts + np.where(drawn, 0, columns["rank"])]
    tokens[drawn] = _unplane(columns["drawn_id"], "<u4")
    token_codes = np.full(len(tokens), NO_CODE, dtype=np.uint16)
    token_codes[drawn] = _unplane(columns["drawn_code"], "<u2")
    tail_codes = _unplane(columns["tail_code"], "<u2")
    token_ends = np.cumsum(columns["length"], dtype=np.int64)
    entry_ends = np.append(starts, len(head_ids))[token_ends]
    segments = _segments(columns, rules)
    rollouts, first, start = [], 0, 0
    for index, (last, end) in enumerate(zip(token_ends.tolist(), entry_ends.tolist(), strict=True)):
        rollouts.append(Rollout(
            int(columns["sample"][index]), tokens[first:last], head_lengths[first:last], head_ids[start:end],
            head_codes[start:end], tail_codes[first:last], token_codes[first:last], segments[index],
            Finish(int(columns["finish"][index])),
        ))
        first, start = last, end
    return Bundle(tuple(rollouts))


def _check_counts(columns: Columns, rules: SamplingRules) -> None:
    """Counts agree with each other and stay within the run's limits, so that slicing by them is safe."""
    rollouts, tokens = len(columns["sample"]), len(columns["rank"])
    _require(1 <= rollouts <= MAX_ROLLOUTS, f"1 to {MAX_ROLLOUTS} rollouts", rollouts)
    lengths, head_lengths = columns["length"], columns["head_length"]
    _require(lengths.min() >= 1 and lengths.max() <= rules.max_new_tokens,
             f"1 to {rules.max_new_tokens} tokens per rollout", f"{lengths.min()} to {lengths.max()}")
    _require(int(lengths.sum(dtype=np.int64)) == tokens, "token counts that add up", tokens)
    _require(head_lengths.min() >= 1 and head_lengths.max() <= rules.head_size,
             f"heads of 1 to {rules.head_size} entries", f"{head_lengths.min()} to {head_lengths.max()}")
    entries = columns["head_id"].shape[1]
    _require(int(head_lengths.sum(dtype=np.int64)) == entries, "head lengths that add up", entries)
    rank = columns["rank"]
    drawn = rank == _DRAWN
    _require(bool(np.all(drawn | (rank < head_lengths))), "ranks within their heads", "a rank past its head")
    _require(int(np.count_nonzero(drawn)) == columns["drawn_id"].shape[1], "one record per tail draw",
             columns["drawn_id"].shape[1])
    _require(columns["finish"].max() <= max(Finish), "a known finish reason", columns["finish"].max())


def _segments(columns: Columns, rules: SamplingRules) -> list[tuple[Segment, ...]]:
    most = (columns["length"].astype(np.int64) - 1) // rules.swap_grid + 1
    if np.any(columns["segments"] > most):
        raise PeerFault(E_SEGMENTS, "too many segments", expected=f"one per {rules.swap_grid} tokens", got="more")
    counts = columns["segments"].tolist()
    starts, versions, modes = (columns[f"segment_{name}"].tolist() for name in ("start", "version", "mode"))
    if sum(counts) != len(starts) or any(mode > max(SwapMode) for mode in modes):
        raise PeerFault(E_SEGMENTS, "segment columns", expected="counts that add up, known modes", got=counts[:8])
    segments, first = [], 0
    for count, length in zip(counts, columns["length"].tolist(), strict=True):
        part = tuple(
            Segment(starts[i], versions[i], SwapMode(modes[i])) for i in range(first, first + count)
        )
        _check_segments(part, length, rules)
        segments.append(part)
        first += count
    return segments


def _check_segments(segments: tuple[Segment, ...], length: int, rules: SamplingRules) -> None:
    ordered = all(a.start < b.start and a.version < b.version for a, b in pairwise(segments))
    on_grid = all(segment.start % rules.swap_grid == 0 for segment in segments)
    last = segments[-1] if segments else Segment(length, 0)
    if last.start >= length or segments[0].start != 0 or not ordered or not on_grid or last.version >= 2**48:
        raise PeerFault(
            E_SEGMENTS, "segments of a rollout",
            expected=f"ascending starts from 0 below {length} on a grid of {rules.swap_grid}, ascending versions",
            got=[(segment.start, segment.version) for segment in segments[:8]],
        )


def _ids(columns: Columns) -> NDArray[np.uint32]:
    """(N,) ids from their indices into the dictionary, whose entries are running sums modulo 2^32."""
    dictionary = np.cumsum(_unplane(columns["dictionary"], "<u4"), dtype=np.uint32)
    indices = _unplane(columns["head_id"], "<u4")
    _require(bool(np.all(indices < len(dictionary))), f"dictionary indices < {len(dictionary)}", indices.max())
    ids: NDArray[np.uint32] = dictionary[indices]
    return ids


def _codes(columns: Columns) -> NDArray[np.uint16]:
    """(N,) codes from their differences: running sums modulo 2^16, restarted at each head."""
    sums = np.cumsum(_unplane(columns["head_code"], "<u2"), dtype=np.uint16)
    lengths = columns["head_length"]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    before = np.where(starts > 0, sums[starts - 1], 0).astype(np.uint16)
    codes: NDArray[np.uint16] = sums - np.repeat(before, lengths)
    return codes


def _unplane(planes: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    size = int(dtype[-1])
    for extent in shape:
        size *= extent
    return size


def _require(holds: Any, expected: str, got: Any) -> None:
    if not holds:
        raise PeerFault(E_BUNDLE_COLUMNS, "columns do not fit", expected=expected, got=got)
