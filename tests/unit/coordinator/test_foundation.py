from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coordinator.app import create_app, open_run
from coordinator.config import CoordinatorConfig
from coordinator.coordinator import Coordinator
from coordinator.foundation import Founding, check_host, found
from coordinator.preset_settings import with_settings
from coordinator.presets import preset
from coordinator.quantisation import least_steps
from learner.config import LearnerConfig
from protocol.config import load_config
from protocol.errors import LocalFault, PeerFault
from protocol.identity import Identity
from tests.fakes.architectures import CONFIGS
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import AppTransport, FakeLearner, FakeNode, World
from tests.fakes.model_folder import make_model_folder
from verifier.calibrate import limits


@pytest.fixture
def founding(tmp_path: Path) -> Founding:
    return Founding(preset("tiny"), make_model_folder(tmp_path / "model"), "127.0.0.1", 8700, seed=1, max_versions=3)


def test_a_run_is_founded_whole(tmp_path: Path, founding: Founding, clock: FakeClock) -> None:
    link = found(tmp_path / "run", founding, clock)
    run = open_run(tmp_path / "run")
    assert link.run_id == run.id
    assert link.root == run.root_key
    manifest = run.manifest
    assert (manifest.sampling.vocab_size, manifest.sampling.eos_token_ids) == (64, [0])
    assert manifest.batch.max_versions == 3
    assert set(manifest.model.files) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in ("admin.token", "link.txt", "keys/root.key"):
        assert stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_names_the_hash_of_its_state_roots(tmp_path: Path, founding: Founding, clock: FakeClock) -> None:
    found(tmp_path / "one", founding, clock)
    assert open_run(tmp_path / "one").manifest.model.state_hash == "sha-256"
    blake3 = replace(founding, preset=with_settings(founding.preset, ["state_hash=blake3"]))
    found(tmp_path / "two", blake3, clock)
    assert open_run(tmp_path / "two").manifest.model.state_hash == "blake3"
    with pytest.raises(LocalFault) as caught:
        with_settings(founding.preset, ["state_hash=md5"])
    assert "blake3" in str(caught.value.expected)


@pytest.mark.parametrize("steps", [16, 64, 128, 249, 250])
def test_steps_too_coarse_for_a_profile_found_nothing(
    tmp_path: Path, founding: Founding, clock: FakeClock, steps: int
) -> None:
    coarse = with_settings(founding.preset, [f"sampling.steps_per_nat={steps}"])
    with pytest.raises(LocalFault) as caught:
        found(tmp_path / "run", replace(founding, preset=coarse), clock)
    assert (caught.value.code, caught.value.expected, caught.value.got) == ("E_CONFIG", "steps_per_nat >= 251", steps)
    assert "--calibration" in (caught.value.hint or "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_temperature_that_magnifies_arithmetic_beyond_the_limits_founds_nothing(
    tmp_path: Path, founding: Founding, clock: FakeClock
) -> None:
    for milli, refused in ((1000, False), (250, False), (25, True)):
        chosen = with_settings(founding.preset, [f"sampling.temperature_milli={milli}"])
        if not refused:
            found(tmp_path / str(milli), replace(founding, preset=chosen), clock)
            continue
        with pytest.raises(LocalFault, match="temperature") as caught:
            found(tmp_path / str(milli), replace(founding, preset=chosen), clock)
        assert (caught.value.code, caught.value.expected) == ("E_CONFIG", "max_margin_micro > 2400")


def test_finer_steps_and_limits_measured_for_coarse_ones_are_fine(
    tmp_path: Path, founding: Founding, clock: FakeClock
) -> None:
    finer = with_settings(founding.preset, ["sampling.steps_per_nat=1024", "sampling.head_max_code=14148"])
    found(tmp_path / "finer", replace(founding, preset=finer), clock)
    coarse = with_settings(founding.preset, ["sampling.steps_per_nat=64", "sampling.head_max_code=884"])
    measured = limits([], "torch-cpu-fp32", 64)
    assert least_steps(measured, 1000) <= 64
    found(tmp_path / "coarse", replace(founding, preset=coarse.model_copy(update={"profiles": (measured,)})), clock)
    nothing_passes = measured.model_copy(update={"max_token_kl_micro": 0})
    with pytest.raises(LocalFault):
        found(
            tmp_path / "strict", replace(founding, preset=coarse.model_copy(update={"profiles": (nothing_passes,)})),
            clock,
        )


def test_a_seed_makes_the_run_id_repeatable(tmp_path: Path, founding: Founding, clock: FakeClock) -> None:
    one, two = found(tmp_path / "a", founding, clock), found(tmp_path / "b", founding, clock)
    assert one.run_id == two.run_id
    assert one.root != two.root
    assert one.token != two.token


def test_a_full_directory_is_left_alone(tmp_path: Path, founding: Founding, clock: FakeClock) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("data")
    with pytest.raises(LocalFault) as caught:
        found(tmp_path / "run", founding, clock)
    assert caught.value.code == "E_CONFIG"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_file_in_the_way_is_explained(tmp_path: Path, founding: Founding, clock: FakeClock, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LocalFault) as caught:
        found(tmp_path / name, founding, clock)
    assert caught.value.code == "E_CONFIG"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", None), ("config.json", "{}"), ("config.json", "nonsense"), ("tokenizer.json", None)],
)
def test_a_model_folder_that_lacks_something_founds_nothing(
    tmp_path: Path, founding: Founding, clock: FakeClock, file: str, content: str | None
) -> None:
    target = founding.model / file
    target.unlink()
    if content is not None:
        target.write_text(content)
    with pytest.raises(LocalFault):
        found(tmp_path / "run", founding, clock)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_data_is_asked_for_by_name(tmp_path: Path, founding: Founding, clock: FakeClock) -> None:
    task = preset("smollm2", "gsm8k")
    wanting = Founding(task, founding.model, "127.0.0.1", 8700)
    with pytest.raises(LocalFault) as caught:
        found(tmp_path / "run", wanting, clock)
    assert (caught.value.code, caught.value.expected) == ("E_CONFIG", "--data FILE")


def test_the_founded_run_serves_real_prompts(tmp_path: Path, founding: Founding, clock: FakeClock) -> None:
    link = found(tmp_path / "run", founding, clock)
    app = create_app(CoordinatorConfig(directory=tmp_path / "run", sweep_s=3600), clock=clock)
    coordinator = app.state.coordinator
    assert isinstance(coordinator, Coordinator)
    transport = AppTransport(app)
    learner, node = (Identity.load(tmp_path / "run" / "keys" / "learner.key"), Identity(b"n" * 32))
    client = World.connect(transport, learner, clock, link.run_id)
    publisher = FakeLearner(learner, client, clock)
    first = publisher.manifest(
        coordinator.store, run_id=link.run_id, layout_sha256=coordinator.run.manifest.model.layout_sha256
    ).sign(learner)
    client.publish_checkpoint(first)
    publisher.manifests.append(first)
    client.publish_head(publisher.head(run_id=link.run_id).sign(learner))
    worker = FakeNode(node, World.connect(transport, node, clock, link.run_id), clock)
    worker.client.register(worker.hello(run_id=link.run_id, join_token=link.token))
    leases = worker.client.lease(worker.request(2, run_id=link.run_id)).leases
    assert len(leases) == 2
    transport.stop()


def test_a_mixture_of_experts_records_its_routes_when_asked(
    tmp_path: Path, founding: Founding, clock: FakeClock
) -> None:
    model = founding.model
    CONFIGS["qwen3_moe"].save_pretrained(model)
    gates = {f"model.layers.{n}.mlp.gate.weight": np.zeros((8, 32), np.float32) for n in range(2)}
    save_file(gates, model / "model.safetensors")
    asked = with_settings(founding.preset, ["sampling.record_routes=true"])
    found(tmp_path / "run", replace(founding, preset=asked), clock)
    routes = open_run(tmp_path / "run").manifest.sampling.routes
    assert routes is not None
    assert (routes.layers, routes.experts, routes.per_token) == (2, 8, 2)


def test_a_dense_model_cannot_record_routes(tmp_path: Path, founding: Founding, clock: FakeClock) -> None:
    asked = with_settings(founding.preset, ["sampling.record_routes=true"])
    with pytest.raises(LocalFault) as caught:
        found(tmp_path / "run", replace(founding, preset=asked), clock)
    assert caught.value.code == "E_CONFIG"
    assert "record_routes" in str(caught.value)


def test_a_manifest_of_another_root_is_refused(tmp_path: Path, founding: Founding, clock: FakeClock) -> None:
    found(tmp_path / "run", founding, clock)
    (tmp_path / "run" / "root.pub").write_text(Identity(b"x" * 32).public_key.hex())
    with pytest.raises(PeerFault) as caught:
        create_app(CoordinatorConfig(directory=tmp_path / "run"), clock=clock)
    assert caught.value.code == "E_SIGNATURE"


def test_the_learner_gets_the_presets_settings(tmp_path: Path, founding: Founding, clock: FakeClock) -> None:
    found(tmp_path / "run", founding, clock)
    settings, _ = load_config(LearnerConfig, tmp_path / "run" / "learner.toml", "ASSAY_LEARNER_", {}, environ={})
    assert settings.optim.lr == founding.preset.learner["optim.lr"]
    assert settings.loss.preset == founding.preset.learner["loss.preset"]


@pytest.mark.parametrize("host", ["", "my host", "http://x.y:80", "x.y:80", "a..b", "-a", "a/b", "[::1]", "a" * 64])
def test_a_host_that_nobody_can_dial_founds_nothing(
    tmp_path: Path, founding: Founding, clock: FakeClock, host: str
) -> None:
    with pytest.raises(LocalFault) as caught:
        found(tmp_path / "run", replace(founding, host=host), clock)
    assert (caught.value.code, caught.value.got) == ("E_CONFIG", repr(host))
    assert "without http://" in caught.value.expected
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("host", ["localhost", "203.0.113.7", "::1", "a.example.", "my_host-1.x", "b\u00fccher.de"])
def test_names_and_addresses_are_hosts(host: str) -> None:
    check_host(host)


def test_data_that_no_task_uses_founds_nothing(tmp_path: Path, founding: Founding, clock: FakeClock) -> None:
    with pytest.raises(LocalFault) as caught:
        found(tmp_path / "run", replace(founding, data=tmp_path / "train.jsonl"), clock)
    assert (caught.value.code, caught.value.expected) == ("E_CONFIG", "no --data")


@pytest.mark.parametrize("room", [0, 100, 3000, 20_000, 100_000])
def test_a_full_disk_leaves_one_named_error_and_no_half_folder(tmp_path: Path, room: int) -> None:
    """No file may be longer than ``room`` bytes: the kernel refuses the rest, wherever founding is by then."""
    model = make_model_folder(tmp_path / "model")
    command = [sys.executable, "-m", "assay", "coordinator", "init", str(tmp_path / "run"), "--model", str(model)]

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, preexec_fn=full, capture_output=True, text=True, timeout=300, env=environment)
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error E_")
    assert "got:" in done.stderr
    assert done.returncode in (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
