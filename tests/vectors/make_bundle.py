"""Writes the known answers of rollout bundles, commitments and Merkle trees.

The honest rollout comes from the second implementation in ``make_sampler.py``. The content of the good bundle, its
roots and the Merkle roots are computed here from the grammar in ``docs/spec/rollout-bundle.md`` with nothing of
``protocol``; the refused cases change one thing each.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections import Counter
from typing import Any

import zstandard

from tests.vectors.make_sampler import NO_CODE, RULES, SEED, changed, made_up_logits, rollout
from tests.vectors.write import write

LEASE = hashlib.sha256(b"assay test vector: lease").digest()
WIDTHS = {"u1": 1, "<u2": 2, "<u4": 4, "<u8": 8}


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def planes(values: list[int], width: int) -> bytes:
    return b"".join(bytes(value >> (8 * k) & 0xFF for value in values) for k in range(width))


def column(values: list[int], kind: str) -> bytes:
    return b"".join(value.to_bytes(WIDTHS[kind], "little") for value in values)


def packed(rollouts: list[dict[str, Any]]) -> dict[str, tuple[list[int], bytes]]:
    """Name -> (shape, bytes) of a bundle."""
    sample, length, finish, counts, starts, versions, modes = ([] for _ in range(7))
    head_lengths, ranks, tails, drawn_ids, drawn_codes, ids, steps = ([] for _ in range(7))
    for r in rollouts:
        sample.append(r["sample"])
        length.append(len(r["tokens"]))
        finish.append(r["finish"])
        counts.append(len(r["segments"]))
        for start, version, mode in r["segments"]:
            starts.append(start)
            versions.append(version)
            modes.append(mode)
        at = 0
        for t, token in enumerate(r["tokens"]):
            head = r["head_ids"][at : at + r["head_lengths"][t]]
            codes = r["head_codes"][at : at + r["head_lengths"][t]]
            at += len(head)
            head_lengths.append(len(head))
            tails.append(r["tail_codes"][t])
            ids += head
            steps += [(b - a) % 2**16 for a, b in zip([0, *codes], codes, strict=False)]
            ranks.append(head.index(token) if token in head else 255)
            if token not in head:
                drawn_ids.append(token)
                drawn_codes.append(r["token_codes"][t])
    frequency = Counter(ids)
    dictionary = sorted(frequency, key=lambda i: (-frequency[i], i))
    place = {i: n for n, i in enumerate(dictionary)}
    gaps = [(b - a) % 2**32 for a, b in zip([0, *dictionary], dictionary, strict=False)]
    return {
        "sample": ([len(sample)], column(sample, "<u4")), "length": ([len(length)], column(length, "<u4")),
        "finish": ([len(finish)], bytes(finish)), "segments": ([len(counts)], column(counts, "<u2")),
        "segment_start": ([len(starts)], column(starts, "<u4")),
        "segment_version": ([len(starts)], column(versions, "<u8")), "segment_mode": ([len(starts)], bytes(modes)),
        "head_length": ([len(ranks)], bytes(head_lengths)), "rank": ([len(ranks)], bytes(ranks)),
        "tail_code": ([2, len(ranks)], planes(tails, 2)), "drawn_id": ([4, len(drawn_ids)], planes(drawn_ids, 4)),
        "drawn_code": ([2, len(drawn_ids)], planes(drawn_codes, 2)),
        "dictionary": ([4, len(gaps)], planes(gaps, 4)),
        "head_id": ([4, len(ids)], planes([place[i] for i in ids], 4)), "head_code": ([2, len(ids)], planes(steps, 2)),
    } | routes_of(rollouts)


def routes_of(rollouts: list[dict[str, Any]]) -> dict[str, tuple[list[int], bytes]]:
    """The column of expert choices, token by token, layer by layer; none for a dense model."""
    if not rollouts or "routes" not in rollouts[0]:
        return {}
    rows = [token for r in rollouts for token in r["routes"]]
    shape = [len(rows), len(rows[0]), len(rows[0][0])]
    return {"routes": (shape, bytes(expert for token in rows for layer in token for expert in layer))}


DTYPES = {"sample": "U32", "length": "U32", "segments": "U16", "segment_start": "U32", "segment_version": "U64"}


def header_of(columns: dict[str, tuple[list[int], bytes]]) -> dict[str, Any]:
    entries: dict[str, Any] = {"__metadata__": {"format": "assay.rollout-bundle.v1"}}
    end = 0
    for name, (shape, data) in columns.items():
        entries[name] = {"dtype": DTYPES.get(name, "U8"), "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    return entries


def content(
    columns: dict[str, tuple[list[int], bytes]], header: dict[str, Any] | None = None, extra: int = 0
) -> bytes:
    text = json.dumps(header or header_of(columns), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8 + extra)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, data in columns.values())


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(data)


# -- Merkle ------------------------------------------------------------------------------------------------


def tree(leaves: list[bytes]) -> bytes:
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return sha(b"\x01", tree(leaves[:split]), tree(leaves[split:]))


def counted(leaves: list[bytes]) -> bytes:
    return sha(b"\x02", struct.pack("<Q", len(leaves)), tree(leaves))


def path(leaves: list[bytes], index: int) -> list[bytes]:
    if len(leaves) == 1:
        return []
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    if index < split:
        return [*path(leaves[:split], index), tree(leaves[split:])]
    return [*path(leaves[split:], index - split), tree(leaves[:split])]


def leaves_of(r: dict[str, Any]) -> list[bytes]:
    unit = LEASE + struct.pack("<I", r["sample"])
    segments = b"".join(struct.pack("<IQB", *segment) for segment in r["segments"])
    about = struct.pack("<IIBI", r["sample"], len(r["tokens"]), r["finish"], len(r["segments"]))
    leaves = [sha(b"\x00", unit, struct.pack("<I", 0), about, segments)]
    at = 0
    for first in range(0, len(r["tokens"]), 32):
        part = slice(first, first + 32)
        lengths = r["head_lengths"][part]
        entries = slice(at, at + sum(lengths))
        at = entries.stop
        leaves.append(sha(
            b"\x00", unit, struct.pack("<I", len(leaves)), bytes([len(lengths)]), column(r["tokens"][part], "<u4"),
            column(r["token_codes"][part], "<u2"), column(r["tail_codes"][part], "<u2"), bytes(lengths),
            column(r["head_ids"][entries], "<u4"), column(r["head_codes"][entries], "<u2"),
            routes_of([r | {"routes": r["routes"][part]}])["routes"][1] if "routes" in r else b"",
        ))
    return leaves


def two_rollouts() -> list[dict[str, Any]]:
    first = rollout(made_up_logits(40), SEED, RULES) | {"segments": [[0, 1, 0], [16, 2, 0], [32, 4, 1]]}
    return [first, rollout(made_up_logits(5), bytes(32), RULES) | {"sample": 3, "finish": 0}]


def make() -> None:
    rollouts = two_rollouts()
    first = rollouts[0]
    columns = packed(rollouts)
    good = content(columns)
    roots = [counted(leaves_of(r)) for r in rollouts]
    write("rollout-bundle", "two-rollouts", {
        "about": "two rollouts, three segments, head and tail draws", "rules": RULES, "rollouts": rollouts,
        "content_sha256": sha(good).hex(), "data": base64.b64encode(frame(good)).decode(), "lease_sha256": LEASE.hex(),
        "rollout_roots": [root.hex() for root in roots],
        "bundle_root": counted([sha(b"\x00", root) for root in roots]).hex(),
    })
    make_routes(rollouts)
    make_bad_frames(good)
    make_bad_headers(columns)
    make_bad_columns(first, columns)
    make_merkle()


def made_up_routes(tokens: int, experts: int = 8, layers: int = 3) -> list[list[list[int]]]:
    """Two ascending experts of each layer."""
    choices = [[a, b] for a in range(experts) for b in range(a + 1, experts)]
    return [[choices[(7 * t + 5 * layer) % len(choices)] for layer in range(layers)] for t in range(tokens)]


def make_routes(rollouts: list[dict[str, Any]]) -> None:
    """Bundles of a mixture of experts: a good one, and what is refused."""
    rules = {**RULES, "routes": {"layers": 3, "experts": 8, "per_token": 2, "max_margin_micro": 1000}}
    routed = [r | {"routes": made_up_routes(len(r["tokens"]))} for r in rollouts]
    columns = packed(routed)
    good = content(columns)
    roots = [counted(leaves_of(r)) for r in routed]
    write("rollout-bundle", "with-routes", {
        "about": "the two rollouts with the experts of three layers", "rules": rules, "rollouts": routed,
        "content_sha256": sha(good).hex(), "data": base64.b64encode(frame(good)).decode(), "lease_sha256": LEASE.hex(),
        "rollout_roots": [root.hex() for root in roots],
        "bundle_root": counted([sha(b"\x00", root) for root in roots]).hex(),
    })
    shape, data = columns["routes"]

    def poked(value: bytes, shape: list[int] = shape) -> bytes:
        return frame(content({**columns, "routes": (shape, value)}))

    for name, error, bad in (
        ("routes-missing", "E_BUNDLE_ROUTES", frame(content(packed(rollouts)))),
        ("routes-expert-past-the-last", "E_BUNDLE_ROUTES", poked(data[:1] + bytes([8]) + data[2:])),
        ("routes-expert-twice", "E_BUNDLE_ROUTES", poked(data[:1] + data[:1] + data[2:])),
        ("routes-descending", "E_BUNDLE_ROUTES", poked(bytes([data[1], data[0]]) + data[2:])),
        ("routes-of-two-layers", "E_BUNDLE_ROUTES", poked(data[: len(data) // 3 * 2], [shape[0], 2, 2])),
        ("routes-of-three-experts", "E_BUNDLE_ROUTES", poked(data, [shape[0], 2, 3])),
        ("routes-short", "E_BUNDLE_HEADER", poked(data[:-6], [shape[0] - 1, 3, 2])),
        ("routes-flat", "E_BUNDLE_HEADER", poked(data, [len(data)])),
        ("routes-of-no-layers", "E_BUNDLE_HEADER", poked(b"", [shape[0], 0, 2])),
    ):
        refuse(name, error, bad, rules=rules)
    refuse("routes-not-asked-for", "E_BUNDLE_ROUTES", frame(good))


def refuse(name: str, error: str, data: bytes, **more: Any) -> None:
    write("rollout-bundle", f"{name}_fail", {
        "rules": RULES, "data": base64.b64encode(data).decode(), "error": error, "max_bytes": 2**20, **more,
    })


def make_bad_frames(good: bytes) -> None:
    data = frame(good)
    refuse("empty", "E_BUNDLE_FRAME", b"")
    refuse("not-zstd", "E_BUNDLE_FRAME", good)
    refuse("truncated", "E_BUNDLE_FRAME", data[:-5])
    refuse("trailing-byte", "E_BUNDLE_FRAME", data + b"\0")
    refuse("two-frames", "E_BUNDLE_FRAME", data + data)
    refuse("no-size", "E_BUNDLE_FRAME", zstandard.ZstdCompressor(write_content_size=False).compress(good))
    refuse("bomb", "E_TOO_LARGE", frame(bytes(2**24)))
    refuse("over-the-limit", "E_TOO_LARGE", data, max_bytes=100)


def make_bad_headers(columns: dict[str, tuple[list[int], bytes]]) -> None:
    header = header_of(columns)
    good = content(columns)

    def edited(name: str, **change: Any) -> bytes:
        return frame(content(columns, {**header, name: {**header[name], **change}}))

    refuse("header-length-of-64-bits", "E_BUNDLE_HEADER", frame(b"\xff" * 8 + good[8:]))
    refuse("header-not-json", "E_BUNDLE_HEADER", frame(struct.pack("<Q", 8) + b"{{{{{{{{"))
    refuse("header-padded-twice", "E_BUNDLE_HEADER", frame(content(columns, header, extra=8)))
    refuse("header-lies-about-tokens", "E_BUNDLE_HEADER", edited("rank", shape=[10**12]))
    refuse("header-negative-shape", "E_BUNDLE_HEADER", edited("rank", shape=[-1]))
    refuse("header-float-dtype", "E_BUNDLE_HEADER", edited("head_code", dtype="F16"))
    refuse("header-overlap", "E_BUNDLE_HEADER", edited("length", data_offsets=[0, 8]))
    refuse("header-extra-column", "E_BUNDLE_HEADER", frame(content(columns, {**header, "extra": header["rank"]})))
    refuse("header-missing-column", "E_BUNDLE_HEADER", frame(
        content(columns, {k: v for k, v in header.items() if k != "rank"})))
    refuse("header-reordered", "E_BUNDLE_HEADER", frame(content(columns, dict(reversed(header.items())))))
    refuse("content-trailing-byte", "E_BUNDLE_HEADER", frame(good + b"\0"))
    refuse("content-short", "E_BUNDLE_HEADER", frame(good[:-1]))


def make_bad_columns(first: dict[str, Any], columns: dict[str, tuple[list[int], bytes]]) -> None:
    def one(**change: Any) -> bytes:
        return frame(content(packed([first | change])))

    def poked(name: str, index: int, value: int) -> bytes:
        shape, data = columns[name]
        edited = bytearray(data)
        edited[index] = value
        return frame(content({**columns, name: (shape, bytes(edited))}))

    refuse("no-tokens", "E_BUNDLE_COLUMNS", frame(content(packed([first, first | {
        name: [] for name in ("tokens", "head_lengths", "head_ids", "head_codes", "tail_codes", "token_codes")}]))))
    refuse("no-rollouts", "E_BUNDLE_COLUMNS", frame(content(packed([]))))
    refuse("too-many-tokens", "E_BUNDLE_COLUMNS", one(), rules={**RULES, "max_new_tokens": 39})
    refuse("head-over-the-rules", "E_BUNDLE_COLUMNS", one(), rules={**RULES, "head_size": 3})
    refuse("lengths-do-not-add-up", "E_BUNDLE_COLUMNS", poked("length", 4, 4))
    refuse("head-of-nothing", "E_BUNDLE_COLUMNS", poked("head_length", 3, 0))
    refuse("rank-past-its-head", "E_BUNDLE_COLUMNS", poked("rank", 0, 200))
    refuse("draw-without-record", "E_BUNDLE_COLUMNS", poked("rank", next(
        t for t, rank in enumerate(columns["rank"][1]) if rank != 255), 255))
    refuse("finish-unknown", "E_BUNDLE_COLUMNS", poked("finish", 0, 7))
    refuse("id-past-the-dictionary", "E_BUNDLE_COLUMNS", poked("head_id", 0, 99))
    refuse("segments-start-late", "E_SEGMENTS", one(segments=[[16, 1, 0]]))
    refuse("segments-none", "E_SEGMENTS", one(segments=[]))
    refuse("segments-backwards", "E_SEGMENTS", one(segments=[[0, 2, 0], [16, 1, 0]]))
    refuse("segments-same-version", "E_SEGMENTS", one(segments=[[0, 2, 0], [16, 2, 0]]))
    refuse("segments-off-the-grid", "E_SEGMENTS", one(segments=[[0, 1, 0], [17, 2, 0]]))
    refuse("segments-past-the-end", "E_SEGMENTS", one(segments=[[0, 1, 0], [48, 2, 0]]))
    refuse("segments-more-than-fit", "E_SEGMENTS", one(segments=[[0, v, 0] for v in range(4)]))
    refuse("segments-mode-unknown", "E_SEGMENTS", one(segments=[[0, 1, 2]]))
    refuse("segments-version-of-49-bits", "E_SEGMENTS", one(segments=[[0, 2**48, 0]]))
    refuse("dictionary-out-of-order", "E_BUNDLE_CANONICAL", poked("dictionary", 0, 15))
    drawn = next(t for t, code in enumerate(first["token_codes"]) if code != NO_CODE)
    inside = first["head_ids"][sum(first["head_lengths"][:drawn])]
    disguised = packed([changed(first)])
    shape, data = disguised["drawn_id"]
    disguised["drawn_id"] = (shape, bytes([inside]) + data[1:])
    refuse("head-token-as-tail-draw", "E_BUNDLE_CANONICAL", frame(content(disguised)))


def make_merkle() -> None:
    leaves = [sha(b"\x00", bytes([n])) for n in range(7)]
    write("merkle", "roots", {
        "about": "leaf n is SHA-256(0x00 | byte n); roots and counted roots of the first 1 to 7 leaves",
        "leaves": [leaf.hex() for leaf in leaves], "roots": [tree(leaves[:n]).hex() for n in range(1, 8)],
        "counted_roots": [counted(leaves[:n]).hex() for n in range(1, 8)],
        "proofs": [[p.hex() for p in path(leaves, n)] for n in range(7)],
    })
    root, proof = tree(leaves), path(leaves, 4)
    node = sha(b"\x01", leaves[4], leaves[5])
    for name, leaf, index, count, siblings in (
        ("another-leaf", leaves[3], 4, 7, proof), ("another-place", leaves[4], 5, 7, proof),
        ("index-past-the-end", leaves[4], 7, 7, proof), ("negative-index", leaves[4], -1, 7, proof),
        ("doubled-last-leaf", leaves[6], 7, 8, [leaves[6], *path(leaves, 6)]),
        ("node-as-leaf", node, 2, 7, proof[1:]), ("wrong-count", leaves[6], 6, 8, path(leaves, 6)),
        ("short-proof", leaves[4], 4, 7, proof[:-1]), ("long-proof", leaves[4], 4, 7, [*proof, root]),
        ("short-sibling", leaves[4], 4, 7, [proof[0][:-1], *proof[1:]]),
    ):
        write("merkle", f"{name}_fail", {
            "leaf": leaf.hex(), "index": index, "count": count, "proof": [p.hex() for p in siblings],
            "root": root.hex(), "error": "E_MERKLE_PROOF",
        })
