"""Mixtures of experts as Hugging Face folders hold them: a tensor per expert in the file, one per layer here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from protocol.errors import LocalFault
from protocol.reference.loader import load_config_model, set_state
from protocol.weights.experts import E_EXPERTS
from protocol.weights.layout import read_safetensors, write_safetensors
from tests.fakes.architectures import CONFIGS

NAMES = ["mixtral", "qwen3_moe"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers writes it."""
    torch.manual_seed(1)
    path: Path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).to(torch.bfloat16).save_pretrained(path)
    return path


def test_a_folder_has_the_names_of_the_model(folder):
    in_file = load_file(folder / "model.safetensors")
    assert any(".experts.1." in name for name in in_file)  # else there is nothing to put together
    layout, state = read_safetensors(folder / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert {entry.name for entry in layout.entries} == set(theirs)
    ours = load_config_model(folder)
    set_state(ours, layout, state)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def test_what_we_write_is_what_transformers_reads(folder, tmp_path):
    layout, state = read_safetensors(folder / "model.safetensors")
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_safetensors(tmp_path / "model.safetensors", layout, state)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    again, same = read_safetensors(tmp_path / "model.safetensors")
    assert again.sha256 == layout.sha256
    assert all(np.array_equal(same[name], state[name]) for name in state)


@pytest.mark.parametrize("harm", ["missing", "shape"])
def test_experts_that_do_not_belong_together_are_refused(folder, tmp_path, harm):
    tensors = load_file(folder / "model.safetensors")
    victim = next(name for name in sorted(tensors) if ".experts.1." in name)
    if harm == "missing":
        del tensors[victim]
    else:
        tensors[victim] = tensors[victim][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LocalFault) as caught:
        read_safetensors(tmp_path / "model.safetensors")
    assert caught.value.code == E_EXPERTS
