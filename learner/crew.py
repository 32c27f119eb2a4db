"""Rank 0's trainer, and what the other ranks do: the same calls in the same order.

Each call of ``Lead`` is first told to the others, who make it on their own ``Trainer``; the collectives inside match
because the calls do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from learner.batch import Batch
from learner.ranks import Ranks, rank_faults
from learner.trainer import StepAbandoned, StepResult, Trainer
from protocol.errors import E_CONFIG, LocalFault
from protocol.messages import SamplingRules
from protocol.weights.layout import Layout, State


class Training(Protocol):
    """What the learner's loop needs of a trainer, be it one process or many."""

    @property
    def layout(self) -> Layout:
        """Names, types and shapes of what is published."""
        ...

    @property
    def size(self) -> int:
        """How many processes it is."""
        ...

    @property
    def lost(self) -> bool:
        """Whether a call failed so that no other can be made."""
        ...

    def published_state(self) -> State:
        """Bit patterns of the current weights."""
        ...

    def train_step(self, batch: Batch, should_stop: Callable[[], bool] = ...) -> StepResult:
        """Train on ``batch``, or say why not."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything a later step depends on."""
        ...

    def load(self, folder: Path) -> None:
        """Go back to what ``save`` wrote."""
        ...

    def wait(self) -> None:
        """Called again and again while there is nothing to do."""
        ...

    def close(self) -> None:
        """That was all."""
        ...


@dataclass(frozen=True)
class Opening:
    """What rank 0 tells first: with what everybody must work."""

    rules: SamplingRules
    layout_sha256: str
    config_sha256: str

    def check(self, layout_sha256: str, config_sha256: str) -> None:
        """Raise ``E_CONFIG`` unless this rank was started with the same model and settings."""
        expected, got = (self.layout_sha256, self.config_sha256), (layout_sha256, config_sha256)
        if expected != got:
            raise LocalFault(
                E_CONFIG, "this process was started with another model or other settings than rank 0",
                expected=f"layout {expected[0]}, settings {expected[1]}", got=f"layout {got[0]}, settings {got[1]}",
            )


class Lead:
    """The trainer of rank 0."""

    def __init__(self, trainer: Trainer, ranks: Ranks):
        self._trainer, self._ranks = trainer, ranks
        self._lost = False

    @property
    def layout(self) -> Layout:
        """Names, types and shapes of what is published."""
        return self._trainer.layout

    @property
    def size(self) -> int:
        """How many processes it is."""
        return self._ranks.size

    @property
    def lost(self) -> bool:
        """Whether a call failed so that no other can be made: the ranks are no longer at the same call."""
        return self._lost

    def published_state(self) -> State:
        """Bit patterns of the current weights, put together from all ranks."""
        state: State = self._together("published_state")
        return state

    def train_step(self, batch: Batch, should_stop: Callable[[], bool] = lambda: False) -> StepResult:
        """Train on ``batch`` together; ``should_stop`` is asked here only."""
        self._tell("train_step", batch)
        with self._faults():
            return self._trainer.train_step(batch, should_stop)

    def save(self, folder: Path) -> None:
        """Every rank writes its part into ``folder``, which all must see under the same name."""
        self._together("save", folder)

    def load(self, folder: Path) -> None:
        """Every rank reads its part, whatever number of ranks wrote the folder."""
        self._together("load", folder)

    def wait(self) -> None:
        """Tell the others that there is nothing to do, so that they know that rank 0 lives."""
        self._together("wait")

    def close(self) -> None:
        """Tell the others that this was all; nothing when they are lost already."""
        if not self._lost:
            self._tell(None)

    def _together(self, name: str, *arguments: Any) -> Any:
        self._tell(name, *arguments)
        with self._faults():
            return getattr(self._trainer, name)(*arguments)

    def _tell(self, name: str | None, *arguments: Any) -> None:
        with self._faults():
            self._ranks.tell((name, arguments))

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Name carriers' errors, and remember that there was one."""
        try:
            with rank_faults():
                yield
        except StepAbandoned:
            raise  # at every rank, at the same place
        except BaseException:
            self._lost = True
            raise


def follow(trainer: Trainer, ranks: Ranks) -> None:
    """Do what rank 0 tells until it says that this was all.

    Raises:
        LocalFault: ``E_RANK_LOST``, or what the calls raise.
    """
    while True:
        name, arguments = ranks.hear()
        if name is None:
            return
        try:
            with rank_faults():
                getattr(trainer, name)(*arguments)
        except StepAbandoned:
            continue
