"""An evidence file: one submission with everything a stranger needs to judge it offline.

::

    "ASSAYEV1" | u32 little-endian header length | header: canonical JSON | bundle bytes

The header holds the signed messages as DSSE objects and two public keys. Nothing in the file is trusted for being
there: the reader checks it all against the run's root key. Spec: ``docs/spec/evidence.md``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from protocol import canonical
from protocol.envelope import Envelope
from protocol.errors import PeerFault, code
from protocol.identity import public_key_of
from protocol.log_proof import LogProof

E_EVIDENCE = code("E_EVIDENCE", "an evidence file is malformed")

MAGIC: Final = b"ASSAYEV1"
#: Longest header, in bytes: thousands of checkpoint manifests fit, a parser bomb does not.
MAX_HEADER_BYTES: Final = 64 * 2**20
#: Longest bundle, in bytes; the bundle's own decoder is stricter about what is inside.
MAX_BUNDLE_BYTES: Final = 256 * 2**20
MAX_VERDICTS: Final = 64
MAX_CHECKPOINTS: Final = 16_384
_KEYS: Final = frozenset(
    {"checkpoints", "commitment", "lease", "node_public_key", "receipt", "root_public_key", "run_manifest", "verdicts"}
)
#: Absent from a node's own copy, which was made before anything was in the log.
_OPTIONAL: Final = frozenset({"log"})
_PREFIX: Final = len(MAGIC) + 4
#: Longest file, in bytes.
MAX_FILE_BYTES: Final = _PREFIX + MAX_HEADER_BYTES + MAX_BUNDLE_BYTES


@dataclass(frozen=True)
class Evidence:
    """One submission and what its judgement rests on; all messages still in their envelopes, unchecked."""

    root_public_key: bytes  #: the key the run manifest claims to be signed by; compare it with the one you know
    node_public_key: bytes  #: its SHA-256 must be the node id of the lease
    run_manifest: Envelope
    lease: Envelope
    commitment: Envelope
    receipt: Envelope | None  #: None: the node's own copy, made before the coordinator answered
    verdicts: tuple[Envelope, ...]
    checkpoints: tuple[Envelope, ...]
    #: manifests of every version the rollouts used, down to the nearest anchor before them, oldest first
    bundle: bytes
    log: LogProof | None = None  #: receipt, verdicts and all else on this submission, as entries of the run's log

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of the encoded file."""
        return hashlib.sha256(encode(self)).hexdigest()


def encode(evidence: Evidence) -> bytes:
    """The bytes of an evidence file; the same evidence always gives the same bytes."""
    receipt = evidence.receipt
    fields = {
        "root_public_key": evidence.root_public_key.hex(),
        "node_public_key": evidence.node_public_key.hex(),
        "run_manifest": evidence.run_manifest.to_dict(),
        "lease": evidence.lease.to_dict(),
        "commitment": evidence.commitment.to_dict(),
        "receipt": None if receipt is None else receipt.to_dict(),
        "verdicts": [envelope.to_dict() for envelope in evidence.verdicts],
        "checkpoints": [envelope.to_dict() for envelope in evidence.checkpoints],
    }
    header = canonical.encode(fields | ({} if evidence.log is None else {"log": evidence.log.to_dict()}))
    return MAGIC + len(header).to_bytes(4, "little") + header + evidence.bundle


def decode(data: bytes) -> Evidence:
    """Strictly parse an evidence file. No signature is checked here.

    Raises:
        PeerFault: ``E_EVIDENCE``, ``E_TOO_LARGE``, ``E_JSON``, ``E_ENVELOPE`` or ``E_LOG_ENTRY``.
    """
    if data[: len(MAGIC)] != MAGIC:
        fault = _malformed(f"a file that begins with {MAGIC.decode()}", repr(data[: len(MAGIC)]))
        if data.startswith(b'{"format":"assay-log'):
            fault.hint = "this is a log: assay audit log FILE"
        raise fault
    length = int.from_bytes(data[len(MAGIC) : _PREFIX], "little")
    if len(data) < _PREFIX or length > MAX_HEADER_BYTES or len(data) - _PREFIX < length:
        raise _malformed(f"a header of {length} bytes (at most {MAX_HEADER_BYTES})", f"{len(data)} bytes in all")
    bundle = data[_PREFIX + length :]
    if not 0 < len(bundle) <= MAX_BUNDLE_BYTES:
        raise _malformed(f"a bundle of 1 to {MAX_BUNDLE_BYTES} bytes", f"{len(bundle)} bytes")
    header = canonical.decode(data[_PREFIX : _PREFIX + length], max_bytes=MAX_HEADER_BYTES)
    if not isinstance(header, dict) or set(header) - _OPTIONAL != _KEYS:
        keys = sorted(header) if isinstance(header, dict) else header
        raise _malformed(f"keys {', '.join(sorted(_KEYS))}", str(keys))
    receipt = header["receipt"]
    return Evidence(
        root_public_key=_public_key(header["root_public_key"]),
        node_public_key=_public_key(header["node_public_key"]),
        run_manifest=Envelope.from_dict(header["run_manifest"]),
        lease=Envelope.from_dict(header["lease"]),
        commitment=Envelope.from_dict(header["commitment"]),
        receipt=None if receipt is None else Envelope.from_dict(receipt),
        verdicts=_envelopes(header["verdicts"], "verdicts", MAX_VERDICTS),
        checkpoints=_envelopes(header["checkpoints"], "checkpoints", MAX_CHECKPOINTS),
        bundle=bundle,
        log=LogProof.from_dict(header["log"]) if "log" in header else None,
    )


def _envelopes(value: Any, name: str, limit: int) -> tuple[Envelope, ...]:
    if not isinstance(value, list) or len(value) > limit:
        raise _malformed(f"{name}: a list of at most {limit}", str(value)[:80])
    return tuple(Envelope.from_dict(item) for item in value)


def _public_key(value: Any) -> bytes:
    key = public_key_of(value)
    if key is None:
        raise _malformed("a public key of 64 lower-case hex digits", str(value)[:80])
    return key


def _malformed(expected: str, got: str) -> PeerFault:
    return PeerFault(E_EVIDENCE, "malformed evidence file", expected=expected, got=got[:200])
