"""What ``assay up`` tells the commands that it starts."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from coordinator import up_report
from coordinator.presets import preset
from coordinator.up_cli import app
from coordinator.up_network import Network
from coordinator.up_plan import Choices, Folder
from coordinator.up_report import Report
from coordinator.up_view import JsonView
from protocol.clock import SystemClock


def test_calibrations_reach_the_manifest(tmp_path: Path, monkeypatch) -> None:
    one, two = tmp_path / "one.calibration", tmp_path / "two.calibration"
    one.touch()
    two.touch()
    asked: list[list[str]] = []

    def conclude(network: Network, view: object) -> Report:
        asked.append(network._init_arguments())
        network.drain()
        return Report(holds=True, lines=[])

    looked_at: list[Path] = []
    monkeypatch.setattr(up_report, "conclude", conclude)
    monkeypatch.setattr("coordinator.calibrations.read_record", looked_at.append)  # real in test_process.py
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the test run keeps its own
    flags = [str(tmp_path / "run"), "--calibration", str(one), "--calibration", str(two), "--json"]
    for arguments in (flags, flags[:1]):  # the second start goes on with what the first was told
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert looked_at == [one, two]
    for arguments in asked:
        assert [a for a in arguments if a.startswith("--calibration")] == [
            f"--calibration={one}", f"--calibration={two}"
        ]


def test_nothing_is_calibrated_unasked(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with JsonView(folder.events) as view:
        network = Network(folder, Choices(port=1, nodes=1, drills=()), preset("tiny"), view, SystemClock())
        assert not any("calibration" in argument for argument in network._init_arguments())
        network.drain()
