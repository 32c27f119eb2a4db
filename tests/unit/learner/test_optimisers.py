"""Optimisers, learning-rate schedules, adapters, and the pull towards the reference policy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from learner.adapters import Adapters
from learner.batch import make_batch
from learner.config import LearnerConfig, LoraConfig, OptimConfig
from learner.optimiser import make_optimiser
from learner.ranks import Ranks
from learner.schedule import learning_rate
from learner.trainer import Trainer
from protocol.errors import E_CONFIG, LocalFault
from protocol.reference.loader import load_config_model
from protocol.weights.state_root import state_root
from tests.fakes.learning import load_model, make_model_dir, sampling_rules

RULES = sampling_rules()


def make_trainer(folder, **sections) -> Trainer:
    layout, state = load_model(folder)
    config = LearnerConfig.model_validate({"optim": {"lr": 1e-2}} | sections)
    return Trainer.open(folder, layout, state, config, RULES)


def root_of(trainer: Trainer) -> str:
    return state_root(trainer.layout, trainer.published_state())


@pytest.fixture(scope="module")
def groups(speaker):
    return [speaker.group(g, rewards=[0, 10**6, 0, 10**6]) for g in range(3)]


def rates(**settings) -> list[float]:
    return [learning_rate(step, OptimConfig(lr=1.0, **settings)) for step in range(1, 13)]


def test_schedules_by_hand():
    assert rates() == [1.0] * 12
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = rates(schedule="linear", warmup_steps=2, schedule_steps=10, lr_floor=0.2)
    assert linear[:2] == [0.5, 1.0]
    assert linear[5] == pytest.approx(0.2 + 0.8 * 0.5)  # step 6, halfway from 2 to 10
    assert linear[9:] == pytest.approx([0.2] * 3)
    cosine = rates(schedule="cosine", schedule_steps=8)
    assert cosine[3] == pytest.approx(0.5)
    assert cosine[1] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert cosine[7:] == pytest.approx([0.0] * 5, abs=1e-12)


def test_a_falling_schedule_needs_its_end():
    with pytest.raises(ValueError, match="schedule_steps"):
        OptimConfig(schedule="cosine")
    with pytest.raises(ValueError, match="schedule_steps"):
        OptimConfig(schedule="linear", warmup_steps=5, schedule_steps=5)


def test_sgd_by_hand():
    weight = torch.tensor([[1.0, 2.0]])
    optimiser = make_optimiser([weight], OptimConfig(name="sgd", lr=0.1, momentum=0.5))
    for _ in range(2):
        weight.grad = torch.tensor([[1.0, -1.0]])
        optimiser.step()
    # velocities 1 and 1.5, rate 0.1
    torch.testing.assert_close(weight, torch.tensor([[0.75, 2.25]]))


@pytest.mark.parametrize("sections", [
    {"optim": {"lr": 1e-2, "name": "sgd", "momentum": 0.9}}, {"lora": {"rank": 3}},
    {"optim": {"lr": 1e-2, "schedule": "cosine", "schedule_steps": 3}}, {"loss": {"kl_coef": 0.1}},
])
def test_resuming_gives_the_same_bytes(model_dir, groups, tmp_path, sections):
    def step(trainer, version):
        assert trainer.train_step(make_batch(groups, version, RULES, trainer.config)).skipped is None

    straight, second = make_trainer(model_dir, **sections), make_trainer(model_dir, **sections)
    for version in range(2):
        step(straight, version)
    straight.save(tmp_path)
    second.load(tmp_path)
    assert root_of(second) == root_of(straight)
    for trainer in (straight, second):
        step(trainer, 2)
    assert root_of(second) == root_of(straight)


# -- adapters ----------------------------------------------------------------------------------------------


def test_adapter_gradients_are_those_of_autograd(model_dir):
    layout, state = load_model(model_dir)
    model = load_config_model(model_dir, torch.float32)
    adapters = Adapters(model, layout, state, Ranks(), LoraConfig(rank=2, alpha=6.0, targets=["q_proj"]), seed=1)
    name = "model.layers.0.self_attn.q_proj.weight"
    at = adapters.names.index(f"{name}.lora_A")
    a, b = adapters.tensors[at], adapters.tensors[at + 1]
    b.normal_(generator=torch.Generator().manual_seed(3))
    parameter = dict(model.named_parameters())[name]
    a2, b2 = a.clone().requires_grad_(), b.clone().requires_grad_()
    probe = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
    ((3.0 * b2 @ a2) * probe).sum().backward()
    parameter.grad = probe.clone()
    adapters.take_gradients()
    torch.testing.assert_close(a.grad, a2.grad)
    torch.testing.assert_close(b.grad, b2.grad)


def test_adapters_publish_like_any_step(model_dir, groups):
    """Nothing moves before the first step; then targets move and nothing else does."""
    trainer = make_trainer(model_dir, lora={"rank": 2, "targets": ["q_proj", "down_proj"]})
    first = load_model(model_dir)[1]
    assert all((first[name] == bits).all() for name, bits in trainer.published_state().items())
    trainer.train_step(make_batch(groups, 0, RULES, trainer.config))
    moved = {name for name, bits in trainer.published_state().items() if (first[name] != bits).any()}
    assert moved == {name for name in first if "q_proj" in name or "down_proj" in name}
    assert sum(t.numel() for t in trainer.masters.tensors) < sum(v.size for v in first.values()) / 2


def test_adapters_learn(model_dir, groups):
    trainer = make_trainer(model_dir, lora={"rank": 4}, loss={"preset": "pg"})
    batch = make_batch(groups, 0, RULES, trainer.config)
    losses = [trainer.train_step(batch).metrics["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


def test_adapters_without_a_target_are_refused(model_dir):
    with pytest.raises(LocalFault) as caught:
        make_trainer(model_dir, lora={"rank": 2, "targets": ["nothing"]})
    assert caught.value.code == E_CONFIG


# -- reference policy --------------------------------------------------------------------------------------


def test_at_the_reference_there_is_no_pull(model_dir, groups):
    plain, pulled = make_trainer(model_dir), make_trainer(model_dir, loss={"kl_coef": 10.0})
    metrics = pulled.train_step(make_batch(groups, 0, RULES, pulled.config)).metrics
    expected = plain.train_step(make_batch(groups, 0, RULES, plain.config)).metrics
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert abs(metrics["kl_ref"]) < 1e-4


def test_the_pull_keeps_the_policy_near_its_reference(tmp_path, model_dir, groups):
    """Learner and sampler are elsewhere than the reference: with a pull and no reward they come back."""
    trainer = make_trainer(
        model_dir, loss={"preset": "pg", "kl_coef": 1.0}, optim={"lr": 3e-3}, advantages={"drop_no_signal": False}
    )
    elsewhere = make_trainer(make_model_dir(tmp_path, seed=5))
    for mine, theirs in zip(trainer.masters.tensors, elsewhere.masters.tensors, strict=True):
        mine.add_(0.05 * theirs)
    trainer.masters.push()
    flat = [replace(g, samples=tuple(replace(x, reward_micro=1) for x in g.samples)) for g in groups]
    distances = []
    for version in range(6):
        batch = make_batch(flat, version, RULES, trainer.config)
        distances.append(trainer.train_step(batch).metrics["kl_ref"])
    assert distances[0] > 1e-3
    assert distances[-1] < distances[0] / 2


# -- arithmetic --------------------------------------------------------------------------------------------


def test_layers_in_bfloat16_stay_near_those_in_float32(model_dir, groups):
    trainer = make_trainer(model_dir, batch={"compute": "bfloat16"})
    result = trainer.train_step(make_batch(groups, 0, RULES, trainer.config))
    assert result.skipped is None
    assert 1e-9 < result.metrics["kl"] < 0.02  # rounding is seen, and small
    assert all(tensor.dtype == torch.float32 for tensor in trainer.masters.tensors)
