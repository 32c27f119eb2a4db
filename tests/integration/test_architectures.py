"""Engine, reference and learner on each architecture: one distribution, whoever computes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from learner.batch import TrainingGroup, TrainingSample, make_batch
from learner.config import LearnerConfig
from learner.places import read_model
from learner.trainer import Trainer
from node.selftest import kl_of_heads
from node.torch_engine import TorchEngine
from protocol.reference.model import ReferenceModel
from protocol.sampler import check_head, replay
from tests.fakes.architectures import CONFIGS, architecture_folder
from tests.unit.node.kit import FakeWeights, drain, request, rules

RULES = rules(max_new_tokens=12)
#: Largest mean KL (nats per token) of engine and reference: quantisation of the head and rounding of fp32.
AGREE = 1e-4


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_engine_reference_and_learner_agree(name: str, tmp_path: Path):
    folder = architecture_folder(name, tmp_path)
    layout, state = read_model(folder)
    engine = TorchEngine(folder, layout, RULES, FakeWeights({0: state}), slots=4)
    engine.submit([request(number, group=1) for number in range(4)])
    finished = drain(engine)
    reference = ReferenceModel.load(folder, layout)
    for done in finished:
        check_head(done.rollout, RULES)
        assert replay(done.rollout, done.request.seed, RULES) is None
        logits = reference.logits_for(done.request.prompt, done.rollout, {0: state}.__getitem__)
        assert np.mean(kl_of_heads(done.rollout, torch.log_softmax(logits.double(), 1).numpy(), RULES)) < AGREE

    samples = tuple(TrainingSample(done.rollout, 10**6 * (i % 2)) for i, done in enumerate(finished))
    group = TrainingGroup(0, list(finished[0].request.prompt), samples)
    trainer = Trainer.open(folder, layout, state, LearnerConfig.model_validate({"optim": {"lr": 1e-2}}), RULES)
    result = trainer.train_step(make_batch([group], 0, RULES, trainer.config))
    assert result.skipped is None
    assert abs(result.metrics["kl"]) < AGREE
    assert result.metrics["ess"] > 0.999
    published = trainer.published_state()
    moved = [entry.name for entry in layout.entries if (published[entry.name] != state[entry.name]).any()]
    assert len(moved) > len(layout.entries) / 2
