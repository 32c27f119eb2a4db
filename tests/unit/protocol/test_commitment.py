"""The root a node commits to moves with every bit of its rollouts, and only with them."""

from dataclasses import replace

import numpy as np
import pytest

from protocol.commitment import bundle_root, rollout_leaves, rollout_root
from protocol.merkle import bind_count, check_inclusion, inclusion_proof, merkle_root
from protocol.rollout import Bundle, Finish, Segment, SwapMode
from tests.fakes.rollouts import edited, make_bundle, make_rollout, make_rules, make_seed

LEASE = "ab" * 32


def test_every_field_moves_the_root(rng):
    rollout = make_rollout(rng, make_rules(), make_seed(0), length=40, segments=(Segment(0, 3), Segment(16, 4)))
    names = ("tokens", "tail_codes", "token_codes", "head_ids", "head_codes")
    columns = {name: {35: getattr(rollout, name)[35] ^ 1} for name in names}
    changed = [edited(rollout, **{name: change}) for name, change in columns.items()]
    lengths = rollout.head_lengths
    changed += [
        edited(rollout, head_lengths={3: lengths[3] + 1, 4: lengths[4] - 1}),
        replace(rollout, sample=1),
        replace(rollout, finish=Finish.EOS),
        replace(rollout, segments=(Segment(0, 3), Segment(16, 5))),
        replace(rollout, segments=(Segment(0, 3), Segment(32, 4))),
        replace(rollout, segments=(Segment(0, 3), Segment(16, 4, SwapMode.REPREFILL))),
        replace(rollout, segments=(Segment(0, 3),)),
    ]
    roots = {rollout_root(r, b"unit") for r in [rollout, *changed]}
    assert len(roots) == 1 + len(changed)
    assert rollout_root(rollout, b"other") not in roots


def test_roots_are_bound_to_the_lease_the_sample_and_the_order(rng):
    bundle = make_bundle(rng, make_rules())
    a, b, c = bundle.rollouts
    roots = [
        bundle_root(bundle, LEASE), bundle_root(bundle, "ac" * 32), bundle_root(Bundle((b, a, c)), LEASE),
        bundle_root(Bundle((a, b)), LEASE), bundle_root(Bundle((a, b, c, c)), LEASE),
        bundle_root(Bundle((a, b, replace(c, sample=9))), LEASE),
    ]
    assert len(set(roots)) == len(roots)


def test_chunks_do_not_move_between_units(rng):
    rollout = make_rollout(rng, make_rules(), make_seed(0), length=80)
    leaves = rollout_leaves(rollout, b"unit")
    assert len(leaves) == 1 + 3
    assert len(set(leaves) | set(rollout_leaves(rollout, b"else"))) == 8


def test_equal_chunks_at_different_places_have_different_leaves():
    one = make_rollout(np.random.default_rng(0), make_rules(), make_seed(0), length=32)
    twice = replace(one, **{
        name: np.tile(getattr(one, name), 2)
        for name in ("tokens", "head_lengths", "head_ids", "head_codes", "tail_codes", "token_codes")
    })
    leaves = rollout_leaves(twice, b"unit")
    assert leaves[1] != leaves[2]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_a_single_chunk_can_be_shown(length, rng):
    rollout = make_rollout(rng, make_rules(), make_seed(0), length=length)
    leaves = rollout_leaves(rollout, b"unit")
    root = merkle_root(leaves)
    assert bind_count(root, len(leaves)) == rollout_root(rollout, b"unit")
    for index, leaf in enumerate(leaves):
        check_inclusion(leaf, index, len(leaves), inclusion_proof(leaves, index), root)
