"""What an engine gains by refilling its rows at once, and by taking up new weights in flight.

Real ``TorchEngine``, the shape of the tiny preset with random weights, completions of log-normal length (a long tail:
the median is 24 tokens, the longest are 256). Five ways to serve the same stream of requests, in turns:

=========== ========================================================================================================
static      a batch of requests at a time; the next one when the last of them is done; the weights never change
continuous  a row that ends is refilled at once; the weights never change
drain       new weights come now and then: nothing is begun until all rows have ended, then the weights change
restart     the same, but rows under way are thrown away and their requests begin again under the new weights
in-flight   the same, but rows go on under the new weights at their next grid position, their KV cache kept
=========== ========================================================================================================

What counts is tokens of finished completions per second of processor time, once rows of all ages are under way. A
version comes whenever the engine has drawn the tokens of 48 mean completions, a batch of the ``smollm2`` preset, and of
96: the more seldom, the less the way of taking it up matters (``by_batch``); the other keys are at 48. Restarting
finishes no completion that is longer than the time between two versions, so ``mean_length`` says what each way hands to
the learner; draining skips the versions that come while it drains: ``swaps`` says how many were taken up.
``thrown_away`` is drawn less handed in; what was under way at the beginning and the end moves it by some hundredths.

A request of n tokens begins at completion position 256 - n, where the engine ends it after n tokens.
``pause_ms`` is how long the exchange of weights itself takes, the median; the lag of a token is counted in versions
when its completion ends. Peers report 881 tokens/s static, 975 continuous, 2,949 with weights in flight for Olmo 3
(Olmo 3 technical report, arXiv 2512.13961, as cited in the lecture "From Classical RL to Frontier LLMs", 2026), on
another scale and another engine.
"""

from __future__ import annotations

import harness

harness.pin_threads()

# ruff: noqa: E402
import statistics
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.serving import MOVING, RULES, STEADY, Load, Served, Server, make_model


def measure(load: Load, seed: int) -> dict[tuple[str, int], list[Served]]:
    """Every way of serving, at every cadence where there is one, in turns; by way and batch."""
    cases = [(way, load.batches[0]) for way in STEADY] + [(way, batch) for batch in load.batches for way in MOVING]
    found: dict[tuple[str, int], list[Served]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as name:
        layout, states = make_model(Path(name), seed)
        Server("continuous", Path(name), layout, states, replace(load, settle=0, tokens=500), seed).serve()  # warm-up
        for turn in range(load.rounds):
            for way, batch in cases:
                server = Server(way, Path(name), layout, states, replace(load, batch=batch), 1000 * seed + turn)
                found[way, batch].append(server.serve())
    return found


def result_of(found: dict[tuple[str, int], list[Served]], load: Load) -> dict[str, Any]:
    """The keys of the benchmark."""
    summaries = {case: _summary(rounds) for case, rounds in found.items()}
    speed = {case: values["tokens_per_s"] for case, values in summaries.items()}
    first = load.batches[0]
    lags: Counter[int] = sum((served.lags for served in found["in-flight", first]), Counter())
    return {
        "continuous_vs_static": speed["continuous", first] / speed["static", first],
        "inflight_vs_restart": speed["in-flight", first] / speed["restart", first],
        "inflight_vs_drain": speed["in-flight", first] / speed["drain", first],
        "pause_ms": summaries["in-flight", first]["pause_ms"],
        "lag_histogram": {str(lag): lags[lag] / lags.total() for lag in sorted(lags)},
        "by_batch": {
            str(batch): {f"inflight_vs_{way}": speed["in-flight", batch] / speed[way, batch] for way in MOVING[:2]}
            for batch in load.batches
        },
        "ways": {f"{way}, {batch}" if way in MOVING else way: values for (way, batch), values in summaries.items()},
        "slots": load.slots, "tokens": load.tokens, "rounds": load.rounds, "swap_grid": RULES.swap_grid,
    }


def _summary(rounds: list[Served]) -> dict[str, Any]:
    speeds = harness.Timing(tuple(served.seconds / max(1, served.tokens) for served in rounds))
    lengths = [length for served in rounds for length in served.lengths]
    pauses = [pause for served in rounds for pause in served.pauses]
    return {
        "tokens_per_s": 1 / speeds.median, "spread": speeds.spread, "completions": len(lengths),
        "mean_length": float(np.mean(lengths)), "longest": max(lengths),
        "thrown_away": 1 - sum(s.tokens for s in rounds) / sum(s.drawn for s in rounds),
        "swaps": len(pauses), "pause_ms": 1000 * statistics.median(pauses) if pauses else None,
    }


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    load = Load(settle=2_000, tokens=3_500, batches=(48,), rounds=2) if arguments.quick else Load()
    result = result_of(measure(load, arguments.seed), load)
    columns = ("tokens_per_s", "spread", "completions", "mean_length", "longest", "thrown_away", "swaps", "pause_ms")
    rows = [(way, *(values[column] for column in columns)) for way, values in result["ways"].items()]
    text = harness.table(("way", *columns), rows)
    text += "\nlag of tokens, in flight: " + ", ".join(f"{k}: {v:.1%}" for k, v in result["lag_histogram"].items())
    harness.finish(result, text, only_json=arguments.json)


if __name__ == "__main__":
    main()
