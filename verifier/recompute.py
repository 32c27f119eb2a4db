"""T2 and T3 with torch: the reference's logits turned into residuals of the committed heads.

Legend: T completion tokens, n positions of a chunk, V vocabulary, K entries of the largest head of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.head import MAX_CODE, behaviour_logprobs, head_logprobs, offsets, tail_logprobs
from protocol.messages import SamplingRules
from protocol.prng import HEAD_DOMAIN, TAIL_ID, noise, seed_words
from protocol.reference import LogitsChunk, Recomputation, ReferenceModel
from protocol.rollout import EMPTY_TAIL, NO_CODE, Rollout
from protocol.sampler import tail_margin
from verifier.divergence import Residuals
from verifier.states import States
from verifier.submission import Opened

#: Smallest mass outside a head that is compared; below it, float32 sums say little.
LEAST_MASS: Final = 1e-6
_COLUMNS: Final = (
    "kl_T", "peak_T", "entry_T", "omitted_T", "tail_draw_T", "tail_token_T", "bias_T", "margin_T", "tail_mass_T"
)


@dataclass
class _Scoring:
    """A rollout whose residuals are being filled in, chunk by chunk."""

    rollout: Rollout
    seed: bytes
    rules: SamplingRules
    columns: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.starts = offsets(self.rollout)
        self.head_logq = head_logprobs(self.rollout, self.rules)
        self.tail_logq = tail_logprobs(self.rollout, self.rules)
        self.token_logq = behaviour_logprobs(self.rollout, self.rules)
        self.words = seed_words(self.seed)
        for name in _COLUMNS:
            self.columns[name] = np.full(len(self.rollout), np.nan)
        if self.rollout.routes is not None:
            self.columns["route_T"] = np.full(len(self.rollout), np.nan)

    def residuals(self) -> Residuals:
        return Residuals(self.rollout.sample, **self.columns)


class TorchRecomputer:
    """Recomputes heads with one configuration (compute type, attention, batching) of the reference model.

    ``alone``: one rollout per forward pass, so that the second look shares no batch shape with the first.
    """

    def __init__(self, reference: ReferenceModel, states: States, *, alone: bool = False):
        self._reference, self._states, self._alone = reference, states, alone

    def residuals(self, submissions: Sequence[Opened]) -> list[list[Residuals]]:
        """Residuals of every rollout of every submission; each checkpoint is loaded once.

        Raises:
            LocalFault: weights of a version are not to be had; ``E_MODEL_STATE``; ``E_LOGITS``.
        """
        scorings: list[_Scoring] = []
        items: list[Recomputation] = []
        for opened in submissions:
            for rollout in opened.bundle.rollouts:
                scorings.append(_Scoring(rollout, opened.seeds[rollout.sample], opened.run.sampling))
                items.append(Recomputation(tuple(opened.lease.prompt_tokens), rollout))
        batches = [[index] for index in range(len(items))] if self._alone else [list(range(len(items)))]
        for batch in batches:
            for chunk in self._reference.replay([items[i] for i in batch], self._states.state):
                _score(scorings[batch[chunk.item]], chunk)
        found = iter(scorings)
        return [[next(found).residuals() for _ in opened.bundle.rollouts] for opened in submissions]


@torch.no_grad()
def _score(scoring: _Scoring, chunk: LogitsChunk) -> None:
    """Residuals of one chunk of positions."""
    rollout, rules = scoring.rollout, scoring.rules
    span = slice(chunk.start, chunk.start + len(chunk.logits))
    logp_nV = torch.log_softmax(chunk.logits.double() / (rules.temperature_milli / 1000), dim=-1).cpu()
    ids_nK, mask_nK = _padded(scoring, span, rollout.head_ids.astype(np.int64), 0)
    logq_nK, _ = _padded(scoring, span, scoring.head_logq, -np.inf)
    codes_nK, _ = _padded(scoring, span, rollout.head_codes.astype(np.float64), 0.0)
    inside_nK = logp_nV.gather(1, ids_nK)
    # Padding repeats the first entry, so that scattering it masks nothing but the head.
    outside_nV = logp_nV.scatter(1, torch.where(mask_nK, ids_nK, ids_nK[:, :1]), -torch.inf)
    tail_logq_n, tail_logp_n = torch.from_numpy(scoring.tail_logq[span]), outside_nV.logsumexp(1)
    least = MAX_CODE / -rules.steps_per_nat  # what the last code says is "so or less", down to an impossible id
    known_nK = inside_nK.clamp(min=least)
    kl_n = _kl_terms(logq_nK, known_nK).sum(1) + _kl_terms(tail_logq_n, tail_logp_n.clamp(min=least))
    committed_nK = codes_nK / -rules.steps_per_nat
    entry_n = torch.where(mask_nK, (committed_nK - known_nK).abs(), 0.0).amax(1)
    least_n = torch.where(mask_nK, inside_nK, torch.inf).amin(1)
    columns = scoring.columns
    columns["kl_T"][span] = kl_n.numpy()
    columns["peak_T"][span] = torch.minimum(logp_nV.amax(1), logq_nK.amax(1)).exp().numpy()
    columns["entry_T"][span] = entry_n.numpy()
    columns["omitted_T"][span] = _omitted(outside_nV.amax(1), least_n, mask_nK.sum(1), rules, logp_nV.shape[1]).numpy()
    tokens_n = torch.from_numpy(rollout.tokens[span].astype(np.int64))
    bias_n = scoring.token_logq[span] - logp_nV.gather(1, tokens_n[:, None])[:, 0].numpy()
    columns["bias_T"][span] = bias_n
    columns["margin_T"][span] = _margins(
        scoring, span, torch.where(mask_nK, known_nK, -torch.inf), tail_logp_n.clamp(min=least)
    )
    columns["tail_mass_T"][span] = _mass_residuals(scoring, span, tail_logp_n)
    if chunk.route_margins is not None:
        columns["route_T"][span] = chunk.route_margins.cpu().numpy()
    _score_tail_draws(scoring, chunk.start, logp_nV)


def _margins(scoring: _Scoring, span: slice, inside_nK: Tensor, tail_logp_n: Tensor) -> NDArray[np.float64]:
    """How far each drawn symbol loses the race of head and TAIL under the reference, in nats; 0 when it wins."""
    rollout = scoring.rollout
    ids_nK, _ = _padded(scoring, span, rollout.head_ids.astype(np.int64), 0)
    ids_nS = np.concatenate([ids_nK.numpy(), np.full((len(ids_nK), 1), TAIL_ID)], axis=1)
    logp_nS = np.concatenate([inside_nK.numpy(), tail_logp_n.numpy()[:, None]], axis=1)
    positions_n1 = np.arange(span.start, span.start + len(ids_nS))[:, None]
    race_nS = logp_nS - np.log(noise(scoring.words, positions_n1, HEAD_DOMAIN, ids_nS))
    drawn_n = np.where(rollout.token_codes[span] == NO_CODE, rollout.tokens[span].astype(np.int64), TAIL_ID)
    own_n = np.where((ids_nS == drawn_n[:, None]) & (logp_nS > -np.inf), race_nS, -np.inf).max(axis=1)
    margins: NDArray[np.float64] = race_nS.max(axis=1) - own_n
    return margins


def _mass_residuals(scoring: _Scoring, span: slice, tail_logp_n: Tensor) -> NDArray[np.float64]:
    """|committed - reference log-mass| of TAIL, both raised to ``LEAST_MASS``."""
    codes_n = scoring.rollout.tail_codes[span]
    committed_n = np.where(codes_n == EMPTY_TAIL, -np.inf, codes_n.astype(np.float64) / -scoring.rules.steps_per_nat)
    least = float(np.log(LEAST_MASS))
    residuals: NDArray[np.float64] = np.abs(np.maximum(committed_n, least) - np.maximum(tail_logp_n.numpy(), least))
    return residuals


def _kl_terms(logq: Tensor, logp: Tensor) -> Tensor:
    """Each symbol's q (ln q - ln p); 0 where q is 0, infinite where only p is."""
    return torch.where(logq == -torch.inf, 0.0, logq.exp() * (logq - logp))


def _omitted(best_n: Tensor, least_n: Tensor, lengths_n: Tensor, rules: SamplingRules, vocab: int) -> Tensor:
    """By how much the likeliest outsider should be in the head; NaN where nobody is outside.

    A full head must not leave out a token likelier than one it holds, a shorter one no token whose code is within
    ``head_max_code``.
    """
    bar_n = torch.where(
        lengths_n == min(rules.head_size, vocab), least_n, (rules.head_max_code + 0.5) / -rules.steps_per_nat
    )
    return torch.where(lengths_n < vocab, best_n - bar_n, torch.nan)


def _score_tail_draws(scoring: _Scoring, start: int, logp_nV: Tensor) -> None:
    rollout = scoring.rollout
    codes_n = rollout.token_codes[start : start + len(logp_nV)]
    for row in np.flatnonzero(codes_n != NO_CODE):
        position, token = start + int(row), int(rollout.tokens[start + row])
        first = scoring.starts[position]
        head_ids = rollout.head_ids[first : first + rollout.head_lengths[position]]
        logp_V = logp_nV[int(row)].numpy()
        margin = tail_margin(logp_V, head_ids, token, scoring.seed, position)
        scoring.columns["tail_draw_T"][position] = margin
        recorded = float(codes_n[row]) / -scoring.rules.steps_per_nat
        known = max(float(logp_V[token]), MAX_CODE / -scoring.rules.steps_per_nat)
        scoring.columns["tail_token_T"][position] = abs(recorded - known)


def _padded(
    scoring: _Scoring, span: slice, entries_N: NDArray[np.generic], filler: float
) -> tuple[Tensor, Tensor]:
    """Head entries of some positions as (n, K), and which of them are real."""
    lengths = scoring.rollout.head_lengths[span].astype(np.int64)
    columns = np.arange(int(lengths.max()))
    mask = columns < lengths[:, None]
    index = scoring.starts[span][:, None] + np.where(mask, columns, 0)
    return torch.from_numpy(np.where(mask, entries_N[index], filler).astype(entries_N.dtype)), torch.from_numpy(mask)
