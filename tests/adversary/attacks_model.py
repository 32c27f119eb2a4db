"""Attacks on the model: what only a recomputation sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from protocol.messages import Lease
from protocol.rollout import NO_CODE, Bundle, Segment, SwapMode
from tests.adversary.attack import NoOpportunity, attack, claiming, first, force, head_at, other_head_token
from tests.adversary.world import EOS, World, quantised, replaced
from verifier.submission import Submission

# -- the model ----------------------------------------------------------------------------------------------

_MODEL = ("E_HEAD_KL", "E_TOKEN_KL", "E_HEAD_ENTRY", "E_HEAD_MEMBERSHIP")


@attack(4, "int8 weights", "T3", *_MODEL)
def int8(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, states=lambda v: quantised(world.state(v))))


@attack(4, "int4 weights", "T3", *_MODEL)
def int4(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, states=lambda v: quantised(world.state(v), 4)))


@attack(5, "stale checkpoint", "T3", *_MODEL)
def stale(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, states=lambda v: world.state(v - 1)))


@attack(6, "other temperature", "T3", *_MODEL)
def temperature(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, logits_hook=lambda logits, _: logits / 0.99))


@attack(13, "end of sequence suppressed", "T3", *_MODEL)
def suppressed_eos(world: World, lease: Lease) -> Submission:
    def hook(logits_BV: torch.Tensor, _: int) -> torch.Tensor:
        logits_BV = logits_BV.clone()
        logits_BV[:, EOS] = -30.0
        return logits_BV

    return world.submission(lease, world.generate(lease, logits_hook=hook))


@attack(12, "end of sequence made to win", "T3", *_MODEL)
def forced_eos(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, logits_hook=force(EOS, at=4)))


@attack(20, "a head nudged until the wanted token wins", "T3", "E_TOKEN_KL", *_MODEL)
def nudged(world: World, lease: Lease) -> Submission:
    honest = world.honest(lease)
    wanted = other_head_token(honest, 0, 3)

    def hook(boost: float):
        def nudge(logits_BV: torch.Tensor, position: int) -> torch.Tensor:
            if position == 3:
                logits_BV = logits_BV.clone()
                logits_BV[0, wanted] += boost
            return logits_BV

        return nudge

    for step in range(1, 200):
        short = world.generate(lease, logits_hook=hook(0.1 * step), max_new_tokens=4)
        if len(short.rollouts[0]) == 4 and int(short.rollouts[0].tokens[3]) == wanted:
            return world.submission(lease, world.generate(lease, logits_hook=hook(0.1 * step)))
    raise NoOpportunity


@attack(11, "hidden system prompt", "T3", *_MODEL)
def hidden_prompt(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, prompt=[20, 21, *lease.prompt_tokens]))


@attack(31, "a swap claimed that did not happen", "T3", *_MODEL, later=1)
def false_swap(world: World, lease: Lease) -> Submission:
    claimed = [Segment(0, lease.start_version), Segment(8, lease.start_version + 1)]
    return world.submission(lease, claiming(world.honest(lease), claimed))


@attack(31, "a swap hidden", "T3", *_MODEL, later=1)
def hidden_swap(world: World, lease: Lease) -> Submission:
    used = [Segment(0, lease.start_version), Segment(8, lease.start_version + 1)]
    return world.submission(
        lease, claiming(world.generate(lease, segments=used), [Segment(0, lease.start_version)])
    )


@attack(31, "cache kept where a fresh prefill is claimed", "T3", *_MODEL, later=2)
def false_mode(world: World, lease: Lease) -> Submission:
    used = [Segment(0, lease.start_version), Segment(24, lease.start_version + 2)]
    claimed = [used[0], replace(used[1], mode=SwapMode.REPREFILL)]
    return world.submission(lease, claiming(world.generate(lease, segments=used), claimed))


def _tail_positions(bundle: Bundle) -> list[tuple[int, int]]:
    return [
        (index, int(t)) for index, rollout in enumerate(bundle.rollouts)
        for t in np.flatnonzero(rollout.token_codes != NO_CODE)
    ]


@attack(20, "another token of the tail", "T3", "E_TAIL_DRAW", *_MODEL)
def wrong_tail_token(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    index, position = first(sorted(
        ((i, t) for i, t in _tail_positions(bundle) if bundle.rollouts[i].tokens[t] != EOS), key=lambda pair: -pair[1]
    ))
    rollout = bundle.rollouts[index]
    inside = {*head_at(rollout, position), EOS, int(rollout.tokens[position])}
    tokens, codes = rollout.tokens.copy(), rollout.token_codes.copy()
    tokens[position] = first(i for i in range(63, 0, -1) if i not in inside)
    return world.submission(lease, replaced(bundle, index, tokens=tokens, token_codes=codes))


@attack(19, "a false probability for a tail token", "T3", "E_TAIL_TOKEN")
def wrong_tail_code(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    index, position = first(_tail_positions(bundle))
    codes = bundle.rollouts[index].token_codes.copy()
    codes[position] += 400
    return world.submission(lease, replaced(bundle, index, token_codes=codes))



