"""How a known-answer file is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def write(folder: str, name: str, value: dict[str, Any]) -> None:
    """One case: sorted JSON, and a name that ends in ``_fail`` exactly when an error code is named."""
    if name.endswith("_fail") != ("error" in value):
        raise ValueError(f"{folder}/{name}: refused cases end in _fail and name their error")
    (HERE / folder).mkdir(exist_ok=True)
    origin = f"tests/vectors/make_{ORIGIN[folder]}.py"
    text = json.dumps({"origin": origin, **value}, sort_keys=True, ensure_ascii=False)
    (HERE / folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


#: Folder -> the generator that writes it.
ORIGIN = {
    "sampler": "sampler", "rollout-bundle": "bundle", "packed-bundle": "packed", "merkle": "bundle",
    "canonical-json": "messages", "envelope": "messages", "messages": "messages", "log": "log",
    "audit-draw": "draw",
}
