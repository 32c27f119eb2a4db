"""One process of the network: a part's command in a process group of its own, with its own log file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import protocol
from protocol.errors import LocalFault, code

E_UP_COMMAND = code("E_UP_COMMAND", "a command that assay up ran to prepare the network failed")

#: Two busy processes with two OpenMP threads each run about ten times slower than with one thread each.
ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
}
#: How much of a log is quoted when a process fails.
TAIL_LINES: Final = 12
#: How often a command that prepares the network is looked at, in seconds.
LOOK_S: Final = 0.1


class Stopped(Exception):
    """A command was ended because somebody said stop."""


def environment() -> dict[str, str]:
    """The environment of every process: this tree first on the path, one thread each."""
    tree = str(Path(protocol.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    path = tree if not inherited else f"{tree}{os.pathsep}{inherited}"
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": path}


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log file, or why there are none."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:])


def run_command(
    arguments: Sequence[str], log: Path, timeout_s: float, should_stop: Callable[[], bool] = lambda: False
) -> str:
    """Run ``assay ARGUMENTS`` to its end and return what it printed; both streams are also appended to ``log``.

    Raises:
        Stopped: ``should_stop`` said so; the command was killed.
        LocalFault: ``E_UP_COMMAND`` when it exits with another status than 0 or takes longer than ``timeout_s``.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "assay", *arguments]
    with log.open("ab") as errors:
        errors.write(f"$ assay {' '.join(arguments)}\n".encode())
        errors.flush()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment(),
            start_new_session=True,
        )
        try:
            output = _output(child, timeout_s, should_stop)
        except BaseException as error:
            _signal_group(child, signal.SIGKILL)
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise LocalFault(
                E_UP_COMMAND, f"assay {' '.join(arguments[:2])} did not end", expected=f"<= {timeout_s:.0f} s", got=log
            ) from None
        errors.write(output)
    if child.returncode != 0:
        raise LocalFault(
            E_UP_COMMAND, f"assay {' '.join(arguments[:2])} failed", expected="exit status 0", got=child.returncode,
            hint=f"the end of {log}:\n{tail(log)}",
        )
    return output.decode(errors="replace")


def _output(child: subprocess.Popen[bytes], timeout_s: float, should_stop: Callable[[], bool]) -> bytes:
    deadline = time.monotonic() + timeout_s
    while True:
        if should_stop():
            raise Stopped
        try:
            return child.communicate(timeout=LOOK_S)[0]
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise


class Child:
    """A long-lived process, started again and again under the same name."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, extra: Mapping[str, str] | None = None):
        self.name = name
        self.arguments = list(arguments)
        self.log = log
        self._extra = dict(extra or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def exit_status(self) -> int | None:
        """Exit status of the last start (negative: killed by that signal); None while it runs or never ran."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it; its output goes to the end of its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "coordinator.up_leash", str(os.getpid()), sys.executable, "-m", "assay",
                 *self.arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**environment(), **self._extra},
                start_new_session=True,
            )

    def terminate(self) -> None:
        """Ask it to drain."""
        if self._process is not None:
            _signal_group(self._process, signal.SIGTERM)

    def kill(self) -> None:
        """End it and whatever it started, now."""
        if self._process is not None:
            _signal_group(self._process, signal.SIGKILL)
            self._process.wait()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within ``timeout_s``."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the process's group while the process is not yet reaped, so that the id is still its own."""
    if process.poll() is None:
        os.killpg(process.pid, number)
