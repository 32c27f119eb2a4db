"""Effective sample size, the caps it guides, and what a restart must not change."""

from __future__ import annotations

import io

import pytest
import torch

from learner.ess import BUCKETS, ENOUGH_TOKENS, CapController, bucket_name, bucket_of, ess, rate_scale, weight_sums


def test_buckets_are_powers_of_two():
    lags = torch.tensor([0, 1, 2, 3, 4, 7, 8, 1023, 1024, 10**6])
    assert bucket_of(lags).tolist() == [0, 1, 2, 2, 3, 3, 4, 10, 11, 11]
    assert [bucket_name(b) for b in (0, 1, 2, 4, BUCKETS - 1)] == ["0", "1", "2-3", "8-15", "1024+"]


def test_ess_by_hand():
    assert ess(weight_sums(torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3, dtype=torch.int64))[0]) == 1.0
    assert ess(weight_sums(torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))[0]) == 0.25
    assert ess(torch.zeros(3)) == 1.0
    assert ess(weight_sums(torch.zeros(4), torch.zeros(4, dtype=torch.int64))[0]) == 0.0


def test_sums_add_up_over_ranks():
    weights, lags = torch.rand(100), torch.randint(0, 9, (100,))
    parts = weight_sums(weights[:37], lags[:37]) + weight_sums(weights[37:], lags[37:])
    torch.testing.assert_close(parts, weight_sums(weights, lags))


def test_the_rate_follows_the_root_of_ess():
    assert rate_scale(0.125, 0.5) == 0.5
    assert rate_scale(0.9, 0.5) == 1.0
    assert rate_scale(0.01, 0.0) == 1.0


def step(lag: int, weights: list[float]) -> torch.Tensor:
    many = torch.tensor(weights).repeat(ENOUGH_TOKENS)
    return weight_sums(many, torch.full((len(many),), lag))


def test_caps_tighten_where_the_sample_is_poor_and_come_back_slowly():
    controller, lags = CapController(0.5), torch.tensor([0, 1, 3])
    assert controller.caps(lags, 3.0, 0.5).tolist() == [3.0, 2.0, 1.25]
    controller.observe(step(3, [2.0, 0.0, 0.0, 0.0]))
    tightened = controller.caps(lags, 3.0, 0.5).tolist()
    assert tightened[:2] == [3.0, 2.0]
    assert 1.0 < tightened[2] < 1.25
    controller.observe(step(3, [1.0]))
    assert tightened[2] < controller.caps(lags, 3.0, 0.5)[2] < 1.25
    for _ in range(100):
        controller.observe(step(3, [1.0]))
    assert controller.caps(lags, 3.0, 0.5).tolist() == [3.0, 2.0, 1.25]


def test_few_tokens_and_target_zero_move_nothing():
    controller = CapController(0.5)
    controller.observe(weight_sums(torch.tensor([5.0, 0.0]), torch.tensor([1, 1])))
    assert controller == CapController(0.5)
    off = CapController(0.0)
    off.observe(step(1, [5.0, 0.0, 0.0, 0.0]))
    assert off == CapController(0.0)


def test_caps_never_fall_to_one():
    controller = CapController(1.0)
    for _ in range(500):
        controller.observe(step(0, [1.0, 0.0]))
    assert controller.caps(torch.tensor([0]), 2.0, 0.9)[0] > 1.0


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_restart_changes_no_bit(cut):
    generator = torch.Generator().manual_seed(cut)
    sums = [weight_sums(torch.rand(500, generator=generator) ** 8,
                        torch.randint(0, 70, (500,), generator=generator)) for _ in range(20)]
    straight, first, second = CapController(0.6), CapController(0.6), CapController(0.6)
    for seen in sums:
        straight.observe(seen)
    for seen in sums[:cut]:
        first.observe(seen)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for seen in sums[cut:]:
        second.observe(seen)
    assert second == straight != CapController(0.6)
