"""Routing replay from end to end: the engine records experts, the verifier replays and judges them, the learner too.

A tiny Qwen3-MoE with random weights; real engine, real bundles, real session, real trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig

from learner.batch import Batch, TrainingGroup, TrainingSample, make_batch
from learner.config import LearnerConfig
from learner.packing import microbatches
from learner.trainer import Trainer
from node.engine import Request
from node.torch_engine import TorchEngine
from protocol import bundle as bundles
from protocol.errors import LocalFault
from protocol.messages import Lease, RouteRules
from protocol.reference.routing import E_ROUTES, OWN, routers
from protocol.rollout import Bundle
from protocol.weights.layout import State
from tests.adversary.world import EOS, VOCAB, World, quantised, replaced
from tests.unit.node.kit import FakeWeights
from verifier.findings import Judgement

LAYERS, EXPERTS, PER_TOKEN = 2, 8, 2
ROUTES = RouteRules(layers=LAYERS, experts=EXPERTS, per_token=PER_TOKEN)
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_experts=EXPERTS,
    num_experts_per_tok=PER_TOKEN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    norm_topk_prob=True, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=EOS,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("moe"), max_new_tokens=24, config=CONFIG, routes=ROUTES)


@pytest.fixture(scope="module")
def honest(world: World) -> Bundle:
    return rollouts(world, world.lease())


def rollouts(
    world: World, lease: Lease, *, source: FakeWeights | None = None, engine: TorchEngine | None = None,
    before_step: Callable[[int], None] = lambda _: None,
) -> Bundle:
    """What the torch engine makes of a lease."""
    source = source or fixed(world)
    source.shown = max(source.shown, lease.start_version)
    engine = engine or TorchEngine(world.model_dir, world.layout, world.rules, source, slots=4)
    seeds = world.seeds(lease)
    engine.submit([
        Request(str(sample), sample, tuple(lease.prompt_tokens), seeds[sample], lease.start_version)
        for sample in lease.samples
    ])
    finished = []
    for step in range(1000):
        before_step(step)
        finished += engine.step()
        if not engine.open_requests:
            break
    return Bundle(tuple(done.rollout for done in sorted(finished, key=lambda done: done.request.sample)))


def fixed(world: World, states: dict[int, State] | None = None) -> FakeWeights:
    return FakeWeights(states or dict(enumerate(world.states)))


@contextmanager
def steered(engine: TorchEngine, layer: int) -> Iterator[None]:
    """The engine sends every token of a layer to the experts that the router wants least."""

    def least_wanted(router: Any, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, _scores, own = output
        chosen = logits.topk(own.shape[1], largest=False).indices
        weights = torch.softmax(logits.float(), -1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    with ExitStack() as stack:
        router = routers(engine._model)[layer]
        stack.callback(router.register_forward_hook(least_wanted).remove)
        yield


def judged(world: World, bundle: Bundle) -> Judgement:
    return world.judge(world.submission(world.lease(), bundle))


def test_the_engine_records_the_experts_of_every_token(world, honest):
    for rollout in honest.rollouts:
        assert rollout.routes is not None
        assert rollout.routes.shape == (len(rollout), LAYERS, PER_TOKEN)
        assert (np.diff(rollout.routes.astype(int), axis=2) > 0).all()
        assert rollout.routes.max() < EXPERTS
    back = bundles.decode(bundles.encode(honest), world.rules)
    for a, b in zip(back.rollouts, honest.rollouts, strict=True):
        assert a.routes is not None
        assert np.array_equal(a.routes, b.routes)


def test_honest_rollouts_pass(world, honest):
    judgement = judged(world, honest)
    assert judgement.outcome == "pass", judgement.findings
    (finding,) = [f for f in judgement.findings if f.check.startswith("T2.10")]
    assert finding.ok


def test_rollouts_that_cross_a_swap_pass(world):
    source = fixed(world)

    def publish(step: int) -> None:
        source.shown = 2 if step > 10 else 1

    bundle = rollouts(world, world.lease(), source=source, before_step=publish)
    assert any(len(rollout.segments) > 1 for rollout in bundle.rollouts)
    judgement = judged(world, bundle)
    assert judgement.outcome == "pass", judgement.findings


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_node_that_steers_by_its_experts_is_caught(world, layer):
    """Heads, draws and experts agree with each other; the router would never have chosen these."""
    engine = TorchEngine(world.model_dir, world.layout, world.rules, fixed(world), slots=4)
    with steered(engine, layer):
        bundle = rollouts(world, world.lease(), engine=engine, source=engine._source)
    judgement = judged(world, bundle)
    assert judgement.outcome == "fail"
    failed = {f.code for f in judgement.findings if not f.ok}
    assert "E_ROUTE_MARGIN" in failed
    assert "T3" in judgement.tiers


def test_steering_alone_is_enough_to_fail(world):
    """Only tokens after the first are steered, so that keys and values of the prompt are honest."""
    engine = TorchEngine(world.model_dir, world.layout, world.rules, fixed(world), slots=4)
    stack = ExitStack()
    bundle = rollouts(
        world, world.lease(), engine=engine, source=engine._source,
        before_step=lambda step: stack.enter_context(steered(engine, 1)) if step == 4 else None,
    )
    stack.close()
    judgement = judged(world, bundle)
    assert (judgement.outcome, judgement.code) == ("fail", "E_ROUTE_MARGIN")
    assert {f.code for f in judgement.findings if not f.ok} == {"E_ROUTE_MARGIN"}


def test_experts_that_were_not_taken_are_caught(world, honest):
    routes = honest.rollouts[0].routes.copy()
    routes[3, 0] = [e for e in range(EXPERTS) if e not in routes[3, 0]][:PER_TOKEN]
    judgement = judged(world, replaced(honest, 0, routes=routes))
    assert judgement.outcome == "fail"
    assert judgement.code in {"E_ROUTE_MARGIN", "E_HEAD_KL", "E_TOKEN_KL"}


def test_a_bundle_without_experts_is_refused(world, honest):
    bare = Bundle(tuple(replace(rollout, routes=None) for rollout in honest.rollouts))
    judgement = judged(world, bare)
    assert (judgement.outcome, judgement.code) == ("fail", "E_BUNDLE_ROUTES")


def test_experts_are_committed_to(world, honest):
    lease = world.lease()
    submission = world.submission(lease, honest)
    other = replaced(honest, 0, routes=honest.rollouts[0].routes[::-1].copy())
    assert bundles.bundle_root(other, submission.lease.digest) != bundles.bundle_root(honest, submission.lease.digest)


def test_rules_of_another_model_are_refused(world):
    wrong = world.rules.model_copy(update={"routes": RouteRules(layers=LAYERS, experts=EXPERTS, per_token=3)})
    with pytest.raises(LocalFault) as caught:
        TorchEngine(world.model_dir, world.layout, wrong, fixed(world), slots=4)
    assert caught.value.code == E_ROUTES


# -- the learner -------------------------------------------------------------------------------------------


def trainer_of(world: World, **batch: object) -> Trainer:
    config = LearnerConfig.model_validate({"batch": batch, "optim": {"lr": 1e-3}})
    return Trainer.open(world.model_dir, world.layout, world.states[1], config, world.rules)


def batch_of(world: World, bundle: Bundle, trainer: Trainer) -> Batch:
    samples = tuple(TrainingSample(r, 10**6 * (i % 2), "node") for i, r in enumerate(bundle.rollouts))
    return make_batch([TrainingGroup(0, world.lease().prompt_tokens, samples)], 1, world.rules, trainer.config)


def without_routes(batch: Batch) -> Batch:
    return replace(batch, sequences=tuple(replace(s, routes_TYX=None) for s in batch.sequences))


@pytest.fixture(scope="module")
def coarse(world: World) -> Bundle:
    """Rollouts of an engine whose weights are a little off, as those of a quantised one."""
    states = {version: quantised(state) for version, state in enumerate(world.states)}
    return rollouts(world, world.lease(samples=range(8)), source=fixed(world, states))


@pytest.mark.parametrize("share", [True, False])
def test_replay_cuts_the_learners_mismatch(world, coarse, share):
    found = {}
    for replayed in (True, False):
        trainer = trainer_of(world, share_prompts=share)
        batch = batch_of(world, coarse, trainer)
        result = trainer.train_step(batch if replayed else without_routes(batch))
        assert result.skipped is None
        found[replayed] = result.metrics["head_kl"]
    assert found[True] < 0.7 * found[False]


def test_layouts_with_replay_agree(world, coarse):
    norms = []
    for options in ({"share_prompts": True}, {"share_prompts": False}, {"gradient_checkpointing": True},
                    {"max_tokens": 40}):
        trainer = trainer_of(world, **options)
        norms.append(trainer.train_step(batch_of(world, coarse, trainer)).metrics["grad_norm"])
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-4)


def test_every_loss_token_is_routed(world, coarse):
    trainer = trainer_of(world)
    batch = batch_of(world, coarse, trainer)
    for micro in microbatches(batch, trainer.config.batch):
        assert micro.routes_MYX is not None
        assert micro.routes_MYX.shape[0] == micro.ids_BL.numel()
        assert (micro.routes_MYX[micro.source_N] >= 0).all()
        prompt = len(batch.sequences[0].prompt)
        assert (micro.routes_MYX[: prompt - 1] == OWN).all()
