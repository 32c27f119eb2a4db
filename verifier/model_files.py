"""The small files of a run's model (configuration, tokenizer): fetched by hash into a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from protocol.errors import E_OBJECT_HASH, E_STORE, LocalFault
from protocol.messages import ModelSpec


def fetch_model_files(model: ModelSpec, folder: Path, fetch: Callable[[str], bytes]) -> Path:
    """Make ``folder`` hold exactly the files the run manifest names; what is there already is only checked.

    Raises:
        LocalFault: ``E_OBJECT_HASH``, ``E_STORE``, or what ``fetch`` raises.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, sha256 in model.files.items():
            path = folder / name
            if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
                continue
            draft = path.with_name(path.name + ".new")
            draft.write_bytes(_checked(name, sha256, fetch(sha256)))
            draft.replace(path)
    except OSError as error:
        raise LocalFault(E_STORE, f"cannot write the model's files to {folder}", got=str(error)) from None
    return folder


def _checked(name: str, sha256: str, data: bytes) -> bytes:
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise LocalFault(E_OBJECT_HASH, f"{name} is not the file of the run manifest", expected=sha256, got=got)
    return data
