"""T1': a node whose rollouts fit the learner worse than everybody else's at the same lag stands out, others do not."""

from __future__ import annotations

import numpy as np
import pytest

from learner.screen import OUTLIER_Z, NodeReport, RolloutNumbers, screen, screen_message
from protocol.store import DirectoryStore
from tests.fakes.learning import RUN_ID, admitted_group

A, B, C, D = (f"{i:064x}" for i in range(4))


def rollouts(node: str, count: int, scale: float, *, lag: int = 1, seed: int = 0) -> list[RolloutNumbers]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(20, 200, count)
    levels = scale * np.exp(0.3 * rng.standard_normal(count))
    return [
        RolloutNumbers(node, group=i, sample=0, lag=lag, tokens=int(n), k1_sum=float(n * x), k3_sum=float(n * x))
        for i, (n, x) in enumerate(zip(tokens, levels, strict=True))
    ]


def scores(found: list[NodeReport]) -> dict[str, float]:
    return {report.node_id: report.z for report in found}


def test_a_cheat_stands_out_and_the_honest_do_not():
    honest = rollouts(A, 30, 1e-3) + rollouts(B, 30, 1e-3, seed=1) + rollouts(C, 30, 1e-3, seed=2)
    found = scores(screen(honest + rollouts(D, 30, 5e-3, seed=3)))
    assert found[D] >= OUTLIER_Z
    assert max(found[node] for node in (A, B, C)) < OUTLIER_Z


def test_honest_nodes_hardly_ever_stand_out():
    worst = []
    for seed in range(200):
        nodes = [r for i, node in enumerate((A, B, C)) for r in rollouts(node, 8, 1e-3, seed=10 * seed + i)]
        worst.append(max(scores(screen(nodes)).values()))
    assert np.mean(np.array(worst) >= OUTLIER_Z) <= 0.02


def test_staleness_is_not_held_against_a_node():
    """Old rollouts differ more, for everybody: only rollouts of one lag are compared."""
    fresh = rollouts(A, 20, 1e-4, lag=0) + rollouts(B, 20, 1e-4, lag=0, seed=1)
    stale = rollouts(C, 20, 1e-1, lag=8, seed=2) + rollouts(D, 20, 1e-1, lag=8, seed=3)
    assert max(scores(screen(fresh + stale)).values()) < OUTLIER_Z


def test_one_bad_rollout_is_named_though_its_node_is_not_an_outlier():
    own = rollouts(A, 20, 1e-3)
    bad = RolloutNumbers(A, group=77, sample=3, lag=1, tokens=50, k1_sum=50.0, k3_sum=50.0)
    reports = {r.node_id: r for r in screen([*own, bad, *rollouts(B, 40, 1e-3, seed=5)])}
    assert reports[A].worst == ((77, 3),)
    assert reports[A].outlier_tokens == 50
    assert not reports[A].is_outlier


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stand_out(value):
    bad = [RolloutNumbers(A, i, 0, 1, 10, value, value) for i in range(5)]
    assert {r.node_id: r for r in screen(bad + rollouts(B, 20, 1e-3))}[A].is_outlier


def test_too_little_says_nothing():
    assert scores(screen(rollouts(A, 3, 1.0) + rollouts(B, 40, 1e-3))) == {A: 0.0, B: pytest.approx(0.0, abs=4)}
    assert scores(screen(rollouts(A, 40, 1.0))) == {A: 0.0}
    assert screen([]) == []
    assert screen([RolloutNumbers(A, 0, 0, 0, 0, 0.0, 0.0)]) == []


def test_the_message_names_the_receipts(speaker, tmp_path):
    group = admitted_group(speaker.group(77), DirectoryStore(tmp_path))
    report = NodeReport(A, 5, 100, 0.1, 0.2, 4.5678, outlier_tokens=50, worst=((77, 3), (77, 2), (77, 0)))
    message = screen_message(RUN_ID, 4, {A: report.as_dict()}, [group], 17)
    (node,) = message.nodes
    assert (message.version, message.issued_at_ms) == (4, 17)
    assert (node.node_id, node.tokens, node.outliers, node.score_milli) == (A, 100, 50, 4568)
    assert node.receipts == [group.samples[3].receipt_sha256, group.samples[0].receipt_sha256]
