"""What the routes share: the coordinator, and the envelope in a request's body."""

from __future__ import annotations

from typing import Annotated, Any, Final

import anyio.to_thread
from fastapi import Depends, Request

from coordinator.coordinator import Coordinator
from coordinator.drafts import Draft
from coordinator.edge import read_body, receive_body
from protocol.envelope import Envelope
from protocol.messages import Message

#: Largest message of a node, in bytes: far more than any of them needs.
MAX_NODE_MESSAGE_BYTES: Final = 128 * 1024
#: Largest message of the learner or a verifier, in bytes.
MAX_TRUSTED_MESSAGE_BYTES: Final = 8 * 2**20
#: Largest body of the admin API, in bytes.
MAX_ADMIN_BYTES: Final = 16 * 1024


def coordinator_of(request: Request) -> Coordinator:
    """The coordinator of the application."""
    found = request.app.state.coordinator
    assert isinstance(found, Coordinator)
    return found


Desk = Annotated[Coordinator, Depends(coordinator_of)]


async def _node_envelope(request: Request, desk: Desk) -> Envelope:
    return Envelope.from_bytes(await read_body(request, MAX_NODE_MESSAGE_BYTES, desk.config.body_timeout_s))


async def _trusted_envelope(request: Request, desk: Desk) -> Envelope:
    """Anybody may say that he is the learner: what comes is on disk until it is whole, and few are parsed at once.

    In a worker thread: a large one takes long enough to hold everybody else up.
    """
    with Draft(desk.config.directory) as draft:
        await receive_body(request, MAX_TRUSTED_MESSAGE_BYTES, desk.config.body_timeout_s, draft.take)
        return await anyio.to_thread.run_sync(lambda: Envelope.from_bytes(draft.read()), limiter=desk.parsing)


NodeEnvelope = Annotated[Envelope, Depends(_node_envelope)]
TrustedEnvelope = Annotated[Envelope, Depends(_trusted_envelope)]


def takes(message: type[Message]) -> dict[str, Any]:
    """OpenAPI of a body that is a signed ``message``."""
    return {
        "requestBody": {
            "required": True,
            "description": f"DSSE envelope, canonical JSON, payload type `{message.TYPE}` ({message.__name__})",
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "required": ["payloadType", "payload", "signatures"],
                        "properties": {
                            "payloadType": {"const": message.TYPE},
                            "payload": {"type": "string", "contentEncoding": "base64"},
                            "signatures": {"type": "array", "minItems": 1, "maxItems": 8},
                        },
                    }
                }
            },
        }
    }
