"""Per-token weights of the policy gradient, and the score centring that goes with them.

Legend: p next-token distribution of the learner's weights, q behaviour distribution (the committed head of the
token's own version, and the mass of its tail), a the drawn token, r = p_a / q_a, A advantage, s aggregation scale,
xi_v = grad log p_v, H head, N loss tokens, K head width.

The gradient of a token is ``-s A (w(r) xi_a - sum_v qhat_v w(p_v / qhat_v) xi_v)``; the second term is there only
with centring. ``qhat`` is q on the head, and p's own shape scaled to q's mass on the tail (Marek & Ryabinin 2026,
arXiv 2609.20807). Because sum_v p_v xi_v = 0, the tail folds into the head:
``sum_H (q_v w(p_v/q_v) - alpha p_v) xi_v`` with ``alpha = rho w(1/rho)``, ``rho = (1 - sum_H q) / (1 - sum_H p)``.

With the *measure* ``m_v = qhat_v w(p_v / qhat_v)`` and ``M = sum_v m_v`` the centring term in logit space is
``m - M p``, which needs no division by a small tail. The three weights give

=========== ==================== ============= ======================
weight      w(r)                 m on the head tail of m
=========== ==================== ============= ======================
one         1                    q             q(tail)
ratio       r                    p             p(tail)
truncated   min(r, C)            min(p, C q)   min(p(tail), C q(tail))
=========== ==================== ============= ======================

(for ``ratio`` m = p and M = 1, so the centring term is 0). Truncated importance sampling: Ionides 2008. The cap ages
with the token: C(lag) = 1 + (C0 - 1) gamma^lag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from learner.config import LossConfig

#: Log-ratios are clamped to +- this (nats) before they are exponentiated.
LOG_RATIO_LIMIT: Final = 20.0
#: A tail of p below this mass is taken as empty: its shape is lost to underflow.
TAIL_FLOOR: Final = 1e-30


@dataclass(frozen=True)
class Correction:
    """One row of the grid of corrections."""

    weight: str  #: one, ratio, truncated
    centred: bool
    unit_at_lag_0: bool = False  #: w = 1 for tokens of the learner's own version


#: Named presets. ``tis+sc`` is the default regime: lag 0 is only centred, staler tokens are truncated and centred.
PRESETS: Final[dict[str, Correction]] = {
    "pg": Correction("one", centred=False),
    "sc": Correction("one", centred=True),
    "is": Correction("ratio", centred=False),
    "tis": Correction("truncated", centred=False),
    "tis+sc": Correction("truncated", centred=True, unit_at_lag_0=True),
}


@dataclass(frozen=True)
class TokenRule:
    """How each token of a microbatch is corrected; a pure function of its lag."""

    unit_N: Tensor  #: bool; w = 1
    cap_N: Tensor  #: float; largest ratio, inf when there is no cap
    centred: bool


def token_rule(lag_N: Tensor, config: LossConfig) -> TokenRule:
    """The rule of each token from its lag in versions (int64, shape (N,))."""
    correction = PRESETS[config.preset]
    cap_N = torch.full(lag_N.shape, torch.inf, dtype=torch.float32)
    unit_N = torch.zeros(lag_N.shape, dtype=torch.bool)
    if correction.weight == "truncated":
        cap_N = 1.0 + (config.cap - 1.0) * torch.pow(config.cap_decay, lag_N.to(torch.float32))
    if correction.weight == "one":
        unit_N = torch.ones_like(unit_N)
    elif correction.unit_at_lag_0:
        unit_N = lag_N == 0
    return TokenRule(unit_N, cap_N, correction.centred)


def ratio_weights(log_ratio_N: Tensor, rule: TokenRule) -> Tensor:
    """w(r) of each drawn token, no gradient. ``log_ratio_N`` = log p_a - log q_a, clamped by the caller."""
    return torch.where(rule.unit_N, 1.0, torch.minimum(log_ratio_N.exp(), rule.cap_N))


def clamped(log_ratio_N: Tensor) -> Tensor:
    """Log-ratios within +-``LOG_RATIO_LIMIT``."""
    return log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def measure(p: Tensor, q: Tensor, unit: Tensor, cap: Tensor) -> Tensor:
    """The measure q w(p/q) of masses p, q >= 0 in its stable form: q, p or min(p, C q). All arguments broadcast."""
    return torch.where(unit, q, torch.minimum(p, torch.where(torch.isinf(cap), p, cap * q)))
