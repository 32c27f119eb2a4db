"""Fixtures that only the learner's forward pass sees (T1'): nothing is drawn, and T0 and T1 find nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from learner.admission import Admission
from learner.batch import TrainingGroup, make_batch
from learner.config import LearnerConfig
from learner.screen import screen_message
from learner.trainer import Trainer
from node.unit import Unit
from protocol.messages import Commitment, ScreenReport
from tests.adversary.bench import Bench, Catch, caught
from tests.adversary.fixtures_bundles import MODEL
from tests.adversary.fixtures_power import INT8
from tests.adversary.made_up_heads import made_up_bundle
from tests.adversary.pipeline import Cheat, Pipeline
from tests.adversary.registry import fixture
from tests.adversary.world import RUN_ID, World


@fixture(4, "int8 weights, nothing drawn, seen by the learner's screen", "T1'", *MODEL)
def screened(bench: Bench, seed: int) -> Catch:
    """All bundles pass T0 and T1 and would be trained on; the learner's own forward pass sends them back."""
    return _screened(bench, seed, INT8, 1000 + seed)


@fixture(20, "heads made up around greedy tokens so that the learner's screen sees nothing", "T1'", *MODEL)
def screen_aware(bench: Bench, seed: int) -> Catch:
    """Each token has its true probability to a hundredth of a step; its head has nothing else in common with p."""

    def seal(world: World, unit: Unit, spooled: Any) -> Any:
        made = world.submission(unit.lease, made_up_bundle(world, unit.lease))
        return replace(spooled, commitment=Commitment.from_payload(made.commitment.payload), data=made.bundle)

    return _screened(bench, seed, Cheat(seal=seal), 2000 + seed)


def _screened(bench: Bench, seed: int, cheat: Cheat, number: int) -> Catch:
    """One turn of a cheat and two of each of two honest nodes, which must not stand out; ``number``: of the report."""
    pipeline = bench.pipeline("undrawn", seed)
    node = pipeline.node(f"screened {seed}", cheat)
    others = [pipeline.node(f"honest {seed} {i}") for i in range(2)]
    handed = [one for party in (node, *others, *others) for one in party.turn()]
    pipeline.verify()
    assert caught(pipeline, node) is None
    report = _post_screen(pipeline, {party.key.id for party in (node, *others)}, number)
    pipeline.verify()
    found = caught(pipeline, node)
    honest, alarms = bench.honest(pipeline)
    suspected = {one.node_id for one in report.nodes if one.score_milli >= 4_000}
    alarms += sum(party.banned or party.key.id in suspected for party in others)
    honest += sum(one.rollouts for one in handed) - sum(one.rollouts for one in node.handed)
    if found is None:
        return Catch(False, None, "nobody", honest=honest, alarms=alarms)
    return replace(found, where="T1'", honest=honest, alarms=alarms)


def _post_screen(pipeline: Pipeline, nodes: set[str], number: int) -> ScreenReport:
    """What a learner's step reports. Rewards are made up so that each group has a signal: the screen ignores them."""
    world, learner, version = pipeline.world, pipeline.learner, pipeline.shown
    groups = [g for g in learner.admitted(4096) if nodes.intersection(s.node_id for s in g.samples)]
    admission = Admission(world.run, {v: world.checkpoints[v][0].beacon for v in range(version + 1)})
    training = []
    for group in groups:
        objects = {s.object_sha256: learner.fetch(s.object_sha256) for s in group.samples}
        admitted = admission.admit(group, objects, version)
        rewarded = [replace(s, reward_micro=10**6 * (i % 2)) for i, s in enumerate(admitted.samples)]
        training.append(TrainingGroup(admitted.group, admitted.prompt_tokens, tuple(rewarded)))
    config = LearnerConfig()
    torch.manual_seed(0)
    trainer = Trainer.open(world.model_dir, world.layout, world.state(version), config, world.rules)
    metrics = trainer.train_step(make_batch(training, version, world.rules, config)).metrics
    report = screen_message(RUN_ID, number, metrics["nodes"], groups, pipeline.clock.now_ms())
    learner.post_screen(report)
    return report
