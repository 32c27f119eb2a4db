"""Learning rate of each step: a linear rise, then constant, a cosine, or a line down to a floor."""

from __future__ import annotations

import math

from learner.config import OptimConfig


def learning_rate(step: int, config: OptimConfig) -> float:
    """Learning rate of optimiser step ``step`` (1 is the first; steps that were skipped are not counted).

    * ``constant``: ``lr`` after the rise.
    * ``cosine``: half a cosine from ``lr`` to ``lr * lr_floor`` (SGDR without restarts, arXiv 1608.03983).
    * ``linear``: a straight line between the same two.

    The fall ends at step ``schedule_steps``; afterwards the rate stays at its floor.
    """
    rise = min(1.0, max(1, step) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return config.lr * rise
    span = max(1, config.schedule_steps - config.warmup_steps)
    done = min(1.0, max(0.0, (step - config.warmup_steps) / span))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
    return config.lr * rise * (config.lr_floor + (1.0 - config.lr_floor) * left)
