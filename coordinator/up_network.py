"""The whole network on this machine: prepare, start, watch, and drain when it is over or somebody says stop."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import httpx

from coordinator.presets import Preset
from coordinator.up_plan import HONEST, Choices, Folder, port_is_free
from coordinator.up_process import Child, Stopped, run_command
from coordinator.up_seat import DrillRow, NodePlan, Seat
from coordinator.up_status import Status
from coordinator.up_supervisor import State, Supervisor
from coordinator.up_view import View
from protocol.api import JoinLink
from protocol.client import CoordinatorClient
from protocol.clock import Clock
from protocol.errors import LocalFault, Transient, code
from protocol.messages import CheckpointManifest, RunManifest

E_UP_START = code("E_UP_START", "the coordinator of a network on this machine did not come up")
E_UP_ADMIN = code("E_UP_ADMIN", "the coordinator refused an administrative act of assay up")

#: Longest time to make the first model (SmolLM2 is converted, the tiny one is warmed up).
MODEL_TIMEOUT_S: Final = 600.0
INIT_TIMEOUT_S: Final = 120.0
READY_TIMEOUT_S: Final = 60.0
#: Time an earlier coordinator has to give the port back.
PORT_TIMEOUT_S: Final = 20.0
#: Time the processes have to notice that the run is complete, fetch the last weights and end by themselves.
FAREWELL_S: Final = 60.0
#: Time a process has to drain once asked.
DRAIN_S: Final = 30.0
POLL_S: Final = 0.5


class Network:
    """One run in one folder."""

    def __init__(self, folder: Folder, choices: Choices, preset: Preset, view: View, clock: Clock):
        self.folder = folder
        self.choices = choices
        self.preset = preset
        self.url = f"http://127.0.0.1:{choices.port}"
        self._view = view
        self._clock = clock
        self._supervisor = Supervisor(clock, view.event)
        self._client = CoordinatorClient(self.url, None, clock=clock, deadline_s=3.0)
        self._started = clock.monotonic()
        self._stops = 0
        self.status: Status | None = None

    # -- asked from outside ------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """Drain and come back; asked twice, do not wait for the drain. Safe in a signal handler."""
        self._stops += 1

    @property
    def asked_to_stop(self) -> bool:
        """Whether somebody said stop."""
        return self._stops > 0

    @property
    def wall_s(self) -> float:
        """Running time of the run, all starts together."""
        return self.choices.wall_s + self._clock.monotonic() - self._started

    @property
    def link(self) -> JoinLink:
        """The link by which nodes join."""
        return JoinLink.parse((self.folder.coordinator / "link.txt").read_text(encoding="ascii").strip())

    # -- the stages --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the first model and the run, unless an earlier start did. Told to stop, it leaves off at once.

        What it leaves half done is made anew by the next start.

        Raises:
            LocalFault: ``E_UP_START`` when the port is taken, before anything is made; ``E_UP_COMMAND``.
        """
        self._wait_for_the_port()
        with suppress(Stopped):
            self._prepare()

    def _prepare(self) -> None:
        if not self.folder.model.exists():
            self._view.event("preparing", {"what": f"the first model ({self.preset.model})"})
            scratch = self.folder.model.with_name("model.new")
            shutil.rmtree(scratch, ignore_errors=True)
            self._command(
                ["learner", "init-model", "--preset", self.preset.model, "--out", str(scratch),
                 "--seed", str(self.choices.seed)], MODEL_TIMEOUT_S,
            )
            scratch.rename(self.folder.model)
        if not (self.folder.coordinator / "link.txt").exists():
            self._view.event("preparing", {"what": "the run: keys, signed manifest, database"})
            for begun in (self.folder.coordinator, *self.folder.path.glob(f".{self.folder.coordinator.name}.*")):
                shutil.rmtree(begun, ignore_errors=True)
            self._command(self._init_arguments(), INIT_TIMEOUT_S)

    def start(self) -> None:
        """Start the coordinator, then everybody who talks to it."""
        self._wait_for_the_port()
        self._supervisor.start(self._child("coordinator", [
            "coordinator", "serve", str(self.folder.coordinator), "--host", "127.0.0.1",
            "--port", str(self.choices.port),
        ]))
        self._wait_until_ready()
        self._view.event("serving", {"dashboard": f"{self.url}/", "join_link": self.link.format()})
        keys = self.folder.coordinator / "keys"
        settings = [f"--set={name}={value}" for name, value in self.preset.learner.items()]
        settings.append(f"--set=seed={self.choices.seed}")
        common = ["--coordinator", self.url, "--root", self.link.root]
        store = f"dir:{self.folder.coordinator / 'store'}"
        self._supervisor.start(self._child("learner", [
            "learner", "run", *common, "--key", str(keys / "learner.key"), "--store", store,
            "--model", str(self.folder.model), "--work", str(self.folder.learner), *settings,
        ]))
        self._supervisor.start(self._child("verifier", [
            "verifier", "run", *common, "--key", str(keys / "verifier.key"), "--store", store,
            "--work", str(self.folder.verifier),
        ]))

    def watch(self) -> bool:
        """Keep the network going; True when the run is complete, False when it was stopped or ran out of time."""
        seats = [
            Seat(self._plan(name), self._supervisor, self._enrol, partial(self._is_banned, name))
            for name in self.honest
        ]
        deadline = self._clock.monotonic() + self.preset.up.time_limit_s
        drills = DrillRow(self.choices.drills, self._drill_plan, self._supervisor, self._enrol, self.look)
        while not self.asked_to_stop:
            self._supervisor.poll()
            status = self._look_if_there()
            if status is not None:
                self._view.update(status, self._supervisor.states(), self.wall_s)
                for seat in seats:
                    seat.tick(status)
                if status.run.complete:
                    self._farewell(drills)
                    return True
                drills.tick(status)
            if self._clock.monotonic() > deadline:
                self._view.event("time is up", {"limit_s": self.preset.up.time_limit_s})
                return False
            self._clock.sleep(POLL_S)
        self._view.event("draining", {"why": "asked to stop"})
        return False

    def drain(self) -> None:
        """End everything: first who makes work, then who judges and learns, the coordinator last."""
        workers = [name for name in self._supervisor.states() if name not in {"coordinator", "learner", "verifier"}]
        for group in (workers, ["verifier", "learner"], ["coordinator"]):
            if self._stops > 1:
                break
            self._supervisor.drain([group], DRAIN_S)
        self._supervisor.kill_all()
        self._client.close()

    def look(self) -> Status:
        """Ask the coordinator how the run stands.

        Raises:
            AssayError: as the client does.
        """
        status = Status.model_validate(self._client.status())
        self.status = status
        return status

    def newest_root(self, client: CoordinatorClient) -> str:
        """State root of the newest version, checked down from the run's root key.

        Raises:
            AssayError: as the client and the messages do.
        """
        manifest = RunManifest.open(client.run_manifest(), self.link.root)
        version = self.look().version or 0
        checkpoint = CheckpointManifest.open(client.checkpoint(version), manifest.roles.learner, run_id=manifest.run_id)
        return checkpoint.state_root

    # -- small acts --------------------------------------------------------------------------------------

    @property
    def honest(self) -> list[str]:
        """Names of the honest nodes."""
        return list(HONEST[: self.choices.nodes])

    def _command(self, arguments: list[str], timeout_s: float) -> None:
        run_command(arguments, self.folder.log("prepare"), timeout_s, lambda: self.asked_to_stop)

    def _child(self, name: str, arguments: list[str]) -> Child:
        return Child(name, arguments, self.folder.log(name))

    def _init_arguments(self) -> list[str]:
        choices = self.choices
        arguments = [
            "coordinator", "init", str(self.folder.coordinator), "--preset", choices.preset,
            "--model", str(self.folder.model), "--port", str(choices.port), "--host", "127.0.0.1",
            "--seed", str(choices.seed),
        ]
        if choices.task is not None:
            arguments += ["--task", choices.task]
        if choices.data is not None:
            arguments += ["--data", choices.data]
        if choices.max_versions is not None:
            arguments += ["--max-versions", str(choices.max_versions)]
        arguments += [f"--calibration={file}" for file in choices.calibrations]
        arguments += [f"--set={assignment}" for assignment in choices.settings]
        return arguments

    def _plan(self, name: str, attack: str | None = None) -> NodePlan:
        batch = self.preset.up.node_batch if attack is None else self.preset.up.cheater_batch
        return NodePlan(name, self.link.format(), self.folder.home(name), self.folder.log(name), batch, attack)

    def _is_banned(self, name: str) -> bool:
        """Whether a node was put out; an honest one that is stays out, and the summary says so."""
        status = self._look_if_there()
        return status is not None and any(n.name == name and n.state == "banned" for n in status.nodes)

    def _drill_plan(self, attack: str) -> NodePlan:
        return self._plan(f"mallory-{attack}", attack)

    def _wait_for_the_port(self) -> None:
        """A coordinator of an earlier start may still be draining."""
        deadline = self._clock.monotonic() + PORT_TIMEOUT_S
        while not port_is_free(self.choices.port) and not self.asked_to_stop:
            if self._clock.monotonic() > deadline:
                raise LocalFault(
                    E_UP_START, f"port {self.choices.port} is taken", expected="a free port",
                    hint="end the process that listens there, or start a new run in another folder",
                )
            self._clock.sleep(POLL_S)

    def _wait_until_ready(self) -> None:
        deadline = self._clock.monotonic() + READY_TIMEOUT_S
        while self._clock.monotonic() < deadline and not self.asked_to_stop:
            self._supervisor.poll()
            if self._is_ready():
                return
            self._clock.sleep(POLL_S / 2)
        if not self.asked_to_stop:
            raise LocalFault(
                E_UP_START, "the coordinator did not come up", expected=f"ready within {READY_TIMEOUT_S:.0f} s",
                hint=f"see {self.folder.log('coordinator')}",
            )

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2.0, trust_env=False).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _look_if_there(self) -> Status | None:
        """A fresh look, or None while the coordinator is away; its end is the supervisor's business."""
        try:
            return self.look()
        except Transient:
            return None

    def _enrol(self, node_id: str, attack: str) -> None:
        token = (self.folder.coordinator / "admin.token").read_text(encoding="ascii").strip()
        reply = httpx.post(
            f"{self.url}/v1/admin/drills", headers={"Authorization": f"Bearer {token}"}, timeout=30.0, trust_env=False,
            json={"node_id": node_id, "attack": attack, "reason": "drill of assay up"},
        )
        if reply.is_error:
            raise LocalFault(E_UP_ADMIN, f"cannot enrol {node_id[:16]} as a drill", got=reply.text[:400])

    def _farewell(self, drills: DrillRow) -> None:
        """The run is complete: let the last verdicts come in and everybody fetch the last weights."""
        self._view.event("complete", {"version": self.status.version if self.status else None})
        self._settle(lambda status: status.rollouts.pending == 0, FAREWELL_S / 3)
        drills.leave()
        awaited = [name for name in ("learner", *self.honest) if self._supervisor.state(name) is not None]
        self._settle(
            lambda _: all(self._supervisor.state(name) in {State.DONE, State.STOPPED} for name in awaited), FAREWELL_S
        )

    def _settle(self, enough: Callable[[Status], bool], timeout_s: float) -> None:
        deadline = self._clock.monotonic() + timeout_s
        while self._clock.monotonic() < deadline and not self.asked_to_stop:
            self._supervisor.poll()
            status = self._look_if_there()
            if status is not None:
                self._view.update(status, self._supervisor.states(), self.wall_s)
                if enough(status):
                    return
            self._clock.sleep(POLL_S)

