"""What the daemon asks of an engine, cut so that any continuous-batching engine fits behind it.

An engine owns the weights on the device, the KV cache and the batch. It draws with the run's sampler and returns
finished rollouts; it knows nothing of leases, keys or the network. One thread calls all of its methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from protocol.errors import code
from protocol.rollout import Rollout

if TYPE_CHECKING:
    from protocol.weights.layout import State

E_ENGINE_REQUEST = code("E_ENGINE_REQUEST", "the engine cannot obey a request (too long, unknown version, bad token)")
E_ENGINE = code("E_ENGINE", "the engine failed or does not fit the run")


@dataclass(frozen=True)
class Request:
    """One sample to generate."""

    key: str  #: the caller's name for it, unique among open requests
    sample: int  #: sample index within the group; copied into the rollout
    prompt: tuple[int, ...]  #: token ids; when ``first_position`` > 0 the completion so far is its end
    seed: bytes  #: 32 bytes, ``protocol.rollout.rollout_seed``
    start_version: int  #: the first token comes from these weights and no others
    first_position: int = 0  #: completion position of the first token to draw
    pinned: bool = False  #: all tokens come from ``start_version``, whatever comes out meanwhile


@dataclass(frozen=True)
class Finished:
    """A request that is done. ``rollout`` holds positions from ``request.first_position`` on."""

    request: Request
    rollout: Rollout


class WeightSource(Protocol):
    """Where an engine takes published weights from. Safe to call from the engine's thread at any time."""

    def newest(self) -> int:
        """Newest version whose state is verified and at hand."""
        ...

    def has(self, version: int) -> bool:
        """Whether :meth:`state` would give this version."""
        ...

    def state(self, version: int) -> AbstractContextManager[State]:
        """The bit patterns of a version, which stay unchanged inside the ``with`` block.

        Raises:
            LocalFault: the version is not at hand.
        """
        ...


class Engine(Protocol):
    """A continuous-batching engine.

    It follows its :class:`WeightSource` by itself: weights are exchanged between forward passes, for a request
    under way only at positions that the run's swap grid allows, and every exchange a rollout crosses is recorded as a
    segment. A request begins with exactly its ``start_version``.
    """

    @property
    def profile(self) -> str:
        """Name of the numeric profile the rollouts are made under."""
        ...

    @property
    def version(self) -> int:
        """Version loaded right now; -1 before the first."""
        ...

    @property
    def capacity(self) -> int:
        """Most requests in progress at once."""
        ...

    @property
    def open_requests(self) -> int:
        """Requests submitted and not yet returned or cancelled."""
        ...

    @property
    def waiting(self) -> frozenset[str]:
        """Keys of requests that are not begun: no token of theirs is drawn."""
        ...

    @property
    def tokens(self) -> int:
        """Completion tokens drawn since the engine was made."""
        ...

    def check(self, request: Request) -> None:
        """Whether the engine could obey, without taking it on.

        Raises:
            LocalFault: ``E_ENGINE_REQUEST``.
        """
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests on; they start as soon as there is room.

        Raises:
            LocalFault: ``E_ENGINE_REQUEST``; then none of them was taken.
        """
        ...

    def cancel(self, keys: Sequence[str]) -> None:
        """Forget requests; unknown keys are ignored."""
        ...

    def step(self) -> list[Finished]:
        """Do a bounded piece of work (about one forward pass) and return what it finished.

        Raises:
            LocalFault: weights that a request needs are not at hand, or the device failed.
        """
        ...

    def close(self) -> None:
        """Free the device. No method is called afterwards."""
        ...
