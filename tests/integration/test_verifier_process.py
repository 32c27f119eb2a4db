"""A real verifier process beside a real coordinator: honest work passes, a cheat is banned with evidence that anyone
can check, and SIGTERM ends it with 0."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.foundation import Founding, found
from coordinator.presets import TINY
from coordinator.up_summary import read_audit_weights
from protocol import bundle as bundles
from protocol.api import JoinLink
from protocol.client import CoordinatorClient
from protocol.clock import SystemClock
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
from protocol.rollout import Segment, rollout_seed
from protocol.store import DirectoryStore
from protocol.weights.chain import publish, sign_head
from tests.adversary.generation import generate
from tests.adversary.world import World, quantised

PATIENCE_S = 240.0


class Network:
    """A coordinator and a verifier as processes; learner and nodes are played by the test."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.world = World(folder / "world", versions=2)
        model = self.world.checkpoint_folder(0)
        self.directory = folder / "run"
        self.link: JoinLink = found(self.directory, Founding(TINY, model, "127.0.0.1", 8700), SystemClock())
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.coordinator = self._spawn("coordinator", "serve", str(self.directory), "--port", "0")
        address = self.directory / "serve.json"
        wait_for(address.exists)
        self.url = json.loads(address.read_text())["url"]
        self.learner = Identity.load(self.directory / "keys" / "learner.key")
        self._publish()
        self.verifier = self._spawn(
            "verifier", "run", "--coordinator", self.url, "--key", str(self.directory / "keys" / "verifier.key"),
            "--root", self.link.root, "--store", f"dir:{self.directory / 'store'}", "--work", str(self.folder / "work"),
        )

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{arguments[0]}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "assay", *arguments], stdout=log, stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.processes.append(process)
        return process

    def _publish(self) -> None:
        """Both versions of the world, the second as a diff."""
        store, clock, previous, old = DirectoryStore(self.directory / "store"), SystemClock(), None, None
        with CoordinatorClient(self.url, self.learner) as client:
            for version, state in enumerate(self.world.states):
                made = publish(
                    store, self.learner, self.link.run_id, self.world.layout, previous, old, state, anchor=version == 0,
                    clock=clock, beacon=secrets.token_hex(32),
                )
                client.publish_checkpoint(made.envelope)
                client.publish_head(
                    sign_head(self.learner, made.envelope, run_id=self.link.run_id, version=version, clock=clock)
                )
                previous, old = (made.manifest, made.envelope), state

    def work(self, name: str, cheat: bool) -> tuple[Identity, Receipt]:
        """Register a node, take a lease, hand in rollouts; a cheat computes with int8 weights."""
        node, clock, run_id = Identity.generate(), SystemClock(), self.link.run_id
        with CoordinatorClient(self.url, node) as client:
            run = RunManifest.open(client.run_manifest(), self.link.root)
            client.register(NodeHello(
                run_id=run_id, public_key=node.public_key.hex(), name=name, profile="torch-cpu-fp32",
                protocol_version=1, join_token=self.link.token, issued_at_ms=clock.now_ms(),
            ))
            envelope = client.lease(LeaseRequest(
                run_id=run_id, node_id=node.id, nonce=secrets.token_hex(16), max_leases=1, newest_version=1,
                issued_at_ms=clock.now_ms(),
            )).leases[0]
            lease = Lease.open(envelope, run.roles.coordinator, run_id=run_id)
            data, bundle = self._rollouts(run, lease, cheat)
            sha256 = hashlib.sha256(data).hexdigest()
            client.upload(UploadRequest(
                run_id=run_id, node_id=node.id, object_sha256=sha256, object_bytes=len(data),
                issued_at_ms=clock.now_ms(),
            ), data)
            reply = client.submit(Commitment(
                run_id=run_id, node_id=node.id, lease_id=lease.lease_id, lease_sha256=envelope.digest,
                bundle_root=bundles.bundle_root(bundle, envelope.digest), object_sha256=sha256, object_bytes=len(data),
                rollouts=len(bundle.rollouts), tokens=sum(map(len, bundle.rollouts)),
                checkpoints=[
                    UsedCheckpoint(
                        version=lease.start_version, manifest_sha256=client.checkpoint(lease.start_version).digest
                    )
                ],
                profile="torch-cpu-fp32", issued_at_ms=clock.now_ms(),
            ))
        return node, Receipt.open(reply.receipt, run.roles.coordinator, run_id=run_id)

    def _rollouts(self, run: RunManifest, lease: Lease, cheat: bool):
        def state(version: int):
            honest = self.world.states[version]
            return quantised(honest) if cheat else honest

        seeds = {
            s: rollout_seed(run.run_id, lease.beacon, lease.prompt_sha256, lease.group, s) for s in lease.samples
        }
        bundle = generate(
            self.world.engine, state, run.sampling, lease.prompt_tokens, seeds, [Segment(0, lease.start_version)]
        )
        return bundles.encode(bundle), bundle

    def node(self, node: Identity) -> dict:
        with CoordinatorClient(self.url, None) as client:
            return client.node(node.id)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(30)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


@pytest.fixture
def network(tmp_path):
    made = Network(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_a_verifier_at_work(network, tmp_path):
    honest, _ = network.work("honest", cheat=False)
    cheat, receipt = network.work("cheat", cheat=True)
    wait_for(lambda: network.node(honest)["accepted"] > 0)
    wait_for(lambda: network.node(cheat)["state"] == "banned")
    assert network.node(honest)["state"] == "active"

    evidence = tmp_path / "cheat.evidence"
    with CoordinatorClient(network.url, None) as client:
        evidence.write_bytes(client.evidence(receipt.receipt_id))
    audit = subprocess.run(
        [sys.executable, "-m", "assay", "audit", str(evidence), "--root", network.link.root, "--json",
         "--checkpoint", str(network.directory / "store")],
        capture_output=True, timeout=PATIENCE_S, check=False,
    )
    found = json.loads(audit.stdout)
    assert audit.returncode == 1
    assert found["code"] in {"E_HEAD_KL", "E_TOKEN_KL", "E_HEAD_ENTRY"}
    assert [verdict["code"] for verdict in found["verdicts"]] == [found["code"]]
    assert found["tiers"] == ["T0", "T1", "T2", "T3"]

    network.verifier.send_signal(signal.SIGTERM)
    assert network.verifier.wait(PATIENCE_S) == 0
    counted = read_audit_weights(tmp_path / "work" / "metrics.prom")  # written after a verdict is handed in
    assert counted is not None
    assert (counted.loaded, counted.applied) == (1, 1)  # T2 of both, and T3 of the cheat, from one state in memory
