"""What anybody may read."""

from __future__ import annotations

from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Path, Query
from fastapi.responses import PlainTextResponse, Response
from sqlalchemy import select

from coordinator import checkpoints, epochs, event_log, metrics, registry
from coordinator.evidence import require_receipt
from coordinator.groups import head_version
from coordinator.models import Epoch, Group, Lease, Node, Receipt, Unit, Verdict
from coordinator.routes.common import Desk
from coordinator.streams import from_disk
from protocol.api import CheckpointsReply
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, LocalFault

router = APIRouter()

Number = Annotated[int, Path(ge=0, lt=2**48)]


@router.get("/healthz", response_class=PlainTextResponse, tags=["operation"])
def healthz() -> str:
    """Whether the process answers."""
    return "ok\n"


@router.get("/readyz", response_class=PlainTextResponse, tags=["operation"])
def readyz(desk: Desk) -> str:
    """Whether the database is whole, as far as it was read, and of this schema."""
    desk.database.check_schema()
    return "ready\n"


@router.get("/metrics", response_class=Response, tags=["operation"])
def prometheus(desk: Desk) -> Response:
    """Prometheus text format."""
    return Response(metrics.render(desk.status()), media_type=metrics.CONTENT_TYPE)


@router.get("/v1/status", tags=["public"])
def status(desk: Desk) -> dict[str, Any]:
    """How the run stands."""
    return desk.status()


@router.get("/v1/run", tags=["public"])
def run(desk: Desk) -> dict[str, Any]:
    """The run manifest, signed by the root key."""
    return desk.run.envelope.to_dict()


@router.get("/v1/head", tags=["public"])
def head(desk: Desk) -> dict[str, Any]:
    """The newest checkpoint head, signed by the learner."""
    with desk.database.read() as session:
        return checkpoints.head(session).to_dict()


@router.get("/v1/checkpoints/{version}", tags=["public"])
def checkpoint(desk: Desk, version: Number) -> dict[str, Any]:
    """The manifest of one version, signed by the learner."""
    with desk.database.read() as session:
        return checkpoints.manifest(session, version).to_dict()


@router.get("/v1/checkpoints", response_model=CheckpointsReply, tags=["public"])
def checkpoint_list(
    desk: Desk,
    first: Annotated[int, Query(alias="from", ge=0, lt=2**48)] = 0,
    last: Annotated[int, Query(alias="to", ge=0, lt=2**48)] = 2**48 - 1,
) -> CheckpointsReply:
    """Manifests of a span of versions, both ends included."""
    with desk.database.read() as session:
        return CheckpointsReply(manifests=checkpoints.manifests(session, first, last))


@router.get("/v1/nodes", tags=["public"])
def nodes(
    desk: Desk,
    after: Annotated[str, Query(max_length=64)] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """All nodes in the order of their ids; go on with ``after`` = ``next``."""
    with desk.database.read() as session:
        rows = list(session.scalars(select(Node).where(Node.id > after).order_by(Node.id).limit(limit)))
        found = registry.describe(session, rows, head_version(session) or 0)
    return {"nodes": found, "next": rows[-1].id if len(rows) == limit else None}


@router.get("/v1/nodes/{node_id}", tags=["public"])
def node(desk: Desk, node_id: str) -> dict[str, Any]:
    """One node, with its newest receipts."""
    with desk.database.read() as session:
        row = registry.require_node(session, node_id)
        newest = select(Receipt).where(Receipt.node_id == node_id).order_by(Receipt.received_ms.desc()).limit(20)
        receipts = [_receipt_summary(receipt) for receipt in session.scalars(newest)]
        return registry.describe(session, [row], head_version(session) or 0)[0] | {"receipts": receipts}


@router.get("/v1/receipts/{receipt_id}", tags=["public"])
def receipt(desk: Desk, receipt_id: str) -> dict[str, Any]:
    """A receipt with its commitment, its lease and the verdicts on it.

    Receipt and commitment name the bundle, the lease its unit: they are null, and ``withheld`` true, while somebody
    could hand in a copy.
    """
    with desk.database.read() as session:
        row = require_receipt(session, receipt_id)
        epoch = session.get_one(Epoch, row.epoch)
        verdicts = session.scalars(select(Verdict.envelope).where(Verdict.receipt_id == row.id).order_by(Verdict.id))
        withheld, lease = desk.replicas.withheld(session, row), session.get_one(Lease, row.lease_id)
        return _receipt_summary(row) | {
            "withheld": withheld,
            "receipt": None if withheld else Envelope.from_bytes(row.envelope).to_dict(),
            "commitment": None if withheld else Envelope.from_bytes(row.commitment).to_dict(),
            "lease": None if withheld else Envelope.from_bytes(lease.envelope).to_dict(),
            "verdicts": [Envelope.from_bytes(data).to_dict() for data in verdicts],
            "rate_ppm": row.rate_ppm,
            "drawn": row.drawn if epoch.ended_ms is not None else None,
            "log": event_log.proof_about(session, row.id, desk.run.id, desk.keyring.identity).to_dict(),
        }


@router.get("/v1/evidence/{receipt_id}", response_class=Response, tags=["public"])
async def evidence(desk: Desk, receipt_id: str) -> Response:
    """The self-contained audit file of a receipt."""
    headers = {"Content-Disposition": f'attachment; filename="{receipt_id[:32]}.evidence"'}

    def collect() -> Response:
        return from_disk(desk.evidence(receipt_id), desk.config.directory, headers)

    return await anyio.to_thread.run_sync(collect, limiter=desk.collecting)


@router.get("/v1/groups/{group}", tags=["public"])
def group(desk: Desk, group: Number) -> dict[str, Any]:
    """A group and how its units stand.

    While somebody may still make a unit, whether a lease is a shadow is null, and so is what would tell it: how that
    unit stands and, in a run with replicas, how the group does.
    """
    with desk.database.read() as session:
        row = session.get(Group, group)
        if row is None:
            raise LocalFault(E_NOT_FOUND, "no such group", got=group)
        units = session.scalars(select(Unit).where(Unit.group_id == group).order_by(Unit.id)).all()
        open_units = {unit.id for unit in units if desk.replicas.may_be_made(session, unit)}
        hidden = desk.replicas.hides(session, units)
        leases = session.scalars(select(Lease).where(Lease.unit_id.in_([unit.id for unit in units])))
        return {
            "group": row.id, "environment": row.environment, "state": None if hidden else row.state,
            "cause": row.cause, "start_version": row.start_version, "beacon": row.beacon,
            "consumed_version": None if hidden else row.consumed_version,
            "prompt_tokens": row.prompt_tokens, "prompt_sha256": row.prompt_sha256,
            "units": [
                {
                    "samples": unit.samples, "state": None if unit.id in open_units else unit.state,
                    "receipt_id": None if unit.id in open_units else unit.receipt_id,
                }
                for unit in units
            ],
            "leases": [
                {
                    "lease_id": lease.id, "node_id": lease.node_id, "state": lease.state,
                    "shadow": None if lease.unit_id in open_units else lease.shadow,
                    "sha256": lease.sha256, "issued_ms": lease.issued_ms, "deadline_ms": lease.deadline_ms,
                }
                for lease in leases
            ],
        }


@router.get("/v1/epochs", tags=["public"])
def epoch_list(desk: Desk) -> dict[str, Any]:
    """Epochs of the audit draw, newest first, with the keys of those that are over."""
    with desk.database.read() as session:
        return {"epochs": epochs.describe(session)}


@router.get("/v1/epochs/{epoch}/draws", tags=["public"])
def epoch_draws(
    desk: Desk, epoch: Number,
    first: Annotated[int, Query(alias="from", ge=0, lt=2**48)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> dict[str, Any]:
    """Receipts of one epoch with the rate each was drawn at; go on with ``from`` = ``next``."""
    with desk.database.read() as session:
        draws = epochs.draws_of(session, epoch, first, limit)
    return {"draws": draws, "next": first + limit if len(draws) == limit else None}


def _receipt_summary(row: Receipt) -> dict[str, Any]:
    return {
        "receipt_id": row.id, "sha256": row.sha256, "node_id": row.node_id, "lease_id": row.lease_id,
        "state": row.state, "code": row.code, "rollouts": row.rollouts, "tokens": row.tokens, "epoch": row.epoch,
        "received_ms": row.received_ms, "decided_ms": row.decided_ms, "rewards_micro": row.rewards,
    }
