"""How a start of ``assay up`` ends: what it writes, what it leaves alone, what its last line tells."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import up_network, up_report
from coordinator.presets import preset
from coordinator.up_cli import app
from coordinator.up_network import Network
from coordinator.up_plan import Choices, Folder
from coordinator.up_process import Stopped, environment, run_command
from coordinator.up_view import JsonView
from protocol.clock import SystemClock
from protocol.errors import LocalFault
from tests.unit.up.test_summary import STATUS


class FakeNetwork:
    """A network whose run is complete."""

    url, honest, status, asked_to_stop = "http://127.0.0.1:1", ["alice"], STATUS, False
    link = SimpleNamespace(root="ab" * 32)

    def __init__(self, path: Path, wall_s: float):
        self.folder, self.wall_s = Folder(path), wall_s
        self.choices = Choices(port=1, nodes=1, drills=("int8",))

    def prepare(self) -> None: ...

    start = drain = look = prepare

    def watch(self) -> bool:
        return True

    def newest_root(self, _: object) -> str:
        return "root"


@pytest.fixture
def conclude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the fake network to its end; the last JSON line."""
    path = tmp_path / "run"

    def save_log(_client: object, folder: Folder, _root: str) -> None:
        folder.run_log.touch()
        folder.evidence.mkdir(exist_ok=True)
        (folder.evidence / "int8.evidence").touch()

    monkeypatch.setattr(up_report, "collect_evidence", lambda *_: {})
    monkeypatch.setattr(up_report, "save_log", save_log)

    def once(wall_s: float, loaded: int, root: str) -> dict[str, Any]:
        counts = {"anchors_loaded": loaded, "diffs_applied": 15, "versions_stepped": 0}
        (path / "verifier").mkdir(parents=True, exist_ok=True)
        (path / "verifier" / "metrics.prom").write_text(
            "".join(f"# TYPE assay_verifier_{k} gauge\nassay_verifier_{k} {v}\n" for k, v in counts.items())
        )
        (path / "nodes" / "alice").mkdir(parents=True, exist_ok=True)
        (path / "nodes" / "alice" / "state.json").write_text(json.dumps({"state_root": root}))
        out = io.StringIO()
        with JsonView(path / "events.jsonl", out) as view:
            up_report.conclude(FakeNetwork(path, wall_s), view)  # type: ignore[arg-type]
        return json.loads(out.getvalue().splitlines()[-1])

    return once


def test_the_summary_of_a_complete_run_stays_as_it_was(conclude: Any, tmp_path: Path) -> None:
    conclude(60.0, 1, "root")
    written = (tmp_path / "run" / "summary.json").read_bytes()
    again = conclude(90.0, 0, "root")
    assert (again["wall_s"], again["audit_weights"]["loaded"]) == (60.0, 1)
    assert (tmp_path / "run" / "summary.json").read_bytes() == written
    assert json.loads((tmp_path / "run" / "up.json").read_bytes())["wall_s"] == 60.0


def test_a_summary_that_found_a_node_behind_is_made_anew(conclude: Any) -> None:
    assert conclude(60.0, 1, "another")["roots_equal"] is False
    assert conclude(90.0, 1, "root")["roots_equal"] is True


def test_the_last_line_says_where_everything_is_and_how_to_audit_it(conclude: Any, tmp_path: Path) -> None:
    last = conclude(60.0, 1, "root")
    run = tmp_path / "run"
    assert last["event"] == "summary"
    assert last["files"] == {
        "summary": str(run / "summary.json"), "events": str(run / "events.jsonl"), "logs": str(run / "logs" / "*.log"),
        "log": str(run / "run.log"), "evidence": [str(run / "evidence" / "int8.evidence")],
    }
    assert [command.split(" audit ")[1].split()[0] for command in last["audit_commands"]] == [
        str(run / "evidence" / "int8.evidence"), "run"
    ]


def test_a_taken_port_is_noticed_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, [str(tmp_path / "run"), "--port", str(port)])
        assert isinstance(done.exception, LocalFault)
        assert (done.exception.code, str(port) in done.exception.message) == ("E_CONFIG", True)
        assert not (tmp_path / "run").exists()


def test_a_later_start_waits_for_its_port_before_it_makes_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_network, "PORT_TIMEOUT_S", 0.0)
    folder = Folder(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken, JsonView(folder.events) as view:
        choices = Choices(port=taken.getsockname()[1], nodes=1, drills=())
        network = Network(folder, choices, preset("tiny"), view, SystemClock())
        with pytest.raises(LocalFault) as caught:
            network.prepare()
        network.drain()
    assert caught.value.code == "E_UP_START"
    assert not folder.log("prepare").exists()


def test_data_that_no_task_uses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    done = CliRunner().invoke(app, [str(tmp_path / "run"), "--data", str(tmp_path / "data")])
    assert isinstance(done.exception, LocalFault)
    assert done.exception.expected == "no --data"
    assert not (tmp_path / "run").exists()


def test_a_command_ends_when_somebody_says_stop(tmp_path: Path) -> None:
    asked: list[int] = []
    threading.Timer(0.3, asked.append, (1,)).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        run_command(["learner", "init-model", "--preset", "tiny", "--out", str(tmp_path / "m")], tmp_path / "log", 600,
                    lambda: bool(asked))
    assert time.monotonic() - began < 60


def test_sigterm_while_the_first_model_is_made_ends_at_once(tmp_path: Path) -> None:
    up = subprocess.Popen(
        [sys.executable, "-m", "assay", "up", str(tmp_path / "run"), "--json"], stdout=subprocess.PIPE,
        env=environment() | os.environ, text=True,
    )
    assert up.stdout is not None
    assert json.loads(up.stdout.readline())["event"] == "preparing"
    up.send_signal(signal.SIGTERM)
    last = [json.loads(line) for line in up.stdout][-1]
    up.stdout.close()
    assert up.wait(timeout=60) == 0
    assert last["event"] == "stopped"
    assert not (tmp_path / "run" / "model").exists()
    assert (tmp_path / "run" / "up.json").exists()
