"""Paths that somebody typed: inputs must be there, an output destroys no input and appears whole or not at all.

What is wrong with a path is an ``E_USAGE``, said before anything is done.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from protocol.errors import E_TOO_LARGE, E_USAGE, LocalFault, PeerFault, code

E_FILE = code("E_FILE", "a file could not be read or written: no permission, no space, a device that fails")

#: Name of an input (an option or what the file is), and its path.
Named = tuple[str, Path]

#: Files of this kind are pages of ours that nothing reads again; one may be replaced even in a folder of inputs.
_PAGE: Final = ".html"


def check_input_file(name: str, path: Path) -> None:
    """A file that is to be read.

    Raises:
        LocalFault: ``E_USAGE`` when it is missing, a folder, a pipe or a device, or not readable.
    """
    _check_input(name, path, "file")
    if path.is_dir():
        raise _wrong(f"{name} is a folder", "a file", path, "name the file in it")
    if not path.is_file():
        raise _wrong(f"{name} is a pipe or a device", "a file on a disk", path, "save it to a file first")


def check_input_folder(name: str, path: Path) -> None:
    """A folder that is to be read.

    Raises:
        LocalFault: ``E_USAGE`` when it is missing, a file, or not readable.
    """
    _check_input(name, path, "folder")
    if not path.is_dir():
        raise _wrong(f"{name} is a file", "a folder", path, "name the folder that holds it")


def check_output_file(name: str, path: Path, inputs: Iterable[Named] = ()) -> None:
    """A file that is to be written, whose writing must leave every input as it is.

    Args:
        inputs: files and folders; no existing file in one of the folders may be written to, except a page.

    Raises:
        LocalFault: ``E_USAGE`` when it is an input or a folder, or when there is no folder to write it in.
    """
    folder = path.parent
    if _is(path, "folder"):
        raise _wrong(f"{name} is a folder", "a file to write", path, "add the name of a file to it")
    if not _is(folder, "folder"):
        raise _wrong(f"the folder of {name} does not exist", "an existing folder", folder, f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _wrong(f"{name} cannot be written", "a folder that you may write to", folder, "choose another one")
    for other, given in inputs:
        if _same(path, given):
            raise _overwrites(name, other, path)
        if given.is_dir() and path.exists() and path.suffix != _PAGE and _inside(path, given):
            raise _overwrites(name, f"a file of {other} {given}", path)


def check_output_folder(name: str, path: Path, inputs: Iterable[Named] = ()) -> None:
    """A folder that is to be filled, outside every input.

    Raises:
        LocalFault: ``E_USAGE`` when it is a file, or an input or in one.
    """
    if path.exists() and not path.is_dir():
        raise _wrong(f"{name} is a file", "a folder to write", path, "give another name")
    for other, given in inputs:
        if _same(path, given) or _inside(path, given):
            raise _overwrites(name, other, path)


def read_input_file(path: Path, max_bytes: int) -> bytes:
    """The content of a file that :func:`check_input_file` let pass; no more than the limit is read of any.

    Raises:
        PeerFault: ``E_TOO_LARGE``.
        LocalFault: ``E_FILE``.
    """
    try:
        size = path.stat().st_size
        if size <= max_bytes:
            with path.open("rb") as file:
                data = file.read(max_bytes + 1)
            if len(data) <= max_bytes:
                return data
            size = len(data)  # it has grown
    except OSError as error:
        raise LocalFault(E_FILE, f"cannot read {path}", got=error.strerror or str(error)) from None
    raise PeerFault(E_TOO_LARGE, f"{path} is too large", expected=f"<= {max_bytes} bytes", got=size)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes ``path`` when the block ends well; otherwise what was there stays.

    A link is followed; a device or a pipe is written to directly.

    Raises:
        LocalFault: ``E_FILE``.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.part")
        try:
            with draft.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise LocalFault(
            E_FILE, f"cannot write {path}", got=error.strerror or str(error), hint="check free space and permissions"
        ) from None


def _check_input(name: str, path: Path, kind: str) -> None:
    if not _is(path, "there"):
        raise _wrong(
            f"{name}: no such {kind}", f"an existing {kind}", path, f"check the spelling; names count from {Path.cwd()}"
        )
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise _wrong(f"{name} cannot be read", "permission to read it", path, "see its owner and mode: ls -ld")


def _is(path: Path, what: str) -> bool:
    try:
        return path.is_dir() if what == "folder" else path.exists()
    except (OSError, ValueError):
        return False  # a name that no file can have


def _same(path: Path, other: Path) -> bool:
    """One file under two names: links of both kinds are seen through."""
    try:
        return path.samefile(other)
    except OSError:  # one of them does not exist
        return os.path.realpath(path) == os.path.realpath(other)


def _inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _wrong(message: str, expected: str, path: Path, hint: str) -> LocalFault:
    return LocalFault(E_USAGE, message, expected=expected, got=str(path)[:400], hint=hint)


def _overwrites(name: str, other: str, path: Path) -> LocalFault:
    return LocalFault(
        E_USAGE, f"{name} would overwrite {other}", expected="a file of its own", got=str(path)[:400],
        hint="nothing was written; give another name",
    )
