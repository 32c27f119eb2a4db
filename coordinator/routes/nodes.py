"""What nodes send."""

from __future__ import annotations

import anyio.to_thread
from fastapi import APIRouter, Request

from coordinator.edge import address_of, receive_body
from coordinator.routes.common import Desk, NodeEnvelope, takes
from protocol.api import Ack, LeaseReply, PeersReply, RegisterReply, SubmitReply, UploadReply
from protocol.messages import Commitment, LeaseRequest, LeaseReturn, NodeHello, UploadRequest
from protocol.swarm.announce import PeerAnnounce

router = APIRouter(prefix="/v1", tags=["nodes"])


@router.post("/nodes", response_model=RegisterReply, openapi_extra=takes(NodeHello))
def register(desk: Desk, envelope: NodeEnvelope) -> RegisterReply:
    """Register a node; the first time needs a join token."""
    return desk.register(envelope)


@router.post("/leases", response_model=LeaseReply, openapi_extra=takes(LeaseRequest))
def lease(desk: Desk, envelope: NodeEnvelope) -> LeaseReply:
    """Ask for work; the same nonce gives the same leases."""
    return desk.lease(envelope)


@router.post("/lease-returns", response_model=Ack, openapi_extra=takes(LeaseReturn))
def return_leases(desk: Desk, envelope: NodeEnvelope) -> Ack:
    """Hand leases back unfinished."""
    return desk.return_leases(envelope)


@router.post("/peers", response_model=PeersReply, openapi_extra=takes(PeerAnnounce))
def announce(request: Request, desk: Desk, envelope: NodeEnvelope) -> PeersReply:
    """Say where a node's swarm host listens (an unspecified address means: where this request comes from)."""
    return desk.announce(envelope, request.client.host if request.client else "")


@router.post("/uploads", response_model=UploadReply, openapi_extra=takes(UploadRequest))
def grant_upload(desk: Desk, envelope: NodeEnvelope) -> UploadReply:
    """Ask where to put an object."""
    return desk.grant_upload(envelope)


@router.put("/uploads/{sha256}", response_model=Ack)
async def upload(request: Request, desk: Desk, sha256: str, size: int, expires: int, node: str, sig: str) -> Ack:
    """Put an object at an address that ``POST /v1/uploads`` gave; none of ours, no place."""
    uploads, config = desk.uploads, desk.config
    uploads.check(node, sha256, size, expires, sig, desk.clock.now_ms())
    if await anyio.to_thread.run_sync(desk.check_upload, node, sha256, expires):
        return Ack(duplicate=True)
    with uploads.places.hold(node, address_of(request.scope), sha256), uploads.draft() as draft:
        await receive_body(request, size, config.body_timeout_s, draft.take, bytes_per_s=config.upload_bytes_per_s)
        await uploads.keep(sha256, size, draft)
        await anyio.to_thread.run_sync(desk.note_upload, node, sha256, expires)
    return Ack()


@router.post("/submissions", response_model=SubmitReply, openapi_extra=takes(Commitment))
def submit(desk: Desk, envelope: NodeEnvelope) -> SubmitReply:
    """Commit to a finished lease; the answer is a signed receipt."""
    return desk.submit(envelope)
