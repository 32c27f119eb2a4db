"""The account of an experiment: the table in the terminal, and the page and pictures in ``docs/``.

``docs/learning-experiments.md`` has a block for each experiment between two comments; a full run replaces its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness, svg, verdict
from benchmarks.arms import Run

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
PAGE: Final = "learning-experiments.md"


def columns(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows of the table, best method first."""
    header = ("method", "final reward", "95 %", "default minus this", "95 % (paired)", "collapsed", "at all rates",
              "best rate", "KL", "ESS", "cut")
    rows: list[tuple[object, ...]] = []
    for method in result["order"]:
        values = result["methods"][method]
        mean, low, high = values["default_minus_this"]
        rows.append((
            method, f"{values['final']:.3f}", f"{values['final_low']:.3f} to {values['final_high']:.3f}",
            f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{values['collapse_rate']:.0%}",
            f"{values['collapse_rate_all_rates']:.0%}",
            f"{values['best_rate']:g}", f"{values['kl']:.3f}", f"{values['ess']:.2f}", f"{values['cut']:.3f}",
        ))
    return header, rows


def text(result: dict[str, Any]) -> str:
    """What the terminal shows."""
    lines = [harness.table(*columns(result)), "", "registered before the run: " + _registered(result)]
    lines += [_pair_line(pair) for pair in result["pairs"]]
    return "\n".join([*lines, _default_line(result)])


def _registered(result: dict[str, Any]) -> str:
    return " >= ".join(" ~ ".join(alike) for alike in result["registered"])


def _pair_line(pair: dict[str, Any]) -> str:
    low, high = pair["interval"]
    words = "not contradicted" if pair["holds"] else "CONTRADICTED"
    return f"  {pair['expected']}: difference {pair['difference']:+.3f} ({low:+.3f} to {high:+.3f}), {words}"


def _default_line(result: dict[str, Any]) -> str:
    mean, low, high = result["best_minus_default"]
    noise = "within noise of the best" if result["default_within_noise"] else "behind the best beyond noise"
    return (f"default preset: rank {result['default_preset_rank']} of {len(result['methods'])}; best minus default "
            f"{mean:+.3f} ({low:+.3f} to {high:+.3f}): {noise}")


def picture(found: dict[str, list[Run]]) -> str:
    """Reward over steps at each method's best rate (bars: 95 % intervals), and final reward over the rates."""
    over_steps, over_rates = {}, {}
    for method, runs in found.items():
        own = verdict.at_rate(runs, verdict.best_rate(runs))
        rewards_SX = np.array([run.rewards for run in own])
        ends = [verdict.interval(column) for column in rewards_SX.T]
        over_steps[method] = svg.Curve(
            own[0].steps, rewards_SX.mean(0).tolist(), [low for low, _ in ends], [high for _, high in ends]
        )
        rates = sorted({run.rate for run in runs})
        finals = [verdict.finals(runs, rate) for rate in rates]
        ends = [verdict.interval(values) for values in finals]
        over_rates[method] = svg.Curve(
            rates, [float(values.mean()) for values in finals], [low for low, _ in ends], [high for _, high in ends]
        )
    return svg.chart([
        svg.Panel("reward of the learner, best rate", "step", over_steps),
        svg.Panel("final reward by learning rate", "learning rate", over_rates, log_x=True),
    ])


def write(name: str, title: str, about: Sequence[str], found: dict[str, list[Run]], result: dict[str, Any],
          docs: Path = DOCS) -> None:
    """Put the block ``name`` into the page and its picture beside it."""
    (docs / "plots").mkdir(exist_ok=True)
    (docs / "plots" / f"{name}.svg").write_text(picture(found), encoding="utf-8")
    header, rows = columns(result)
    block = [
        f"## {title}", "", *about, "", f"![rewards](plots/{name}.svg)", "",
        "| " + " | ".join(header) + " |", "|" + "---|" * len(header),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows), "",
        f"Registered before the run: {_registered(result)}.", "",
        *(f"* {_pair_line(pair).strip()}" for pair in result["pairs"]), f"* {_default_line(result)}",
    ]
    page = docs / PAGE
    page.write_text(replaced(page.read_text(encoding="utf-8"), name, "\n".join(block)), encoding="utf-8")


def replaced(page: str, name: str, block: str) -> str:
    """``page`` with the text between the comments of ``name`` replaced.

    Raises:
        ValueError: the page has no place for it.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{PAGE} has no place for {name}: expected the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{block}\n{end}{after}"
