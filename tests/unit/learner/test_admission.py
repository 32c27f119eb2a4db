"""What the learner refuses although the coordinator admitted it, each with its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from learner.admission import E_ADMITTED_DRAW, E_ADMITTED_GROUP, E_TOO_STALE, Admission
from learner.batch import TrainingGroup
from protocol import bundle
from protocol.api import AdmittedGroup
from protocol.errors import E_SIGNATURE, E_WRONG_KEY, E_WRONG_RUN, PeerFault
from protocol.identity import Identity
from protocol.messages import Commitment, Lease, Profile, Receipt, Verdict
from protocol.provenance import E_PROVENANCE
from protocol.rollout import Bundle, Rollout, Segment
from protocol.store import DirectoryStore
from protocol.tasks import FULL_REWARD_MICRO
from tests.fakes.learning import (
    COORDINATOR,
    LEARNER,
    NODE,
    VERIFIER,
    admitted_group,
    beacon_of,
    load_model,
    run_manifest,
)

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


# -- what nobody signed ---------------------------------------------------------------------------------------


def change_proof(admitted: AdmittedGroup, /, **changes: object) -> AdmittedGroup:
    """The first bundle's proof with parts replaced."""
    first = admitted.proofs[0].model_copy(update=changes)
    return admitted.model_copy(update={"proofs": [first, *admitted.proofs[1:]]})


def resigned(admitted: AdmittedGroup, part: str, signer: Identity, /, **changes: object) -> AdmittedGroup:
    """One part of the first bundle's proof with other content, signed by ``signer``; what names it, as it was."""
    kind = {"commitment": Commitment, "receipt": Receipt, "verdict": Verdict}[part]
    message = kind.from_payload(getattr(admitted.proofs[0], part).payload).model_copy(update=changes)
    return change_proof(admitted, **{part: message.sign(signer)})


def recommitted(admitted: AdmittedGroup, signer: Identity, /, **changes: object) -> AdmittedGroup:
    """Another commitment with a receipt and a verdict of its own: what all three roles together would have to sign."""
    proof = admitted.proofs[0]
    commitment = Commitment.from_payload(proof.commitment.payload).model_copy(update=changes).sign(signer)
    receipt = Receipt.from_payload(proof.receipt.payload).model_copy(update={"commitment_sha256": commitment.digest})
    signed = receipt.sign(COORDINATOR)
    verdict = Verdict.from_payload(proof.verdict.payload).model_copy(update={"receipt_sha256": signed.digest})
    changed = change_proof(admitted, commitment=commitment, receipt=signed, verdict=verdict.sign(VERIFIER))
    samples = [
        s.model_copy(update={"receipt_sha256": signed.digest}) if s.receipt_sha256 == proof.receipt.digest else s
        for s in admitted.samples
    ]
    return changed.model_copy(update={"samples": samples})


def rewarded(admitted: AdmittedGroup, reward_micro: int, *, by_verdict: bool = False) -> AdmittedGroup:
    first = admitted.samples[0].model_copy(update={"reward_micro": reward_micro})
    changed = admitted.model_copy(update={"samples": [first, *admitted.samples[1:]]})
    return resigned(changed, "verdict", VERIFIER, rewards_micro=[reward_micro, 0]) if by_verdict else changed


STRANGER = Identity(b"s" * 32)


@pytest.mark.parametrize(("change", "code"), [
    (lambda g: g.model_copy(update={"proofs": []}), E_ADMITTED_GROUP),
    (lambda g: g.model_copy(update={"proofs": g.proofs[1:]}), E_ADMITTED_GROUP),
    (lambda g: change_proof(g, **dict(g.proofs[1])), E_ADMITTED_GROUP),  # the other bundle's, twice
    (lambda g: change_proof(g, node_public_key=STRANGER.public_key.hex()), E_WRONG_KEY),
    (lambda g: change_proof(g, node_public_key="no key"), E_PROVENANCE),
    (lambda g: resigned(g, "commitment", STRANGER), E_SIGNATURE),
    (lambda g: resigned(g, "commitment", NODE, tokens=1), E_PROVENANCE),  # not the one that was receipted
    (lambda g: recommitted(g, COORDINATOR), E_SIGNATURE),
    (lambda g: recommitted(g, NODE, run_id="cd" * 16), E_WRONG_RUN),
    (lambda g: recommitted(g, NODE, lease_sha256="00" * 32), E_PROVENANCE),
    (lambda g: recommitted(g, NODE, object_sha256="00" * 32), E_PROVENANCE),
    (lambda g: recommitted(g, NODE, bundle_root="00" * 32), E_ADMITTED_GROUP),
    (lambda g: resigned(g, "receipt", STRANGER), E_SIGNATURE),
    (lambda g: resigned(g, "receipt", COORDINATOR, epoch=7), E_ADMITTED_GROUP),  # not the one the samples name
    (lambda g: change_proof(g, verdict=g.proofs[1].verdict), E_PROVENANCE),
    (lambda g: resigned(g, "verdict", COORDINATOR), E_WRONG_KEY),
    (lambda g: resigned(g, "verdict", VERIFIER, verifier_id=STRANGER.id), E_PROVENANCE),
    (lambda g: resigned(g, "verdict", VERIFIER, run_id="cd" * 16), E_WRONG_RUN),
    (lambda g: resigned(g, "verdict", VERIFIER, outcome="inconclusive", code="E_X", rewards_micro=[]), E_PROVENANCE),
    (lambda g: resigned(g, "verdict", VERIFIER, tiers=["T0"]), E_PROVENANCE),
    (lambda g: resigned(g, "verdict", VERIFIER, samples=[0, 2]), E_PROVENANCE),
    (lambda g: resigned(g, "verdict", VERIFIER, rewards_micro=[0]), E_PROVENANCE),
    (lambda g: rewarded(g, g.samples[0].reward_micro + 1), E_ADMITTED_GROUP),
    (lambda g: rewarded(g, FULL_REWARD_MICRO + 1), E_ADMITTED_GROUP),
    (lambda g: rewarded(g, FULL_REWARD_MICRO + 1, by_verdict=True), E_ADMITTED_GROUP),
    (lambda g: rewarded(g, -1, by_verdict=True), E_ADMITTED_GROUP),
    (lambda g: resigned(g, "verdict", VERIFIER, rewards_micro=[0, FULL_REWARD_MICRO + 1]), E_PROVENANCE),
])
def test_nothing_is_trained_on_that_was_not_signed_for(world, admission, change: Callable, code: str):
    """Neither a bundle without commitment, receipt and verdict, nor a reward that no verifier signed."""
    _, group, objects = world
    admission.admit(group, objects, 0)
    with pytest.raises(PeerFault) as caught:
        admission.admit(change(group), objects, 0)
    assert caught.value.code == code


def test_another_bundle_than_the_committed_one_is_refused(world, admission):
    """The bytes that the store gives for the hash are those of another bundle of the same samples."""
    data, group, objects = world
    sha256 = group.samples[0].object_sha256
    shorter = Bundle(tuple(cut(s.rollout) for s in data.samples[:2]))
    with pytest.raises(PeerFault) as caught:
        admission.admit(group, objects | {sha256: bundle.encode(shorter)}, 0)
    assert caught.value.code == E_ADMITTED_GROUP


def cut(rollout: Rollout) -> Rollout:
    """The rollout without its last token."""
    entries = len(rollout.head_ids) - int(rollout.head_lengths[-1])
    return replace(
        rollout, tokens=rollout.tokens[:-1], head_lengths=rollout.head_lengths[:-1],
        tail_codes=rollout.tail_codes[:-1], token_codes=rollout.token_codes[:-1],
        head_ids=rollout.head_ids[:entries], head_codes=rollout.head_codes[:entries],
    )


def test_a_sample_is_held_to_the_limit_of_the_profile_it_was_committed_under(world, model_dir):
    _, group, objects = world
    manifest = run_manifest(load_model(model_dir)[0])
    profiles = [manifest.profiles[0], Profile(
        name="noisy", max_mean_kl_nano=10**6, max_token_kl_micro=1, max_margin_micro=1,
    )]
    admission = Admission(manifest.model_copy(update={"profiles": profiles}), {0: beacon_of(0)})
    for profile, limit in (("torch", 1e-9), ("noisy", 1e-3), ("unheard-of", 1e-3)):
        admitted = admission.admit(recommitted(group, NODE, profile=profile), objects, 0)
        assert [sample.kl_limit for sample in admitted.samples] == pytest.approx([limit] * 2 + [1e-9] * 2)


def test_a_record_from_before_there_were_proofs_can_be_replayed(world, model_dir):
    """Without any proof it is taken as it was; with one that does not hold it is not."""
    _, group, objects = world
    replaying = Admission(run_manifest(load_model(model_dir)[0]), {0: beacon_of(0)}, unproved=True)
    replaying.admit(group.model_copy(update={"proofs": []}), objects, 0)
    with pytest.raises(PeerFault):
        replaying.admit(group.model_copy(update={"proofs": group.proofs[1:]}), objects, 0)


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
