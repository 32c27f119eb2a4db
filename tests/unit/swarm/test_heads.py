from __future__ import annotations

from typing import Any

import pytest

from protocol.envelope import Envelope
from protocol.errors import PeerFault
from protocol.identity import Identity
from protocol.messages import CheckpointHead
from protocol.swarm.heads import Heads
from protocol.swarm.wire import MAX_HEAD_BYTES

LEARNER, RUN, NOW = Identity(b"l" * 32), "ab" * 16, 1_000_000


def head(version: int, *, signer: Identity = LEARNER, **changes: Any) -> bytes:
    fields = {
        "run_id": RUN, "version": version, "manifest_sha256": f"{version:064x}", "issued_at_ms": NOW,
        "expires_at_ms": NOW + 1000,
    }
    envelope: Envelope = CheckpointHead.model_validate(fields | changes).sign(signer)
    return envelope.to_bytes()


@pytest.fixture
def heads() -> Heads:
    return Heads(LEARNER.public_key.hex(), RUN)


def test_only_news_is_news(heads: Heads) -> None:
    assert heads.newest is None
    assert heads.version == -1
    assert heads.hear(head(7), NOW)
    assert not heads.hear(head(7), NOW)
    assert not heads.hear(head(3), NOW)
    assert heads.hear(head(7, issued_at_ms=NOW + 1), NOW)
    assert heads.hear(head(8), NOW)
    assert heads.newest == head(8)
    assert heads.version == 8


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (head(9, signer=Identity(b"x" * 32)), "E_SIGNATURE"),
        (head(9, run_id="cd" * 16), "E_WRONG_RUN"),
        (head(9, expires_at_ms=NOW - 1), "E_EXPIRED"),
        (head(7, manifest_sha256="ff" * 32), "E_CHECKPOINT_MIX"),
        (head(9).replace(b"payloadType", b"payloadtype"), "E_ENVELOPE"),
        (b"{", "E_JSON"),
        (b" " * (MAX_HEAD_BYTES + 1), "E_TOO_LARGE"),
    ],
)
def test_what_the_learner_did_not_say_is_refused_by_name(heads: Heads, data: bytes, code: str) -> None:
    heads.hear(head(7), NOW)
    with pytest.raises(PeerFault) as caught:
        heads.hear(data, NOW)
    assert caught.value.code == code
    assert heads.newest == head(7)
