"""Per-token weights of the policy gradient, and the score centring that goes with them.

Legend: p next-token distribution of the learner's weights, q behaviour distribution (the committed head of the
token's own version, and the mass of its tail), a the drawn token, r = p_a / q_a, A advantage, s aggregation scale,
xi_v = grad log p_v, H head, N loss tokens, K head width, S further draws.

The gradient of a token is ``-s A (w(r) xi_a - sum_v qhat_v w(p_v / qhat_v) xi_v)``; the second term is there only
with centring. ``qhat`` is q on the head, and p's own shape scaled to q's mass on the tail (Marek & Ryabinin 2026,
arXiv 2609.20807). Because sum_v p_v xi_v = 0, the tail folds into the head:
``sum_H (q_v w(p_v/q_v) - alpha p_v) xi_v`` with ``alpha = rho w(1/rho)``, ``rho = (1 - sum_H q) / (1 - sum_H p)``.

With the *measure* ``m_v = qhat_v w(p_v / qhat_v)`` and ``M = sum_v m_v`` the centring term in logit space is
``m - M p``, which needs no division by a small tail. Every token-level row of ``learner.corrections`` comes down to an
interval of masses [low q - slack, high q + slack] in which p must lie, so that its measure has a stable form:

=========== ==================== ============= ======================
weight      w(r)                 m on the head tail of m
=========== ==================== ============= ======================
one         1                    q             q(tail)
ratio       r                    p             p(tail)
truncated   min(r, C)            min(p, C q)   min(p(tail), C q(tail))
masked      r in the band else 0 p or 0        p(tail) or 0
=========== ==================== ============= ======================

(for ``ratio`` m = p and M = 1, so the centring term is 0). The tail counts as one entry, which is exact for bands of
the ratio because p / qhat is the same for all of it. A sequence's weight is one number for all its tokens and does
not depend on which token is drawn here, so its measure is w q.

Modes of centring: ``topk`` takes H from the committed head. ``exact`` is the same formula over a head that holds the
whole vocabulary. ``draws`` (StableReinforce) replaces the sum by S further draws from qhat, seeded: m has 1/S at each.
``support`` is for samplers that cannot leave the head (top-k or nucleus sampling): the tail of m is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from learner.corrections import Correction, ratio_interval

if TYPE_CHECKING:
    from learner.corrections import Centring

#: Log-ratios are clamped to +- this (nats) before they are exponentiated.
LOG_RATIO_LIMIT: Final = 20.0
#: A tail of p below this mass is taken as empty: its shape is lost to underflow.
TAIL_FLOOR: Final = 1e-30


@dataclass(frozen=True)
class TokenRule:
    """How each of N tokens is corrected. w(p/q) depends on p and q of the token alone unless ``fixed_N`` is there."""

    low_N: Tensor  #: float; p < low q - slack is outside
    high_N: Tensor  #: float, may be inf; p > high q + slack is outside
    unit_N: Tensor  #: bool; w = 1 whatever the ratio
    slack_N: Tensor  #: probability mass
    drop: bool = False  #: outside weighs 0, else as much as the edge
    one: bool = False  #: inside weighs 1, else p/q
    centring: Centring = "none"
    fixed_N: Tensor | None = None  #: weights that were decided by sequence
    cut_N: Tensor | None = None  #: bool; whether the sequence was outside its band, where ``fixed_N`` is there

    def rows(self, start: int, stop: int) -> TokenRule:
        """The rule of tokens ``start`` to ``stop``."""
        cut: dict[str, Any] = {n: value[start:stop] for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **cut)


def token_rule(lag_N: Tensor, signal_N: Tensor, correction: Correction, *, cap_N: Tensor | None = None,
               log_bound: float | None = None) -> TokenRule:
    """The rule of each token, a pure function of its lag and of the sign of its advantage.

    Args:
        lag_N: lag in versions, int64.
        signal_N: a number with the sign of the advantage.
        cap_N: C(lag) of each token, for an ``aged`` correction.
        log_bound: bound of |log r|, for one with a ``second_moment`` (see ``second_moment_bound``).
    """
    positive, negative = correction.bands()
    positive_N = signal_N > 0
    if log_bound is not None:
        positive = negative = (math.exp(-log_bound), math.exp(log_bound) if log_bound < math.inf else math.inf)
    intervals = [ratio_interval(correction.statistic, band) for band in (positive, negative)]
    low_N, high_N, slack_N = (_per_sign(positive_N, *ends, like=signal_N) for ends in zip(*intervals, strict=True))
    if correction.aged and cap_N is not None:
        high_N = cap_N
    if correction.per_lag:
        power_N = lag_N.to(signal_N.dtype)
        low_N = torch.where(lag_N > 0, low_N.pow(power_N), 0.0)
        high_N = torch.where(lag_N > 0, high_N.pow(power_N), torch.inf)
    if correction.sign == "ppo":
        low_N = torch.where(positive_N, -torch.inf, low_N)
        if correction.negative_band is None:
            high_N = torch.where(positive_N, high_N, torch.inf)
    unit_N = lag_N == 0 if correction.unit_at_lag_0 else torch.zeros_like(positive_N)
    return TokenRule(
        low_N, high_N, unit_N, slack_N, correction.outside == "drop", correction.inside == "one", correction.centring
    )


def _per_sign(positive_N: Tensor, if_positive: float, if_negative: float, *, like: Tensor) -> Tensor:
    """One of two numbers for each token or sequence, in the type of ``like``."""
    choices = torch.tensor([if_negative, if_positive], dtype=like.dtype, device=like.device)
    return choices[positive_N.to(torch.int64)]


def clamped(log_ratio_N: Tensor) -> Tensor:
    """Log-ratios within +-``LOG_RATIO_LIMIT``; NaN stays NaN."""
    return log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def measure(p: Tensor, q: Tensor, rule: TokenRule) -> Tensor:
    """The measure q w(p/q) of masses p, q >= 0 in its stable form; (N,), or (N, entries) with one rule per row."""
    low, high, unit, slack, fixed = rule.low_N, rule.high_N, rule.unit_N, rule.slack_N, rule.fixed_N
    if p.ndim == 2:
        low, high, unit, slack = low[:, None], high[:, None], unit[:, None], slack[:, None]
        fixed = None if fixed is None else fixed[:, None]
    if fixed is not None:
        return fixed * q
    least = torch.where(torch.isinf(low), -torch.inf, low * q - slack)
    most = torch.where(torch.isinf(high), torch.inf, high * q + slack)
    inside = q if rule.one else p
    if rule.drop:
        weighted = torch.where((p >= least) & (p <= most), inside, 0.0)
    elif rule.one:
        weighted = torch.where(p < least, least, torch.where(p > most, most, q))
    else:
        weighted = p.clamp(min=least.clamp(min=0.0)).minimum(most)
    return torch.where(unit, q, weighted)


def ratio_weights(log_ratio_N: Tensor, log_q_N: Tensor, rule: TokenRule) -> tuple[Tensor, Tensor]:
    """(w(r), whether r was outside its interval) of each drawn token, no gradient; log-ratios clamped by the caller."""
    if rule.fixed_N is not None and rule.cut_N is not None:
        return rule.fixed_N, rule.cut_N
    ratio_N = log_ratio_N.exp()
    margin_N = torch.where(rule.slack_N > 0, rule.slack_N * torch.exp(-log_q_N), 0.0)
    low_N, high_N = rule.low_N - margin_N, rule.high_N + margin_N
    outside_N = ((ratio_N < low_N) | (ratio_N > high_N)) & ~rule.unit_N
    edge_N = torch.zeros_like(ratio_N) if rule.drop else ratio_N.clamp(min=low_N.clamp(min=0.0)).minimum(high_N)
    inside_N = torch.ones_like(ratio_N) if rule.one else ratio_N
    return torch.where(rule.unit_N, 1.0, torch.where(outside_N, edge_N, inside_N)), outside_N


def sequence_weights(log_p_N: Tensor, log_q_N: Tensor, signal_N: Tensor, sequence_N: Tensor,
                     correction: Correction) -> tuple[Tensor, Tensor]:
    """(w, whether its sequence was outside the band) of each token, (N,), under a correction of sequences; no gradient.

    Args:
        log_p_N, log_q_N: log-probs of the drawn tokens.
        signal_N: a number with the sign of the advantage, equal within a sequence.
        sequence_N: index of each token's sequence, 0 to the number of sequences less 1.
    """
    log_ratio_N = clamped(log_p_N - log_q_N)
    log_ratio_S = _by_sequence(log_ratio_N, sequence_N, correction)
    ratio_S = clamped(log_ratio_S).exp()
    statistic_S = ratio_S if correction.statistic == "ratio" else _by_sequence(
        _statistic(log_ratio_N, log_p_N, log_q_N, correction), sequence_N, correction
    )
    positive_N = signal_N > 0
    positive_S = torch.zeros(len(ratio_S), dtype=torch.bool, device=signal_N.device)
    positive_S[sequence_N] = positive_N
    low_S, high_S = _sequence_band(positive_S, ratio_S, correction)
    outside_S = (statistic_S < low_S) | (statistic_S > high_S)
    inside_S = torch.ones_like(ratio_S) if correction.inside == "one" else ratio_S
    edge_S = torch.zeros_like(ratio_S) if correction.outside == "drop" else ratio_S.clamp(low_S, high_S)
    return torch.where(outside_S, edge_S, inside_S).to(log_q_N.dtype)[sequence_N], outside_S[sequence_N]


def _sequence_band(positive_S: Tensor, ratio_S: Tensor, correction: Correction) -> tuple[Tensor, Tensor]:
    """Band of the statistic for each sequence; with ``ppo`` only on the far side of ratio 1."""
    positive, negative = correction.bands()

    ends = zip(positive, negative, strict=True)
    low_S, high_S = (_per_sign(positive_S, *end, like=ratio_S) for end in ends)
    if correction.sign != "ppo":
        return low_S, high_S
    if correction.statistic == "ratio":
        open_above_S = ~positive_S if correction.negative_band is None else torch.zeros_like(positive_S)
        return torch.where(positive_S, -torch.inf, low_S), torch.where(open_above_S, torch.inf, high_S)
    moving_out_S = torch.where(positive_S, ratio_S > 1, ratio_S < 1)
    return torch.where(moving_out_S, low_S, -torch.inf), torch.where(moving_out_S, high_S, torch.inf)


def _statistic(log_ratio_N: Tensor, log_p_N: Tensor, log_q_N: Tensor, correction: Correction) -> Tensor:
    if correction.statistic == "tv":
        return (log_p_N.exp() - log_q_N.exp()).abs()
    if correction.statistic == "k1":
        return -log_ratio_N
    if correction.statistic == "k2":
        return log_ratio_N.square() / 2
    return torch.expm1(log_ratio_N) - log_ratio_N


def _by_sequence(value_N: Tensor, sequence_N: Tensor, correction: Correction) -> Tensor:
    """Sum or mean of each sequence, in float64."""
    count = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    sums_S = torch.zeros(count, dtype=torch.float64, device=value_N.device).index_add_(0, sequence_N, value_N.double())
    if correction.level == "sequence_sum":
        return sums_S
    return sums_S / torch.bincount(sequence_N, minlength=count)


def second_moment_bound(log_ratio_N: Tensor, signal_N: Tensor, limit: float) -> float:
    """Bound b of |log r| such that, without the tokens beyond it that move further out, mean (log r)^2 <= ``limit``.

    The tokens that can be dropped are those with A > 0 and r > 1 or A < 0 and r < 1; the most extreme go first. inf
    when nothing has to go (M2PO, arXiv 2510.01161).
    """
    square_N = log_ratio_N.double().square()
    out_N = torch.where(signal_N > 0, log_ratio_N > 0, (log_ratio_N < 0) & (signal_N < 0))
    extreme_M = square_N[out_N].sort(descending=True).values
    gone = torch.cat([extreme_M.new_zeros(1), extreme_M.cumsum(0)])
    left = len(square_N) - torch.arange(len(gone), dtype=torch.float64, device=square_N.device)
    holds = torch.where(left > 0, (square_N.sum() - gone) / left.clamp(min=1), 0.0) <= limit
    dropped = int(holds.int().argmax()) if bool(holds.any()) else len(extreme_M)
    if dropped == 0:
        return math.inf
    last_out, first_in = float(extreme_M[dropped - 1]), float(extreme_M[dropped]) if dropped < len(extreme_M) else 0.0
    return (math.sqrt(last_out) + math.sqrt(first_in)) / 2  # in the gap, so that rounding decides nothing

