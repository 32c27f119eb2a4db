"""The small files of a run's model (configuration, tokenizer, layout): fetched by hash into a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from protocol.disk import replace_file
from protocol.errors import E_OBJECT_HASH, E_STORE, LocalFault


def fetch_model_files(files: Mapping[str, str], folder: Path, fetch: Callable[[str], bytes]) -> Path:
    """Make ``folder`` hold these files; what is there already is only checked.

    Args:
        files: name -> hex SHA-256, as in the run manifest.

    Raises:
        LocalFault: ``E_OBJECT_HASH``, ``E_STORE``, or what ``fetch`` raises.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, sha256 in files.items():
            path = folder / name
            if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
                replace_file(path, _checked(name, sha256, fetch(sha256)))
    except OSError as error:
        raise LocalFault(E_STORE, f"cannot write the model's files to {folder}", got=str(error)) from None
    return folder


def _checked(name: str, sha256: str, data: bytes) -> bytes:
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise LocalFault(E_OBJECT_HASH, f"{name} is not the file of the run manifest", expected=sha256, got=got)
    return data
