"""What verifiers and the learner send and ask, and what the learner trained on."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from coordinator.routes.common import Desk, TrustedEnvelope, takes
from protocol.api import Ack, AdmittedReply, BatchReply, ClaimReply
from protocol.messages import (
    AdmittedRequest,
    AuditClaim,
    BatchPlan,
    CheckpointHead,
    CheckpointManifest,
    ScreenReport,
    UpdateReceipt,
    Verdict,
)

router = APIRouter(prefix="/v1", tags=["verifiers and learner"])


@router.post("/audits/claim", response_model=ClaimReply, openapi_extra=takes(AuditClaim))
def claim_audit(desk: Desk, envelope: TrustedEnvelope) -> ClaimReply:
    """Claim the next bundle to check; the same nonce gives the same one."""
    return desk.claim_audit(envelope)


@router.post("/verdicts", response_model=Ack, openapi_extra=takes(Verdict))
def verdict(desk: Desk, envelope: TrustedEnvelope) -> Ack:
    """Report what was found."""
    return desk.verdict(envelope)


@router.post("/checkpoints", response_model=Ack, openapi_extra=takes(CheckpointManifest))
def publish_checkpoint(desk: Desk, envelope: TrustedEnvelope) -> Ack:
    """Publish the manifest of the next version; its chunks are in the store."""
    return desk.publish_checkpoint(envelope)


@router.post("/head", response_model=Ack, openapi_extra=takes(CheckpointHead))
def publish_head(desk: Desk, envelope: TrustedEnvelope) -> Ack:
    """Say which version is the newest."""
    return desk.publish_head(envelope)


@router.post("/batches", response_model=Ack, openapi_extra=takes(BatchPlan))
def post_batch(desk: Desk, envelope: TrustedEnvelope) -> Ack:
    """Write down the batch about to be trained on; consumes its groups."""
    return desk.post_batch(envelope)


@router.post("/updates", response_model=Ack, openapi_extra=takes(UpdateReceipt))
def post_update(desk: Desk, envelope: TrustedEnvelope) -> Ack:
    """Report a finished step."""
    return desk.post_update(envelope)


@router.post("/screens", response_model=Ack, openapi_extra=takes(ScreenReport))
def post_screen(desk: Desk, envelope: TrustedEnvelope) -> Ack:
    """Report outliers of the learner's own forward pass; audits are forced, nobody is punished."""
    return desk.post_screen(envelope)


@router.post("/admitted", response_model=AdmittedReply, openapi_extra=takes(AdmittedRequest))
def admitted(desk: Desk, envelope: TrustedEnvelope) -> AdmittedReply:
    """Complete, verified, unconsumed groups, oldest first; they name bundles, so only the learner is told."""
    return AdmittedReply(groups=desk.admitted(envelope))


@router.get("/batches/{version}", response_model=BatchReply)
def batch(desk: Desk, version: Annotated[int, Path(ge=0, lt=2**48)]) -> BatchReply:
    """The plan of one version and the groups it consumed; a bundle is null while somebody could hand in a copy."""
    return desk.batch(version)
