"""A step's batch: verified groups turned into sequences with everything the loss needs of each token.

A pure function of the groups, the learner's version and the configuration. Groups are used whole; one that cannot be
used (nothing in it, no signal, numbers that are not finite) is left out of the denominators and counted by reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from learner.advantages import batch_advantages, has_signal
from learner.config import Aggregation, LearnerConfig
from learner.corrections import correction_of
from learner.influence import share_factors
from learner.staleness import lag_weights
from protocol import sampler
from protocol.errors import PeerFault
from protocol.messages import SamplingRules
from protocol.rollout import Rollout


@dataclass(frozen=True)
class TrainingSample:
    """One verified rollout and its recomputed reward (1e-6)."""

    rollout: Rollout
    reward_micro: int
    node_id: str = ""  #: who generated it, hex
    kl_limit: float = 0.0  #: mean divergence of its heads that an audit allows, nats per token


@dataclass(frozen=True)
class TrainingGroup:
    """All samples of one prompt."""

    group: int
    prompt_tokens: list[int]
    samples: tuple[TrainingSample, ...]


@dataclass(frozen=True, eq=False)
class Sequence:
    """One completion as training data. T tokens, K widest head, Y layers with a router, X experts per token."""

    group: int
    sample: int
    prompt: NDArray[np.int64]
    tokens_T: NDArray[np.int64]
    log_q_T: NDArray[np.float64]  #: behaviour log-prob of each token, natural log
    signal_T: NDArray[np.float64]  #: advantage times aggregation scale
    lag_T: NDArray[np.int64]  #: learner version minus token version, >= 0
    head_ids_TK: NDArray[np.int64]  #: padded with the first entry
    head_q_TK: NDArray[np.float64]  #: padded with the first entry
    head_valid_TK: NDArray[np.bool_]
    tail_q_T: NDArray[np.float64]  #: behaviour mass outside the head
    node_id: str = ""
    kl_limit: float = 0.0  #: mean divergence of its heads that an audit allows, nats per token
    scale_T: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  #: aggregation scale times lag weight
    draws_TS: NDArray[np.float64] | None = None  #: uniform numbers of further draws, for centring by draws
    routes_TYX: NDArray[np.uint8] | None = None  #: the sampler's experts, where the run records them


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step trains on."""

    version: int  #: the learner's version before the step
    sequences: tuple[Sequence, ...]  #: in order of (group, sample)
    rewards_micro: tuple[int, ...]  #: of every sample handed in, used or not
    groups: int  #: groups handed in
    left_out: dict[str, int]  #: groups not trained on, by reason: empty, no_signal, malformed, not_finite
    node_shares: dict[str, float] = field(default_factory=dict)  #: each node's share of the signal, before the cap

    @property
    def tokens(self) -> int:
        """Completion tokens trained on."""
        return sum(len(sequence.tokens_T) for sequence in self.sequences)


def make_batch(groups: list[TrainingGroup], version: int, rules: SamplingRules, config: LearnerConfig) -> Batch:
    """The batch that weights ``version`` train on; ``groups`` in any order."""
    left_out: Counter[str] = Counter()
    usable = []
    for group in sorted(groups, key=lambda group: group.group):
        reason = _unusable(group, rules, config)
        if reason is None:
            usable.append(group)
        else:
            left_out[reason] += 1
    scales = _scales(usable, rules, config.loss.aggregation)
    sequences = [
        _sequence(group, sample, advantage, scale, version, rules, config)
        for group, advantages, group_scales in zip(usable, _advantages(usable, config), scales, strict=True)
        for sample, advantage, scale in zip(group.samples, advantages, group_scales, strict=True)
    ]
    influence = {node: float(share) for node, share in node_shares(sequences).items()}
    factors = share_factors(influence, config.loss.max_node_share)
    sequences = [
        s if factors[s.node_id] == 1.0 else replace(s, signal_T=s.signal_T * factors[s.node_id]) for s in sequences
    ]
    rewards = tuple(sample.reward_micro for group in groups for sample in group.samples)
    return Batch(version, tuple(sequences), rewards, len(groups), dict(left_out), influence)


def _unusable(group: TrainingGroup, rules: SamplingRules, config: LearnerConfig) -> str | None:
    if not group.samples or any(len(sample.rollout) == 0 for sample in group.samples) or not group.prompt_tokens:
        return "empty"
    if config.advantages.drop_no_signal and not has_signal([s.reward_micro for s in group.samples]):
        return "no_signal"
    for sample in group.samples:
        try:
            logprobs = sampler.behaviour_logprobs(sample.rollout, rules), sampler.head_logprobs(sample.rollout, rules)
        except PeerFault:
            return "malformed"
        if not all(np.isfinite(values).all() for values in logprobs):
            return "not_finite"
    return None


def _advantages(groups: list[TrainingGroup], config: LearnerConfig) -> list[NDArray[np.float64]]:
    return batch_advantages([[sample.reward_micro for sample in group.samples] for group in groups], config.advantages)


def _scales(groups: list[TrainingGroup], rules: SamplingRules, aggregation: Aggregation) -> list[list[float]]:
    """Weight of each token of each sample of each group, so that the loss is a plain sum over tokens."""
    lengths = [[len(sample.rollout) for sample in group.samples] for group in groups]
    samples = sum(len(group) for group in lengths)
    tokens = sum(sum(group) for group in lengths)
    if aggregation == "token_mean":
        return [[1.0 / tokens for _ in group] for group in lengths]
    if aggregation == "sequence_mean":
        return [[1.0 / (samples * length) for length in group] for group in lengths]
    if aggregation == "prompt_mean":
        return [[1.0 / (len(groups) * sum(group)) for _ in group] for group in lengths]
    return [[1.0 / (samples * rules.max_new_tokens) for _ in group] for group in lengths]


def node_shares(sequences: list[Sequence]) -> dict[str, float]:
    """Each node's share of the signal: sum of |A| over its tokens, relative to all; 0 everywhere without signal."""
    sums: dict[str, float] = {}
    for sequence in sequences:
        sums[sequence.node_id] = sums.get(sequence.node_id, 0.0) + float(np.abs(sequence.signal_T).sum())
    total = sum(sums.values())
    return {node: value / total if 0 < total < np.inf else 0.0 for node, value in sums.items()}


def _sequence(group: TrainingGroup, sample: TrainingSample, advantage: float, scale: float, version: int,
              rules: SamplingRules, config: LearnerConfig) -> Sequence:
    rollout = sample.rollout
    lag_T = np.maximum(version - rollout.versions(), 0)
    first_T = np.cumsum(rollout.head_lengths, dtype=np.int64) - rollout.head_lengths
    columns_K = np.arange(int(rollout.head_lengths.max()))
    valid_TK = columns_K[None, :] < rollout.head_lengths[:, None]
    entries_TK = first_T[:, None] + np.where(valid_TK, columns_K[None, :], 0)
    return Sequence(
        group=group.group,
        sample=rollout.sample,
        prompt=np.asarray(group.prompt_tokens, dtype=np.int64),
        tokens_T=rollout.tokens.astype(np.int64),
        log_q_T=sampler.behaviour_logprobs(rollout, rules),
        signal_T=advantage * scale * lag_weights(lag_T, config.staleness),
        scale_T=scale * lag_weights(lag_T, config.staleness),
        lag_T=lag_T,
        head_ids_TK=rollout.head_ids.astype(np.int64)[entries_TK],
        head_q_TK=np.exp(sampler.head_logprobs(rollout, rules))[entries_TK],
        head_valid_TK=valid_TK,
        tail_q_T=np.exp(sampler.tail_logprobs(rollout, rules)),
        node_id=sample.node_id,
        kl_limit=sample.kl_limit,
        draws_TS=_draws(group.group, rollout, version, config),
        routes_TYX=rollout.routes,
    )


def _draws(group: int, rollout: Rollout, version: int, config: LearnerConfig) -> NDArray[np.float64] | None:
    """(T, S) uniform numbers in (0, 1), a pure function of (seed, version, group, sample); None where not needed."""
    if correction_of(config.loss).centring != "draws":
        return None
    entropy = [config.seed, version, group, rollout.sample]
    return np.random.default_rng(entropy).random((len(rollout), config.loss.draws))
