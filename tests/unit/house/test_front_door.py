"""The command line as a stranger meets it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import assay
from protocol.errors import E_CONFIG, E_STORE, E_USAGE, AssayError, LocalFault


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "assay", *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=cwd
    )


def test_the_overview_names_every_part() -> None:
    result = run("--help")
    assert result.returncode == 0
    for name in assay.PARTS:
        assert f"  {name} " in result.stdout
    assert "Example" in result.stdout


def test_help_is_quick() -> None:
    """Best of several tries, so that a busy machine does not decide; the promise is 0.3 s on a quiet one."""
    tries = []
    for _ in range(8):
        before = time.perf_counter()
        run("--help")
        tries.append(time.perf_counter() - before)
        if tries[-1] < 0.3:
            return
    pytest.fail(f"assay --help took {min(tries):.2f} s at best")


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

    monkeypatch.setattr(assay.typer.main, "get_command", lambda _: Broken())
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

    monkeypatch.setattr(assay.typer.main, "get_command", lambda _: Broken())
    with pytest.raises(LocalFault, match="the disk is gone"):
        assay.main(["--debug", "node"])


def commands() -> list[list[str]]:
    """Every command of every part, found by walking the groups."""
    import importlib

    import typer

    found = []
    for part, (module, _) in assay.PARTS.items():
        command = typer.main.get_command(importlib.import_module(module).app)
        members = getattr(command, "commands", None)
        found += [[part, name] for name in members] if members else [[part]]
    return found


def test_every_command_has_a_help_text_with_an_example() -> None:
    missing = []
    for command in commands():
        result = run(*command, "--help")
        assert result.returncode == 0, result.stderr
        if "xample" not in result.stdout:
            missing.append(" ".join(command))
    assert missing == []


def test_the_page_of_error_codes_is_current(root: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(root / "docs" / "generate_errors.py"), "--check"], capture_output=True, text=True,
        timeout=60, check=False,
    )
    assert result.returncode == 0, result.stderr
