"""Equality of states down to the last bit."""

from __future__ import annotations

from typing import Any

import torch


def assert_same_bits(got: Any, expected: Any, where: str = "state") -> None:
    """Equality down to the last bit, through nested dicts."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key in expected:
            assert_same_bits(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, where
        assert got.numpy().tobytes() == expected.numpy().tobytes(), where
    else:
        assert got == expected, where
