"""``summary.json``: what a run on this machine came to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict

from coordinator.up_status import Status

#: ``reward_first`` and ``reward_last`` are means over this many batches at either end, at most half of them.
REWARD_WINDOW: Final = 2


class Cheater(BaseModel):
    """One drill."""

    model_config = ConfigDict(frozen=True)

    node: str
    attack: str
    caught: bool
    rollouts_before_caught: int | None
    code: str | None


class AuditWeights(BaseModel):
    """How the verifier came by the weights it audited with, since it was started last."""

    model_config = ConfigDict(frozen=True)

    loaded: int  #: whole states decoded from an anchor
    applied: int  #: versions made by applying a diff
    stepped: int  #: versions gone back or forth by the log of an earlier diff, without reloading anything


class Summary(BaseModel):
    """The keys of ``summary.json``."""

    model_config = ConfigDict(frozen=True)

    versions_published: int  #: diffs after version 0
    reward_first: float | None  #: mean reward of the first batches trained on
    reward_last: float | None  #: mean reward of the last ones
    rollouts_accepted: int
    rollouts_rejected: int
    tokens_generated: int
    tokens_trained: int
    honest_nodes_banned: int
    cheaters: list[Cheater]
    diff_bytes_mean: float | None
    diff_ratio_to_bound: float | None  #: mean over the last 50 diffs of their bytes over the entropy of what changed
    full_bytes: int | None
    audit_weights: AuditWeights | None
    roots_equal: bool  #: every honest node ended on the state root of the newest checkpoint
    wall_s: float  #: running time of ``assay up``, all starts together


def summarise(
    status: Status, *, honest: Sequence[str], drills: Sequence[str], roots_equal: bool, wall_s: float,
    audit_weights: AuditWeights | None = None,
) -> Summary:
    """Put a run into numbers.

    Args:
        status: the coordinator's last word.
        honest: names of the honest nodes.
        drills: attacks that were planned; one that never came to its turn counts as not caught.
        roots_equal: whether all honest nodes hold the newest checkpoint's bits.
        wall_s: running time in seconds.
        audit_weights: what the verifier's metrics say.
    """
    seen = {drill.attack: drill for drill in status.drills}
    cheaters = [
        Cheater(
            node=seen[attack].node, attack=attack, caught=seen[attack].caught,
            rollouts_before_caught=seen[attack].rollouts_before_caught, code=seen[attack].code,
        )
        if attack in seen
        else Cheater(node="", attack=attack, caught=False, rollouts_before_caught=None, code=None)
        for attack in drills
    ]
    first, last = reward_ends(status.rewards)
    return Summary(
        versions_published=status.version or 0, reward_first=first, reward_last=last,
        rollouts_accepted=status.rollouts.accepted, rollouts_rejected=status.rollouts.rejected,
        tokens_generated=status.tokens_generated, tokens_trained=status.tokens_trained,
        honest_nodes_banned=sum(node.name in honest and node.state == "banned" for node in status.nodes),
        cheaters=cheaters, diff_bytes_mean=status.diff_bytes_mean,
        diff_ratio_to_bound=status.diff_ratio_to_bound, full_bytes=status.full_bytes,
        audit_weights=audit_weights, roots_equal=roots_equal, wall_s=round(wall_s, 1),
    )


def reward_ends(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean reward at the beginning and at the end of a run."""
    if not rewards:
        return None, None
    window = max(1, min(REWARD_WINDOW, len(rewards) // 2))
    return round(sum(rewards[:window]) / window, 4), round(sum(rewards[-window:]) / window, 4)


def roots_equal(homes: Sequence[Path], root: str) -> bool:
    """Whether every node's home says that it holds the state with this root."""
    return all(_state_root(home) == root for home in homes)


def _state_root(home: Path) -> str | None:
    try:
        state: Any = json.loads((home / "state.json").read_bytes())
    except (OSError, ValueError):
        return None
    return state.get("state_root") if isinstance(state, dict) else None


def read_audit_weights(file: Path) -> AuditWeights | None:
    """The counts in a verifier's ``metrics.prom``; None when there are none."""
    try:
        families = {family.name: family for family in text_string_to_metric_families(file.read_text(encoding="utf-8"))}
    except (OSError, ValueError):
        return None
    names = {"loaded": "anchors_loaded", "applied": "diffs_applied", "stepped": "versions_stepped"}
    found = {key: families.get(f"assay_verifier_{name}") for key, name in names.items()}
    if any(family is None or not family.samples for family in found.values()):
        return None
    return AuditWeights(**{key: int(family.samples[0].value) for key, family in found.items() if family is not None})


def read_summary(file: Path) -> Summary | None:
    """What an earlier start wrote; None when there is nothing that can be read."""
    try:
        return Summary.model_validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def is_final(earlier: Summary, now: Summary) -> bool:
    """Whether a summary of a run that is complete ``now`` told of its end already, with every node at it."""
    return earlier.versions_published == now.versions_published and earlier.roots_equal


def in_words(summary: Summary) -> list[str]:
    """The summary for a human, line by line."""
    lines = [
        f"{summary.versions_published} versions published in {summary.wall_s:.0f} s; "
        + f"reward {_point(summary.reward_first)} -> {_point(summary.reward_last)}",
        f"{summary.rollouts_accepted} rollouts accepted, {summary.rollouts_rejected} rejected; "
        + f"{summary.tokens_generated:,} tokens generated, {summary.tokens_trained:,} trained on",
    ]
    if summary.diff_bytes_mean and summary.full_bytes:
        diff, full = summary.diff_bytes_mean, summary.full_bytes
        bound = summary.diff_ratio_to_bound
        near = f", {bound:.2f} times the entropy of what changed" if bound else ""
        lines.append(f"a diff holds {diff:,.0f} bytes of {full:,}: {full / diff:.0f}x smaller{near}")
    if summary.audit_weights is not None:
        way = summary.audit_weights
        lines.append(
            f"the verifier loaded whole weights {way.loaded} times, applied {way.applied} diffs, and stepped "
            + f"{way.stepped} versions back and forth without reloading"
        )
    same = "every honest node ended" if summary.roots_equal else "NOT every honest node ended"
    lines.append(f"{same} on the newest weights, bit for bit")
    lines.extend(_fate(cheater) for cheater in summary.cheaters)
    lines.append(f"honest nodes banned: {summary.honest_nodes_banned}")
    return lines


def _fate(cheater: Cheater) -> str:
    if not cheater.caught:
        return f"{cheater.attack}: not caught"
    return f"{cheater.attack}: caught after {cheater.rollouts_before_caught} rollouts ({cheater.code})"


def _point(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
