"""Nodes on every stack, judged by the real pipeline: nobody is ever refused, blamed or banned."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adversary import report
from tests.adversary.honest_zoo import ALL_DRAWN, BF16_NAME, Recorder, run_stack, smollm2_zoo
from tests.adversary.pipeline import Pipeline
from tests.adversary.stacks import BF16, FP32
from tests.adversary.world import World


@pytest.mark.parametrize("stack", [FP32[0], FP32[5], FP32[6], BF16[0]], ids=lambda stack: stack.name)
def test_a_stack_is_not_punished(tmp_path, stack):
    """bf16 is not listed by this run: all of it is audited, and what is outside the limits is inconclusive."""
    pipeline = Pipeline(World(tmp_path, versions=2, batch={"groups_per_batch": 100}, audit=ALL_DRAWN))
    result = run_stack(pipeline, Recorder(pipeline), stack, 8)
    pipeline.close()
    assert not result.banned
    assert set(result.outcomes) <= ({"pass", "E_UNCALIBRATED"} if stack.profile == BF16_NAME else {"pass"})
    assert len(result.mean_kl) == result.rollouts >= 8


def check(results: list[dict[str, Any]], *, listed: bool, alarm_milli: int = 20_724) -> int:
    """No ban, no failure; how many rollouts."""
    for row in results:
        allowed = {"pass"} if listed or row["profile"] != BF16_NAME else {"pass", "E_UNCALIBRATED"}
        assert set(row["outcomes"]) <= allowed, row
        assert not row["banned"], row
        assert row["suspicion_milli"] < alarm_milli, row
    return sum(row["rollouts"] for row in results)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_three_thousand_rollouts_of_the_tiny_model(tmp_path):
    found = report.tiny(tmp_path, report.TINY)
    check(found["unlisted"], listed=False)
    check(found["calibrating"], listed=True)
    assert check(found["calibrated"], listed=True, alarm_milli=found["alarm_milli"]) >= 3_000


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_three_hundred_rollouts_of_smollm2(tmp_path):
    pytest.importorskip("gguf")
    assert check(smollm2_zoo(tmp_path)["unlisted"], listed=False) >= 300
