"""A learner of several processes: gradients of one process, parts for any number, and kill -9 without loss."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.batch import Batch, make_batch
from learner.checkpoint import ResumePoints
from learner.config import LearnerConfig
from learner.journal import Journal
from learner.parts import read_part
from learner.trainer import Trainer
from tests.fakes.learner_server import VERSIONS, Server, arguments
from tests.fakes.learning import LEARNER, VOCAB, Speaker, load_model, make_learner, sampling_rules
from tests.fakes.same_bits import assert_same_bits

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
#: Largest relative difference of gradients between one process and two: sums are taken in another order.
TOLERANCE = 1e-5
SETTINGS: dict[str, Any] = {"optim": {"lr": 1e-2, "weight_decay": 0.1}, "batch": {"max_tokens": 24}}


def odd_model(folder: Path) -> Path:
    """Rows that two processes cannot divide evenly, and a head of its own."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=18, intermediate_size=27, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=6, tie_word_embeddings=False, max_position_embeddings=128,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def torchrun(size: int, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *command],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
    )


def trainer_of(folder: Path, config: LearnerConfig) -> Trainer:
    layout, state = load_model(folder / "model")
    return Trainer.open(folder / "model", layout, state, config, sampling_rules())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LearnerConfig, list[Batch]]:
    """Three batches of an odd number of microbatches, written down for the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    config = LearnerConfig.model_validate(SETTINGS)
    speaker = Speaker(odd_model(folder / "model"), sampling_rules())
    groups = [speaker.group(g, rewards=[0, 10**6, 0, 10**6]) for g in range(5)]
    batches = [make_batch(groups[v : v + 3], v, sampling_rules(), config) for v in range(3)]
    (folder / "batches.pt").write_bytes(pickle.dumps(batches))
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    return folder, config, batches


def largest_difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def test_two_ranks_train_as_one_does(prepared):
    folder, config, batches = prepared
    process = torchrun(2, "-m", "tests.fakes.rank_worker", str(folder))
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors

    alone = trainer_of(folder, config)
    metrics = [alone.train_step(batch).metrics for batch in batches]
    got_metrics, published = pickle.loads((folder / "state.pickle").read_bytes())
    for got, expected in zip(got_metrics, metrics, strict=True):
        assert got["tokens"] == expected["tokens"]
        for name in ("loss", "kl", "ess", "grad_norm", "entropy", "ratio_max"):
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name

    # the parts of two ranks, read by one: what a later step depends on
    resumed = trainer_of(folder, config)
    resumed.load(folder / "saved")
    assert resumed.steps == 3
    for name, bits in resumed.published_state().items():
        assert bits.tobytes() == published[name].tobytes(), name
    for ours, theirs in zip(alone.masters.tensors, resumed.masters.tensors, strict=True):
        assert ours.shape == theirs.shape
        assert largest_difference(theirs, ours) < 1e-4
    for rank in range(3):
        assert read_part(folder / "saved", rank, 3)["steps"] == 3

    alone.load(folder / "saved")
    alone._accumulate(batches[0], lambda: False)
    for parameter, theirs in zip(alone.masters.parameters, torch.load(folder / "gradients.pt"), strict=True):
        assert largest_difference(theirs, parameter.grad) < TOLERANCE


def test_a_rank_that_dies_ends_all_with_its_reason(prepared, tmp_path):
    folder, _, _ = prepared
    for name in ("model", "batches.pt", "config.json"):
        (tmp_path / name).symlink_to(folder / name)
    process = torchrun(2, "-m", "tests.fakes.rank_worker", str(tmp_path), "--die", "1")
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert "E_RANK_LOST" in errors
    assert "lost each other" in errors
    assert not (tmp_path / "state.pickle").exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    LEARNER.save(tmp_path / "learner.key")
    with Server(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def kill_rank(launcher: int, rank: int) -> None:
    """kill -9 to one of the launcher's processes."""
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            os.kill(int(pid), signal.SIGKILL)
            return
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
def test_two_ranks_killed_and_started_again_make_the_same_bits(server: Server, tmp_path: Path):
    """N steps, kill -9, N steps are 2N steps: weights, masters and moments, at the same number of processes."""
    given = arguments(server, tmp_path, "--set", "batch.max_tokens=24")
    # the launcher takes --log for an abbreviation of its own
    command = ["-m", "learner", *("--log-file" if word == "--log" else word for word in given)]
    killed = threading.Event()

    def act(call: str) -> None:
        if call == "publish_head" and not server.stocked.is_set():
            server.stock()
        if call == "publish_checkpoint" and len(server.client.manifests) == 2 and not killed.is_set():
            killed.set()
            kill_rank(process.pid, 0)

    server.client.on_call = act
    process = torchrun(2, *command)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert killed.is_set(), errors
    assert process.returncode != 0
    process = torchrun(2, *command)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert f"complete at version {VERSIONS}" in output
    assert len(set(server.client.roots())) == VERSIONS + 1

    straight = tmp_path / "straight"
    straight.mkdir()
    write_straight_run(server, tmp_path / "work", straight)
    process = torchrun(2, "-m", "tests.fakes.rank_worker", str(straight))
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    point = ResumePoints(tmp_path / "work").newest(at_most=VERSIONS)
    assert point is not None
    for rank in range(2):
        ours, theirs = read_part(point.folder, rank, 2), read_part(straight / "saved", rank, 2)
        del ours["rng"], theirs["rng"]  # of other processes, and used for nothing
        assert_same_bits(ours, theirs)


def write_straight_run(server: Server, work: Path, folder: Path) -> None:
    """What ``rank_worker`` needs to make the recorded steps in one go."""
    journal = Journal(work)
    plans = [journal.plan(version) for version in range(1, VERSIONS + 1)]
    config = journal.settings(plans[0].plan.config_sha256)
    learner = make_learner(folder / "work", server.model, server.store, server.client, manifest=server.manifest,
                           config=config)
    (folder / "model").symlink_to(server.model)
    (folder / "batches.pt").write_bytes(pickle.dumps([learner.batch_of(planned) for planned in plans]))
    (folder / "config.json").write_text(config.model_dump_json())
