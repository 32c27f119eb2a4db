"""Layout of a model's weights: which tensors there are, and where each lies in the canonical bytes.

Canonical bytes of a state = the bit patterns of all tensors, in ascending order of name (by code point), little-endian,
row-major, without padding. Spec: ``docs/spec/weights.md``.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError, TensorSpec, deserialize, serialize_file

from protocol import canonical
from protocol.errors import LocalFault, PeerFault, code
from protocol.messages import Part, parse

E_LAYOUT = code("E_LAYOUT", "a weight layout is malformed or over its limits")
E_STATE = code("E_STATE", "tensors do not fit the layout: one is missing, extra, or of another shape or type")

#: Bit patterns by tensor name: uint16 for BF16 and F16, uint32 for F32; C-contiguous, little-endian.
State = dict[str, NDArray[Any]]

#: Unsigned type that holds the bit pattern of a dtype.
WORDS: Final[dict[str, np.dtype[Any]]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<u2"), "F32": np.dtype("<u4")}
_SAFETENSORS_NAMES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

#: Most tensors of a layout; bounds the work of parsing one.
MAX_TENSORS: Final = 65_536
#: Largest state in bytes; keeps every offset and count exact in 64 bits and in JSON.
MAX_STATE_BYTES: Final = 2**44
_MAX_SIDE: Final = 2**40

TensorName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
Side = Annotated[int, Field(ge=0, le=_MAX_SIDE)]


class Tensor(Part):
    """One tensor of the layout."""

    name: TensorName
    dtype: Literal["BF16", "F16", "F32"]
    shape: Annotated[list[Side], Field(max_length=8)]


class _Document(Part):
    """The layout as it is hashed and sent."""

    format: Literal["assay.layout.v1"] = "assay.layout.v1"
    tensors: Annotated[list[Tensor], Field(min_length=1, max_length=MAX_TENSORS)]
    aliases: dict[TensorName, TensorName]


@dataclass(frozen=True)
class Entry:
    """A tensor and its place in the canonical bytes. ``offset`` and ``nbytes`` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def words(self) -> np.dtype[Any]:
        """Type of the bit patterns."""
        return WORDS[self.dtype]


class Piece(NamedTuple):
    """Words ``lo`` to ``hi`` of one tensor, at word ``at`` of the range that was asked for."""

    entry: Entry
    lo: int
    hi: int
    at: int


@dataclass(frozen=True)
class Layout:
    """Tensors sorted by name. ``aliases`` maps the names of tied tensors to the one that is stored."""

    entries: tuple[Entry, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tensors: Mapping[str, tuple[str, tuple[int, ...]]], aliases: Mapping[str, str] | None = None
    ) -> Layout:
        """Layout of ``{name: (dtype, shape)}``, dtype one of BF16, F16, F32; ``aliases`` are not in ``tensors``.

        Raises:
            PeerFault: ``E_SCHEMA`` or ``E_LAYOUT``.
        """
        value = {
            "format": "assay.layout.v1",
            "tensors": [{"name": n, "dtype": d, "shape": list(s)} for n, (d, s) in sorted(tensors.items())],
            "aliases": dict(aliases or {}),
        }
        return cls._from_document(parse(_Document, value))

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Parse the canonical JSON form.

        Raises:
            PeerFault: ``E_JSON``, ``E_TOO_LARGE``, ``E_SCHEMA`` or ``E_LAYOUT``.
        """
        return cls._from_document(parse(_Document, canonical.decode(data)))

    @classmethod
    def _from_document(cls, document: _Document) -> Layout:
        entries: list[Entry] = []
        offset = 0
        for tensor in document.tensors:
            if entries and tensor.name <= entries[-1].name:
                raise PeerFault(
                    E_LAYOUT, "tensors are not sorted by name", expected=f"> {entries[-1].name}", got=tensor.name
                )
            nbytes = math.prod(tensor.shape) * WORDS[tensor.dtype].itemsize
            if math.prod(side or 1 for side in tensor.shape) > MAX_STATE_BYTES:
                raise PeerFault(E_LAYOUT, f"shape of {tensor.name} too large", got=tensor.shape)
            entries.append(Entry(tensor.name, tensor.dtype, tuple(tensor.shape), offset, nbytes))
            offset += nbytes
            if offset > MAX_STATE_BYTES:
                raise PeerFault(E_LAYOUT, "state too large", expected=f"<= {MAX_STATE_BYTES} bytes", got=offset)
        names = {entry.name for entry in entries}
        for alias, name in document.aliases.items():
            if alias in names or name not in names:
                raise PeerFault(E_LAYOUT, "an alias must be a new name for a stored tensor", got=f"{alias} -> {name}")
        return cls(tuple(entries), dict(sorted(document.aliases.items())))

    def to_bytes(self) -> bytes:
        """The canonical JSON form; its SHA-256 is ``sha256``, so it can be stored as an object under that hash."""
        return canonical.encode({
            "format": "assay.layout.v1",
            "tensors": [{"name": e.name, "dtype": e.dtype, "shape": list(e.shape)} for e in self.entries],
            "aliases": dict(self.aliases),
        })

    @cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of :meth:`to_bytes`; binds names, types and shapes into every state root."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Length of the canonical bytes."""
        last = self.entries[-1]
        return last.offset + last.nbytes

    @cached_property
    def _offsets(self) -> list[int]:
        return [entry.offset for entry in self._filled]

    @cached_property
    def _filled(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.nbytes]

    @cached_property
    def runs(self) -> tuple[tuple[int, int, np.dtype[Any]], ...]:
        """Byte ranges ``(start, end, words)`` over which the word size does not change, in order."""
        found, start = [], 0
        for i, entry in enumerate(self._filled):
            end = entry.offset + entry.nbytes
            following = self._filled[i + 1] if i + 1 < len(self._filled) else None
            if following is None or following.words != entry.words:
                found.append((start, end, entry.words))
                start = end
        return tuple(found)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """The tensors' parts that make up bytes ``start`` to ``end``, which lie inside one run."""
        i, at = bisect_right(self._offsets, start) - 1, 0
        while start < end:
            entry = self._filled[i]
            size = entry.words.itemsize
            lo = (start - entry.offset) // size
            hi = (min(end, entry.offset + entry.nbytes) - entry.offset) // size
            yield Piece(entry, lo, hi, at)
            start, i, at = entry.offset + hi * size, i + 1, at + hi - lo

    def new_state(self) -> State:
        """A state of zero bits."""
        return {entry.name: np.zeros(entry.shape, entry.words) for entry in self.entries}


def check_state(layout: Layout, state: Mapping[str, NDArray[Any]]) -> None:
    """Refuse a state of ours that does not fit the layout.

    Raises:
        LocalFault: ``E_STATE`` naming the first tensor that is missing, extra, or of another type or shape.
    """
    for entry in layout.entries:
        array = state.get(entry.name)
        if array is None:
            raise LocalFault(E_STATE, f"tensor {entry.name} is missing")
        if array.dtype != entry.words or array.shape != entry.shape or not array.flags.c_contiguous:
            raise LocalFault(
                E_STATE, f"tensor {entry.name} does not fit the layout",
                expected=f"contiguous {entry.words} {entry.shape}", got=f"{array.dtype} {array.shape}",
            )
    if len(state) != len(layout.entries):
        extra = sorted(set(state) - {entry.name for entry in layout.entries})
        raise LocalFault(E_STATE, "tensors that the layout does not know", got=", ".join(extra[:5]))


def copy_state(state: Mapping[str, NDArray[Any]]) -> State:
    """A deep copy."""
    return {name: array.copy() for name, array in state.items()}


def flat(state: Mapping[str, NDArray[Any]], piece: Piece) -> NDArray[Any]:
    """The words of ``piece`` as a one-dimensional view into ``state``."""
    words: NDArray[Any] = state[piece.entry.name].reshape(-1)[piece.lo : piece.hi]
    return words



def read_safetensors(*paths: Path) -> tuple[Layout, State]:
    """Layout and bit patterns of one model in one or several safetensors files; the arrays own their memory.

    Experts that have tensors of their own are put together as the model holds them (``protocol.weights.experts``).

    Raises:
        LocalFault: ``E_STATE`` when a file is missing, malformed, repeats a tensor or holds another dtype;
            ``E_EXPERTS``.
        PeerFault: ``E_SCHEMA`` or ``E_LAYOUT`` when the names or shapes are beyond what a layout allows.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    state: State = {}
    for path in paths:
        try:
            items: list[tuple[str, dict[str, Any]]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise LocalFault(E_STATE, f"cannot read {path}", got=str(error)) from None
        for name, item in items:
            dtype, shape = item["dtype"], tuple(item["shape"])
            if name in state or dtype not in WORDS:
                raise LocalFault(
                    E_STATE, f"tensor {name} of {path} is repeated or of an unknown type",
                    expected=f"one of {', '.join(WORDS)}", got=dtype,
                )
            tensors[name] = (dtype, shape)
            state[name] = np.frombuffer(item["data"], WORDS[dtype]).reshape(shape)
    from protocol.weights.experts import merge_experts

    tensors, state = merge_experts(tensors, state)
    return Layout.of(tensors), state


def write_safetensors(path: Path, layout: Layout, state: State, *, metadata: dict[str, str] | None = None) -> None:
    """Write the state to a safetensors file that ``transformers`` loads; not atomic, the caller renames.

    Raises:
        LocalFault: ``E_STATE`` when the state does not fit the layout or the file cannot be written.
    """
    check_state(layout, state)
    specs = {
        entry.name: TensorSpec(
            dtype=_SAFETENSORS_NAMES[entry.dtype], shape=list(entry.shape),
            data_ptr=state[entry.name].ctypes.data, data_len=entry.nbytes,
        )
        for entry in layout.entries
    }
    try:
        serialize_file(specs, path, metadata={"format": "pt", **(metadata or {})})
    except (OSError, SafetensorError) as error:
        raise LocalFault(E_STATE, f"cannot write {path}", got=str(error)) from None
