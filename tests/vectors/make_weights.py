"""Writes the known-answer files of layouts, state roots, diffs, anchors and checkpoint chains.

Run from the root of the tree: ``python -m tests.vectors.make_weights``. The files are frozen: running it must leave
the tree as it is, unless the format was changed on purpose. (Compressed streams may differ between releases of zstd;
readers need not care, a diff is checked by what it decodes to.)
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from protocol import canonical
from protocol.envelope import Envelope
from protocol.identity import Identity
from protocol.messages import CheckpointHead, CheckpointManifest, ChunkRef
from protocol.weights.chunk import Method, chunk_output
from protocol.weights.diff import encode_anchor, encode_diff
from protocol.weights.layout import Layout, State, copy_state
from protocol.weights.state_root import leaf_list, root_of
from protocol.weights.streams import Coder

HERE = Path(__file__).parent
ORIGIN = "tests/vectors/make_weights.py"
LEARNER = Identity(hashlib.sha256(b"assay test vector: learner").digest())
OTHER = Identity(hashlib.sha256(b"assay test vector: somebody else").digest())
RUN_ID = "0123456789abcdef" * 2
NOW_MS = 1_800_000_000_000

SMALL = Layout.of({"bias": ("F32", (3,)), "embed": ("BF16", (4, 3)), "none": ("BF16", (0,)), "scale": ("F16", ())})


def write(folder: str, name: str, value: dict[str, Any]) -> None:
    (HERE / folder).mkdir(exist_ok=True)
    text = json.dumps({"origin": ORIGIN, **value}, indent=1, sort_keys=True)
    (HERE / folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def hexed(state: State) -> dict[str, str]:
    """Little-endian bytes of each tensor."""
    return {name: array.tobytes().hex() for name, array in state.items()}


def small_state() -> State:
    """+-0, a subnormal, the largest number, infinity, NaNs among ordinary values."""
    return {
        "bias": np.array([0x3F800000, 0x80000000, 0x7FC00001], "<u4"),
        "embed": np.array(
            [0x0000, 0x8000, 0x0001, 0x3F80, 0xBF80, 0x3C23, 0xBC24, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF], "<u2"
        ).reshape(4, 3),
        "none": np.zeros(0, "<u2"),
        "scale": np.array(0x3C00, "<u2"),
    }


def filled(layout: Layout) -> State:
    """Byte i of the canonical state is byte i % 32 of SHA-256 of the 8-byte little-endian integer i // 32."""
    blocks = -(-layout.nbytes // 32)
    data = b"".join(hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(blocks))
    return {
        e.name: np.frombuffer(data, e.words, count=e.nbytes // e.words.itemsize, offset=e.offset).reshape(e.shape)
        for e in layout.entries
    }


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


def _root(name: str, layout: Layout, state: State, how: dict[str, Any]) -> None:
    leaves = leaf_list(layout, state)
    write("state-root", name, {
        "layout": layout.to_bytes().decode(), **how, "leaves": [leaf.hex() for leaf in leaves],
        "root": root_of(layout, leaves),
    })


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


# -- chains ----------------------------------------------------------------------------------------------


def chains() -> None:
    chain = _Chain()
    states = [small_state()]
    for v in range(3):
        new = copy_state(states[-1])
        new["embed"][v] += 1
        new["bias"][v] ^= 1
        states.append(new)
    links = [chain.link(None, None, states[0], anchor=True)]
    for v in range(1, 4):
        links.append(chain.link(links[-1], states[v - 1], states[v], anchor=v == 2))
    roots = [link[0].state_root for link in links]
    envelopes = [link[1] for link in links]
    head = chain.head(links[3])

    def case(name: str, manifests: list[Envelope], given: Envelope, error: str | None, now_ms: int = NOW_MS) -> None:
        write("checkpoint", name if error is None else f"{name}_fail", {
            "learner_key": LEARNER.public_key.hex(), "run_id": RUN_ID, "layout": SMALL.to_bytes().decode(),
            "now_ms": now_ms, "head": given.to_dict(), "manifests": [m.to_dict() for m in manifests],
            "objects": chain.objects_of(manifests),
            **({"error": error} if error else {"state_root": roots[-1], "new": hexed(states[-1])}),
        })

    case("chain", envelopes, head, None)
    case("joiner", envelopes[2:], head, None)
    case("expired-head", envelopes, head, "E_EXPIRED", NOW_MS + 3_600_000)
    case("head-by-another", envelopes, chain.head(links[3], OTHER), "E_SIGNATURE")
    case("head-of-another-run", envelopes, chain.head(links[3], run_id="00" * 16), "E_WRONG_RUN")
    case("manifest-as-head", envelopes, envelopes[3], "E_PAYLOAD_TYPE")
    case("head-names-another", envelopes, chain.head((links[3][0], envelopes[2])), "E_CHECKPOINT_MIX")
    case("no-anchor", envelopes[1:2], chain.head(links[1]), "E_CHECKPOINT_GAP")
    case("gap", [envelopes[0], *envelopes[2:]], head, "E_CHECKPOINT_GAP")
    def lying(**about: int) -> dict[str, Any]:
        return {"diff": [{**ref.model_dump(), **about} for ref in links[3][0].diff]}

    for name, error, change in (
        ("another-parent", "E_CHECKPOINT_MIX", {"parent_sha256": "00" * 32}),
        ("another-base", "E_CHECKPOINT_MIX", {"base_root": "00" * 32}),
        ("another-layout", "E_CHECKPOINT_LAYOUT", {"layout_sha256": "00" * 32}),
        ("no-base", "E_CHECKPOINT_MANIFEST", {"base_root": None}),
        ("wrong-root", "E_STATE_ROOT", {"state_root": "00" * 32}),
        ("another-versions-diff", "E_STATE_ROOT", {"diff": [r.model_dump() for r in links[1][0].diff]}),
        ("lying-size", "E_OBJECT_HASH", lying(size_bytes=9)),
        ("lying-output", "E_CHUNK_LIMIT", lying(max_output_bytes=1)),
    ):
        bad = CheckpointManifest.model_validate({**links[3][0].model_dump(), **change})
        signed = bad.sign(LEARNER)
        case(name, [*envelopes[:3], signed], chain.head((bad, signed)), error)
    case("manifest-by-another", [*envelopes[:3], links[3][0].sign(OTHER)], head, "E_SIGNATURE")
    damaged = links[3][0].diff[0].sha256
    chain.objects[damaged] = chain.objects[damaged][:-1] + bytes([chain.objects[damaged][-1] ^ 1])
    case("one-bit", envelopes[2:], head, "E_OBJECT_HASH")


class _Chain:
    """Signs manifests with fixed times and keeps the objects they name."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def link(
        self, parent: tuple[CheckpointManifest, Envelope] | None, old: State | None, new: State, *, anchor: bool
    ) -> tuple[CheckpointManifest, Envelope]:
        version = 0 if parent is None else parent[0].version + 1
        manifest = CheckpointManifest(
            run_id=RUN_ID, version=version, parent_sha256=None if parent is None else parent[1].digest,
            layout_sha256=SMALL.sha256, state_root=root_of(SMALL, leaf_list(SMALL, new)),
            base_root=None if parent is None else parent[0].state_root,
            diff=[] if old is None else [self._put(c) for c in encode_diff(SMALL, old, new)],
            anchor=[self._put(c) for c in encode_anchor(SMALL, new)] if anchor else [],
            beacon=hashlib.sha256(b"beacon %d" % version).hexdigest(), published_at_ms=NOW_MS - 10_000 + version,
        )
        return manifest, manifest.sign(LEARNER)

    def _put(self, chunk: bytes) -> ChunkRef:
        sha256 = hashlib.sha256(chunk).hexdigest()
        self.objects[sha256] = chunk
        return ChunkRef(sha256=sha256, size_bytes=len(chunk), max_output_bytes=chunk_output(chunk))

    def head(
        self, link: tuple[CheckpointManifest, Envelope], identity: Identity = LEARNER, run_id: str = RUN_ID
    ) -> Envelope:
        return CheckpointHead(
            run_id=run_id, version=link[0].version, manifest_sha256=link[1].digest, issued_at_ms=NOW_MS - 1000,
            expires_at_ms=NOW_MS + 600_000,
        ).sign(identity)

    def objects_of(self, manifests: list[Envelope]) -> dict[str, str]:
        refs = [
            ref for envelope in manifests for m in [CheckpointManifest.from_payload(envelope.payload)]
            for ref in m.diff + m.anchor
        ]
        return {ref.sha256: self.objects[ref.sha256].hex() for ref in refs}


if __name__ == "__main__":
    layouts()
    state_roots()
    diffs()
    bad_diffs()
    chains()
