"""How kernels are compiled by numba: for given types, so that no call ever waits, into a cache, without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types

_F = TypeVar("_F", bound=Callable[..., Any])


def inlined(function: _F) -> _F:
    """A helper for kernels."""
    return cast("_F", numba.njit(cache=True)(function))


def kernel(*signatures: Any) -> Callable[[_F], _F]:
    """A kernel compiled for these signatures."""
    return cast("Callable[[_F], _F]", numba.njit(list(signatures), cache=True, nogil=True))


def read_only(scalar: Any) -> Any:
    """Type of a contiguous vector that is only read."""
    return types.Array(scalar, 1, "C", readonly=True)
