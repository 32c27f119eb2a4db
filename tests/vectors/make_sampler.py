"""Writes the known answers of the sampler from a second implementation: plain Python integers and floats.

It follows ``docs/spec/sampler.md`` and imports nothing of ``protocol``, so that the files are evidence and not an echo.
"""

from __future__ import annotations

import hashlib
import math
import struct
from decimal import Decimal, getcontext
from typing import Any

from tests.vectors.write import write

MASK = 2**64 - 1
NO_CODE = EMPTY_TAIL = 0xFFFF
TAIL_ID = 0xFFFFFFFF
SEED = bytes(range(32))
RULES: dict[str, Any] = {
    "temperature_milli": 1000, "steps_per_nat": 1024, "head_size": 4, "head_floor": 1, "head_max_code": 6000,
    "swap_grid": 16, "max_new_tokens": 64, "eos_token_ids": [0], "vocab_size": 16,
}


def mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def uniform(seed: bytes, position: int, domain: int, token: int) -> float:
    k0, k1, k2, k3 = (int.from_bytes(seed[i : i + 8], "little") for i in (0, 8, 16, 24))
    row = k2 ^ mix64(k1 ^ mix64((k0 + (2 * position + domain) * 0x9E3779B97F4A7C15) & MASK))
    h = mix64(k3 ^ mix64((row + token * 0xD1B54A32D192ED03) & MASK))
    return (2 * (h >> 12) + 1) * 2.0**-53


def exponential(u: float) -> float:
    m, exponent = math.frexp(u)
    k = -exponent
    if m < 0.7071067811865476:
        m, k = m + m, k + 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 2.0 / 21.0
    for i in range(9, -1, -1):
        p = p * z + 2.0 / (2 * i + 1)
    return k * 0.6931471805599453 - s * p


def weight(code: int, steps: int) -> int:
    getcontext().prec = 60
    return 0 if code == EMPTY_TAIL else max(1, int(Decimal(2**48) * (-Decimal(code) / steps).exp()))


def to_code(logprob: float, steps: int) -> int:
    return min(max(round(-logprob * steps), 0), 65_534)


def head_of(logits: list[float], rules: dict[str, Any]) -> dict[str, Any]:
    top = max(logits)
    total = math.fsum(math.exp(x - top) for x in logits)
    logp = [x - top - math.log(total) for x in logits]
    ids: list[int] = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: rules["head_size"]]
    codes = {i: to_code(logp[i], rules["steps_per_nat"]) for i in ids}
    ids.sort(key=lambda i: (codes[i], i))
    length = max(min(rules["head_floor"], len(ids)), sum(codes[i] <= rules["head_max_code"] for i in ids))
    ids = ids[:length]
    tail = math.fsum(math.exp(logits[i] - top) for i in range(len(logits)) if i not in ids)
    tail_code = to_code(math.log(tail) - math.log(total), rules["steps_per_nat"]) if tail > 0 else EMPTY_TAIL
    return {"ids": ids, "codes": [codes[i] for i in ids], "tail_code": tail_code}


def winner(head: dict[str, Any], seed: bytes, position: int, steps: int) -> int:
    entries: list[tuple[int, int]] = [*zip(head["ids"], head["codes"], strict=True), (TAIL_ID, head["tail_code"])]
    scores = [
        (exponential(uniform(seed, position, 0, i)) / weight(c, steps), i) for i, c in entries if weight(c, steps)
    ]
    return min(scores)[1]


def tail_winner(logits: list[float], ids: list[int], seed: bytes, position: int) -> int:
    top = max(logits)
    scores = [
        (exponential(uniform(seed, position, 1, i)) / math.exp(x - top), i)
        for i, x in enumerate(logits) if i not in ids and x > -math.inf
    ]
    return min(scores)[1]


def rollout(logits: list[list[float]], seed: bytes, rules: dict[str, Any]) -> dict[str, Any]:
    """An honest rollout as columns."""
    columns: dict[str, Any] = {name: [] for name in (
        "tokens", "head_lengths", "head_ids", "head_codes", "tail_codes", "token_codes"
    )}
    for position, row in enumerate(logits):
        head = head_of(row, rules)
        token, code = winner(head, seed, position, rules["steps_per_nat"]), NO_CODE
        if token == TAIL_ID:
            token = tail_winner(row, head["ids"], seed, position)
            top = max(row)
            total = math.log(math.fsum(math.exp(x - top) for x in row))
            code = to_code(row[token] - top - total, rules["steps_per_nat"])
        columns["tokens"].append(token)
        columns["head_lengths"].append(len(head["ids"]))
        columns["head_ids"] += head["ids"]
        columns["head_codes"] += head["codes"]
        columns["tail_codes"].append(head["tail_code"])
        columns["token_codes"].append(code)
    return {**columns, "sample": 0, "segments": [[0, 1, 0]], "finish": 1}


def made_up_logits(length: int, vocabulary: int = 16) -> list[list[float]]:
    """Exact in float32, so that every implementation reads the same numbers."""
    return [
        [-math.floor(6.0 * uniform(b"assay vectors, made-up logits...", t, 0, i) * 64) / 64 for i in range(vocabulary)]
        for t in range(length)
    ]


def changed(base: dict[str, Any], **columns: dict[int, int]) -> dict[str, Any]:
    result = dict(base)
    for name, change in columns.items():
        result[name] = list(base[name])
        for index, value in change.items():
            result[name][index] = value
    return result


def make() -> None:
    make_seeds()
    make_parts()
    base = rollout(made_up_logits(40), SEED, RULES)
    write("sampler", "rollout", {
        "about": "an honest rollout of 40 tokens with head and tail draws", "kind": "replay", "rules": RULES,
        "seed": SEED.hex(), "logits": made_up_logits(40), "rollout": base, "first_wrong": None,
    })
    make_wrong_draws(base)
    make_bad_heads(base)


def make_seeds() -> None:
    run_id, beacon, prompt = "0123456789abcdef" * 2, "ab" * 32, [1, 4093, 49_151, 2**31 - 1]
    digest = hashlib.sha256(struct.pack("<4I", *prompt)).digest()
    text = b"assay.rollout-seed.v1\0" + bytes.fromhex(run_id) + bytes.fromhex(beacon) + digest
    places = [(0, 0), (0, 1), (1, 0), (2**40 + 7, 65_535)]
    write("sampler", "seeds", {
        "about": "group, sample -> seed of the rollout", "kind": "seeds", "run_id": run_id, "beacon": beacon,
        "prompt": prompt, "prompt_sha256": digest.hex(),
        "seeds": [[*place, hashlib.sha256(text + struct.pack("<QI", *place)).hexdigest()] for place in places],
    })


def make_parts() -> None:
    codes = [0, 1, 2, 709, 710, 1024, 14_148, 33_000, 33_359, 33_360, 34_069, 65_534, 65_535]
    for steps in (16, 1024, 4096):
        write("sampler", f"weights-{steps}", {
            "about": "code -> weight", "kind": "weights", "steps_per_nat": steps,
            "weights": [[code, str(weight(code, steps))] for code in codes],
        })
    keys = [(p, d, i) for p in (0, 1, 77, 131_071) for d in (0, 1) for i in (0, 1, 49_151, 2**24 - 1, TAIL_ID)]
    write("sampler", "noise", {
        "about": "position, domain, id -> u, E as hexadecimal floats", "kind": "noise", "seed": SEED.hex(),
        "noise": [
            [*key, uniform(SEED, *key).hex(), exponential(uniform(SEED, *key)).hex()] for key in keys
        ],
    })
    edges = [2.0**-53, 1 - 2.0**-53, 0.5, 0.5 + 2.0**-53, 0.25 - 2.0**-53, math.sqrt(0.5), 0.707, 3 * 2.0**-53, 0.9]
    write("sampler", "exponential", {
        "about": "u -> E at the seams, as hexadecimal floats", "kind": "exponential",
        "values": [[u.hex(), exponential(u).hex()] for u in edges],
    })
    ties = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    for name, logits, change in (
        ("head-ties", ties, {}), ("head-cut", [0.0, -3.0, -5.0, -9.0, -20.0], {"head_max_code": 4000}),
        ("head-floor", [0.0, -3.0, -9.0, -10.0, -20.0], {"head_max_code": 100, "head_floor": 3}),
        ("head-whole", [0.5, 0.25, 0.0], {}), ("head-certain", [0.0] + [-700.0] * 9, {"head_size": 2}),
    ):
        rules = {**RULES, **change, "vocab_size": len(logits)}
        head = head_of(logits, rules)
        write("sampler", name, {"kind": "quantise", "rules": rules, "logits": logits, "head": head, "seed": SEED.hex(),
                                "winners": [winner(head, SEED, p, 1024) for p in range(20)]})


def make_wrong_draws(base: dict[str, Any]) -> None:
    """Well-formed rollouts whose tokens are not the ones selected; replay names the first."""
    drawn = [t for t, code in enumerate(base["token_codes"]) if code != NO_CODE]
    inside = [t for t in range(40) if t not in drawn]
    starts = [sum(base["head_lengths"][:t]) for t in range(40)]

    def other(t: int) -> Any:
        return next(i for i in base["head_ids"][starts[t] : starts[t] + 4] if i != base["tokens"][t])

    def outside(t: int) -> int:
        return next(i for i in range(16) if i not in base["head_ids"][starts[t] : starts[t] + base["head_lengths"][t]])

    late, tail = inside[-1], drawn[1]
    cases = {
        "edited-last-token": (changed(base, tokens={late: other(late)}), SEED, late),
        "head-token-claims-a-tail-draw": (
            changed(base, tokens={inside[2]: outside(inside[2])}, token_codes={inside[2]: 60_000}), SEED, inside[2]),
        "tail-draw-claims-the-head": (
            changed(base, tokens={tail: base["head_ids"][starts[tail]]}, token_codes={tail: NO_CODE}), SEED, tail),
        "another-seed": (base, bytes(32), next(
            t for t in range(40)
            if (w := winner({"ids": base["head_ids"][starts[t] : starts[t] + base["head_lengths"][t]],
                             "codes": base["head_codes"][starts[t] : starts[t] + base["head_lengths"][t]],
                             "tail_code": base["tail_codes"][t]}, bytes(32), t, 1024)) != base["tokens"][t]
            and (w != TAIL_ID or base["token_codes"][t] == NO_CODE)
        )),
    }
    for name, (columns, seed, position) in cases.items():
        write("sampler", f"{name}_fail", {
            "kind": "replay", "rules": RULES, "seed": seed.hex(), "rollout": columns, "first_wrong": position,
            "error": "E_REPLAY",
        })


def make_bad_heads(base: dict[str, Any]) -> None:
    starts = [sum(base["head_lengths"][:t]) for t in range(40)]
    t = next(t for t in range(5, 40) if base["head_lengths"][t] == 4 and base["token_codes"][t] == NO_CODE
             and base["head_codes"][starts[t]] != base["head_codes"][starts[t] + 1])
    tail = next(t for t in range(5, 40) if base["token_codes"][t] != NO_CODE)
    a, ids, codes = starts[t], base["head_ids"], base["head_codes"]
    outside = next(i for i in range(16) if i not in ids[a : a + 4])
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "head-too-long": ("E_HEAD_SIZE", base, {"head_size": 3}),
        "head-under-the-floor": ("E_HEAD_SIZE", base, {"head_size": 9, "head_floor": 5}),
        "head-id-past-the-vocabulary": ("E_HEAD_ID", changed(base, head_ids={a + 3: 16}), {}),
        "head-id-of-32-bits": ("E_HEAD_ID", changed(base, head_ids={a + 3: 2**32 - 1}), {}),
        "token-past-the-vocabulary": ("E_HEAD_ID", changed(base, tokens={tail: 16}), {}),
        "head-unsorted": ("E_HEAD_ORDER", changed(
            base, head_ids={a: ids[a + 1], a + 1: ids[a]}, head_codes={a: codes[a + 1], a + 1: codes[a]}), {}),
        "head-equal-entries": ("E_HEAD_ORDER", changed(
            base, head_ids={a + 1: ids[a]}, head_codes={a + 1: codes[a]}), {}),
        "head-id-twice": ("E_HEAD_DUPLICATE", changed(base, head_ids={a + 3: ids[a]}), {}),
        "head-entry-too-unlikely": ("E_HEAD_CODE", changed(base, head_codes={a + 3: 6001}), {}),
        "head-entry-without-weight": ("E_HEAD_CODE", changed(base, head_codes={a + 3: 65_535}), {"head_floor": 4}),
        "tail-hidden": ("E_HEAD_NOT_NORMALISED", changed(base, tail_codes={t: 65_535}), {}),
        "tail-inflated": ("E_HEAD_NOT_NORMALISED", changed(base, tail_codes={t: 0}), {}),
        "entry-inflated": ("E_HEAD_NOT_NORMALISED", changed(base, head_codes={a: codes[a] // 2}), {}),
        "token-nowhere": ("E_TOKEN_CODE", changed(base, tokens={t: outside}), {}),
        "tail-token-without-code": ("E_TOKEN_CODE", changed(base, token_codes={tail: NO_CODE}), {}),
        "tail-token-too-likely": ("E_TOKEN_CODE", changed(base, token_codes={tail: 0}), {}),
        "head-token-with-code": ("E_TOKEN_CODE", changed(base, token_codes={t: 60_000}), {}),
    }
    for name, (error, columns, change) in cases.items():
        write("sampler", f"{name}_fail", {
            "kind": "head", "rules": {**RULES, **change}, "rollout": columns, "error": error,
        })
    tight = {**RULES, "head_size": 8, "head_max_code": 9000, "head_floor": 1}
    swollen = {"tokens": [0], "head_lengths": [1], "head_ids": [0], "head_codes": [700], "tail_codes": [719],
               "token_codes": [NO_CODE], "sample": 0, "segments": [[0, 1, 0]], "finish": 1}
    write("sampler", "tail-heavier-than-its-ids_fail", {
        "about": "head and tail add up, but ids too unlikely for the head cannot hold half of the mass",
        "kind": "head", "rules": tight, "rollout": swollen, "error": "E_TAIL_CODE",
    })
