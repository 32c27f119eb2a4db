"""Whole diffs on all threads: applying and verifying against hashing alone, and what a second thread is worth."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from beside_itself import two_process_scaling

from protocol.weights.diff import apply_patch, decode_diff, encode_diff
from protocol.weights.layout import Layout, State, copy_state
from protocol.weights.state_root import state_root

#: Rounds for each of the other measurements.
_ROUNDS: Final = 4


def measure(layout: Layout, old: State, new: State, rounds: int) -> dict[str, Any]:
    """Applying and verifying against hashing alone, on one thread and on two; and what a second thread brings."""
    live, cores = copy_state(old), len(os.sched_getaffinity(0))
    data = encode_diff(layout, old, new)

    def applied(threads: int) -> Callable[[State], None]:
        patch = decode_diff(layout, data, threads=threads)
        return apply_patch(layout, live, patch, threads=threads).revert

    def verified(threads: int) -> Callable[[State], None]:
        undo = applied(threads)
        state_root(layout, live, threads=threads)
        return undo

    def coded(threads: int) -> Callable[[State], None]:
        encode_diff(layout, old, new, threads=threads)
        return lambda _state: None

    def hashed(threads: int) -> Callable[[State], None]:
        state_root(layout, live, threads=threads)
        return lambda _state: None

    work = {"hash": hashed, "apply": applied, "verified": verified, "encode": coded}
    found: dict[tuple[str, int], list[float]] = {(name, threads): [] for name in work for threads in (1, 2)}
    for _ in range(_ROUNDS * rounds + 2):
        for (name, threads), seconds in found.items():
            started = time.perf_counter()
            reset = work[name](threads)
            seconds.append(time.perf_counter() - started)
            reset(live)

    def ratio(over: tuple[str, int], under: tuple[str, int]) -> float:
        """The median of what every round says: the two of a round had the same machine."""
        return statistics.median(a / b for a, b in zip(found[over][2:], found[under][2:], strict=True))

    scaling = {name: ratio((name, 1), (name, 2)) for name in work}
    limits = {name: two_process_scaling(partial(_one, work[name], live), rounds) for name in ("encode", "apply")}
    to_hash = {threads: ratio(("verified", threads), ("hash", threads)) for threads in (1, 2)}
    hash_s = statistics.median(found["hash", 1])
    return {
        "apply_verify_vs_hash": to_hash[1], "apply_verify_vs_hash_two_threads": to_hash[2], "hash_s": hash_s,
        "two_process_scaling_by": limits,
        "two_thread_scaling": min(scaling["encode"], scaling["apply"]), "two_thread_scaling_by": scaling,
        "cores": cores,
    }


def _one(work: Callable[[int], Callable[[State], None]], live: State) -> Callable[[], None]:
    """On one thread; what is returned puts it back."""
    return partial(work(1), live)
