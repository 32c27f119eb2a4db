"""The learner as a real process: SIGTERM, kill -9 at awkward moments, and versions that the record makes again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from learner.admission import E_ADMITTED_GROUP
from learner.checkpoint import ResumePoints
from learner.cli import app
from learner.config import LearnerConfig
from learner.journal import Journal
from learner.parts import read_part
from learner.places import read_model
from learner.replay import E_LEARNER_REPLAY
from learner.trainer import Trainer
from protocol.errors import E_CONFIG, E_KEY_FILE, E_SIGNATURE, E_USAGE, AssayError
from protocol.identity import Identity
from protocol.store import E_STORE_URL
from protocol.weights.state_root import state_root
from tests.fakes.learner_server import ROOT_KEY, VERSIONS, Server, arguments
from tests.fakes.learning import LEARNER, make_learner
from tests.fakes.same_bits import assert_same_bits

LIMIT_S = 240.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    LEARNER.save(tmp_path / "learner.key")
    with Server(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def start(server: Server, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "assay", "learner", *arguments(server, folder)], cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def strike_at(server: Server, folder: Path, call: str, version: int) -> int:
    """Run a learner and kill it -9 inside ``call`` of ``version``; its exit status."""
    struck = threading.Event()

    def strike(name: str) -> None:
        newest = server.client.heads[-1].version if server.client.heads else -1
        if name == call and newest == version and not struck.is_set():
            struck.set()
            process.kill()

    process = start(server, folder)
    server.client.on_call = strike
    _, errors = process.communicate(timeout=LIMIT_S)
    server.client.on_call = lambda name: None
    assert struck.is_set(), errors
    return process.returncode


def straight_run(server: Server, work: Path) -> tuple[list[str], Trainer]:
    """Roots of all versions, made in this process in one go from the first weights and the recorded batches."""
    layout, state = read_model(server.model)
    config = LearnerConfig.model_validate({"optim": {"lr": 0.01}})
    trainer = Trainer.open(server.model, layout, state, config, server.manifest.sampling)
    journal = Journal(work)
    learner = make_learner(
        work.with_name("straight"), server.model, server.store, server.client, manifest=server.manifest
    )
    roots = [state_root(layout, state)]
    for version in range(1, VERSIONS + 1):
        planned = journal.plan(version)
        assert planned is not None
        trainer.train_step(learner.batch_of(planned))
        roots.append(state_root(layout, trainer.published_state()))
    return roots, trainer


def test_killed_and_stopped_learners_lose_nothing(server: Server, tmp_path: Path):
    process = start(server, tmp_path)
    deadline = threading.Event()
    while not server.client.heads:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        deadline.wait(0.05)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert output.strip() == "stopped at version 0"

    server.stock()
    assert strike_at(server, tmp_path, "post_batch done", 0) == -signal.SIGKILL
    assert strike_at(server, tmp_path, "publish_checkpoint", 1) == -signal.SIGKILL
    process = start(server, tmp_path)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert output.strip() == f"complete at version {VERSIONS}"

    roots = server.client.roots()
    assert len(set(roots)) == VERSIONS + 1
    assert sorted(server.client.receipts) == list(range(1, VERSIONS + 1))
    expected, trainer = straight_run(server, tmp_path / "work")
    assert roots == expected
    point = ResumePoints(tmp_path / "work").newest(at_most=VERSIONS)
    assert point is not None
    assert point.cursor.version == VERSIONS
    state, straight = read_part(point.folder, 0, 1), trainer.state_dict()
    del state["rng"], straight["rng"]  # of different processes, and used for nothing
    assert_same_bits(state, straight)
    lines = [json.loads(line)["version"] for line in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, VERSIONS + 1))
    assert_replays(server, tmp_path)


def assert_replays(server: Server, folder: Path) -> None:
    """Every version follows from the record, and a changed record is noticed."""
    call = [
        "--work", str(folder / "work"), "--store", f"dir:{server.store.path}", "--model", str(server.model),
        "--root", ROOT_KEY.public_key.hex(),
    ]
    for version in range(VERSIONS + 1):
        result = CliRunner().invoke(app, ["replay", str(version), *call], catch_exceptions=False)
        assert result.exit_code == 0
        assert f"version {version} follows from its record" in result.output
    plan = folder / "work" / "batches" / f"{VERSIONS:08d}" / "plan.json"
    record = json.loads(plan.read_text())
    record["groups"][0]["samples"][0]["reward_micro"] += 50_000
    for code in (E_ADMITTED_GROUP, E_LEARNER_REPLAY):  # no verifier signed it; without proofs the root tells
        plan.write_text(json.dumps(record))
        result = CliRunner().invoke(app, ["replay", str(VERSIONS), *call])
        assert isinstance(result.exception, AssayError)
        assert result.exception.code == code
        record["groups"][0]["proofs"] = []


def test_bad_calls_end_with_their_codes(server: Server, tmp_path: Path):
    Identity(b"x" * 32).save(tmp_path / "other" / "learner.key")
    process = start(server, tmp_path / "other")
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert "E_WRONG_KEY" in errors
    for more, code in (
        (["--root", "abc"], E_USAGE), (["--root", LEARNER.public_key.hex()], E_SIGNATURE),
        (["--set", "loss.preset=best"], E_CONFIG), (["--set", "lr=1"], E_CONFIG), (["--set", "nonsense"], E_CONFIG),
        (["--config", str(tmp_path / "missing.toml")], E_CONFIG), (["--key", str(tmp_path / "missing")], E_KEY_FILE),
        (["--dry-run", "--model", str(tmp_path / "missing")], E_CONFIG),
        (["--store", f"dir:{tmp_path / 'missing'}"], E_STORE_URL),
    ):
        result = CliRunner().invoke(app, arguments(server, tmp_path, *more))
        assert isinstance(result.exception, AssayError), result.output
        assert result.exception.code == code, more


def test_dry_run_says_what_would_happen_and_does_nothing(server: Server, tmp_path: Path):
    result = CliRunner().invoke(app, arguments(server, tmp_path, "--dry-run"), catch_exceptions=False)
    assert result.exit_code == 0
    assert "optim.lr = 0.01  (flag)" in result.output
    assert "loss.cap = 2.0  (default)" in result.output
    assert f"complete at version {VERSIONS}" in result.output
    assert not (tmp_path / "work").exists()
    assert not server.client.heads
