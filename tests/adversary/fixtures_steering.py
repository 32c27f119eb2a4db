"""Fixtures of row 31 whose rollouts are all lawful: a node that chooses when to take up new weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from coordinator.models import Node
from coordinator.steering import E_STEERING
from node.unit import Unit
from protocol.messages import BatchGroup, BatchPlan, Commitment, Environment, Lease
from protocol.rollout import Bundle, Rollout, Segment, SwapMode
from protocol.tasks import FULL_REWARD_MICRO, Problem
from protocol.tasks.registry import KINDS
from protocol.tasks.task import render_prompt
from protocol.tokenizer import Tokenizer
from tests.adversary.bench import Bench, Catch, caught
from tests.adversary.pipeline import Cheat, NodeAtWork, Pipeline
from tests.adversary.registry import fixture
from tests.adversary.world import RUN_ID, World

#: Turns after which a steerer has got away.
MOST: Final = 600


class LettersTask:
    """A task that a random model solves about every second time: more letters of the alphabet's first half."""

    def __init__(self, environment: Environment, run_id: str):
        del environment, run_id

    def problem(self, group: int) -> Problem:
        return Problem(f">{chr(97 + group % 26)}{chr(97 + group // 26 % 26)}=", "")

    def prompt_tokens(self, problem: Problem, tokenizer: Tokenizer) -> list[int]:
        return render_prompt(problem, tokenizer)

    def reward_micro(self, problem: Problem, completion_text: str) -> int:
        del problem
        early = sum("a" <= letter <= "m" for letter in completion_text)
        return FULL_REWARD_MICRO * (early > sum("n" <= letter <= "z" for letter in completion_text))


KINDS["letters"] = lambda environment, _, run_id: LettersTask(environment, run_id)


def lawful_ways(world: World, start: int, newest: int) -> list[list[Segment]]:
    """Every way in which a rollout may take up the next version, and the one in which it does not."""
    rules = world.rules
    return [[Segment(0, start)]] + [
        [Segment(0, start), Segment(at, start + 1, mode)]
        for at in range(rules.swap_grid, rules.max_new_tokens, rules.swap_grid)
        for mode in SwapMode
        if newest > start
    ]


def choosing(pipeline: Pipeline, better: Callable[[World, Lease, Rollout], int], freedom: list[int]) -> Cheat:
    """All lawful swaps of a rollout are tried, and the best one is handed in.

    Args:
        better: how good a rollout is to the cheat.
        freedom: gets the number of different completions that each rollout could be.
    """

    def seal(world: World, unit: Unit, spooled: Any) -> Any:
        ways = lawful_ways(world, unit.lease.start_version, pipeline.shown)
        made = [world.generate(unit.lease, segments=way).rollouts for way in ways]
        chosen = []
        for options in zip(*made, strict=True):
            freedom.append(len({tuple(option.tokens.tolist()) for option in options}))
            chosen.append(max(options, key=lambda option: better(world, unit.lease, option)))
        return _handed_in(world, unit, spooled, Bundle(tuple(chosen)))

    return Cheat(seal=seal)


def swapping(pipeline: Pipeline) -> Cheat:
    """Takes up new weights as soon as the grid lets it, whatever the lease says."""

    def seal(world: World, unit: Unit, spooled: Any) -> Any:
        way = lawful_ways(world, unit.lease.start_version, pipeline.shown)[1]
        return _handed_in(world, unit, spooled, world.generate(unit.lease, segments=way))

    return Cheat(seal=seal)


def _handed_in(world: World, unit: Unit, spooled: Any, bundle: Bundle) -> Any:
    made = world.submission(unit.lease, bundle)
    return replace(spooled, commitment=Commitment.from_payload(made.commitment.payload), data=made.bundle)


def _reward(world: World, lease: Lease, rollout: Rollout) -> int:
    text = world.tokenizer.decode(rollout.tokens.tolist())
    return world.task.reward_micro(world.task.problem(lease.group), text)


def _train(pipeline: Pipeline) -> None:
    """What the learner does to the books in a step: every admitted group is consumed."""
    groups = pipeline.learner.admitted(4096)
    if groups:
        plan = BatchPlan(
            run_id=RUN_ID, version=pipeline.shown + 1, parent_version=pipeline.shown,
            groups=[BatchGroup(group=g.group, receipts=sorted({s.receipt_sha256 for s in g.samples})) for g in groups],
            config_sha256="00" * 32, issued_at_ms=pipeline.clock.now_ms(),
        )
        pipeline.learner.post_batch(plan)


def work(pipeline: Pipeline, first: NodeAtWork, *others: NodeAtWork) -> None:
    """One turn of a run: the nodes share groups, a version comes out meanwhile, and the learner trains on them."""
    first.turn(lambda: pipeline.show(pipeline.shown + 1))
    for node in others:
        node.daemon._parts.weights.poll(pipeline.clock.now_ms())
        node.turn()
    first.daemon._parts.weights.poll(pipeline.clock.now_ms())
    pipeline.verify()
    _train(pipeline)


def _length(_world: World, _lease: Lease, rollout: Rollout) -> int:
    return len(rollout)


@fixture(31, "choosing the swap point that earns most", "peers", E_STEERING)
def choosing_the_swap(bench: Bench, seed: int) -> Catch:
    """All of it is lawful. Its samples do better than its peers' of the same groups, until it may not swap any more."""
    return _steer(bench, "steered", seed, _reward)


@fixture(31, "choosing the swap point that makes most tokens", "peers", E_STEERING)
def choosing_for_length(bench: Bench, seed: int) -> Catch:
    """Credit is paid per token, so length is worth something too."""
    return _steer(bench, "stretched", seed, _length)


def _steer(bench: Bench, setting: str, seed: int, better: Callable[[World, Lease, Rollout], int]) -> Catch:
    pipeline, freedom = bench.pipeline(setting, seed), []
    pipeline.start_afresh()
    steerer = pipeline.node(f"steerer {seed}", choosing(pipeline, better, freedom))
    peer = pipeline.node(f"peer {seed}")
    turns = 0
    while steerer.row["pinned_ms"] is None and turns < MOST:
        work(pipeline, steerer, peer)
        turns += 1
    rollouts, tokens = (sum(getattr(one, what) for one in steerer.handed) for what in ("rollouts", "tokens"))
    honest = sum(one.rollouts for one in peer.handed)
    alarms = honest if peer.banned else 0  # the two only have each other, so both are pinned
    note = sum(freedom) / len(freedom)
    if steerer.row["pinned_ms"] is None:
        return Catch(False, None, "nobody", rollouts, tokens, honest, alarms, note)
    return Catch(True, E_STEERING, "peers", rollouts, tokens, honest, alarms, note)


@fixture(31, "a swap in a pinned lease", "T0", "E_SWAP_PINNED")
def swap_in_a_pinned_lease(bench: Bench, seed: int) -> Catch:
    """What is left to a node whose leases are pinned."""
    pipeline = bench.pipeline("steered", seed)
    pipeline.start_afresh()
    node, peer = pipeline.node(f"swapper {seed}", swapping(pipeline)), pipeline.node(f"beside it {seed}")
    with pipeline.coordinator.database.write() as session:
        for party in (node, peer):
            session.get_one(Node, party.key.id).pinned_ms = pipeline.clock.now_ms()
    work(pipeline, node, peer)
    found = caught(pipeline, node) or Catch(False, None, "nobody")
    passed = [pipeline.verdicts(one.receipt_id)[-1].outcome == "pass" for one in peer.handed]
    return replace(found, honest=len(passed), alarms=passed.count(False))
