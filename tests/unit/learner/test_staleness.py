from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.admission import Admission
from learner.batch import TrainingSample, make_batch, node_shares
from learner.config import LearnerConfig, StalenessConfig
from learner.journal import Journal
from learner.staleness import DroppedTokens, lag_weights, length_bucket
from learner.waiting_room import WaitingRoom
from protocol.rollout import Segment
from protocol.store import DirectoryStore
from tests.fakes.learning import admitted_group, beacon_of, load_model, run_manifest, sampling_rules

RULES = sampling_rules()


def test_only_decay_weighs_by_age():
    lag = np.array([0, 1, 3])
    assert lag_weights(lag, StalenessConfig(policy="decay", decay=0.5)).tolist() == [1.0, 0.5, 0.125]
    for policy in ("pace", "drop"):
        assert lag_weights(lag, StalenessConfig(policy=policy)).tolist() == [1.0, 1.0, 1.0]


def test_decay_is_per_token(speaker):
    group = speaker.group(0, size=2, rewards=[0, 10**6])
    rollout = group.samples[0].rollout
    swapped = replace(group, samples=(
        TrainingSample(replace(rollout, segments=(Segment(0, 3), Segment(2, 5))), 0), group.samples[1],
    ))
    plain = make_batch([swapped], 6, RULES, LearnerConfig())
    decayed = make_batch(
        [swapped], 6, RULES, LearnerConfig.model_validate({"staleness": {"policy": "decay", "decay": 0.5}})
    )
    ratio = decayed.sequences[0].signal_T / plain.sequences[0].signal_T
    assert ratio.tolist() == pytest.approx([0.125, 0.125] + [0.5] * (len(rollout) - 2))


def test_lengths_are_counted_by_powers_of_two():
    dropped = DroppedTokens()
    dropped.add("sums", [1, 3, 4, 7])
    dropped.add("sort", [5])
    assert dropped.tokens == 20
    assert dropped.by_task == {"sums": 15, "sort": 5}
    assert dropped.by_length == {"1": 1, "2-3": 3, "4-7": 16}
    assert length_bucket(1024) == "1024-2047"


@pytest.fixture
def room(model_dir, tmp_path) -> WaitingRoom:
    manifest = run_manifest(load_model(model_dir)[0], max_lag_versions=2)
    return WaitingRoom(DirectoryStore(tmp_path / "store"), Admission(manifest, {0: beacon_of(0)}), Journal(tmp_path))


def test_what_waited_too_long_is_counted_and_what_was_used_is_not(room, speaker, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    data = [speaker.group(g) for g in range(3)]
    groups = [admitted_group(d, store) for d in data]
    assert len(room.ready(groups, 0)) == 3
    room.data_of(groups[0], 0)
    assert room.ready(groups[1:], 2) != []
    assert room.dropped.tokens == 0
    room.ready([], 3)
    lengths = [len(s.rollout) for d in data[1:] for s in d.samples]
    assert room.dropped.by_task == {"sort": sum(lengths)}
    room.ready([], 4)
    assert room.dropped.tokens == sum(lengths)


def test_the_bound_is_the_manifests_whatever_happened_before(model_dir, speaker, tmp_path):
    """A learner that starts at version 40 refuses exactly what one that has run all along refuses."""
    manifest = run_manifest(load_model(model_dir)[0], max_lag_versions=2)
    group = admitted_group(speaker.group(0), DirectoryStore(tmp_path))
    for admission in (Admission(manifest, {}), Admission(manifest, {v: beacon_of(v) for v in range(40)})):
        assert [admission.is_stale(group, version) for version in (0, 2, 3, 40)] == [False, False, True, True]


def test_no_node_has_more_than_its_share(speaker):
    groups = [speaker.group(g, size=4, rewards=[0, 10**6, 0, 10**6]) for g in range(2)]
    owned = [
        replace(g, samples=tuple(replace(s, node_id="a" if s.rollout.sample else "b") for s in g.samples))
        for g in groups
    ]
    free = make_batch(owned, 0, RULES, LearnerConfig.model_validate({"loss": {"max_node_share": 1.0}}))
    bound = make_batch(owned, 0, RULES, LearnerConfig())
    assert free.node_shares["a"] == bound.node_shares["a"] > 0.6
    assert node_shares(list(bound.sequences)) == pytest.approx({"a": 0.5, "b": 0.5})


def test_draws_are_the_same_after_a_restart_and_other_for_other_rollouts(speaker):
    config = LearnerConfig.model_validate({"loss": {"preset": "stable_reinforce"}})
    group = speaker.group(0, size=2, rewards=[0, 10**6])
    one, two = (make_batch([group], 0, RULES, config).sequences for _ in range(2))
    assert np.array_equal(one[0].draws_TS, two[0].draws_TS)
    assert one[0].draws_TS.shape == (len(one[0].tokens_T), 8)
    assert not np.array_equal(one[0].draws_TS[:1], one[1].draws_TS[:1])
    assert make_batch([group], 0, RULES, LearnerConfig()).sequences[0].draws_TS is None
