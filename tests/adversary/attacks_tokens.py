"""Attacks on tokens and draws: T1 sees all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from protocol.messages import Lease
from protocol.rollout import NO_CODE, Bundle, Finish, rollout_seed
from tests.adversary.attack import attack, first, force, head_at, other_head_token
from tests.adversary.world import EOS, RUN_ID, World, replaced
from verifier.submission import Submission

# -- tokens -------------------------------------------------------------------------------------------------


@attack(15, "one token edited", "T1", "E_REPLAY")
def edited_token(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    rollout = bundle.rollouts[0]
    position = first(t for t in range(len(rollout) // 2, len(rollout)) if rollout.token_codes[t] == NO_CODE)
    tokens = rollout.tokens.copy()
    tokens[position] = other_head_token(bundle, 0, position)
    return world.submission(lease, replaced(bundle, 0, tokens=tokens))


@attack(15, "one answer token edited, the rest generated again", "T1", "E_REPLAY")
def edited_answer(world: World, lease: Lease) -> Submission:
    honest = world.honest(lease)
    wanted = other_head_token(honest, 0, 2)
    forced = world.generate(lease, logits_hook=force(wanted, at=2))
    position_heads = slice(int(honest.rollouts[0].head_lengths[:2].sum()), None)
    # The heads up to the edit are the honest ones; only the token differs.
    rollout = forced.rollouts[0]
    ids, codes = rollout.head_ids.copy(), rollout.head_codes.copy()
    lengths, tails = rollout.head_lengths.copy(), rollout.tail_codes.copy()
    first, size = position_heads.start, int(honest.rollouts[0].head_lengths[2])
    ids = np.concatenate([ids[:first], honest.rollouts[0].head_ids[first : first + size], ids[first + lengths[2] :]])
    codes = np.concatenate(
        [codes[:first], honest.rollouts[0].head_codes[first : first + size], codes[first + lengths[2] :]]
    )
    lengths[2], tails[2] = size, honest.rollouts[0].tail_codes[2]
    edited = replaced(forced, 0, head_ids=ids, head_codes=codes, head_lengths=lengths, tail_codes=tails)
    return world.submission(lease, edited)


@attack(22, "a seed of one's own", "T1", "E_REPLAY")
def wrong_seed(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, seeds={s: bytes([s]) * 32 for s in lease.samples}))


@attack(7, "best of n seeds", "T1", "E_REPLAY")
def best_of_n(world: World, lease: Lease) -> Submission:
    tries = [world.honest(lease)]
    for extra in range(1, 4):
        seeds = {
            s: rollout_seed(RUN_ID, lease.beacon, lease.prompt_sha256, lease.group, s + 8 * extra)
            for s in lease.samples
        }
        tries.append(world.generate(lease, seeds=seeds))
    best = [max(options, key=len) for options in zip(*(t.rollouts for t in tries[1:]), strict=True)]
    return world.submission(lease, Bundle(tuple(best)))


@attack(16, "one rollout of the group curated", "T1", "E_REPLAY")
def one_curated(world: World, lease: Lease) -> Submission:
    other = world.generate(lease, seeds={s: bytes([s]) * 32 for s in lease.samples})
    honest = world.honest(lease)
    return world.submission(lease, Bundle((*honest.rollouts[:3], other.rollouts[3])))


@attack(21, "a rollout copied under another sample index", "T1", "E_REPLAY")
def copied_content(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    copy = replace(bundle.rollouts[0], sample=bundle.rollouts[1].sample)
    return world.submission(lease, Bundle((bundle.rollouts[0], copy, *bundle.rollouts[2:])))


@attack(10, "rollouts of another group", "T1", "E_REPLAY")
def other_group(world: World, lease: Lease) -> Submission:
    other = world.lease(group=lease.group + 1, samples=lease.samples, start_version=lease.start_version)
    return world.submission(lease, world.generate(other))


@attack(12, "early end of sequence pasted in", "T1", "E_REPLAY")
def early_eos(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    rollout = bundle.rollouts[0]
    cut = first(
        t for t in range(2, len(rollout))
        if EOS in head_at(rollout, t) and rollout.token_codes[t] == NO_CODE and rollout.tokens[t] != EOS
    )
    tokens = rollout.tokens[: cut + 1].copy()
    tokens[cut] = EOS
    entries = int(rollout.head_lengths[: cut + 1].sum())
    return world.submission(lease, replaced(
        bundle, 0, tokens=tokens, head_lengths=rollout.head_lengths[: cut + 1], head_ids=rollout.head_ids[:entries],
        head_codes=rollout.head_codes[:entries], tail_codes=rollout.tail_codes[: cut + 1],
        token_codes=rollout.token_codes[: cut + 1], finish=Finish.EOS,
    ))



