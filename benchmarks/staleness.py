"""Learning from a stale sampler: it takes up the learner's weights every 64 steps only, so lags go from 0 to 63.

A transformer of 38 thousand weights, warmed on a solver's traces, learns to sort (``arms``, ``sorting``). Everything
between the logits and the optimiser is the network's own: seeded draws from committed heads, advantages, corrections,
the age-aware cap and its controller, the gradient of every token. What is compared is the reward of the learner's own
policy on held-out problems at the end, at each method's best learning rate; seeds are paired.

Registered before the run: TIS+SC >= TIS ~ MIS > PPO > SC ~ PG, and the default preset is the best or within noise of
it. ``tis`` and ``tis+sc`` have the constant cap 2 of the literature, ``aged tis`` and ``default`` the age-aware one.
A run has collapsed when less than half of its own best reward is left at the end.
"""

from __future__ import annotations

import harness

harness.pin_threads()

# ruff: noqa: E402
import dataclasses
from typing import Final

from benchmarks import arms, sweep

#: The registered order, best first; methods in one entry were expected to be alike.
REGISTERED: Final = (("tis+sc",), ("tis", "mis"), ("ppo",), ("sc", "pg"))
FULL: Final = sweep.Sweep(
    "stale sampler", arms.refreshed_every(64), arms.Size(), seeds=(1, 2, 3, 4, 5), rates=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
)
QUICK: Final = dataclasses.replace(
    FULL, name="stale sampler, quick", make_sampler=arms.refreshed_every(16), size=sweep.quick(FULL.size),
    seeds=(1, 2, 3), rates=(3e-4, 1e-3),
)
ABOUT: Final = (
    "`benchmarks/staleness.py`: the sampler takes up the learner's weights every 64 steps; 128 steps of 64",
    "completions, so that each of the two sets of weights that sample is trained on at lags 0 to 63.",
)


if __name__ == "__main__":
    sweep.main(__doc__, REGISTERED, {"staleness": sweep.Experiment(FULL, QUICK, "Stale sampler", ABOUT)})
