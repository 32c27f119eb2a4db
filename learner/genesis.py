"""The first model of a run: made on the spot (``tiny``) or taken from its Python package (``smollm2``).

Either way the result is a plain Hugging Face folder: bfloat16 safetensors, ``config.json`` and the tokenizer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from learner.disk import whole_directory
from learner.genesis_smollm2 import convert_smollm2
from learner.genesis_tiny import make_tiny
from protocol.errors import E_CONFIG, LocalFault

#: Says in the folder what it was made from, so that asking again costs nothing.
MARKER: Final = "genesis.json"

Log = Callable[[str], None]


def init_model(preset: str, out: Path, seed: int, log: Log | None = None) -> None:
    """Make the model ``preset`` in the folder ``out``; does nothing when it is there already.

    The same preset and seed give the same bytes on the same kind of machine (one thread; ``smollm2`` has no seed).

    Raises:
        LocalFault: ``E_CONFIG`` unknown preset, or ``out`` holds something else; ``E_WORK_DIR`` when it cannot be
            written; ``E_GENESIS`` when a package is missing.
    """
    makers: dict[str, Callable[[Path, int, Log], None]] = {"tiny": make_tiny, "smollm2": convert_smollm2}
    if preset not in makers:
        raise LocalFault(E_CONFIG, "unknown model preset", expected=f"one of {', '.join(makers)}", got=preset)
    say = log or logging.getLogger(__name__).info
    marker: dict[str, str | int] = {"preset": preset, "seed": seed if preset == "tiny" else 0}
    if _holds(out, marker):
        say(f"{out} holds this model already")
        return
    with whole_directory(out.resolve()) as scratch:
        makers[preset](scratch, seed, say)
        (scratch / MARKER).write_text(json.dumps(marker) + "\n", encoding="ascii")


def _holds(out: Path, marker: dict[str, str | int]) -> bool:
    """Whether ``out`` is the model asked for; a folder with other content is never overwritten."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        found = json.loads((out / MARKER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        found = None
    if found != marker:
        raise LocalFault(
            E_CONFIG,
            f"{out} holds something else",
            expected=f"a new folder or {json.dumps(marker)}",
            got=json.dumps(found) if found else "no model made by this command",
            hint="give another folder",
        )
    return True
