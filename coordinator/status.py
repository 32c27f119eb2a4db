"""How the run stands: what the dashboard, ``assay up`` and ``/metrics`` show. Costs no scan of the big tables."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any, Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator import counters, drills, registry
from coordinator.groups import LIVE, Groups, head_version
from coordinator.models import Batch, Checkpoint, Group, Node, Receipt, ReceiptState, Unit
from coordinator.run import Run

#: Span over which tokens per second are measured.
RATE_WINDOW_MS: Final = 30_000
#: Rows shown at most; ``/v1/nodes`` has all nodes.
MAX_NODES: Final = 200
MAX_REWARDS: Final = 2000
MAX_STEPS: Final = 50
MAX_CHECKPOINTS: Final = 50


def snapshot(session: Session, run: Run, groups: Groups, now_ms: int) -> dict[str, Any]:
    """The status object of ``GET /v1/status`` (docs/spec/http-api.md)."""
    totals = counters.totals(session)
    version = head_version(session)
    return {
        "run": {
            "id": run.id, "name": run.manifest.name, "max_versions": run.manifest.batch.max_versions,
            "complete": groups.is_complete(session), "model": run.manifest.model.name,
            "group_size": run.manifest.batch.group_size, "groups_per_batch": run.manifest.batch.groups_per_batch,
            "max_lag_versions": run.manifest.batch.max_lag_versions,
        },
        "version": version,
        "oldest_version_needed": _oldest_needed(session, run, version or 0),
        "tokens_generated": totals.get("tokens_generated", 0),
        "tokens_trained": totals.get("tokens_trained", 0),
        "tokens_per_s": _tokens_per_s(session, now_ms),
        "lag_histogram": {
            name.removeprefix("lag:"): value for name, value in sorted(totals.items()) if name.startswith("lag:")
        },
        "nodes": _nodes(session, version or 0),
        "nodes_total": session.scalar(select(func.count()).select_from(Node)) or 0,
        "drills": drills.describe(session),
        "groups": _group_counts(session),
        "server_time_ms": now_ms,
        **_batches(session),
        **_audits(session, totals, now_ms),
        **_checkpoints(session, version, now_ms),
    }


def _tokens_per_s(session: Session, now_ms: int) -> float:
    since = select(func.sum(Receipt.tokens)).where(Receipt.received_ms > now_ms - RATE_WINDOW_MS)
    return round((session.scalar(since) or 0) * 1000 / RATE_WINDOW_MS, 2)


def _nodes(session: Session, version: int) -> list[dict[str, Any]]:
    rows = session.scalars(select(Node).order_by(Node.last_seen_ms.desc()).limit(MAX_NODES)).all()
    return registry.describe(session, sorted(rows, key=lambda node: (node.joined_ms, node.id)), version)


def _group_counts(session: Session) -> dict[str, int]:
    query = select(Group.state, func.count()).where(Group.state.in_(LIVE)).group_by(Group.state)
    return {str(state): int(count) for state, count in session.execute(query)}


def _batches(session: Session) -> dict[str, Any]:
    wanted = select(Batch.version, Batch.reward_micro, Batch.lag_milli, Batch.tokens, Batch.posted_ms, Batch.metrics)
    rows = session.execute(wanted.order_by(Batch.version.desc()).limit(MAX_STEPS)).all()[::-1]
    rewards = session.scalars(select(Batch.reward_micro).order_by(Batch.version.desc()).limit(MAX_REWARDS)).all()[::-1]
    return {
        "reward_mean": [reward / 1e6 for reward in rewards],
        "diff_ratio_to_bound": _mean(row.metrics.get("diff_ratio_to_bound") for row in rows if row.metrics),
        "batches": [
            {
                "version": row.version, "reward_mean": row.reward_micro / 1e6, "lag_mean": row.lag_milli / 1e3,
                "tokens": row.tokens, "posted_ms": row.posted_ms,
                "metrics": {name: value / 1e6 for name, value in (row.metrics or {}).items()},
            }
            for row in rows
        ],
    }


def _mean(values_micro: Iterable[int | None]) -> float | None:
    known = [value / 1e6 for value in values_micro if value is not None]
    return fmean(known) if known else None


def _audits(session: Session, totals: dict[str, int], now_ms: int) -> dict[str, Any]:
    waiting = (ReceiptState.PENDING, ReceiptState.CLAIMED)
    query = select(func.count(), func.sum(Receipt.rollouts), func.min(Receipt.received_ms))
    queued, rollouts, oldest = session.execute(query.where(Receipt.state.in_(waiting))).one()
    return {
        "audit_queue": queued,
        "audit_queue_age_ms": 0 if oldest is None else max(0, now_ms - oldest),
        "rollouts": {
            "accepted": totals.get("rollouts_accepted", 0), "rejected": totals.get("rollouts_rejected", 0),
            "inconclusive": totals.get("rollouts_inconclusive", 0), "pending": int(rollouts or 0),
            "cancelled": totals.get("rollouts_cancelled", 0),
        },
    }


def _oldest_needed(session: Session, run: Run, version: int) -> int:
    """Oldest version that a live group, a submission under check or the staleness bound can still ask for."""
    live = select(func.min(Group.start_version)).where(Group.state.in_(LIVE))
    checked = (
        select(func.min(Group.start_version)).join(Unit, Unit.group_id == Group.id)
        .join(Receipt, Receipt.unit_id == Unit.id)
        .where(Receipt.state.in_((ReceiptState.PENDING, ReceiptState.CLAIMED)))
    )
    found = [session.scalar(query) for query in (live, checked)]
    bound = max(0, version - run.manifest.batch.max_lag_versions)
    return min([bound, *(start for start in found if start is not None)])


def _checkpoints(session: Session, version: int | None, now_ms: int) -> dict[str, Any]:
    wanted = select(
        Checkpoint.version, Checkpoint.received_ms, Checkpoint.diff_bytes, Checkpoint.anchor_bytes,
        Checkpoint.full_bytes, Checkpoint.state_root,
    )
    rows = session.execute(wanted.order_by(Checkpoint.version.desc()).limit(MAX_CHECKPOINTS)).all()
    with_diff = select(func.avg(Checkpoint.diff_bytes)).where(Checkpoint.diff_bytes > 0)
    mean = session.scalar(with_diff)
    full = select(Checkpoint.full_bytes).where(Checkpoint.full_bytes > 0).order_by(Checkpoint.version.desc()).limit(1)
    head = next((row for row in rows if row.version == version), None)
    return {
        "head_age_ms": None if head is None else max(0, now_ms - head.received_ms),
        "diff_bytes_mean": None if mean is None else float(mean),
        "full_bytes": session.scalar(full),
        "checkpoints": [
            {
                "version": row.version, "age_ms": max(0, now_ms - row.received_ms), "diff_bytes": row.diff_bytes,
                "anchor_bytes": row.anchor_bytes, "full_bytes": row.full_bytes, "state_root": row.state_root,
            }
            for row in rows
        ],
    }

