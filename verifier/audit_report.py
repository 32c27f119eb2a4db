"""Audits as JSON: one object for every outcome, with a schema version. Keys: ``docs/auditing.md``, "Machines"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.causes import advice, likely_causes
from protocol.errors import AssayError
from verifier.audit import Audit
from verifier.audit_exit import SCHEMA, SCHEMA_VERSION
from verifier.log_audit import LogAudit


def submission_json(result: Audit, file: Path, *, pinned: bool) -> str:
    """An audit of one evidence file."""
    judgement, first = result.judgement, result.first_failure
    return _dump("submission", judgement.outcome, judgement.code, {
        "file": str(file), "tiers": list(judgement.tiers), "recomputed": result.recomputed, "in_log": result.in_log,
        "run_id": result.run.run_id, "root": result.root, "root_pinned": pinned, "node_id": result.node_id,
        "lease_id": result.lease.lease_id, "group": result.lease.group, "start_version": result.lease.start_version,
        "samples": list(judgement.samples), "rewards_micro": list(judgement.rewards_micro), "tokens": judgement.tokens,
        "first_failure": None if first is None else first.model_dump(mode="json"),
        "likely_causes": list(result.causes),
        "findings": [finding.model_dump(mode="json") for finding in judgement.findings],
        "verdicts": [verdict.model_dump(mode="json") for verdict in result.verdicts],
        "verdicts_ignored": result.verdicts_ignored,
        "ignored": [{"signers": list(one.signers), "code": one.code, "why": one.why} for one in result.ignored],
    })


def log_json(kind: str, result: LogAudit, source: str, root: str, *, pinned: bool, **more: Any) -> str:
    """An audit of a log, ``kind`` "log" or "run". ``pinned``: the root key was given by whoever asks."""
    return _dump(kind, result.outcome, result.code, {
        "source": source, "run_id": result.run.run_id, "root": root, "root_pinned": pinned,
        "head": result.note, "size": result.head.size,
        "entries_read": result.read, "conflicting_heads": list(result.conflicts),
        "likely_causes": list(likely_causes(result.code)),
        "hint": None if result.code is None else advice(result.code),
        "findings": [finding.model_dump(mode="json") for finding in result.report.findings], **more,
    })


def error_json(kind: str, outcome: str, error: AssayError) -> str:
    """An audit that could not be done."""
    return _dump(kind, outcome, error.code, {
        "message": error.message, "expected": None if error.expected is None else str(error.expected),
        "got": None if error.got is None else str(error.got), "hint": error.hint, "findings": [],
        "likely_causes": list(likely_causes(error.code, error.step)),
    })


def _dump(kind: str, outcome: str, code: str | None, fields: dict[str, Any]) -> str:
    head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "kind": kind, "outcome": outcome, "code": code}
    return json.dumps(head | fields, indent=2)
