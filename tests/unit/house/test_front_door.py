"""The command line as a stranger meets it."""

import importlib
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import assay
from protocol.errors import E_CONFIG, E_STORE, E_USAGE, AssayError, LocalFault


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "assay", *arguments], capture_output=True, text=True, timeout=200, check=False, cwd=cwd
    )


def test_the_overview_names_every_part() -> None:
    result = run("--help")
    assert result.returncode == 0
    for name in assay.PARTS:
        assert f"  {name} " in result.stdout
    assert "Example" in result.stdout


def test_help_is_quick() -> None:
    """Processor time, which does not depend on what else the machine does; the best of a few tries."""
    tries = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        tries.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(tries) < 0.3


def test_an_unknown_command_is_a_usage_error() -> None:
    result = run("fly")
    assert (result.returncode, "fly" in result.stderr) == (2, True)


def test_version() -> None:
    assert run("--version").stdout.strip() == f"assay {assay.__version__}"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LocalFault(E_CONFIG, "steps does not fit", expected="a number", got="many", hint="say 3"), 2),
        (LocalFault(E_USAGE, "bad call"), 2),
        (LocalFault(E_STORE, "the disk is gone"), 1),
    ],
)
def test_errors_end_in_words_and_a_status(
    error: AssayError, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def main(self, **_: object) -> None:
            raise error

    monkeypatch.setattr(typer.main, "get_command", lambda _: Broken())
    with pytest.raises(SystemExit) as end:
        assay.main(["node"])
    assert end.value.code == status
    told = capsys.readouterr().err
    assert told.startswith(f"error {error.code}: {error.message}")
    for value in (error.expected, error.got, error.hint):
        assert value is None or str(value) in told
    assert "Traceback" not in told


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def main(self, **_: object) -> None:
            raise LocalFault(E_STORE, "the disk is gone")

    monkeypatch.setattr(typer.main, "get_command", lambda _: Broken())
    with pytest.raises(LocalFault, match="the disk is gone"):
        assay.main(["--debug", "node"])


def leaves(command: Any, path: list[str]) -> Iterator[list[str]]:
    """Every command below ``command`` that is not a group."""
    members = getattr(command, "commands", None)
    if not members:
        yield path
        return
    for name, member in members.items():
        yield from leaves(member, [*path, name])


@pytest.mark.parametrize("part", list(assay.PARTS))
def test_every_command_has_a_help_text_with_an_example(part: str) -> None:
    app = importlib.import_module(assay.PARTS[part][0]).app
    missing = []
    for path in leaves(typer.main.get_command(app), []):
        result = CliRunner().invoke(app, [*path, "--help"])
        assert result.exit_code == 0, result.output
        if "xample" not in result.output:
            missing.append(" ".join([part, *path]))
    assert missing == []


@pytest.mark.parametrize("page", ["errors", "settings"])
def test_the_pages_of_error_codes_and_settings_are_current(root: Path, page: str) -> None:
    result = subprocess.run(
        [sys.executable, str(root / "docs" / f"generate_{page}.py"), "--check"], capture_output=True, text=True,
        timeout=200, check=False,
    )
    assert result.returncode == 0, result.stderr
