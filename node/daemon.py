"""The daemon: the engine's loop on the main thread, everything that waits for others on threads beside it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from node.config import NodeConfig
from node.engine import Engine
from node.health import Health, Outcome
from node.home import Home
from node.leaser import RUN_COMPLETE, Leaser
from node.membership import Membership
from node.reporter import Reporter
from node.spool import Receipts, Spool
from node.unit import Unit
from node.uploader import SIDE_BY_SIDE, Outbox, Sealer, Uploader
from node.watcher import Watcher
from node.weights import Weights
from node.witness import LogMemory, Witness
from node.worker import Worker
from node.workload import Workload, keys_of
from protocol.client import CoordinatorClient
from protocol.clock import Clock
from protocol.errors import AssayError, LocalFault, Transient
from protocol.identity import Identity
from protocol.log_client import LogClient
from protocol.messages import RunManifest

_LOG = logging.getLogger(__name__)

_IDLE_S: Final = 0.05  #: longest pause of an engine without work
_DRAIN_SHARES: Final = (0.7, 0.9, 1.0)  #: shares of the drain's time until generating, uploading and all is over
_JOIN_S: Final = 5.0  #: longest wait for a background thread at the end


@dataclass(frozen=True)
class Parts:
    """What a daemon is made of."""

    home: Home
    config: NodeConfig
    run: RunManifest
    identity: Identity
    client: CoordinatorClient
    weights: Weights
    membership: Membership
    engine: Engine
    clock: Clock


class Daemon:
    """One node at work. ``drain``, ``abort`` and ``report`` may be called from signal handlers."""

    def __init__(self, parts: Parts):
        self._parts, self.health, self._workload = parts, Health(parts.clock), Workload()
        self._started_ms = parts.clock.now_ms()
        config, run, client, clock = parts.config, parts.run, parts.client, parts.clock
        spool = Spool(parts.home.spool)
        spool.sweep()
        self._outbox = Outbox(spool)
        self._sealer = Sealer(
            self.health, self._outbox, parts.weights, run, parts.identity, parts.engine.profile, clock
        )
        receipts = Receipts(parts.home.receipts)
        self._uploaders = [
            Uploader(self.health, client, self._outbox, receipts, run, clock) for _ in range(SIDE_BY_SIDE)
        ]
        reserve = max(run.batch.samples_per_lease, int(config.prefetch * parts.engine.capacity))
        self._leaser = Leaser(
            self.health, client, self._workload, parts.weights, run, parts.identity, parts.home, clock,
            target=parts.engine.capacity + reserve, reserve=reserve, min_free_mb=config.min_free_mb,
            unsent=lambda: self._outbox.backlog,
        )
        self._watcher = Watcher(
            self.health, parts.weights, clock, poll_s=config.poll_s, save_s=config.save_s
        )
        parts.membership.on_news = self._watcher.look
        self._reporter = Reporter(
            self.health, client, parts.home, parts.identity.id, self.look, clock, report_s=config.report_s,
            contact_s=config.contact_s, peers=parts.membership.view,
        )
        self._witness = Witness(
            self.health, LogClient(client), LogMemory(parts.home, run), heard=parts.membership.heard,
            tell=parts.membership.tell_note,
        )
        self._state = "starting"
        self._aborted = False

    @property
    def workers(self) -> Sequence[Worker]:
        """The background threads."""
        return (self._sealer, *self._uploaders, self._leaser, self._watcher, self._reporter, self._witness)

    # -- from outside ------------------------------------------------------------------------------------

    def drain(self) -> None:
        """End once what is begun is finished and uploaded."""
        self.health.end(Outcome.DONE, "told to end")

    def abort(self) -> None:
        """End at once; finished work stays in the spool."""
        self._aborted = True
        self.health.end(Outcome.FAULT, "told twice to end", at_once=True)

    def look(self) -> dict[str, Any]:
        """What the daemon is doing, for status.json."""
        parts, newest = self._parts, self._parts.weights.newest()
        announced = parts.weights.announced
        open_samples = self._workload.open_samples
        state = self._state
        if state == "running":
            state = "paused" if parts.home.paused else "generating" if open_samples else "idle"
        return {
            "state": state, "pid": os.getpid(), "node_id": parts.identity.id, "name": parts.home.pin().name,
            "run_id": parts.run.run_id, "profile": parts.engine.profile, "version": newest,
            "engine_version": parts.engine.version, "announced_version": announced,
            "lag_versions": max(0, announced - parts.engine.version), "tokens": parts.engine.tokens,
            "open_samples": open_samples, "capacity": parts.engine.capacity, "unsent": self._outbox.backlog,
            "free_disk_mb": parts.home.free_mb(), "started_at_ms": self._started_ms,
            "peers_connected": parts.membership.connected,
        }

    def status(self) -> dict[str, Any]:
        """The whole status."""
        return self._reporter.status()

    # -- the main thread ---------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Work until the run is complete, we are told to end, or something breaks."""
        self._parts.membership.start()
        for worker in self.workers:
            worker.start()
        self._state = "running"
        try:
            while self.health.ending is None:
                self._turn()
            self._finish()
        finally:
            self._stop()
        outcome, why = self.health.ending
        _LOG.info("ended: %s", why, extra={"outcome": outcome.name})
        return outcome

    def _turn(self) -> None:
        """Take new units, do one piece of the engine's work, pass on what it finished."""
        engine = self._parts.engine
        for unit in self._workload.take_incoming():
            self._begin(unit)
        self._give_up_late()
        try:
            finished = engine.step()
        except Transient as error:
            self.health.fault("engine", error)
            self.health.stopping.wait(1.0)
            return
        except AssayError as error:
            _LOG.exception("the engine failed", extra={"code": error.code})
            self._give_up(_every, error.code)
            self.health.end(Outcome.FAULT, str(error))
            return
        for done in finished:
            complete = self._workload.finished(done)
            if complete is not None:
                self._outbox.put(complete)
        if not engine.open_requests:
            self._workload.news.wait(_IDLE_S)
        self._workload.news.clear()

    def _begin(self, unit: Unit) -> None:
        try:
            self._parts.engine.submit(unit.requests())
        except LocalFault as error:
            self.health.refused(error)
            _LOG.warning("lease cannot be obeyed: %s", error, extra={"code": error.code, "lease_id": unit.id})
            self._workload.give_up(lambda other: other is unit, error.code)

    def _give_up_late(self) -> None:
        """Units that are not begun and would come too late go back."""
        now_ms = self._parts.clock.now_ms()
        oldest = self._parts.weights.newest() - self._parts.run.batch.max_lag_versions
        late = [u for u in self._workload.units() if now_ms > u.deadline_ms or u.lease.start_version < oldest]
        if late:
            waiting = self._parts.engine.waiting
            hopeless = {u.id for u in late if waiting.issuperset(u.request_keys())}
            self._give_up(lambda unit: unit.id in hopeless, "too late")

    def _give_up(self, which: Callable[[Unit], bool], reason: str) -> None:
        units = self._workload.give_up(which, reason)
        if units:
            self._parts.engine.cancel(keys_of(units))

    # -- the end -----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Drain, or catch up with the last version when the run is complete."""
        self._state = "draining"
        self.health.draining.set()
        ending = self.health.ending
        if self._aborted or ending is None or ending[0] is not Outcome.DONE:
            return
        now, timeout_s = self._parts.clock.monotonic(), self._parts.config.drain_timeout_s
        generate_until, upload_until, deadline = (now + share * timeout_s for share in _DRAIN_SHARES)
        if ending[1] == RUN_COMPLETE:
            self._give_up(_every, RUN_COMPLETE)
        self._hand_back_unstarted()
        _LOG.info("draining: %s", ending[1], extra={"open_samples": self._workload.open_samples})
        while self._workload.open_samples and self._time_left(generate_until) > 0:
            self._turn()
        self._give_up(_every, "node ends")
        while self._outbox.backlog and self._time_left(upload_until) > 0:
            self.health.stopping.wait(_IDLE_S)
        self._catch_up(deadline)
        self._turn()

    def _hand_back_unstarted(self) -> None:
        for unit in self._workload.take_incoming():
            self._begin(unit)
        waiting = self._parts.engine.waiting
        self._give_up(lambda unit: waiting.issuperset(unit.request_keys()), "node ends")

    def _catch_up(self, deadline: float) -> None:
        """Hold the newest version, and have handed back what was given up, before the end. Tries at least once."""
        while not self._aborted:
            try:
                self._leaser.hand_back()
                self._parts.weights.poll(self._parts.clock.now_ms())
                return
            except Transient as error:
                self.health.fault("end", error)
                if self._time_left(deadline) <= 0:
                    return
                self.health.stopping.wait(_IDLE_S)
            except AssayError as error:
                self.health.fault("end", error)
                _LOG.warning("not caught up: %s", error, extra={"code": error.code})
                return

    def _time_left(self, deadline: float) -> float:
        return 0.0 if self._aborted else deadline - self._parts.clock.monotonic()

    def _stop(self) -> None:
        self._state = "stopped"
        self.health.stopping.set()
        for worker in self.workers:
            if not worker.join(0.1 if self._aborted else _JOIN_S):
                _LOG.warning("thread %s is still busy", worker.name)
        self._parts.membership.stop()
        if self._aborted:
            return
        self._hand_back_late()
        try:
            self._parts.weights.save()
            self._reporter.conclude()
        except LocalFault as error:
            _LOG.warning("%s", error, extra={"code": error.code})

    def _hand_back_late(self) -> None:
        """Leases whose answer was under way when we ended, and what could not be handed back before."""
        self._workload.give_up(_every, "node ends")
        try:
            self._leaser.hand_back()
        except AssayError as error:
            self.health.fault("end", error)


def _every(_: Unit) -> bool:
    return True
