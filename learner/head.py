"""The language-model head and the loss in one pass, without logits of the whole batch.

Legend: N loss tokens, D hidden width, V vocabulary, K head width, S further draws, C tokens of a chunk, R of a block.

Weights and centring coefficients carry no gradient, so the gradient of a token with respect to its logits is known
as soon as its logits are:

    d logits = -s A ( w_a e_a - m + (M - w_a) p )

(see ``learner.losses`` for m and M). Each chunk therefore computes its logits once, turns the same buffer into their
gradient, and adds to dH and dW; the backward pass only scales, in place. The softmax walks through the chunk in blocks
of rows that fit the cache. Memory: one (C, V) buffer, one (R, V) buffer, dH and dW. A correction by sequence needs the
log-probs of all its tokens first and computes the logits twice.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from learner.corrections import Correction
from learner.losses import TAIL_FLOOR, TokenRule, clamped, measure, ratio_weights, sequence_weights

#: Bytes of logits that are turned into their gradient at a time on a CPU: about a core's second-level cache.
_BLOCK_BYTES: Final = 2**21


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
    sequence_N: Tensor  #: index of the token's sequence within these tokens' microbatch
    draws_NS: Tensor | None = None  #: uniform numbers in (0, 1) that select the further draws (centring ``draws``)

    def __len__(self) -> int:
        return len(self.target_N)

    def rows(self, start: int, stop: int) -> LossTokens:
        """Tokens ``start`` to ``stop``."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: value[start:stop] for name, value in given.items()})


@dataclass(frozen=True)
class TokenStats:
    """What was seen at each of N loss tokens; no gradient, float32."""

    loss_N: Tensor  #: the token's share of the loss
    log_ratio_N: Tensor  #: log p_a - log q_a, clamped
    weight_N: Tensor  #: w(p_a / q_a)
    truncated_N: Tensor  #: 1 where the ratio was outside its band, else 0
    entropy_N: Tensor  #: entropy of p, nats
    head_p_N: Tensor  #: mass p gives to the committed head
    head_q_N: Tensor  #: mass q gives to it
    head_kl_N: Tensor  #: KL(q || p) over head entries and tail as a whole, nats
    centring_N: Tensor  #: L1 of the centring coefficients over head or draws

    def to_cpu(self) -> TokenStats:
        """The same, where metrics are made."""
        return TokenStats(*(getattr(self, field.name).cpu() for field in fields(self)))

    @staticmethod
    def concat(parts: list[TokenStats]) -> TokenStats:
        """All tokens of ``parts`` in order."""
        return TokenStats(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(TokenStats)))

    @staticmethod
    def none() -> TokenStats:
        """No token."""
        return TokenStats(*(torch.zeros(0) for _ in fields(TokenStats)))


def chunk_rows(vocab: int, mib: int) -> int:
    """Tokens whose float32 logits fit ``mib`` MiB, at least 8."""
    return max(8, mib * 2**20 // (4 * vocab))


def head_loss(hidden_ND: Tensor, weight_VD: Tensor, tokens: LossTokens, rule: TokenRule, *, temperature: float,
              rows: int) -> tuple[Tensor, TokenStats]:
    """Loss (scalar, differentiable in ``hidden_ND`` and ``weight_VD``) and statistics of the tokens.

    ``hidden_ND`` are the final hidden states that predict the tokens; p is the softmax of
    ``hidden @ weight.T / temperature`` over the whole vocabulary. The matrix products are in the type of ``hidden_ND``
    and ``weight_VD``, everything else at least in float32.
    """
    loss, *stats = _HeadLoss.apply(hidden_ND, weight_VD, tokens, rule, temperature, rows)  # type: ignore[no-untyped-call]
    return loss, TokenStats(*stats)


@torch.no_grad()
def drawn_logprobs(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, temperature: float,
                   rows: int) -> Tensor:
    """(N,) log p of the drawn tokens, a chunk of logits at a time."""
    parts = []
    for start in range(0, len(target_N), rows):
        logits_CV = _logits(hidden_ND[start : start + rows], weight_VD, temperature)
        target_C1 = target_N[start : start + rows, None]
        parts.append((logits_CV.gather(1, target_C1) - logits_CV.logsumexp(dim=1, keepdim=True)).squeeze(1))
    return torch.cat(parts)


def sequence_rule(rule: TokenRule, correction: Correction, tokens: LossTokens, log_p_N: Tensor) -> TokenRule:
    """``rule`` with the weights that ``correction`` gives to whole sequences."""
    fixed_N, cut_N = sequence_weights(log_p_N, tokens.log_q_N, tokens.signal_N, tokens.sequence_N, correction)
    return replace(rule, fixed_N=fixed_N, cut_N=cut_N)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, tokens: LossTokens, rule: TokenRule,
                temperature: float, rows: int) -> tuple[Tensor, ...]:
        grad_hidden_ND, grad_weight_VD = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD)
        parts = []
        for start in range(0, len(tokens), rows):
            stop = min(start + rows, len(tokens))
            hidden_CD = hidden_ND[start:stop]
            logits_CV = _logits(hidden_CD, weight_VD, temperature)
            grad_CV, stats = logits_gradient(
                logits_CV, tokens.rows(start, stop), rule.rows(start, stop), scale=1.0 / temperature
            )
            grad_CV = grad_CV.to(hidden_ND.dtype)
            torch.matmul(grad_CV, weight_VD, out=grad_hidden_ND[start:stop])
            grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
            parts.append(stats)
            del logits_CV, grad_CV  # before the next chunk's are made
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        stats = TokenStats.concat(parts)
        outputs = tuple(getattr(stats, field.name) for field in fields(TokenStats))
        ctx.mark_non_differentiable(*outputs)
        return stats.loss_N.sum(), *outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        # In place: the graph is used once, and copies would double the memory.
        return grad_hidden_ND.mul_(grad_loss), grad_weight_VD.mul_(grad_loss), None, None, None, None


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    """(C, V) logits over the temperature, at least float32."""
    logits_CV = hidden_CD @ weight_VD.T
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return wide_CV if temperature == 1.0 else wide_CV.div_(temperature)


def logits_gradient(logits_CV: Tensor, tokens: LossTokens, rule: TokenRule, *,
                    scale: float = 1.0) -> tuple[Tensor, TokenStats]:
    """``scale`` times the gradient of the loss with respect to ``logits_CV`` (over the temperature), and statistics.

    ``logits_CV`` is used up: its buffer holds the result.
    """
    target_C1 = tokens.target_N[:, None]
    drawn_C1, head_CK = logits_CV.gather(1, target_C1), logits_CV.gather(1, tokens.head_ids_NK)
    needs_tail = rule.centring in ("topk", "exact")
    log_sum_C1, entropy_C, tail_p_C = _softmax_(logits_CV, tokens.head_ids_NK if needs_tail else None)
    log_p_a_C, log_p_head_CK = (drawn_C1 - log_sum_C1).squeeze(1), head_CK - log_sum_C1

    log_ratio_C = clamped(log_p_a_C - tokens.log_q_N)
    weight_C, outside_C = ratio_weights(log_ratio_C, tokens.log_q_N, rule)
    centre = _centre(logits_CV, log_p_head_CK, tail_p_C, tokens, rule)

    p_rate_C, factor_C = centre.mass_R - weight_C, -scale * tokens.signal_N
    grad_CV = logits_CV.mul_(((p_rate_C - centre.tail_rate_R) * factor_C)[:, None])
    p_head_CK = log_p_head_CK.exp()
    if centre.head_m_RK is not None:
        at_head_CK = (p_head_CK * p_rate_C[:, None] - centre.head_m_RK) * factor_C[:, None]
        grad_CV.scatter_(1, tokens.head_ids_NK, at_head_CK)
    if centre.drawn_RS is not None and centre.drawn_m_RS is not None:
        grad_CV.scatter_add_(1, centre.drawn_RS, -centre.drawn_m_RS * factor_C[:, None])
    grad_CV.scatter_add_(1, target_C1, (weight_C * factor_C)[:, None])

    head_p_C = torch.where(tokens.head_valid_NK, p_head_CK, 0.0).sum(dim=1)
    return grad_CV, TokenStats(
        loss_N=-tokens.signal_N * (weight_C * log_p_a_C - centre.term_R),
        log_ratio_N=log_ratio_C,
        weight_N=weight_C,
        truncated_N=outside_C.to(weight_C.dtype),
        entropy_N=entropy_C,
        head_p_N=head_p_C,
        head_q_N=torch.where(tokens.head_valid_NK, tokens.head_q_NK, 0.0).sum(dim=1),
        head_kl_N=_head_kl(log_p_head_CK, head_p_C, tokens),
        centring_N=centre.l1_R,
    )


def _softmax_(logits_CV: Tensor, head_ids_CK: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits into probabilities in place; (C, 1) log-sum-exp, (C,) entropy, (C,) mass outside the head.

    The mass is a sum over entries: 1 - (mass of the head) loses its digits where the tail is small. It is 0 without
    ``head_ids_CK``.
    """
    rows, vocab = logits_CV.shape
    step = rows if logits_CV.is_cuda else max(1, _BLOCK_BYTES // (logits_CV.element_size() * vocab))
    log_sums, entropies, tails = [], [], []
    for start, logits_RV in zip(range(0, rows, max(1, step)), torch.split(logits_CV, max(1, step)), strict=True):
        p_RV = torch.softmax(logits_RV, dim=1)
        top_R1 = logits_RV.argmax(dim=1, keepdim=True)  # p is at least 1/V there: its logarithm is safe
        log_sum_R1 = logits_RV.gather(1, top_R1) - p_RV.gather(1, top_R1).log()
        entropies.append(log_sum_R1.squeeze(1) - torch.linalg.vecdot(p_RV, logits_RV))
        log_sums.append(log_sum_R1)
        logits_RV.copy_(p_RV)
        if head_ids_CK is not None:
            tails.append(p_RV.scatter_(1, head_ids_CK[start : start + step], 0.0).sum(dim=1))
    entropy_C = torch.cat(entropies)
    return torch.cat(log_sums), entropy_C, torch.cat(tails) if tails else torch.zeros_like(entropy_C)


@dataclass(frozen=True)
class _Centre:
    """The measure m of a block of tokens: on head entries, at further draws, spread over the tail like p."""

    mass_R: Tensor  #: M, the whole mass of m
    tail_rate_R: Tensor  #: m / p on the tail
    term_R: Tensor  #: sum of coefficients times log p, for the value of the loss
    l1_R: Tensor
    head_m_RK: Tensor | None = None
    drawn_RS: Tensor | None = None
    drawn_m_RS: Tensor | None = None


def _centre(p_RV: Tensor, log_p_head_RK: Tensor, tail_p_R: Tensor, tokens: LossTokens, rule: TokenRule) -> _Centre:
    """What is to be centred."""
    if rule.centring == "none":
        zero_R = torch.zeros_like(tokens.log_q_N)
        return _Centre(zero_R, zero_R, zero_R, zero_R)
    if rule.centring == "draws":
        return _draws_centred(p_RV, tokens, rule)
    return _head_centred(log_p_head_RK, tail_p_R, tokens, rule)


def _head_centred(log_p_head_RK: Tensor, tail_p_R: Tensor, tokens: LossTokens, rule: TokenRule) -> _Centre:
    """From the committed head; the tail of m is shaped like p, or empty when q cannot leave the head (``support``)."""
    p_head_RK = log_p_head_RK.exp()
    valid_RK, m_RK = tokens.head_valid_NK, measure(p_head_RK, tokens.head_q_NK, rule)
    tail_m_R = torch.zeros_like(tail_p_R)
    if rule.centring != "support":
        tail_m_R = torch.where(tail_p_R > TAIL_FLOOR, measure(tail_p_R, tokens.tail_q_N, rule), 0.0)
    tail_rate_R = torch.where(tail_m_R > 0, tail_m_R / tail_p_R.clamp(min=TAIL_FLOOR), 0.0)
    coefficient_RK = torch.where(valid_RK, m_RK - tail_rate_R[:, None] * p_head_RK, 0.0)
    return _Centre(
        mass_R=torch.where(valid_RK, m_RK, 0.0).sum(dim=1) + tail_m_R,
        tail_rate_R=tail_rate_R,
        term_R=torch.where(coefficient_RK != 0, coefficient_RK * log_p_head_RK, 0.0).sum(dim=1),
        l1_R=coefficient_RK.abs().sum(dim=1),
        head_m_RK=m_RK,
    )


def _draws_centred(p_RV: Tensor, tokens: LossTokens, rule: TokenRule) -> _Centre:
    """From S draws of q-hat: m has w(p/q) / S at each."""
    assert tokens.draws_NS is not None, "centring by draws needs the draws"
    drawn_RS, q_RS = _draw(p_RV, tokens, tokens.draws_NS)
    p_RS = p_RV.gather(1, drawn_RS)
    m_RS = torch.where(q_RS > 0, measure(p_RS, q_RS, rule) / q_RS, 0.0) / drawn_RS.shape[1]
    return _Centre(
        mass_R=m_RS.sum(dim=1),
        tail_rate_R=torch.zeros_like(tokens.log_q_N),
        term_R=torch.where(m_RS != 0, m_RS * p_RS.clamp(min=TAIL_FLOOR).log(), 0.0).sum(dim=1),
        l1_R=m_RS.sum(dim=1),
        drawn_RS=drawn_RS,
        drawn_m_RS=m_RS,
    )


def _draw(p_RV: Tensor, tokens: LossTokens, draws_RS: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, q-hat) of the tokens that uniform numbers select, by inverse cumulative distribution."""
    q_RK = torch.where(tokens.head_valid_NK, tokens.head_q_NK, 0.0)
    sums_RK = q_RK.cumsum(dim=1)
    head_RK1 = sums_RK[:, -1:]
    scaled_RS = draws_RS * (head_RK1 + tokens.tail_q_N[:, None])  # the head's rounding leaves no gap
    entry_RS = torch.searchsorted(sums_RK.contiguous(), scaled_RS.contiguous(), right=True)
    in_head_RS = entry_RS < q_RK.shape[1]
    entry_RS = entry_RS.clamp(max=q_RK.shape[1] - 1)
    ids_RS, q_RS = tokens.head_ids_NK.gather(1, entry_RS), q_RK.gather(1, entry_RS)
    rows = (~in_head_RS).any(dim=1).nonzero().squeeze(1)
    if len(rows) == 0:
        return ids_RS, q_RS
    tail_QV = p_RV[rows].scatter_(1, tokens.head_ids_NK[rows], 0.0)
    sums_QV = tail_QV.cumsum(dim=1)
    total_Q1 = sums_QV[:, -1:].clamp(min=TAIL_FLOOR)
    place_QS = (scaled_RS[rows] - head_RK1[rows]) / tokens.tail_q_N[rows, None].clamp(min=TAIL_FLOOR)
    chosen_QS = torch.searchsorted(sums_QV, (place_QS.clamp(0.0, 1.0 - 1e-6) * total_Q1).contiguous(), right=True)
    chosen_QS = chosen_QS.clamp(max=p_RV.shape[1] - 1)
    q_QS = tail_QV.gather(1, chosen_QS) * (tokens.tail_q_N[rows, None] / total_Q1)
    ids_RS[rows] = torch.where(in_head_RS[rows], ids_RS[rows], chosen_QS)
    q_RS[rows] = torch.where(in_head_RS[rows], q_RS[rows], q_QS)
    return ids_RS, q_RS


def _head_kl(log_p_head_RK: Tensor, head_p_R: Tensor, tokens: LossTokens) -> Tensor:
    """KL(q || p) with the tail as one entry: a lower bound of the whole, without sampling noise."""
    q_RK, tail_q_R = tokens.head_q_NK, tokens.tail_q_N
    entries_RK = q_RK * (q_RK.clamp(min=TAIL_FLOOR).log() - log_p_head_RK.clamp(min=-1e4))
    tail_R = tail_q_R * (tail_q_R.clamp(min=TAIL_FLOOR).log() - (1.0 - head_p_R).clamp(min=1e-7).log())
    return torch.where(tokens.head_valid_NK & (q_RK > 0), entries_RK, 0.0).sum(dim=1) + torch.where(
        tail_q_R > 0, tail_R, 0.0
    )
