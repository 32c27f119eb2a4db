"""A trainer's state on disk, in one part for each process that held a part of it.

::

    part-0-of-2.pt   what process 0 of 2 held: rows of every tensor, and the counters
    part-1-of-2.pt

What there is of each weight (``SHARED``) is divided by its first dimension into equal blocks, the last ones smaller
or empty, as FSDP2 divides them; what has no dimension, and everything else, is the same in every part. Parts written
by any number of processes can be read by any other number. They are read without executing anything
(``weights_only``) and mapped, so that a process reads the rows it needs.
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from learner.disk import E_WORK_DIR, disk_faults
from protocol.errors import LocalFault

#: Entries of a state that hold rows of tensors.
SHARED: Final = ("masters", "optimiser")

_NAME: Final = re.compile(r"part-(\d+)-of-(\d+)\.pt")


def part_name(rank: int, size: int) -> str:
    """File name of the part of process ``rank`` of ``size``."""
    return f"part-{rank}-of-{size}.pt"


def write_part(folder: Path, rank: int, size: int, state: dict[str, Any]) -> None:
    """Write one process's part, durably.

    Raises:
        LocalFault: ``E_WORK_DIR``.
    """
    path = folder / part_name(rank, size)
    with disk_faults(f"write {path}"), path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def read_part(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """The part of process ``rank`` of ``size``, whatever number of processes wrote the folder.

    Raises:
        LocalFault: ``E_WORK_DIR`` when a part is missing or cannot be read.
    """
    parts = [_read(folder / name) for name in part_names(folder)]
    if len(parts) == size:
        return parts[rank]
    own = parts[min(rank, len(parts) - 1)]
    return {
        key: _divided([part[key] for part in parts], rank, size) if key in SHARED else own[key] for key in own
    }


def part_names(folder: Path) -> list[str]:
    """Names of a folder's parts in the order of the processes.

    Raises:
        LocalFault: ``E_WORK_DIR`` when they are not a whole set.
    """
    found = sorted(path.name for path in folder.glob("part-*.pt"))
    match = _NAME.fullmatch(found[0]) if found else None
    size = int(match[2]) if match else 0
    expected = [part_name(rank, size) for rank in range(size)]
    if not found or found != sorted(expected):
        raise LocalFault(
            E_WORK_DIR, f"{folder} does not hold a whole state", expected="part-0-of-N.pt to the last", got=found
        )
    return expected


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise LocalFault(E_WORK_DIR, f"cannot read {path}", got=f"{type(error).__name__}: {error}") from None
    return state


def _divided(parts: list[Any], rank: int, size: int) -> Any:
    """The values of ``parts``, tensors put together and divided anew, everything else as the first part has it."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: _divided([part[key] for part in parts], rank, size) for key in first}
    if isinstance(first, Tensor) and first.ndim > 0:
        return rows_of(torch.cat(parts), rank, size)
    return first


def rows_of(tensor: Tensor, rank: int, size: int) -> Tensor:
    """The rows of ``tensor`` that process ``rank`` of ``size`` holds."""
    block = -(-len(tensor) // size)
    return tensor[min(rank * block, len(tensor)) : min((rank + 1) * block, len(tensor))]
