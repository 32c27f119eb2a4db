"""From groups to microbatches: scales, lags, what is left out, and layouts that agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.batch import TrainingGroup, TrainingSample, make_batch
from learner.config import BatchConfig, LearnerConfig
from learner.packing import microbatches
from protocol import sampler
from protocol.rollout import Segment
from tests.fakes.learning import VOCAB, sampling_rules

RULES = sampling_rules()


@pytest.fixture(scope="module")
def groups(speaker):
    return [speaker.group(g, size=3, rewards=[0, 10**6, 0]) for g in range(3)]


def config(**sections: dict[str, object]) -> LearnerConfig:
    return LearnerConfig.model_validate(sections)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
def test_scales_sum_to_what_the_mean_is_over(groups, aggregation):
    advantages = {"estimator": "grpo_mean"}
    batch = make_batch(groups, 0, RULES, config(loss={"aggregation": aggregation}, advantages=advantages))
    weights = [s.signal_T.sum() / (2 / 3 if s.sample == 1 else -1 / 3) for s in batch.sequences]
    lengths = [len(s.tokens_T) for s in batch.sequences]
    if aggregation == "constant":
        assert weights == pytest.approx([length / (9 * RULES.max_new_tokens) for length in lengths])
    else:
        assert sum(weights) == pytest.approx(1.0)
    if aggregation == "token_mean":
        assert weights == pytest.approx([length / sum(lengths) for length in lengths])
    if aggregation == "sequence_mean":
        assert weights == pytest.approx([1 / 9] * 9)
    if aggregation == "prompt_mean":
        assert sum(weights[:3]) == pytest.approx(1 / 3)


def test_lag_is_per_token(groups):
    sample = groups[0].samples[0]
    swapped = replace(sample.rollout, segments=(Segment(0, 3), Segment(2, 5)))
    assert len(swapped) > 2
    group = TrainingGroup(0, groups[0].prompt_tokens, (TrainingSample(swapped, 0), *groups[0].samples[1:]))
    batch = make_batch([group], 6, RULES, config())
    assert batch.sequences[0].lag_T.tolist() == [3, 3] + [1] * (len(swapped) - 2)


def test_unusable_groups_are_left_out_and_counted(groups, monkeypatch):
    prompt, samples = groups[0].prompt_tokens, groups[0].samples
    elsewhere = replace(samples[1].rollout, tokens=np.full_like(samples[1].rollout.tokens, VOCAB + 1))
    poisoned = replace(samples[1].rollout, sample=99)
    logprobs = sampler.behaviour_logprobs
    monkeypatch.setattr(
        sampler, "behaviour_logprobs", lambda r, rules: logprobs(r, rules) * (np.nan if r.sample == 99 else 1.0)
    )
    flat = TrainingGroup(7, prompt, tuple(replace(s, reward_micro=5) for s in samples))
    empty_rollout = replace(
        samples[0].rollout, tokens=np.zeros(0, np.uint32), head_lengths=np.zeros(0, np.uint8),
        head_ids=np.zeros(0, np.uint32), head_codes=np.zeros(0, np.uint16), tail_codes=np.zeros(0, np.uint16),
        token_codes=np.zeros(0, np.uint16),
    )
    batch = make_batch(
        [
            TrainingGroup(4, prompt, ()),
            TrainingGroup(5, prompt, (TrainingSample(empty_rollout, 0), samples[1])),
            TrainingGroup(6, prompt, (samples[0], TrainingSample(poisoned, 10**6))),
            TrainingGroup(8, prompt, (samples[0], TrainingSample(elsewhere, 10**6))),
            flat,
            groups[1],
        ],
        0, RULES, config(),
    )
    assert batch.left_out == {"empty": 2, "not_finite": 1, "malformed": 1, "no_signal": 1}
    assert {s.group for s in batch.sequences} == {1}
    assert batch.groups == 6
    assert sum(abs(s.signal_T).sum() for s in batch.sequences) > 0


def test_groups_without_signal_can_be_kept(groups):
    flat = TrainingGroup(7, groups[0].prompt_tokens, tuple(replace(s, reward_micro=5) for s in groups[0].samples))
    batch = make_batch([flat], 0, RULES, config(advantages={"drop_no_signal": False}))
    assert len(batch.sequences) == 3
    assert all((s.signal_T == 0).all() for s in batch.sequences)


def test_the_order_of_groups_does_not_matter(groups):
    one, two = (make_batch(order, 0, RULES, config()) for order in (groups, groups[::-1]))
    assert [(s.group, s.sample) for s in one.sequences] == [(s.group, s.sample) for s in two.sequences]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("max_tokens", [16, 40, 4096])
def test_every_token_is_in_exactly_one_microbatch_after_its_own_input(groups, share_prompts, max_tokens):
    batch = make_batch(groups, 0, RULES, config())
    found: list[tuple[int, int]] = []
    for micro in microbatches(batch, BatchConfig(max_tokens=max_tokens, share_prompts=share_prompts)):
        rows, length = micro.ids_BL.shape
        assert rows * length <= max_tokens or rows == 1
        assert (micro.source_N < rows * length).all()
        previous = micro.ids_BL.flatten()[micro.source_N]
        found += list(zip(previous.tolist(), micro.tokens.target_N.tolist(), strict=True))
    expected = [
        pair for s in batch.sequences
        for pair in zip([int(s.prompt[-1]), *s.tokens_T[:-1].tolist()], s.tokens_T.tolist(), strict=True)
    ]
    assert sorted(found) == sorted(expected)


def test_a_shared_prompt_costs_once(groups):
    batch = make_batch(groups, 0, RULES, config())
    fed = sum(m.ids_BL.numel() for m in microbatches(batch, BatchConfig(max_tokens=4096)))
    assert fed == sum(len(g.prompt_tokens) for g in groups) + sum(len(s.tokens_T) - 1 for s in batch.sequences)


def test_the_mask_lets_completions_see_their_prompt_and_themselves_only(groups):
    batch = make_batch(groups[:2], 0, RULES, config())
    (micro,) = microbatches(batch, BatchConfig(max_tokens=4096))
    seen = micro.mask_11LL[0, 0]
    prompt = len(groups[0].prompt_tokens)
    first, second = (len(s.tokens_T) - 1 for s in batch.sequences[:2])
    row = prompt + first + second - 1
    expected = torch.zeros_like(seen[0])
    expected[:prompt] = True
    expected[prompt + first : prompt + first + second] = True
    assert torch.equal(seen[row], expected)
    assert (seen.sum(1) == micro.positions_BL[0] + 1).all()
