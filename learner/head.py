"""The language-model head and the loss in one pass, without logits of the whole batch.

Legend: N loss tokens, D hidden width, V vocabulary, K head width, C tokens of a chunk.

Weights and centring coefficients carry no gradient, so the gradient of a token with respect to its logits is known
as soon as its logits are:

    d logits = -s A ( w_a e_a - m + (M - w_a) p )

(see ``learner.losses`` for m and M). Each chunk therefore computes its logits once, turns the same buffer into their
gradient, and adds to dH and dW; the backward pass only scales. Memory: one (C, V) buffer, dH and dW.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from learner.losses import TAIL_FLOOR, TokenRule, clamped, measure, ratio_weights


@dataclass(frozen=True)
class LossTokens:
    """What the loss needs of N tokens (float32, int64). Padded head entries repeat entry 0 and are not ``valid``."""

    target_N: Tensor  #: drawn token ids
    log_q_N: Tensor  #: behaviour log-prob of the drawn token (natural log, the run's temperature)
    signal_N: Tensor  #: s A: aggregation scale times advantage
    lag_N: Tensor  #: learner version minus the token's version
    head_ids_NK: Tensor
    head_q_NK: Tensor  #: behaviour probability of each head entry
    head_valid_NK: Tensor  #: bool
    tail_q_N: Tensor  #: behaviour mass outside the head

    def __len__(self) -> int:
        return len(self.target_N)

    def rows(self, start: int, stop: int) -> LossTokens:
        """Tokens ``start`` to ``stop``."""
        return LossTokens(*(getattr(self, field.name)[start:stop] for field in fields(self)))


@dataclass(frozen=True)
class TokenStats:
    """What was seen at each of N loss tokens; no gradient, float32."""

    loss_N: Tensor  #: the token's share of the loss
    log_ratio_N: Tensor  #: log p_a - log q_a, clamped
    weight_N: Tensor  #: w(p_a / q_a)
    truncated_N: Tensor  #: 1 where the ratio was cut at its cap, else 0
    entropy_N: Tensor  #: entropy of p, nats
    head_p_N: Tensor  #: mass p gives to the committed head
    head_q_N: Tensor  #: mass q gives to it
    centring_N: Tensor  #: L1 of the centring coefficients over the head

    @staticmethod
    def concat(parts: list[TokenStats]) -> TokenStats:
        """All tokens of ``parts`` in order."""
        return TokenStats(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(TokenStats)))


def chunk_rows(vocab: int, mib: int) -> int:
    """Tokens whose float32 logits fit ``mib`` MiB, at least 8."""
    return max(8, mib * 2**20 // (4 * vocab))


def head_loss(hidden_ND: Tensor, weight_VD: Tensor, tokens: LossTokens, rule: TokenRule, *, temperature: float,
              rows: int) -> tuple[Tensor, TokenStats]:
    """Loss (scalar, differentiable in ``hidden_ND`` and ``weight_VD``) and statistics of the tokens.

    ``hidden_ND`` are the final hidden states that predict the tokens; p is the softmax of
    ``hidden @ weight.T / temperature`` over the whole vocabulary.
    """
    loss, *stats = _HeadLoss.apply(hidden_ND, weight_VD, tokens, rule, temperature, rows)  # type: ignore[no-untyped-call]
    return loss, TokenStats(*stats)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, tokens: LossTokens, rule: TokenRule,
                temperature: float, rows: int) -> tuple[Tensor, ...]:
        grad_hidden_ND, grad_weight_VD = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD)
        parts = []
        for start in range(0, len(tokens), rows):
            stop = min(start + rows, len(tokens))
            hidden_CD = hidden_ND[start:stop]
            logits_CV = (hidden_CD @ weight_VD.T).div_(temperature)
            part_rule = TokenRule(rule.unit_N[start:stop], rule.cap_N[start:stop], rule.centred)
            grad_CV, stats = logits_gradient(logits_CV, tokens.rows(start, stop), part_rule)
            grad_CV.div_(temperature)
            torch.matmul(grad_CV, weight_VD, out=grad_hidden_ND[start:stop])
            grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
            parts.append(stats)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        stats = TokenStats.concat(parts)
        outputs = tuple(getattr(stats, field.name) for field in fields(TokenStats))
        ctx.mark_non_differentiable(*outputs)
        return stats.loss_N.sum(), *outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return grad_hidden_ND * grad_loss, grad_weight_VD * grad_loss, None, None, None, None


def logits_gradient(logits_CV: Tensor, tokens: LossTokens, rule: TokenRule) -> tuple[Tensor, TokenStats]:
    """Gradient of the loss with respect to ``logits_CV`` (already divided by the temperature), and statistics.

    ``logits_CV`` is used up: its buffer is overwritten.
    """
    log_p_CV = logits_CV.sub_(logits_CV.logsumexp(dim=1, keepdim=True))
    log_p_a_N = log_p_CV.gather(1, tokens.target_N[:, None]).squeeze(1)
    log_p_head_NK = log_p_CV.gather(1, tokens.head_ids_NK)
    p_CV = log_p_CV.exp()
    entropy_N = -torch.linalg.vecdot(p_CV, log_p_CV.clamp_(min=-1e4))
    p_head_NK = log_p_head_NK.exp()
    p_tail_CV = p_CV.scatter_(1, tokens.head_ids_NK, 0.0)
    tail_p_N = p_tail_CV.sum(dim=1)

    log_ratio_N = clamped(log_p_a_N - tokens.log_q_N)
    weight_N = ratio_weights(log_ratio_N, rule)
    m_NK, tail_m_N = _centring_measure(p_head_NK, tail_p_N, tokens, rule)
    mass_m_N = torch.where(tokens.head_valid_NK, m_NK, 0.0).sum(dim=1) + tail_m_N
    tail_rate_N = torch.where(tail_m_N > 0, tail_m_N / tail_p_N.clamp(min=TAIL_FLOOR), 0.0)

    p_rate_N = mass_m_N - weight_N
    grad_CV = p_tail_CV.mul_((p_rate_N - tail_rate_N)[:, None])
    grad_CV.scatter_(1, tokens.head_ids_NK, p_head_NK * p_rate_N[:, None] - m_NK)
    grad_CV.scatter_add_(1, tokens.target_N[:, None], weight_N[:, None])
    grad_CV.mul_(-tokens.signal_N[:, None])

    coefficients_NK = torch.where(tokens.head_valid_NK, m_NK - tail_rate_N[:, None] * p_head_NK, 0.0)
    centre_N = torch.where(coefficients_NK != 0, coefficients_NK * log_p_head_NK, 0.0).sum(dim=1)
    return grad_CV, TokenStats(
        loss_N=-tokens.signal_N * (weight_N * log_p_a_N - centre_N),
        log_ratio_N=log_ratio_N,
        weight_N=weight_N,
        truncated_N=(~rule.unit_N & (log_ratio_N.exp() > rule.cap_N)).to(weight_N.dtype),
        entropy_N=entropy_N,
        head_p_N=torch.where(tokens.head_valid_NK, p_head_NK, 0.0).sum(dim=1),
        head_q_N=torch.where(tokens.head_valid_NK, tokens.head_q_NK, 0.0).sum(dim=1),
        centring_N=coefficients_NK.abs().sum(dim=1),
    )


def _centring_measure(p_head_NK: Tensor, tail_p_N: Tensor, tokens: LossTokens,
                      rule: TokenRule) -> tuple[Tensor, Tensor]:
    """The measure m on the head entries and its mass on the tail; both 0 without centring."""
    if not rule.centred:
        return torch.zeros_like(p_head_NK), torch.zeros_like(tail_p_N)
    m_NK = measure(p_head_NK, tokens.head_q_NK, rule.unit_N[:, None], rule.cap_N[:, None])
    tail_m_N = measure(tail_p_N, tokens.tail_q_N, rule.unit_N, rule.cap_N)
    return m_NK, torch.where(tail_p_N > TAIL_FLOOR, tail_m_N, 0.0)
