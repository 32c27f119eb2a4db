"""A sweep over methods, learning rates and paired seeds: what is done already is kept, what it came to is judged.

Every finished stack of runs goes into a file of JSON lines at once; a sweep that is started again goes on from there.
Lines of another size, other settings or another sampler are not taken for this sweep's.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from benchmarks import account, arms, flock, harness, verdict
from learner.corrections import correction_of

#: Field of a line beside those of ``arms.Run``.
_KEY: Final = "sweep"


@dataclass(frozen=True)
class Sweep:
    """One experiment."""

    name: str  #: of the arm and its sampler
    make_sampler: arms.MakeSampler
    size: arms.Size
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    methods: tuple[str, ...] = tuple(arms.METHODS)
    same_as: tuple[tuple[str, str], ...] = ()  #: methods that are another one here by definition, and which

    def key(self, method: str) -> str:
        """Names everything that decides the runs of a method at a rate."""
        described = [
            self.name, dataclasses.asdict(self.size), self.seeds,
            arms.METHODS[method].model_dump(mode="json"), dataclasses.asdict(correction_of(arms.METHODS[method])),
            arms.RULES.model_dump(mode="json"),
        ]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def quick(size: arms.Size) -> arms.Size:
    """The same experiment in about half a minute."""
    return dataclasses.replace(
        size, warm_steps=200, warm_batch=64, steps=32, test_every=8, test_problems=128,
    )


def run(sweep: Sweep, folder: Path, say: Callable[[str], None]) -> dict[str, list[arms.Run]]:
    """The runs of every method, from ``folder`` where they are finished.

    The rates of a method that are not there yet are one stack; a sweep stopped in the middle begins that stack again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{sweep.name.replace(' ', '-')}.jsonl"
    ordered = {}
    for method in sweep.methods:
        found = _finished(sweep, method, file)
        if missing := [rate for rate in sweep.rates if rate not in found]:
            base = _warmed(sweep, folder, say)
            runs = arms.train(method, base, sweep.seeds, missing, sweep.size, sweep.make_sampler, say)
            with file.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps({_KEY: sweep.key(method)} | vars(run)) + "\n" for run in runs)
            found |= {rate: [run for run in runs if run.rate == rate] for rate in missing}
        ordered[method] = [run for rate in sweep.rates for run in found[rate]]
    for method, other in sweep.same_as:
        ordered[method] = [dataclasses.replace(run, method=method) for run in ordered[other]]
    return ordered


def _finished(sweep: Sweep, method: str, file: Path) -> dict[float, list[arms.Run]]:
    """Runs of a method by rate, of the rates that are there with every seed."""
    found: dict[float, list[arms.Run]] = {}
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for values in map(json.loads, lines):
        if values.pop(_KEY) == sweep.key(method):
            found.setdefault(values["rate"], []).append(arms.Run(**values))
    return {rate: runs for rate, runs in found.items() if [run.seed for run in runs] == list(sweep.seeds)}


def _warmed(sweep: Sweep, folder: Path, say: Callable[[str], None]) -> flock.Weights:
    size = sweep.size
    described = [dataclasses.asdict(size.shape), size.warm_steps, size.warm_batch, size.warm_rate, sweep.seeds]
    name = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
    file = folder / f"warm-{name}.pt"
    if not file.exists():
        torch.save(arms.warmed(size, sweep.seeds, say), file)
    weights: flock.Weights = torch.load(file, weights_only=True)
    return weights


@dataclass(frozen=True)
class Experiment:
    """A sweep with what is said about it."""

    full: Sweep
    quick: Sweep
    title: str  #: of its block in the page
    about: Sequence[str]  #: lines of that block


def main(doc: str | None, registered: Sequence[Sequence[str]], experiments: Mapping[str, Experiment]) -> None:
    """Run one of the experiments (the first, unless told otherwise) and say what it came to.

    Args:
        experiments: by the name of the block in the page.
    """
    arguments = _arguments(doc, list(experiments))
    torch.set_num_threads(1)
    experiment = experiments[arguments.arm]
    sweep = experiment.quick if arguments.quick else experiment.full
    sweep = dataclasses.replace(sweep, seeds=tuple(len(sweep.seeds) * arguments.seed + seed for seed in sweep.seeds))
    say = (lambda _: None) if arguments.json else partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        found = run(sweep, arguments.results or Path(scratch), say)
    result = verdict.judge(found, registered)
    if arguments.write_docs and not arguments.quick:
        account.write(arguments.arm, experiment.title, experiment.about, found, result)
    size = {"parameters": sweep.size.shape.parameters(), **dataclasses.asdict(sweep.size)}
    result |= {"sampler": sweep.name, "seeds": list(sweep.seeds), "rates": list(sweep.rates), "size": size}
    harness.finish(result, account.text(result), only_json=arguments.json)


def _arguments(doc: str | None, arms_there: list[str]) -> argparse.Namespace:
    parser = harness.parser(doc)
    parser.add_argument("--arm", choices=arms_there, default=arms_there[0], help=f"default {arms_there[0]}")
    parser.add_argument("--results", type=Path, help="folder that keeps finished runs, so that a stopped sweep goes on")
    parser.add_argument("--write-docs", action="store_true", help="write table and plot into docs/ (full runs only)")
    return parser.parse_args()
