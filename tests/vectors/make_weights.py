"""Writes the known-answer files of layouts, state roots, diffs, anchors and checkpoint chains.

Run from the root of the tree: ``python -m tests.vectors.make_weights``. The files are frozen: running it must leave
the tree as it is, unless the format was changed on purpose. (Compressed streams may differ between releases of zstd;
readers need not care, a diff is checked by what it decodes to.)
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard

from protocol import canonical
from protocol.weights.chunk import Method, chunk_output
from protocol.weights.coder import Coder
from protocol.weights.diff import encode_anchor, encode_diff
from protocol.weights.layout import Layout, State, copy_state
from protocol.weights.state_root import HASH_NAMES, leaf_list, root_of
from tests.vectors.make_checkpoints import chains
from tests.vectors.make_states import SMALL, filled, hexed, small_state, write

# -- layout ----------------------------------------------------------------------------------------------


def layouts() -> None:
    cases = {
        "small": SMALL,
        "one": Layout.of({"w": ("BF16", (2, 2))}),
        "tied": Layout.of({"embed": ("BF16", (8, 2))}, {"lm_head": "embed"}),
        "empty": Layout.of({"nothing": ("F32", (0, 7))}),
    }
    for name, layout in cases.items():
        write("layout", name, {
            "layout": layout.to_bytes().decode(), "sha256": layout.sha256, "nbytes": layout.nbytes,
            "offsets": {e.name: e.offset for e in layout.entries},
        })

    def bad(name: str, error: str, **changes: Any) -> None:
        value = {"format": "assay.layout.v1", "aliases": {}, "tensors": [_tensor("a")], **changes}
        write("layout", f"{name}_fail", {"layout": canonical.encode(value).decode(), "error": error})

    bad("unsorted", "E_LAYOUT", tensors=[_tensor("b"), _tensor("a")])
    bad("repeated", "E_LAYOUT", tensors=[_tensor("a"), _tensor("a")])
    bad("too-large", "E_LAYOUT", tensors=[_tensor("a", shape=[2**39, 2**39])])
    bad("alias-of-nothing", "E_LAYOUT", aliases={"b": "c"})
    bad("alias-hides-a-tensor", "E_LAYOUT", aliases={"a": "a"})
    bad("unknown-dtype", "E_SCHEMA", tensors=[_tensor("a", dtype="I64")])
    bad("negative-side", "E_SCHEMA", tensors=[_tensor("a", shape=[-1])])
    bad("unknown-format", "E_SCHEMA", format="assay.layout.v2")
    bad("no-tensors", "E_SCHEMA", tensors=[])
    write("layout", "white-space_fail", {"layout": SMALL.to_bytes().decode() + "\n", "error": "E_JSON"})


def _tensor(name: str, dtype: str = "BF16", shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": [2] if shape is None else shape}


# -- state root ------------------------------------------------------------------------------------------


def state_roots() -> None:
    _root("small", SMALL, small_state(), {"state": hexed(small_state())})
    zeros = Layout.of({"nothing": ("F32", (0, 7))})
    _root("empty", zeros, zeros.new_state(), {"state": {"nothing": ""}})
    for name, words in (("one-leaf", 2**19), ("one-word-more", 2**19 + 1), ("five-leaves", 5 * 2**19 - 3)):
        layout = Layout.of({"a": ("BF16", (words - 1000,)), "b": ("BF16", (10, 100))})
        _root(name, layout, filled(layout), {"fill": filled.__doc__})
    _root("small-blake3", SMALL, small_state(), {"state": hexed(small_state()), "state_hash": "blake3"})
    _root("five-leaves-blake3", layout, filled(layout), {"fill": filled.__doc__, "state_hash": "blake3"})


def _root(name: str, layout: Layout, state: State, how: dict[str, Any]) -> None:
    hash_id = HASH_NAMES[how.get("state_hash", "sha-256")]
    leaves = leaf_list(layout, state, hash_id=hash_id)
    write("state-root", name, {
        "layout": layout.to_bytes().decode(), **how, "leaves": [leaf.hex() for leaf in leaves],
        "root": root_of(layout, leaves, hash_id),
    })


def leaf_lists() -> None:
    """Written here field by field, as the page has them."""
    layout = Layout.of({"a": ("BF16", (2**19 - 1000,)), "b": ("BF16", (11, 100))})
    for name, hash_id in HASH_NAMES.items():
        leaves = leaf_list(layout, filled(layout), hash_id=hash_id)
        root = root_of(layout, leaves, hash_id)

        def list_of(
            magic: bytes = b"ASWL", version: int = 1, of: int = int(hash_id), layout_sha256: str = layout.sha256,
            length: int = layout.nbytes, count: int = len(leaves), hashes: bytes = b"".join(leaves),
        ) -> bytes:
            about = struct.pack("<Q", length) + struct.pack("<I", count)
            return magic + bytes([version, of]) + bytes.fromhex(layout_sha256) + about + hashes

        def case(
            title: str, data: bytes, error: str | None, root: str = root, name: str = name,
            leaves: list[bytes] = leaves,
        ) -> None:
            write("leaf-list", title if error is None else f"{title}_fail", {
                "layout": layout.to_bytes().decode(), "list": data.hex(), "root": root,
                **({"error": error} if error else {"state_hash": name, "leaves": [leaf.hex() for leaf in leaves]}),
            })

        case(name, list_of(), None)
        if name != "sha-256":
            continue
        both = b"".join(leaves)
        case("magic", list_of(magic=b"ASWC"), "E_LEAVES")
        case("version", list_of(version=2), "E_LEAVES")
        case("unknown-hash", list_of(of=2), "E_LEAVES")
        case("another-hash", list_of(of=1), "E_LEAVES")
        case("another-layout", list_of(layout_sha256=SMALL.sha256), "E_LEAVES")
        case("another-length", list_of(length=layout.nbytes - 2), "E_LEAVES")
        case("another-count", list_of(count=1), "E_LEAVES")
        case("a-leaf-too-few", list_of(count=1, hashes=both[:32]), "E_LEAVES")
        case("truncated", list_of()[:-1], "E_LEAVES")
        case("trailing-byte", list_of() + b"\0", "E_LEAVES")
        case("swapped", list_of(hashes=both[32:] + both[:32]), "E_LEAVES")
        case("another-root", list_of(), "E_LEAVES", "00" * 32)
        case("empty", b"", "E_LEAVES")


# -- diffs and anchors -----------------------------------------------------------------------------------


def diffs() -> None:
    old = small_state()
    one = copy_state(old)
    one["embed"][1, 0] += 1
    zero = copy_state(old)
    zero["embed"][0, 0] = 0x8000
    nan = copy_state(old)
    nan["embed"][3, 1] ^= 1
    every = {name: ~array for name, array in old.items()}
    news = {"nothing": old, "one-ulp": one, "minus-zero": zero, "nan-payload": nan, "every-word": every}
    for name, new in news.items():
        _diff(name, SMALL, old, new)
    wide = Layout.of({"a": ("BF16", (3000,)), "b": ("F32", (500,))})
    rng = np.random.default_rng(1)
    before = {k: v.copy() for k, v in filled(wide).items()}
    after = copy_state(before)
    for array in after.values():
        where = rng.random(array.size) < 0.05
        array[where] += rng.choice([1, -1, 2], int(where.sum())).astype(array.dtype)
    _diff("sparse", wide, before, after)
    _diff("zstd", wide, before, after, entropy=Coder.ZSTD)
    _diff("gaps", wide, before, after, Method.GAP)
    _diff("classes", wide, before, after, Method.XC)
    _diff("classes-every-word", wide, before, {name: ~array for name, array in before.items()}, Method.XC)
    _diff("classes-zeros-and-nans", SMALL, old, every, Method.XC)
    chunks = encode_anchor(SMALL, old)
    write("weight-diff", "anchor", {
        "kind": "anchor", "layout": SMALL.to_bytes().decode(), "new": hexed(old), "chunks": [c.hex() for c in chunks],
        "max_output_bytes": [chunk_output(c) for c in chunks],
    })


def _diff(name: str, layout: Layout, old: State, new: State, method: Method | None = None,
          entropy: Coder = Coder.RANS) -> None:
    chunks = encode_diff(layout, old, new, method=method, entropy=entropy)
    write("weight-diff", name, {
        "kind": "diff", "layout": layout.to_bytes().decode(), "old": hexed(old), "new": hexed(new),
        "chunks": [c.hex() for c in chunks], "max_output_bytes": [chunk_output(c) for c in chunks],
    })


def bad_diffs() -> None:
    def chunk(body: bytes, *, magic: bytes = b"ASWC", version: int = 1, kind: int = 0, count: int = 1) -> bytes:
        return struct.pack("<4sBBH", magic, version, kind, count) + body

    def segment(start: int, length: int, method: int, width: int, planes: tuple[int, int], count: int) -> bytes:
        return struct.pack("<QQBBBBI", start, length, method, width, *planes, count)

    def stream(data: bytes, coder: int = 0) -> bytes:
        return struct.pack("<BI", coder, len(data)) + data

    def xc(
        classes: list[tuple[int, int, int]], gaps: bytes = b"\0\0", magnitudes: bytes = b"\0\0", away: bytes = b"\0",
        extras: bytes = b"", extras_coder: int = 0,
    ) -> bytes:
        """Two changes among four words; classes are (first key, population, changes)."""
        body, at = b"".join(struct.pack("<BII", *record) for record in classes), 0
        for _, _, count in classes:
            if count:
                body += stream(gaps[at : at + count]) + stream(magnitudes[at : at + count]) + stream(away)
                at += count
        return chunk(segment(0, 8, 3, 2, (len(classes), 0), 2) + body + stream(extras, extras_coder))

    pack = zstandard.ZstdCompressor().compress
    gap = segment(0, 8, 2, 2, (1, 1), 2)
    two = stream(b"\0\0")
    cases: dict[str, tuple[list[bytes], str]] = {
        "magic": ([chunk(segment(0, 8, 0, 2, (0, 0), 0), magic=b"ASWD")], "E_CHUNK"),
        "version": ([chunk(segment(0, 8, 0, 2, (0, 0), 0), version=2)], "E_CHUNK"),
        "wrong-kind": ([chunk(segment(0, 8, 0, 2, (0, 0), 0), kind=1)], "E_CHUNK"),
        "trailing-byte": ([chunk(segment(0, 8, 0, 2, (0, 0), 0) + b"\0")], "E_CHUNK"),
        "truncated": ([chunk(gap + two + two)[:-1]], "E_CHUNK"),
        "lying-segment-count": ([chunk(segment(0, 8, 0, 2, (0, 0), 0), count=2)], "E_CHUNK"),
        "hole": ([chunk(segment(2, 6, 0, 2, (0, 0), 0))], "E_CHUNK"),
        "short": ([chunk(segment(0, 6, 0, 2, (0, 0), 0))], "E_CHUNK"),
        "chunks-swapped": (
            [chunk(segment(4, 4, 0, 2, (0, 0), 0)), chunk(segment(0, 4, 0, 2, (0, 0), 0))], "E_CHUNK"
        ),
        "word-size": ([chunk(segment(0, 8, 0, 4, (0, 0), 0))], "E_CHUNK"),
        "too-many-changes": ([chunk(segment(0, 8, 2, 2, (0, 0), 5))], "E_CHUNK"),
        "gap-leads-out": ([chunk(gap + stream(b"\3\0") + two)], "E_CHUNK"),
        "step-of-zero": ([chunk(segment(0, 8, 2, 2, (0, 2), 1) + stream(b"\xff") * 2)], "E_CHUNK"),
        "unknown-coder": ([chunk(gap + stream(b"\0\0", 4) + two)], "E_CHUNK"),
        "rans-too-short": ([chunk(gap + stream(b"\0\1\0\0\1", 2) + two)], "E_CHUNK"),
        "rans-table": ([chunk(gap + stream(b"\1\1\0\0\0\1\0", 2) + two)], "E_CHUNK"),
        "rans-state": ([chunk(gap + stream(b"\0\1\xff\xff\0\0", 2) + two)], "E_CHUNK"),
        "rans-left-over": ([chunk(gap + stream(b"\0\1\0\0\1\0\0\0", 2) + two)], "E_CHUNK"),
        "zstd-bomb": ([chunk(gap + stream(pack(bytes(2**24)), 1) + two)], "E_CHUNK"),
        "zstd-two-frames": ([chunk(gap + stream(pack(bytes(2)) * 2, 1) + two)], "E_CHUNK"),
        "more-than-stated": ([chunk(segment(0, 8, 1, 2, (0, 0), 4))], "E_CHUNK_LIMIT"),
        "unknown-method": ([chunk(segment(0, 8, 4, 2, (0, 0), 1))], "E_CHUNK"),
        "fill-of-two-bytes": ([chunk(gap + stream(b"\0\0", 3) + two)], "E_CHUNK"),
        "classes-not-from-0": ([xc([(1, 4, 2)])], "E_CHUNK"),
        "classes-not-ascending": ([xc([(0, 2, 1), (0, 2, 1)])], "E_CHUNK"),
        "classes-too-many": ([chunk(segment(0, 8, 3, 2, (17, 0), 1) + bytes(9 * 17))], "E_CHUNK"),
        "classes-populations": ([xc([(0, 5, 2)])], "E_CHUNK"),
        "classes-counts": ([xc([(0, 4, 1)])], "E_CHUNK"),
        "classes-gap-leads-out": ([xc([(0, 3, 2), (128, 1, 0)], gaps=b"\1\1")], "E_CHUNK"),
        "classes-unknown-token": ([xc([(0, 4, 2)], gaps=b"\0\x80")], "E_CHUNK"),
        "classes-extras-missing": ([xc([(0, 4, 2)], gaps=b"\x10\0")], "E_CHUNK"),
        "classes-extras-padding": ([xc([(0, 4, 2)], gaps=b"\x10\0", extras=b"\4")], "E_CHUNK"),
        "classes-extras-coded": ([xc([(0, 4, 2)], extras_coder=3)], "E_CHUNK"),
        "classes-directions-padding": ([xc([(0, 4, 2)], away=b"\4")], "E_CHUNK"),
        "classes-step-of-zero": (
            [xc([(0, 4, 2)], magnitudes=b"\x3b\0", away=b"\1", extras=b"\xff\x0f")], "E_CHUNK"
        ),
        "classes-of-another-state": ([xc([(0, 2, 1), (128, 2, 1)])], "E_CHUNK"),
    }
    layout = Layout.of({"w": ("BF16", (2, 2))})
    for name, (chunks, error) in cases.items():
        write("weight-diff", f"{name}_fail", {
            "kind": "diff", "layout": layout.to_bytes().decode(), "old": {"w": "0000803f00800001"},
            "chunks": [c.hex() for c in chunks], "error": error,
            "max_output_bytes": [7 if error == "E_CHUNK_LIMIT" else 2**20] * len(chunks),
        })


if __name__ == "__main__":
    layouts()
    state_roots()
    leaf_lists()
    diffs()
    bad_diffs()
    chains()
