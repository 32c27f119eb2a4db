"""Learning from a foreign sampler: it always has the learner's newest weights, but rounded to four bits.

As ``staleness.py``, except that all tokens have lag 0 and the sampler's matrices are rounded to the nearest of 15 steps
per output channel (per row of the embedding), so that q is not p at any step. ``--arm int3`` takes three bits.

Registered before the run: SC >= TIS+SC >= TIS > PG, and the default preset is the best or within noise of it. At lag 0
``fresh sc``, the default of that time, *is* ``sc`` (unit weights, centred; its effective sample size is 1, so neither
cap nor rate moves): its runs are those of ``sc``, and are not computed twice (``tests/unit/learner/test_arms.py``
checks that). The default of now makes no such exception for fresh tokens.
"""

from __future__ import annotations

import harness

harness.pin_threads()

# ruff: noqa: E402
import dataclasses
from typing import Final

from benchmarks import arms, sweep

#: The registered order, best first.
REGISTERED: Final = (("sc",), ("tis+sc",), ("tis",), ("pg",))
FULL: Final = sweep.Sweep(
    "int4 sampler", arms.quantised_to(4), dataclasses.replace(arms.Size(), steps=96), seeds=(1, 2, 3, 4, 5),
    rates=(3e-5, 1e-4, 3e-4, 1e-3), methods=("pg", "sc", "ppo", "mis", "tis", "tis+sc", "default"),
    same_as=(("fresh sc", "sc"),),
)
QUICK: Final = dataclasses.replace(
    FULL, name="int4 sampler, quick", size=sweep.quick(FULL.size), seeds=(1, 2, 3), rates=(3e-4, 1e-3)
)
ABOUT: Final = (
    "`benchmarks/quantised_sampler.py`: the sampler has the learner's newest weights, rounded to four bits (nearest of",
    "15 steps per output channel); 96 steps of 64 completions, all at lag 0. `fresh sc` is `sc` there, by",
    "definition.",
)
#: A harsher sampler, without the rates that were far off the best in four bits.
FULL_3: Final = dataclasses.replace(FULL, name="int3 sampler", make_sampler=arms.quantised_to(3), rates=(1e-4, 3e-4))
QUICK_3: Final = dataclasses.replace(QUICK, name="int3 sampler, quick", make_sampler=arms.quantised_to(3))
ABOUT_3: Final = ("`benchmarks/quantised_sampler.py --arm int3`: the same with three bits (nearest of 7 steps).",)


if __name__ == "__main__":
    sweep.main(__doc__, REGISTERED, {
        "quantised_sampler": sweep.Experiment(FULL, QUICK, "Quantised sampler, four bits", ABOUT),
        "int3": sweep.Experiment(FULL_3, QUICK_3, "Quantised sampler, three bits", ABOUT_3),
    })
