"""What a node says about its peers, and that it works without any."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from node.cli import app
from node.config import NodeConfig
from node.health import Health
from node.home import Home
from node.membership import Membership
from node.peer_table import lines
from node.watcher import Watcher
from protocol.clock import SystemClock
from tests.unit.node.office import NODE, FakeCoordinator, make_home, pool_of

AWAY = {
    "peer_id": "12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq", "node_id": "ab" * 32, "name": "carol",
    "addresses": ["/ip4/192.0.2.9/tcp/4101"], "found_by": ["rendezvous"], "connected": False,
    "why": "cannot be reached: ConnectionRefusedError; next try in 9 s", "bytes_served": 0, "bytes_fetched": 0,
    "failures": 2, "mb_s": None, "rests_s": 0.0, "dropped": None,
}
HERE = AWAY | {
    "name": None, "connected": True, "why": "", "bytes_fetched": 12_345_678, "mb_s": 38.21, "addresses": [],
    "found_by": ["inbound"],
}
WRONG = "E_OBJECT_HASH: wrong bytes"
ROGUE = AWAY | {"name": "mallory", "why": f"dropped: {WRONG}", "dropped": WRONG}
VIEW: dict[str, Any] = {
    "running": True, "why": "", "peer_id": "12D3me", "addresses": ["/ip4/127.0.0.1/tcp/4101/p2p/12D3me"],
    "connected": 1, "head_version": 4, "bytes_served": 0, "bytes_fetched": 12_345_678, "peers": [HERE, AWAY, ROGUE],
}


def test_the_table_says_why_somebody_is_not_connected() -> None:
    text = lines(VIEW, 1.2)
    assert text[0] == "swarm     1 of 3 peers connected, as of 1 s ago"
    assert text[3] == "moved     12.3 MB from peers, 0.0 MB to peers"
    here, away, rogue = text[-3:]
    assert here.split()[:3] == ["..Lr2NASuq", "?", "connected"]
    assert here.endswith("came to us (inbound)")
    assert away.endswith("cannot be reached: ConnectionRefusedError; next try in 9 s")
    assert " dropped " in rogue
    assert rogue.endswith("dropped: E_OBJECT_HASH: wrong bytes")


def test_a_swarm_that_does_not_run_says_why() -> None:
    assert lines({"running": False, "why": "off", "peers": []}, None) == ["swarm     not running: off"]


def test_the_command_reads_what_the_node_wrote(tmp_path: Path) -> None:
    make_home(tmp_path, FakeCoordinator().run)
    home, run = Home(tmp_path), CliRunner().invoke
    never = run(app, ["peers", "--home", str(tmp_path)])
    assert never.exit_code == 1
    assert "the node never ran" in never.output

    home.write_status({"state": "idle", "pid": None})
    home.write_peers(VIEW | {"updated_at_ms": 1})
    stopped = run(app, ["peers", "--home", str(tmp_path)])
    assert stopped.exit_code == 1
    assert "the node is not running" in stopped.output

    home.write_status({"state": "idle", "pid": os.getpid()})
    running = run(app, ["peers", "--home", str(tmp_path), "--json"])
    assert running.exit_code == 0
    assert json.loads(running.output)["peers"] == [HERE, AWAY, ROGUE]


@pytest.mark.parametrize("wanted", [False, True])
def test_without_the_swarm_chunks_come_from_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monkeypatch.setattr("node.membership.installed", lambda: False)
    office = FakeCoordinator()
    client: Any = office
    pool = pool_of(office, tmp_path)
    membership = Membership(NodeConfig(home=tmp_path, swarm=wanted), office.run, NODE, client, pool, SystemClock())
    membership.start()
    assert membership.chunks is pool
    assert membership.published(client) is client
    assert membership.connected is None
    view = membership.view()
    assert not view["running"]
    assert ("not installed" if wanted else "off") in view["why"]
    membership.stop()


def test_news_cuts_a_nap_short() -> None:
    health = Health(SystemClock())
    nothing: Any = None
    watcher = Watcher(health, nothing, SystemClock(), poll_s=60, save_s=60)
    napping = threading.Thread(target=watcher.nap, args=(60.0,))
    napping.start()
    watcher.look()
    napping.join(30)
    assert not napping.is_alive()
