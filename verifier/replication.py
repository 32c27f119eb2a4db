"""T2': the same unit made by two nodes. The first position where they differ shows which of them is wrong.

No node and no choice of a node is in a seed, so honest replicas of one profile differ in their tokens only where two
symbols nearly tie. Up to the first difference both fed the model the same tokens; one prefill of that prefix says
whose head at that position is what the checkpoint computes. Spec: ``docs/spec/verification.md``, "T2'".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from protocol.head import offsets
from protocol.messages import Profile, SamplingRules
from protocol.rollout import Bundle, Rollout
from verifier.divergence import Measurement, Residuals, measure
from verifier.submission import Opened


def first_difference(ours: Rollout, theirs: Rollout) -> int | None:
    """First position whose tokens differ, or where one completion has ended; None when they are alike."""
    shared = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours.tokens[:shared] != theirs.tokens[:shared])
    if len(differ):
        return int(differ[0])
    return None if len(ours) == len(theirs) else shared - 1


def differences(ours: Bundle, theirs: Bundle) -> dict[int, int]:
    """Sample -> first difference, of the samples that both bundles hold and that are not alike."""
    twins = {rollout.sample: rollout for rollout in theirs.rollouts}
    found = {}
    for rollout in ours.rollouts:
        twin = twins.get(rollout.sample)
        position = None if twin is None else first_difference(rollout, twin)
        if position is not None:
            found[rollout.sample] = position
    return found


def shortened(opened: Opened, positions: dict[int, int]) -> Opened:
    """The submission with nothing but the rollouts named, each up to its position, that one included."""
    kept = [cut(r, positions[r.sample]) for r in opened.bundle.rollouts if r.sample in positions]
    return replace(opened, bundle=Bundle(tuple(kept)))


def cut(rollout: Rollout, position: int) -> Rollout:
    """The rollout up to ``position``, included. How it would have ended is not known."""
    tokens = position + 1
    entries = int(offsets(rollout)[position]) + int(rollout.head_lengths[position])
    return replace(
        rollout, tokens=rollout.tokens[:tokens], head_lengths=rollout.head_lengths[:tokens],
        head_ids=rollout.head_ids[:entries], head_codes=rollout.head_codes[:entries],
        tail_codes=rollout.tail_codes[:tokens], token_codes=rollout.token_codes[:tokens],
        routes=None if rollout.routes is None else rollout.routes[:tokens],
        segments=tuple(segment for segment in rollout.segments if segment.start <= position),
    )


def measure_last(residuals: Sequence[Residuals], profile: Profile, rules: SamplingRules) -> list[Measurement]:
    """The checks of single positions, at the last one of every rollout. A mean over one position means nothing."""
    return measure([_last(rollout) for rollout in residuals], profile, rules)[1:]


def _last(residuals: Residuals) -> Residuals:
    """All but the last position blanked."""
    columns = {}
    for column in fields(residuals):
        values = getattr(residuals, column.name)
        if isinstance(values, np.ndarray):
            blank = np.full(len(values), np.nan)
            blank[-1] = values[-1]
            columns[column.name] = blank
    return Residuals(residuals.sample, **columns)
