"""What the operator may do, with the admin token; every act names its reason and is written to the log."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator import drills, invites, registry
from coordinator.edge import read_body
from coordinator.routes.common import MAX_ADMIN_BYTES, Desk
from protocol.api import Ack
from protocol.errors import E_SCHEMA, PeerFault
from protocol.validation import expectation

Reason = Annotated[str, Field(min_length=3, max_length=400)]
NodeId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_B = TypeVar("_B", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    reason: Reason


class InviteBody(_Body):
    """A new join token."""

    label: Annotated[str, Field(max_length=100)] = ""
    ttl_s: Annotated[int, Field(ge=1, le=366 * 86_400)] = 7 * 86_400
    uses: Annotated[int, Field(ge=1)] | None = None


class RevokeBody(_Body):
    """A join token to revoke, by the SHA-256 of its text."""

    token_sha256: NodeId


class BanBody(_Body):
    """A node to ban; for good when there is no expiry."""

    node_id: NodeId
    expires_in_s: Annotated[int, Field(ge=1)] | None = None


class UnbanBody(_Body):
    """A node to let in again."""

    node_id: NodeId


class DrillBody(_Body):
    """A key to enrol as a drill."""

    node_id: NodeId
    attack: Annotated[str, Field(max_length=64)]


async def _admin_body(request: Request, desk: Desk) -> bytes:
    desk.keyring.check_admin(request.headers.get("authorization"))
    return await read_body(request, MAX_ADMIN_BYTES, desk.config.body_timeout_s)


AdminBody = Annotated[bytes, Depends(_admin_body)]
router = APIRouter(prefix="/v1/admin", tags=["admin"])


def _parsed(cls: type[_B], body: bytes) -> _B:
    try:
        return cls.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        got = str(first["input"])[:80]
        raise PeerFault(E_SCHEMA, f"{where} does not fit", expected=expectation(first), got=got) from None


def _takes(cls: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": cls.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}, "security": [{"admin": []}]}


@router.post("/invites", openapi_extra=_takes(InviteBody))
def invite(desk: Desk, body: AdminBody) -> dict[str, Any]:
    """Make a join token. Its text is shown once."""
    wish = _parsed(InviteBody, body)
    token = desk.invite(label=wish.label or wish.reason[:100], ttl_ms=wish.ttl_s * 1000, uses=wish.uses)
    return {"token": token, "expires_in_s": wish.ttl_s, "uses": wish.uses}


@router.post("/invites/revoke", response_model=Ack, openapi_extra=_takes(RevokeBody))
def revoke(desk: Desk, body: AdminBody) -> Ack:
    """Make a join token useless."""
    wish = _parsed(RevokeBody, body)
    with desk.database.write() as session:
        invites.revoke(session, desk.clock.now_ms(), wish.token_sha256, wish.reason)
    return Ack()


@router.post("/ban", response_model=Ack, openapi_extra=_takes(BanBody))
def ban(desk: Desk, body: AdminBody) -> Ack:
    """Ban a node, void its unsettled credit, offer its unconsumed work to others."""
    wish = _parsed(BanBody, body)
    with desk.database.write() as session:
        now_ms = desk.clock.now_ms()
        until_ms = None if wish.expires_in_s is None else now_ms + wish.expires_in_s * 1000
        node = registry.require_node(session, wish.node_id)
        desk.discipline.ban(session, node, now_ms, reason=wish.reason, until_ms=until_ms)
    return Ack()


@router.post("/unban", response_model=Ack, openapi_extra=_takes(UnbanBody))
def unban(desk: Desk, body: AdminBody) -> Ack:
    """Let a node work again."""
    wish = _parsed(UnbanBody, body)
    with desk.database.write() as session:
        desk.discipline.unban(session, wish.node_id, desk.clock.now_ms(), wish.reason)
    return Ack()


@router.post("/drills", response_model=Ack, openapi_extra=_takes(DrillBody))
def enrol_drill(desk: Desk, body: AdminBody) -> Ack:
    """Enrol a key as a drill: it cheats on purpose and its work never reaches the learner."""
    wish = _parsed(DrillBody, body)
    with desk.database.write() as session:
        drills.enrol(session, desk.groups, wish.node_id, wish.attack, desk.clock.now_ms(), wish.reason)
    return Ack()
