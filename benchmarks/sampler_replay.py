"""How fast T1 replays draws on one core, and that numba, numpy and torch take every draw alike.

Real heads are those of SmolLM2-135M and of the tiny model; they are drawn from again under many seeds, which makes as
many tokens as are asked for. Random heads come from random logits. Every token is drawn by torch (its own race, not
the kernel), replayed by numba and by numpy; tail draws, for which no logits are at hand, stand for a token that no
head holds.
The speed is that of ``protocol.sampler.replay`` on whole rollouts with heads of 32, next to the same in numpy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import harness

harness.pin_threads()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from real_rollouts import NATS, coarsen, fine_leases, model_arguments, smollm2_gsm8k, tiny_sort  # noqa: E402

from protocol import sampler, sampler_torch  # noqa: E402
from protocol.head import offsets  # noqa: E402
from protocol.messages import SamplingRules  # noqa: E402
from protocol.prng import TAIL_ID, seed_words  # noqa: E402
from protocol.rollout import EMPTY_TAIL, NO_CODE, Finish, Rollout, Segment  # noqa: E402
from protocol.sampler_torch import Heads, heads_from_logits  # noqa: E402
from protocol.weight_table import float_weights  # noqa: E402

STEPS: Final = 256
HEAD: Final = 32
#: Tokens of a rollout in the timed part.
LENGTH: Final = 512
Seeded = tuple[Rollout, bytes]


def main() -> None:
    options = model_arguments(harness.parser(__doc__))
    torch.set_num_threads(1)
    rng = np.random.default_rng(options.seed)
    kinds = _heads(options, rng)
    share = (30_000 if options.quick else 1_020_000) // len(kinds)
    checked, mismatches = {}, {}
    for name, (heads, rules) in kinds.items():
        checked[name], mismatches[name] = _compare(heads, rules, rng, share)
    heads, rules = kinds["smollm2_gsm8k"]
    seeds = [rng.bytes(32) for _ in range(16 if options.quick else 64)]
    seeded = [(_drawn(heads, rules, seed, LENGTH, rng), seed) for seed in seeds]
    speed = _speed(seeded, rules, rounds=7 if options.quick else 21)
    result = {
        **speed, "head_size": HEAD, "tokens_checked": sum(checked.values()), "mismatches": sum(mismatches.values()),
        "checked": checked,
    }
    harness.finish(result, _text(result), only_json=options.json)


def _heads(options: argparse.Namespace, rng: np.random.Generator) -> dict[str, tuple[Heads, SamplingRules]]:
    """Heads by where they come from, as batches of rows."""
    found = {}
    for workload, size in ((smollm2_gsm8k(options.cache, options.data), HEAD), (tiny_sort(options.cache), 16)):
        leases, _ = fine_leases(workload, options)
        rules = workload.rules(steps_per_nat=STEPS, head_size=size, head_max_code=round(NATS * STEPS))
        rollouts = [coarsen(rollout, STEPS, size) for lease in leases for rollout in lease.bundle.rollouts]
        found[workload.name] = (_batch(rollouts, size), rules)
    rules = found["smollm2_gsm8k"][1]
    logits = torch.from_numpy(rng.standard_normal((256, 4096)) * rng.uniform(0.2, 6.0, (256, 1)))
    found["random"] = (heads_from_logits(logits, rules), rules)
    return found


def _batch(rollouts: Sequence[Rollout], size: int) -> Heads:
    """The heads of all positions of all rollouts."""
    lengths = np.concatenate([r.head_lengths for r in rollouts]).astype(np.int64)
    inside = np.arange(size) < lengths[:, None]
    ids, codes = np.zeros(inside.shape, np.int64), np.zeros(inside.shape, np.int64)
    ids[inside] = np.concatenate([r.head_ids for r in rollouts])
    codes[inside] = np.concatenate([r.head_codes for r in rollouts])
    tails = np.concatenate([r.tail_codes for r in rollouts]).astype(np.int64)
    return Heads(*(torch.from_numpy(column) for column in (lengths, ids, codes, tails)))


def _drawn(heads: Heads, rules: SamplingRules, seed: bytes, length: int, rng: np.random.Generator) -> Rollout:
    """A rollout of rows picked from ``heads``, its tokens drawn by torch's own race under ``seed``."""
    rows = torch.from_numpy(rng.integers(0, len(heads.lengths_B), length))
    chosen = Heads(heads.lengths_B[rows], heads.ids_BK[rows], heads.codes_BK[rows], heads.tail_codes_B[rows])
    seeds = torch.from_numpy(seed_words(seed).view(np.int64)).expand(length, 4)
    tokens = _torch_race(chosen, seeds, torch.arange(length), rules).numpy()
    lengths = chosen.lengths_B.numpy()
    inside = np.arange(chosen.ids_BK.shape[1]) < lengths[:, None]
    tail = tokens == TAIL_ID
    return Rollout(
        sample=0, tokens=np.where(tail, TAIL_ID - 1, tokens).astype(np.uint32),
        head_lengths=lengths.astype(np.uint8), head_ids=chosen.ids_BK.numpy()[inside].astype(np.uint32),
        head_codes=chosen.codes_BK.numpy()[inside].astype(np.uint16),
        tail_codes=chosen.tail_codes_B.numpy().astype(np.uint16),
        token_codes=np.where(tail, EMPTY_TAIL - 1, NO_CODE).astype(np.uint16), segments=(Segment(0, 0),),
        finish=Finish.LENGTH,
    )


def _torch_race(heads: Heads, seeds_B: torch.Tensor, positions_B: torch.Tensor, rules: SamplingRules) -> torch.Tensor:
    """Torch's race in its own arithmetic, as it runs on accelerators."""
    kernel, sampler_torch.compiled = sampler_torch.compiled, _nothing
    try:
        return sampler_torch._head_race(heads, seeds_B, positions_B, rules)
    finally:
        sampler_torch.compiled = kernel


def _nothing() -> None:
    return None


def _compare(heads: Heads, rules: SamplingRules, rng: np.random.Generator, tokens: int) -> tuple[int, int]:
    """(tokens checked, draws on which torch, numba and numpy differ).

    Each rollout must replay to its end in numba and numpy; then one token is exchanged for another of its head, which
    both must find at its place.
    """
    checked = mismatches = 0
    weights = float_weights(rules.steps_per_nat)
    while checked < tokens:
        seed = rng.bytes(32)
        rollout = _drawn(heads, rules, seed, min(4096, tokens - checked), rng)
        words = seed_words(seed)
        mismatches += sampler.replay(rollout, seed, rules) is not None
        mismatches += sampler._replay_numpy(rollout, words, weights) != -1
        lied, place = _exchanged(rollout, rng)
        mismatches += sampler.replay(lied, seed, rules) != place
        mismatches += sampler._replay_numpy(lied, words, weights) != place
        checked += len(rollout)
    return checked, mismatches


def _exchanged(rollout: Rollout, rng: np.random.Generator) -> tuple[Rollout, int]:
    """The rollout with one head token replaced by its neighbour in the head, and where."""
    starts = offsets(rollout)
    usable = np.flatnonzero((rollout.token_codes == NO_CODE) & (rollout.head_lengths > 1))
    place = int(rng.choice(usable))
    head = rollout.head_ids[starts[place] : starts[place] + rollout.head_lengths[place]]
    tokens = rollout.tokens.copy()
    tokens[place] = head[head != tokens[place]][0]
    return replace(rollout, tokens=tokens), place


def _speed(seeded: Sequence[Seeded], rules: SamplingRules, rounds: int) -> dict[str, Any]:
    """Tokens per second of CPU time of whole replays, numba and numpy in turns."""
    tokens = sum(len(rollout) for rollout, _ in seeded)
    weights = float_weights(rules.steps_per_nat)

    def numba() -> None:
        for rollout, seed in seeded:
            sampler.replay(rollout, seed, rules)

    def numpy() -> None:
        for rollout, seed in seeded:
            sampler._replay_numpy(rollout, seed_words(seed), weights)

    found = harness.interleave({"numba": numba, "numpy": numpy}, rounds=rounds, clock=time.process_time)
    return {
        "tokens_per_s_per_core": tokens / found["numba"].median, "best": tokens / min(found["numba"].seconds),
        "spread": found["numba"].spread, "numpy_tokens_per_s": tokens / found["numpy"].median,
    }


def _text(result: dict[str, Any]) -> str:
    speeds = [(name, result[key]) for name, key in (
        ("numba, median", "tokens_per_s_per_core"), ("numba, best", "best"), ("numpy, median", "numpy_tokens_per_s")
    )]
    checked = [(name, count) for name, count in result["checked"].items()]
    return "\n\n".join([
        harness.table(("replay", "tokens/s"), speeds), harness.table(("heads", "tokens checked"), checked),
        f"{result['mismatches']} mismatches",
    ])


if __name__ == "__main__":
    main()
