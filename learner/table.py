"""The learner's last steps as a table in the terminal, with warnings in words."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from learner.metrics import LOW_ESS, LOW_HEAD_MASS, Metrics, warnings_of

#: Metric, heading, format.
_COLUMNS: Final = (
    ("version", "version", "d"), ("reward_mean", "reward", ".3f"), ("loss", "loss", ".3g"), ("kl", "KL q|p", ".2e"),
    ("ess", "ESS", ".2f"), ("ratio_p99", "ratio p99", ".3f"), ("ratio_max", "max", ".2f"),
    ("truncated", "cut", ".1%"), ("head_mass_q", "head q", ".3f"), ("entropy", "entropy", ".3f"),
    ("grad_norm", "grad", ".3g"), ("lr", "lr", ".2e"), ("lag_mean", "lag", ".1f"), ("lag_max", "max", "d"),
    ("tokens_per_s", "tokens/s", ".0f"), ("wait_s", "wait s", ".1f"), ("diff_bytes", "diff B", ",d"),
)


#: Headings in the order in which a narrow terminal does without them.
_SPARED: Final = ("diff B", "lr", "wait s", "tokens/s", "head q", "entropy", "ratio p99", "grad", "loss", "cut")
#: Columns that hold the widest table: what is not a terminal is as wide as it must be.
WIDE: Final = 300


def steps_table(lines: list[Metrics], console: Console) -> Group:
    """The steps of ``lines``, the newest one's lag buckets, and what a person should look at.

    Columns that do not fit ``console`` are left out, and named.
    """
    columns, spared = list(_COLUMNS), []
    for heading in _SPARED:
        if console.measure(_steps(lines, columns), options=console.options.update(width=WIDE)).maximum <= console.width:
            break
        columns = [column for column in columns if column[1] != heading]
        spared.append(heading)
    parts: list[Any] = [_steps(lines, columns)]
    if spared:
        parts.append(Text(f"not shown, for want of width: {', '.join(spared)} (all with --json)", style="dim"))
    newest = lines[-1] if lines else {}
    if newest.get("by_lag"):
        parts.append(_buckets(newest["by_lag"]))
    parts += [Text(f"version {newest['version']}: {warning}", style="yellow") for warning in _warnings(newest)]
    return Group(*parts)


def _steps(lines: list[Metrics], columns: list[tuple[str, str, str]]) -> Table:
    table = Table(title="steps of the learner")
    for _, heading, _ in columns:
        table.add_column(heading, justify="right")
    for metrics in lines:
        cells = [_cell(metrics.get(name), form) for name, _, form in columns]
        table.add_row(*cells, style="yellow" if _warnings(metrics) else None)
    return table


def _buckets(by_lag: dict[str, Metrics]) -> Table:
    table = Table(title="the newest step by lag in versions")
    names = list(next(iter(by_lag.values())))
    for name in ("lag", *names):
        table.add_column(name, justify="right")
    for lag, values in by_lag.items():
        table.add_row(lag, *(_cell(values.get(name), "d" if name == "tokens" else ".4g") for name in names))
    return table


def _warnings(metrics: Metrics) -> list[str]:
    """Warnings of a line of metrics.jsonl, where numbers that were not finite are None."""
    if not metrics:
        return []
    sound = {"skipped": None, "ess": LOW_ESS, "head_mass_q": LOW_HEAD_MASS}
    return warnings_of(metrics | {name: value for name, value in sound.items() if metrics.get(name) is None})


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
