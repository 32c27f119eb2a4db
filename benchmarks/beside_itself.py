"""How much more a machine does of some work with a second process that does the same, sharing nothing with the first.

What two threads reach is to be read against it: cores that share execution units, caches or a memory bus do not do two
times as much in two processes either, and no code changes that.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier

Work = Callable[[], Callable[[], None]]


def two_process_scaling(work: Work, rounds: int) -> float:
    """Work done per second by two processes at once, over that of one; from the fastest of ``rounds`` turns each.

    ``work`` returns what undoes it, which is not timed.
    """
    alone = min(_seconds(work, 1) for _ in range(rounds))
    both = min(_seconds(work, 2) for _ in range(rounds))
    return 2 * alone / both


def _seconds(work: Work, processes: int) -> float:
    """Seconds until the last of some forked processes, started together, has done its work."""
    context = multiprocessing.get_context("fork")
    ready, done = context.Barrier(processes), context.SimpleQueue()
    children = [context.Process(target=_child, args=(work, ready, done)) for _ in range(processes)]
    for child in children:
        child.start()
    seconds = [done.get() for _ in children]
    for child in children:
        child.join()
    return max(seconds)


def _child(work: Work, ready: Barrier, done: SimpleQueue[float]) -> None:
    work()()  # what the parent has in memory is copied when it is first touched
    ready.wait()
    started = time.perf_counter()
    undo = work()
    done.put(time.perf_counter() - started)
    undo()
