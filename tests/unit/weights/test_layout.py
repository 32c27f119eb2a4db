"""Layout: canonical form, offsets, limits, safetensors files."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from protocol import canonical
from protocol.errors import LocalFault, PeerFault
from protocol.weights.layout import Layout, check_state, read_safetensors, write_safetensors
from tests.fakes.checkpoints import LAYOUT, random_bits, same_bits


def test_entries_are_sorted_and_packed() -> None:
    layout = Layout.of({"b": ("F32", (2, 3)), "a": ("BF16", (5,)), "c": ("F16", ())})
    assert [(e.name, e.offset, e.nbytes) for e in layout.entries] == [("a", 0, 10), ("b", 10, 24), ("c", 34, 2)]
    assert layout.nbytes == 36


def test_sha256_is_the_hash_of_the_bytes_and_survives_parsing() -> None:
    data = LAYOUT.to_bytes()
    assert LAYOUT.sha256 == hashlib.sha256(data).hexdigest()
    assert Layout.from_bytes(data) == LAYOUT


@pytest.mark.parametrize(
    "other",
    [
        {"a": ("BF16", (4,)), "c": ("BF16", (6,))},
        {"a": ("BF16", (6,)), "b": ("BF16", (4,))},
        {"a": ("BF16", (2, 2)), "b": ("BF16", (6,))},
        {"a": ("F16", (4,)), "b": ("BF16", (6,))},
    ],
    ids=["name", "swapped shapes", "rank", "dtype"],
)
def test_sha256_binds_names_shapes_and_types(other: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    assert Layout.of({"a": ("BF16", (4,)), "b": ("BF16", (6,))}).sha256 != Layout.of(other).sha256


def test_aliases_are_part_of_the_hash_but_not_of_the_state() -> None:
    plain = Layout.of({"a": ("BF16", (4,))})
    tied = Layout.of({"a": ("BF16", (4,))}, {"b": "a"})
    assert plain.sha256 != tied.sha256
    assert plain.nbytes == tied.nbytes
    assert set(tied.new_state()) == {"a"}


def _document(**changes: object) -> bytes:
    value = {"format": "assay.layout.v1", "aliases": {}, "tensors": [{"name": "a", "dtype": "BF16", "shape": [2]}]}
    return canonical.encode({**value, **changes})


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{}", "E_SCHEMA"),
        (b"{", "E_JSON"),
        (_document(format="assay.layout.v2"), "E_SCHEMA"),
        (_document(tensors=[]), "E_SCHEMA"),
        (_document(tensors=[{"name": "a", "dtype": "I64", "shape": [2]}]), "E_SCHEMA"),
        (_document(tensors=[{"name": "a b", "dtype": "BF16", "shape": [2]}]), "E_SCHEMA"),
        (_document(tensors=[{"name": "a", "dtype": "BF16", "shape": [-1]}]), "E_SCHEMA"),
        (_document(tensors=[{"name": "a", "dtype": "BF16", "shape": [2**39, 2**39]}]), "E_LAYOUT"),
        (_document(tensors=[{"name": "a", "dtype": "BF16", "shape": [2**39, 2**39, 0]}]), "E_LAYOUT"),
        (_document(tensors=[{"name": n, "dtype": "BF16", "shape": [1]} for n in "ba"]), "E_LAYOUT"),
        (_document(tensors=[{"name": n, "dtype": "BF16", "shape": [1]} for n in "aa"]), "E_LAYOUT"),
        (_document(aliases={"b": "nothing"}), "E_LAYOUT"),
        (_document(aliases={"a": "a"}), "E_LAYOUT"),
    ],
)
def test_bad_layouts_are_refused(data: bytes, code: str) -> None:
    with pytest.raises(PeerFault) as caught:
        Layout.from_bytes(data)
    assert caught.value.code == code


def test_pieces_cover_every_range_inside_a_run() -> None:
    rng = np.random.default_rng(1)
    state = random_bits(LAYOUT, rng)
    whole = b"".join(state[e.name].tobytes() for e in LAYOUT.entries)
    for start, end, words in LAYOUT.runs:
        size = words.itemsize
        for _ in range(20):
            lo, hi = sorted(rng.integers(0, (end - start) // size + 1, 2))
            pieces = list(LAYOUT.pieces(start + int(lo) * size, start + int(hi) * size))
            got = b"".join(state[p.entry.name].reshape(-1)[p.lo : p.hi].tobytes() for p in pieces)
            assert got == whole[start + lo * size : start + hi * size]
            assert [p.at for p in pieces] == list(np.cumsum([0] + [p.hi - p.lo for p in pieces])[:-1])


def test_runs_tile_the_state_by_word_size() -> None:
    runs = list(LAYOUT.runs)
    assert runs[0][0] == 0
    assert runs[-1][1] == LAYOUT.nbytes
    assert all(a[1] == b[0] and a[2] != b[2] for a, b in pairwise(runs))


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("scale"),
        lambda s: s.update(extra=np.zeros(1, "<u2")),
        lambda s: s.update(scale=np.zeros((1,), "<u4")),
        lambda s: s.update(scale=np.zeros((), "<f4")),
        lambda s: s.update({"embed.weight": np.zeros((8, 37), "<u2").T}),
    ],
    ids=["missing", "extra", "shape", "dtype", "not contiguous"],
)
def test_states_that_do_not_fit_are_refused(damage: object) -> None:
    state = LAYOUT.new_state()
    damage(state)  # type: ignore[operator]
    with pytest.raises(LocalFault) as caught:
        check_state(LAYOUT, state)
    assert caught.value.code == "E_STATE"


def test_safetensors_files_keep_every_bit(tmp_path: Path) -> None:
    state = random_bits(LAYOUT, np.random.default_rng(2))
    write_safetensors(tmp_path / "m.safetensors", LAYOUT, state, metadata={"note": "x"})
    layout, again = read_safetensors(tmp_path / "m.safetensors")
    assert layout.entries == LAYOUT.entries
    assert same_bits(state, again)
    again["scale"][...] = 1  # the arrays are ours to write
    with safe_open(tmp_path / "m.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "note": "x"}


def test_safetensors_shards_make_one_state(tmp_path: Path) -> None:
    a, b = Layout.of({"a": ("BF16", (2,))}), Layout.of({"b": ("F32", (3,))})
    write_safetensors(tmp_path / "1", a, a.new_state())
    write_safetensors(tmp_path / "2", b, b.new_state())
    layout, state = read_safetensors(tmp_path / "1", tmp_path / "2")
    assert list(state) == [e.name for e in layout.entries] == ["a", "b"]
    with pytest.raises(LocalFault, match="repeated"):
        read_safetensors(tmp_path / "1", tmp_path / "1")


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 64, (200).to_bytes(8, "little") + b"{}"])
def test_bad_safetensors_files_are_our_fault(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "m").write_bytes(content)
    with pytest.raises(LocalFault) as caught:
        read_safetensors(tmp_path / "m")
    assert caught.value.code == "E_STATE"


def test_unwritable_file_is_our_fault(tmp_path: Path) -> None:
    with pytest.raises(LocalFault) as caught:
        write_safetensors(tmp_path / "missing" / "m", LAYOUT, LAYOUT.new_state())
    assert caught.value.code == "E_STATE"
