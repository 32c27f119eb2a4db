"""The attack zoo as data: how a node cheats, and in which tier and under which codes it must be found.

Each attack starts from an honest world and returns the submission that the cheat hands in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from protocol import bundle as bundles
from protocol.messages import Lease
from protocol.rollout import NO_CODE, Bundle, Finish, Segment, SwapMode, rollout_seed
from tests.adversary.world import EOS, RUN_ID, World, identity, quantised, replaced
from verifier.submission import Submission

Cheat = Callable[[World, Lease], Submission]


@dataclass(frozen=True)
class Attack:
    """``tier``: the last tier that runs. ``codes``: any of these names it; the first is the usual one."""

    name: str
    tier: str
    codes: tuple[str, ...]
    cheat: Cheat


_ATTACKS: list[Attack] = []


def attack(name: str, tier: str, *codes: str) -> Callable[[Cheat], Cheat]:
    def register(cheat: Cheat) -> Cheat:
        _ATTACKS.append(Attack(name, tier, codes, cheat))
        return cheat

    return register


# -- tokens -------------------------------------------------------------------------------------------------


def _other_head_token(bundle: Bundle, index: int, position: int) -> int:
    """A token of the head at ``position`` that was not drawn and does not end the completion."""
    rollout = bundle.rollouts[index]
    return next(i for i in _head(rollout, position) if i not in (EOS, int(rollout.tokens[position])))


@attack("one token edited", "T1", "E_REPLAY")
def edited_token(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    rollout = bundle.rollouts[0]
    position = next(t for t in range(len(rollout) // 2, len(rollout)) if rollout.token_codes[t] == NO_CODE)
    tokens = rollout.tokens.copy()
    tokens[position] = _other_head_token(bundle, 0, position)
    return world.submission(lease, replaced(bundle, 0, tokens=tokens))


@attack("one answer token edited, the rest generated again", "T1", "E_REPLAY")
def edited_answer(world: World, lease: Lease) -> Submission:
    honest = world.honest(lease)
    wanted = _other_head_token(honest, 0, 2)
    forced = world.generate(lease, logits_hook=_force(wanted, at=2))
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


def _force(token: int, at: int):
    def hook(logits_BV: torch.Tensor, position: int) -> torch.Tensor:
        if position == at:
            logits_BV = logits_BV.clone()
            logits_BV[:, token] += 50.0
        return logits_BV

    return hook


@attack("a seed of one's own", "T1", "E_REPLAY")
def wrong_seed(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, seeds={s: bytes([s]) * 32 for s in lease.samples}))


@attack("best of n seeds", "T1", "E_REPLAY")
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


@attack("one rollout of the group curated", "T1", "E_REPLAY")
def one_curated(world: World, lease: Lease) -> Submission:
    other = world.generate(lease, seeds={s: bytes([s]) * 32 for s in lease.samples})
    honest = world.honest(lease)
    return world.submission(lease, Bundle((*honest.rollouts[:3], other.rollouts[3])))


@attack("a rollout copied under another sample index", "T1", "E_REPLAY")
def copied_content(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    copy = replace(bundle.rollouts[0], sample=bundle.rollouts[1].sample)
    return world.submission(lease, Bundle((bundle.rollouts[0], copy, *bundle.rollouts[2:])))


@attack("rollouts of another group", "T1", "E_REPLAY")
def other_group(world: World, lease: Lease) -> Submission:
    other = world.lease(group=lease.group + 1, samples=lease.samples, start_version=lease.start_version)
    return world.submission(lease, world.generate(other))


@attack("early end of sequence pasted in", "T1", "E_REPLAY")
def early_eos(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    rollout = bundle.rollouts[0]
    cut = next(
        t for t in range(2, len(rollout))
        if EOS in _head(rollout, t) and rollout.token_codes[t] == NO_CODE and rollout.tokens[t] != EOS
    )
    tokens = rollout.tokens[: cut + 1].copy()
    tokens[cut] = EOS
    entries = int(rollout.head_lengths[: cut + 1].sum())
    return world.submission(lease, replaced(
        bundle, 0, tokens=tokens, head_lengths=rollout.head_lengths[: cut + 1], head_ids=rollout.head_ids[:entries],
        head_codes=rollout.head_codes[:entries], tail_codes=rollout.tail_codes[: cut + 1],
        token_codes=rollout.token_codes[: cut + 1], finish=Finish.EOS,
    ))


def _head(rollout, position: int) -> list[int]:
    start = int(rollout.head_lengths[:position].sum())
    return rollout.head_ids[start : start + int(rollout.head_lengths[position])].tolist()


# -- structure ----------------------------------------------------------------------------------------------


@attack("tokens after the end of sequence", "T0", "E_EOS_GRAMMAR")
def after_eos(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    rollout = bundle.rollouts[0]
    position = next(
        t for t in range(len(rollout) - 1) if EOS in _head(rollout, t) and rollout.token_codes[t] == NO_CODE
    )
    tokens = rollout.tokens.copy()
    tokens[position] = EOS
    return world.submission(lease, replaced(bundle, 0, tokens=tokens))


@attack("stops early without an end of sequence", "T0", "E_EOS_GRAMMAR")
def cut_short(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    rollout, cut = bundle.rollouts[0], 5
    entries = int(rollout.head_lengths[:cut].sum())
    return world.submission(lease, replaced(
        bundle, 0, tokens=rollout.tokens[:cut], head_lengths=rollout.head_lengths[:cut],
        head_ids=rollout.head_ids[:entries], head_codes=rollout.head_codes[:entries],
        tail_codes=rollout.tail_codes[:cut], token_codes=rollout.token_codes[:cut], finish=Finish.LENGTH,
    ))


@attack("head codes that do not add up", "T0", "E_HEAD_NOT_NORMALISED")
def unnormalised(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    codes = bundle.rollouts[0].head_codes.copy()
    codes[: bundle.rollouts[0].head_lengths[0]] //= 2
    return world.submission(lease, replaced(bundle, 0, head_codes=codes))


@attack("a sample handed in twice", "T0", "E_SAMPLE_SET")
def duplicated(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    return world.submission(lease, Bundle((bundle.rollouts[0], bundle.rollouts[0], *bundle.rollouts[2:])))


@attack("a losing sample left out", "T0", "E_SAMPLE_SET")
def dropped_sample(world: World, lease: Lease) -> Submission:
    return world.submission(lease, Bundle(world.honest(lease).rollouts[:3]))


@attack("tokens counted twice", "T0", "E_COUNTS")
def inflated_count(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    return world.submission(lease, bundle, tokens=2 * sum(map(len, bundle.rollouts)))


@attack("checked bundle is not the committed one", "T0", "E_BUNDLE_ROOT")
def split_view(world: World, lease: Lease) -> Submission:
    honest = world.honest(lease)
    other = world.generate(lease, seeds={s: bytes([s]) * 32 for s in lease.samples})
    root = bundles.bundle_root(other, lease.sign(identity("coordinator")).digest)
    return world.submission(lease, honest, bundle_root=root)


@attack("signed by another key", "T0", "E_WRONG_KEY")
def wrong_key(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.honest(lease), signer=identity("somebody"))


@attack("signature by another key under the node's name", "T0", "E_SIGNATURE")
def forged_signature(world: World, lease: Lease) -> Submission:
    made = world.submission(lease, world.honest(lease), signer=identity("somebody"))
    return replace(made, node_public_key=identity("node").public_key)


@attack("commitment of another run", "T0", "E_WRONG_RUN")
def wrong_run(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.honest(lease), run_id="cd" * 16)


@attack("commitment for another lease", "T0", "E_OTHER_LEASE")
def other_lease(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.honest(lease), lease_sha256="ef" * 32)


@attack("a profile that the run does not know", "T0", "E_UNKNOWN_PROFILE")
def unknown_profile(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.honest(lease), profile="anything-goes")


@attack("begins with a newer version than the lease says", "T0", "E_SEGMENT_VERSION")
def wrong_start_version(world: World, lease: Lease) -> Submission:
    segments = [Segment(0, lease.start_version + 1)]
    return world.submission(lease, world.generate(lease, segments=segments))


@attack("a version that was never published", "T0", "E_SEGMENT_VERSION")
def unpublished_version(world: World, lease: Lease) -> Submission:
    claimed = [Segment(0, lease.start_version), Segment(8, 99)]
    return world.submission(lease, _claiming(world.honest(lease), claimed))


@attack("a swap off the grid", "T0", "E_SEGMENTS")
def off_grid(world: World, lease: Lease) -> Submission:
    claimed = [Segment(0, lease.start_version), Segment(9, lease.start_version + 1)]
    return world.submission(lease, _claiming(world.honest(lease), claimed))


@attack("segments that go back to an older version", "T0", "E_SEGMENTS")
def descending_versions(world: World, lease: Lease) -> Submission:
    claimed = [Segment(0, lease.start_version), Segment(8, lease.start_version - 1)]
    return world.submission(lease, _claiming(world.honest(lease), claimed))


def _claiming(bundle: Bundle, segments: list[Segment]) -> Bundle:
    """The bundle with other segments claimed than were used."""
    return Bundle(tuple(
        replace(rollout, segments=tuple(s for s in segments if s.start < len(rollout))) for rollout in bundle.rollouts
    ))


@attack("truncated bundle", "T0", "E_BUNDLE_PACKED", "E_BUNDLE_COLUMNS")
def truncated(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    return world.submission(lease, bundle, data=bundles.encode(bundle)[:-20])


@attack("truncated simple bundle", "T0", "E_BUNDLE_FRAME", "E_TOO_LARGE")
def truncated_simple(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    return world.submission(lease, bundle, data=bundles.encode_simple(bundle)[:-20])


@attack("decompression bomb", "T0", "E_TOO_LARGE")
def bomb(world: World, lease: Lease) -> Submission:
    import zstandard

    data = zstandard.ZstdCompressor().compress(bytes(200 * 2**20))
    return world.submission(lease, world.honest(lease), data=data)


@attack("bytes that are no bundle", "T0", "E_BUNDLE_FRAME", "E_TOO_LARGE")
def garbage(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.honest(lease), data=b"not a bundle")


# -- the model ----------------------------------------------------------------------------------------------

_MODEL = ("E_HEAD_KL", "E_TOKEN_KL", "E_HEAD_ENTRY", "E_HEAD_MEMBERSHIP")


@attack("int8 weights", "T3", *_MODEL)
def int8(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, states=lambda v: quantised(world.state(v))))


@attack("int4 weights", "T3", *_MODEL)
def int4(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, states=lambda v: quantised(world.state(v), 4)))


@attack("stale checkpoint", "T3", *_MODEL)
def stale(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, states=lambda v: world.state(v - 1)))


@attack("other temperature", "T3", *_MODEL)
def temperature(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, logits_hook=lambda logits, _: logits / 0.99))


@attack("end of sequence suppressed", "T3", *_MODEL)
def suppressed_eos(world: World, lease: Lease) -> Submission:
    def hook(logits_BV: torch.Tensor, _: int) -> torch.Tensor:
        logits_BV = logits_BV.clone()
        logits_BV[:, EOS] = -30.0
        return logits_BV

    return world.submission(lease, world.generate(lease, logits_hook=hook))


@attack("end of sequence made to win", "T3", *_MODEL)
def forced_eos(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, logits_hook=_force(EOS, at=4)))


@attack("a head nudged until the wanted token wins", "T3", "E_TOKEN_KL", *_MODEL)
def nudged(world: World, lease: Lease) -> Submission:
    honest = world.honest(lease)
    wanted = _other_head_token(honest, 0, 3)

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
    raise AssertionError("no nudge was enough")


@attack("hidden system prompt", "T3", *_MODEL)
def hidden_prompt(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.generate(lease, prompt=[20, 21, *lease.prompt_tokens]))


@attack("a swap claimed that did not happen", "T3", *_MODEL)
def false_swap(world: World, lease: Lease) -> Submission:
    claimed = [Segment(0, lease.start_version), Segment(8, lease.start_version + 1)]
    return world.submission(lease, _claiming(world.honest(lease), claimed))


@attack("a swap hidden", "T3", *_MODEL)
def hidden_swap(world: World, lease: Lease) -> Submission:
    used = [Segment(0, lease.start_version), Segment(8, lease.start_version + 1)]
    return world.submission(
        lease, _claiming(world.generate(lease, segments=used), [Segment(0, lease.start_version)])
    )


@attack("cache kept where a fresh prefill is claimed", "T3", *_MODEL)
def false_mode(world: World, lease: Lease) -> Submission:
    used = [Segment(0, lease.start_version), Segment(24, lease.start_version + 2)]
    claimed = [used[0], replace(used[1], mode=SwapMode.REPREFILL)]
    return world.submission(lease, _claiming(world.generate(lease, segments=used), claimed))


def _tail_positions(bundle: Bundle) -> list[tuple[int, int]]:
    return [
        (index, int(t)) for index, rollout in enumerate(bundle.rollouts)
        for t in np.flatnonzero(rollout.token_codes != NO_CODE)
    ]


@attack("another token of the tail", "T3", "E_TAIL_DRAW", *_MODEL)
def wrong_tail_token(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    index, position = max(
        ((i, t) for i, t in _tail_positions(bundle) if bundle.rollouts[i].tokens[t] != EOS), key=lambda pair: pair[1]
    )
    rollout = bundle.rollouts[index]
    inside = {*_head(rollout, position), EOS, int(rollout.tokens[position])}
    tokens, codes = rollout.tokens.copy(), rollout.token_codes.copy()
    tokens[position] = next(i for i in range(63, 0, -1) if i not in inside)
    return world.submission(lease, replaced(bundle, index, tokens=tokens, token_codes=codes))


@attack("a false probability for a tail token", "T3", "E_TAIL_TOKEN")
def wrong_tail_code(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    index, position = _tail_positions(bundle)[0]
    codes = bundle.rollouts[index].token_codes.copy()
    codes[position] += 400
    return world.submission(lease, replaced(bundle, index, token_codes=codes))


ATTACKS: Final = tuple(_ATTACKS)
