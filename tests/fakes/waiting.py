"""Waiting for the very thing that is asserted next, on machines that may be slow and busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: What takes longer is broken; no test asserts how long anything takes.
PATIENCE_S = 100.0


def until(what: Callable[[], object], why: Callable[[], str] = lambda: "it never happened") -> None:
    """Wait until ``what`` is true; ``why`` says more when it never is."""
    give_up = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < give_up, why()
        time.sleep(0.01)


def beside(act: Callable[[], object]) -> threading.Thread:
    """``act`` on a thread that keeps nobody from ending."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread
