"""Writes the known answers of packed bundles, with a second coder written from ``docs/spec/packed-bundle.md``.

Plain Python integers and dictionaries, nothing of ``protocol``. The refused cases change one thing each.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from fractions import Fraction
from typing import Any

from tests.vectors.make_bundle import two_rollouts
from tests.vectors.make_sampler import NO_CODE, RULES
from tests.vectors.write import write

M32 = 2**32 - 1


def logistic() -> tuple[dict[int, int], list[int]]:
    """exp(-d / 256) by its series, in fractions cut to 300 bits."""
    x, term, total = Fraction(1, 256), Fraction(1), Fraction(0)
    for n in range(1, 40):
        total, term = total + term, term * x / n
    unit = 2**300
    ratio, e, squash = int(unit / total), unit, {}
    for d in range(2048):
        low = 65_536 * e // (unit + e)
        squash[d], squash[-d] = 65_536 - low, low
        e = e * ratio // unit
    stretch, d = [], -2047
    for j in range(4096):
        while d < 2047 and squash[d] < 16 * j + 8:
            d += 1
        stretch.append(d)
    return squash, stretch


SQUASH, STRETCH = logistic()


def mix(a: int, b: int = 0, c: int = 0) -> int:
    h = (a * 0x9E3779B1 + b * 0x85EBCA6B + c * 0xC2B2AE35 + 0x165667B1) & M32
    h = (h ^ h >> 15) * 0x2C1B3C6D & M32
    return h ^ h >> 13


def weight_class(count: int) -> int:
    return count if count < 4 else count.bit_length() + 1


def size_class(value: int) -> int:
    return value if value < 2 else 2 * value.bit_length() + (value >> (value.bit_length() - 2) & 1)


class Writer:
    """The coder of the page, writing only."""

    def __init__(self, entries: int):
        self.low, self.high, self.out = 0, M32, bytearray()
        self.slots = 2 ** min(max((8 * entries).bit_length(), 12), 20)
        self.table: dict[tuple[int, int], list[int]] = defaultdict(lambda: [2**21, 0])
        self.weights: dict[tuple[int, int, int], int] = defaultdict(lambda: 20_000)

    def bit(self, places: list[int], weight_set: int, bit: int) -> None:
        slots = [self.table[c, place] for c, place in enumerate(places)]
        logits = [STRETCH[probability >> 10] for probability, _ in slots]
        keys = [(weight_set, c, weight_class(count)) for c, (_, count) in enumerate(slots)]
        dot = sum(self.weights[key] * logit for key, logit in zip(keys, logits, strict=True)) >> 16
        p = SQUASH[min(max(dot, -2047), 2047)]
        split = self.low + ((self.high - self.low) * p >> 16)
        self.low, self.high = (self.low, split) if bit else (split + 1, self.high)
        while self.low >> 24 == self.high >> 24:
            self.out.append(self.low >> 24)
            self.low, self.high = self.low << 8 & M32, (self.high << 8 | 255) & M32
        for slot, key, logit in zip(slots, keys, logits, strict=True):
            self.weights[key] += (logit * 14 * (65_536 * bit - p) + 131_072) >> 18
            slot[0] += ((2**22 - 1 if bit else 0) - slot[0]) * (131_072 // (2 * slot[1] + 3)) >> 16
            slot[1] = min(slot[1] + 1, 255)

    def lines(self, contexts: list[int], path: int, salt: int, unary: int) -> list[int]:
        step = (path * 0x9E3779B1 + salt * 0x85EBCA6B + unary) & M32
        hashes = [(context ^ step) * 0x2C1B3C6D & M32 for context in contexts]
        return [((h ^ h >> 15) & ~15) % self.slots for h in hashes]

    def bits(self, contexts: list[int], first: int, text: str, salt: int, same_set: bool = False) -> None:
        for k, bit in enumerate(text):
            if k % 4 == 0:
                lines = self.lines(contexts, int("1" + text[:k], 2), salt, 0)
            node = int("1" + text[k - k % 4 : k], 2)
            self.bit([line + node for line in lines], first if same_set else first + k, int(bit))

    def fixed(self, contexts: list[int], first: int, width: int, value: int) -> None:
        self.bits(contexts, first, f"{value:0{width}b}", 77)

    def gamma(self, contexts: list[int], first: int, widest: int, value: int) -> None:
        text = f"{value + 1:b}"[1:]
        unary = "1" * len(text) + "0" * (len(text) < widest)
        for k, bit in enumerate(unary):
            if k % 16 == 0:
                lines = self.lines(contexts, 1, k, 1)
            self.bit([line + k % 16 for line in lines], first + min(k, 15), int(bit))
        self.bits(contexts, first + 16 + min(len(text), 15), text, len(text), same_set=True)

    def done(self) -> bytes:
        return bytes(self.out) + bytes([(self.low >> 24) + 1])


def columns(rollouts: list[dict[str, Any]]) -> list[list[int]]:
    samples = [r["sample"] for r in rollouts]
    segments = [segment for r in rollouts for segment in r["segments"]]
    return [
        [(b - a) % 2**32 for a, b in zip([0, *samples], samples, strict=False)],
        [len(r["tokens"]) for r in rollouts], [r["finish"] for r in rollouts], [len(r["segments"]) for r in rollouts],
        *([segment[i] for segment in segments] for i in range(3)), [n for r in rollouts for n in r["head_lengths"]],
    ]


def write_token(out: Writer, width: int, r: dict[str, Any], t: int, at: int, token: int, pair: int) -> None:
    ids, codes = (r[name][at : at + r["head_lengths"][t]] for name in ("head_ids", "head_codes"))
    before, two_before, code, step = 0, 0, 0, 0
    for i, (id_, new) in enumerate(zip(ids, codes, strict=True)):
        place = i if i < 4 else 3 + i // 4
        out.fixed([
            mix(1), mix(2, token), mix(3, before), mix(4, token, place), mix(5, token, before),
            mix(mix(6, pair, before), two_before),
        ], 0, width, id_)
        out.gamma([
            mix(10, i), mix(11, place, size_class(step)), mix(12, place, size_class(code)), mix(13, token, id_),
            mix(mix(14, pair, id_), before),
        ], 32, 16, (new - code) % 2**16)
        before, two_before, step, code = id_ + 1, before, (new - code) % 2**16, new
    tail, drawn = r["tail_codes"][t], r["token_codes"][t] != NO_CODE
    first, last = size_class(codes[0]), size_class(codes[-1])
    out.fixed([mix(20), mix(21, last), mix(22, last, first), mix(23, pair, codes[-1])], 64, 16, tail)
    rank = 0 if drawn else ids.index(r["tokens"][t]) + 1
    out.gamma([mix(30), mix(31, first), mix(32, size_class(tail))], 80, 8, rank)
    if drawn:
        out.fixed([mix(40), mix(41, token)], 112, width, r["tokens"][t])
        out.fixed([mix(40), mix(42, size_class(tail))], 144, 16, r["token_codes"][t])


def stream(rollouts: list[dict[str, Any]], width: int, end: int) -> bytes:
    out = Writer(sum(len(r["head_ids"]) for r in rollouts))
    for kind, column in enumerate(columns(rollouts)):
        before = 0
        for value in column:
            out.gamma([mix(50, kind), mix(51, kind, before)], 160, 48, value)
            before = value
    for r in rollouts:
        at, token, pair = 0, 0, 0
        for t, drawn in enumerate(r["tokens"]):
            write_token(out, width, r, t, at, token, pair)
            at += r["head_lengths"][t]
            token, pair = drawn + 1, mix(token, drawn + 1)
    out.fixed([mix(60)], 0, 16, end)
    return out.done()


def count(value: int) -> bytes:
    return bytes([value & 127 | 128]) + count(value >> 7) if value > 127 else bytes([value])


def packed(rollouts: list[dict[str, Any]], /, end: int = 0x5A5A, **counts: int) -> bytes:
    width = max(max(r["head_ids"] + r["tokens"]) for r in rollouts).bit_length()
    numbers = {
        "rollouts": len(rollouts), "segments": sum(len(r["segments"]) for r in rollouts),
        "tokens": sum(len(r["tokens"]) for r in rollouts), "entries": sum(len(r["head_ids"]) for r in rollouts),
    } | counts
    return b"ASRB\x01" + bytes([width]) + b"".join(map(count, numbers.values())) + stream(rollouts, width, end)


def refuse(name: str, error: str, data: bytes, **more: Any) -> None:
    write("packed-bundle", f"{name}_fail", {
        "rules": RULES, "data": base64.b64encode(data).decode(), "error": error, "max_bytes": 2**20, **more,
    })


def make() -> None:
    rollouts = two_rollouts()
    good = packed(rollouts)
    write("packed-bundle", "two-rollouts", {
        "about": "two rollouts, three segments, head and tail draws", "rules": RULES, "rollouts": rollouts,
        "data": base64.b64encode(good).decode(),
    })
    first = rollouts[0]
    refuse("magic-only", "E_BUNDLE_PACKED", good[:4])
    refuse("unknown-kind", "E_BUNDLE_PACKED", good[:4] + b"\2" + good[5:])
    refuse("width-of-33", "E_BUNDLE_PACKED", good[:5] + b"\x21" + good[6:])
    refuse("count-of-six-bytes", "E_BUNDLE_PACKED", good[:6] + b"\x82\x80\x80\x80\x80\x00" + good[7:])
    refuse("count-with-a-needless-byte", "E_BUNDLE_PACKED", good[:6] + b"\x82\x00" + good[7:])
    refuse("trailing-byte", "E_BUNDLE_PACKED", good + b"\0")
    refuse("another-end", "E_BUNDLE_PACKED", packed(rollouts, end=0x5A5B))
    refuse("truncated", "E_BUNDLE_COLUMNS", good[:-20])
    refuse("counts-only", "E_BUNDLE_PACKED", good[:6] + b"\2\4")
    refuse("over-the-limit", "E_TOO_LARGE", good, max_bytes=100)
    refuse("decodes-to-too-much", "E_TOO_LARGE", good, max_bytes=16 * 45 + 6 * 180 - 1)
    refuse("no-rollouts", "E_BUNDLE_COLUMNS", packed(rollouts, rollouts=0))
    refuse("rollouts-past-the-limit", "E_BUNDLE_COLUMNS", packed(rollouts, rollouts=1025))
    refuse("tokens-past-the-rules", "E_BUNDLE_COLUMNS", packed(rollouts), rules={**RULES, "max_new_tokens": 22})
    refuse("entries-past-the-rules", "E_BUNDLE_COLUMNS", packed(rollouts), rules={**RULES, "head_size": 3})
    refuse("rollout-too-long", "E_BUNDLE_COLUMNS", packed(rollouts), rules={**RULES, "max_new_tokens": 39})
    refuse("a-token-too-few", "E_BUNDLE_COLUMNS", packed(rollouts, tokens=44))
    refuse("finish-unknown", "E_BUNDLE_COLUMNS", packed([first | {"finish": 7}]))
    refuse("segments-start-late", "E_SEGMENTS", packed([first | {"segments": [[16, 1, 0]]}]))
    refuse("segments-off-the-grid", "E_SEGMENTS", packed([first | {"segments": [[0, 1, 0], [17, 2, 0]]}]))
    drawn = next(t for t, code in enumerate(first["token_codes"]) if code != NO_CODE)
    inside = first["head_ids"][sum(first["head_lengths"][:drawn])]
    tokens = [inside if t == drawn else token for t, token in enumerate(first["tokens"])]
    refuse("head-token-as-tail-draw", "E_BUNDLE_CANONICAL", packed([first | {"tokens": tokens}]))
