"""The losses against the formulas written out naively, and the facts that must hold whatever the numbers.

The naive form is differentiated by autograd over dense logits in float64; the product's form is the fused head.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from learner.config import LossConfig
from learner.head import LossTokens, chunk_rows, head_loss, logits_gradient
from learner.losses import PRESETS, TokenRule, clamped, measure, ratio_weights, token_rule

N, D, V, K = 23, 6, 17, 5
PRESET_NAMES = sorted(PRESETS)


def make_tokens(seed: int = 0, *, vocab: int = V, width: int = K, spread: float = 1.0) -> tuple[Tensor, LossTokens]:
    """Dense behaviour distributions q (N, V) and the tokens drawn from them, with heads of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    q_NV = torch.softmax(spread * torch.randn(N, vocab, generator=generator, dtype=torch.float64), dim=1)
    target_N = torch.multinomial(q_NV, 1, generator=generator).squeeze(1)
    top = q_NV.topk(width, dim=1)
    lengths_N = torch.randint(1, width + 1, (N,), generator=generator)
    valid_NK = torch.arange(width)[None] < lengths_N[:, None]
    head_ids_NK = torch.where(valid_NK, top.indices, top.indices[:, :1])
    head_q_NK = torch.where(valid_NK, top.values, top.values[:, :1])
    return q_NV, LossTokens(
        target_N=target_N,
        log_q_N=q_NV.gather(1, target_N[:, None]).squeeze(1).log(),
        signal_N=torch.randn(N, generator=generator, dtype=torch.float64),
        lag_N=torch.randint(0, 4, (N,), generator=generator),
        head_ids_NK=head_ids_NK,
        head_q_NK=head_q_NK,
        head_valid_NK=valid_NK,
        tail_q_N=1 - torch.where(valid_NK, head_q_NK, 0.0).sum(1),
    )


def make_head(seed: int = 0, vocab: int = V) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    hidden_ND = torch.randn(N, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(vocab, D, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden_ND, weight_VD


def weight_of(ratio: Tensor, lag: Tensor, config: LossConfig) -> Tensor:
    """w(ratio), written out from the table in LEARNING."""
    preset = PRESETS[config.preset]
    cap = 1 + (config.cap - 1) * torch.pow(config.cap_decay, lag.float())  # the product keeps caps in float32
    if preset.weight == "one":
        return torch.ones_like(ratio)
    weight = ratio if preset.weight == "ratio" else torch.minimum(ratio, cap)
    return torch.where(lag == 0, 1.0, weight) if preset.unit_at_lag_0 else weight


def naive_loss(logits_NV: Tensor, tokens: LossTokens, config: LossConfig) -> Tensor:
    """-A (sg[w(p_a/q_a)] log p_a - sum_H sg[q_v w(p_v/q_v) - alpha p_v] log p_v), term by term."""
    log_p_NV = torch.log_softmax(logits_NV, dim=1)
    log_p_a = log_p_NV.gather(1, tokens.target_N[:, None]).squeeze(1)
    ratio = (log_p_a - tokens.log_q_N).clamp(-20, 20).exp().detach()
    score = weight_of(ratio, tokens.lag_N, config) * log_p_a
    if PRESETS[config.preset].centred:
        log_p_H = log_p_NV.gather(1, tokens.head_ids_NK)
        p, q, lag = log_p_H.exp().detach(), tokens.head_q_NK, tokens.lag_N[:, None]
        valid = tokens.head_valid_NK
        rho = tokens.tail_q_N / (1 - torch.where(valid, p, 0.0).sum(1))
        alpha = rho * weight_of(1 / rho, tokens.lag_N, config)
        coefficient = q * weight_of(p / q, lag, config) - alpha[:, None] * p
        score = score - torch.where(valid, coefficient * log_p_H, 0.0).sum(1)
    return -(tokens.signal_N * score).sum()


def fused(hidden: Tensor, weight: Tensor, tokens: LossTokens, config: LossConfig, *, temperature: float = 1.0,
          rows: int = 7) -> Tensor:
    rule = token_rule(tokens.lag_N, config)
    return head_loss(hidden, weight, tokens, rule, temperature=temperature, rows=rows)[0]


def q_hat(p_NV: Tensor, tokens: LossTokens) -> Tensor:
    """q on the head, p's shape with q's mass on the tail."""
    in_head = torch.zeros_like(p_NV).scatter_(1, tokens.head_ids_NK, 1.0) > 0
    tail = torch.where(in_head, 0.0, p_NV)
    tail = tail * (tokens.tail_q_N / tail.sum(1))[:, None]
    return tail.scatter(1, tokens.head_ids_NK, tokens.head_q_NK)


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_head_equals_the_naive_loss(preset, temperature):
    config = LossConfig(preset=preset, cap=1.5)
    _, tokens = make_tokens()
    hidden, weight = make_head()
    naive = naive_loss(hidden @ weight.T / temperature, tokens, config)
    expected = torch.autograd.grad(naive, (hidden, weight))
    loss = fused(hidden, weight, tokens, config, temperature=temperature)
    got = torch.autograd.grad(3.0 * loss, (hidden, weight))
    torch.testing.assert_close(loss, naive, rtol=1e-6, atol=1e-9)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, 3.0 * right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 8, N, 100])
def test_chunks_do_not_change_the_gradient(rows):
    config = LossConfig()
    _, tokens = make_tokens()
    hidden, weight = make_head()
    whole = torch.autograd.grad(fused(hidden, weight, tokens, config, rows=N), (hidden, weight))
    cut = torch.autograd.grad(fused(hidden, weight, tokens, config, rows=rows), (hidden, weight))
    for left, right in zip(cut, whole, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


def test_chunk_rows_follow_the_memory():
    assert chunk_rows(49_152, 32) == 170
    assert chunk_rows(2**24, 1) == 8


@pytest.mark.parametrize("lag", [0, 2])
def test_a_expected_centred_gradient_is_zero_for_constant_advantage(lag):
    """(a) Under q-hat, the sum over all drawn tokens of their gradients vanishes."""
    config = LossConfig(preset="tis+sc", cap=1.3)
    generator = torch.Generator().manual_seed(5)
    logits_V = torch.randn(V, generator=generator, dtype=torch.float64)
    _, one = make_tokens(5)
    row = one.rows(3, 4)
    p_V = torch.softmax(logits_V, 0)
    q_V = q_hat(p_V[None], row)[0]
    tokens = LossTokens(
        target_N=torch.arange(V), log_q_N=q_V.log(), signal_N=q_V, lag_N=torch.full((V,), lag),
        head_ids_NK=row.head_ids_NK.expand(V, -1), head_q_NK=row.head_q_NK.expand(V, -1),
        head_valid_NK=row.head_valid_NK.expand(V, -1), tail_q_N=row.tail_q_N.expand(V),
    )
    grad_VV, _ = logits_gradient(logits_V.repeat(V, 1), tokens, token_rule(tokens.lag_N, config))
    assert grad_VV.abs().max() > 1e-3
    torch.testing.assert_close(grad_VV.sum(0), torch.zeros(V, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("preset", ["sc", "tis+sc"])
def test_b_top_k_equals_dense_on_the_reconstructed_q_hat(preset):
    """(b) A head of all ids that holds q-hat gives the same gradient as the short head."""
    config = LossConfig(preset=preset, cap=1.4)
    _, tokens = make_tokens(2)
    hidden, weight = make_head(2)
    q_NV = q_hat(torch.softmax(hidden @ weight.T, 1).detach(), tokens)
    dense = LossTokens(
        tokens.target_N, tokens.log_q_N, tokens.signal_N, tokens.lag_N, torch.arange(V).expand(N, V), q_NV,
        torch.ones(N, V, dtype=torch.bool), torch.zeros(N, dtype=torch.float64),
    )
    short = torch.autograd.grad(fused(hidden, weight, tokens, config), (hidden, weight))
    full = torch.autograd.grad(fused(hidden, weight, dense, config), (hidden, weight))
    for left, right in zip(short, full, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_c_uncapped_importance_sampling_needs_no_centring():
    """(c) With w(r) = r the centring term vanishes, so centring changes nothing."""
    _, tokens = make_tokens(3)
    hidden, weight = make_head(3)
    uncapped = torch.full((N,), torch.inf), torch.zeros(N, dtype=torch.bool)
    grads = []
    for centred in (False, True):
        rule = TokenRule(unit_N=uncapped[1], cap_N=uncapped[0], centred=centred)
        loss, _ = head_loss(hidden, weight, tokens, rule, temperature=1.0, rows=7)
        grads.append(torch.autograd.grad(loss, (hidden, weight)))
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("preset", ["sc", "tis+sc"])
def test_d_equal_policies_leave_nothing_to_centre(preset):
    """(d) p = q: every coefficient is 0 and the gradient is the plain policy gradient."""
    _, tokens = make_tokens(4)
    hidden, weight = make_head(4)
    p_NV = torch.softmax(hidden @ weight.T, 1).detach()
    head_q = p_NV.gather(1, tokens.head_ids_NK)
    on_policy = LossTokens(
        tokens.target_N, p_NV.gather(1, tokens.target_N[:, None]).squeeze(1).log(), tokens.signal_N, tokens.lag_N,
        tokens.head_ids_NK, head_q, tokens.head_valid_NK, 1 - torch.where(tokens.head_valid_NK, head_q, 0.0).sum(1),
    )
    config = LossConfig(preset=preset)
    loss, stats = head_loss(
        hidden, weight, on_policy, token_rule(tokens.lag_N, config), temperature=1.0, rows=7
    )
    assert stats.centring_N.max() < 1e-12
    plain = fused(hidden, weight, on_policy, LossConfig(preset="pg"))
    for left, right in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(plain, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_stable_truncated_forms_equal_the_naive_ones():
    p, q = torch.rand(100, dtype=torch.float64) + 1e-3, torch.rand(100, dtype=torch.float64) + 1e-3
    cap, no = torch.full((100,), 1.7), torch.zeros(100, dtype=torch.bool)
    torch.testing.assert_close(measure(p, q, no, cap), q * torch.minimum(p / q, cap), rtol=1e-6, atol=0)
    rho = q / p
    torch.testing.assert_close(
        measure(p, q, no, cap), p * torch.minimum(torch.ones(()), cap * rho), rtol=1e-6, atol=0
    )
    nothing = measure(torch.zeros(3), torch.zeros(3), no[:3], torch.tensor([2.0, torch.inf, 1.0]))
    assert torch.equal(nothing, torch.zeros(3))


def test_hand_computed_case():
    """V = 3, head {0: .5}, tail .5, p = (.25, .25, .5), drawn 0, lag 0: m = (.5, 1/6, 1/3), gradient -(e_0 - m)."""
    logits = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    tokens = LossTokens(
        target_N=torch.tensor([0]), log_q_N=torch.tensor([math.log(0.5)], dtype=torch.float64),
        signal_N=torch.tensor([1.0], dtype=torch.float64), lag_N=torch.tensor([0]),
        head_ids_NK=torch.tensor([[0]]), head_q_NK=torch.tensor([[0.5]], dtype=torch.float64),
        head_valid_NK=torch.tensor([[True]]), tail_q_N=torch.tensor([0.5], dtype=torch.float64),
    )
    grad, stats = logits_gradient(logits.clone(), tokens, token_rule(tokens.lag_N, LossConfig(preset="tis+sc")))
    torch.testing.assert_close(grad, torch.tensor([[-0.5, 1 / 6, 1 / 3]], dtype=torch.float64))
    assert stats.head_p_N.item() == pytest.approx(0.25)
    assert stats.log_ratio_N.item() == pytest.approx(math.log(0.5))
    # Lag 1, cap 2 gamma^1 ...: min(p, C q) = p on head and tail: nothing is cut, so only w_a (e_0 - p) remains.
    stale = LossTokens(*(torch.tensor([1]) if f is tokens.lag_N else f for f in vars(tokens).values()))
    grad, _ = logits_gradient(logits.clone(), stale, token_rule(stale.lag_N, LossConfig(preset="tis+sc")))
    torch.testing.assert_close(grad, -0.5 * torch.tensor([[0.75, -0.25, -0.5]], dtype=torch.float64))


def test_the_cap_ages_with_the_token():
    rule = token_rule(torch.tensor([0, 1, 5]), LossConfig(preset="tis", cap=3.0, cap_decay=0.5))
    assert rule.cap_N.tolist() == [3.0, 2.0, 1.0625]
    assert not rule.unit_N.any()
    weights = ratio_weights(torch.tensor([0.0, 10.0, -1.0]), rule)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)])


def test_lag_zero_is_only_centred_in_the_default_regime():
    rule = token_rule(torch.tensor([0, 1]), LossConfig(preset="tis+sc"))
    assert rule.unit_N.tolist() == [True, False]
    assert rule.centred


def test_log_ratios_are_clamped():
    assert clamped(torch.tensor([1e9, -math.inf, 3.0])).tolist() == [20.0, -20.0, 3.0]


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("scale", [0.0, 30.0, 300.0])
def test_extreme_logits_stay_finite(preset, scale):
    """Peaked, flat, tokens of vanishing probability, a tail of p that underflows: finite loss and gradient."""
    _, tokens = make_tokens(6, spread=3.0)
    single = LossTokens(*(f.float() if f.is_floating_point() else f for f in vars(tokens).values()))
    logits = scale * torch.randn(N, V, generator=torch.Generator().manual_seed(1))
    logits[0] = torch.nn.functional.one_hot(single.head_ids_NK[0, 0], V) * 500.0
    grad, stats = logits_gradient(logits.clone(), single, token_rule(single.lag_N, LossConfig(preset=preset)))
    assert torch.isfinite(grad).all()
    assert torch.isfinite(stats.loss_N).all()
    assert stats.weight_N.max() <= math.exp(20.0) * 1.001
    if preset in ("pg", "sc", "tis", "tis+sc"):
        assert grad.abs().max() <= 4.0 * single.signal_N.abs().max()
    torch.testing.assert_close(grad.sum(1), torch.zeros(N), rtol=0, atol=1e-5 * float(grad.abs().max() + 1))


def test_an_empty_tail_gives_nothing_to_it():
    _, tokens = make_tokens(7)
    hidden, weight = make_head(7)
    head_q = tokens.head_q_NK / torch.where(tokens.head_valid_NK, tokens.head_q_NK, 0.0).sum(1, keepdim=True)
    closed = LossTokens(
        tokens.head_ids_NK[:, 0], head_q[:, 0].log(), tokens.signal_N, tokens.lag_N, tokens.head_ids_NK, head_q,
        tokens.head_valid_NK, torch.zeros(N, dtype=torch.float64),
    )
    grad, _ = logits_gradient(
        (hidden @ weight.T).detach(), closed, token_rule(torch.zeros(N, dtype=torch.int64), LossConfig(preset="sc"))
    )
    target = torch.nn.functional.one_hot(closed.target_N, V).double()
    expected = target.scatter_add(1, closed.head_ids_NK, -torch.where(closed.head_valid_NK, head_q, 0.0))
    torch.testing.assert_close(grad, -tokens.signal_N[:, None] * expected, rtol=1e-9, atol=1e-12)
