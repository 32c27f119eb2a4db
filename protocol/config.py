"""Configuration of a process: a frozen pydantic model filled from defaults < TOML file < environment < flags.

Every field's value remembers where it came from, so that ``config show`` can say it. A nested field is named with
dots (``loss.preset``) in flags and in the provenance, and with a double underscore in the environment
(``ASSAY_LEARNER_LOSS__PRESET``).
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.errors import E_CONFIG, LocalFault
from protocol.validation import expectation

Provenance = dict[str, str]  #: dotted field name -> "default", "file PATH", "environment NAME" or "flag"


class Config(BaseModel):
    """Base of the configuration of a process and of its sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


_C = TypeVar("_C", bound=BaseModel)


def load_config(
    cls: type[_C],
    file: Path | None,
    env_prefix: str,
    overrides: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
) -> tuple[_C, Provenance]:
    """Resolve a ``cls``.

    Args:
        cls: a frozen pydantic model that forbids extra fields.
        file: a TOML file, or None.
        env_prefix: for example ``ASSAY_NODE_``; unknown variables with this prefix are errors.
        overrides: values of flags by dotted name; None means "not given".
        environ: the environment; ``os.environ`` when None.

    Raises:
        LocalFault: ``E_CONFIG``, naming the field, what was expected, what was got and where it came from.
    """
    values: dict[str, Any] = {}
    provenance: Provenance = {}
    for name, value in _from_file(file):
        _put(values, name, value)
        provenance[name] = f"file {file}"
    for variable, text in sorted((os.environ if environ is None else environ).items()):
        if variable.startswith(env_prefix):
            name = variable.removeprefix(env_prefix).lower().replace("__", ".")
            _put(values, name, _from_text(text))
            provenance[name] = f"environment {variable}"
    for name, value in overrides.items():
        if value is not None:
            _put(values, name, value)
            provenance[name] = "flag"
    try:
        config = cls.model_validate(values)
    except ValidationError as error:
        raise _fault(cls, error, provenance) from None
    return config, {name: _origin(name, provenance) for name, _ in flatten(config.model_dump(mode="json"))}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs (dotted name, value) of the leaves of a nested mapping, in its order."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def parse_assignment(text: str) -> tuple[str, Any]:
    """``loss.preset=tis+sc`` as (dotted name, value); lists, objects and null are read as JSON.

    Raises:
        LocalFault: ``E_CONFIG`` when there is no ``=``.
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise LocalFault(E_CONFIG, "not an assignment", expected="name=value, for example loss.preset=tis", got=text)
    return name.strip(), _from_text(value.strip())


def _from_file(file: Path | None) -> Iterator[tuple[str, Any]]:
    if file is None:
        return
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LocalFault(E_CONFIG, f"cannot read configuration file {file}", got=str(error)) from None
    except tomllib.TOMLDecodeError as error:
        raise LocalFault(E_CONFIG, f"configuration file {file} is not TOML", got=str(error)) from None
    yield from flatten(tree)


def _from_text(text: str) -> Any:
    """Lists, objects and null are JSON; anything else stays text, which pydantic turns into the field's type."""
    if text != "null" and not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise LocalFault(E_CONFIG, f"{name} is set inside {parent}, which is a plain value", got=str(child))
        tree = child
    tree[last] = value


def _origin(name: str, provenance: Provenance) -> str:
    """Where a leaf came from: the longest given name that is the leaf or holds it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        origin = provenance.get(".".join(parts[:length]))
        if origin is not None:
            return origin
    return "default"


def _fault(cls: type[BaseModel], error: ValidationError, provenance: Provenance) -> LocalFault:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or "(whole)"
    source = _origin(name, provenance)
    if first["type"] == "extra_forbidden":
        return _unknown(cls, name, source)
    if first["type"] == "missing":
        return LocalFault(
            E_CONFIG, f"{name} is not set", expected="a value", got="nothing",
            hint=f"give it by its flag (see --help) or by {name} = ... in the configuration file",
        )
    got = repr(first["input"])[:120]
    return LocalFault(
        E_CONFIG, f"{name} ({source}) does not fit", expected=expectation(first), got=got,
        hint=f"and {error.error_count() - 1} more" if error.error_count() > 1 else None,
    )


def _unknown(cls: type[BaseModel], name: str, source: str) -> LocalFault:
    known = list(_names(cls))
    near = difflib.get_close_matches(name, known, n=3) or [other for other in known if other.endswith(f".{name}")]
    return LocalFault(
        E_CONFIG, f"there is no setting {name} ({source})", expected=" or ".join(near) or f"one of {', '.join(known)}",
        got=name,
    )


def _names(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings of a configuration."""
    for name, info in cls.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _names(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
