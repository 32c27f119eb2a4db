"""Drives ``assay up`` from outside, as a user's terminal would: command line in, JSON lines out, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx


class Up:
    """One start of ``assay up``; at the end of its ``with`` nothing of it is left running."""

    def __init__(self, directory: Path, *arguments: str):
        self.directory = directory
        self._command = [sys.executable, "-m", "assay", "up", str(directory), "--json", *arguments]
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        self.errors = ""
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    # -- what it says ------------------------------------------------------------------------------------

    def wait_for(self, found: Callable[[list[dict[str, Any]]], Any], timeout_s: float, what: str) -> Any:
        """The first true value of ``found(events)``."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                said_all = not self._readers[0].is_alive()  # asked first: what it said before it ended counts
                if value := found(self.events):
                    return value
                left = deadline - time.monotonic()
                assert left > 0, f"no {what} within {timeout_s} s\n{self.story()}"
                assert not said_all, f"ended before {what}\n{self.story()}"
                self._changed.wait(min(left, 0.5))

    def wait_for_version(self, version: int, timeout_s: float) -> None:
        """Until a version is published."""
        self.wait_for(lambda events: newest(events) >= version, timeout_s, f"version {version}")

    def end(self, timeout_s: float) -> int:
        """Its exit status."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {timeout_s} s\n{self.story()}") from None
        for reader in self._readers:
            reader.join()
        return status

    def story(self) -> str:
        """The last events and the end of every log, for a failing test."""
        parts = [json.dumps(event) for event in self.events[-12:]] + [self.errors[-3000:]]
        for log in sorted((self.directory / "logs").glob("*.log")):
            parts += [f"--- {log.name}", log.read_text(errors="replace")[-1500:]]
        return "\n".join(parts)

    # -- what is done to it ------------------------------------------------------------------------------

    def pid(self, process: str) -> int:
        """Process id of a part's newest start."""
        starts = [e for e in self.events if e["event"] in {"started", "restarted"} and e["process"] == process]
        assert starts, f"{process} never started"
        return int(starts[-1]["pid"])

    def kill(self, process: str, timeout_s: float = 60.0) -> None:
        """``kill -9`` one part, once it runs, and wait until it is back."""
        self.wait_for(lambda events: any(e["event"] == "started" and e["process"] == process for e in events),
                      timeout_s, f"start of {process}")
        before = len(self.events)
        os.kill(self.pid(process), signal.SIGKILL)
        self.wait_for(
            lambda events: any(e["event"] == "restarted" and e["process"] == process for e in events[before:]),
            timeout_s, f"restart of {process}",
        )

    def has_weights(self, node: str) -> bool:
        """Whether a node has come so far that it holds verified weights."""
        return (self.directory / "nodes" / node / "state.json").exists()

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def pids(self) -> list[int]:
        """Process ids of every start of every part."""
        return [int(e["pid"]) for e in self.events if e["event"] in {"started", "restarted"} and e["pid"]]

    # -- the coordinator ---------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The coordinator's address."""
        return f"http://127.0.0.1:{json.loads((self.directory / 'up.json').read_text())['port']}"

    def get(self, path: str) -> Any:
        """JSON from the coordinator, which may just be coming back."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return httpx.get(self.url + path, timeout=20, trust_env=False).raise_for_status().json()
            except httpx.TransportError:
                assert time.monotonic() < deadline, f"no answer to {path}"
                time.sleep(0.2)

    def log_entries(self) -> list[dict[str, Any]]:
        """The coordinator's whole append-only log."""
        entries: list[dict[str, Any]] = []
        while True:
            page = self.get(f"/v1/log?from={len(entries)}&limit=500")["entries"]
            entries += page
            if not page:
                return entries

    # -- reading -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.errors += line


def newest(events: list[dict[str, Any]]) -> int:
    """Newest version that a status told of; -1 when none did."""
    return max((e["version"] for e in events if e["event"] == "status" and e["version"] is not None), default=-1)


def is_gone(pid: int) -> bool:
    """Whether a process has ended (or is only waiting to be reaped)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second when it is reaped between opening and reading
        return True
