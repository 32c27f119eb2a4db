"""The append-only log, its signed heads and its proofs; for anybody."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse

from coordinator import event_log
from coordinator.routes.common import Desk

router = APIRouter()

Size = Annotated[int | None, Query(ge=0, le=2**48)]


@router.get("/v1/log", tags=["log"])
def log(
    desk: Desk,
    first: Annotated[int, Query(alias="from", ge=0, lt=2**48)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """Entries of the log from one on."""
    with desk.database.read() as session:
        return {"entries": [entry.to_dict() for entry in event_log.entries(session, first, limit)]}


@router.get("/v1/log/head", response_class=PlainTextResponse, tags=["log"])
def head(desk: Desk, size: Size = None) -> str:
    """The head over the first ``size`` entries, or all: a C2SP checkpoint signed by the coordinator."""
    with desk.database.read() as session:
        return event_log.head(session, desk.run.id, size).sign(desk.keyring.identity)


@router.get("/v1/log/inclusion", tags=["log"])
def inclusion(desk: Desk, index: Annotated[int, Query(ge=0, lt=2**48)], size: Size = None) -> dict[str, Any]:
    """An entry, a head, and the proof that the one is under the other."""
    with desk.database.read() as session:
        top = event_log.head(session, desk.run.id, size)
        proof = event_log.inclusion_proof(session, index, top.size)
        return {
            "head": top.sign(desk.keyring.identity), "entry": event_log.entry(session, index).to_dict(),
            "proof": [node.hex() for node in proof],
        }


@router.get("/v1/log/consistency", tags=["log"])
def consistency(
    desk: Desk, old: Annotated[int, Query(alias="from", ge=0, le=2**48)],
    new: Annotated[int | None, Query(alias="to", ge=0, le=2**48)] = None,
) -> dict[str, Any]:
    """The later head, and the proof that it only adds to the earlier one."""
    with desk.database.read() as session:
        top = event_log.head(session, desk.run.id, new)
        proof = event_log.consistency_proof(session, old, top.size)
        return {"head": top.sign(desk.keyring.identity), "proof": [node.hex() for node in proof]}
