"""T1': a node whose rollouts fit the learner worse than everybody else's at the same lag stands out, others do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.screen import OUTLIER_Z, NodeReport, RolloutNumbers, screen, screen_message
from protocol.store import DirectoryStore
from tests.fakes.learning import RUN_ID, admitted_group

A, B, C, D = (f"{i:064x}" for i in range(4))


STEPS = 256
#: What rounding codes to whole steps does to an honest head at most, and to the drawn token, nats per token.
MOST_KL, MOST_K3 = 1 / (8 * STEPS**2), 1 / (2 * STEPS**2)


def rollouts(
    node: str, count: int, scale: float, *, lag: int = 1, seed: int = 0, k3: float | None = None, limit: float = 0.0,
) -> list[RolloutNumbers]:
    """Rollouts of one prompt each, whose heads diverge by about ``scale`` nats per token; k3 alike unless given."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(20, 200, count)
    spread = np.exp(0.3 * rng.standard_normal(count))
    return [
        RolloutNumbers(
            node, group=i, sample=0, lag=lag, tokens=int(n), k1_sum=float(n * scale * x),
            k3_sum=float(n * x * (scale if k3 is None else k3)), kl_sum=float(n * scale * x), kl_limit=limit,
        )
        for i, (n, x) in enumerate(zip(tokens, spread, strict=True))
    ]


def rounded(node: str, count: int, *, seed: int = 0, limit: float = 2e-6) -> list[RolloutNumbers]:
    """Fresh honest rollouts: codes to the nearest step and nothing else, from a third of the most it can do upwards."""
    rng = np.random.default_rng(seed)
    shares = rng.uniform(1 / 3, 1, (count, 2))
    return [
        RolloutNumbers(node, i, 0, 0, 32, 0.0, 32 * MOST_K3 * float(b), 32 * MOST_KL * float(a), limit)
        for i, (a, b) in enumerate(shares)
    ]


def found_in(seen: list[RolloutNumbers], **options: bool) -> dict[str, NodeReport]:
    return {report.node_id: report for report in screen(seen, STEPS, **options)}


def scores(found: list[NodeReport]) -> dict[str, float]:
    return {report.node_id: report.z for report in found}


def test_a_cheat_stands_out_and_the_honest_do_not():
    honest = rollouts(A, 30, 1e-3) + rollouts(B, 30, 1e-3, seed=1) + rollouts(C, 30, 1e-3, seed=2)
    found = scores(screen(honest + rollouts(D, 30, 5e-3, seed=3), STEPS))
    assert found[D] >= OUTLIER_Z
    assert max(found[node] for node in (A, B, C)) < OUTLIER_Z


def test_honest_nodes_hardly_ever_stand_out():
    worst = []
    for seed in range(200):
        nodes = [r for i, node in enumerate((A, B, C)) for r in rollouts(node, 8, 1e-3, seed=10 * seed + i)]
        worst.append(max(scores(screen(nodes, STEPS)).values()))
    assert np.mean(np.array(worst) >= OUTLIER_Z) <= 0.02


def test_staleness_is_not_held_against_a_node():
    """Old rollouts differ more, for everybody: only rollouts of one lag are compared."""
    fresh = rollouts(A, 20, 1e-4, lag=0) + rollouts(B, 20, 1e-4, lag=0, seed=1)
    stale = rollouts(C, 20, 1e-1, lag=8, seed=2) + rollouts(D, 20, 1e-1, lag=8, seed=3)
    assert max(scores(screen(fresh + stale, STEPS, exact=False)).values()) < OUTLIER_Z


def test_one_bad_rollout_is_named_though_its_node_is_not_an_outlier():
    own = rollouts(A, 20, 1e-3)
    bad = RolloutNumbers(A, group=77, sample=3, lag=1, tokens=50, k1_sum=50.0, k3_sum=50.0, kl_sum=50.0)
    reports = found_in([*own, bad, *rollouts(B, 40, 1e-3, seed=5)])
    assert reports[A].worst == ((77, 3),)
    assert reports[A].outlier_tokens == 50
    assert not reports[A].is_outlier


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stand_out(value, lag):
    bad = [RolloutNumbers(A, i, 0, lag, 10, value, value, value) for i in range(5)]
    assert found_in(bad + rollouts(B, 20, 1e-3))[A].is_outlier


def test_too_little_says_nothing():
    assert scores(screen(rollouts(A, 3, 1.0) + rollouts(B, 40, 1e-3), STEPS)) == {A: 0.0, B: pytest.approx(0.0, abs=4)}
    assert scores(screen(rollouts(A, 40, 1.0), STEPS)) == {A: 0.0}
    assert screen([], STEPS) == []
    assert screen([RolloutNumbers(A, 0, 0, 0, 0, 0.0, 0.0, 0.0)], STEPS) == []


# -- cheats that know the screen ----------------------------------------------------------------------------


def made_up(node: str, count: int, *, seed: int = 0, lag: int = 0, limit: float = 2e-6) -> list[RolloutNumbers]:
    """The drawn token has its probability to a hundredth of a step; the rest of its head is there to lose."""
    return rollouts(node, count, 0.3, lag=lag, seed=seed, k3=1.5e-9, limit=limit)


def test_a_head_made_up_around_its_token_stands_out_and_makes_nobody_else_stand_out():
    """Its k3 is below what rounding does to the honest, who must not look bad beside it."""
    found = found_in(rounded(A, 24) + rounded(B, 24, seed=1) + made_up(C, 24))
    assert (found[A].z, found[B].z) == (0.0, 0.0)
    assert found[C].is_outlier
    assert len(found[C].worst) == 24
    assert found[C].k3_mean < 1e-8 < 0.1 < found[C].kl_mean


def test_fresh_rollouts_need_nobody_to_compare_with():
    assert found_in(made_up(A, 1))[A].is_outlier
    majority = found_in(made_up(A, 24) + made_up(B, 24, seed=1) + rounded(C, 8))
    assert [majority[node].is_outlier for node in (A, B, C)] == [True, True, False]


def test_one_made_up_rollout_among_many_honest_ones_is_enough_where_it_is_fresh():
    (bad,) = made_up(A, 1)
    report = found_in([*rounded(A, 99), replace(bad, group=500)])[A]
    assert report.is_outlier
    assert report.worst == ((500, 0),)


def test_a_stale_made_up_head_stands_out_among_stale_ones():
    honest = rollouts(A, 20, 1e-4) + rollouts(B, 20, 1e-4, seed=1)
    found = found_in(honest + made_up(C, 20, lag=1))
    assert [found[node].is_outlier for node in (A, B, C)] == [False, False, True]


def test_a_node_better_than_honest_makes_nobody_stand_out():
    """Everything down to the floor is as good as nothing."""
    found = found_in(rollouts(A, 24, 1e-12, lag=2) + rollouts(B, 24, MOST_KL / 2, lag=2, k3=MOST_K3 / 2, seed=1))
    assert [report.z for report in found.values()] == [0.0, 0.0]


def test_a_noisy_profile_is_held_to_its_own_limit():
    noisy = rollouts(A, 20, 1e-3, lag=0, limit=2e-3)
    exact = rounded(B, 20) + rounded(C, 20, seed=1)
    cheat = rollouts(D, 20, 1e-3, lag=0, seed=2, limit=2e-6)  # as noisy, without the name
    found = found_in(noisy + exact + cheat)
    assert [found[node].is_outlier for node in (A, B, C, D)] == [False, False, False, True]
    stale = found_in([replace(r, lag=1) for r in noisy + exact])
    assert stale[A].z == 0.0


def test_a_learner_in_bf16_holds_its_own_noise_against_nobody():
    nodes = [rollouts(node, 20, 1e-3, lag=0, seed=i, limit=2e-6) for i, node in enumerate((A, B, C))]
    found = found_in([r for own in nodes for r in own], exact=False)
    assert max(report.z for report in found.values()) < OUTLIER_Z
    assert found_in(sum(nodes[:2], rollouts(C, 20, 2e-2, lag=0, seed=7)), exact=False)[C].is_outlier


def test_rollouts_of_one_prompt_are_one_witness():
    """Eight samples of an odd prompt say no more about a node than one does."""
    usual = rollouts(A, 30, 1e-4) + rollouts(B, 30, 1e-4, seed=1)
    odd = [replace(r, group=7, sample=i) for i, r in enumerate(rollouts(C, 8, 2.5e-4, seed=2))]
    apart = [replace(r, group=i) for i, r in enumerate(odd)]
    assert not found_in(usual + odd)[C].is_outlier
    assert found_in(usual + odd)[C].z < found_in(usual + apart)[C].z / 2


def test_the_message_names_the_receipts(speaker, tmp_path):
    group = admitted_group(speaker.group(77), DirectoryStore(tmp_path))
    report = NodeReport(A, 5, 100, 0.1, 0.2, 4.5678, outlier_tokens=50, worst=((77, 3), (77, 2), (77, 0)))
    message = screen_message(RUN_ID, 4, {A: report.as_dict()}, [group], 17)
    (node,) = message.nodes
    assert (message.version, message.issued_at_ms) == (4, 17)
    assert (node.node_id, node.tokens, node.outliers, node.score_milli) == (A, 100, 50, 4568)
    assert node.receipts == [group.samples[3].receipt_sha256, group.samples[0].receipt_sha256]
