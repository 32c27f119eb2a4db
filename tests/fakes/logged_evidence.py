"""The coordinator's part of an evidence file, verdicts and what a log holds of them; and what an audit says of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from typer.testing import CliRunner

from protocol.envelope import Envelope
from protocol.identity import Identity
from protocol.log_entry import LogEntry
from protocol.log_head import LogHead, origin_of
from protocol.log_proof import LogProof, ProvenEntry
from protocol.messages import Receipt, Verdict
from protocol.transparency import inclusion_proof, root
from tests.adversary.world import COORDINATOR, VERIFIER, World
from tests.fakes.log_tree import Tree
from verifier.audit_cli import app
from verifier.submission import Submission


def audit_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of ``assay audit ... --json``; no traceback."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def verdict_on(world: World, submission: Submission, **changes: object) -> Envelope:
    """A verifier's verdict on a submission of the first lease: a pass, unless a keyword says otherwise."""
    fields = {
        "run_id": world.run.run_id, "verifier_id": VERIFIER.id, "node_id": world.lease().node_id,
        "lease_id": world.lease().lease_id, "receipt_sha256": submission.receipt.digest, "outcome": "pass",
        "code": None, "tiers": ["T0", "T1"], "findings": [], "samples": [], "rewards_micro": [], "tokens": 0,
        "issued_at_ms": 0,
    }
    return Verdict(**(fields | changes)).sign(VERIFIER)


def logged(
    world: World, submission: Submission, envelope: Envelope, signer: Identity = COORDINATOR,
    more: Sequence[dict[str, object]] = (), **bodies: dict[str, object],
) -> LogProof:
    """The log's part of an evidence file: a head over receipt, verdict and something else, with their proofs.

    Args:
        more: what further entries change of the verdict's.
        bodies: what is changed of the entry of each kind.
    """
    receipt = Receipt.from_payload(submission.receipt.payload)
    said = Verdict.from_payload(envelope.payload)
    about: dict[str, dict[str, object]] = {
        "invited": {},
        "submitted": {
            "receipt_id": receipt.receipt_id, "sha256": submission.receipt.digest, "node_id": receipt.node_id,
            "commitment_sha256": receipt.commitment_sha256, "epoch": receipt.epoch, "rate_ppm": 1_000_000,
        },
        "verdict": {
            "receipt_id": receipt.receipt_id, "sha256": envelope.digest, "verifier_id": said.verifier_id,
            "outcome": said.outcome, "code": said.code, "tiers": list(said.tiers), "counted": True,
        },
    }
    for kind, changes in bodies.items():
        about[kind] = about[kind] | changes
    told = [*about.items(), *(("verdict", about["verdict"] | changes) for changes in more)]
    entries = [LogEntry(index, 0, kind, body) for index, (kind, body) in enumerate(told)]
    tree = Tree(entry.leaf for entry in entries)
    head = LogHead(origin_of(world.run.run_id), len(entries), root(tree, len(entries)))
    proven = [ProvenEntry(entry, tuple(inclusion_proof(tree, entry.index, len(entries)))) for entry in entries[1:]]
    return LogProof(head.sign(signer), tuple(proven))
