"""The thread that asks for work, checks every lease and hands back what will not be done."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Final, Protocol

from node.health import Health, Outcome
from node.home import Home
from node.unit import open_lease
from node.weights import Weights
from node.worker import Worker
from node.workload import Workload
from protocol.api import Ack, LeaseReply
from protocol.clock import Clock
from protocol.envelope import Envelope
from protocol.errors import LocalFault, PeerFault, Transient
from protocol.identity import Identity
from protocol.messages import Lease, LeaseRequest, LeaseReturn, RunManifest

_LOG = logging.getLogger(__name__)

#: What the coordinator answers once the run needs no more work.
RUN_COMPLETE: Final = "run complete"
#: Refusals of something that is no lease of ours at all, so there is nothing to hand back.
_NOT_A_LEASE: Final = frozenset({"E_PAYLOAD_TYPE", "E_SIGNATURE", "E_JSON", "E_TOO_LARGE", "E_SCHEMA", "E_WRONG_RUN"})
_SOON_S: Final = 0.05
_IDLE_S: Final = 0.5
_MAX_LEASES: Final = 256


class Desk(Protocol):
    """Where leases come from; :class:`protocol.client.CoordinatorClient` is one."""

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for work."""
        ...

    def return_leases(self, message: LeaseReturn) -> Ack:
        """Hand leases back."""
        ...


class Leaser(Worker):
    """Keeps ``target`` samples open."""

    name = "leases"
    patience_s = 3.0

    def __init__(
        self, health: Health, desk: Desk, workload: Workload, weights: Weights, run: RunManifest, identity: Identity,
        home: Home, clock: Clock, *, target: int, reserve: int, min_free_mb: int, unsent: Callable[[], int],
    ):
        super().__init__(health)
        self._desk, self._workload, self._weights, self._run = desk, workload, weights, run
        self._identity, self._home, self._clock = identity, home, clock
        self._target, self._batch = target, max(run.batch.samples_per_lease, reserve // 2)
        self._min_free_mb, self._unsent = min_free_mb, unsent
        self._most_unsent = max(8, 2 * target // run.batch.samples_per_lease)
        self._request: LeaseRequest | None = None  #: asked and not answered yet; asked again with the same nonce

    def work(self) -> float:
        """Hand back, then ask if there is room."""
        self.hand_back()
        obstacle = self._obstacle()
        self.health.trouble("work", obstacle)
        if obstacle is not None:
            return _IDLE_S
        room = self._target - self._workload.open_samples
        if self._request is None and room < self._batch:
            self._workload.room.wait(_SOON_S)
            self._workload.room.clear()
            return 0.0
        return self._ask(room)

    def hand_back(self) -> None:
        """Return the leases that were given up.

        Raises:
            AssayError: the coordinator did not take them; they are kept for another try.
        """
        returns = self._workload.take_returns()
        for reason in sorted(set(returns.values())):
            ids = [lease_id for lease_id, why in returns.items() if why == reason][:_MAX_LEASES]
            message = LeaseReturn(
                run_id=self._run.run_id, node_id=self._identity.id, lease_ids=ids, reason=reason[:200],
                issued_at_ms=self._clock.now_ms(),
            )
            try:
                self._desk.return_leases(message)
            except BaseException:
                self._workload.put_returns(returns)
                raise
            self.health.count("leases_returned", len(ids))
            for lease_id in ids:
                del returns[lease_id]
        if returns:
            self._workload.put_returns(returns)

    def _obstacle(self) -> str | None:
        """Why no work is asked for, if there is a reason."""
        if self.health.draining.is_set():
            return "ending: no new work is taken"
        if self._home.paused:
            return "paused by its owner (assay node resume)"
        if self._weights.newest() < 0:
            return "no weights yet"
        if self._weights.frozen(self._clock.now_ms()):
            return "the newest checkpoint head has expired: the learner or the way to it is down, or our clock is wrong"
        if self._weights.newest() < self._weights.announced:
            return f"fetching version {self._weights.announced}, holding {self._weights.newest()}"
        unsent = self._unsent()
        if unsent > self._most_unsent:
            return f"{unsent} finished leases wait to be handed in"
        free = self._home.free_mb()
        if free < self._min_free_mb:
            return f"low disk: {free} MiB free, {self._min_free_mb} wanted"
        return None

    def _ask(self, room: int) -> float:
        if self._request is None:
            count = max(1, min(_MAX_LEASES, room // self._run.batch.samples_per_lease))
            self._request = LeaseRequest(
                run_id=self._run.run_id, node_id=self._identity.id, nonce=secrets.token_hex(16), max_leases=count,
                newest_version=self._weights.newest(), issued_at_ms=self._clock.now_ms(),
            )
        try:
            reply = self._desk.lease(self._request)
        except PeerFault:
            self._request = None
            raise
        self._request = None
        self.health.contact()
        if reply.why == RUN_COMPLETE:
            self.health.end(Outcome.DONE, RUN_COMPLETE)
            return _IDLE_S
        for envelope in reply.leases:
            self._consider(envelope)
        self.health.trouble("coordinator", reply.why or None if not reply.leases else None)
        return reply.retry_after_ms / 1000 if reply.leases else max(_SOON_S, reply.retry_after_ms / 1000)

    def _consider(self, envelope: Envelope) -> None:
        """Accept a lease, or refuse it by name and hand it back if it is at least signed by the coordinator."""
        try:
            lease = Lease.open(envelope, self._run.roles.coordinator, run_id=self._run.run_id)
            if lease.start_version > self._weights.newest():
                self._weights.poll(self._clock.now_ms())
            unit = open_lease(envelope, self._run, self._identity.public_key, self._weights, self._clock.now_ms())
            self._weights.prepare(lease.start_version)
        except PeerFault as error:
            self.health.refused(error)
            _LOG.warning("lease refused: %s", error, extra={"code": error.code})
            if error.code not in _NOT_A_LEASE:
                self._workload.refuse(Lease.from_payload(envelope.payload).lease_id, error.code)
            return
        except (LocalFault, Transient) as error:
            self.health.fault(self.name, error)
            self._workload.refuse(lease.lease_id, error.code)
            return
        if self._workload.accept(unit):
            self.health.count("leases")
