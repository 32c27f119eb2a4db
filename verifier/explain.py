"""``assay audit explain``: what a code means, what usually lies behind it, what to do; or a report in words."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from protocol.causes import advice, likely_causes
from protocol.errors import E_NOT_FOUND, E_USAGE, LocalFault

#: Parts of the system whose codes are known; their sources lie beside this package and are read, not imported.
_PARTS: Final = ("protocol", "verifier", "coordinator", "node", "learner")
_CODE: Final = re.compile(r"E_[A-Z0-9_]{2,60}")
_MAX_REPORT_BYTES: Final = 64 * 2**20


def explain(what: str, *, as_json: bool) -> str:
    """An explanation of a code, or of the JSON report in a file.

    Raises:
        LocalFault: ``E_USAGE`` for what is neither; ``E_NOT_FOUND`` for a code that nobody registers.
    """
    path = Path(what)
    report = _report(path) if path.is_file() else None
    name = what.upper() if report is None else report["code"]
    if report is None and not _CODE.fullmatch(name):
        raise LocalFault(E_USAGE, "neither a code nor a report", expected="E_... or a file of --json", got=what[:80])
    found = None if name is None else _explanation(name)
    if as_json:
        return json.dumps(found if report is None else {"report": _gist(report), "explanation": found}, indent=2)
    lines = [] if report is None else _told(report)
    return "\n".join(lines + ([] if found is None else _lines(found)))


def meanings() -> dict[str, str]:
    """Code -> meaning, of every part."""
    return dict(_registrations(Path(__file__).resolve().parent.parent))


def _explanation(name: str) -> dict[str, Any]:
    meaning = meanings().get(name)
    if meaning is None:
        raise LocalFault(E_NOT_FOUND, "no such code", got=name, hint="docs/errors.md lists all codes")
    return {"code": name, "meaning": meaning, "likely_causes": list(likely_causes(name)), "what_to_do": advice(name)}


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['code']}: {found['meaning']}"]
    if found["likely_causes"]:
        lines += ["likely causes, likeliest first:", *(f"  - {cause}" for cause in found["likely_causes"])]
    return [*lines, f"what to do: {found['what_to_do']}"]


def _report(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_REPORT_BYTES:
            raise ValueError("too large")
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["schema"] != "assay.audit" or not isinstance(report["findings"], list):
            raise ValueError("another schema")
        if not (report["code"] is None or isinstance(report["code"], str)):
            raise ValueError("a code that is no text")
        _told(report)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LocalFault(
            E_USAGE, f"{path} is no report of an audit", expected="what assay audit --json printed",
            got=str(error)[:120],
        ) from None
    return dict(report)


def _gist(report: dict[str, Any]) -> dict[str, Any]:
    failed = [finding for finding in report["findings"] if not finding["ok"]]
    return {
        "kind": report["kind"], "outcome": report["outcome"], "code": report["code"],
        "checks": len(report["findings"]), "failed": failed,
    }


def _told(report: dict[str, Any]) -> list[str]:
    gist = _gist(report)
    lines = [
        f"{gist['outcome'].upper()} {gist['code'] or ''}".rstrip()
        + f": {len(gist['failed'])} of {gist['checks']} checks do not hold"
    ]
    for finding in gist["failed"]:
        placed = finding.get("position") is not None
        place = f" (sample {finding['sample']}, position {finding['position']})" if placed else ""
        lines.append(f"  {finding['check']}{place}: expected {finding['expected']}, got {finding['got']}")
    return lines


def _registrations(root: Path) -> Iterator[tuple[str, str]]:
    for part in _PARTS:
        for file in sorted((root / part).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if 'code("E_' not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "code":
                    name, meaning = (ast.literal_eval(argument) for argument in node.args)
                    yield name, meaning
