"""The seeded sampler and its exact replay: which token a head and public randomness select.

A draw is an exponential race (the Gumbel-max trick in its multiplicative form): the entry with the smallest
``E / W`` wins. No tolerance anywhere: the head's integers and the seed decide. Spec: ``docs/spec/sampler.md``.
Imports no torch; the batched form for engines is ``protocol.sampler_torch``.

Legend: V vocabulary, K entries of one head, T tokens and N head entries of a rollout.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.head import (
    Head,
    behaviour_logprobs,
    check_head,
    head_logprobs,
    normalise,
    offsets,
    quantise,
    tail_logprobs,
    to_codes,
)
from protocol.messages import SamplingRules
from protocol.prng import HEAD_DOMAIN, TAIL_DOMAIN, TAIL_ID, noise, seed_words
from protocol.rollout import NO_CODE, Rollout
from protocol.weight_table import float_weights, weight_table

__all__ = [
    "TAIL", "Head", "behaviour_logprobs", "check_head", "draw", "draw_tail", "head_logprobs", "quantise", "replay",
    "seed_words", "tail_logprobs", "tail_margin", "weight_table",
]

#: What ``draw`` returns when the tail wins.
TAIL: Final = -1


def draw(head: Head, seed: bytes, position: int, rules: SamplingRules) -> int:
    """Index of the head entry that wins the race at ``position``, or ``TAIL``. Ties go to the lowest id."""
    ids = np.append(head.ids, np.uint32(TAIL_ID))
    codes = np.append(head.codes, np.uint16(head.tail_code))
    weights = float_weights(rules.steps_per_nat)[codes]
    scores = _scores(noise(seed_words(seed), np.array([position]), HEAD_DOMAIN, ids), weights)
    winners = np.flatnonzero(scores == scores.min())
    index = int(winners[np.argmin(ids[winners])])
    return TAIL if index == len(head.ids) else index


def draw_tail(
    logprobs_V: NDArray[Any], head_ids: NDArray[np.uint32], seed: bytes, position: int, rules: SamplingRules
) -> tuple[int, int]:
    """(token id, its code) of a draw among the ids outside the head.

    Args:
        logprobs_V: as for ``quantise``.
        head_ids: (K,) ids of the head at this position.

    Raises:
        LocalFault: ``E_LOGITS``.
        ValueError: the tail holds no mass (our own bug).
    """
    logp, masses = normalise(logprobs_V)
    scores = _tail_scores(masses, head_ids, seed, position)
    token = int(np.argmin(scores))
    if math.isinf(scores[token]):
        raise ValueError("the tail is empty")
    return token, int(to_codes(logp[token], rules.steps_per_nat))


def tail_margin(
    logprobs_V: NDArray[Any], head_ids: NDArray[np.uint32], token: int, seed: bytes, position: int
) -> float:
    """How far ``token`` loses the tail race under these log-probabilities, in nats: 0 when it wins, inf in the head.

    This is the difference of the Gumbel-perturbed log-probabilities of the winner and of ``token``.
    """
    _, masses = normalise(logprobs_V)
    scores = _tail_scores(masses, head_ids, seed, position)
    if math.isinf(scores[token]):
        return math.inf
    return float(np.log(scores[token] / scores.min()))


def replay(rollout: Rollout, seed: bytes, rules: SamplingRules) -> int | None:
    """First position whose token is not the one that head and seed select; None when all are right.

    Where a tail draw is recorded, TAIL must win and the token must be outside the head; which tail id wins is for
    holders of logits to check (``tail_margin``). Heads must have passed ``check_head``.
    """
    words = seed_words(seed)
    weights = float_weights(rules.steps_per_nat)
    kernel = compiled()
    if kernel is None:
        wrong = _replay_numpy(rollout, words, weights)
    else:
        columns = (
            (rollout.tokens, np.uint32), (rollout.head_lengths, np.uint8), (rollout.head_ids, np.uint32),
            (rollout.head_codes, np.uint16), (rollout.tail_codes, np.uint16), (rollout.token_codes, np.uint16),
        )
        wrong = int(kernel.replay(*(np.ascontiguousarray(c, dtype) for c, dtype in columns), weights, words))
    return None if wrong < 0 else wrong


@cache
def compiled() -> ModuleType | None:
    """The numba kernels, or None where numba is missing or has nowhere to cache; results are the same either way."""
    try:
        from protocol import sampler_jit
    except (ImportError, RuntimeError):
        return None
    return sampler_jit


def _scores(e: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """E / W; infinite where W is 0."""
    scores = np.full(e.shape, math.inf)
    np.divide(e, weights, out=scores, where=weights > 0)
    return scores


def _tail_scores(
    masses: NDArray[np.float64], head_ids: NDArray[np.uint32], seed: bytes, position: int
) -> NDArray[np.float64]:
    """(V,) scores of the tail race; infinite for head ids and ids without mass."""
    rest = masses.copy()
    rest[head_ids] = 0.0
    return _scores(noise(seed_words(seed), np.array([position]), TAIL_DOMAIN, np.arange(len(rest))), rest)


def _replay_numpy(rollout: Rollout, words: NDArray[np.uint64], weights: NDArray[np.float64]) -> int:
    """Replay in numpy; -1 when all tokens are right."""
    positions = np.arange(len(rollout))
    lengths, starts = rollout.head_lengths, offsets(rollout)
    scores = _scores(
        noise(words, np.repeat(positions, lengths), HEAD_DOMAIN, rollout.head_ids), weights[rollout.head_codes]
    )
    best = np.minimum.reduceat(scores, starts)
    tail_e = noise(words, positions, HEAD_DOMAIN, np.full(len(rollout), TAIL_ID, dtype=np.uint32))
    tail_wins = _scores(tail_e, weights[rollout.tail_codes]) < best
    ids = np.where(scores == np.repeat(best, lengths), rollout.head_ids, np.uint32(TAIL_ID))
    in_head = np.maximum.reduceat(rollout.head_ids == np.repeat(rollout.tokens, lengths), starts)
    drawn = rollout.token_codes != NO_CODE
    right = np.where(tail_wins, drawn & ~in_head, ~drawn & (np.minimum.reduceat(ids, starts) == rollout.tokens))
    return -1 if right.all() else int(np.argmin(right))
