"""``assay audit explain``: what a code means, what usually lies behind it, what to do; or a report in words."""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from protocol.causes import advice, likely_causes
from protocol.errors import E_USAGE, LocalFault
from protocol.evidence import MAGIC
from protocol.paths import E_FILE
from protocol.text import printable
from verifier.audit_exit import SCHEMA, SCHEMA_VERSION

#: Parts of the system whose codes are known; their sources lie beside this package and are read, not imported.
_PARTS: Final = ("protocol", "verifier", "coordinator", "node", "learner")
_CODE: Final = re.compile(r"E_[A-Z0-9_]{2,60}")
_MAX_REPORT_BYTES: Final = 64 * 2**20


_JSON_NAMES: Final = {
    list: "list", str: "text", int: "number", float: "number", bool: "truth value", type(None): "null", dict: "object",
}
#: What an explanation needs of a report.
_REPORT: Final[dict[str, Callable[[Any], bool]]] = {
    "kind": lambda value: isinstance(value, str), "outcome": lambda value: isinstance(value, str),
    "code": lambda value: value is None or isinstance(value, str), "findings": lambda value: isinstance(value, list),
}


def explain(what: str, *, as_json: bool) -> str:
    """An explanation of a code, or of the JSON report in a file. A report's code may be one that is not known here.

    Raises:
        LocalFault: ``E_USAGE`` for what is neither, for a code that nobody registers, and for a report of a later form.
    """
    path = Path(what)
    report = _report(path) if _is_file(path) else None
    name = what.upper() if report is None else report["code"]
    if report is None and not _CODE.fullmatch(name):
        raise LocalFault(
            E_USAGE, "neither a code nor a report", expected="E_... or a file with what --json printed",
            got=f"the folder {what[:80]}" if _is_folder(path) else what[:80],
            hint="the code stands in the last line of an audit; docs/errors.md lists all",
        )
    found = None
    if name is not None:
        found = _explanation(name) if report is None else _explanation_in(report, name)
    if as_json:
        head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "kind": "explanation", "outcome": "pass"}
        told = found or {} if report is None else {"report": _gist(report), "explanation": found}
        return json.dumps(head | told, indent=2)
    lines = [] if report is None else _told(report)
    return "\n".join(printable(line) for line in lines + ([] if found is None else _lines(found)))


def meanings() -> dict[str, str]:
    """Code -> meaning, of every part."""
    return dict(_registrations(Path(__file__).resolve().parent.parent))


def _explanation(name: str) -> dict[str, Any]:
    meaning = meanings().get(name)
    if meaning is None:
        near = difflib.get_close_matches(name, meanings(), n=3, cutoff=0.5)
        raise LocalFault(
            E_USAGE, "no such code", expected=f"perhaps {' or '.join(near)}" if near else "a code of docs/errors.md",
            got=name[:80], hint="docs/errors.md lists all codes",
        )
    return {"code": name, "meaning": meaning, "likely_causes": list(likely_causes(name)), "what_to_do": advice(name)}


def _explanation_in(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The same for the code of a report, as the check that ended with it tells; it may be of a later release."""
    checks = (str(finding["check"]) for finding in report["findings"] if finding.get("code") == name)
    check = next(checks, "")
    return {
        "code": name, "meaning": meanings().get(name, "a code that this release does not know"),
        "likely_causes": list(likely_causes(name, check)), "what_to_do": advice(name, check),
    }


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False  # a name that no file can have


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['code']}: {found['meaning']}"]
    if found["likely_causes"]:
        lines += ["likely causes, likeliest first:", *(f"  - {cause}" for cause in found["likely_causes"])]
    return [*lines, f"what to do: {found['what_to_do']}"]


def _report(path: Path) -> dict[str, Any]:
    """The report in a file.

    Raises:
        LocalFault: ``E_USAGE`` when it holds something else; ``E_FILE`` when it cannot be read.
    """
    wrong = None
    try:
        data = b"" if path.stat().st_size > _MAX_REPORT_BYTES else path.read_bytes()
        report = json.loads(data)
        wrong = _strange(report)
    except OSError as error:
        raise LocalFault(E_FILE, f"cannot read {path}", got=error.strerror) from None
    except (ValueError, RecursionError):
        wrong = _kind_of(data)
    if wrong is None:
        return dict(report)
    hint = "audit it first: assay audit FILE --json > report.json" if data.startswith(MAGIC) else None
    raise LocalFault(
        E_USAGE, f"{path} is no report of an audit", expected="what assay audit --json printed", got=wrong, hint=hint
    )


def _kind_of(data: bytes) -> str:
    """What a file holds that is no JSON."""
    if not data:
        return f"an empty file, or one over {_MAX_REPORT_BYTES} bytes"
    return "an evidence file" if data.startswith(MAGIC) else f"no JSON: it begins with {data[:24]!r}"


def _strange(report: Any) -> str | None:
    """What keeps a JSON value from being a report; None when nothing does."""
    if not isinstance(report, dict):
        return f"a JSON {_JSON_NAMES[type(report)]}"
    if report.get("schema") != SCHEMA:
        keys = ", ".join(str(key) for key in list(report)[:8])
        return f"a JSON object of another schema, with the keys {keys[:200]}" if keys else "an empty JSON object"
    version = report.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        return f"schema version {str(version)[:80]}; this release reads up to {SCHEMA_VERSION}"
    for name, fits in _REPORT.items():
        if name not in report or not fits(report[name]):
            return f"{name} is missing" if name not in report else f"{name} is a JSON {_JSON_NAMES[type(report[name])]}"
    for number, finding in enumerate(report["findings"]):
        if not isinstance(finding, dict) or not {"check", "ok", "expected", "got"} <= finding.keys():
            return f"finding {number} has not the keys check, ok, expected, got"
    return None


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
        place = f" (sample {finding.get('sample')}, position {finding['position']})" if placed else ""
        lines.append(f"  {finding['check']}{place}: expected {finding['expected']}, got {finding['got']}")
    return lines


def _registrations(root: Path) -> Iterator[tuple[str, str]]:
    for part in _PARTS:
        for file in sorted((root / part).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if "code(" not in text or '"E_' not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "code":
                    name, meaning = (ast.literal_eval(argument) for argument in node.args)
                    yield name, meaning
