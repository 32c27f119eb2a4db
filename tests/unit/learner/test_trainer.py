"""The step: gradients of the whole model, what is skipped, exact state."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.batch import make_batch
from learner.config import LearnerConfig
from learner.corrections import PRESETS
from learner.masters import E_MODEL_LAYOUT
from learner.trainer import E_MODEL_UNSUPPORTED, StepAbandoned, Trainer
from protocol.errors import LocalFault
from protocol.weights.layout import Layout
from protocol.weights.state_root import state_root
from tests.fakes.learning import load_model, make_model_dir, sampling_rules

RULES = sampling_rules()


def make_trainer(folder, **sections) -> Trainer:
    layout, state = load_model(folder)
    config = LearnerConfig.model_validate({"optim": {"lr": 1e-2}} | sections)
    return Trainer.open(folder, layout, state, config, RULES)


def batch_for(trainer: Trainer, groups, version: int = 0):
    return make_batch(groups, version, RULES, trainer.config)


def root_of(trainer: Trainer) -> str:
    return state_root(trainer.masters.layout, trainer.published_state())


@pytest.fixture(scope="module")
def groups(speaker):
    return [speaker.group(g, rewards=[0, 10**6, 0, 10**6]) for g in range(3)]


def gradients(trainer: Trainer, groups, version: int = 0) -> list[torch.Tensor]:
    trainer._accumulate(batch_for(trainer, groups, version), lambda: False)
    grads = [p.grad.clone() for p in trainer.masters.parameters]
    trainer._drop_gradients()
    return grads


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_is_that_of_the_whole_model(tmp_path, groups, tied):
    """Against plain autograd over full logits of each completion by itself (preset pg)."""
    trainer = make_trainer(make_model_dir(tmp_path, tied=tied), loss={"preset": "pg"})
    got = gradients(trainer, groups)
    loss = torch.zeros(())
    for s in batch_for(trainer, groups).sequences:
        logits = trainer.model(torch.from_numpy(np.concatenate([s.prompt, s.tokens_T]))[None]).logits[0]
        logp = torch.log_softmax(logits[len(s.prompt) - 1 : -1], 1).gather(1, torch.from_numpy(s.tokens_T)[:, None])
        loss = loss - (torch.from_numpy(s.signal_T).float() * logp[:, 0]).sum()
    loss.backward()
    for grad, parameter in zip(got, trainer.masters.parameters, strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [
    {"share_prompts": False}, {"max_tokens": 20}, {"share_prompts": False, "max_tokens": 16},
    {"gradient_checkpointing": True}, {"head_chunk_mib": 1},
])
def test_layout_and_microbatches_do_not_change_the_gradient(model_dir, groups, changes):
    expected = gradients(make_trainer(model_dir), groups, version=2)
    got = gradients(make_trainer(model_dir, batch=changes), groups, version=2)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_at_lag_zero_learner_and_sampler_agree(model_dir, groups):
    metrics = make_trainer(model_dir).train_step(batch_for(make_trainer(model_dir), groups)).metrics
    assert abs(metrics["kl"]) < 1e-5
    assert metrics["ess"] > 0.9999
    assert metrics["lag_max"] == 0


def test_a_step_raises_the_chance_of_what_was_rewarded(model_dir, groups):
    trainer = make_trainer(model_dir)
    batch = batch_for(trainer, groups)

    def advantage_weighted() -> float:
        """Sum of advantage times log p of the drawn tokens, up to a constant."""
        seen = trainer._accumulate(batch, lambda: False)[0]
        return float((seen.signals() * seen.stats().log_ratio_N).sum())

    before = advantage_weighted()
    trainer._drop_gradients()
    assert trainer.train_step(batch).skipped is None
    assert advantage_weighted() > before


def test_small_steps_add_up_in_the_masters(model_dir, groups):
    """Steps far below bf16 resolution change nothing at once and something in the end."""
    trainer = make_trainer(model_dir, optim={"lr": 3e-6})
    batch, roots = batch_for(trainer, groups), [root_of(trainer)]
    first = [t.clone() for t in trainer.masters.tensors]
    for _ in range(3):
        trainer.train_step(batch)
        roots.append(root_of(trainer))
    assert all(not torch.equal(a, b) for a, b in zip(first, trainer.masters.tensors, strict=True))
    for parameter, state in zip(trainer.masters.parameters, trainer.published_state().values(), strict=True):
        bits = parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits, state)


@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_non_finite_numbers_neither_poison_nor_stop(model_dir, groups, poison):
    trainer = make_trainer(model_dir)
    batch = batch_for(trainer, groups)
    trainer.train_step(batch)
    state, root = copy.deepcopy(trainer.state_dict()), root_of(trainer)
    bad = replace(batch, sequences=tuple(
        replace(s, signal_T=np.full_like(s.signal_T, float(poison))) if i == 1 else s
        for i, s in enumerate(batch.sequences)
    ))
    result = trainer.train_step(bad)
    assert result.skipped == result.metrics["skipped"] == "non_finite_loss"
    assert root_of(trainer) == root
    after = trainer.state_dict()
    assert after["steps"] == state["steps"]
    for name, master in state["masters"].items():
        assert torch.equal(master, after["masters"][name])
    assert trainer.train_step(batch).skipped is None


def test_a_non_finite_gradient_is_skipped(model_dir, groups):
    trainer = make_trainer(model_dir)
    trainer.masters.parameters[0].register_hook(lambda grad: grad * torch.inf)
    root = root_of(trainer)
    assert trainer.train_step(batch_for(trainer, groups)).skipped == "non_finite_gradient"
    assert root_of(trainer) == root


def test_an_outlier_gradient_is_skipped_once_there_is_a_history(model_dir, groups):
    trainer = make_trainer(model_dir, optim={"lr": 1e-5})
    batch = batch_for(trainer, groups)
    for _ in range(16):
        assert trainer.train_step(batch).skipped is None
    huge = replace(batch, sequences=tuple(replace(s, signal_T=s.signal_T * 1e4) for s in batch.sequences))
    assert trainer.train_step(huge).skipped == "gradient_outlier"
    assert trainer.train_step(batch).skipped is None


def test_a_batch_without_signal_is_skipped(model_dir, groups):
    trainer = make_trainer(model_dir)
    flat = [replace(g, samples=tuple(replace(s, reward_micro=1) for s in g.samples)) for g in groups]
    result = trainer.train_step(batch_for(trainer, flat))
    assert result.skipped == "no_signal"
    assert result.metrics["groups_left_out"] == {"no_signal": 3}
    assert trainer.train_step(batch_for(trainer, [])).skipped == "no_signal"
    assert trainer.steps == 0


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_takes_a_step_and_meets_wild_ratios(model_dir, groups, preset):
    """On stale data, then with log-ratios of +-inf: finite numbers, a counted cut, and the next step as usual."""
    trainer = make_trainer(model_dir, loss={"preset": preset})
    batch = batch_for(trainer, groups, version=2)
    assert trainer.train_step(batch).skipped is None
    for log_q in (-np.inf, 0.0):
        wild = replace(batch, sequences=tuple(
            replace(s, log_q_T=np.full_like(s.log_q_T, log_q)) for s in batch.sequences
        ))
        result = trainer.train_step(wild)
        assert result.skipped in (None, "gradient_outlier")
        assert np.isfinite(result.metrics["loss"])
        assert np.isfinite(result.metrics["ess_used"])
    assert trainer.train_step(batch).skipped is None


def test_behaviour_logprobs_that_are_nan_are_skipped_and_named(model_dir, groups):
    trainer = make_trainer(model_dir)
    batch, root = batch_for(trainer, groups), root_of(trainer)
    first, *rest = batch.sequences
    bad = replace(batch, sequences=(replace(first, log_q_T=np.full_like(first.log_q_T, np.nan)), *rest))
    stale = replace(bad, sequences=tuple(replace(s, lag_T=s.lag_T + 1) for s in bad.sequences))
    assert trainer.train_step(stale).skipped in ("non_finite_loss", "non_finite_gradient")
    assert root_of(trainer) == root
    assert trainer.train_step(batch).skipped is None


def test_a_batch_with_everything_masked_changes_nothing(model_dir, groups):
    """Every ratio is outside its band: no gradient, no poison, and the cut is seen."""
    trainer = make_trainer(model_dir, loss={"preset": "mis"}, optim={"lr": 1e-2})
    batch, root = batch_for(trainer, groups, version=1), root_of(trainer)
    far = replace(batch, sequences=tuple(replace(s, log_q_T=s.log_q_T + 5.0) for s in batch.sequences))
    result = trainer.train_step(far)
    assert (result.metrics["truncated"], result.metrics["grad_norm"], result.metrics["ess_used"]) == (1.0, 0.0, 0.0)
    assert root_of(trainer) == root
    assert trainer.train_step(batch).skipped is None


def test_caps_and_rate_follow_the_sample_and_survive_a_restart(model_dir, groups):
    """The controller's state is part of the trainer's: a restart in between changes no bit."""
    settings = {"loss": {"preset": "tis", "cap": 50.0, "ess_target": 0.95, "ess_base": 0.95}, "optim": {"lr": 3e-2}}
    batch = batch_for(make_trainer(model_dir, **settings), groups, version=3)
    skewed = replace(batch, sequences=tuple(
        replace(s, log_q_T=s.log_q_T - 2.0 * (s.sample % 2)) for s in batch.sequences
    ))
    straight, first = make_trainer(model_dir, **settings), make_trainer(model_dir, **settings)
    for _ in range(4):
        result = straight.train_step(skewed)
    assert straight.caps.tightness[2] < 1.0
    assert result.metrics["lr_scale"] < 1.0
    assert result.metrics["lr"] == pytest.approx(3e-2 * result.metrics["lr_scale"])
    for _ in range(2):
        first.train_step(skewed)
    second = make_trainer(model_dir, **settings)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(2):
        second.train_step(skewed)
    assert second.caps == straight.caps
    assert root_of(second) == root_of(straight)


def test_a_second_moment_is_bounded_over_the_batch_not_the_microbatch(model_dir, groups):
    found = []
    for changes in ({}, {"max_tokens": 20}):
        trainer = make_trainer(model_dir, loss={"preset": "m2po"}, batch=changes)
        batch, rng = batch_for(trainer, groups, version=2), np.random.default_rng(0)
        noisy = replace(batch, sequences=tuple(
            replace(s, log_q_T=s.log_q_T + 0.5 * rng.standard_normal(len(s.log_q_T))) for s in batch.sequences
        ))
        seen, _ = trainer._accumulate(noisy, lambda: False)
        assert 0.0 < float(seen.stats().truncated_N.mean()) < 0.6
        found.append([p.grad.clone() for p in trainer.masters.parameters])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_the_step_looks_at_every_node(model_dir, groups):
    trainer = make_trainer(model_dir)
    owned = [replace(g, samples=tuple(replace(s, node_id=f"{s.rollout.sample % 2:064x}") for s in g.samples))
             for g in groups]
    nodes = trainer.train_step(batch_for(trainer, owned)).metrics["nodes"]
    assert set(nodes) == {f"{i:064x}" for i in range(2)}
    assert sum(n["tokens"] for n in nodes.values()) == batch_for(trainer, owned).tokens
    assert all(n["k3"] < 1e-4 and n["z"] == 0.0 for n in nodes.values())  # fresh and honest: rounding alone
    assert all(0 < n["head_kl"] <= 1 / (8 * trainer.rules.steps_per_nat**2) for n in nodes.values())


def test_ratios_beyond_all_bounds_stay_within_the_cap(model_dir, groups):
    trainer = make_trainer(model_dir, loss={"preset": "tis+sc", "cap": 2.0})
    batch = batch_for(trainer, groups, version=1)
    wild = replace(batch, sequences=tuple(replace(s, log_q_T=np.full_like(s.log_q_T, -1e30)) for s in batch.sequences))
    result = trainer.train_step(wild)
    assert result.skipped is None
    assert np.isfinite(result.metrics["grad_norm"])
    assert result.metrics["ratio_max"] == pytest.approx(np.exp(20), rel=1e-3)
    assert result.metrics["truncated"] == 1.0


def test_one_token_completions_train(model_dir, groups):
    rollouts = [g.samples[0].rollout for g in groups]
    cut = [
        replace(
            r, tokens=r.tokens[:1], head_lengths=r.head_lengths[:1], head_ids=r.head_ids[: r.head_lengths[0]],
            head_codes=r.head_codes[: r.head_lengths[0]], tail_codes=r.tail_codes[:1], token_codes=r.token_codes[:1],
        )
        for r in rollouts
    ]
    group = replace(groups[0], samples=tuple(
        replace(groups[0].samples[0], rollout=replace(r, sample=i), reward_micro=i) for i, r in enumerate(cut)
    ))
    for share in (True, False):
        trainer = make_trainer(model_dir, batch={"share_prompts": share})
        result = trainer.train_step(batch_for(trainer, [group]))
        assert result.skipped is None
        assert result.metrics["tokens"] == 3


def test_resuming_gives_the_same_bytes(model_dir, groups):
    """N steps, state through a file, N steps = 2N steps."""
    batches = [groups[:1], groups[1:2], groups[2:], groups]

    def steps(trainer, first, last):
        for version in range(first, last):
            trainer.train_step(batch_for(trainer, batches[version], version))

    straight = make_trainer(model_dir)
    steps(straight, 0, 4)
    first = make_trainer(model_dir)
    steps(first, 0, 2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make_trainer(model_dir)
    second.load_state_dict(torch.load(file, weights_only=True))
    steps(second, 2, 4)
    assert root_of(second) == root_of(straight)
    for a, b in zip(second.masters.tensors, straight.masters.tensors, strict=True):
        assert torch.equal(a, b)


def test_the_same_step_twice_gives_the_same_bytes(model_dir, groups):
    roots = set()
    for _ in range(2):
        trainer = make_trainer(model_dir)
        trainer.train_step(batch_for(trainer, groups))
        roots.add(root_of(trainer))
    assert len(roots) == 1


def test_a_stop_between_microbatches_leaves_the_state(model_dir, groups):
    trainer = make_trainer(model_dir, batch={"max_tokens": 16})
    root, asked = root_of(trainer), iter([False, False, True])
    with pytest.raises(StepAbandoned):
        trainer.train_step(batch_for(trainer, groups), lambda: next(asked))
    assert root_of(trainer) == root
    assert all(p.grad is None for p in trainer.masters.parameters)


def test_learning_rate_warms_up(model_dir, groups):
    trainer = make_trainer(model_dir, optim={"lr": 1e-3, "warmup_steps": 4})
    rates = [trainer.train_step(batch_for(trainer, groups)).metrics["lr"] for _ in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_a_layout_that_is_not_the_models_is_refused(model_dir):
    layout, state = load_model(model_dir)
    tensors = {e.name: (e.dtype, e.shape) for e in layout.entries}
    del tensors["model.norm.weight"]
    with pytest.raises(LocalFault) as caught:
        Trainer.open(model_dir, Layout.of(tensors), state, LearnerConfig(), RULES)
    assert caught.value.code == E_MODEL_LAYOUT


def test_a_model_with_another_head_is_refused(model_dir):
    trainer = make_trainer(model_dir)
    trainer.model.config.final_logit_softcapping = 30.0
    layout, state = load_model(model_dir)
    with pytest.raises(LocalFault) as caught:
        Trainer(trainer.model, layout, state, trainer.config, RULES)
    assert caught.value.code == E_MODEL_UNSUPPORTED
