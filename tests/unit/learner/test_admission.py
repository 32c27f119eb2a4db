"""What the learner refuses although the coordinator admitted it, each with its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from learner.admission import E_ADMITTED_DRAW, E_ADMITTED_GROUP, E_TOO_STALE, Admission
from learner.batch import TrainingGroup
from protocol.api import AdmittedGroup
from protocol.errors import E_SIGNATURE, E_WRONG_RUN, PeerFault
from protocol.messages import Lease
from protocol.rollout import Segment
from protocol.store import DirectoryStore
from tests.fakes.learning import COORDINATOR, LEARNER, admitted_group, beacon_of, load_model, run_manifest

World = tuple[TrainingGroup, AdmittedGroup, dict[str, bytes]]


@pytest.fixture
def world(speaker, tmp_path) -> World:
    data, store = speaker.group(3), DirectoryStore(tmp_path)
    group = admitted_group(data, store)
    return data, group, {s.object_sha256: store.get(s.object_sha256) for s in group.samples}


@pytest.fixture
def admission(model_dir) -> Admission:
    return Admission(run_manifest(load_model(model_dir)[0], max_lag_versions=2), {0: beacon_of(0)})


def test_a_good_group_becomes_training_data(world, admission):
    data, group, objects = world
    admitted = admission.admit(group, objects, 2)
    assert (admitted.group, admitted.prompt_tokens) == (data.group, data.prompt_tokens)
    for got, expected in zip(admitted.samples, data.samples, strict=True):
        assert np.array_equal(got.rollout.tokens, expected.rollout.tokens)
        assert got.reward_micro == expected.reward_micro


def change_lease(admitted: AdmittedGroup, /, signer=COORDINATOR, **changes: object) -> AdmittedGroup:
    """The first sample's lease, signed again with other content."""
    first = admitted.samples[0]
    lease = Lease.from_payload(first.lease.payload).model_copy(update=changes).sign(signer)
    return admitted.model_copy(update={"samples": [first.model_copy(update={"lease": lease}), *admitted.samples[1:]]})


@pytest.mark.parametrize(("change", "code"), [
    (lambda g: change_lease(g, signer=LEARNER), E_SIGNATURE),
    (lambda g: change_lease(g, run_id="cd" * 16), E_WRONG_RUN),
    (lambda g: change_lease(g, group=4), E_ADMITTED_GROUP),
    (lambda g: change_lease(g, environment="other"), E_ADMITTED_GROUP),
    (lambda g: change_lease(g, start_version=1), E_ADMITTED_GROUP),
    (lambda g: change_lease(g, prompt_tokens=[3, 4]), E_ADMITTED_GROUP),
    (lambda g: change_lease(g, prompt_sha256="00" * 32), E_ADMITTED_GROUP),
    (lambda g: change_lease(g, samples=[1]), E_ADMITTED_GROUP),
    (lambda g: change_lease(g, node_id="22" * 32), E_ADMITTED_GROUP),
    (lambda g: change_lease(g, beacon=beacon_of(9)), E_ADMITTED_GROUP),
    (lambda g: g.model_copy(update={"samples": g.samples[:3]}), E_ADMITTED_GROUP),
    (lambda g: g.model_copy(update={"samples": [*g.samples[:3], g.samples[2]]}), E_ADMITTED_GROUP),
    (lambda g: g.model_copy(update={"prompt_tokens": [9, 9]}), E_ADMITTED_GROUP),
    (lambda g: g.model_copy(update={"samples": [
        g.samples[0].model_copy(update={"object_sha256": g.samples[3].object_sha256}), *g.samples[1:]
    ]}), E_ADMITTED_GROUP),
    (lambda g: g.model_copy(update={"samples": [
        g.samples[0].model_copy(update={"reward_micro": 10**15}), *g.samples[1:]
    ]}), E_ADMITTED_GROUP),
])
def test_a_group_that_contradicts_its_leases_is_refused(world, admission, change: Callable, code: str):
    _, group, objects = world
    with pytest.raises(PeerFault) as caught:
        admission.admit(change(group), objects, 0)
    assert caught.value.code == code


def with_rollout(data: TrainingGroup, tmp_path, **changes: object) -> tuple[AdmittedGroup, dict[str, bytes]]:
    """The group with a changed first rollout, well-formed otherwise."""
    first = replace(data.samples[0], rollout=replace(data.samples[0].rollout, **changes))
    store = DirectoryStore(tmp_path / "changed")
    group = admitted_group(replace(data, samples=(first, *data.samples[1:])), store)
    return group, {s.object_sha256: store.get(s.object_sha256) for s in group.samples}


def test_a_token_that_was_not_drawn_is_refused(world, admission, tmp_path):
    data, *_ = world
    rollout = data.samples[0].rollout
    drawn_from_head = np.flatnonzero((rollout.token_codes == 0xFFFF) & (rollout.head_lengths > 1))[0]
    start = int(np.cumsum(rollout.head_lengths)[drawn_from_head] - rollout.head_lengths[drawn_from_head])
    head = rollout.head_ids[start : start + rollout.head_lengths[drawn_from_head]]
    tokens = rollout.tokens.copy()
    tokens[drawn_from_head] = next(t for t in head if t not in {tokens[drawn_from_head], 2})
    group, objects = with_rollout(data, tmp_path, tokens=tokens)
    with pytest.raises(PeerFault) as caught:
        admission.admit(group, objects, 0)
    assert caught.value.code == E_ADMITTED_DRAW


def test_versions_must_start_at_the_lease_and_not_come_from_the_future(world, admission, tmp_path):
    data, *_ = world
    for segments in ((Segment(0, 1),), (Segment(0, 0), Segment(2, 3))):
        group, objects = with_rollout(data, tmp_path, segments=segments)
        with pytest.raises(PeerFault) as caught:
            admission.admit(group, objects, 2)
        assert caught.value.code == E_ADMITTED_GROUP
    group, objects = with_rollout(data, tmp_path, segments=(Segment(0, 0), Segment(2, 2)))
    assert admission.admit(group, objects, 2).samples[0].rollout.versions().tolist()[:3] == [0, 0, 2]


def test_the_staleness_bound_is_exact(world, admission):
    _, group, objects = world
    admission.admit(group, objects, 2)
    assert not admission.is_stale(group, 2)
    assert admission.is_stale(group, 3)
    with pytest.raises(PeerFault) as caught:
        admission.admit(group, objects, 3)
    assert caught.value.code == E_TOO_STALE


def test_a_bundle_that_is_no_bundle_is_refused(world, admission):
    _, group, objects = world
    whole = objects[group.samples[0].object_sha256]
    for data in (b"", b"no bundle", whole[:-3], whole + b"x"):
        with pytest.raises(PeerFault):
            admission.admit(group, objects | {group.samples[0].object_sha256: data}, 0)
