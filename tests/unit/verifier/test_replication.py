"""T2': two nodes, one unit, and the first place where they differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from protocol.rollout import Bundle
from tests.adversary.world import World, identity, quantised
from verifier import session as session_module
from verifier.replication import cut, differences, first_difference
from verifier.session import Session
from verifier.structure import open_submission

OTHER = identity("another node")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), max_new_tokens=24)


@pytest.fixture(scope="module")
def ours(world):
    return world.lease()


@pytest.fixture(scope="module")
def theirs(world):
    return world.lease(node=OTHER)


def _judge(world, mine, other, **changes):
    twin = world.submission(*other, signer=OTHER)
    return world.judge(replace(world.submission(*mine, drawn=False), replica=twin, **changes))


def test_the_first_difference_is_found_also_where_one_ends_early(world, ours):
    rollout = world.honest(ours).rollouts[0]
    assert first_difference(rollout, rollout) is None
    changed = rollout.tokens.copy()
    changed[3] += 1
    assert first_difference(rollout, replace(rollout, tokens=changed)) == 3
    short = cut(rollout, 5)
    assert len(short) == 6
    assert len(short.head_ids) == int(np.sum(rollout.head_lengths[:6]))
    assert first_difference(rollout, short) == first_difference(short, rollout) == 5
    other = replace(short, sample=99)
    assert differences(world.honest(ours), Bundle((short, other))) == {rollout.sample: 5}


def test_honest_replicas_agree_and_need_no_model(world, ours, theirs):
    mine, other = world.honest(ours), world.honest(theirs)
    assert [r.tokens.tolist() for r in mine.rollouts] == [r.tokens.tolist() for r in other.rollouts]
    session = Session(world.run, world.book, world.rewards, None)
    submission = replace(
        world.submission(ours, mine, drawn=False), replica=world.submission(theirs, other, signer=OTHER)
    )
    found = session.judge([submission])[0]
    assert (found.outcome, found.diverges) == ("pass", False)
    assert next(f for f in found.findings if f.check.startswith("T2'")).got == "the same tokens"


def test_one_prefill_says_which_of_two_is_wrong(world, ours, theirs):
    cheap = world.generate(theirs, states=lambda version: quantised(world.state(version), bits=4))
    right = _judge(world, (ours, world.honest(ours)), (theirs, cheap))
    assert (right.outcome, right.diverges) == ("pass", True)
    assert right.tiers == ("T0", "T1")  # a look at single positions is no recomputation
    submission = replace(
        world.submission(theirs, cheap, signer=OTHER, drawn=False),
        replica=world.submission(ours, world.honest(ours)),
    )
    wrong = world.judge(submission)
    assert (wrong.outcome, wrong.diverges) == ("fail", False)
    assert wrong.code in ("E_TOKEN_KL", "E_HEAD_ENTRY")
    place = next(f for f in wrong.findings if not f.ok)
    twins = differences(cheap, world.honest(ours))
    assert twins[place.sample] == place.position


def test_an_unusable_replica_changes_nothing(world, ours, theirs):
    broken = world.submission(theirs, world.honest(theirs), signer=OTHER, data=b"no bundle")
    submission = replace(world.submission(ours, world.honest(ours), drawn=False), replica=broken)
    found = world.judge(submission)
    assert (found.outcome, found.diverges) == ("pass", False)


def test_a_twin_that_breaks_the_audit_is_no_verdict_and_ends_nothing(world, ours, theirs, monkeypatch):
    """One submission whose replica nobody can read: it is inconclusive, and the one beside it is judged."""
    other = world.submission(theirs, world.honest(theirs), signer=OTHER)
    mine = world.submission(ours, world.honest(ours), drawn=False)

    def broken(run, submission, book, report):
        if submission is other:
            raise MemoryError
        return open_submission(run, submission, book, report)

    monkeypatch.setattr(session_module, "open_submission", broken)
    found = Session(world.run, world.book, world.rewards, None).judge([replace(mine, replica=other), mine])
    assert [(one.outcome, one.code) for one in found] == [("inconclusive", "E_INTERNAL"), ("pass", None)]
