"""Who is audited with the model: a rate that falls with trust, and a draw that anyone can repeat later.

Pure functions. Spec: ``docs/spec/http-api.md``, "Audit draw".
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from protocol.messages import AuditPolicy

_PPM: Final = 1_000_000
#: What is drawn: no draw says anything about the other.
_AUDIT: Final = b"assay.draw.audit.v1\0"
_REPLICA: Final = b"assay.draw.replica.v1\0"


def audit_rate_ppm(policy: AuditPolicy, audited_passes: int) -> int:
    """Chance of an audit, in 1e-6, of a node with this many audited passes since its last incident.

    The first ``ramp`` bundles are all audited; then ramp / (ramp + passes), never below the floor.
    """
    if audited_passes < policy.ramp:
        return _PPM
    rate = _PPM * policy.ramp // (policy.ramp + audited_passes) if policy.ramp else 0
    return max(policy.floor_ppm, rate)


def is_drawn(key: bytes, commitment_sha256: str, rate_ppm: int) -> bool:
    """Whether a bundle is recomputed.

    Args:
        key: of the epoch, 32 bytes.
        commitment_sha256: digest of the commitment's payload: its node signed that without the key, and whoever has
            the key cannot change it. (A receipt is dated by who has the key.)
        rate_ppm: chance, 1e-6.
    """
    return _below(key, _AUDIT, commitment_sha256, rate_ppm)


def is_replicated(key: bytes, lease_sha256: str, rate_ppm: int) -> bool:
    """Whether the unit of a lease (digest of its payload) is made by a second node too; as :func:`is_drawn`."""
    return _below(key, _REPLICA, lease_sha256, rate_ppm)


def _below(key: bytes, domain: bytes, sha256: str, rate_ppm: int) -> bool:
    """HMAC-SHA256(key, domain | digest) as a big-endian fraction of 2^64, below the rate."""
    mac = hmac.digest(key, domain + bytes.fromhex(sha256), hashlib.sha256)
    return int.from_bytes(mac[:8], "big") * _PPM < rate_ppm << 64


def commit_to(key: bytes) -> str:
    """What is published when an epoch begins: hex SHA-256 of its draw key."""
    return hashlib.sha256(key).hexdigest()
