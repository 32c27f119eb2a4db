"""Bundles and commitments that a cheat hands in, and in which tier and under which codes they must be found.

Each attack starts from an honest world and returns the submission that the cheat hands in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from protocol.messages import Lease
from protocol.rollout import Bundle, Segment
from tests.adversary.world import EOS, World
from verifier.submission import Submission

Cheat = Callable[[World, Lease], Submission]
_T = TypeVar("_T")


class NoOpportunity(Exception):
    """These rollouts do not lend themselves to the cheat."""


def first(options: Iterable[_T]) -> _T:
    """The first option; raises ``NoOpportunity`` when there is none."""
    for option in options:
        return option
    raise NoOpportunity


@dataclass(frozen=True)
class Attack:
    """``tier``: the last tier that runs. ``codes``: any of these names it; the first is the usual one."""

    row: int  #: of ``tests.adversary.registry.ROWS``
    name: str
    tier: str
    codes: tuple[str, ...]
    cheat: Cheat
    door: str | None = None  #: code under which the coordinator refuses it before any verifier looks
    later: int = 0  #: versions that must come out between leasing and handing in
    blames: bool = True  #: False: the node did not sign it, so that a verifier blames nobody; the door refuses it


ATTACKS: list[Attack] = []  #: filled by ``tests.adversary.attacks``


def attack(
    row: int, name: str, tier: str, *codes: str, door: str | None = None, later: int = 0, blames: bool = True
) -> Callable[[Cheat], Cheat]:
    """Register a cheat of a row."""

    def register(cheat: Cheat) -> Cheat:
        ATTACKS.append(Attack(row, name, tier, codes, cheat, door, later, blames))
        return cheat

    return register


def force(token: int, at: int):
    def hook(logits_BV: torch.Tensor, position: int) -> torch.Tensor:
        if position == at:
            logits_BV = logits_BV.clone()
            logits_BV[:, token] += 50.0
        return logits_BV

    return hook


def head_at(rollout, position: int) -> list[int]:
    start = int(rollout.head_lengths[:position].sum())
    return rollout.head_ids[start : start + int(rollout.head_lengths[position])].tolist()


def other_head_token(bundle: Bundle, index: int, position: int) -> int:
    """A token of the head at ``position`` that was not drawn and does not end the completion."""
    rollout = bundle.rollouts[index]
    if position >= len(rollout):
        raise NoOpportunity
    return first(i for i in head_at(rollout, position) if i not in (EOS, int(rollout.tokens[position])))


def claiming(bundle: Bundle, segments: list[Segment]) -> Bundle:
    """The bundle with other segments claimed than were used."""
    return Bundle(tuple(
        replace(rollout, segments=tuple(s for s in segments if s.start < len(rollout))) for rollout in bundle.rollouts
    ))
