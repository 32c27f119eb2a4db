"""T1' reports, forced audits, bundles under review, and suspicion summed up over a node's bundles."""

from __future__ import annotations

import math
from typing import Any

import pytest

from coordinator import scrutiny
from coordinator.screens import OUTLIER_MILLI
from protocol import statistics
from protocol.api import E_SUSPICION, E_UNCALIBRATED, AuditJob
from protocol.errors import PeerFault
from protocol.messages import Lease, NodeScreen, Receipt, RolloutScore, ScreenReport
from tests.fakes.coordinator import PROFILE, RUN_ID, FakeNode, World
from tests.unit.coordinator.conftest import MakeWorld


def screen(world: World, node: FakeNode, receipts: list[str], score: int = OUTLIER_MILLI, version: int = 1) -> Any:
    entry = NodeScreen(node_id=node.key.id, tokens=100, outliers=40, score_milli=score, receipts=receipts)
    report = ScreenReport(run_id=RUN_ID, version=version, nodes=[entry], issued_at_ms=world.clock.now_ms())
    return world.learner.client.post_screen(report)


def trusted(make_world: MakeWorld, **audit: Any) -> tuple[World, FakeNode]:
    """A node that is audited next to never."""
    world = make_world(batch={"groups_per_batch": 20}, audit={"ramp": 0, "floor_ppm": 0, "forced": 2} | audit)
    world.publish()
    return world, world.node().join()


def rate(world: World, reply: Any) -> int:
    receipt = Receipt.from_payload(reply.receipt.payload)
    return int(world.http.get(f"/v1/receipts/{receipt.receipt_id}").json()["rate_ppm"])


def test_an_outlier_is_audited_and_not_punished(make_world: MakeWorld) -> None:
    world, node = trusted(make_world)
    [before] = node.work(1)
    assert rate(world, before) == 0
    assert screen(world, node, [], OUTLIER_MILLI - 1).duplicate is False
    assert rate(world, node.work(1)[0]) == 0
    screen(world, node, [], version=2)
    assert screen(world, node, [], version=2).duplicate is True
    assert [rate(world, reply) for reply in node.work(3)] == [1_000_000, 1_000_000, 0]
    row = world.node_row(node)
    assert (row["state"], row["rejected"]) == ("active", 0)
    with pytest.raises(PeerFault) as caught:
        screen(world, node, [], score=9_999, version=2)
    assert caught.value.code == "E_CONFLICT"
    report = ScreenReport(run_id=RUN_ID, version=3, nodes=[], issued_at_ms=1)
    with pytest.raises(PeerFault) as caught:
        node.client.post_screen(report)
    assert caught.value.code == "E_WRONG_KEY"


def test_a_bundle_that_stands_out_is_recomputed_after_the_fact(make_world: MakeWorld) -> None:
    world, node = trusted(make_world)
    replies = node.work(2)
    world.verifier.pass_all()
    screen(world, node, [reply.receipt.digest for reply in replies])
    job = world.verifier.judge()
    assert job is not None
    assert job.drawn
    row = world.node_row(node)
    assert (row["accepted"], row["audited_passes"], row["credit_pending"]) == (4, 1, 20)  # nothing is counted twice
    assert world.learner.client.admitted(9) == []  # held back while one is left to recompute
    world.verifier.judge("fail", "E_HEAD_KL")
    row = world.node_row(node)
    assert (row["state"], row["ban_code"]) == ("banned", "E_HEAD_KL")


def test_a_review_that_nobody_can_finish_changes_nothing(make_world: MakeWorld) -> None:
    world, node = trusted(make_world)
    replies = node.work(2)
    world.verifier.pass_all()
    screen(world, node, [replies[0].receipt.digest])
    for attempt in range(3):
        assert world.verifier.judge("inconclusive", "E_OUT_OF_DISK") is not None
        world.clock.advance(2 * 2**attempt + 1)
    assert world.verifier.claim() is None
    assert [g.group for g in world.learner.client.admitted(9)] == [0]
    assert world.node_row(node)["inconclusive"] == 0


def admitted(world: World) -> list[int]:
    return [group.group for group in world.learner.client.admitted(9)]


def test_what_is_under_review_is_neither_trained_on_nor_paid(make_world: MakeWorld) -> None:
    world, node = trusted(make_world)
    replies = node.work(4)
    world.verifier.pass_all()
    plan = world.learner.plan(2)
    screen(world, node, [replies[0].receipt.digest])
    assert admitted(world) == [1]
    with pytest.raises(PeerFault) as caught:  # planned a moment before
        world.learner.client.post_batch(plan)
    assert caught.value.code == "E_BATCH"
    world.publish()
    world.publish()  # both groups are too old now: what stands is paid, what is in doubt waits
    row = world.node_row(node)
    assert (row["credit"], row["credit_pending"]) == (30, 10)
    assert world.verifier.judge() is not None
    row = world.node_row(node)
    assert (row["credit"], row["credit_pending"]) == (40, 0)


def test_a_review_goes_before_other_work_and_gives_the_group_back(make_world: MakeWorld) -> None:
    world, node = trusted(make_world)
    replies = node.work(2)
    world.verifier.pass_all()
    node.work(2)
    screen(world, node, [replies[1].receipt.digest])
    job = world.verifier.judge()
    assert job is not None
    assert job.receipt.digest == replies[1].receipt.digest
    assert admitted(world) == [0]
    world.learner.client.post_batch(world.learner.plan(1))
    assert world.node_row(node)["credit"] == 20


@pytest.mark.parametrize("elsewhere", [False, True])
def test_credit_of_what_was_trained_on_is_void_when_its_review_fails(make_world: MakeWorld, elsewhere: bool) -> None:
    world, node = trusted(make_world)
    replies = node.work(2)
    world.verifier.pass_all()
    world.learner.client.post_batch(world.learner.plan(1))
    assert world.node_row(node)["credit"] == 20
    if elsewhere:  # banned for something else, which leaves what was paid alone
        world.admin("ban", node_id=node.key.id)
        assert world.node_row(node)["credit"] == 20
    screen(world, node, [replies[0].receipt.digest])
    row = world.node_row(node)
    assert (row["credit"], row["credit_pending"]) == (10, 10)
    world.verifier.judge("fail", "E_HEAD_KL")
    row = world.node_row(node)
    assert (row["state"], row["credit"], row["credit_pending"]) == ("banned", 10, 0)


def test_a_review_without_an_end_holds_work_for_a_while_and_costs_nothing(make_world: MakeWorld) -> None:
    """Neither a learner that names every bundle nor a verifier that answers none stalls honest work for good."""
    world, node = trusted(make_world)
    replies = node.work(2)
    world.verifier.pass_all()
    names = [reply.receipt.digest for reply in replies]
    screen(world, node, names)
    assert world.verifier.claim() is not None  # and never a word
    world.clock.advance(599)
    screen(world, node, names, version=2)  # each bundle once
    assert admitted(world) == []
    world.clock.advance(1)
    assert admitted(world) == [0]
    world.learner.client.post_batch(world.learner.plan(1))
    row = world.node_row(node)
    assert (row["state"], row["credit"], row["credit_pending"]) == ("active", 0, 20)
    for _ in range(17):  # eight claims of each lapse
        world.verifier.claim()
        world.clock.advance(601)
    assert world.verifier.claim() is None
    row = world.node_row(node)
    assert (row["state"], row["credit"], row["credit_pending"], row["inconclusive"]) == ("active", 20, 0, 0)


def test_nobody_is_lent_trust_by_a_recomputation_that_was_not_due(make_world: MakeWorld) -> None:
    world, node = trusted(make_world)
    node.work(1)
    job = world.verifier.claim()
    assert job is not None
    assert not job.drawn
    for outcome, code, tiers in (
        ("pass", None, ["T0", "T1", "T2"]), ("fail", "E_HEAD_KL", ["T0", "T1", "T2", "T3"]),
        ("inconclusive", "E_DISAGREE", ["T0", "T1", "T2"]),
    ):
        with pytest.raises(PeerFault) as caught:
            world.verifier.client.verdict(world.verifier.verdict(job, outcome, code, tiers=tiers))
        assert caught.value.code == "E_VERDICT"
    row = world.node_row(node)
    assert (row["state"], row["accepted"], row["audited_passes"]) == ("active", 0, 0)
    world.verifier.client.verdict(world.verifier.verdict(job))
    row = world.node_row(node)
    assert (row["accepted"], row["audited_passes"]) == (2, 0)


def test_a_quiet_spell_forces_audits(make_world: MakeWorld) -> None:
    world, node = trusted(make_world, quiet_ms=10_000, forced_after_quiet=1)
    assert rate(world, node.work(1)[0]) == 0
    world.clock.advance(11)
    assert [rate(world, reply) for reply in node.work(2)] == [1_000_000, 0]


def test_rewards_out_of_line_force_audits(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrutiny, "NODE_MEMORY", 4)
    monkeypatch.setattr(scrutiny, "REWARD_SIGMAS", 2.0)
    world, node = trusted(make_world)
    other = world.node("other").join()
    forced = []
    for party, reward in ((other, 500_000), (other, 500_000), (node, 1_000_000)) * 6:
        [(lease, digest)] = party.leases(1)
        party.finish(lease, digest)
        job = world.verifier.claim()
        assert job is not None
        world.verifier.client.verdict(world.verifier.verdict(job, rewards_micro=[reward] * len(lease.samples)))
        forced.append(world.node_row(node)["forced_audits"])
    assert forced[:6] == [0] * 6  # a run of luck is no reason
    assert forced[-1] > 0
    row = world.node_row(other)
    assert (row["forced_audits"], row["state"], world.node_row(node)["state"]) == (0, "active", "active")


# -- suspicion ----------------------------------------------------------------------------------------------


def scores(job: AuditJob, *llr_milli: int) -> list[RolloutScore]:
    """One number for all rollouts, or one for each."""
    samples = Lease.from_payload(job.lease.payload).samples
    return [
        RolloutScore(sample=s, tokens=90, log_kl_milli=0, bias_nano=0, margin_nano=0, llr_milli=llr)
        for s, llr in zip(samples, llr_milli * (len(samples) // len(llr_milli)), strict=True)
    ]


def weigh(world: World, node: FakeNode, *llr_milli: int, second_look: bool = False) -> AuditJob:
    node.work(1)
    job = world.verifier.claim()
    assert job is not None
    tiers = ["T0", "T1", "T2", *(["T3"] if second_look else [])]
    verdict = world.verifier.verdict(job, scores=scores(job, *llr_milli), tiers=tiers)
    world.verifier.client.verdict(verdict)
    return job


def audited(make_world: MakeWorld, group_size: int = 2, **audit: Any) -> tuple[World, FakeNode, int]:
    """A node that is always audited, each bundle another group, and the alarm: ln(100 / 0.1)."""
    world = make_world(
        batch={"groups_per_batch": 40, "group_size": group_size},
        audit={"ramp": 1000, "life_rollouts": 100, "alpha_ppm": 100_000} | audit,
    )
    world.publish()
    return world, world.node().join(), statistics.alarm_milli(world.coordinator.run.manifest.audit)


def test_suspicion_has_a_floor_and_needs_a_second_configuration_half_way(make_world: MakeWorld) -> None:
    world, node, alarm = audited(make_world)
    assert alarm == 6_908
    for _ in range(3):
        weigh(world, node, -500)
    assert world.node_row(node)["suspicion_milli"] == 0  # nothing is banked
    assert weigh(world, node, 1_000).confirm is False
    assert world.node_row(node)["suspicion_milli"] == 1_000
    for _ in range(3):
        weigh(world, node, 3_000)
    row = world.node_row(node)
    assert (row["suspicion_milli"], row["state"]) == (alarm // 2, "active")
    job = weigh(world, node, 3_000, second_look=True)
    assert job.confirm
    row = world.node_row(node)
    assert (row["suspicion_milli"], row["state"]) == (alarm // 2 + 3_000, "active")
    weigh(world, node, 3_000, second_look=True)
    row = world.node_row(node)
    assert (row["state"], row["ban_code"]) == ("banned", E_SUSPICION)
    assert row["accepted"] == 18  # the bundle itself passed


def test_rollouts_of_one_bundle_are_one_piece_of_evidence(make_world: MakeWorld) -> None:
    """They share prompt and weights: the mean of their ratios counts, never their product."""
    world, node, _ = audited(make_world)
    weigh(world, node, 3_000, -500)
    row = world.node_row(node)
    assert row["suspicion_milli"] == math.floor(1000 * math.log((math.exp(3) + math.exp(-0.5)) / 2))
    assert row["suspicion_rollouts"] == 2


def test_bundles_of_one_group_are_one_piece_of_evidence(make_world: MakeWorld) -> None:
    world, node, _ = audited(make_world, group_size=4)
    sums = []
    for llr_milli in (1_000, 3_000, 500, -500):
        weigh(world, node, llr_milli)
        sums.append(world.node_row(node)["suspicion_milli"])
    assert sums == [1_000, 1_000, 1_500, 1_500]  # two bundles of each group


def test_scores_of_a_bundle_that_was_chosen_for_its_looks_count_nothing(make_world: MakeWorld) -> None:
    world, node = trusted(make_world)
    replies = node.work(2)
    world.verifier.pass_all()
    screen(world, node, [replies[0].receipt.digest])
    job = world.verifier.claim()
    assert job is not None
    world.verifier.client.verdict(world.verifier.verdict(job, scores=scores(job, 3_000), tiers=["T0", "T1", "T2"]))
    row = world.node_row(node)
    assert (row["audited_passes"], row["suspicion_milli"], row["suspicion_rollouts"]) == (1, 0, 0)
    assert weigh(world, node, 1_000).drawn  # what is audited because of it was not chosen for its own
    assert world.node_row(node)["suspicion_milli"] == 1_000


def test_another_profile_ends_trust_but_not_suspicion(make_world: MakeWorld) -> None:
    world, node, _ = audited(make_world, unknown_profiles=True)
    weigh(world, node, 1_000)
    node.work(1)  # handed in under the first profile, judged under the second
    node.client.register(node.hello(profile="brand-new"))
    row = world.node_row(node)
    assert (row["suspicion_milli"], row["suspicion_rollouts"], row["audited_passes"]) == (1_000, 2, 0)
    job = world.verifier.claim()
    assert job is not None
    world.verifier.client.verdict(world.verifier.verdict(job, scores=scores(job, 500)))
    row = world.node_row(node)
    assert (row["suspicion_milli"], row["suspicion_rollouts"]) == (1_500, 4)
    node.client.register(node.hello())
    assert world.node_row(node)["suspicion_milli"] == 1_500


def test_a_listed_profile_taken_up_later_makes_no_scores_of_earlier_work(make_world: MakeWorld) -> None:
    world, node, _ = audited(make_world, unknown_profiles=True)
    node.client.register(node.hello(profile="brand-new"))
    [(lease, digest)] = node.leases(1)
    node.upload(node.bundle(lease))
    node.client.submit(node.commitment(lease, digest, profile="brand-new"))
    node.client.register(node.hello())
    job = world.verifier.claim()
    assert job is not None
    world.verifier.client.verdict(world.verifier.verdict(job, scores=scores(job, 1_000)))
    assert world.node_row(node)["suspicion_rollouts"] == 0


def test_scores_are_of_a_pass_with_a_recomputation(make_world: MakeWorld) -> None:
    world, node = trusted(make_world)
    node.work(1)
    job = world.verifier.claim()
    assert job is not None
    rows = scores(job, 3_000)
    for outcome, found, changes in (
        ("pass", None, {"scores": rows}),  # not drawn
        ("fail", "E_REPLAY", {"scores": rows}),
    ):
        with pytest.raises(PeerFault) as caught:
            world.verifier.client.verdict(world.verifier.verdict(job, outcome, found, **changes))
        assert caught.value.code == "E_VERDICT"


# -- profiles that the run does not list --------------------------------------------------------------------


def test_an_unlisted_profile_is_audited_every_time_and_never_punished(make_world: MakeWorld) -> None:
    world, listed = trusted(make_world, unknown_profiles=True)
    node = world.node("new")
    node.client.register(node.hello(profile="brand-new"))
    for _ in range(3):
        [(lease, digest)] = node.leases(1)
        node.upload(node.bundle(lease))
        reply = node.client.submit(node.commitment(lease, digest, profile="brand-new"))
        assert rate(world, reply) == 1_000_000
        world.verifier.judge("inconclusive", E_UNCALIBRATED)
    row = world.node_row(node)
    assert (row["state"], row["rejected"], row["inconclusive"]) == ("active", 0, 6)
    assert row["reasons"] == {E_UNCALIBRATED: 3}
    assert world.verifier.claim() is None  # not tried again
    assert [(lease.group, lease.samples) for lease, _ in listed.leases(1)] == [(0, [0, 1])]  # the work is offered on


def test_only_passes_release_the_brake_on_a_profile_without_limits(make_world: MakeWorld) -> None:
    world, _ = trusted(make_world, unknown_profiles=True)
    node = world.node("new")
    node.client.register(node.hello(profile="brand-new"))

    def round_of(outcome: str, found: str | None) -> int:
        leases = node.leases(8)
        for lease, digest in leases:
            node.upload(node.bundle(lease))
            node.client.submit(node.commitment(lease, digest, profile="brand-new"))
        while world.verifier.judge(outcome, found) is not None:
            pass
        return len(leases)

    assert [round_of("inconclusive", E_UNCALIBRATED) for _ in range(5)] == [8, 1, 1, 1, 1]
    assert [round_of("pass", None) for _ in range(6)] == [1, 1, 2, 8, 8, 8]


def test_a_run_that_takes_listed_profiles_only_says_so(world: World) -> None:
    node = world.node()
    with pytest.raises(PeerFault) as caught:
        node.client.register(node.hello(profile="brand-new"))
    assert caught.value.code == "E_PROFILE"


def test_numbers_never_ban_an_unlisted_profile_but_a_wrong_draw_does(make_world: MakeWorld) -> None:
    world = make_world(
        batch={"groups_per_batch": 20, "group_size": 2},
        audit={"ramp": 1000, "life_rollouts": 100, "alpha_ppm": 100_000, "unknown_profiles": True},
    )
    world.publish()
    listed = world.node().join()
    unlisted = world.node("new")
    unlisted.client.register(unlisted.hello(profile="brand-new"))

    def judged(node: FakeNode, outcome: str, found: str | None, **changes: object) -> dict[str, Any]:
        profile = "brand-new" if node is unlisted else PROFILE
        [(lease, digest)] = node.leases(1)
        node.upload(node.bundle(lease))
        node.client.submit(node.commitment(lease, digest, profile=profile))
        job = world.verifier.claim()
        assert job is not None
        told = {"scores": scores(job, 3_000)} if outcome == "pass" else {}
        world.verifier.client.verdict(world.verifier.verdict(job, outcome, found, **told, **changes))
        return world.node_row(node)

    looked_at_twice = ["T0", "T1", "T2", "T3"]
    for _ in range(4):
        row = judged(unlisted, "pass", None, tiers=looked_at_twice)
        assert (row["suspicion_milli"], row["state"]) == (0, "active")
    row = judged(listed, "pass", None, tiers=looked_at_twice)
    assert row["suspicion_milli"] == 3_000  # the same numbers count where the run knows what honest ones look like
    row = judged(unlisted, "fail", "E_REPLAY")
    assert (row["state"], row["ban_code"]) == ("banned", "E_REPLAY")
