"""A coordinator, a learner and an engine for the daemon's tests: in this process, without sockets, told what to do."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from node.config import NodeConfig
from node.daemon import Daemon, Parts
from node.engine import Finished, Request, WeightSource
from node.home import Home, Pin
from node.join import PROFILE
from node.membership import Membership
from node.weights import Weights
from protocol.api import Ack, LeaseReply, RegisterReply, SubmitReply
from protocol.clock import SystemClock
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, E_UNREACHABLE, AssayError, LocalFault, PeerFault, Transient
from protocol.identity import Identity
from protocol.log_head import LogHead, origin_of
from protocol.messages import (
    AuditPolicy,
    BatchRules,
    CheckpointManifest,
    Commitment,
    Environment,
    Lease,
    LeaseRequest,
    LeaseReturn,
    ModelSpec,
    NodeHello,
    Profile,
    Receipt,
    Roles,
    RunManifest,
    UploadRequest,
)
from protocol.rollout import NO_CODE, Finish, Rollout, Segment, prompt_digest
from protocol.sampler import TAIL, draw, draw_tail, quantise
from protocol.transparency import EMPTY_ROOT
from protocol.weights.cache import ChunkCache
from protocol.weights.chain import publish, sign_head
from protocol.weights.layout import Layout, State
from protocol.weights.pool import SourcePool
from tests.fakes.store import MemoryStore
from tests.unit.node.kit import VOCABULARY, rules

RUN_ID = "7a" * 16
ROOT, COORDINATOR, LEARNER, NODE = (Identity(hashlib.sha256(name).digest()) for name in (b"r", b"c", b"l", b"n"))
LAYOUT = Layout.of({"w": ("BF16", (8, 4))})
COMPLETE = "run complete"


def state_of(version: int) -> State:
    return {"w": np.arange(32, dtype=np.uint16).reshape(8, 4) + np.uint16(version)}


def run_manifest(layout: Layout = LAYOUT, **changes: Any) -> RunManifest:
    now = SystemClock().now_ms()
    values: dict[str, Any] = {
        "run_id": RUN_ID, "name": "a run", "created_at_ms": now, "expires_at_ms": now + 3_600_000,
        "model": ModelSpec(name="tiny", layout_sha256=layout.sha256, files={}),
        "environments": [Environment(name="sums", kind="arithmetic")], "sampling": rules(),
        "batch": BatchRules(groups_per_batch=2, group_size=4, samples_per_lease=2, max_lag_versions=2),
        "audit": AuditPolicy(),
        "profiles": [Profile(name=PROFILE, max_mean_kl_nano=50_000, max_token_kl_micro=20_000, max_margin_micro=1)],
        "roles": Roles(
            coordinator=COORDINATOR.public_key.hex(), learner=LEARNER.public_key.hex(),
            verifiers=[COORDINATOR.public_key.hex()],
        ),
    }
    return RunManifest(**(values | changes))


class FakeCoordinator:
    """Answers as the coordinator's client would. ``trouble[method]`` holds errors to raise, the next one first."""

    def __init__(self, run: RunManifest | None = None, layout: Layout = LAYOUT):
        self.run, self.layout, self.clock = run or run_manifest(layout), layout, SystemClock()
        self.store = MemoryStore()
        self.store.put(layout.to_bytes())
        self.identity: Identity | None = NODE
        self.base_url = "http://nowhere"
        self.manifests: list[Envelope] = []
        self.leases: deque[Envelope] = deque()
        self.lease_requests: list[LeaseRequest] = []
        self.given: dict[str, Lease] = {}
        self.returned: dict[str, str] = {}
        self.commitments: dict[str, list[Commitment]] = {}
        self.record: dict[str, Any] = {"state": "active", "drill": None, "accepted": 3}
        self.state = "active"
        self.complete_after: int | None = None
        self.on_submit: Callable[[], None] = lambda: None
        self.trouble: dict[str, deque[AssayError]] = {}
        self._old: State | None = None
        self._lock = threading.Lock()

    # -- what a test does --------------------------------------------------------------------------------

    def publish(self, state: State) -> CheckpointManifest:
        version = len(self.manifests)
        previous = None
        if version:
            envelope = self.manifests[-1]
            previous = (CheckpointManifest.from_payload(envelope.payload), envelope)
        done = publish(
            self.store, LEARNER, RUN_ID, self.layout, previous, self._old, state, anchor=version == 0,
            clock=self.clock, beacon=hashlib.sha256(b"beacon %d" % version).hexdigest(),
        )
        self._old = state
        self.manifests.append(done.envelope)
        return done.manifest

    def manifest(self, version: int) -> CheckpointManifest:
        return CheckpointManifest.from_payload(self.manifests[version].payload)

    def lease_of(self, number: int, **changes: Any) -> Lease:
        version = changes.get("start_version", len(self.manifests) - 1)
        beacon = self.manifest(version).beacon if version < len(self.manifests) else "0" * 64
        prompt = changes.pop("prompt_tokens", [3, 4, 5 + number % 40])
        now = self.clock.now_ms()
        values: dict[str, Any] = {
            "run_id": RUN_ID, "lease_id": f"{number:032x}", "node_id": NODE.id, "environment": "sums",
            "group": number, "samples": [0, 1], "prompt_tokens": prompt, "prompt_sha256": prompt_digest(prompt),
            "start_version": version, "beacon": beacon, "issued_at_ms": now, "deadline_ms": now + 60_000,
        }
        return Lease(**(values | changes))

    def offer(self, *leases: Lease, key: Identity = COORDINATOR) -> None:
        self.leases.extend(lease.sign(key) for lease in leases)

    def fail(self, method: str, *errors: AssayError) -> None:
        self.trouble.setdefault(method, deque()).extend(errors)

    # -- what a client offers ----------------------------------------------------------------------------

    def get_bytes(self, path: str, max_bytes: int) -> bytes:
        """The head of a log in which nothing happened yet."""
        assert path == "/v1/log/head"
        return LogHead(origin_of(RUN_ID), 0, EMPTY_ROOT).sign(COORDINATOR).encode()

    def _called(self, method: str) -> None:
        if self.trouble.get(method):
            raise self.trouble[method].popleft()

    def run_manifest(self) -> Envelope:
        return self.run.sign(ROOT)

    def register(self, hello: NodeHello) -> RegisterReply:
        self._called("register")
        return RegisterReply(node_id=NODE.id, state=self.state)

    def node(self, node_id: str) -> dict[str, Any]:
        self._called("node")
        return self.record

    def head(self) -> Envelope:
        self._called("head")
        if not self.manifests:
            raise LocalFault(E_NOT_FOUND, "no version yet")
        version = len(self.manifests) - 1
        return sign_head(LEARNER, self.manifests[version], run_id=RUN_ID, version=version, clock=self.clock)

    def checkpoint(self, version: int) -> Envelope:
        return self.manifests[version]

    def checkpoints(self, first: int, last: int) -> list[Envelope]:
        return self.manifests[first : last + 1]

    def fetch(self, sha256: str) -> bytes:
        self._called("fetch")
        return self.store.get(sha256)

    def skips(self, name: str) -> bytes | None:
        return self.store.announced(name)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        with self._lock:
            self.lease_requests.append(request)
            self._called("lease")
            if self.complete_after is not None and len(self.commitments) >= self.complete_after:
                return LeaseReply(leases=[], retry_after_ms=10, why=COMPLETE)
            given = [self.leases.popleft() for _ in range(min(request.max_leases, len(self.leases)))]
            for envelope in given:
                lease = Lease.from_payload(envelope.payload)
                self.given[lease.lease_id] = lease
            return LeaseReply(leases=given, retry_after_ms=10, why="" if given else "nothing to do")

    def return_leases(self, message: LeaseReturn) -> Ack:
        self._called("return_leases")
        self.returned.update(dict.fromkeys(message.lease_ids, message.reason))
        return Ack()

    def upload(self, request: UploadRequest, data: bytes) -> None:
        self._called("upload")
        assert hashlib.sha256(data).hexdigest() == request.object_sha256
        self.store.put(data)

    def submit(self, commitment: Commitment) -> SubmitReply:
        self._called("submit")
        assert self.store.has(commitment.object_sha256)
        self.commitments.setdefault(commitment.lease_id, []).append(commitment)
        self.on_submit()
        receipt = Receipt(
            run_id=RUN_ID, receipt_id=commitment.lease_id, node_id=commitment.node_id, lease_id=commitment.lease_id,
            commitment_sha256=hashlib.sha256(commitment.to_payload()).hexdigest(),
            object_sha256=commitment.object_sha256, epoch=0, epoch_key_sha256="0" * 64, received_at_ms=1,
        )
        return SubmitReply(receipt=receipt.sign(COORDINATOR), duplicate=len(self.commitments[commitment.lease_id]) > 1)


class OfficeSource:
    """The fake coordinator as a source of chunks."""

    name = "coordinator"

    def __init__(self, office: FakeCoordinator):
        self._office = office

    def fetch(self, key: str, start: int, end: int | None, deadline_s: float) -> bytes:
        return self._office.fetch(key)[start:end]


def pool_of(office: FakeCoordinator, path: Path) -> SourcePool:
    return SourcePool([OfficeSource(office)], ChunkCache(path / "chunks"))


class FakeEngine:
    """Draws with the numpy sampler from random logits of the start version; takes up new weights between steps."""

    profile = PROFILE

    def __init__(self, source: WeightSource, slots: int = 4):
        self.capacity, self.version, self.tokens = slots, -1, 0
        self._source, self._rules = source, rules()
        self._open: dict[str, tuple[Request, int]] = {}
        self.fails: AssayError | None = None
        self.stuck = False

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(key for key, (_, drawn) in self._open.items() if not drawn)

    def check(self, request: Request) -> None:
        return None

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.check(request)
        self._open.update((request.key, (request, 0)) for request in requests)

    def cancel(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._open.pop(key, None)

    def close(self) -> None:
        return None

    def step(self) -> list[Finished]:
        if self.fails is not None:
            raise self.fails
        if self.version < self._source.newest():
            with self._source.state(self._source.newest()):
                self.version = self._source.newest()
        finished = []
        for key, (request, drawn) in list(self._open.items())[: 0 if self.stuck else self.capacity]:
            self._open[key] = (request, drawn + 1)
            self.tokens += 1
            if drawn == 1 + request.seed[0] % 5:
                finished.append(Finished(request, self.rollout(request, drawn + 1)))
                del self._open[key]
        return finished

    def rollout(self, request: Request, length: int) -> Rollout:
        logp = np.random.default_rng(request.start_version).standard_normal(VOCABULARY)
        head = quantise(logp, self._rules)
        tokens, codes = [], []
        for position in range(length):
            index = draw(head, request.seed, position, self._rules)
            tail = draw_tail(logp, head.ids, request.seed, position, self._rules) if index == TAIL else None
            tokens.append(int(head.ids[index]) if tail is None else tail[0])
            codes.append(NO_CODE if tail is None else tail[1])
        return Rollout(
            sample=request.sample, tokens=np.array(tokens, np.uint32),
            head_lengths=np.full(length, len(head.ids), np.uint8), head_ids=np.tile(head.ids, length),
            head_codes=np.tile(head.codes, length), tail_codes=np.full(length, head.tail_code, np.uint16),
            token_codes=np.array(codes, np.uint16), segments=(Segment(0, request.start_version),),
            finish=Finish.LENGTH,
        )


def make_home(path: Path, run: RunManifest) -> Home:
    home = Home(path)
    if not home.joined:
        NODE.save(home.key)
        pin = Pin(coordinator="http://nowhere", root=ROOT.public_key.hex(), run_id=RUN_ID, name="me")
        home.remember(pin, run.sign(ROOT))
    return home


def make_daemon(path: Path, office: FakeCoordinator, *, slots: int = 4, **settings: Any) -> tuple[Daemon, FakeEngine]:
    clock, home = SystemClock(), make_home(path, office.run)
    quick = {"poll_s": 0.02, "report_s": 0.05, "contact_s": 0.05, "min_free_mb": 0}
    config = NodeConfig(home=path, **(quick | settings))

    def note(manifest: CheckpointManifest) -> None:
        home.write_state(manifest.version, manifest.state_root, clock.now_ms())

    client: Any = office
    pool = pool_of(office, path)
    membership = Membership(config, office.run, NODE, client, pool, clock)
    weights = Weights(client, membership.chunks, office.run, office.layout, home.weights, on_version=note)
    weights.restore()
    engine = FakeEngine(weights, slots)
    return Daemon(Parts(home, config, office.run, NODE, client, weights, membership, engine, clock)), engine


def unreachable() -> Transient:
    return Transient(E_UNREACHABLE, "no answer")


def banned() -> PeerFault:
    return PeerFault("E_NODE_BANNED", "this node is banned: made up tokens")
