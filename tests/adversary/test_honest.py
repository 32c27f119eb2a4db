"""The honest zoo: whatever an honest node may do passes, and whatever is our own fault is never a failure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from protocol import bundle as bundles
from protocol.errors import LocalFault, code
from protocol.messages import Receipt
from protocol.rollout import Bundle, Finish, Segment, SwapMode
from tests.adversary.world import COORDINATOR, EOS, NODE, World, identity
from verifier.checkpoints import CheckpointBook
from verifier.findings import Judgement
from verifier.session import Session

E_TEST = code("E_TEST_DISK", "a disk that fails in a test")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


def _passes(judgement: Judgement) -> bool:
    assert [finding for finding in judgement.findings if not finding.ok] == []
    assert judgement.tiers == ("T0", "T1", "T2")
    assert len(judgement.rewards_micro) == len(judgement.samples)
    return judgement.outcome == "pass" and judgement.code is None


@pytest.mark.parametrize("group", range(2))
@pytest.mark.parametrize("version", [0, 3])
def test_decoding_passes_against_prefill(world, group, version):
    assert _passes(world.judge_honest(world.lease(group=group, start_version=version)))


@pytest.mark.parametrize("mode", list(SwapMode))
def test_weights_swapped_in_flight(world, mode):
    segments = [Segment(0, 0), Segment(8, 1, mode), Segment(16, 3, mode)]
    assert _passes(world.judge_honest(world.lease(start_version=0), segments=segments))


def test_rollouts_of_one_lease_swap_at_different_positions(world):
    lease = world.lease(start_version=1)
    late = world.generate(lease, segments=[Segment(0, 1), Segment(24, 2)])
    early = world.generate(lease, segments=[Segment(0, 1), Segment(8, 2, SwapMode.REPREFILL)])
    mixed = Bundle((late.rollouts[0], early.rollouts[1], late.rollouts[2], world.honest(lease).rollouts[3]))
    assert _passes(world.judge(world.submission(lease, mixed)))


@pytest.mark.parametrize("samples", [(5,), (2, 7), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_batch_sizes(world, samples):
    assert _passes(world.judge_honest(world.lease(samples=samples)))


def test_another_node_makes_the_same_rollouts(world):
    """No node id is in the seed: a lease given again comes out the same, so that dropping it gains nothing."""
    lease = world.lease(group=4)
    again = world.lease(group=4, node=identity("another"))
    assert lease.lease_id != again.lease_id
    first, second = world.generate(lease), world.generate(again)
    assert bundles.encode(first) == bundles.encode(second)
    assert _passes(world.judge(world.submission(again, second, signer=identity("another"))))


def test_order_of_rollouts_in_the_bundle_is_free(world):
    lease = world.lease(group=5)
    bundle = Bundle(tuple(reversed(world.honest(lease).rollouts)))
    assert _passes(world.judge(world.submission(lease, bundle)))


def test_one_token_and_the_length_limit(tmp_path):
    world = World(tmp_path, max_new_tokens=1)
    bundle = world.generate(world.lease(samples=range(8)))
    assert {len(rollout) for rollout in bundle.rollouts} == {1}
    assert _passes(world.judge(world.submission(world.lease(samples=range(8)), bundle)))


def test_end_of_sequence_first(world):
    """Look for a group whose sample ends at once, so that EOS at position 0 is a real draw."""
    for group in range(200):
        lease = world.lease(group=group, samples=(0, 1, 2, 3, 4, 5, 6, 7))
        bundle = world.generate(lease, max_new_tokens=1)
        if any(int(rollout.tokens[0]) == EOS for rollout in bundle.rollouts):
            break
    whole = world.generate(lease)
    assert any(len(rollout) == 1 and rollout.finish == Finish.EOS for rollout in whole.rollouts)
    assert _passes(world.judge(world.submission(lease, whole)))


def test_exactly_tied_logits(tmp_path):
    """Four ids share one embedding row, so that they tie at every position, also at the edge of the head."""
    world = World(tmp_path, tie_rows=True)
    for group in range(2):
        assert _passes(world.judge_honest(world.lease(group=group)))


def test_noise_of_another_stack(world):
    """Logits off by 1e-4, ten times what separates two float32 stacks, pass with room to spare."""
    generator = torch.Generator().manual_seed(1)

    def noise(logits_BV: torch.Tensor, _: int) -> torch.Tensor:
        return logits_BV + 1e-4 * torch.randn(logits_BV.shape, generator=generator)

    lease = world.lease(samples=range(8))
    assert _passes(world.judge(world.submission(lease, world.generate(lease, logits_hook=noise))))


def test_several_submissions_share_a_look_and_each_gets_its_own_verdict(world):
    leases = [world.lease(group=group, start_version=group % 3) for group in range(4)]
    submissions = [world.submission(lease, world.honest(lease)) for lease in leases]
    bad = world.lease(group=1)
    submissions.insert(2, world.submission(bad, world.honest(bad), rollouts=3))
    outcomes = [judgement.outcome for judgement in world.session.judge(submissions)]
    assert outcomes == ["pass", "pass", "fail", "pass", "pass"]


def test_an_undrawn_submission_is_not_recomputed(world):
    lease = world.lease()
    judgement = world.judge(world.submission(lease, world.honest(lease), drawn=False))
    assert judgement.outcome == "pass"
    assert judgement.tiers == ("T0", "T1")
    assert len(judgement.rewards_micro) == 4


# -- our own faults -----------------------------------------------------------------------------------------


class _Broken:
    """A recomputer that fails, in both tiers or in T3 only."""

    def __init__(self, world: World, error: Exception, *, only_second: bool = False):
        self._world, self._error, self._only_second = world, error, only_second

    def __call__(self, tier):
        if self._only_second and tier == "T2":
            return self._world.shelf(tier)
        return self

    def residuals(self, submissions):
        raise self._error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LocalFault(E_TEST, "disk full"), "E_TEST_DISK"),
        (MemoryError("out of memory"), "E_INTERNAL"),
        (RuntimeError("CUDA out of memory"), "E_INTERNAL"),
    ],
)
def test_our_fault_is_inconclusive(world, error, expected):
    session = Session(world.run, world.book, world.rewards, _Broken(world, error))
    lease = world.lease()
    judgement = session.judge([world.submission(lease, world.honest(lease))])[0]
    assert (judgement.outcome, judgement.code) == ("inconclusive", expected)


def test_without_a_model_a_drawn_submission_is_inconclusive(world):
    lease = world.lease()
    session = Session(world.run, world.book, world.rewards, None)
    judgement = session.judge([world.submission(lease, world.honest(lease))])[0]
    assert (judgement.outcome, judgement.code) == ("inconclusive", "E_NO_MODEL")


def test_no_second_look_no_failure(world):
    session = Session(world.run, world.book, world.rewards, _Broken(world, OSError("gone"), only_second=True))
    lease = world.lease()
    cheat = world.generate(lease, states=lambda v: world.state(0))
    judgement = session.judge([world.submission(lease, cheat)])[0]
    assert (judgement.outcome, judgement.code) == ("inconclusive", "E_INTERNAL")


def test_configurations_that_disagree_blame_nobody(world):
    """T2 computes with the wrong weights (our fault), T3 with the right ones."""

    class Confused:
        def __call__(self, tier):
            if tier == "T3":
                return world.shelf(tier)
            from verifier.recompute import TorchRecomputer

            class Stale:
                def state(self, version):
                    return world.state(version - 1)

            return TorchRecomputer(world.engine, Stale())

    session = Session(world.run, world.book, world.rewards, Confused())
    lease = world.lease()
    judgement = session.judge([world.submission(lease, world.honest(lease))])[0]
    assert (judgement.outcome, judgement.code) == ("inconclusive", "E_DISAGREE")


def test_one_unavailable_version_does_not_spoil_the_others(world):
    book = CheckpointBook(world.run)
    book.add(envelope for _, envelope in world.checkpoints)

    class Some:
        def __call__(self, tier):
            return self

        def residuals(self, submissions):
            if any(opened.lease.start_version == 2 for opened in submissions):
                raise LocalFault(E_TEST, "version 2 is not here")
            return world.shelf("T2").residuals(submissions)

    session = Session(world.run, book, world.rewards, Some())
    leases = [world.lease(group=group, start_version=group % 3) for group in range(3)]
    judged = session.judge([world.submission(lease, world.honest(lease)) for lease in leases])
    assert [judgement.outcome for judgement in judged] == ["pass", "pass", "inconclusive"]


def test_what_the_coordinator_got_wrong_is_not_the_nodes_fault(world):
    lease = world.lease()
    good = world.submission(lease, world.honest(lease))
    cases = {
        "E_SIGNATURE": replace(good, lease=lease.sign(identity("somebody"))),
        "E_LEASE_INCOHERENT": world.submission(
            lease.model_copy(update={"beacon": "00" * 32}), world.honest(lease)
        ),
        "E_OBJECT_HASH": replace(good, bundle=good.bundle + b"\0"),
        "E_PROMPT": _other_prompt(world),
    }
    for expected, submission in cases.items():
        judgement = world.judge(submission)
        assert (judgement.outcome, judgement.code) == ("inconclusive", expected)


def _other_prompt(world: World):
    """The coordinator leased a prompt that is not the task's; the node did as it was told."""
    from protocol.rollout import prompt_digest

    prompt = [3, 6, 7, 5]
    lease = world.lease(group=6).model_copy(
        update={"prompt_tokens": prompt, "prompt_sha256": prompt_digest(prompt), "lease_id": "66" * 16}
    )
    return world.submission(lease, world.generate(lease))


def test_no_date_speaks_against_a_node(world):
    """Coordinator and learner date as they like; what was out is told by the digests that the node signed."""
    lease = world.lease(start_version=0)
    issued = world.checkpoints[3][0].published_at_ms - 10**9
    lease = lease.model_copy(update={"issued_at_ms": issued})
    submission = world.submission(lease, world.generate(lease, segments=[Segment(0, 0), Segment(8, 3)]))
    receipt = Receipt.from_payload(submission.receipt.payload).model_copy(update={"received_at_ms": issued})
    assert _passes(world.judge(replace(submission, receipt=receipt.sign(COORDINATOR))))


def test_a_second_manifest_of_a_version_blames_nobody_and_is_not_recomputed(world):
    """A learner signs two manifests of a version, with one beacon; the node's weights are those that it named."""
    book = CheckpointBook(world.run)
    book.add([world.checkpoints[0][1], world.second_manifest(1)])

    def never(tier):
        raise AssertionError("recomputed with weights that the node did not name")

    session = Session(world.run, book, world.rewards, never)
    lease = world.lease(start_version=1)
    begun = world.submission(lease, world.honest(lease))
    early = world.lease(start_version=0)
    swapped = world.submission(early, world.generate(early, segments=[Segment(0, 0), Segment(8, 1)]))
    for judgement in session.judge([begun, swapped]):
        assert (judgement.outcome, judgement.code, judgement.tiers) == ("inconclusive", "E_OTHER_MANIFEST", ())
        assert [f.check for f in judgement.findings if not f.ok] == ["A.5 named manifests"]
    twin = replace(world.submission(early, world.honest(early)), drawn=False, replica=swapped)
    assert session.judge([twin])[0].outcome == "pass"  # nor is anything compared with what rests on the other one


def test_heads_are_at_the_floor_of_quantisation(world):
    """Why the thresholds can be tight: honest heads differ from the reference by half a code step at most."""
    lease = world.lease(group=1)
    judgement = world.judge(world.submission(lease, world.honest(lease)))
    entries = next(finding for finding in judgement.findings if finding.check.startswith("T2.3"))
    assert float(entries.got.split()[1]) < 0.5 / world.rules.steps_per_nat + 1e-4
    assert np.isclose(float(entries.expected.split()[2]), 0.0022)
    assert judgement.tokens == sum(map(len, world.honest(lease).rollouts))
    assert NODE.id == lease.node_id
