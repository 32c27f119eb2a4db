"""Rollouts of real models for the benchmarks: SmolLM2-135M on GSM8K, and the warmed-up tiny model on sorting.

They are made by the node's own torch engine and kept in a folder when one is named, since SmolLM2 decodes only some
dozens of tokens a second on a CPU core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from learner.genesis import init_model
from learner.places import read_model
from node.engine import Request
from node.torch_engine import TorchEngine
from protocol.head import offsets, token_entries
from protocol.messages import Environment, SamplingRules
from protocol.rollout import EMPTY_TAIL, NO_CODE, Bundle, Finish, Rollout, Segment, prompt_digest, rollout_seed
from protocol.tasks import Task, make_task
from protocol.tokenizer import Tokenizer
from protocol.weights.layout import Layout, State

RUN_ID: Final = "ab" * 16
BEACON: Final = "cd" * 32
SAMPLE_DATA: Final = Path(__file__).resolve().parents[1] / "tests" / "data" / "gsm8k" / "sample.jsonl"
#: Where models and rollouts are kept unless another folder is named.
CACHE: Final = Path(tempfile.gettempdir()) / "assay-benchmarks"
FINE: Final = 4096  #: steps per nat of rollouts that are coarsened afterwards
NATS: Final = 13.8155  #: heads hold what is likelier than 1e-6
COLUMNS: Final = ("tokens", "head_lengths", "head_ids", "head_codes", "tail_codes", "token_codes")


@dataclass(frozen=True)
class Workload:
    """A model and the task it is asked to do."""

    name: str
    folder: Path
    layout: Layout
    state: State
    tokenizer: Tokenizer
    environment: Environment
    task: Task
    data: Path | None  #: file of the environment's data object
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
    data = data or SAMPLE_DATA
    content = data.read_bytes()
    environment = Environment(
        name="gsm8k", kind="gsm8k", params={"max_question_chars": 240}, data_sha256=hashlib.sha256(content).hexdigest()
    )
    task = make_task(environment, lambda _: content, RUN_ID)
    return _workload("smollm2_gsm8k", _model(cache, "smollm2"), environment, task, data)


def tiny_sort(cache: Path) -> Workload:
    """The tiny model, warmed up, on the sorting task of its preset."""
    params: dict[str, int | str] = {"order": "ascending", "max_length": 6, "alphabet": 10}
    environment = Environment(name="sort", kind="sort", params=params)
    return _workload("tiny", _model(cache, "tiny"), environment, make_task(environment, None, RUN_ID), None)


def generate(
    workload: Workload, rules: SamplingRules, groups: Sequence[int], samples: int, *, slots: int = 16,
    cache: Path | None = None,
) -> tuple[list[Lease], float]:
    """One lease per group and the seconds that generating them took; read from ``cache`` when it has them."""
    what = [workload.environment.model_dump(), rules.model_dump(), list(groups), samples, slots]
    name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    path = None if cache is None else cache / f"rollouts-{workload.name}-{name}.npz"
    if path is None or not path.exists():
        leases, seconds = _generate(workload, rules, groups, samples, slots)
        if path is None:
            return leases, seconds
        _save(path, leases, seconds)
    return _load(path)


def model_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line with two more arguments: GSM8K's data, and the folder for what is made once."""
    parser.add_argument("--data", type=Path, help="GSM8K as JSON lines (default: the sample of the tests)")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of models and rollouts (default {CACHE})")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    return options


def fine_leases(workload: Workload, options: argparse.Namespace) -> tuple[list[Lease], SamplingRules]:
    """Leases of eight samples at ``FINE`` steps per nat, from the cache when they are in it, and their rules."""
    tiny, quick = workload.name == "tiny", options.quick
    rules = workload.rules(
        steps_per_nat=FINE, head_size=16 if tiny else 32, head_max_code=round(NATS * FINE),
        max_new_tokens=8 if tiny else 32 if quick else 96, swap_grid=2 if tiny else 8,
    )
    count = (12 if quick else 48) if tiny else 1 if quick else 8
    groups = range(1000 * options.seed, 1000 * options.seed + count)
    return generate(workload, rules, groups, 8, slots=32 if tiny else 16, cache=options.cache)[0], rules


def coarsen(rollout: Rollout, steps: int, size: int) -> Rollout:
    """The rollout as if made with heads of ``size`` at ``steps`` per nat: what leaves a head joins its tail."""
    lengths = rollout.head_lengths.astype(np.int64)
    positions = np.repeat(np.arange(len(rollout)), lengths)
    kept = np.arange(len(positions)) - np.repeat(offsets(rollout), lengths) < size
    codes, token_codes = _coarse(rollout.head_codes, steps), _coarse(rollout.token_codes, steps)
    outside = np.bincount(positions[~kept], np.exp(-rollout.head_codes[~kept] / FINE), len(rollout))
    tails = np.where(rollout.tail_codes == EMPTY_TAIL, 0.0, np.exp(-rollout.tail_codes / FINE)) + outside
    entries = token_entries(rollout)
    in_head = entries >= 0
    left_out = in_head & ~kept[np.where(in_head, entries, 0)]
    ids, codes_kept, positions = rollout.head_ids[kept], codes[kept], positions[kept]
    order = np.lexsort((ids, codes_kept, positions))
    with np.errstate(divide="ignore"):
        tail_codes = np.where(tails > 0, np.rint(-np.log(tails) * steps).clip(0, EMPTY_TAIL - 1), EMPTY_TAIL)
    return replace(
        rollout, head_lengths=np.minimum(lengths, size).astype(np.uint8), head_ids=ids[order],
        head_codes=codes_kept[order], tail_codes=tail_codes.astype(np.uint16),
        token_codes=np.where(left_out, codes[np.where(in_head, entries, 0)], np.where(in_head, NO_CODE, token_codes)),
    )


def _coarse(codes: NDArray[np.uint16], steps: int) -> NDArray[np.uint16]:
    coarse: NDArray[np.uint16] = np.rint(codes * (steps / FINE)).astype(np.uint16)
    return coarse


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


def _workload(name: str, folder: Path, environment: Environment, task: Task, data: Path | None) -> Workload:
    layout, state = read_model(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    eos = config["eos_token_id"]
    return Workload(
        name, folder, layout, state, Tokenizer.load(folder), environment, task, data,
        eos if isinstance(eos, list) else [eos], config["vocab_size"],
    )


def _model(cache: Path, preset: str) -> Path:
    init_model(preset, cache / f"model-{preset}", 0)
    return cache / f"model-{preset}"


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
