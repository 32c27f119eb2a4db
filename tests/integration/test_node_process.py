"""Real node processes against a real coordinator on loopback: joined by link, killed, drained, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from protocol.api import JoinLink
from protocol.client import CoordinatorClient
from protocol.clock import SystemClock
from protocol.disk import json_lines
from protocol.envelope import Envelope
from protocol.identity import Identity
from protocol.messages import Receipt
from protocol.store import DirectoryStore
from protocol.weights.chain import publish, sign_head
from protocol.weights.layout import Layout, State, read_safetensors, write_safetensors
from tests.fakes.model_folder import make_model_folder
from tests.unit.node.kit import tiny_model

ASSAY = [sys.executable, "-m", "assay"]


def assay(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    return subprocess.run([*ASSAY, *arguments, *flags], capture_output=True, text=True, timeout=120)


def wait_for(found: Callable[[], bool], what: str, timeout_s: float = 100) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, JoinLink]]:
    """A run that is served and has version 0: its folder and its join link."""
    base = tmp_path_factory.mktemp("run")
    model = make_model_folder(base / "model")
    layout, state = tiny_model(model)
    write_safetensors(model / "model.safetensors", layout, state)
    layout, state = read_safetensors(model / "model.safetensors")
    made = assay("coordinator", "init", str(base / "run"), preset="tiny", model=str(model), port="0")
    assert made.returncode == 0, made.stderr
    folder = base / "run"
    with (base / "serve.log").open("wb") as log:
        server = subprocess.Popen([*ASSAY, "coordinator", "serve", str(folder), "--port", "0"], stdout=log, stderr=log)
    try:
        yield folder, _first_version(folder, layout, state)
    finally:
        server.terminate()
        server.wait(timeout=60)


def _first_version(folder: Path, layout: Layout, state: State) -> JoinLink:
    """Publish version 0 as the learner would; the link under which the coordinator is reached."""
    wait_for((folder / "serve.json").exists, "coordinator")
    url = json.loads((folder / "serve.json").read_text())["url"]
    wait_for(lambda: httpx.get(f"{url}/readyz", timeout=30).is_success, "answer")
    made_link = JoinLink.parse((folder / "link.txt").read_text())
    link = JoinLink("127.0.0.1", int(url.rsplit(":", 1)[1]), made_link.root, made_link.run_id, made_link.token)
    learner, clock = Identity.load(folder / "keys" / "learner.key"), SystemClock()
    done = publish(
        DirectoryStore(folder / "store"), learner, link.run_id, layout, None, None, state, anchor=True, clock=clock,
        beacon="5b" * 32,
    )
    with CoordinatorClient(url, learner) as client:
        client.publish_checkpoint(done.envelope)
        client.publish_head(sign_head(learner, done.envelope, run_id=link.run_id, version=0, clock=clock))
    return link


class Node:
    """``assay node run`` in its own process."""

    def __init__(self, home: Path):
        self.home = home
        with (home / "out.txt").open("ab") as out:
            self.process = subprocess.Popen(
                [*ASSAY, "node", "run", "--home", str(home), "--batch", "4"], stdout=out, stderr=out,
                env=os.environ | {"ASSAY_NODE_REPORT_S": "0.1"},
            )

    def receipts(self) -> list[dict[str, object]]:
        return list(json_lines(self.home / "receipts.jsonl"))

    def wait_for_receipts(self, count: int) -> None:
        wait_for(lambda: len(self.receipts()) >= count or self.process.poll() is not None, f"{count} receipts")
        assert self.process.poll() is None, (self.home / "out.txt").read_text()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=100)


def test_a_killed_node_loses_nothing_it_finished_and_a_drained_one_ends_clean(
    run: tuple[Path, JoinLink], tmp_path: Path
) -> None:
    folder, link = run
    home = tmp_path / "home"
    joined = assay("node", "join", link.format(), home=str(home), name="worker")
    assert joined.returncode == 0, joined.stderr
    assert assay("node", "status", home=str(home)).returncode == 1
    node = Node(home)
    node.wait_for_receipts(3)
    assert node.end(signal.SIGKILL) == -signal.SIGKILL
    unsent = {path.name for path in (home / "spool").iterdir() if not path.name.startswith(".")}
    told = assay("node", "status", home=str(home))
    assert told.returncode == 1
    assert "not running" in told.stdout

    before = len(node.receipts())
    node = Node(home)
    node.wait_for_receipts(before + len(unsent) + 3)
    node.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "most recent call first" in (home / "out.txt").read_text(), "stacks")
    running = assay("node", "status", "--json", home=str(home))
    assert running.returncode == 0
    assert json.loads(running.stdout)["engine_version"] == 0
    assert node.end(signal.SIGTERM) == 0, (home / "out.txt").read_text()

    assert not [path for path in (home / "spool").iterdir() if not path.name.startswith(".")]
    handed_in = {str(entry["lease_id"]) for entry in node.receipts()}
    assert unsent <= handed_in
    store = DirectoryStore(folder / "store")
    for entry in node.receipts():
        envelope = entry["receipt"]
        assert isinstance(envelope, dict)
        receipt = Receipt.from_payload(Envelope.from_dict(envelope).payload)
        kept = httpx.get(f"{link.base_url}/v1/receipts/{receipt.receipt_id}", timeout=30)
        assert kept.is_success
        assert store.has(receipt.object_sha256)
    state = json.loads((home / "state.json").read_text())
    assert state["version"] == 0


def test_a_drill_that_is_not_enrolled_is_refused(run: tuple[Path, JoinLink], tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    assert assay("node", "join", run[1].format(), home=home).returncode == 0
    refused = assay("node", "run", home=home, drill="int8")
    assert refused.returncode == 3
    assert "E_DRILL_NOT_ENROLLED" in refused.stderr


def test_a_link_with_another_root_key_is_refused(run: tuple[Path, JoinLink], tmp_path: Path) -> None:
    link = run[1]
    forged = JoinLink(link.host, link.port, "11" * 32, link.run_id, link.token)
    refused = assay("node", "join", forged.format(), home=str(tmp_path / "home"))
    assert refused.returncode == 1
    assert "E_SIGNATURE" in refused.stderr
    assert not (tmp_path / "home" / "node.json").exists()


def test_the_self_test_passes(run: tuple[Path, JoinLink], tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    assert assay("node", "join", run[1].format(), home=home).returncode == 0
    tested = assay("node", "selftest", "--json", home=home, rollouts="6")
    assert tested.returncode == 0, tested.stderr + tested.stdout
    report = json.loads(tested.stdout)
    assert report["passed"]
    assert report["rollouts"] == 6
