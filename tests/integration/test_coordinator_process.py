"""A real coordinator process on loopback: founded by the command line, killed, and asked what it remembers."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.api import JoinLink
from protocol.client import CoordinatorClient
from protocol.clock import SystemClock
from protocol.errors import AssayError
from protocol.identity import Identity
from protocol.messages import (
    Commitment,
    Lease,
    LeaseRequest,
    NodeHello,
    Receipt,
    RunManifest,
    UploadRequest,
    UsedCheckpoint,
)
from protocol.rollout import prompt_digest
from protocol.store import DirectoryStore
from tests.fakes.coordinator import FakeLearner, FakeVerifier
from tests.fakes.model_folder import make_model_folder
from tests.fakes.ports import unclaimed_ports

COORDINATOR = [sys.executable, "-m", "coordinator.cli"]


class Server:
    """``assay coordinator serve`` that can be killed and started again."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None
        [self.port] = unclaimed_ports(1)  # its own while it is down, too: admin commands find nobody there

    def start(self) -> str:
        (self.directory / "serve.json").unlink(missing_ok=True)
        log = (self.directory / "serve.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                [*COORDINATOR, "serve", str(self.directory), "--port", str(self.port)], stdout=log, stderr=log,
                env=os.environ | {"ASSAY_COORDINATOR_RATE_PER_S": "0"},
            )
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.directory / "serve.log").read_text()
            if (self.directory / "serve.json").exists():
                url = str(json.loads((self.directory / "serve.json").read_text())["url"])
                httpx.get(f"{url}/readyz", timeout=60).raise_for_status()
                return url
            time.sleep(0.05)
        raise AssertionError("the coordinator did not come up")

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    model, server = make_model_folder(tmp_path / "model"), Server(tmp_path / "run")
    made = subprocess.run(
        [*COORDINATOR, "init", str(tmp_path / "run"), "--preset", "tiny", "--model", str(model), "--seed", "7",
         "--set", "batch.groups_per_batch=1000", "--port", str(server.port)],
        check=True, capture_output=True, text=True, timeout=200,
    )
    assert "assay://" in made.stdout
    yield server
    if server.process is not None and server.process.poll() is None:
        server.end(signal.SIGKILL)


def test_what_was_acknowledged_survives_kill_9(server: Server) -> None:
    """Nodes submit without a pause while the server is killed at random; each receipt they hold is there afterwards."""
    submit_while_killed(server, seed=7, kills=3)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_what_was_acknowledged_survives_twenty_kills(server: Server, seed: int) -> None:
    submit_while_killed(server, seed=seed, kills=20)


def submit_while_killed(server: Server, *, seed: int, kills: int) -> None:
    """Nothing that was acknowledged is lost or paid twice, and the log has only grown."""
    link = JoinLink.parse((server.directory / "link.txt").read_text())
    url = server.start()
    with CoordinatorClient(url, None) as client:
        manifest = RunManifest.open(client.run_manifest(), link.root)
    publish_first(server, url, manifest)
    remembered = server.directory / "run.head"
    assert audit("log", url, link, remembered)["size"] > 0
    receipts: list[Receipt] = []
    stop = threading.Event()
    workers = [threading.Thread(target=work, args=(url, link, i, stop, receipts)) for i in range(2)]
    for worker in workers:
        worker.start()
    rng = random.Random(seed)
    for _ in range(kills):
        wait_until_longer(receipts, len(receipts) + 3)
        time.sleep(rng.random() / 10)  # somewhere inside the next requests
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        server.start()
    stop.set()
    for worker in workers:
        worker.join(timeout=200)
        assert not worker.is_alive()
    assert receipts, "no receipt was ever given"
    stored = DirectoryStore(server.directory / "store")
    for receipt in receipts:
        kept = httpx.get(f"{url}/v1/receipts/{receipt.receipt_id}", timeout=30).json()
        assert kept["state"] == "pending"
        assert stored.has(receipt.object_sha256)
    submitted = len({receipt.lease_id for receipt in receipts})
    with CoordinatorClient(url, None) as client:
        assert client.status()["tokens_generated"] == 8 * submitted
    check_credit_once(server, url, manifest, submitted)
    audited = audit("run", url, link, remembered)  # the log has only grown, whatever was killed, and the draws hold
    assert audited["draws"]["receipts"] == submitted
    assert server.end(signal.SIGTERM) == 0


def assay(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command, as a user calls it."""
    return subprocess.run(
        [sys.executable, "-m", "assay", *map(str, arguments)], capture_output=True, text=True, timeout=200, check=False
    )


def test_one_process_serves_a_run(server: Server) -> None:
    server.start()
    second = assay("coordinator", "serve", server.directory, "--port", 0)
    assert (second.returncode, second.stdout) == (2, "")
    assert "another assay coordinator works in" in second.stderr
    assert assay("coordinator", "nodes", "--dir", server.directory).returncode == 0  # still finds the first
    upgrade = assay("coordinator", "db", "upgrade", server.directory)
    assert (upgrade.returncode, "another assay coordinator" in upgrade.stderr) == (2, True)
    assert server.end(signal.SIGTERM) == 0
    assert not (server.directory / "serve.json").exists()
    upgrade = assay("coordinator", "db", "upgrade", server.directory)
    assert (upgrade.returncode, upgrade.stdout) == (0, "Nothing to do: the schema is up to date.\n")
    assert not list(server.directory.glob("*.backup"))


@pytest.mark.parametrize("verb", ["check", "upgrade", "backup"])
def test_the_database_of_a_run_that_is_not_there(tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in ("nowhere", "file", "folder"):
        found = assay("coordinator", "db", verb, tmp_path / name)
        assert (found.returncode, found.stdout) == (2, "")
        assert found.stderr.startswith("error E_CONFIG")
        assert "holds no run" in found.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def audit(verb: str, url: str, link: JoinLink, remembered: Path) -> dict[str, Any]:
    """What a stranger finds in the log with nothing but the root key and the head of the last time."""
    arguments = ["audit", verb, url, "--root", link.root, "--remember", str(remembered), "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "assay", *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def wait_until_longer(receipts: list[Receipt], length: int) -> None:
    deadline = time.monotonic() + 120
    while len(receipts) < length:
        assert time.monotonic() < deadline, "the nodes got no receipts"
        time.sleep(0.01)


def publish_first(server: Server, url: str, manifest: RunManifest) -> None:
    key = Identity.load(server.directory / "keys" / "learner.key")
    learner = FakeLearner(key, CoordinatorClient(url, key), SystemClock())
    store = DirectoryStore(server.directory / "store")
    first = learner.manifest(store, run_id=manifest.run_id, layout_sha256=manifest.model.layout_sha256).sign(key)
    learner.client.publish_checkpoint(first)
    learner.manifests.append(first)
    learner.client.publish_head(learner.head(run_id=manifest.run_id).sign(key))
    learner.client.close()


def work(url: str, link: JoinLink, number: int, stop: threading.Event, receipts: list[Receipt]) -> None:
    """Lease, upload, commit; every receipt that arrives is remembered."""
    key = Identity(bytes([number]) * 32)
    with CoordinatorClient(url, key, deadline_s=120, seed=number) as client:
        work_with(client, key, number, link, stop, receipts)


def work_with(
    client: CoordinatorClient, key: Identity, number: int, link: JoinLink, stop: threading.Event,
    receipts: list[Receipt],
) -> None:
    node = {"run_id": link.run_id, "node_id": key.id}
    now = SystemClock().now_ms
    client.register(
        NodeHello(
            run_id=link.run_id, public_key=key.public_key.hex(), name=f"node{number}", profile="torch-cpu-fp32",
            protocol_version=1, join_token=link.token, issued_at_ms=now(),
        )
    )
    turn = 0
    while not stop.is_set():
        turn += 1
        reply = client.lease(
            LeaseRequest(**node, nonce=f"{turn:032x}", max_leases=2, newest_version=0, issued_at_ms=now())
        )
        for envelope in reply.leases:
            lease = Lease.from_payload(envelope.payload)
            assert lease.prompt_sha256 == prompt_digest(lease.prompt_tokens)
            data = f"bundle {lease.lease_id}".encode()
            sha256 = hashlib.sha256(data).hexdigest()
            client.upload(
                UploadRequest(**node, object_sha256=sha256, object_bytes=len(data), issued_at_ms=now()), data
            )
            commitment = Commitment(
                **node, lease_id=lease.lease_id, lease_sha256=envelope.digest, bundle_root=sha256,
                object_sha256=sha256, object_bytes=len(data), rollouts=len(lease.samples), tokens=8,
                checkpoints=[
                    UsedCheckpoint(
                        version=lease.start_version, manifest_sha256=client.checkpoint(lease.start_version).digest
                    )
                ],
                profile="torch-cpu-fp32", issued_at_ms=now(),
            )
            receipts.append(Receipt.from_payload(client.submit(commitment).receipt.payload))
        stop.wait(0.02)


def check_credit_once(server: Server, url: str, manifest: RunManifest, submissions: int) -> None:
    """Every submission is judged, with a crash after each of the first few, and credited exactly once."""
    key = Identity.load(server.directory / "keys" / "verifier.key")
    verifier = FakeVerifier(key, CoordinatorClient(url, key, deadline_s=120), SystemClock())
    judged = 0
    while (job := verifier.claim(run_id=manifest.run_id)) is not None:
        verdict = verifier.verdict(job, run_id=manifest.run_id)
        verifier.client.verdict(verdict)
        judged += 1
        if judged == 1:
            server.end(signal.SIGKILL)
            server.start()
            assert verifier.client.verdict(verdict).duplicate is True
    nodes = verifier.client.status()["nodes"]
    verifier.client.close()
    assert judged == submissions
    assert sum(node["credit"] + node["credit_pending"] for node in nodes) == 8 * submissions


def test_bad_calls_are_explained_and_change_nothing(server: Server, tmp_path: Path) -> None:
    before = sorted(path.name for path in server.directory.iterdir())
    for arguments, status, code in (
        (["init", str(server.directory), "--model", str(tmp_path / "model")], 2, "E_CONFIG"),
        (["init", str(tmp_path / "new"), "--model", str(tmp_path / "nothing")], 2, "E_CONFIG"),
        (["init", str(tmp_path / "new"), "--model", str(tmp_path / "model"), "--preset", "huge"], 2, "E_CONFIG"),
        (["serve", str(tmp_path / "model")], 2, "E_CONFIG"),
        (["nodes", "--dir", str(tmp_path)], 2, "E_CONFIG"),
        (["ban", "zzzz", "--dir", str(server.directory), "--reason", "a test"], 2, "64 hex digits"),
        (["ban", "ab" * 32, "--dir", str(server.directory), "--reason", "x"], 2, "3 to 400 characters"),
        (["invite", "--dir", str(server.directory)], 1, "E_UNREACHABLE"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "assay", "coordinator", *arguments], capture_output=True, text=True, timeout=200,
            check=False,
        )
        assert (done.returncode, code in done.stderr) == (status, True), done.stderr
        assert "Traceback" not in done.stderr
    assert sorted(path.name for path in server.directory.iterdir()) == before
    assert not (tmp_path / "new").exists()


def test_the_operator_works_from_the_command_line(server: Server, request: pytest.FixtureRequest) -> None:
    url = server.start()
    link = JoinLink.parse(run("invite", "--uses", "1", server=server).strip())
    key = Identity(b"n" * 32)
    client = CoordinatorClient(url, key)
    request.addfinalizer(client.close)
    hello = NodeHello(
        run_id=link.run_id, public_key=key.public_key.hex(), name="newcomer", profile="torch-cpu-fp32",
        protocol_version=1, join_token=link.token, issued_at_ms=SystemClock().now_ms(),
    )
    assert client.register(hello).state == "active"
    assert "newcomer" in run("nodes", server=server)
    run("drill", key.id, "stale", server=server)
    run("ban", key.id, "--reason", "a test", server=server)
    assert client.register(hello).state == "banned"
    run("unban", key.id, "--reason", "a test", server=server)
    [node] = json.loads(run("nodes", "--json", server=server))
    assert (node["state"], node["drill"]) == ("active", "stale")
    with pytest.raises(AssayError) as caught:
        client.register(hello.model_copy(update={"profile": "other"}))
    assert caught.value.code == "E_PROFILE"


def run(verb: str, *arguments: str, server: Server) -> str:
    done = subprocess.run(
        [*COORDINATOR, verb, *arguments, "--dir", str(server.directory)], capture_output=True, text=True, timeout=200,
        check=True,
    )
    return done.stdout
