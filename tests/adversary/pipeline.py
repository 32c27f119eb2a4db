"""The whole pipeline in this process: the real coordinator with its database, real nodes, the real verifier.

Parties talk through the real HTTP client to the real application. What the processes' threads would do in their own
time is done here step by step, so that a trial is the same every time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from sqlalchemy import select

from coordinator import event_log
from coordinator.app import create_app
from coordinator.config import CoordinatorConfig
from coordinator.coordinator import Coordinator
from coordinator.database import Database, sqlite_url
from coordinator.groups import LIVE
from coordinator.invites import create as create_invite
from coordinator.keyring import write_secret
from coordinator.models import Group
from node.config import NodeConfig
from node.daemon import Daemon, Parts
from node.engine import Engine, WeightSource
from node.home import Home, Pin
from node.join import greeting
from node.leaser import Leaser
from node.membership import Membership
from node.spool import Spooled
from node.unit import Unit
from node.uploader import PASSING, Sealer, Uploader
from node.weights import Weights
from node.worker import Worker
from protocol.api import AuditJob
from protocol.client import CoordinatorClient
from protocol.envelope import Envelope
from protocol.errors import PeerFault, Transient
from protocol.identity import Identity
from protocol.messages import AuditClaim, CheckpointHead, Verdict
from protocol.weights.cache import ChunkCache
from protocol.weights.pool import SourcePool
from protocol.weights.sources import source_of
from tests.adversary.attack import NoOpportunity
from tests.adversary.stacks import Stack, engine_of
from tests.adversary.world import COORDINATOR, LEARNER, LIAR, ROOT, RUN_ID, VERIFIER, World, identity
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import AppTransport, empty_database
from verifier.checkpoints import CheckpointBook
from verifier.model_shelf import ModelShelf
from verifier.session import Session
from verifier.states import StateRing
from verifier.tokens import Rewards
from verifier.worker import Worker as Verifier

TOKEN = "a-join-token-for-tests"


def _same(_world: World, part: Any) -> Any:
    return part


@dataclass(frozen=True)
class Cheat:
    """Where a node's code is patched; each part is what an honest node has unless replaced."""

    weights: Callable[[World, WeightSource], WeightSource] = _same  #: weights that the engine computes with
    engine: Callable[[World, Engine], Engine] = _same  #: what makes the rollouts
    seal: Callable[[World, Unit, Spooled], Spooled] | None = None  #: what becomes of a finished unit
    client: Callable[[CoordinatorClient], CoordinatorClient] = lambda client: client  #: how it is handed in
    profile: str | None = None  #: what the node says it computes with; None: what it does


HONEST = Cheat()
_W = TypeVar("_W", bound=Worker)


@dataclass
class Handed:
    """One bundle that a node handed in, and what became of it."""

    receipt_id: str
    lease_id: str
    rollouts: int
    tokens: int


@dataclass(eq=False)
class NodeAtWork:
    """A node whose threads are turned by hand."""

    pipeline: Pipeline
    key: Identity
    daemon: Daemon
    client: CoordinatorClient
    handed: list[Handed] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)  #: codes of work that was refused at the door
    honest_leases: set[str] = field(default_factory=set)  #: leases in which a cheat saw no opportunity

    @property
    def row(self) -> dict[str, Any]:
        """The coordinator's record of it."""
        return self.client.node(self.key.id)

    @property
    def banned(self) -> bool:
        return bool(self.row["state"] == "banned")

    def turn(self, between: Callable[[], None] = lambda: None) -> list[Handed]:
        """Lease, generate, seal and hand in; what got a receipt. ``between`` runs before the sealing."""
        try:
            self.worker(Leaser).work()
            count = self.generate()
            between()
            for _ in range(count):
                self.worker(Sealer).work()
                self.pipeline.world.clock.advance(0.001)  # one submission per instant
                self.worker(Uploader).work()
        except (PeerFault, Transient) as error:  # banned, refused in a way that ends a daemon, or tried again later
            if isinstance(error, Transient) and error.code not in PASSING:
                raise
            self.refusals[error.code] = self.refusals.get(error.code, 0) + 1
        snapshot = self.daemon.health.snapshot()
        self.refusals |= snapshot["refusals"]
        known = {handed.receipt_id for handed in self.handed}
        new = [handed for handed in self.pipeline.receipts_of(self) if handed.receipt_id not in known]
        self.handed += new
        return new

    def worker(self, kind: type[_W]) -> _W:
        """One of the daemon's background threads, to be turned by hand."""
        return next(worker for worker in self.daemon.workers if isinstance(worker, kind))

    def generate(self) -> int:
        """Turn the engine until nothing is open; how many units it finished."""
        workload, done = self.daemon._workload, 0
        for _ in range(100_000):
            if not workload.open_samples:
                return done
            before = self.daemon._outbox.backlog
            self.daemon._turn()
            done += self.daemon._outbox.backlog - before
        raise AssertionError("the engine does not come to an end")


class Pipeline:
    """A run with its coordinator open, versions 0 .. ``shown`` published, one verifier, and nodes as they are made."""

    def __init__(self, world: World, *, shown: int | None = None, **config: Any):
        self.world, self.clock = world, world.clock
        self.folder = world.folder / "coordinator"
        self._found()
        unlimited = {"rate_per_s": 0, "sweep_s": 3600, "requeue_ms": 0, "status_ms": 0}
        settings = {"directory": self.folder} | unlimited | config
        self.config = CoordinatorConfig.model_validate(settings)
        self.app = create_app(self.config, clock=self.clock, store=world.store)
        self.transport = AppTransport(self.app)
        self.learner = self.client(LEARNER)
        self.shown = -1
        self.show((len(world.states) - 1) if shown is None else shown)
        self.verifier = self.make_verifier(VERIFIER)
        pool_source = source_of(world.store, "store")
        self._pool = SourcePool([pool_source], ChunkCache(world.folder / "chunks"), clock=self.clock)
        self._nodes = 0

    def _found(self) -> None:
        """The directory of the run: as ``assay coordinator init`` leaves it, with the world's keys and manifest."""
        for name, key in (("coordinator", COORDINATOR),):
            key.save(self.folder / "keys" / f"{name}.key")
        (self.folder / "manifest.json").write_bytes(self.world.run_envelope.to_bytes())
        (self.folder / "root.pub").write_text(ROOT.public_key.hex())
        write_secret(self.folder / "admin.token", "an-admin-token")
        (self.folder / "coordinator.db").write_bytes(empty_database())
        database = Database(sqlite_url(self.folder / "coordinator.db"))
        with database.write() as session:
            event_log.append(session, self.clock.now_ms(), "founded", {"run_id": self.world.run.run_id, "name": "zoo"})
            create_invite(session, self.clock.now_ms(), label="test", ttl_ms=10**12, uses=None, token=TOKEN)
        database.close()

    def close(self) -> None:
        """Shut the coordinator down."""
        self.transport.stop()
        self._pool.close()

    # -- parties -----------------------------------------------------------------------------------------

    @property
    def coordinator(self) -> Coordinator:
        found = self.app.state.coordinator
        assert isinstance(found, Coordinator)
        return found

    def client(self, key: Identity | None, run_id: str | None = RUN_ID) -> CoordinatorClient:
        return CoordinatorClient(
            "http://coordinator", key, run_id=run_id, transport=self.transport, clock=self.clock, deadline_s=5, seed=0
        )

    def make_verifier(self, key: Identity) -> Verifier:
        """A verifier with a memory of its own."""
        world, client = self.world, self.client(key)
        book = CheckpointBook(world.run)
        shelf = ModelShelf(world.model_dir, world.layout, StateRing(world.layout, book, world.store.get))
        session = Session(world.run, book, Rewards(world.run, world.model_dir, client.fetch), shelf)
        return Verifier(client, key, session, client.fetch, clock=self.clock)

    def node(
        self, name: str = "", cheat: Cheat = HONEST, *, stack: Stack | None = None, key: Identity | None = None,
        slots: int | None = None, clock: FakeClock | None = None, home: Home | None = None,
    ) -> NodeAtWork:
        """A node that has just joined, its code patched as ``cheat`` says; or one that starts again in its ``home``."""
        clock = clock or self.clock
        self._nodes += 1
        world = self.world
        stack = stack or Stack(batch=slots or world.run.batch.samples_per_lease)
        home = home or self._home(key or identity(f"{world.folder} {name} {self._nodes}"))
        key = home.identity()
        client = cheat.client(self.client(key))
        config = NodeConfig(home=home.path, min_free_mb=0, batch=stack.batch)
        membership = Membership(config, world.run, key, client, self._pool, clock)
        weights = Weights(client, membership.chunks, world.run, world.layout, home.weights)
        source = cheat.weights(world, weights)
        engine = cheat.engine(world, engine_of(stack, world.model_dir, world.layout, world.rules, source))
        if cheat.profile is not None:
            engine.profile = cheat.profile  # type: ignore[misc]
        hello = greeting(world.run, key, "node", clock, token=TOKEN)
        client.register(hello.model_copy(update={"profile": engine.profile}))
        weights.poll(clock.now_ms())
        daemon = Daemon(Parts(home, config, world.run, key, client, weights, membership, engine, clock))
        node = NodeAtWork(self, key, daemon, client)
        if cheat.seal is not None:
            _patch_sealer(node, cheat.seal)
        return node

    def _home(self, key: Identity) -> Home:
        """What ``assay node join`` leaves behind."""
        self.world.keys[key.id] = key
        home = Home(self.world.folder / "nodes" / str(self._nodes))
        key.save(home.key)
        pin = Pin(coordinator="http://coordinator", root=ROOT.public_key.hex(), run_id=RUN_ID, name="node")
        home.remember(pin, self.world.run_envelope)
        return home

    # -- what happens ------------------------------------------------------------------------------------

    def start_afresh(self) -> None:
        """Give up what earlier trials left: a unit of theirs would go stale when this one publishes versions."""
        with self.coordinator.database.write() as session:
            for group in session.scalars(select(Group).where(Group.state.in_(LIVE))).all():
                self.coordinator.groups.cancel(session, group, "a trial is over", self.clock.now_ms())

    def show(self, version: int) -> None:
        """Publish versions up to ``version``."""
        world = self.world
        while len(world.states) <= version:
            world.publish()
        for number in range(self.shown + 1, version + 1):
            envelope = world.checkpoints[number][1]
            self.learner.publish_checkpoint(envelope)
            now = self.clock.now_ms()
            head = CheckpointHead(
                run_id=RUN_ID, version=number, manifest_sha256=envelope.digest, issued_at_ms=now,
                expires_at_ms=now + 10**9,
            )
            self.learner.publish_head(head.sign(LEARNER))
        self.shown = max(self.shown, version)

    def verify(self) -> int:
        """Let the verifier work until nothing waits; how many jobs it had."""
        jobs = 0
        while self.verifier.step():
            self.clock.advance(0.001)  # a verdict of the same instant would be the same verdict
            jobs += 1
        return jobs

    def receipts_of(self, node: NodeAtWork) -> list[Handed]:
        """Everything the coordinator holds of a node, in the order in which it came (a row id: the clock may stand)."""
        from sqlalchemy import select, text

        from coordinator.models import Receipt as Row

        with self.coordinator.database.read() as session:
            rows = session.scalars(select(Row).where(Row.node_id == node.key.id).order_by(text("receipts.rowid")))
            return [Handed(row.id, row.lease_id, row.rollouts, row.tokens) for row in rows]

    def verdicts(self, receipt_id: str) -> list[Verdict]:
        """The verdicts on a receipt, oldest first."""
        found = self.client(None).get_object(f"/v1/receipts/{receipt_id}")["verdicts"]
        return [Verdict.from_payload(Envelope.from_dict(envelope).payload) for envelope in found]

    def claim(self, key: Identity = LIAR) -> AuditJob | None:
        """The next audit job, taken by another verifier."""
        nonce = hashlib.sha256(f"{self.clock.now_ms()}".encode()).hexdigest()[:32]
        claim = AuditClaim(run_id=RUN_ID, verifier_id=key.id, nonce=nonce, issued_at_ms=self.clock.now_ms())
        return self.client(key).claim_audit(claim)

    def admin(self, verb: str, **body: Any) -> Any:
        """An act of the operator."""
        import httpx

        with httpx.Client(base_url="http://coordinator", transport=self.transport) as http:
            headers = {"authorization": "Bearer an-admin-token"}
            return http.post(f"/v1/admin/{verb}", json={"reason": "a test"} | body, headers=headers)


def _patch_sealer(node: NodeAtWork, seal: Callable[[World, Unit, Spooled], Spooled]) -> None:
    """Where a rollout gives a cheat no opportunity (no end of sequence in its head, too short), it stays honest."""
    sealer = next(worker for worker in node.daemon.workers if isinstance(worker, Sealer))
    honest, world = sealer._sealed, node.pipeline.world

    def sealed(unit: Unit) -> Spooled:
        world.made(unit.lease, unit.bundle())
        spooled = honest(unit)
        try:
            made = seal(world, unit, spooled)
        except NoOpportunity:
            made = spooled
        if made.data == spooled.data and made.commitment == spooled.commitment:
            node.honest_leases.add(unit.id)
        return made

    sealer._sealed = sealed  # type: ignore[method-assign]


def commitment_of(spooled: Spooled, **changes: Any) -> Spooled:
    """The same work with fields of its commitment replaced."""
    return replace(spooled, commitment=spooled.commitment.model_copy(update=changes))


