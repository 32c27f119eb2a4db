"""States that the known-answer files of weights are about, and how a file is written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from protocol.weights.layout import Layout, State

HERE = Path(__file__).parent
ORIGIN = "tests/vectors/make_weights.py"

SMALL = Layout.of({"bias": ("F32", (3,)), "embed": ("BF16", (4, 3)), "none": ("BF16", (0,)), "scale": ("F16", ())})


def write(folder: str, name: str, value: dict[str, Any]) -> None:
    (HERE / folder).mkdir(exist_ok=True)
    text = json.dumps({"origin": ORIGIN, **value}, indent=1, sort_keys=True)
    (HERE / folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def hexed(state: State) -> dict[str, str]:
    """Little-endian bytes of each tensor."""
    return {name: array.tobytes().hex() for name, array in state.items()}


def small_state() -> State:
    """+-0, a subnormal, the largest number, infinity, NaNs among ordinary values."""
    return {
        "bias": np.array([0x3F800000, 0x80000000, 0x7FC00001], "<u4"),
        "embed": np.array(
            [0x0000, 0x8000, 0x0001, 0x3F80, 0xBF80, 0x3C23, 0xBC24, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF], "<u2"
        ).reshape(4, 3),
        "none": np.zeros(0, "<u2"),
        "scale": np.array(0x3C00, "<u2"),
    }


def filled(layout: Layout) -> State:
    """Byte i of the canonical state is byte i % 32 of SHA-256 of the 8-byte little-endian integer i // 32."""
    blocks = -(-layout.nbytes // 32)
    data = b"".join(hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(blocks))
    return {
        e.name: np.frombuffer(data, e.words, count=e.nbytes // e.words.itemsize, offset=e.offset).reshape(e.shape)
        for e in layout.entries
    }
