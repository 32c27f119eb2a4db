"""Rollouts: which version each token came from."""

from dataclasses import replace

from protocol.rollout import Segment, SwapMode
from tests.fakes.rollouts import make_rollout, make_rules, make_seed


def test_versions_follow_the_segments(rng):
    rollout = make_rollout(rng, make_rules(), make_seed(0), length=5)
    assert len(rollout) == 5
    assert rollout.versions().tolist() == [3] * 5
    swapped = replace(rollout, segments=(Segment(0, 3), Segment(2, 4), Segment(4, 9, SwapMode.REPREFILL)))
    assert swapped.versions().tolist() == [3, 3, 4, 4, 9]
