"""Every attack of the zoo is refused in its tier and under its code; its verdict can be signed and read."""

from __future__ import annotations

import pytest

from tests.adversary.attacks import ATTACKS
from tests.adversary.world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_is_refused_under_its_name(world, attack):
    judgement = world.judge(attack.cheat(world, world.lease(group=3)))
    assert judgement.outcome == ("fail" if attack.blames else "inconclusive")
    assert judgement.code in attack.codes
    failed = next(finding for finding in judgement.findings if not finding.ok)
    tier = "T2" if attack.tier == "T3" else attack.tier
    assert failed.check.startswith(tier if attack.blames else (tier, "A"))
    assert max(judgement.tiers, default="T0") == attack.tier or attack.tier == "T0"
    assert judgement.rewards_micro == () or attack.tier == "T3"


def test_names_are_unique():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
