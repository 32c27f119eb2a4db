"""The whole network of real processes: stopped, resumed, every process killed, cheats caught, nothing lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from protocol.disk import json_lines
from protocol.envelope import Envelope
from protocol.log_entry import LogEntry, read_on
from protocol.transparency import Peaks
from tests.e2e.harness import Up, is_gone, newest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

HONEST = ("alice", "bob")
VICTIMS = ("learner", "alice", "verifier", "coordinator", "bob")
CHEAT = "mallory-edited-answer"
#: Small batches and two drills, so that the run ends soon.
VERSIONS = 24
SETTINGS = (
    "batch.groups_per_batch=8", "batch.group_size=4", "batch.samples_per_lease=4",
    'up.drills=["edited-answer", "int8"]', "up.time_limit_s=900",
)
SUMMARY_KEYS = {
    "versions_published", "reward_first", "reward_last", "rollouts_accepted", "rollouts_rejected", "tokens_generated",
    "tokens_trained", "honest_nodes_banned", "cheaters", "diff_bytes_mean", "full_bytes", "roots_equal", "wall_s",
    "diff_ratio_to_bound", "audit_weights",
}


@dataclass
class Story:
    """What was seen of one run over two starts."""

    directory: Path
    stop_status: int = -1
    stop_pids: list[int] = field(default_factory=list)
    stop_left_summary: bool = True
    version_before: int = -1
    events_of_first_start: list[dict[str, Any]] = field(default_factory=list)
    version_after: int = -1
    logs: list[list[dict[str, Any]]] = field(default_factory=list)  #: of the coordinator, at moments of the run
    end_status: int = -1
    end_pids: list[int] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return value


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Story:
    story = Story(tmp_path_factory.mktemp("network") / "run")
    shutil.copytree(tiny_model, story.directory / "model")
    choices = ["--max-versions", str(VERSIONS), "--seed", "3", *(f"--set={setting}" for setting in SETTINGS)]
    with Up(story.directory, *choices) as up:
        up.wait_for(lambda _: up.has_weights(CHEAT), 240, "weights of the cheating node")
        up.kill(CHEAT)
        up.wait_for_version(1, 240)
        story.logs.append(up.log_entries())
        story.events_of_first_start = list(up.events)
        story.version_before = newest(up.events)
        up.interrupt()
        story.stop_status = up.end(120)
        story.stop_pids = up.pids()
        story.stop_left_summary = (story.directory / "summary.json").exists()
    with Up(story.directory) as up:
        up.wait_for(lambda events: newest(events) >= 0, 120, "status")
        story.version_after = newest(up.events)
        for victim in VICTIMS:
            story.logs.append(up.log_entries())
            up.kill(victim)
        up.wait_for(lambda events: any(e["event"] == "complete" for e in events), 600, "end of the run")
        story.end_status = up.end(150)
        story.end_pids, story.events = up.pids(), list(up.events)
        assert story.end_status == 0, up.story()
    return story


@pytest.fixture(scope="module")
def afterwards(story: Story) -> Iterator[Up]:
    """The run's coordinator alone, started again over what was left."""
    up = Up(story.directory)
    log = story.directory / "logs" / "afterwards.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "assay", "coordinator", "serve", str(story.directory / "coordinator")],
            stdout=out, stderr=out, start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while b"Serving at" not in log.read_bytes():
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            assert process.poll() is None, log.read_text(errors="replace")
            time.sleep(0.1)
        yield up
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def test_ctrl_c_drains_everything_and_the_run_goes_on(story: Story) -> None:
    assert story.stop_status == 0
    assert not story.stop_left_summary
    assert [pid for pid in story.stop_pids if not is_gone(pid)] == []
    assert story.version_after >= story.version_before >= 1


def test_it_ends_by_itself_with_the_promised_summary(story: Story) -> None:
    assert story.end_status == 0
    assert set(story.summary) == SUMMARY_KEYS
    assert story.summary["versions_published"] == VERSIONS
    assert story.summary["honest_nodes_banned"] == 0
    assert story.summary["rollouts_accepted"] > 0
    assert 0 < story.summary["diff_bytes_mean"] < story.summary["full_bytes"]
    assert 1 <= story.summary["diff_ratio_to_bound"] < 2
    assert [pid for pid in story.end_pids if not is_gone(pid)] == []


def test_audits_step_between_versions_without_reloading(story: Story) -> None:
    """Since the kill of the verifier: one anchor at its start, perhaps more for rollouts older than that anchor."""
    ways = story.summary["audit_weights"]
    assert 1 <= ways["loaded"] <= 3
    assert ways["applied"] + ways["stepped"] > 2


def test_every_node_ends_on_the_same_bits(story: Story) -> None:
    assert story.summary["roots_equal"] is True
    states = [json.loads((story.directory / "nodes" / name / "state.json").read_text()) for name in HONEST]
    assert len({state["state_root"] for state in states}) == 1
    assert {state["version"] for state in states} == {VERSIONS}


def test_every_process_was_killed_and_came_back(story: Story) -> None:
    events = story.events_of_first_start + story.events
    restarted = {e["process"] for e in events if e["event"] == "restarted"}
    assert {*VICTIMS, CHEAT} <= restarted


def test_cheats_are_caught_and_the_evidence_convinces_a_stranger(story: Story) -> None:
    cheaters = story.summary["cheaters"]
    assert {cheater["attack"]: cheater["caught"] for cheater in cheaters} == {"edited-answer": True, "int8": True}
    for cheater in cheaters:
        evidence = story.directory / "evidence" / f"{cheater['attack']}.evidence"
        audit = subprocess.run(
            [sys.executable, "-m", "assay", "audit", str(evidence), "--checkpoint",
             str(story.directory / "coordinator" / "store"), "--json"],
            capture_output=True, text=True, timeout=120, check=False,
        )
        assert audit.returncode == 1, audit.stdout + audit.stderr
        assert json.loads(audit.stdout)["code"] == cheater["code"]


def test_a_stranger_explains_every_draw_and_ban(story: Story) -> None:
    """From the downloaded log alone, whatever was killed on the way."""
    audit = subprocess.run(
        [sys.executable, "-m", "assay", "audit", "run", str(story.directory / "run.log"), "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
    draws = json.loads(audit.stdout)["draws"]
    assert draws["bans"] == len(story.summary["cheaters"])
    assert draws["receipts"] > 0
    assert draws["secret"] == 0  # of a finished run everybody can repeat every draw
    assert draws["receipts"] == draws["drawn"] + draws["not_drawn"]
    ends = ("drawn_recomputed", "drawn_failed", "drawn_void", "drawn_set_aside", "drawn_skipped", "undecided")
    assert draws["drawn"] == sum(draws[end] for end in ends)


def test_no_acknowledged_work_is_lost(story: Story, afterwards: Up) -> None:
    kept = 0
    for name in HONEST:
        for line in json_lines(story.directory / "nodes" / name / "receipts.jsonl"):
            held = Envelope.from_dict(line["receipt"])
            receipt_id = json.loads(held.payload)["receipt_id"]
            known = Envelope.from_dict(afterwards.get(f"/v1/receipts/{receipt_id}")["receipt"])
            assert known == held
            kept += 1
    assert kept > 0


def trained(afterwards: Up) -> list[dict[str, Any]]:
    """All samples that any version was trained on."""
    batches = [afterwards.get(f"/v1/batches/{version}") for version in range(1, VERSIONS + 1)]
    return [sample | {"group": group["group"]} for batch in batches for group in batch["groups"]
            for sample in group["samples"]]


def test_no_rollout_is_trained_on_twice(afterwards: Up) -> None:
    used = [(sample["group"], sample["sample"]) for sample in trained(afterwards)]
    run = afterwards.get("/v1/status")["run"]
    assert len(used) == len(set(used)) == VERSIONS * run["groups_per_batch"] * run["group_size"]


def test_the_log_only_ever_grew(story: Story, afterwards: Up) -> None:
    final = afterwards.log_entries()
    read_on(Peaks(), [LogEntry.from_dict(entry) for entry in final])
    for earlier in story.logs:
        assert final[: len(earlier)] == earlier


def test_drill_work_never_reached_the_learner(afterwards: Up) -> None:
    drills = {drill["node"] for drill in afterwards.get("/v1/status")["drills"]}
    workers = {sample["node_id"] for sample in trained(afterwards)}
    assert drills
    assert workers
    assert not drills & workers
