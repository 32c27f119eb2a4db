"""Rollouts of real models for the benchmarks: SmolLM2-135M on GSM8K, and the warmed-up tiny model on sorting.

They are made by the node's own torch engine and kept in a folder when one is named, since SmolLM2 decodes only some
dozens of tokens a second on a CPU core.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from learner.genesis_smollm2 import convert_smollm2
from learner.genesis_tiny import make_tiny
from learner.places import read_model
from node.engine import Request
from node.torch_engine import TorchEngine
from protocol.messages import Environment, SamplingRules
from protocol.rollout import Bundle, Finish, Rollout, Segment, prompt_digest, rollout_seed
from protocol.tasks import Task, make_task
from protocol.tokenizer import Tokenizer
from protocol.weights.layout import Layout, State

RUN_ID: Final = "ab" * 16
BEACON: Final = "cd" * 32
SAMPLE_DATA: Final = Path(__file__).resolve().parents[1] / "tests" / "data" / "gsm8k" / "sample.jsonl"
COLUMNS: Final = ("tokens", "head_lengths", "head_ids", "head_codes", "tail_codes", "token_codes")


@dataclass(frozen=True)
class Workload:
    """A model and the task it is asked to do."""

    name: str
    folder: Path
    layout: Layout
    state: State
    tokenizer: Tokenizer
    task: Task
    eos_token_ids: list[int]
    vocab_size: int

    def rules(self, **changes: Any) -> SamplingRules:
        """Sampling rules of this model; ``changes`` override fields."""
        fields = {"eos_token_ids": self.eos_token_ids, "vocab_size": self.vocab_size, "swap_grid": 8}
        return SamplingRules(**(fields | changes))

    def prompt(self, group: int) -> list[int]:
        """Prompt of a group."""
        return self.task.prompt_tokens(self.task.problem(group), self.tokenizer)


@dataclass(frozen=True)
class Lease:
    """Rollouts of one prompt with the seeds they were drawn under."""

    group: int
    prompt: list[int]
    bundle: Bundle

    @property
    def tokens(self) -> int:
        """Completion tokens of the bundle."""
        return sum(map(len, self.bundle.rollouts))

    def seed(self, rollout: Rollout) -> bytes:
        """Seed of one of the rollouts."""
        return rollout_seed(RUN_ID, BEACON, prompt_digest(self.prompt), self.group, rollout.sample)


class OneVersion:
    """A weight source that holds version 0 only."""

    def __init__(self, state: State):
        self._state = state

    def newest(self) -> int:
        """Always 0."""
        return 0

    def has(self, version: int) -> bool:
        """Whether it is version 0."""
        return version == 0

    @contextmanager
    def state(self, version: int) -> Iterator[State]:
        """The weights."""
        yield self._state


def smollm2_gsm8k(cache: Path, data: Path | None = None) -> Workload:
    """SmolLM2-135M-Instruct on GSM8K questions; the model folder is made once inside ``cache``."""
    content = (data or SAMPLE_DATA).read_bytes()
    environment = Environment(
        name="gsm8k", kind="gsm8k", params={"max_question_chars": 240}, data_sha256=hashlib.sha256(content).hexdigest()
    )
    folder = _model(cache / "smollm2", convert_smollm2)
    return _workload("smollm2_gsm8k", folder, make_task(environment, lambda _: content, RUN_ID))


def tiny_sort(cache: Path) -> Workload:
    """The tiny model, warmed up, on the sorting task of its preset."""
    params: dict[str, int | str] = {"order": "ascending", "max_length": 6, "alphabet": 10}
    environment = Environment(name="sort", kind="sort", params=params)
    return _workload("tiny", _model(cache / "tiny", make_tiny), make_task(environment, None, RUN_ID))


def generate(
    workload: Workload, rules: SamplingRules, groups: Sequence[int], samples: int, *, slots: int = 16,
    cache: Path | None = None,
) -> tuple[list[Lease], float]:
    """One lease per group and the seconds that generating them took; read from ``cache`` when it has them."""
    what = [workload.name, rules.model_dump(), list(groups), samples, slots]
    name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    path = None if cache is None else cache / f"rollouts-{workload.name}-{name}.npz"
    if path is None or not path.exists():
        leases, seconds = _generate(workload, rules, groups, samples, slots)
        if path is None:
            return leases, seconds
        _save(path, leases, seconds)
    return _load(path)


def _generate(
    workload: Workload, rules: SamplingRules, groups: Sequence[int], samples: int, slots: int
) -> tuple[list[Lease], float]:
    engine = TorchEngine(workload.folder, workload.layout, rules, OneVersion(workload.state), slots=slots)
    prompts = {group: workload.prompt(group) for group in groups}
    engine.submit([
        Request(
            key=f"{group}/{sample}", sample=sample, prompt=tuple(prompts[group]), start_version=0,
            seed=rollout_seed(RUN_ID, BEACON, prompt_digest(prompts[group]), group, sample),
        )
        for group in groups for sample in range(samples)
    ])
    done = []
    engine.step()  # loads the weights and begins: not what a running engine spends its time on
    started = time.perf_counter()
    while engine.open_requests:
        done += engine.step()
    seconds = time.perf_counter() - started
    engine.close()
    found = {done.request.key: done.rollout for done in done}
    return [
        Lease(group, prompts[group], Bundle(tuple(found[f"{group}/{sample}"] for sample in range(samples))))
        for group in groups
    ], seconds


def _workload(name: str, folder: Path, task: Task) -> Workload:
    layout, state = read_model(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    eos = config["eos_token_id"]
    return Workload(
        name, folder, layout, state, Tokenizer.load(folder), task, eos if isinstance(eos, list) else [eos],
        config["vocab_size"],
    )


def _model(folder: Path, make: Any) -> Path:
    marker = folder / "complete"
    if not marker.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, 0, partial(print, flush=True))
        marker.touch()
    return folder


# -- cache -------------------------------------------------------------------------------------------------


def _save(path: Path, leases: Sequence[Lease], seconds: float) -> None:
    rollouts = [rollout for lease in leases for rollout in lease.bundle.rollouts]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(rollout, name) for rollout in rollouts]) for name in COLUMNS
    }
    about = {
        "seconds": seconds, "groups": [[lease.group, lease.prompt, len(lease.bundle.rollouts)] for lease in leases],
        "rollouts": [[r.sample, len(r), len(r.head_ids), int(r.finish)] for r in rollouts],
    }
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)


def _load(path: Path) -> tuple[list[Lease], float]:
    with np.load(path) as file:
        about, columns = json.loads(str(file["about"])), {name: file[name] for name in COLUMNS}
    token, entry = 0, 0
    rollouts = []
    for sample, length, entries, finish in about["rollouts"]:
        part = {
            name: column[entry : entry + entries] if name in ("head_ids", "head_codes")
            else column[token : token + length] for name, column in columns.items()
        }
        rollouts.append(Rollout(sample=sample, segments=(Segment(0, 0),), finish=Finish(finish), **part))
        token, entry = token + length, entry + entries
    leases, first = [], 0
    for group, prompt, count in about["groups"]:
        leases.append(Lease(group, prompt, Bundle(tuple(rollouts[first : first + count]))))
        first += count
    return leases, about["seconds"]
