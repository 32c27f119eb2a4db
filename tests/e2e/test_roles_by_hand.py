"""Each role through its own command line, as the README says: operate, lend compute, audit."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.ports import unclaimed_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

VERSIONS = 2


def assay(*arguments: str, status: int = 0, timeout: float = 200) -> str:
    """Run a command to its end and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-m", "assay", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert result.returncode == status, f"{arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout + result.stderr


@contextmanager
def terminal(directory: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command left running in its own terminal; Ctrl-C at the end."""
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "assay", *arguments], stdout=log, stderr=log, start_new_session=True, cwd=directory
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def wait_until(found: Any, timeout_s: float, what: str, directory: Path) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := found()):
        told = {log.name: log.read_text(errors="replace")[-1500:] for log in sorted(directory.glob("*.log"))}
        logs = "\n".join(f"--- {name}\n{text}" for name, text in told.items())
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s\n{logs}"
        time.sleep(0.3)
    return value


def status(url: str) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = httpx.get(f"{url}/v1/status", timeout=10, trust_env=False).raise_for_status().json()
    except httpx.HTTPError:
        return None
    return value


def rollouts(url: str, state: str) -> int:
    """How many rollouts are in a state."""
    return int((status(url) or {}).get("rollouts", {}).get(state, 0))


def test_three_roles_in_separate_terminals(tmp_path: Path, tiny_model: Path) -> None:
    run, [port] = tmp_path / "run", unclaimed_ports(1)
    url = f"http://127.0.0.1:{port}"
    founded = assay(
        "coordinator", "init", str(run), "--preset", "tiny", "--model", str(tiny_model), "--port", str(port),
        "--max-versions", str(VERSIONS), "--set", "batch.groups_per_batch=8", "--set", "batch.group_size=4",
        "--set", "batch.samples_per_lease=4",
        "--set", "state_hash=blake3",
    )
    link = (run / "link.txt").read_text().strip()
    assert link in founded
    root = re.search(r"root=([0-9a-f]{64})", link)
    assert root is not None
    role = ["--coordinator", url, "--root", root.group(1)]
    with ExitStack() as terminals:
        def opened(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            return terminals.enter_context(terminal(tmp_path, name, *arguments))

        opened("coordinator", "coordinator", "serve", str(run))
        wait_until(lambda: status(url), 200, "coordinator", tmp_path)
        learner = opened(
            "learner", "learner", "run", *role, "--key", str(run / "keys" / "learner.key"),
            "--store", f"dir:{run / 'store'}", "--model", str(tiny_model), "--work", str(tmp_path / "learner"),
        )
        home = tmp_path / "home"
        assay("node", "join", link, "--home", str(home), "--name", "zoe")
        assay("node", "join", link, "--home", str(home), "--name", "zoe")  # repeating it is harmless
        drilled = assay("node", "run", "--home", str(home), "--drill", "int8", status=3)
        assert "E_DRILL_NOT_ENROLLED" in drilled
        node = opened("node", "node", "run", "--home", str(home))
        wait_until(lambda: rollouts(url, "pending"), 240, "rollout handed in", tmp_path)
        told = json.loads(assay("node", "status", "--home", str(home), "--json"))
        assert told["running"] is True  # without a verifier the run cannot have ended
        opened(
            "verifier", "verifier", "run", *role, "--key", str(run / "keys" / "verifier.key"),
            "--work", str(tmp_path / "verifier"),
        )
        wait_until(lambda: rollouts(url, "accepted"), 240, "accepted rollout", tmp_path)
        wait_until(lambda: learner.poll() is not None and node.poll() is not None, 400, "end of the run", tmp_path)
        assert (learner.returncode, node.returncode) == (0, 0)
        audit_one(url, run, home, root.group(1))
        keep_a_version(role, tmp_path)
    assert (run / "coordinator.db").exists()


def keep_a_version(role: list[str], directory: Path) -> None:
    """Everything published is whole, and what a stranger exports is the newest version until a bit of it changes."""
    out, cache = directory / "exported", ["--cache", str(directory / "cache")]
    assert "nothing bad" in assay("weights", "verify", *role, "--deep", *cache)
    assay("weights", "export", *role, "--out", str(out), *cache)
    said = assay("weights", "verify", *role, "--model", str(out), *cache)
    assert f"are version {VERSIONS}, bit for bit" in said
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (out / "model.safetensors").write_bytes(weights)
    assert "differs: " in assay("weights", "verify", *role, "--model", str(out), *cache, status=1)


def audit_one(url: str, run: Path, home: Path, root: str) -> None:
    """Any receipt of the run, audited by a stranger; a damaged file and a wrong root are named."""
    receipt = json.loads((home / "receipts.jsonl").read_text().splitlines()[0])["receipt"]
    receipt_id = json.loads(base64.b64decode(receipt["payload"]))["receipt_id"]
    file = home / "one.evidence"
    answer = httpx.get(f"{url}/v1/evidence/{receipt_id}", timeout=30, trust_env=False).raise_for_status()
    file.write_bytes(answer.content)
    store = str(run / "store")
    report = json.loads(assay("audit", str(file), "--checkpoint", store, "--root", root, "--json"))
    assert report["outcome"] == "pass"
    assert report["recomputed"] is True
    assay("audit", str(file), "--checkpoint", store, "--root", "00" * 32, status=3)
    assay("audit", str(home / "none.evidence"), status=2)
    broken = home / "broken.evidence"
    broken.write_bytes(file.read_bytes()[:-100])  # not what was committed to: nobody's fault can be shown with it
    assert "E_OBJECT_HASH" in assay("audit", str(broken), "--checkpoint", store, status=3)
    broken.write_bytes(file.read_bytes()[:100])
    assay("audit", str(broken), "--checkpoint", store, status=3)
