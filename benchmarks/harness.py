"""What the benchmarks share: arguments, pinned threads, interleaved timing, a table, one JSON line at the end.

Every benchmark is ``python benchmarks/NAME.py [--quick] [--json] [--seed N]``. The last line of its output is one JSON
object; with ``--json`` it is the only one.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A benchmark is started as a file: the project's root is not on the path yet, and this folder stands first, where
# ``statistics.py`` hides the standard library's module from everybody who imports it.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE), str(_HERE)]

# ruff: noqa: E402
import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Repeated timings of one thing, in seconds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles over the median; 0 for fewer than two timings."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes; add others to it."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    made.add_argument("--quick", action="store_true", help="measure the same thing smaller, within a minute")
    made.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    made.add_argument("--seed", type=int, default=0, help="seed of all pseudo-random choices (default 0)")
    return made


def pin_threads(threads: int = 1) -> None:
    """Bound the threads of torch, BLAS, OpenMP and numba. Call it before torch or numba is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def interleave(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int = 7, warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time the contenders in turns, so that whatever else the machine does hits all of them alike.

    ``clock``: ``time.process_time`` where the claim is about a core and the work is all ours.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm_up + rounds):
        for name, work in contenders.items():
            gc.collect()
            started = clock()
            work()
            if turn >= warm_up:
                found[name].append(clock() - started)
    return {name: Timing(tuple(seconds)) for name, seconds in found.items()}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns, numbers to four significant digits."""
    cells = [[_cell(value) for value in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "never" if value is None else str(value)


def finish(result: Mapping[str, Any], text: str, *, only_json: bool) -> None:
    """Print the table and, as the last line, the result."""
    if not only_json:
        print(text)
    print(json.dumps(result), flush=True)
