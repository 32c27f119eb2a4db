"""The simple form of a bundle: one zstd frame around one safetensors file.

Its *content* has one encoding per value; the decoder writes what it read again and compares.
Spec: ``docs/spec/rollout-bundle.md``, "Simple form".

Legend: R rollouts, G segments, T completion tokens, D tail draws, U distinct head ids, N head entries of the bundle, Y
layers with a router, X experts per token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol.bundle_columns import DRAWN, Draws, Frame, check_most, check_sayable, require, to_bundle
from protocol.errors import E_TOO_LARGE, PeerFault, code
from protocol.messages import SamplingRules
from protocol.rollout import NO_CODE, Bundle

E_BUNDLE_FRAME = code("E_BUNDLE_FRAME", "a bundle is neither one zstd frame of a declared size nor in the packed form")
E_BUNDLE_HEADER = code("E_BUNDLE_HEADER", "a bundle's header is not the one its counts call for")
E_BUNDLE_CANONICAL = code("E_BUNDLE_CANONICAL", "a bundle's content is not the one encoding of its rollouts")

_MAX_HEADER: Final = 4096
_FORMAT: Final = "assay.rollout-bundle.v1"
_LEVEL: Final = 15  #: of zstd; readers accept any
#: Columns whose last extents are the numbers of ``_Counts``.
_COUNTED: Final = ("sample", "segment_start", "rank", "drawn_id", "dictionary", "head_id")


@dataclass(frozen=True)
class _Counts:
    """The numbers that fix a bundle's header: six, and two more when it has routes."""

    rollouts: int
    segments: int
    tokens: int
    drawn: int
    distinct: int
    entries: int
    layers: int = 0
    per_token: int = 0

    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (numpy dtype, shape), in file order."""
        r, g, t, d, u, n = self.rollouts, self.segments, self.tokens, self.drawn, self.distinct, self.entries
        routes: dict[str, tuple[str, tuple[int, ...]]] = {"routes": ("u1", (t, self.layers, self.per_token))}
        return {
            "sample": ("<u4", (r,)), "length": ("<u4", (r,)), "finish": ("u1", (r,)), "segments": ("<u2", (r,)),
            "segment_start": ("<u4", (g,)), "segment_version": ("<u8", (g,)), "segment_mode": ("u1", (g,)),
            "head_length": ("u1", (t,)), "rank": ("u1", (t,)), "tail_code": ("u1", (2, t)),
            "drawn_id": ("u1", (4, d)), "drawn_code": ("u1", (2, d)),
            "dictionary": ("u1", (4, u)), "head_id": ("u1", (4, n)), "head_code": ("u1", (2, n)),
        } | (routes if self.layers else {})

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


def encode_simple(bundle: Bundle) -> bytes:
    """The bundle in its simple form.

    Raises:
        ValueError: a head token carries a token code, or nothing to encode (our own bug).
    """
    check_sayable(bundle)
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(_content(bundle))


def decode_simple(
    data: bytes, rules: SamplingRules, max_bytes: int, most: tuple[int, int] | None = None
) -> Bundle:
    """The bundle in ``data``; memory stays below a small multiple of ``max_bytes``.

    Raises:
        PeerFault: ``E_TOO_LARGE``, ``E_BUNDLE_FRAME``, ``E_BUNDLE_HEADER``, ``E_BUNDLE_COLUMNS``,
            ``E_BUNDLE_ROUTES``, ``E_SEGMENTS``, ``E_BUNDLE_CANONICAL`` or ``E_COUNTS``.
    """
    content = _decompress(data, max_bytes)
    columns = _columns(content)
    check_most(len(columns["sample"]), len(columns["head_length"]), most)
    frame = Frame(**{name: columns[name] for name in Frame.__dataclass_fields__})
    frame.check(columns["head_id"].shape[1], rules)
    bundle = to_bundle(frame, _draws(columns, frame), rules)
    if _content(bundle) != content:
        raise PeerFault(E_BUNDLE_CANONICAL, "content is not canonical", expected="the encoding of its own rollouts")
    return bundle


# -- writing -----------------------------------------------------------------------------------------------


def _content(bundle: Bundle) -> bytes:
    """The uncompressed safetensors file."""
    columns = _pack(Frame.of(bundle), Draws.of(bundle))
    counts = _Counts(*(columns[name].shape[-1] for name in _COUNTED), *_route_shape(columns))
    body = [columns[name].astype(dtype, copy=False).tobytes() for name, (dtype, _) in counts.columns().items()]
    return counts.header() + b"".join(body)


def _pack(frame: Frame, draws: Draws) -> Columns:
    drawn = draws.rank == DRAWN
    dictionary, indices = _index(draws.head_id)
    return vars(frame) | {
        "rank": draws.rank,
        "tail_code": _planes(draws.tail_code, "<u2"),
        "drawn_id": _planes(draws.token[drawn], "<u4"),
        "drawn_code": _planes(draws.token_code[drawn], "<u2"),
        "dictionary": _planes(np.diff(dictionary, prepend=np.uint32(0)), "<u4"),
        "head_id": _planes(indices, "<u4"),
        "head_code": _planes(_code_steps(draws.head_code, frame.head_starts()), "<u2"),
    } | ({} if draws.routes is None else {"routes": draws.routes})


def _route_shape(columns: Columns) -> tuple[int, ...]:
    """(Y, X), or nothing."""
    return columns["routes"].shape[1:] if "routes" in columns else ()


def _index(ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """(U,) distinct ids, the most frequent first, equals by id; (N,) index of each id among them."""
    distinct, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.lexsort((distinct, -counts))
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return distinct[order], places[inverse]


def _code_steps(codes: NDArray[np.uint16], starts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """(N,) differences modulo 2^16 of the codes of each head, the first of each from zero."""
    steps = np.diff(codes, prepend=np.uint16(0))
    steps[starts] = codes[starts]
    return steps


def _planes(values: NDArray[Any], dtype: str) -> NDArray[np.uint8]:
    """(width, n) byte planes, least significant first."""
    width = int(dtype[-1])
    return np.ascontiguousarray(values.astype(dtype, copy=False).view(np.uint8).reshape(-1, width).T)


# -- reading -----------------------------------------------------------------------------------------------


def _decompress(data: bytes, max_bytes: int) -> bytes:
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
        if "routes" in header:
            shapes += header["routes"]["shape"][-2:]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise PeerFault(E_BUNDLE_HEADER, "header does not parse", expected="a safetensors header", got=error) from None
    sound = len(shapes) in (len(_COUNTED), len(_COUNTED) + 2)
    if not sound or not all(type(count) is int and 0 <= count <= len(content) for count in shapes):
        raise PeerFault(E_BUNDLE_HEADER, "header counts", expected="counts within the content", got=shapes)
    return _Counts(*shapes)


def _draws(columns: Columns, frame: Frame) -> Draws:
    rank, drawn_ids = columns["rank"], columns["drawn_id"]
    drawn = rank == DRAWN
    require(bool(np.all(drawn | (rank < frame.head_length))), "ranks within their heads", "a rank past its head")
    require(int(np.count_nonzero(drawn)) == drawn_ids.shape[1], "one record per tail draw", drawn_ids.shape[1])
    starts, head_ids = frame.head_starts(), _ids(columns)
    tokens = head_ids[starts + np.where(drawn, 0, rank)]
    tokens[drawn] = _unplane(drawn_ids, "<u4")
    token_codes = np.full(len(tokens), NO_CODE, dtype=np.uint16)
    token_codes[drawn] = _unplane(columns["drawn_code"], "<u2")
    return Draws(
        rank, tokens, _unplane(columns["tail_code"], "<u2"), token_codes, head_ids, _codes(columns, starts),
        columns.get("routes"),
    )


def _ids(columns: Columns) -> NDArray[np.uint32]:
    """(N,) ids from their indices into the dictionary, whose entries are running sums modulo 2^32."""
    dictionary = np.cumsum(_unplane(columns["dictionary"], "<u4"), dtype=np.uint32)
    indices = _unplane(columns["head_id"], "<u4")
    require(bool(np.all(indices < len(dictionary))), f"dictionary indices < {len(dictionary)}", indices.max())
    ids: NDArray[np.uint32] = dictionary[indices]
    return ids


def _codes(columns: Columns, starts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """(N,) codes from their differences: running sums modulo 2^16, restarted at each head."""
    sums = np.cumsum(_unplane(columns["head_code"], "<u2"), dtype=np.uint16)
    before = np.where(starts > 0, sums[starts - 1], 0).astype(np.uint16)
    codes: NDArray[np.uint16] = sums - np.repeat(before, columns["head_length"])
    return codes


def _unplane(planes: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    size = int(dtype[-1])
    for extent in shape:
        size *= extent
    return size
