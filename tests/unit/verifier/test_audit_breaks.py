"""``assay audit`` that breaks down accuses nobody: whatever is raised, the exit code is 4, and Ctrl-C is 130."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import assay
from protocol.errors import E_INTERNAL
from tests.adversary.world import ROOT, World
from tests.fakes.logged_evidence import audit_json, logged, verdict_on
from verifier import explain, log_cli
from verifier.audit_cli import app

RUNNER = CliRunner()
STRANGE: list[Any] = [["x"], {"x": []}, 7, None, "\ud7ff"]
UNFORESEEN = [TypeError("unhashable"), MemoryError(), RecursionError("too deep"), RuntimeError("\x1b[2J"), EOFError(),
              OSError(5, "Input/output error"), ValueError("I/O operation on closed file")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), max_new_tokens=8)


def raising(error: BaseException) -> Any:
    def step(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    return step


@pytest.mark.parametrize("value", STRANGE, ids=repr)
@pytest.mark.parametrize("name", ["sha256", "receipt_id", "outcome", "code", "tiers", "verifier_id", "counted"])
def test_no_entry_that_the_coordinator_signed_speaks_against_the_node(
    world: World, write: Any, honest: Any, name: str, value: Any
) -> None:
    """A ``fail`` by itself would be a word against a node that did nothing wrong."""
    verdict = verdict_on(world, honest)
    for log in (
        logged(world, honest, verdict, more=[{name: value}]), logged(world, honest, verdict, verdict={name: value}),
        logged(world, honest, verdict, submitted={name: value}),
    ):
        path = write(honest, verdicts=(verdict,), log=log)
        status, found = audit_json(path)
        assert (status, found["outcome"]) in ((4, "inconclusive"), (0, "pass"))
        assert found["code"] != E_INTERNAL  # the form is looked at before anything is read


def test_entries_in_a_strange_form_are_told_before_they_are_read(world: World, write: Any, honest: Any) -> None:
    verdict = verdict_on(world, honest)
    log = logged(world, honest, verdict, more=[{"sha256": ["x"]}])
    status, found = audit_json(write(honest, verdicts=(verdict,), log=log))
    assert (status, found["outcome"], found["code"], found["in_log"]) == (4, "inconclusive", "E_LOG_ENTRY", False)
    [failed] = [finding for finding in found["findings"] if not finding["ok"]]
    assert failed["check"].startswith("L.1")
    assert "entry 3, verdict: sha256" in failed["got"]
    assert any("coordinator signed" in cause for cause in found["likely_causes"])


@pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("verb", ["file", "log", "run", "explain"])
def test_what_nobody_foresaw_is_inconclusive_in_every_command(
    monkeypatch: pytest.MonkeyPatch, write: Any, honest: Any, verb: str, error: Exception
) -> None:
    place, name = {"file": ("verifier.audit", "audit"), "log": (log_cli, "audit"), "run": (log_cli, "audit_run"),
                   "explain": (explain, "explain")}[verb]
    monkeypatch.setattr(sys.modules[place] if isinstance(place, str) else place, name, raising(error))
    words = [verb, "E_REPLAY" if verb == "explain" else write(honest)]
    result = RUNNER.invoke(app, words)
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("inconclusive: E_")
    assert "Traceback" not in result.stderr
    assert "\x1b" not in result.stderr
    result = RUNNER.invoke(app, [*words, "--json"])
    found = json.loads(result.stdout)
    expected = "E_FILE" if isinstance(error, OSError) else E_INTERNAL
    assert (result.exit_code, found["outcome"], found["code"]) == (4, "inconclusive", expected)
    assert found["kind"] == {"file": "submission", "explain": "explanation"}.get(verb, verb)
    assert (expected == "E_FILE") or "--debug" in found["hint"]


def test_a_part_that_does_not_load_is_no_fail(monkeypatch: pytest.MonkeyPatch, write: Any, honest: Any) -> None:
    monkeypatch.delattr("verifier.log_cli")
    monkeypatch.setitem(sys.modules, "verifier.log_cli", None)
    result = RUNNER.invoke(app, ["log", write(honest), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["code"]) == (4, E_INTERNAL)


def test_a_page_that_breaks_changes_no_outcome(
    monkeypatch: pytest.MonkeyPatch, write: Any, honest: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("verifier.audit_page.write_page", raising(KeyError("x")))
    result = RUNNER.invoke(app, [write(honest), "--json", "--html", str(tmp_path / "a.html")])
    assert (result.exit_code, json.loads(result.stdout)["outcome"]) == (0, "pass")
    assert "the page was not written: E_INTERNAL" in result.stderr


@pytest.mark.parametrize("debug", [False, True])
def test_tracebacks_are_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write: Any, honest: Any, debug: bool
) -> None:
    monkeypatch.setattr("verifier.audit.audit", raising(TypeError("unhashable")))
    with pytest.raises(SystemExit) as end:
        assay.main([*(["--debug"] if debug else []), "audit", write(honest), "--json"])
    told = capsys.readouterr()
    assert (end.value.code, json.loads(told.out)["code"]) == (4, E_INTERNAL)
    assert ("Traceback" in told.err) == debug


def test_a_closed_output_is_no_fail(write: Any, honest: Any) -> None:
    for words in ("", "--json"):
        line = f'exec "{sys.executable}" -m assay audit "{write(honest)}" {words} >&-'
        done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=300, check=False)
        assert (done.returncode, b"Traceback" in done.stderr) == (4, False), done.stderr


def test_an_interrupt_is_130(write: Any, honest: Any, tmp_path: Path) -> None:
    # Whoever runs this in the background of a shell may have told it to ignore interrupts.
    wait = "import signal, sys, time, verifier.audit as a\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    wait += "a.audit = lambda *_: (print('on', flush=True), time.sleep(300))\n"
    call = f"import assay\nassay.main(['audit', {write(honest)!r}, '--root', {ROOT.public_key.hex()!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", wait + call], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=200)
    assert process.returncode == 130
