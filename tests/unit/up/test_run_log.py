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


def test_of_a_finished_run_no_draw_stays_secret(tmp_path: Path) -> None:
    """The log that is kept when a run is over accounts for every receipt: drawn or not, and what became of it."""
    world = World(
        tmp_path / "run", FakeClock(), audit={"ramp": 2, "floor_ppm": 300_000},
        batch={"groups_per_batch": 8, "max_versions": 1},
    )
    world.publish()
    node, cheat = world.node().join(), world.node("cheat").join()
    late, digest = node.leases(1)[0]
    cheat.work(1)
    world.verifier.judge("fail", "E_REPLAY")
    for _ in range(3):
        node.work(3)
        world.verifier.pass_all()
    node.work(2)  # handed in, but not judged when the run ends
    folder, root = Folder(tmp_path / "up"), world.keys["root"].public_key.hex()
    folder.path.mkdir()

    def draws() -> dict[str, int]:
        save_log(world.verifier.client, folder, root)
        result = CliRunner().invoke(app, ["run", str(folder.run_log), "--root", root, "--json"])
        assert result.exit_code == 0, result.stdout
        found: dict[str, int] = json.loads(result.stdout)["draws"]
        return found

    assert draws()["secret"] == 12
    world.publish()
    assert world.http.get("/v1/status").json()["run"]["complete"] is True
    found = draws()
    assert (found["receipts"], found["secret"], found["drawn"] + found["not_drawn"]) == (12, 0, 12)
    assert found["drawn_failed"] == 1
    node.finish(late, digest)  # a later receipt is drawn by a key that nobody knew
    world.verifier.pass_all()
    found = draws()
    assert (found["receipts"], found["secret"], found["undecided"]) == (13, 0, 0)
    assert found["drawn"] == found["drawn_recomputed"] + found["drawn_failed"]
    epochs = world.http.get("/v1/epochs").json()["epochs"]
    assert [epoch["key"] is None for epoch in epochs] == [True, False, False]
    assert [len(world.http.get(f"/v1/epochs/{e['epoch']}/draws").json()["draws"]) for e in epochs] == [0, 1, 12]
    for _ in range(3):
        world.coordinator.sweep()  # nothing more to tell
    assert len(world.http.get("/v1/epochs").json()["epochs"]) == 3
    world.close()
