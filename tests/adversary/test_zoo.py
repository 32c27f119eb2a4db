"""Every row of the attack zoo has fixtures, and each of them ends as it must, in the real pipeline."""

from __future__ import annotations

import json

import pytest

from tests.adversary import report
from tests.adversary.bench import Bench
from tests.adversary.fixtures import FIXTURES
from tests.adversary.fixtures_steering import work
from tests.adversary.registry import ROWS, Fixture, attempt, power_of

#: Fixtures that need a calibration or many bundles: left to the slow tests.
LONG = frozenset({
    "int8 weights from a node that is audited at 5 %", "bf16 log-probabilities off by .04 nats, inside every limit",
    "int8 weights under the name of bf16", "int4 weights under the name of bf16",
    "choosing the swap point that earns most", "choosing the swap point that makes most tokens",
    "int8 weights at both nodes, audited at 5 %",
    "int8 weights under the name of bf16, one short bundle",
})
CAUGHT = [fixture for fixture in FIXTURES if fixture.kind == "caught"]
LIMITS = [fixture for fixture in FIXTURES if fixture.kind == "limit"]
#: One per row.
QUICK = list({fixture.row: fixture for fixture in reversed(CAUGHT) if fixture.name not in LONG}.values())
#: Trials of each; of those that take minutes, because peers must be compared for long, fewer.
TRIALS, FEW_TRIALS = 5, 2
COMPARED = frozenset({"choosing the swap point that earns most", "choosing the swap point that makes most tokens"})


def name_of(fixture: Fixture) -> str:
    return f"{fixture.row} {fixture.name}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.close()


def test_every_row_has_a_fixture():
    assert list(ROWS) == list(range(1, 35))
    assert {fixture.row for fixture in CAUGHT} == set(ROWS)
    names = [fixture.name for fixture in FIXTURES]
    assert sorted(set(names)) == sorted(names)
    assert set(names) >= LONG


def test_the_page_holds_what_the_registry_holds():
    numbers = json.loads(report.NUMBERS.read_text(encoding="utf-8"))
    measured = [(f["row"], f["name"], f["kind"], f["limit"]) for f in numbers["attacks"]["fixtures"]]
    assert measured == [(f.row, f.name, f.kind, f.limit) for f in FIXTURES]
    page = report.PAGE.read_text(encoding="utf-8")
    assert page == report.render(numbers)
    rows = {int(line.split("|")[1]) for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()}
    assert rows == set(ROWS)
    for fixture in numbers["attacks"]["fixtures"]:
        assert fixture["alarms"] == 0
        assert fixture["caught"] == (fixture["trials"] if fixture["kind"] == "caught" else 0)


@pytest.mark.parametrize("fixture", QUICK, ids=name_of)
def test_one_attack_of_each_row_is_caught(bench, fixture):
    catch = fixture.trial(bench, 0)
    assert fixture.holds(catch), catch
    assert catch.alarms == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fixture", CAUGHT, ids=name_of)
def test_every_attack_is_caught_every_time(bench, fixture):
    trials = FEW_TRIALS if fixture.name in COMPARED else TRIALS
    power = power_of([attempt(fixture, bench, seed) for seed in range(trials)])
    assert power.caught == power.trials
    assert power.alarms == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_honest_nodes_that_share_groups_are_not_pinned(bench):
    """As long as a steerer of the same setting gets away with it at most, and swapping all the time."""
    pipeline = bench.pipeline("steered", 1)
    nodes = [pipeline.node(f"honest, sharing {i}") for i in range(2)]
    for turn in range(70):
        work(pipeline, *nodes[:: 1 if turn % 2 else -1])
    rows = [node.row for node in nodes]
    assert all(row["accepted"] > 150 for row in rows)
    assert [row["pinned_ms"] for row in rows] == [None, None], rows


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="documented in SECURITY.md and docs/attack-zoo.md")
@pytest.mark.parametrize("fixture", [
    pytest.param(fixture, marks=[pytest.mark.slow, pytest.mark.timeout(3600)] if fixture.name in LONG else [])
    for fixture in LIMITS
], ids=name_of)
def test_what_is_not_seen_would_be_caught(bench, fixture):
    assert fixture.trial(bench, 0).caught
