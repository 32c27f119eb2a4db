"""What every test may ask for, and the settings that keep the suite fair to a small machine."""

from __future__ import annotations

import os

# Two busy processes with two OpenMP threads each run about ten times slower than with one; set before torch loads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from protocol.identity import Identity
from tests.fakes.clock import FakeClock

settings.register_profile(
    "assay", deadline=None, derandomize=True, database=None, print_blob=True, max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "assay"))

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same global random state."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (third parties draw from the global state)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """ASSAY_* variables of the caller's shell never reach a test."""
    for name in list(os.environ):
        if name.startswith("ASSAY_"):
            monkeypatch.delenv(name)


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still until told."""
    return FakeClock()


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator."""
    return np.random.default_rng(20260801)


@pytest.fixture
def identity() -> Identity:
    """A fixed signing key."""
    return Identity(bytes(range(32)))


@pytest.fixture
def root() -> Path:
    """The root of the working tree."""
    return ROOT


@pytest.fixture
def vectors() -> Path:
    """Known-answer files: ``tests/vectors/<format>/<case>``."""
    return ROOT / "tests" / "vectors"
