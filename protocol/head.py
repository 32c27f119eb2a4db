"""Heads: the few most likely tokens of a position, quantised. A head *is* the distribution that is sampled from.

Legend: V vocabulary, K entries of one head, T tokens and N head entries of a rollout.
Spec: ``docs/spec/sampler.md``, "Heads".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalFault, PeerFault, code
from protocol.messages import SamplingRules
from protocol.rollout import EMPTY_TAIL, NO_CODE, Rollout
from protocol.weight_table import ONE_BITS, log_weights, weight_table

E_LOGITS = code("E_LOGITS", "a model's logits hold NaN or +infinity")
E_HEAD_SIZE = code("E_HEAD_SIZE", "a head has fewer or more entries than the run's rules allow")
E_HEAD_ID = code("E_HEAD_ID", "a token id is outside the vocabulary")
E_HEAD_ORDER = code("E_HEAD_ORDER", "a head is not sorted by (code, id)")
E_HEAD_DUPLICATE = code("E_HEAD_DUPLICATE", "a head names a token id twice")
E_HEAD_CODE = code("E_HEAD_CODE", "a head entry past the floor is less likely than the run's rules allow")
E_HEAD_NOT_NORMALISED = code("E_HEAD_NOT_NORMALISED", "the probabilities of a head and its tail do not add up to one")
E_TAIL_CODE = code("E_TAIL_CODE", "the tail of a head claims more mass than its ids can hold")
E_TOKEN_CODE = code("E_TOKEN_CODE", "a token is neither in its head nor recorded as a tail draw, or is both")

MAX_CODE: Final = 0xFFFE  #: largest code of a probability; less likely tokens share it


@dataclass(frozen=True, eq=False)
class Head:
    """One position's sampling distribution. Order of entries: (code, id) ascending."""

    ids: NDArray[np.uint32]  #: (K,)
    codes: NDArray[np.uint16]  #: (K,) quantised -logprob in steps
    tail_code: int  #: quantised -log(mass outside the head), or ``EMPTY_TAIL``


def to_codes(logprobs: NDArray[np.float64], steps_per_nat: int) -> NDArray[np.int64]:
    """Codes of log-probabilities (nats): nearest step, ties to even, clipped to 0..65534."""
    return np.clip(np.rint(logprobs * -float(steps_per_nat)), 0, MAX_CODE).astype(np.int64)


def normalise(logits_V: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(logprobs_V, masses_V) in float64: log-softmax of the input, and exp(x - max x).

    Raises:
        LocalFault: ``E_LOGITS`` for NaN, +inf, or nothing finite.
    """
    x = logits_V.astype(np.float64)
    top = x.max()
    if not np.isfinite(top):
        raise LocalFault(E_LOGITS, "logits are not usable", expected="a finite maximum", got=top)
    x -= top
    masses = np.exp(x)
    return x - np.log(masses.sum()), masses


def quantise(logprobs_V: NDArray[Any], rules: SamplingRules) -> Head:
    """The head of one position.

    Args:
        logprobs_V: (V,) float32 or float64 log-probabilities at the run's temperature over the whole vocabulary
            (unnormalised logits divided by the temperature do as well: they are normalised here).

    Raises:
        LocalFault: ``E_LOGITS``.
    """
    logp, masses = normalise(logprobs_V)
    ids = _top(logp, min(rules.head_size, len(logp)))
    codes = to_codes(logp[ids], rules.steps_per_nat)
    order = np.lexsort((ids, codes))
    ids, codes = ids[order], codes[order]
    length = max(min(rules.head_floor, len(ids)), int(np.count_nonzero(codes <= rules.head_max_code)))
    ids, codes = ids[:length], codes[:length]
    rest = masses.copy()
    rest[ids] = 0.0
    tail = rest.sum()
    tail_code = EMPTY_TAIL
    if tail > 0:
        tail_code = int(to_codes(np.log(tail) - np.log(masses.sum()), rules.steps_per_nat))
    return Head(ids.astype(np.uint32), codes.astype(np.uint16), tail_code)


def _top(logp: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Ids of the k largest values; among equals at the boundary the lowest ids."""
    if k == len(logp):
        return np.arange(k)
    boundary = np.partition(logp, len(logp) - k)[len(logp) - k]
    above = np.flatnonzero(logp > boundary)
    return np.concatenate([above, np.flatnonzero(logp == boundary)[: k - len(above)]])


# -- whole rollouts ----------------------------------------------------------------------------------------


def offsets(rollout: Rollout) -> NDArray[np.int64]:
    """(T,) index of each position's first head entry."""
    ends = np.cumsum(rollout.head_lengths, dtype=np.int64)
    starts: NDArray[np.int64] = ends - rollout.head_lengths
    return starts


def token_entries(rollout: Rollout) -> NDArray[np.int64]:
    """(T,) index of each token's entry among the N head entries, -1 when the token is not in its head."""
    lengths = rollout.head_lengths
    hits = np.flatnonzero(rollout.head_ids == np.repeat(rollout.tokens, lengths))
    entries = np.full(len(rollout), -1, dtype=np.int64)
    entries[np.repeat(np.arange(len(rollout)), lengths)[hits]] = hits
    return entries


def totals(rollout: Rollout, rules: SamplingRules) -> NDArray[np.uint64]:
    """(T,) Z of each position: the sum of its weights, tail included."""
    weights = weight_table(rules.steps_per_nat)
    z: NDArray[np.uint64] = np.add.reduceat(weights[rollout.head_codes], offsets(rollout))
    return z + weights[rollout.tail_codes]


def behaviour_logprobs(rollout: Rollout, rules: SamplingRules) -> NDArray[np.float64]:
    """(T,) ln q of each drawn token, in nats, at the run's temperature, under the version of its segment.

    A token drawn from the tail has the probability of its own recorded code.

    Raises:
        PeerFault: ``E_TOKEN_CODE`` when a token is neither in its head nor recorded as a tail draw.
    """
    entries = token_entries(rollout)
    codes = np.where(entries >= 0, rollout.head_codes[entries], rollout.token_codes)
    _require(codes != NO_CODE, E_TOKEN_CODE, "token without a code", "in the head, or a token code", rollout.tokens)
    logs: NDArray[np.float64] = log_weights(rules.steps_per_nat)[codes] - np.log(totals(rollout, rules))
    return logs


def head_logprobs(rollout: Rollout, rules: SamplingRules) -> NDArray[np.float64]:
    """(N,) ln q of every head entry, in nats."""
    z = np.repeat(np.log(totals(rollout, rules)), rollout.head_lengths)
    logs: NDArray[np.float64] = log_weights(rules.steps_per_nat)[rollout.head_codes] - z
    return logs


def tail_logprobs(rollout: Rollout, rules: SamplingRules) -> NDArray[np.float64]:
    """(T,) ln q of TAIL, in nats; -inf where the tail is empty."""
    logs: NDArray[np.float64] = log_weights(rules.steps_per_nat)[rollout.tail_codes] - np.log(totals(rollout, rules))
    return logs


def check_head(rollout: Rollout, rules: SamplingRules) -> None:
    """T0 of the heads: every head of the rollout obeys the run's rules (``docs/spec/sampler.md``, "Checks").

    Raises:
        PeerFault: ``E_HEAD_SIZE``, ``E_HEAD_ID``, ``E_HEAD_ORDER``, ``E_HEAD_DUPLICATE``, ``E_HEAD_CODE``,
            ``E_HEAD_NOT_NORMALISED``, ``E_TAIL_CODE`` or ``E_TOKEN_CODE``, naming the first position.
    """
    lengths = rollout.head_lengths.astype(np.int64)
    codes = rollout.head_codes.astype(np.int64)
    least = min(rules.head_floor, rules.head_size, rules.vocab_size)
    most = min(rules.head_size, rules.vocab_size)
    _require((lengths >= least) & (lengths <= most), E_HEAD_SIZE, "head size", f"{least} to {most} entries", lengths)
    positions = np.repeat(np.arange(len(rollout)), lengths)
    _check_entries(rollout, rules, positions, codes)
    one = 2.0**ONE_BITS
    drift = np.log(totals(rollout, rules) / one) * rules.steps_per_nat
    _require(np.abs(drift) <= 1.0, E_HEAD_NOT_NORMALISED, "sum of head and tail", "within 1 step of one", drift)
    _check_tails(rollout, rules, lengths, codes[offsets(rollout) + lengths - 1])


def _check_entries(
    rollout: Rollout, rules: SamplingRules, positions: NDArray[np.int64], codes: NDArray[np.int64]
) -> None:
    ids = rollout.head_ids.astype(np.int64)
    _require(ids < rules.vocab_size, E_HEAD_ID, "head id", f"< {rules.vocab_size}", ids, positions)
    keys = (positions << 40) | (codes << 24) | ids
    _require(np.diff(keys, prepend=-1) > 0, E_HEAD_ORDER, "head entry", "ascending (code, id)", codes, positions)
    unique, counts = np.unique((positions << 24) | ids, return_counts=True)
    _require(counts == 1, E_HEAD_DUPLICATE, "head id", "each id once", unique & 0xFFFFFF, unique >> 24)
    rank = np.arange(len(ids)) - np.repeat(offsets(rollout), rollout.head_lengths)
    allowed = (codes <= rules.head_max_code) | (rank < rules.head_floor)
    _require(allowed, E_HEAD_CODE, "head code past the floor", f"<= {rules.head_max_code}", codes, positions)
    _require(codes != EMPTY_TAIL, E_HEAD_CODE, "head code", f"<= {MAX_CODE}", codes, positions)


def _check_tails(
    rollout: Rollout, rules: SamplingRules, lengths: NDArray[np.int64], last_codes: NDArray[np.int64]
) -> None:
    """Tail mass and tail draws against the least code an id outside the head can have."""
    full = lengths == min(rules.head_size, rules.vocab_size)
    least_code = np.where(full, last_codes, np.maximum(last_codes, min(rules.head_max_code + 1, MAX_CODE)))
    tails = rollout.tail_codes.astype(np.int64)
    outside = rules.vocab_size - lengths
    bound = least_code - np.log(np.maximum(outside, 1)) * rules.steps_per_nat - 1.0
    possible = (tails == EMPTY_TAIL) | ((outside > 0) & (tails >= bound))
    _require(possible, E_TAIL_CODE, "tail code", "mass that the ids outside the head can hold", tails)
    tokens, token_codes = rollout.tokens.astype(np.int64), rollout.token_codes.astype(np.int64)
    _require(tokens < rules.vocab_size, E_HEAD_ID, "token id", f"< {rules.vocab_size}", tokens)
    in_head = token_entries(rollout) >= 0
    drawn = (tails != EMPTY_TAIL) & (token_codes != NO_CODE) & (token_codes >= least_code) & (token_codes >= tails - 1)
    _require(np.where(in_head, token_codes == NO_CODE, drawn), E_TOKEN_CODE, "token code",
             "none for a token of the head, else at least the codes of the head and the tail", token_codes)


def _require(
    holds: NDArray[np.bool_], code_: str, what: str, expected: str, got: NDArray[Any],
    positions: NDArray[np.int64] | None = None,
) -> None:
    """Raise ``code_`` naming the first element that does not hold and its position."""
    if holds.all():
        return
    first = int(np.argmin(holds))
    position = first if positions is None else int(positions[first])
    raise PeerFault(code_, f"{what} at position {position}", expected=expected, got=got[first])
