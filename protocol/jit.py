"""How kernels are compiled by numba, and where the compiled code is kept.

numba takes code from its cache when the *file* of a kernel is unchanged, but a kernel also holds what it calls and the
constants it names, from other files. So the cache has a folder for each state of all these files: code that is kept
there and code that stands here cannot differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast

_F = TypeVar("_F", bound=Callable[..., Any])

_HERE: Final = Path(__file__).parent
#: What kernels are made of: their own files, and those of the constants and functions in them.
SOURCES: Final = (
    "bit_coder.py", "bundle_columns.py", "jit.py", "packed_tokens.py", "prng.py", "rollout.py", "sampler_jit.py",
    "weight_table.py", "weights/bound_jit.py", "weights/choice.py", "weights/choice_jit.py", "weights/classes.py",
    "weights/codec_jit.py", "weights/coder.py", "weights/entropy_jit.py", "weights/fold_jit.py", "weights/rans.py",
    "weights/tokens.py", "weights/vector_jit.py",
)


def kernel(*signatures: Any, nogil: bool = True) -> Callable[[_F], _F]:
    """A kernel compiled for these signatures and no others, so that no call ever waits; it releases the GIL."""
    import numba

    def compile_it(function: _F) -> _F:
        with kept():
            return cast("_F", numba.njit(list(signatures), cache=True, nogil=nogil)(function))

    return compile_it


def inlined(function: _F) -> _F:
    """A helper for kernels.

    Raises:
        RuntimeError: there is nowhere to keep compiled code.
    """
    import numba

    with kept():
        return cast("_F", numba.njit(cache=True)(function))


def read_only(scalar: Any, dimensions: int = 1) -> Any:
    """Type of a contiguous array that is only read."""
    from numba import types

    return types.Array(scalar, dimensions, "C", readonly=True)


@contextmanager
def kept() -> Iterator[None]:
    """What is decorated here has its compiled code in the folder of this state of the sources."""
    from numba import config

    before = config.CACHE_DIR
    config.CACHE_DIR = str(_folder(before) or before)
    try:
        yield
    finally:
        config.CACHE_DIR = before


@cache
def _folder(chosen: str) -> Path | None:
    """In ``NUMBA_CACHE_DIR``, beside the sources, or under the home, whichever can be written first; None if none."""
    digest = hashlib.sha256()
    for name in SOURCES:
        data = (_HERE / name).read_bytes()
        digest.update(f"{name} {len(data)}\n".encode() + data)
    for base in [Path(chosen)] if chosen else [_HERE / "__pycache__", Path.home() / ".cache" / "assay"]:
        folder = base / f"kernels-{digest.hexdigest()[:16]}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return folder
    return None
