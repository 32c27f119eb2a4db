import io
import json
import socket
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.locks import FolderLock
from coordinator.up_plan import Folder, free_port, port_is_free, settle
from coordinator.up_status import DrillSeen, NodeSeen, RolloutsSeen, RunSeen, Status
from coordinator.up_summary import (
    AuditWeights,
    Summary,
    in_words,
    read_audit_weights,
    reward_ends,
    roots_equal,
    summarise,
)
from coordinator.up_view import JsonView, LiveView, sparkline
from protocol.errors import LocalFault

STATUS = Status(
    run=RunSeen(id="ab", max_versions=4, complete=True), version=4, reward_mean=[None, 0.2, 0.4, 0.8, 1.0],
    tokens_generated=900, tokens_trained=800, tokens_per_s=12.5, rollouts=RolloutsSeen(accepted=64, rejected=4),
    nodes=[
        NodeSeen(id="1" * 64, name="alice", state="active", version=4, lag=0, accepted=40),
        NodeSeen(id="2" * 64, name="mallory-int8", state="banned", drill="int8", rejected=4, reasons={"E_KL": 4}),
    ],
    drills=[DrillSeen(node="2" * 64, attack="int8", caught=True, rollouts_before_caught=4, code="E_KL")],
    diff_bytes_mean=1000.0, diff_ratio_to_bound=1.0375, full_bytes=100_000,
)

#: The keys that summary.json promises, in no order.
KEYS = {
    "versions_published", "reward_first", "reward_last", "rollouts_accepted", "rollouts_rejected", "tokens_generated",
    "tokens_trained", "honest_nodes_banned", "cheaters", "diff_bytes_mean", "full_bytes", "roots_equal", "wall_s",
    "diff_ratio_to_bound", "audit_weights",
}


def summary() -> Summary:
    return summarise(STATUS, honest=["alice"], drills=["int8", "stale"], roots_equal=True, wall_s=61.04)


def test_the_summary_has_exactly_the_promised_keys() -> None:
    value = summary().model_dump()
    assert set(value) == KEYS
    assert value["versions_published"] == 4
    assert (value["reward_first"], value["reward_last"]) == (0.3, 0.9)
    assert value["honest_nodes_banned"] == 0
    assert set(value["cheaters"][0]) == {"node", "attack", "caught", "rollouts_before_caught", "code"}
    assert [(c["attack"], c["caught"]) for c in value["cheaters"]] == [("int8", True), ("stale", False)]
    assert value["wall_s"] == 61.0


def test_a_banned_honest_node_is_counted() -> None:
    banned = summarise(STATUS, honest=["alice", "mallory-int8"], drills=[], roots_equal=False, wall_s=1)
    assert banned.honest_nodes_banned == 1


def test_what_the_verifier_counted_is_read_from_its_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics.prom"
    assert read_audit_weights(file) is None
    moves = {"anchors_loaded": 1, "diffs_applied": 15, "versions_stepped": 42}
    file.write_text("".join(f"# TYPE assay_verifier_{n} gauge\nassay_verifier_{n} {c}.0\n" for n, c in moves.items()))
    found = read_audit_weights(file)
    assert found == AuditWeights(loaded=1, applied=15, stepped=42)
    file.write_text("assay_verifier_anchors_loaded 1.0\n")
    assert read_audit_weights(file) is None
    words = "\n".join(in_words(summary().model_copy(update={"audit_weights": found})))
    assert "loaded whole weights 1 times" in words


def test_words_say_what_did_not_hold() -> None:
    words = "\n".join(in_words(summary().model_copy(update={"roots_equal": False})))
    assert "100x smaller, 1.04 times the entropy" in words
    assert "NOT every honest node" in words
    assert "int8: caught after 4 rollouts (E_KL)" in words
    assert "stale: not caught" in words


@pytest.mark.parametrize(
    ("rewards", "ends"),
    [([], (None, None)), ([0.5], (0.5, 0.5)), ([0.0, 1.0], (0.0, 1.0)), ([0.0, 0.2, 0.4, 0.6], (0.1, 0.5))],
)
def test_reward_ends(rewards: list[float], ends: tuple[float | None, float | None]) -> None:
    assert reward_ends(rewards) == ends


def test_roots(tmp_path: Path) -> None:
    homes = [tmp_path / "alice", tmp_path / "bob"]
    for home in homes:
        home.mkdir()
        (home / "state.json").write_text(json.dumps({"version": 4, "state_root": "aa"}))
    assert roots_equal(homes, "aa")
    (homes[1] / "state.json").write_text("{")
    assert not roots_equal(homes, "aa")


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0, 2.0, -1.0]) == "▁▅██▁"


def test_json_view_says_news_once(tmp_path: Path) -> None:
    out = io.StringIO()
    with JsonView(tmp_path / "events.jsonl", out) as view:
        for elapsed in (1.0, 2.0, 30.0):
            view.update(STATUS, {"alice": "running"}, elapsed)
        view.event("crashed", {"process": "alice", "status": -9})
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["status", "status", "crashed"]
    assert lines[0]["caught"] == ["int8"]
    assert (tmp_path / "events.jsonl").read_text() == out.getvalue()


def test_live_view_draws_every_state(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    with LiveView(tmp_path / "events.jsonl", "assay up [demo]", console) as view:
        view.event("preparing", {"what": "the first model"})
        view.update(Status(run=RunSeen(id="ab")), {}, 0.0)
        view.update(STATUS, {"alice": "running (restarted 1x)"}, 61.0)
    page = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("assay up [demo]", "alice", "restarted 1x", "caught after 4 rollouts", "1:01"):
        assert words in page


def test_live_view_keeps_names_and_reasons_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with LiveView(tmp_path / "events.jsonl", "assay up", console) as view:
        view.update(STATUS, {node.name: "running" for node in STATUS.nodes}, 61.0)
    page = console.file.getvalue()  # type: ignore[attr-defined]
    for node in STATUS.nodes:
        assert node.name in page
        assert node.state in page
        assert all(code in page for code in node.reasons)
    assert "accepted" in page


DEFAULTS = {"preset": "tiny", "port": 0, "nodes": 2, "drills": ("int8",)}


def test_choices_are_kept_and_other_ones_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    first = settle(folder, {"seed": 3, "port": 0, "nodes": None}, DEFAULTS)
    assert (first.seed, first.nodes, first.port > 0) == (3, 2, True)
    assert settle(folder, {"seed": None, "port": 0}, DEFAULTS) == first
    assert settle(folder, {"seed": 3}, {**DEFAULTS, "nodes": 5}) == first
    with pytest.raises(LocalFault, match="another seed"):
        settle(folder, {"seed": 4}, DEFAULTS)


def test_no_run_is_founded_in_a_folder_of_somebody_elses(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.claim()
    folder.path.mkdir()
    folder.lock.touch()
    folder.model.mkdir()
    folder.claim()  # a start that was refused, a model made beforehand
    (folder.path / "thesis.tex").touch()
    with pytest.raises(LocalFault, match=r"E_CONFIG.*thesis\.tex"):
        folder.claim()
    settle(folder, {}, DEFAULTS)
    folder.claim()
    with pytest.raises(LocalFault, match="a file"):
        Folder(tmp_path / "run" / "thesis.tex").claim()


def test_damaged_choices_are_explained(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.choices.write_text('{"preset": "huge"}')
    with pytest.raises(LocalFault, match="E_CONFIG"):
        folder.load()


def test_one_start_at_a_time(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    with FolderLock(folder.lock, "assay up"), pytest.raises(LocalFault, match="another assay up"):
        FolderLock(folder.lock, "assay up").__enter__()
    with FolderLock(folder.lock, "assay up"):
        pass


def test_ports() -> None:
    assert port_is_free(free_port())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not port_is_free(taken.getsockname()[1])
