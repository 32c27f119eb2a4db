"""Change single numbers of a preset: ``batch.groups_per_batch=8``, ``up.drills=["int8"]``, ``learner.optim.lr=0.1``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from coordinator.presets import Preset
from protocol.config import parse_assignment
from protocol.errors import E_CONFIG, LocalFault
from protocol.validation import expectation


def with_settings(preset: Preset, assignments: Sequence[str]) -> Preset:
    """``preset`` with fields replaced; what follows ``learner.`` is a setting of the learner and is checked there.

    Raises:
        LocalFault: ``E_CONFIG``, naming the field, what was expected and what was got.
    """
    if not assignments:
        return preset
    tree = preset.model_dump(mode="json")
    for assignment in assignments:
        name, value = parse_assignment(assignment)
        section, _, key = name.partition(".")
        if section == "learner":
            tree["learner"][key] = _value(value)
        else:
            _replace(tree, name, _value(value))
    try:
        return Preset.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise LocalFault(
            E_CONFIG, f"setting {where} does not fit", expected=expectation(first), got=repr(first["input"])[:120]
        ) from None


def _value(text: Any) -> Any:
    """Numbers and booleans as such; the rest stays text."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _replace(tree: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        child = tree.get(parent)
        if not isinstance(child, dict):
            raise _unknown(name, tree)
        tree = child
    if last not in tree:
        raise _unknown(name, tree)
    tree[last] = value


def _unknown(name: str, tree: dict[str, Any]) -> LocalFault:
    return LocalFault(E_CONFIG, "a preset has no such setting", expected=f"one of {', '.join(tree)}", got=name)
