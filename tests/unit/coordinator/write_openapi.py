"""Writes ``docs/spec/openapi.json`` anew: ``python -m tests.unit.coordinator.write_openapi``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import World

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "run", FakeClock())
        document = world.app.openapi()
        world.close()
    target = Path(__file__).resolve().parents[3] / "docs" / "spec" / "openapi.json"
    target.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
