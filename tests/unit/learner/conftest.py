from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fakes.learning import Speaker, make_model_dir, sampling_rules


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Durability is for the integration tests; here it only costs time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def speaker(model_dir: Path) -> Speaker:
    return Speaker(model_dir, sampling_rules())
