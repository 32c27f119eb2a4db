"""Tokens with dense behaviour distributions, and the loss written out term by term over dense logits.

Nothing here calls the product's weights: every row of the grid is spelled out again from its definition, token by
token, so that a mistake in ``learner.losses`` has no place to hide.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from learner.corrections import Correction
from learner.head import LossTokens, drawn_logprobs, head_loss, sequence_rule
from learner.losses import TokenRule, clamped, second_moment_bound, token_rule

N, D, V, K, S = 23, 6, 17, 5, 8
SEQUENCES = (7, 1, 9, 6)
C0, GAMMA = 1.5, 0.9


def make_tokens(seed: int = 0, *, spread: float = 1.0, vocab: int = V, width: int = K) -> tuple[Tensor, LossTokens]:
    """Dense q (N, V) and tokens drawn from it in four sequences, with heads of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    q_NV = torch.softmax(spread * torch.randn(N, vocab, generator=generator, dtype=torch.float64), dim=1)
    target_N = torch.multinomial(q_NV, 1, generator=generator).squeeze(1)
    top = q_NV.topk(width, dim=1)
    lengths_N = torch.randint(1, width + 1, (N,), generator=generator)
    valid_NK = torch.arange(width)[None] < lengths_N[:, None]
    head_q_NK = torch.where(valid_NK, top.values, top.values[:, :1])
    sequence_N = torch.repeat_interleave(torch.arange(len(SEQUENCES)), torch.tensor(SEQUENCES))
    return q_NV, LossTokens(
        target_N=target_N,
        log_q_N=q_NV.gather(1, target_N[:, None]).squeeze(1).log(),
        signal_N=torch.tensor([0.7, -1.1, -0.4, 0.9], dtype=torch.float64)[sequence_N],
        lag_N=torch.randint(0, 4, (N,), generator=generator),
        head_ids_NK=torch.where(valid_NK, top.indices, top.indices[:, :1]),
        head_q_NK=head_q_NK,
        head_valid_NK=valid_NK,
        tail_q_N=1 - torch.where(valid_NK, head_q_NK, 0.0).sum(1),
        sequence_N=sequence_N,
        draws_NS=torch.rand(N, S, generator=generator, dtype=torch.float64),
    )


def make_head(seed: int = 0, vocab: int = V, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    hidden_ND = torch.randn(N, D, generator=generator, dtype=torch.float64) * scale
    weight_VD = torch.randn(vocab, D, generator=generator, dtype=torch.float64)
    return hidden_ND.requires_grad_(), weight_VD.requires_grad_()


def cap_of(lag: float) -> float:
    return 1 + (C0 - 1) * GAMMA**lag


def caps_of(lag_N: Tensor) -> Tensor:
    return torch.tensor([cap_of(lag) for lag in lag_N.tolist()], dtype=torch.float64)


def rule_of(correction: Correction, tokens: LossTokens, log_p_N: Tensor) -> TokenRule:
    """The product's rule for these tokens, with caps in float64."""
    bound = None
    if correction.second_moment is not None:
        bound = second_moment_bound(clamped(log_p_N - tokens.log_q_N), tokens.signal_N, correction.second_moment)
    caps = caps_of(tokens.lag_N).to(tokens.log_q_N.dtype) if correction.aged else None
    rule = token_rule(tokens.lag_N, tokens.signal_N, correction, cap_N=caps, log_bound=bound)
    return rule if correction.level == "token" else sequence_rule(rule, correction, tokens, log_p_N)


def fused(hidden: Tensor, weight: Tensor, tokens: LossTokens, correction: Correction, *, temperature: float = 1.0,
          rows: int = 7) -> Tensor:
    """The product's loss."""
    chunks = {"temperature": temperature, "rows": rows}
    log_p_N = drawn_logprobs(hidden, weight, tokens.target_N, **chunks)
    return head_loss(hidden, weight, tokens, rule_of(correction, tokens, log_p_N), **chunks)[0]


def gradients(hidden: Tensor, weight: Tensor, tokens: LossTokens, correction: Correction,
              **options: float) -> tuple[Tensor, ...]:
    return torch.autograd.grad(fused(hidden, weight, tokens, correction, **options), (hidden, weight))


# -- the same, naively -------------------------------------------------------------------------------------


def statistic(name: str, p: float, q: float) -> float:
    x = math.log(p / q)
    return {"ratio": p / q, "tv": abs(p - q), "k1": -x, "k2": x * x / 2, "k3": p / q - 1 - x}[name]


def edge(name: str, value: float, p: float, q: float) -> float:
    """The ratio at which the statistic has ``value``, on the side of p/q, by search."""
    if name in ("ratio", "k1"):
        return value if name == "ratio" else math.exp(-value)
    low, high = (1.0, 1e6) if p > q else (1e-9, 1.0)
    for _ in range(200):
        middle = math.sqrt(low * high)
        if (p > q) == (statistic(name, middle * q, q) < value):
            low = middle
        else:
            high = middle
    return low


def band_for(correction: Correction, advantage: float, ratio: float, lag: int, bound: float) -> tuple[float, float]:
    """The band that holds for one token or sequence; everything when none does."""
    everything = (-math.inf, math.inf)
    band = correction.band
    if advantage < 0 and correction.negative_band is not None:
        band = correction.negative_band
    if correction.sign == "positive" and advantage < 0:
        return everything
    if correction.sign == "negative" and advantage > 0:
        return everything
    if correction.second_moment is not None:
        band = (math.exp(-bound), math.exp(bound))
    if correction.aged:
        band = (band[0], cap_of(lag))
    if correction.per_lag:
        band = (band[0] ** lag, band[1] ** lag) if lag else everything
    if correction.sign == "ppo" and not (ratio > 1 if advantage > 0 else ratio < 1):
        return (-math.inf, correction.negative_band[1]) if correction.negative_band and advantage < 0 else everything
    return band


def weight_of(correction: Correction, p: float, q: float, advantage: float, lag: int, bound: float) -> float:
    """w of a token with probabilities p and q."""
    if correction.unit_at_lag_0 and lag == 0:
        return 1.0
    ratio = p / q
    low, high = band_for(correction, advantage, ratio, lag, bound)
    value = statistic(correction.statistic, p, q)
    if low <= value <= high:
        return 1.0 if correction.inside == "one" else ratio
    return 0.0 if correction.outside == "drop" else edge(correction.statistic, low if value < low else high, p, q)


def sequence_weight(correction: Correction, log_ratios: list[float], ps: list[float], advantage: float) -> float:
    """w of a sequence from its tokens' log-ratios and p."""
    share = 1.0 if correction.level == "sequence_sum" else 1.0 / len(log_ratios)
    ratio = math.exp(share * sum(log_ratios))
    values = [statistic(correction.statistic, p, p / math.exp(x)) for p, x in zip(ps, log_ratios, strict=True)]
    value = ratio if correction.statistic == "ratio" else share * sum(values)
    low, high = band_for(correction, advantage, ratio, 1, 0.0)
    if low <= value <= high:
        return 1.0 if correction.inside == "one" else ratio
    return 0.0 if correction.outside == "drop" else min(max(ratio, low), high)


def q_hat(p_NV: Tensor, tokens: LossTokens) -> Tensor:
    """q on the head, p's shape with q's mass on the tail."""
    in_head = torch.zeros_like(p_NV).scatter_(1, tokens.head_ids_NK, 1.0) > 0
    tail = torch.where(in_head, 0.0, p_NV)
    tail = tail * (tokens.tail_q_N / tail.sum(1))[:, None]
    return tail.scatter(1, tokens.head_ids_NK, tokens.head_q_NK)


def selected(q_V: Tensor, tokens: LossTokens, row: int) -> list[int]:
    """The further draws of a row: head entries in order, then the tail by ascending id."""
    head = tokens.head_ids_NK[row][tokens.head_valid_NK[row]].tolist()
    order = head + [v for v in range(len(q_V)) if v not in head]
    sums = q_V[order].cumsum(0)
    assert tokens.draws_NS is not None
    return [order[int((sums > u * sums[-1]).int().argmax())] for u in tokens.draws_NS[row].tolist()]


def naive_loss(logits_NV: Tensor, tokens: LossTokens, correction: Correction) -> Tensor:
    """-A (sg[w(p_a/q_a)] log p_a - sum_v sg[q_v w(p_v/q_v)] log p_v), term by term over the whole vocabulary.

    With ``topk`` the product adds terms whose gradient is 0 to fold the tail into the head, so values differ there.
    """
    log_p_NV = torch.log_softmax(logits_NV, dim=1)
    p_NV = log_p_NV.detach().exp()
    q_NV = q_hat(p_NV, tokens)
    log_p_a = log_p_NV.gather(1, tokens.target_N[:, None]).squeeze(1)
    log_ratio = (log_p_a.detach() - tokens.log_q_N).tolist()
    bound = naive_bound(log_ratio, tokens.signal_N.tolist(), correction.second_moment)
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(tokens)):
        advantage, lag = float(tokens.signal_N[row]), int(tokens.lag_N[row])
        members = (tokens.sequence_N == tokens.sequence_N[row]).nonzero().squeeze(1).tolist()
        fixed = None if correction.level == "token" else sequence_weight(
            correction, [log_ratio[m] for m in members], [math.exp(float(log_p_a[m].detach())) for m in members],
            advantage,
        )

        def weigh(p: float, q: float, *, fixed=fixed, advantage=advantage, lag=lag) -> float:
            return weight_of(correction, p, q, advantage, lag, bound) if fixed is None else fixed

        q_a = float(tokens.log_q_N[row].exp())
        score = weigh(q_a * math.exp(log_ratio[row]), q_a) * log_p_a[row]
        for v, share in centre_of(q_NV[row], tokens, row, correction):
            score = score - share * weigh(float(p_NV[row, v]), float(q_NV[row, v])) * log_p_NV[row, v]
        loss = loss - tokens.signal_N[row] * score
    return loss


def centre_of(q_V: Tensor, tokens: LossTokens, row: int, correction: Correction) -> list[tuple[int, float]]:
    """(id, q) over which the score is averaged."""
    if correction.centring == "none":
        return []
    if correction.centring == "draws":
        return [(v, 1 / S) for v in selected(q_V, tokens, row)]
    head = set(tokens.head_ids_NK[row].tolist())
    return [(v, q) for v, q in enumerate(q_V.tolist()) if correction.centring != "support" or v in head]


def naive_bound(log_ratio: list[float], signal: list[float], limit: float | None) -> float:
    """Drop tokens that move out, most extreme first, until the mean square of the rest is small enough.

    Half way between the last that went and the first that stayed.
    """
    if limit is None:
        return math.inf
    kept, gone = list(log_ratio), []
    out = sorted((x for x, a in zip(log_ratio, signal, strict=True) if x * a > 0), key=abs)
    while out and sum(x * x for x in kept) / len(kept) > limit:
        gone.append(abs(out.pop()))
        kept.remove(next(x for x in kept if abs(x) == gone[-1]))
    return (gone[-1] + (abs(out[-1]) if out else 0.0)) / 2 if gone else math.inf


def with_centring(correction: Correction, centring: str) -> Correction:
    return replace(correction, centring=centring)
