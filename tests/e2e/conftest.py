import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A first model, made once for all networks of the session."""
    folder = tmp_path_factory.mktemp("genesis") / "model"
    subprocess.run(
        [sys.executable, "-m", "assay", "learner", "init-model", "--preset", "tiny", "--out", str(folder)],
        check=True, timeout=400, capture_output=True,
    )
    return folder
