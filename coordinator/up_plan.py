"""What one ``assay up`` is asked to do, and where everything lies in its folder.

The choices are written to ``up.json`` at the first start; a later start with the same folder goes on with the same run
and refuses other choices.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from protocol.config import Config
from protocol.disk import replace_file
from protocol.errors import E_CONFIG, LocalFault

#: Names of the honest nodes, in order.
HONEST: Final = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")


class Choices(Config):
    """The choices of a run on this machine."""

    preset: Literal["tiny", "smollm2"] = "tiny"
    task: str | None = None  #: kind of task instead of the preset's own
    data: str | None = None  #: absolute path of the task's data
    seed: int = 0  #: of the model, the tasks and the learner
    port: int  #: of the coordinator, on loopback
    max_versions: int | None = None  #: versions to publish instead of the preset's number
    nodes: int  #: honest nodes
    drills: tuple[str, ...]  #: attacks of the cheating slot, one after another
    calibrations: tuple[str, ...] = ()  #: absolute paths of calibration records the manifest takes in
    settings: tuple[str, ...] = ()  #: changes of the preset, as name=value
    wall_s: float = 0.0  #: running time of earlier starts


class Folder:
    """Paths of a run's folder."""

    def __init__(self, path: Path):
        self.path = path.resolve()
        self.choices = self.path / "up.json"
        self.lock = self.path / "up.lock"
        self.events = self.path / "events.jsonl"
        self.summary = self.path / "summary.json"
        self.model = self.path / "model"
        self.coordinator = self.path / "coordinator"
        self.learner = self.path / "learner"
        self.verifier = self.path / "verifier"
        self.evidence = self.path / "evidence"
        self.run_log = self.path / "run.log"  #: the run's log, downloaded

    def log(self, name: str) -> Path:
        """Log of a process."""
        return self.path / "logs" / f"{name}.log"

    def home(self, name: str) -> Path:
        """Home of a node."""
        return self.path / "nodes" / name

    def claim(self) -> None:
        """Nothing of somebody else's is here; a model made beforehand may be, and is looked at when it is needed.

        Raises:
            LocalFault: ``E_CONFIG`` for a file, and for a folder that holds something but no run of ``assay up``.
        """
        if not self.path.exists() or self.choices.exists():
            return
        here = [found.name for found in self.path.iterdir()] if self.path.is_dir() else ["a file"]
        strangers = sorted({*here} - {self.lock.name, self.model.name})
        if strangers:
            raise LocalFault(
                E_CONFIG, f"{self.path} holds something else", expected="a new folder, or one made by assay up",
                got=", ".join(strangers[:3]) + (", ..." if len(strangers) > 3 else ""), hint="give another folder",
            )

    def load(self) -> Choices | None:
        """The choices made at the first start; None before it.

        Raises:
            LocalFault: ``E_CONFIG`` when the file is damaged.
        """
        try:
            return Choices.model_validate_json(self.choices.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise LocalFault(
                E_CONFIG, f"{self.choices} is damaged", got=str(error).splitlines()[0],
                hint="start a new run in another folder",
            ) from None

    def save(self, choices: Choices) -> None:
        """Write the choices down."""
        write_json(self.choices, choices.model_dump(mode="json"))


def settle(folder: Folder, given: dict[str, Any], defaults: dict[str, Any]) -> Choices:
    """The choices of this start: those of an earlier one, or the given ones over the defaults.

    Args:
        folder: the run's folder.
        given: choices made on the command line; None means not given.
        defaults: what holds otherwise; ``port`` 0 is replaced by a free one.

    Raises:
        LocalFault: ``E_CONFIG`` when the folder holds a run with other choices.
    """
    earlier = folder.load()
    wanted = {name: value for name, value in given.items() if value is not None}
    if wanted.get("port") == 0:
        wanted.pop("port")
    if earlier is None:
        choices = Choices.model_validate({**defaults, **wanted})
        if choices.port == 0:
            choices = choices.model_copy(update={"port": free_port()})
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.save(choices)
        return choices
    for name, value in wanted.items():
        if getattr(earlier, name) != value:
            raise LocalFault(
                E_CONFIG, f"{folder.path} holds a run with another {name}", expected=getattr(earlier, name), got=value,
                hint="leave the option out to go on with that run, or choose another folder",
            )
    return earlier


def free_port() -> int:
    """A TCP port on loopback that nobody uses right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether one can listen on a port of loopback."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def check_port(port: int) -> None:
    """Refuse a port of loopback that somebody uses.

    Raises:
        LocalFault: ``E_CONFIG``.
    """
    if not port_is_free(port):
        raise LocalFault(
            E_CONFIG, f"port {port} is taken", expected="a free port", got="a process that listens there",
            hint="choose another --port, or leave it out to get one that is free",
        )


def write_json(path: Path, value: object) -> None:
    """Replace ``path`` by ``value`` as indented JSON, at once or not at all."""
    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())
