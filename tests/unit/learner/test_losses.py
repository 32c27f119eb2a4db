"""The grid of corrections against the formulas written out naively, and the facts that must hold whatever the numbers.

The naive form is differentiated by autograd over dense logits in float64; the product's form is the fused head.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.config import LossConfig
from learner.corrections import PRESETS, Correction, correction_of, ratio_interval
from learner.head import LossTokens, chunk_rows, head_loss, logits_gradient
from learner.losses import TokenRule, clamped, measure, ratio_weights, second_moment_bound, token_rule
from tests.unit.learner.loss_cases import (
    C0,
    GAMMA,
    N,
    S,
    V,
    cap_of,
    caps_of,
    fused,
    gradients,
    make_head,
    make_tokens,
    naive_loss,
    q_hat,
    rule_of,
    with_centring,
)

PRESET_NAMES = sorted(PRESETS)
CENTRINGS = ["none", "topk", "draws", "support"]
BANDS = {"ratio": (0.7, 1.4), "tv": (0.0, 0.05), "k1": (-0.3, 0.2), "k2": (0.0, 0.1), "k3": (0.0, 0.1)}


def is_valid(values: dict[str, object]) -> bool:
    try:
        Correction(**values)
    except ValueError:
        return False
    return True


GRID = [
    Correction(**values)
    for level, stat, outside, inside, sign in itertools.product(
        ["token", "sequence_sum", "sequence_mean"], BANDS, ["clamp", "drop"], ["ratio", "one"],
        ["both", "positive", "negative", "ppo"],
    )
    if is_valid(values := {
        "level": level, "statistic": stat, "band": BANDS[stat], "outside": outside, "inside": inside, "sign": sign,
    })
]


def close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], *, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol)


def check(correction: Correction, *, temperature: float = 1.0, seed: int = 0) -> None:
    _, tokens = make_tokens(seed)
    hidden, weight = make_head(seed, scale=0.5)
    naive = naive_loss(hidden @ weight.T / temperature, tokens, correction)
    expected = torch.autograd.grad(naive, (hidden, weight))
    loss = fused(hidden, weight, tokens, correction, temperature=temperature)
    got = torch.autograd.grad(3.0 * loss, (hidden, weight))
    if correction.centring != "topk":
        torch.testing.assert_close(loss, naive, rtol=1e-6, atol=1e-9)
    close(got, tuple(3.0 * g for g in expected))


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_head_equals_the_naive_loss(preset, temperature):
    check(PRESETS[preset], temperature=temperature)


@pytest.mark.parametrize("centring", ["topk", "draws", "support"])
@pytest.mark.parametrize("preset", ["pg", "is", "tis", "mis", "ppo", "two_sided", "gspo", "topr", "m2po", "decoupled"])
def test_every_correction_composes_with_every_centring(preset, centring):
    check(with_centring(PRESETS[preset], centring), seed=1)


def test_the_value_is_that_of_the_coefficient_form():
    """-A (w log p_a - sum_H (q w(p/q) - alpha p) log p), alpha = rho w(1/rho), rho = (1 - sum q) / (1 - sum p)."""
    _, tokens = make_tokens(1)
    hidden, weight = make_head(1)
    log_p = torch.log_softmax(hidden @ weight.T, 1).detach()
    caps = caps_of(tokens.lag_N)
    log_p_a = log_p.gather(1, tokens.target_N[:, None]).squeeze(1)
    score = torch.minimum((log_p_a - tokens.log_q_N).exp(), caps) * log_p_a
    log_p_H, valid = log_p.gather(1, tokens.head_ids_NK), tokens.head_valid_NK
    p, q = log_p_H.exp(), tokens.head_q_NK
    rho = tokens.tail_q_N / (1 - torch.where(valid, p, 0.0).sum(1))
    alpha = rho * torch.minimum(1 / rho, caps)
    coefficient = q * torch.minimum(p / q, caps[:, None]) - alpha[:, None] * p
    expected = -(tokens.signal_N * (score - torch.where(valid, coefficient * log_p_H, 0.0).sum(1))).sum()
    got = fused(hidden, weight, tokens, with_centring(PRESETS["tis"], "topk"))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_the_whole_grid_equals_its_definition():
    assert len(GRID) == 5 * 16 + 2 * (16 + 4 * 8)
    for correction in GRID:
        check(correction, seed=2)


def test_the_naive_loss_tells_the_rows_apart():
    """Otherwise equality with it would say nothing."""
    cases = [(make_tokens(seed, spread=spread)[1], make_head(seed, scale=scale)) for seed, spread, scale in (
        (0, 2.0, 1.0), (1, 0.3, 0.1), (2, 0.3, 0.1), (3, 2.0, 1.0),
    )]
    values = {
        name: tuple(round(float(naive_loss((h @ w.T).detach(), t, PRESETS[name])), 9) for t, (h, w) in cases)
        for name in PRESET_NAMES
    }
    assert values.pop("icepop") == values["mis"]
    assert len(set(values.values())) == len(values)


@pytest.mark.parametrize(("statistic", "band"), BANDS.items())
def test_an_interval_of_the_ratio_is_the_band_of_the_statistic(statistic, band):
    low, high, slack = ratio_interval(statistic, band)
    for q, p in itertools.product([0.02, 0.3, 0.6], [0.001, 0.02, 0.25, 0.31, 0.5, 0.9]):
        x = math.log(p / q)
        value = {"ratio": p / q, "tv": abs(p - q), "k1": -x, "k2": x * x / 2, "k3": p / q - 1 - x}[statistic]
        assert (low * q - slack <= p <= high * q + slack) == (band[0] <= value <= band[1])


@pytest.mark.parametrize("rows", [1, 8, N, 100])
def test_chunks_do_not_change_the_gradient(rows):
    _, tokens = make_tokens()
    hidden, weight = make_head()
    for name in ("tis+sc", "stable_reinforce", "gspo"):
        whole = gradients(hidden, weight, tokens, PRESETS[name], rows=N)
        close(gradients(hidden, weight, tokens, PRESETS[name], rows=rows), whole, rtol=1e-12, atol=1e-14)


def test_chunk_rows_follow_the_memory():
    assert chunk_rows(49_152, 32) == 170
    assert chunk_rows(2**24, 1) == 8


# -- invariants of centring ----------------------------------------------------------------------------------


def every_token(row: LossTokens, q_V: Tensor, lag: int, sign: float) -> LossTokens:
    """One position with each token drawn once, weighted by its probability under q-hat."""
    return LossTokens(
        target_N=torch.arange(V), log_q_N=q_V.log(), signal_N=sign * q_V, lag_N=torch.full((V,), lag),
        head_ids_NK=row.head_ids_NK.expand(V, -1), head_q_NK=row.head_q_NK.expand(V, -1),
        head_valid_NK=row.head_valid_NK.expand(V, -1), tail_q_N=row.tail_q_N.expand(V),
        sequence_N=torch.zeros(V, dtype=torch.int64), draws_NS=None,
    )


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("preset", ["sc", "tis+sc", "fresh_sc", "mis+sc", "ppo+sc", "two_sided", "decoupled"])
def test_a_expected_centred_gradient_is_zero_for_constant_advantage(preset, lag, sign):
    """(a) Under q-hat, the sum over all drawn tokens of their gradients vanishes."""
    correction = with_centring(PRESETS[preset], "topk")
    generator = torch.Generator().manual_seed(5)
    logits_V = torch.randn(V, generator=generator, dtype=torch.float64)
    _, one = make_tokens(5)
    row = one.rows(3, 4)
    p_V = torch.softmax(logits_V, 0)
    tokens = every_token(row, q_hat(p_V[None], row)[0], lag, sign)
    grad_VV, _ = logits_gradient(logits_V.repeat(V, 1), tokens, rule_of(correction, tokens, p_V.log()))
    assert grad_VV.abs().max() > 1e-3
    torch.testing.assert_close(grad_VV.sum(0), torch.zeros(V, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_holds_for_a_closed_support():
    """(a) where q cannot leave the head: the expected score is that of the head alone."""
    correction = with_centring(PRESETS["is"], "support")
    _, one = make_tokens(5)
    row = one.rows(3, 4)
    head_q = row.head_q_NK / torch.where(row.head_valid_NK, row.head_q_NK, 0.0).sum()
    row = replace(row, head_q_NK=head_q, tail_q_N=torch.zeros(1, dtype=torch.float64))
    logits_V = torch.randn(V, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    q_V = torch.zeros(V, dtype=torch.float64).scatter(0, row.head_ids_NK[0], row.head_q_NK[0])
    drawn = q_V.nonzero().squeeze(1)
    tokens = every_token(row, q_V.clamp(min=1e-300), 0, 1.0)
    tokens = LossTokens(*(None if value is None else value[drawn] for value in vars(tokens).values()))
    grad, _ = logits_gradient(logits_V.repeat(len(drawn), 1), tokens, rule_of(correction, tokens, logits_V[drawn]))
    torch.testing.assert_close(grad.sum(0), torch.zeros(V, dtype=torch.float64), rtol=0, atol=1e-12)


def dense(tokens: LossTokens, q_NV: Tensor) -> LossTokens:
    """The same tokens with heads that hold the whole vocabulary."""
    return replace(
        tokens, head_ids_NK=torch.arange(V).expand(N, V), head_q_NK=q_NV,
        head_valid_NK=torch.ones(N, V, dtype=torch.bool), tail_q_N=torch.zeros(N, dtype=torch.float64),
    )


@pytest.mark.parametrize("preset", ["sc", "tis+sc", "mis+sc", "ppo+sc", "topr", "gspo"])
def test_b_top_k_equals_dense_on_the_reconstructed_q_hat(preset):
    """(b) A head of all ids that holds q-hat gives the same gradient as the short head."""
    _, tokens = make_tokens(2)
    hidden, weight = make_head(2)
    q_NV = q_hat(torch.softmax(hidden @ weight.T, 1).detach(), tokens)
    short = gradients(hidden, weight, tokens, with_centring(PRESETS[preset], "topk"))
    exact = gradients(hidden, weight, dense(tokens, q_NV), with_centring(PRESETS[preset], "exact"))
    close(short, exact, rtol=1e-9, atol=1e-12)


def test_exact_centring_needs_no_reconstruction():
    """With the true dense q, the centring term is the expectation of the weighted score under q, by autograd."""
    q_NV, tokens = make_tokens(8)
    hidden, weight = make_head(8)
    logits = hidden @ weight.T
    log_p = torch.log_softmax(logits, 1)
    p = log_p.detach().exp()
    capped = q_NV * torch.minimum(p / q_NV, caps_of(tokens.lag_N)[:, None])
    w_a = (capped / q_NV).gather(1, tokens.target_N[:, None]).squeeze(1)
    log_p_a = log_p.gather(1, tokens.target_N[:, None]).squeeze(1)
    loss = -(tokens.signal_N * (w_a * log_p_a - (capped * log_p).sum(1))).sum()
    exact = with_centring(PRESETS["tis"], "exact")
    close(gradients(hidden, weight, dense(tokens, q_NV), exact), torch.autograd.grad(loss, (hidden, weight)))


def test_c_uncapped_importance_sampling_needs_no_centring():
    """(c) With w(r) = r every coefficient is 0, so centring changes nothing."""
    _, tokens = make_tokens(3)
    hidden, weight = make_head(3)
    centred = with_centring(PRESETS["is"], "topk")
    close(
        gradients(hidden, weight, tokens, centred), gradients(hidden, weight, tokens, PRESETS["is"]),
        rtol=1e-9, atol=1e-12,
    )
    rule = token_rule(tokens.lag_N, tokens.signal_N, centred)
    _, stats = head_loss(hidden, weight, tokens, rule, temperature=1.0, rows=7)
    assert stats.centring_N.max() < 1e-12


@pytest.mark.parametrize("preset", ["sc", "tis+sc", "mis+sc", "ppo+sc"])
def test_d_equal_policies_leave_nothing_to_centre(preset):
    """(d) p = q: every coefficient is 0 and the gradient is the plain policy gradient."""
    _, tokens = make_tokens(4)
    hidden, weight = make_head(4)
    p_NV = torch.softmax(hidden @ weight.T, 1).detach()
    head_q = p_NV.gather(1, tokens.head_ids_NK)
    on_policy = replace(
        tokens, log_q_N=p_NV.gather(1, tokens.target_N[:, None]).squeeze(1).log(), head_q_NK=head_q,
        tail_q_N=1 - torch.where(tokens.head_valid_NK, head_q, 0.0).sum(1),
    )
    rule = rule_of(PRESETS[preset], on_policy, on_policy.log_q_N)
    loss, stats = head_loss(hidden, weight, on_policy, rule, temperature=1.0, rows=7)
    assert stats.centring_N.max() < 1e-12
    assert stats.head_kl_N.abs().max() < 1e-12
    plain = gradients(hidden, weight, on_policy, PRESETS["pg"])
    close(torch.autograd.grad(loss, (hidden, weight)), plain, rtol=1e-9, atol=1e-12)


def test_e_draws_move_exactly_the_drawn_token_and_the_draws():
    """(e) In logit space, at most 1 + 8 tokens move, by multiples of 1/8."""
    _, tokens = make_tokens(9)
    tokens = replace(tokens, signal_N=torch.ones(N, dtype=torch.float64))
    hidden, weight = make_head(9)
    logits = (hidden @ weight.T).detach()
    q_NV = q_hat(torch.softmax(logits, 1), tokens)
    rule = token_rule(tokens.lag_N, tokens.signal_N, PRESETS["stable_reinforce"])
    grad, _ = logits_gradient(logits.clone(), tokens, rule)
    torch.testing.assert_close(grad * S, (grad * S).round(), rtol=0, atol=0)
    assert torch.equal(grad.sum(1), torch.zeros(N, dtype=torch.float64))
    assert int((grad != 0).sum(1).max()) <= 1 + S
    assert float(tokens.tail_q_N.max()) > 0.5, "some draws come from the tail"
    assert (q_NV[grad > 0] > 0).all()
    negative = grad < 0
    assert torch.equal(negative.nonzero()[:, 1], tokens.target_N[negative.any(1)])


def test_draws_follow_q_hat():
    """The mean over many draws is q-hat: head entries as committed, the tail shaped like p."""
    _, one = make_tokens(11)
    row, many = one.rows(4, 5), 40_000
    assert float(row.tail_q_N) > 0.1
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    draws = torch.rand(1, many, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    tokens = replace(row, signal_N=torch.ones(1, dtype=torch.float64), draws_NS=draws)
    rule = token_rule(tokens.lag_N, tokens.signal_N, PRESETS["stable_reinforce"])
    grad, _ = logits_gradient(logits.clone(), tokens, rule)
    drawn = grad[0].clone()
    drawn[tokens.target_N[0]] += 1.0
    torch.testing.assert_close(drawn, q_hat(torch.softmax(logits, 1), tokens)[0], rtol=0, atol=0.01)


# -- hand-computed -------------------------------------------------------------------------------------------


def hand_tokens(**changes: Tensor) -> LossTokens:
    one = torch.tensor
    return replace(LossTokens(
        target_N=one([0]), log_q_N=one([math.log(0.5)], dtype=torch.float64),
        signal_N=one([1.0], dtype=torch.float64), lag_N=one([0]), head_ids_NK=one([[0]]),
        head_q_NK=one([[0.5]], dtype=torch.float64), head_valid_NK=one([[True]]),
        tail_q_N=one([0.5], dtype=torch.float64), sequence_N=one([0]),
    ), **changes)


def test_hand_computed_case():
    """V = 3, head {0: .5}, tail .5, p = (.25, .25, .5), drawn 0, lag 0: m = (.5, 1/6, 1/3), gradient -(e_0 - m)."""
    logits = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    tokens = hand_tokens()
    correction = PRESETS["fresh_sc"]
    grad, stats = logits_gradient(logits.clone(), tokens, rule_of(correction, tokens, torch.zeros(1)))
    torch.testing.assert_close(grad, torch.tensor([[-0.5, 1 / 6, 1 / 3]], dtype=torch.float64))
    assert stats.head_p_N.item() == pytest.approx(0.25)
    assert stats.log_ratio_N.item() == pytest.approx(math.log(0.5))
    assert stats.entropy_N.item() == pytest.approx(1.5 * math.log(2))
    assert stats.head_kl_N.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))
    # Lag 1: min(p, C q) = p on head and tail with C = 1.45: nothing is cut, so only w_a (e_0 - p) remains.
    # (p(tail) = .75 > 1.45 * .5 = .725: the tail is cut by a little.)
    stale = hand_tokens(lag_N=torch.tensor([1]))
    grad, _ = logits_gradient(logits.clone(), stale, rule_of(correction, stale, torch.zeros(1)))
    cut = torch.tensor([0.25, 0.725 / 3, 0.725 * 2 / 3], dtype=torch.float64)
    p = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    expected = -(0.5 * torch.tensor([1.0, 0, 0], dtype=torch.float64) - cut + (cut.sum() - 0.5) * p)
    torch.testing.assert_close(grad[0], expected)


@pytest.mark.parametrize(("preset", "ratio", "positive", "negative"), [
    ("pg", 3.0, 1, 1), ("is", 3.0, 3, 3), ("tis", 3.0, C0, C0), ("tis", 0.1, 0.1, 0.1),
    ("mis", 3.0, 3, 3), ("mis", 5.1, 0, 0), ("mis", 0.4, 0, 0), ("icepop", 0.4, 0, 0),
    ("ppo", 1.1, 1.1, 1.1), ("ppo", 1.3, 0, 1.3), ("ppo", 0.7, 0.7, 0),
    ("dapo", 1.25, 1.25, 1.25), ("dapo", 1.3, 0, 1.3), ("dapo", 0.79, 0.79, 0),
    ("two_sided", 1.3, 0, 1.3), ("two_sided", 4.1, 0, 0), ("two_sided", 0.7, 0.7, 0),
    ("cispo", 6.0, 5, 5), ("cispo", 0.01, 0.01, 0.01),
    ("dppo", 1.3, 1.3, 1.3), ("dppo", 1.5, 0, 1.5), ("dppo", 0.5, 0.5, 0),
    ("decoupled", 1.3, 0, 1.3), ("decoupled", 0.7, 0.7, 0),
])
def test_weights_of_the_presets(preset, ratio, positive, negative):
    """Lag 0 for tis, lag 1 for decoupled, q = .5 (so that |p - q| = .5 |r - 1|)."""
    lag_N = torch.tensor([int(preset == "decoupled")] * 2)
    signal_N = torch.tensor([1.0, -1.0])
    rule = token_rule(lag_N, signal_N, PRESETS[preset], cap_N=caps_of(lag_N))
    weights, _ = ratio_weights(torch.full((2,), math.log(ratio)), torch.full((2,), math.log(0.5)), rule)
    assert weights.tolist() == pytest.approx([positive, negative], rel=1e-6)


def test_the_decoupled_band_widens_with_the_lag():
    lag_N, signal_N = torch.tensor([0, 1, 3]), torch.ones(3)
    rule = token_rule(lag_N, signal_N, PRESETS["decoupled"])
    assert rule.high_N.tolist() == pytest.approx([math.inf, 1.2, 1.2**3])


@pytest.mark.parametrize(("level", "expected"), [("sequence_sum", 6.0), ("sequence_mean", math.sqrt(6.0))])
def test_a_sequence_has_one_ratio(level, expected):
    from learner.losses import sequence_weights

    log_p, log_q = torch.log(torch.tensor([0.6, 0.2, 0.5])), torch.log(torch.tensor([0.2, 0.1, 0.5]))
    weights, cut = sequence_weights(
        log_p, log_q, torch.ones(3), torch.tensor([0, 0, 1]), Correction(level=level, band=(0.0, 100.0))
    )
    assert weights.tolist() == pytest.approx([expected, expected, 1.0])
    assert not cut.any()


def test_second_moment_by_hand():
    """Squares .01, .04, .25, 1 with limit .1: dropping 1 leaves a mean of .1; only what moves out can go."""
    x = torch.tensor([0.1, -0.2, 0.5, 1.0])
    bound = second_moment_bound(x, torch.tensor([1.0, -1.0, 1.0, 1.0]), 0.1 + 1e-9)
    assert 0.5 < bound < 1.0
    assert second_moment_bound(x, torch.tensor([1.0, -1.0, 1.0, 1.0]), 1.0) == math.inf
    # 1.0 with A < 0 pulls back towards q: it stays, and everything that moves out goes in vain.
    assert second_moment_bound(x, torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.01) < 0.1
    assert second_moment_bound(torch.zeros(0), torch.zeros(0), 0.04) == math.inf


def test_stable_truncated_forms_equal_the_naive_ones():
    p, q = torch.rand(100, dtype=torch.float64) + 1e-3, torch.rand(100, dtype=torch.float64) + 1e-3
    zero, no = torch.zeros(100), torch.zeros(100, dtype=torch.bool)
    rule = TokenRule(zero, torch.full((100,), 1.7), no, zero)
    torch.testing.assert_close(measure(p, q, rule), q * torch.minimum(p / q, torch.tensor(1.7)), rtol=1e-6, atol=0)
    rho = q / p
    alpha = torch.minimum(torch.ones(()), 1.7 * rho)
    torch.testing.assert_close(measure(p, q, rule), p * alpha, rtol=1e-6, atol=0)
    caps = torch.tensor([2.0, torch.inf, 1.0])
    nothing = measure(torch.zeros(3), torch.zeros(3), TokenRule(zero[:3], caps, no[:3], zero[:3]))
    assert torch.equal(nothing, torch.zeros(3))


def test_the_cap_ages_with_the_token():
    lag_N = torch.tensor([0, 1, 5])
    rule = token_rule(lag_N, torch.ones(3), PRESETS["tis"], cap_N=caps_of(lag_N))
    weights, cut = ratio_weights(torch.full((3,), 3.0), torch.zeros(3), rule)
    assert weights.tolist() == pytest.approx([1 + (C0 - 1) * GAMMA**lag for lag in (0, 1, 5)])
    assert cut.all()
    assert cap_of(0) == C0


@pytest.mark.parametrize(("preset", "unit"), [("tis+sc", [False, False]), ("fresh_sc", [True, False])])
def test_whether_a_fresh_token_is_only_centred(preset, unit):
    rule = token_rule(torch.tensor([0, 1]), torch.ones(2), PRESETS[preset])
    assert rule.unit_N.tolist() == unit
    assert rule.centring == "topk"


def test_log_ratios_are_clamped():
    assert clamped(torch.tensor([1e9, -math.inf, 3.0])).tolist() == [20.0, -20.0, 3.0]


# -- extremes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("scale", [0.0, 30.0, 300.0])
def test_extreme_logits_stay_finite(preset, scale):
    """Peaked, flat, tokens of vanishing probability, a tail of p that underflows: finite loss and gradient."""
    _, tokens = make_tokens(6, spread=3.0)
    single = LossTokens(*(f.float() if f.is_floating_point() else f for f in vars(tokens).values()))
    hidden, weight = make_head(6)
    logits = (scale * (hidden @ weight.T)).detach().float()
    log_p_N = torch.log_softmax(logits, 1).gather(1, single.target_N[:, None]).squeeze(1)
    correction = PRESETS[preset]
    grad, stats = logits_gradient(logits, single, rule_of(correction, single, log_p_N))
    assert torch.isfinite(grad).all()
    assert all(torch.isfinite(getattr(stats, name)).all() for name in vars(stats))
    assert stats.weight_N.max() <= math.exp(20.0) * 1.001
    if preset in ("pg", "sc", "tis", "tis+sc", "mis", "mis+sc", "icepop", "cispo"):
        assert grad.abs().max() <= 12.0 * single.signal_N.abs().max()
    torch.testing.assert_close(grad.sum(1), torch.zeros(N), rtol=0, atol=1e-5 * float(grad.abs().max() + 1))


def test_an_empty_tail_gives_nothing_to_it():
    _, tokens = make_tokens(7)
    hidden, weight = make_head(7)
    head_q = tokens.head_q_NK / torch.where(tokens.head_valid_NK, tokens.head_q_NK, 0.0).sum(1, keepdim=True)
    closed = replace(
        tokens, target_N=tokens.head_ids_NK[:, 0], log_q_N=head_q[:, 0].log(), head_q_NK=head_q,
        tail_q_N=torch.zeros(N, dtype=torch.float64),
    )
    grad, _ = logits_gradient(
        (hidden @ weight.T).detach(), closed, token_rule(tokens.lag_N, closed.signal_N, PRESETS["sc"])
    )
    target = torch.nn.functional.one_hot(closed.target_N, V).double()
    expected = target.scatter_add(1, closed.head_ids_NK, -torch.where(closed.head_valid_NK, head_q, 0.0))
    torch.testing.assert_close(grad, -tokens.signal_N[:, None] * expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_equal_dense_fp64_within_a_millionth(tied):
    """In float32 against float64 autograd over dense logits; with tied embeddings both uses of the matrix add up."""
    _, tokens = make_tokens(12)
    hidden, weight = make_head(12, scale=0.5)
    ids = torch.arange(N) % V
    correction = PRESETS["tis+sc"]
    inputs = hidden.detach() + (weight[ids] if tied else 0.0)
    expected = torch.autograd.grad(naive_loss(inputs @ weight.T, tokens, correction), weight)[0]
    single = LossTokens(*(f.float() if f.is_floating_point() else f for f in vars(tokens).values()))
    narrow = weight.detach().float().requires_grad_()
    inputs = hidden.detach().float() + (narrow[ids] if tied else 0.0)
    loss = fused(inputs, narrow, single, correction)
    got = torch.autograd.grad(loss, narrow)[0].double()
    assert float((got - expected).norm() / expected.norm()) < 1e-6


def test_half_precision_products_keep_a_float32_softmax():
    _, tokens = make_tokens(13)
    hidden, weight = make_head(13, scale=0.5)
    single = LossTokens(*(f.float() if f.is_floating_point() else f for f in vars(tokens).values()))
    narrow = [t.detach().to(torch.bfloat16).requires_grad_() for t in (hidden, weight)]
    wide = [t.detach().float().requires_grad_() for t in narrow]
    got = torch.autograd.grad(fused(narrow[0], narrow[1], single, PRESETS["pg"]), narrow)
    expected = torch.autograd.grad(fused(wide[0], wide[1], single, PRESETS["pg"]), wide)
    for left, right in zip(got, expected, strict=True):
        assert left.dtype == torch.bfloat16
        assert float((left.float() - right).norm() / right.norm()) < 0.02


# -- settings ------------------------------------------------------------------------------------------------


def test_settings_change_a_row():
    correction = correction_of(LossConfig(preset="ppo", high=1.3, centring="topk"))
    assert correction == Correction(band=(0.8, 1.3), outside="drop", sign="ppo", centring="topk")
    assert correction_of(LossConfig(preset="tis", cap=3.0)).band == (0.0, 3.0)
    assert not correction_of(LossConfig(preset="tis", high=3.0)).aged
    assert correction_of(LossConfig(preset="pg", level="sequence_mean", statistic="k1", high=0.1, low=-1.0,
                                    outside="drop", sign="negative")).statistic == "k1"


@pytest.mark.parametrize("changes", [
    {"low": 2.0, "high": 1.0}, {"preset": "dppo", "low": 0.1}, {"low": -1.0},
    {"preset": "tis", "level": "sequence_sum"},
    {"preset": "pg", "level": "sequence_mean", "statistic": "k3"}, {"preset": "m2po", "statistic": "tv"},
])
def test_contradicting_settings_are_refused(changes):
    with pytest.raises(ValueError, match=r"band|sequence|ratio|lag|never"):
        LossConfig(**changes)
