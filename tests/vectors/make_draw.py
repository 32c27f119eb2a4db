"""Writes the known answers of the audit draw, with the standard library's HMAC as the page says it."""

from __future__ import annotations

import hashlib
import hmac

from tests.vectors.write import write

KEY = hashlib.sha256(b"assay test vector: draw").digest()
DOMAINS = {"audit": b"assay.draw.audit.v1\0", "replica": b"assay.draw.replica.v1\0"}
RATES = (0, 50_000, 250_000, 500_000, 999_999, 1_000_000)


def make() -> None:
    for draw, domain in DOMAINS.items():
        for number in range(4):
            digest = hashlib.sha256(f"payload {number}".encode()).digest()
            fraction = int.from_bytes(hmac.new(KEY, domain + digest, "sha256").digest()[:8], "big")
            # The edge: the smallest rate that draws it, and one less.
            edge = fraction * 10**6 // 2**64 + 1
            rates = sorted({*RATES, edge - 1, edge})
            write("audit-draw", f"{draw}-{number}", {
                "kind": "audit-draw", "draw": draw, "key": KEY.hex(), "key_sha256": hashlib.sha256(KEY).hexdigest(),
                "digest": digest.hex(), "fraction": f"{fraction:016x}",
                "drawn": [[rate, fraction * 10**6 < rate * 2**64] for rate in rates],
            })
