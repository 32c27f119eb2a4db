"""The honest zoo at length: nodes on every stack work for a real coordinator, and nobody may ever be punished.

Three passes with other randomness each: a run that lists float32 only and takes other profiles unlisted; one whose
rollouts calibrate both profiles; and one under that calibration.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordinator.presets import TORCH_CPU_FP32
from learner.genesis import init_model
from learner.places import read_model
from protocol import statistics
from protocol.messages import Environment, Profile, SamplingRules
from protocol.reference import ReferenceModel
from protocol.weights.layout import State
from tests.adversary.pipeline import NodeAtWork, Pipeline
from tests.adversary.stacks import BF16, FP32, Stack
from tests.adversary.world import VERIFIER, World
from verifier.calibrate import Honest, make_record
from verifier.divergence import Residuals
from verifier.findings import Report
from verifier.structure import open_submission

logger = logging.getLogger(__name__)

BF16_NAME = "torch-cpu-bf16"
#: Limits that hold nobody back, while a calibration is being measured.
PROVISIONAL = Profile(name=BF16_NAME, max_mean_kl_nano=10**12, max_token_kl_micro=10**9, max_margin_micro=10**9)
#: Everything is recomputed: a node that is always audited is where an honest one could be hurt.
ALL_DRAWN = {"ramp": 100_000, "unknown_profiles": True}
#: All stacks of SmolLM2's zoo with the rollouts of each; prefill without a cache is slow, so that there are few.
SMOLLM2_STACKS = (
    (Stack(batch=16), 64), (Stack(dtype="bf16", batch=16), 64), (Stack("decode", batch=8, padding="left"), 48),
    (Stack(dtype="bf16", batch=8, attention="eager"), 40), (Stack(batch=8, attention="eager", threads=2), 40),
    (Stack("decode", batch=1), 12), (Stack("decode", dtype="bf16", batch=8, padding="left"), 24),
    (Stack("prefill", dtype="bf16", batch=4, padding="right"), 8),
)


class SmolWorld(World):
    """SmolLM2-135M-Instruct on GSM8K questions, one version."""

    def _prepare_model(self) -> None:
        self.model_dir = self.folder / "model"
        init_model("smollm2", self.model_dir, 0)
        self.layout, self._first = read_model(self.model_dir)
        self._data = Path(__file__).resolve().parents[1] / "data" / "gsm8k" / "sample.jsonl"

    def _next_state(self) -> State:
        return self._first

    def _rules(self, max_new_tokens: int) -> SamplingRules:
        config = json.loads((self.model_dir / "config.json").read_text(encoding="utf-8"))
        return SamplingRules(
            steps_per_nat=256, head_size=32, head_max_code=3_537, swap_grid=8, max_new_tokens=max_new_tokens,
            eos_token_ids=[config["eos_token_id"]], vocab_size=config["vocab_size"],
        )

    def _environments(self) -> list[Environment]:
        data = self.store.put(self._data.read_bytes())
        return [Environment(name="gsm8k", kind="gsm8k", params={"max_question_chars": 240}, data_sha256=data)]


@dataclass
class StackResult:
    """What became of one stack's rollouts."""

    stack: str
    profile: str
    rollouts: int = 0
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  #: of rollouts, with the code
    banned: bool = False
    suspicion_milli: int = 0
    mean_kl: list[float] = field(default_factory=list)  #: nats, per rollout
    bias: list[float] = field(default_factory=list)  #: nats per token
    margin: list[float] = field(default_factory=list)  #: nats per token, clipped at 1
    llr: list[float] = field(default_factory=list)  #: nats, of calibrated profiles

    def summary(self) -> dict[str, Any]:
        """Counts and quantiles, for a page."""
        told = {name: value for name, value in asdict(self).items() if not isinstance(value, list)}
        for name in ("mean_kl", "bias", "margin", "llr"):
            values = np.asarray(getattr(self, name))
            told[name] = [] if not len(values) else [
                float(f"{value:.3g}") for value in np.quantile(values, (0, 0.5, 0.99, 1))
            ]
        return told | {"outcomes": dict(self.outcomes)}


class Recorder:
    """Passes recomputations on and keeps what they found by profile, T2 only; ``honest`` as calibrating does."""

    def __init__(self, pipeline: Pipeline):
        session = pipeline.verifier._session
        self._shelf, self.residuals = session._recomputers, dict[str, list[Residuals]]()
        self.honest: dict[str, Honest] = {}
        session._recomputers = self

    def __call__(self, tier: str) -> Any:
        inner, recorder = self._shelf(tier), self

        class Recording:
            def residuals(self, submissions: Sequence[Any]) -> list[list[Residuals]]:
                found = inner.residuals(submissions)
                if tier == "T2":
                    for opened, rollouts in zip(submissions, found, strict=True):
                        profile = opened.commitment.profile
                        recorder.residuals.setdefault(profile, []).extend(rollouts)
                        recorder.honest.setdefault(profile, Honest(versions={0})).add(opened.lease.group, rollouts)
                        recorder.last = rollouts
                return found

        return Recording()

    last: list[Residuals]


def run_stack(pipeline: Pipeline, recorder: Recorder, stack: Stack, rollouts: int) -> StackResult:
    """Let a node on this stack make at least so many rollouts, all of them judged."""
    node = pipeline.node(stack.name, stack=stack)
    result = StackResult(stack.name, stack.profile)
    while result.rollouts < rollouts and not result.banned:
        before = {name: len(found) for name, found in recorder.residuals.items()}
        handed = node.turn()
        if not handed:
            raise AssertionError(f"{stack.name} hands in nothing: {node.refusals}")
        pipeline.verify()
        for one in handed:
            result.rollouts += one.rollouts
            result.tokens += one.tokens
            for verdict in pipeline.verdicts(one.receipt_id):
                result.outcomes[verdict.code or verdict.outcome] += one.rollouts
                result.llr += [score.llr_milli / 1000 for score in verdict.scores]
        for found in recorder.residuals.get(stack.profile, [])[before.get(stack.profile, 0) :]:
            result.mean_kl.append(found.mean_kl)
            result.bias.append(found.statistics.bias)
            result.margin.append(found.statistics.margin)
        _note_node(result, node)
    return result


def _note_node(result: StackResult, node: NodeAtWork) -> None:
    row = node.row
    result.banned, result.suspicion_milli = row["state"] != "active", row["suspicion_milli"]
    assert row["rejected"] == 0 or result.banned


def calibrated_profiles(pipeline: Pipeline, recorder: Recorder) -> list[Profile]:
    """Profiles with limits and levels from everything that was recorded."""
    made = []
    for name, honest in sorted(recorder.honest.items()):
        honest.run = pipeline.world.run
        made.append(make_record(honest, name, VERIFIER, pipeline.clock.now_ms()).profile)
    return made


def _pass(
    folder: Path, salt: str, profiles: list[Profile], stacks: Iterable[Stack], each: int, **changes: Any
) -> tuple[list[StackResult], list[Profile], int]:
    """One run with these profiles: its results, the calibration they give, and the alarm level."""
    batch = {"groups_per_batch": 65_536} | changes.pop("batch", {})
    world = World(
        folder / salt, versions=2, salt=salt, batch=batch, audit=ALL_DRAWN, profiles=profiles, **changes
    )
    pipeline = Pipeline(world)
    recorder = Recorder(pipeline)
    results = []
    for stack in stacks:
        results.append(run_stack(pipeline, recorder, stack, each))
        logger.info("%s: %s", salt, json.dumps(results[-1].summary()))
    found = calibrated_profiles(pipeline, recorder)
    pipeline.close()
    return results, found, statistics.alarm_milli(world.run.audit)


def calibrate(
    folder: Path, stacks: Iterable[Stack], each: int, **changes: Any
) -> tuple[list[StackResult], list[Profile]]:
    """A calibration of the stacks' profiles from ``each`` rollouts of every stack, under provisional wide limits.

    Levels need many prompts, not many rollouts of each: groups are as small as they can be.
    """
    small = {"batch": {"group_size": 2, "samples_per_lease": 2}}
    return _pass(folder, "calibration", [PROVISIONAL, TORCH_CPU_FP32], stacks, each, **small, **changes)[:2]


def calibrate_alone(folder: Path, groups: int, versions: int = 2) -> list[Profile]:
    """Profiles from one rollout of each of so many groups, half of them with either attention; no coordinator."""
    world = World(folder, versions=versions, salt="calibration", profiles=[PROVISIONAL, TORCH_CPU_FP32])
    profiles = []
    for name, dtype in ((BF16_NAME, torch.bfloat16), (TORCH_CPU_FP32.name, torch.float32)):
        honest, opened = Honest(versions=set(range(versions)), run=world.run), []
        ways = [(version, attention) for version in range(versions) for attention in ("sdpa", "eager")]
        for number, (version, attention) in enumerate(ways):
            world.engine = ReferenceModel.load(world.model_dir, world.layout, dtype=dtype, attention=attention)
            for group in range(number, groups, len(ways)):
                lease = world.lease(group, samples=[0], start_version=version)
                submission = world.submission(lease, world.generate(lease), profile=name)
                opened.append(open_submission(world.run, submission, world.book, Report()))
        assert None not in opened
        for one, residuals in zip(opened, world.shelf("T2").residuals(opened), strict=True):
            honest.add(one.lease.group, residuals)
        profiles.append(make_record(honest, name, VERIFIER, world.clock.now_ms()).profile)
    return profiles


def tiny_zoo(
    folder: Path, stacks: Sequence[Stack], *, unlisted: int, calibrating: int, checked: int
) -> dict[str, Any]:
    """All passes over the tiny model, with so many rollouts per stack each."""
    strangers = [stack for stack in stacks if stack.profile == BF16_NAME]
    first, _, _ = _pass(folder, "unlisted", [TORCH_CPU_FP32], strangers, unlisted)
    second, profiles = calibrate(folder, stacks, calibrating)
    third, _, alarm = _pass(folder, "check", profiles, stacks, checked)
    passes = {"unlisted": first, "calibrating": second, "calibrated": third}
    return {name: [result.summary() for result in results] for name, results in passes.items()} | {
        "alarm_milli": alarm,
        "limits": {p.name: [p.max_mean_kl_nano, p.max_token_kl_micro, p.max_margin_micro] for p in profiles},
    }


def smollm2_zoo(folder: Path, stacks: Sequence[tuple[Stack, int]] = SMOLLM2_STACKS, tokens: int = 48) -> dict[str, Any]:
    """SmolLM2 on GSM8K: float32 under its preset's limits, bf16 unlisted."""
    batch = {"groups_per_batch": 65_536, "group_size": 8, "samples_per_lease": 4}
    world = SmolWorld(folder, versions=1, max_new_tokens=tokens, batch=batch, audit=ALL_DRAWN)
    pipeline = Pipeline(world)
    recorder = Recorder(pipeline)
    results = []
    for stack, count in stacks:
        results.append(run_stack(pipeline, recorder, stack, count).summary())
        logger.info("SmolLM2: %s", json.dumps(results[-1]))
    pipeline.close()
    return {"unlisted": results}


ALL_STACKS = (*FP32, *BF16)
