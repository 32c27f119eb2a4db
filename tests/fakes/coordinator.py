"""A coordinator in this process, with parties that speak to it through the real client."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.testclient import TestClient

from coordinator import event_log
from coordinator.app import create_app
from coordinator.config import CoordinatorConfig
from coordinator.coordinator import Coordinator
from coordinator.database import Database, sqlite_url
from coordinator.invites import create as create_invite
from coordinator.keyring import write_secret
from protocol.api import AuditJob, JoinLink, LeaseReply, SubmitReply
from protocol.client import CoordinatorClient
from protocol.clock import Clock
from protocol.identity import Identity
from protocol.messages import (
    AuditClaim,
    AuditPolicy,
    BatchGroup,
    BatchPlan,
    BatchRules,
    CheckpointHead,
    CheckpointManifest,
    ChunkRef,
    Commitment,
    Environment,
    Finding,
    Lease,
    LeaseRequest,
    ModelSpec,
    NodeHello,
    Profile,
    Receipt,
    Roles,
    RunManifest,
    SamplingRules,
    UploadRequest,
    UsedCheckpoint,
    Verdict,
)
from protocol.store import DirectoryStore, Store
from tests.fakes.clock import FakeClock

RUN_ID = "ab" * 16
TOKEN = "a-join-token-for-tests"
PROFILE = "torch-cpu-fp32"
LAYOUT = "1a" * 32


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class FakePrompts:
    """Three tokens that tell the group, in two environments."""

    def prompt(self, group: int) -> tuple[str, list[int]]:
        return ("even", "odd")[group % 2], [1, 2, group % 50]


class AppTransport(httpx.BaseTransport):
    """Carries the requests of our client into a running ASGI application."""

    def __init__(self, app: FastAPI):
        self.start(app)

    def start(self, app: FastAPI) -> None:
        """Start the application."""
        self._app = TestClient(app, base_url="http://coordinator", raise_server_exceptions=False)
        self._app.__enter__()

    def stop(self) -> None:
        """Shut the application down."""
        self._app.__exit__(None, None, None)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        headers = [(k, v) for k, v in request.headers.items() if k != "host"]
        answer = self._app.request(
            request.method, str(request.url), content=request.read(), headers=dict(headers), follow_redirects=False
        )
        return httpx.Response(answer.status_code, headers=list(answer.headers.items()), content=answer.content)


def make_manifest(keys: Mapping[str, Identity], clock: FakeClock, **changes: Any) -> RunManifest:
    batch = {
        "groups_per_batch": 2, "group_size": 4, "samples_per_lease": 2, "max_lag_versions": 1, "max_versions": None,
        "lease_ms": 60_000,
    }
    audit = {"ramp": 4, "floor_ppm": 100_000, "epoch_ms": 600_000}
    batch |= changes.get("batch", {})
    audit |= changes.get("audit", {})
    return RunManifest(
        run_id=RUN_ID, name="a run of tests", created_at_ms=clock.now_ms(), expires_at_ms=clock.now_ms() + 10**10,
        model=ModelSpec(name="none", layout_sha256=LAYOUT, files={}),
        environments=[Environment(name="even", kind="sort"), Environment(name="odd", kind="sort")],
        sampling=SamplingRules(eos_token_ids=[0], vocab_size=64, max_new_tokens=16),
        batch=BatchRules.model_validate(batch), audit=AuditPolicy.model_validate(audit),
        profiles=[Profile(name=PROFILE, max_mean_kl_nano=1, max_token_kl_micro=1, max_margin_micro=1)],
        roles=Roles(
            coordinator=keys["coordinator"].public_key.hex(), learner=keys["learner"].public_key.hex(),
            verifiers=[keys["verifier"].public_key.hex(), keys["verifier2"].public_key.hex()],
        ),
    )


@cache
def empty_database() -> bytes:
    """A migrated database without rows, made once."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(sqlite_url(Path(folder) / "empty.db"))
        database.upgrade()
        database.close()
        return (Path(folder) / "empty.db").read_bytes()


ROLES = ("root", "coordinator", "learner", "verifier", "verifier2")


def found_run(directory: Path, clock: FakeClock, **changes: Any) -> dict[str, Identity]:
    """The directory of a run, without a model behind it; the keys of its roles."""
    keys = {name: Identity(hashlib.sha256(name.encode()).digest()) for name in ROLES}
    directory.mkdir(parents=True, exist_ok=True)
    for name, key in keys.items():
        key.save(directory / "keys" / f"{name}.key")
    manifest = make_manifest(keys, clock, **changes)
    (directory / "manifest.json").write_bytes(manifest.sign(keys["root"]).to_bytes())
    (directory / "root.pub").write_text(keys["root"].public_key.hex())
    write_secret(directory / "admin.token", "an-admin-token")
    link = JoinLink("127.0.0.1", 8700, keys["root"].public_key.hex(), RUN_ID, TOKEN)
    write_secret(directory / "link.txt", link.format())
    (directory / "coordinator.db").write_bytes(empty_database())
    database = Database(sqlite_url(directory / "coordinator.db"))
    with database.write() as session:
        event_log.append(session, clock.now_ms(), "founded", {"run_id": RUN_ID, "name": manifest.name})
        create_invite(session, clock.now_ms(), label="test", ttl_ms=10**9, uses=None, token=TOKEN)
    database.close()
    return keys


@dataclass
class Party:
    """A key and its client."""

    key: Identity
    client: CoordinatorClient
    clock: Clock
    nonces: int = 0

    def nonce(self) -> str:
        self.nonces += 1
        return hashlib.sha256(f"{self.key.id}{self.nonces}".encode()).hexdigest()[:32]


@dataclass
class FakeNode(Party):
    """A node that makes bundles out of thin air."""

    version: int = 0

    def hello(self, **changes: Any) -> NodeHello:
        fields = {
            "run_id": RUN_ID, "public_key": self.key.public_key.hex(), "name": "node", "profile": PROFILE,
            "protocol_version": 1, "join_token": TOKEN, "issued_at_ms": self.clock.now_ms(),
        }
        return NodeHello.model_validate(fields | changes)

    def join(self) -> FakeNode:
        self.client.register(self.hello())
        return self

    def request(self, count: int = 1, **changes: Any) -> LeaseRequest:
        fields = {
            "run_id": RUN_ID, "node_id": self.key.id, "nonce": self.nonce(), "max_leases": count,
            "newest_version": self.version, "issued_at_ms": self.clock.now_ms(),
        }
        return LeaseRequest.model_validate(fields | changes)

    def ask(self, count: int = 1) -> LeaseReply:
        return self.client.lease(self.request(count))

    def leases(self, count: int = 1) -> list[tuple[Lease, str]]:
        """Leases with the digests of their payloads."""
        return [(Lease.from_payload(e.payload), e.digest) for e in self.ask(count).leases]

    def commitment(self, lease: Lease, digest: str, text: str = "", **changes: Any) -> Commitment:
        data = self.bundle(lease, text)
        fields = {
            "run_id": RUN_ID, "node_id": self.key.id, "lease_id": lease.lease_id, "lease_sha256": digest,
            "bundle_root": sha(f"root{text}{lease.lease_id}"), "object_sha256": hashlib.sha256(data).hexdigest(),
            "object_bytes": len(data), "rollouts": len(lease.samples), "tokens": 5 * len(lease.samples),
            "checkpoints": [self.used(lease.start_version)], "profile": PROFILE, "issued_at_ms": self.clock.now_ms(),
        }
        return Commitment.model_validate(fields | changes)

    def used(self, version: int) -> UsedCheckpoint:
        return UsedCheckpoint(version=version, manifest_sha256=self.client.checkpoint(version).digest)

    def bundle(self, lease: Lease, text: str = "") -> bytes:
        return f"bundle of {lease.lease_id} {text}".encode()

    def upload(self, data: bytes) -> None:
        request = UploadRequest(
            run_id=RUN_ID, node_id=self.key.id, object_sha256=hashlib.sha256(data).hexdigest(),
            object_bytes=len(data), issued_at_ms=self.clock.now_ms(),
        )
        self.client.upload(request, data)

    def finish(self, lease: Lease, digest: str, text: str = "") -> SubmitReply:
        self.clock.sleep(0.001)  # one submission per instant
        self.upload(self.bundle(lease, text))
        return self.client.submit(self.commitment(lease, digest, text))

    def work(self, count: int) -> list[SubmitReply]:
        return [self.finish(lease, digest) for lease, digest in self.leases(count)]


@dataclass
class FakeVerifier(Party):
    """A verifier that says what it is told."""

    def claim(self, **changes: Any) -> AuditJob | None:
        fields = {
            "run_id": RUN_ID, "verifier_id": self.key.id, "nonce": self.nonce(), "issued_at_ms": self.clock.now_ms(),
        }
        return self.client.claim_audit(AuditClaim.model_validate(fields | changes))

    def verdict(self, job: AuditJob, outcome: str = "pass", found: str | None = None, **changes: Any) -> Verdict:
        lease = Lease.from_payload(job.lease.payload)
        receipt = Receipt.from_payload(job.receipt.payload)
        passed = outcome == "pass"
        fields = {
            "run_id": RUN_ID, "verifier_id": self.key.id, "node_id": receipt.node_id, "lease_id": lease.lease_id,
            "receipt_sha256": job.receipt.digest, "outcome": outcome, "code": found,
            "tiers": ["T0", "T1", *(["T2"] if job.drawn else [])] if passed else ["T0"],
            "findings": [] if passed else [Finding(check="replay", ok=False, expected="a", got="b", code=found)],
            "samples": lease.samples, "rewards_micro": [1_000_000 * (s % 2) for s in lease.samples] if passed else [],
            "tokens": Commitment.from_payload(job.commitment.payload).tokens, "issued_at_ms": self.clock.now_ms(),
        }
        return Verdict.model_validate(fields | changes)

    def judge(self, outcome: str = "pass", found: str | None = None) -> AuditJob | None:
        """Claim one job and give the verdict."""
        job = self.claim()
        if job is not None:
            self.client.verdict(self.verdict(job, outcome, found))
        return job

    def pass_all(self) -> int:
        count = 0
        while self.judge() is not None:
            count += 1
        return count


@dataclass
class FakeLearner(Party):
    """A learner that publishes empty diffs."""

    manifests: list[Any] = field(default_factory=list)

    def manifest(self, store: Store | None = None, **changes: Any) -> CheckpointManifest:
        version = len(self.manifests)
        parent = self.manifests[-1] if self.manifests else None
        chunk = ChunkRef(sha256=sha(f"chunk {version}"), size_bytes=len(f"chunk {version}"), max_output_bytes=1000)
        if store is not None:
            store.put(f"chunk {version}".encode())
        fields = {
            "run_id": RUN_ID, "version": version, "parent_sha256": parent.digest if parent else None,
            "layout_sha256": LAYOUT, "state_root": sha(f"state {version}"),
            "base_root": sha(f"state {version - 1}") if version else None, "diff": [chunk] if version else [],
            "anchor": [] if version else [chunk], "beacon": sha(f"beacon {version}"),
            "published_at_ms": self.clock.now_ms(),
        }
        return CheckpointManifest.model_validate(fields | changes)

    def publish(self, store: DirectoryStore) -> int:
        """Publish the next version and its head."""
        envelope = self.manifest(store).sign(self.key)
        self.client.publish_checkpoint(envelope)
        self.manifests.append(envelope)
        self.client.publish_head(self.head().sign(self.key))
        return len(self.manifests) - 1

    def head(self, **changes: Any) -> CheckpointHead:
        now = self.clock.now_ms()
        fields = {
            "run_id": RUN_ID, "version": len(self.manifests) - 1, "manifest_sha256": self.manifests[-1].digest,
            "issued_at_ms": now, "expires_at_ms": now + 600_000,
        }
        return CheckpointHead.model_validate(fields | changes)

    def plan(self, count: int = 2, **changes: Any) -> BatchPlan:
        groups = self.client.admitted(count)
        parent = len(self.manifests) - 1
        fields = {
            "run_id": RUN_ID, "version": parent + 1, "parent_version": parent,
            "groups": [
                BatchGroup(group=g.group, receipts=sorted({s.receipt_sha256 for s in g.samples})) for g in groups
            ],
            "config_sha256": sha("config"), "issued_at_ms": self.clock.now_ms(),
        }
        return BatchPlan.model_validate(fields | changes)


class World:
    """One coordinator, its clock, and whoever talks to it."""

    def __init__(self, directory: Path, clock: FakeClock, config: Mapping[str, Any] | None = None, **changes: Any):
        self.directory, self.clock = directory, clock
        self.keys = found_run(directory, clock, **changes)
        settings = {"directory": directory, "rate_per_s": 0, "sweep_s": 3600, "status_ms": 0} | dict(config or {})
        self.config = CoordinatorConfig.model_validate(settings)
        self.store = DirectoryStore(directory / "store")
        self._open()
        self.learner = FakeLearner(self.keys["learner"], self.client(self.keys["learner"]), clock)
        self.verifier = FakeVerifier(self.keys["verifier"], self.client(self.keys["verifier"]), clock)

    def _open(self) -> None:
        self.app = create_app(self.config, clock=self.clock, store=self.store, prompts=FakePrompts())
        self.transport = AppTransport(self.app)
        self.http = httpx.Client(base_url="http://coordinator", transport=self.transport)

    @property
    def coordinator(self) -> Coordinator:
        found = self.app.state.coordinator
        assert isinstance(found, Coordinator)
        return found

    def client(self, key: Identity) -> CoordinatorClient:
        return self.connect(self.transport, key, self.clock)

    @staticmethod
    def connect(
        transport: httpx.BaseTransport, key: Identity, clock: FakeClock, run_id: str = RUN_ID
    ) -> CoordinatorClient:
        return CoordinatorClient(
            "http://coordinator", key, run_id=run_id, transport=transport, clock=clock, deadline_s=5, seed=0
        )

    def node(self, name: str = "node") -> FakeNode:
        key = Identity(hashlib.sha256(f"key of {name}".encode()).digest())
        return FakeNode(key, self.client(key), self.clock)

    def publish(self) -> int:
        return self.learner.publish(self.store)

    def admin(self, verb: str, **body: Any) -> httpx.Response:
        headers = {"authorization": "Bearer an-admin-token"}
        return self.http.post(f"/v1/admin/{verb}", json={"reason": "a test"} | body, headers=headers)

    def node_row(self, node: FakeNode) -> dict[str, Any]:
        row: dict[str, Any] = node.client.node(node.key.id)
        return row

    def close(self) -> None:
        self.transport.stop()

    def restart(self) -> None:
        """Close the coordinator and open it again from what is on disk; clients made before go on."""
        self.transport.stop()
        self.app = create_app(self.config, clock=self.clock, store=self.store, prompts=FakePrompts())
        self.transport.start(self.app)
