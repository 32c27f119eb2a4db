"""What ``assay up`` leaves behind for strangers can be audited once the network is gone."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from coordinator.up_evidence import save_log
from coordinator.up_plan import Folder
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import World
from verifier.audit_cli import app


def test_the_log_is_kept_and_holds(tmp_path: Path) -> None:
    world = World(tmp_path / "run", FakeClock())
    world.publish()
    world.node().join().work(2)
    world.verifier.pass_all()
    folder, root = Folder(tmp_path / "up"), world.keys["root"].public_key.hex()
    folder.path.mkdir()
    save_log(world.verifier.client, folder, root)
    world.close()
    for verb in ("log", "run"):
        result = CliRunner().invoke(app, [verb, str(folder.run_log), "--root", root, "--json"])
        assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout)["draws"]["receipts"] == 2
