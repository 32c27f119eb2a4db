"""Who is audited with the model: a rate that falls with trust, and a draw that anyone can repeat later.

Pure functions. Spec: ``docs/spec/http-api.md``, "Audit draw".
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from protocol.messages import AuditPolicy

_PPM: Final = 1_000_000


def audit_rate_ppm(policy: AuditPolicy, audited_passes: int) -> int:
    """Chance of an audit, in 1e-6, of a node with this many audited passes since its last incident.

    The first ``ramp`` bundles are all audited; then ramp / (ramp + passes), never below the floor.
    """
    if audited_passes < policy.ramp:
        return _PPM
    rate = _PPM * policy.ramp // (policy.ramp + audited_passes) if policy.ramp else 0
    return max(policy.floor_ppm, rate)


def is_drawn(key: bytes, receipt_sha256: str, rate_ppm: int) -> bool:
    """HMAC-SHA256(key, receipt digest) as a big-endian fraction of 2^64, below the rate."""
    mac = hmac.digest(key, bytes.fromhex(receipt_sha256), hashlib.sha256)
    return int.from_bytes(mac[:8], "big") * _PPM < rate_ppm << 64


def commit_to(key: bytes) -> str:
    """What is published when an epoch begins: hex SHA-256 of its draw key."""
    return hashlib.sha256(key).hexdigest()
