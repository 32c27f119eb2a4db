"""Residuals against a plain computation, and limits against hand-made residuals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from protocol.messages import Profile, SamplingRules
from protocol.prng import HEAD_DOMAIN, TAIL_ID, noise, seed_words
from protocol.reference import LogitsChunk
from protocol.rollout import EMPTY_TAIL, NO_CODE, Finish, Rollout, Segment
from protocol.sampler import TAIL, draw, draw_tail, quantise
from verifier.divergence import Residuals, measure
from verifier.recompute import _score, _Scoring

PROFILE = Profile(name="p", max_mean_kl_nano=1_000, max_token_kl_micro=10, max_margin_micro=10_000)
SEED = bytes(range(32))


def _rules(head_size: int = 8, **fields) -> SamplingRules:
    return SamplingRules(head_size=head_size, eos_token_ids=[1], vocab_size=40, temperature_milli=800, **fields)


def _rollout(logits_TV: np.ndarray, rules: SamplingRules, tail_at: tuple[int, ...] = ()) -> Rollout:
    heads = [quantise(row / 0.8, rules) for row in logits_TV]
    tokens, token_codes = [], []
    for t, head in enumerate(heads):
        if t in tail_at:
            token, code = draw_tail(logits_TV[t] / 0.8, head.ids, SEED, t, rules)
        else:
            token, code = int(head.ids[0]), NO_CODE
        tokens.append(token)
        token_codes.append(code)
    return Rollout(
        sample=0, tokens=np.array(tokens, np.uint32), head_lengths=np.array([len(h.ids) for h in heads], np.uint8),
        head_ids=np.concatenate([h.ids for h in heads]), head_codes=np.concatenate([h.codes for h in heads]),
        tail_codes=np.array([h.tail_code for h in heads], np.uint16), token_codes=np.array(token_codes, np.uint16),
        segments=(Segment(0, 0),), finish=Finish.LENGTH,
    )


def _residuals(rollout: Rollout, logits_TV: np.ndarray, rules: SamplingRules, pieces: int = 1) -> Residuals:
    scoring = _Scoring(rollout, SEED, rules)
    start = 0
    for part in np.array_split(logits_TV, pieces):
        _score(scoring, LogitsChunk(0, start, torch.from_numpy(part).float()))
        start += len(part)
    return scoring.residuals()


def _logits(seed: int, scale: float = 2.0, length: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (length, 40)).astype(np.float32)


def _plain_kl(rollout: Rollout, logits_TV: np.ndarray, rules: SamplingRules) -> list[float]:
    """KL by the book, from nominal codes, one position at a time."""
    found, end = [], 0
    for t, row in enumerate(logits_TV.astype(np.float64) / 0.8):
        p = np.exp(row - row.max())
        p /= p.sum()
        start, end = end, end + int(rollout.head_lengths[t])
        ids = rollout.head_ids[start:end]
        codes = rollout.head_codes[start:end].astype(float)
        reference = list(p[ids])
        if rollout.tail_codes[t] != EMPTY_TAIL:
            codes = np.append(codes, float(rollout.tail_codes[t]))
            reference.append(1 - p[ids].sum())
        q = np.exp(-codes / rules.steps_per_nat)
        q /= q.sum()
        found.append(float(np.sum(q * np.log(q / np.array(reference)))))
    return found


@pytest.mark.parametrize("head_size", [1, 8, 40])
@pytest.mark.parametrize("pieces", [1, 5])
def test_kl_is_the_divergence_by_the_book(head_size, pieces):
    rules = _rules(head_size)
    rollout = _rollout(_logits(1), rules)
    other = _logits(1) + 0.3 * _logits(2)
    residuals = _residuals(rollout, other, rules, pieces)
    np.testing.assert_allclose(residuals.kl_T, _plain_kl(rollout, other, rules), rtol=1e-6, atol=1e-9)


def test_an_honest_rollout_is_within_half_a_step():
    rules = _rules(head_floor=1, head_max_code=4000)
    logits = _logits(3, scale=3.0)
    residuals = _residuals(_rollout(logits, rules, tail_at=(2, 5)), logits, rules)
    assert residuals.kl_T.max() < 1.5e-7
    assert residuals.entry_T.max() <= 0.5 / 1024 + 1e-6
    assert np.nanmax(residuals.omitted_T) <= 1e-6
    assert np.flatnonzero(~np.isnan(residuals.tail_draw_T)).tolist() == [2, 5]
    assert np.nanmax(residuals.tail_draw_T) == 0
    assert np.nanmax(residuals.tail_token_T) <= 0.5 / 1024 + 1e-6
    assert residuals.tail_mass_T.max() <= 0.5 / 1024 + 1e-6
    assert np.abs(residuals.bias_T).max() < 1.5 / 1024
    sampled = _residuals(_sampled(logits, rules), logits, rules)
    assert all(measurement.fault is None for measurement in measure([sampled], PROFILE, rules))


def _sampled(logits_TV: np.ndarray, rules: SamplingRules) -> Rollout:
    """A rollout whose tokens are drawn, tail draws included."""
    plain = _rollout(logits_TV, rules)
    tokens, codes = [], []
    for t, row in enumerate(logits_TV):
        head = quantise(row / 0.8, rules)
        index = draw(head, SEED, t, rules)
        if index == TAIL:
            token, code = draw_tail(row / 0.8, head.ids, SEED, t, rules)
        else:
            token, code = int(head.ids[index]), NO_CODE
        tokens.append(token)
        codes.append(code)
    return replace(plain, tokens=np.array(tokens, np.uint32), token_codes=np.array(codes, np.uint16))


def test_the_margin_of_an_honest_draw_is_zero_and_that_of_a_wrong_one_is_not():
    rules, logits = _rules(), _logits(9, length=400)
    rollout = _sampled(logits, rules)
    honest = _residuals(rollout, logits, rules, pieces=3)
    assert np.count_nonzero(rollout.token_codes != NO_CODE) > 10  # tail draws are among them
    assert np.count_nonzero(honest.margin_T) <= 2  # a near tie may fall the other way
    assert honest.margin_T.max() < 2 / 1024
    first = _residuals(_rollout(logits, rules), logits, rules)  # the likeliest token each time
    lost = rollout.tokens != _rollout(logits, rules).tokens
    assert (first.margin_T[lost] > 0).all()
    assert first.statistics.margin > 100 * honest.statistics.margin


def test_statistics_are_means_over_stochastic_positions():
    residuals = _flat(
        kl_T=np.array([1e-4, 0, np.inf, 5.0]), peak_T=np.array([0.5, 0.5, 0.5, 1.0]),
        bias_T=np.array([-1.0, 2.0, 50.0, 7.0]), margin_T=np.array([0.5, 0.0, np.inf, 9.0]),
    )
    found = residuals.statistics
    assert (found.tokens, found.bias, found.margin) == (3, pytest.approx(11 / 3), pytest.approx(0.5))
    assert found.log_kl == pytest.approx((np.log(1e-4) + np.log(1e-12) + np.log(1e2)) / 3)
    assert _flat(peak_T=np.ones(4)).statistics.tokens == 0


def test_a_head_over_the_whole_vocabulary_leaves_nobody_out():
    rules = _rules(40, head_max_code=65_534)
    logits = _logits(4)
    residuals = _residuals(_rollout(logits, rules), logits, rules)
    assert np.isnan(residuals.omitted_T).all()


def test_a_left_out_token_is_seen_in_full_and_in_short_heads():
    for rules in (_rules(8), _rules(8, head_max_code=2500)):
        logits = _logits(5, scale=4.0)
        cheap = logits.copy()
        best = int(np.argmax(logits[6]))
        cheap[6, best] = -20.0
        residuals = _residuals(_rollout(cheap, rules), logits, rules)
        assert residuals.omitted_T[6] > 1.0
        assert np.delete(residuals.omitted_T, 6).max() < 1e-6


def test_a_peaked_position_does_not_dilute_the_mean():
    rules = _rules()
    logits = _logits(6, length=20)
    logits[:15, 3] += 40.0
    other = logits.copy()
    other[15:] += _logits(7)[:5]
    residuals = _residuals(_rollout(other, rules), logits, rules)
    assert residuals.stochastic.tolist() == [False] * 15 + [True] * 5
    assert residuals.mean_kl == pytest.approx(residuals.kl_T[15:].mean())


def test_no_stochastic_position_has_mean_zero():
    logits = _logits(8)
    logits[:, 3] += 60.0
    assert _residuals(_rollout(logits, _rules()), logits, _rules()).mean_kl == 0.0


def _flat(length: int = 4, **columns) -> Residuals:
    values = {name: np.full(length, np.nan) for name in ("omitted_T", "tail_draw_T", "tail_token_T")}
    values |= {name: np.zeros(length) for name in ("bias_T", "margin_T", "tail_mass_T")}
    values |= {"kl_T": np.zeros(length), "peak_T": np.full(length, 0.5), "entry_T": np.zeros(length)}
    return Residuals(sample=columns.pop("sample", 0), **(values | columns))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"kl_T": np.array([0, 0, 9e-6, 0])}, "E_HEAD_KL"),
        ({"kl_T": np.array([0, 0, 2e-5, 0]), "peak_T": np.ones(4)}, "E_TOKEN_KL"),
        ({"entry_T": np.array([0, 0, 0.011, 0])}, "E_HEAD_ENTRY"),
        ({"omitted_T": np.array([-1, -1, 0.011, -1])}, "E_HEAD_MEMBERSHIP"),
        ({"tail_draw_T": np.array([np.nan, np.nan, 0.011, np.nan])}, "E_TAIL_DRAW"),
        ({"tail_draw_T": np.array([np.nan, np.nan, np.inf, np.nan])}, "E_TAIL_DRAW"),
        ({"tail_token_T": np.array([np.nan, np.nan, 0.011, np.nan])}, "E_TAIL_TOKEN"),
        ({"margin_T": np.array([0, 0.019, 0.021, 0])}, "E_TOKEN_MARGIN"),
        ({"tail_mass_T": np.array([0, 0, 0.011, 0])}, "E_TAIL_MASS"),
    ],
)
def test_each_limit_has_its_code_and_place(columns, expected):
    measurements = measure([_flat(sample=4), _flat(sample=5, **columns)], PROFILE, _rules())
    fault = next(measurement.fault for measurement in measurements if measurement.fault is not None)
    assert (fault.code, fault.sample, fault.position) == (expected, 5, 2)


def test_at_the_limit_is_within_it():
    residuals = _flat(kl_T=np.full(4, 1e-6), entry_T=np.full(4, 0.01), omitted_T=np.full(4, 0.01))
    assert all(measurement.fault is None for measurement in measure([residuals], PROFILE, _rules()))


@pytest.mark.parametrize("column", ["omitted_T", "tail_draw_T"])
def test_where_no_code_is_compared_no_rounding_is_allowed_for(column):
    """At 1024 steps per nat half a step is 488 millionths: a limit of 500 leaves 12 to each of two values."""
    tight = PROFILE.model_copy(update={"max_margin_micro": 500})
    step = "4" if column == "omitted_T" else "5"
    for residual, fails in ((2.3e-5, False), (2.4e-5, True)):
        found = measure([_flat(entry_T=np.full(4, 5e-4), **{column: np.full(4, residual)})], tight, _rules())
        assert [one.check[0] for one in found if one.fault] == [step] * fails


def test_what_is_less_likely_than_the_last_code_may_win_a_draw():
    """With 4096 steps per nat codes end at 16 nats: TAIL, of 1e-9, is drawn as often as its code says."""
    rules = SamplingRules(
        steps_per_nat=4096, head_size=16, head_max_code=56_000, eos_token_ids=[1], vocab_size=40, temperature_milli=800
    )
    logits = np.full((1, 40), -20.0, np.float32)
    logits[0, 5] = 0.0
    head = quantise(logits[0] / 0.8, rules)
    token, code = draw_tail(logits[0] / 0.8, head.ids, SEED, 0, rules)
    rollout = replace(
        _rollout(logits, rules), tokens=np.array([token], np.uint32), token_codes=np.array([code], np.uint16)
    )
    arrivals = noise(seed_words(SEED), np.array([0]), HEAD_DOMAIN, np.array([5, TAIL_ID], np.uint32))
    last = 65_535 / 4096
    lost_by = last + np.log(arrivals[1] / arrivals[0])  # under the codes, and so under the reference
    assert _residuals(rollout, logits, rules).margin_T[0] == pytest.approx(lost_by, abs=1e-3)


def test_infinite_divergence_fails():
    fault = measure([_flat(kl_T=np.array([0, np.inf, 0, 0]))], PROFILE, _rules())[0].fault
    assert fault is not None
    assert fault.position == 1


@pytest.mark.parametrize("dead", [-np.inf, -1e38])
@pytest.mark.parametrize("fields", [{"head_floor": 6}, {"head_max_code": 65_534}, {}])
def test_impossible_ids_in_an_honest_head_are_within_the_limits(dead: float, fields: dict[str, int]):
    rules = _rules(steps_per_nat=256, **fields)
    logits_TV = np.full((4, 40), dead, np.float32)
    logits_TV[:, :3] = [2, 1, 0]
    residuals = _residuals(_rollout(logits_TV, rules), logits_TV, rules)
    profile = PROFILE.model_copy(update={"max_mean_kl_nano": 2_000})
    assert np.isfinite(residuals.kl_T).all()
    assert not [one.check for one in measure([residuals], profile, rules) if one.fault]
