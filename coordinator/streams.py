"""Answers that may be long: sent piece by piece, so that a slow reader holds one piece in memory and not the whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import anyio.to_thread
from fastapi.responses import Response, StreamingResponse

from protocol.errors import E_STORE, LocalFault

#: Bytes in memory for each answer.
PIECE_BYTES: Final = 256 * 1024


def in_pieces(
    read: Callable[[int, int], bytes], start: int, end: int, *, status_code: int = 200, headers: Mapping[str, str],
    close: Callable[[], None] | None = None,
) -> Response:
    """Bytes ``start`` to ``end`` as an answer.

    Args:
        read: bytes from one place to another, in a worker thread. When it raises or returns fewer, the answer ends
            short of its announced length, which every client notices.
        close: called when the answer is over, however it ends.
    """
    headers = {**headers, "content-length": str(end - start)}
    pieces = _pieces(read, start, end, close)
    return StreamingResponse(pieces, status_code, headers, media_type="application/octet-stream")


def from_disk(data: bytes, directory: Path, headers: Mapping[str, str]) -> Response:
    """``data`` as an answer, kept meanwhile in a file without a name in ``directory``. Call it in a worker thread.

    Raises:
        LocalFault: ``E_STORE`` when the disk refuses.
    """
    try:
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            file.write(data)
            file.flush()
            stack.pop_all()
    except OSError as error:
        raise LocalFault(E_STORE, "cannot keep an answer on disk", got=str(error)) from None
    number = file.fileno()
    return in_pieces(
        lambda start, end: os.pread(number, end - start, start), 0, len(data), headers=headers, close=file.close
    )


async def _pieces(
    read: Callable[[int, int], bytes], start: int, end: int, close: Callable[[], None] | None
) -> AsyncIterator[bytes]:
    try:
        while start < end:
            piece = await anyio.to_thread.run_sync(partial(read, start, min(end, start + PIECE_BYTES)))
            if not piece:
                return
            start += len(piece)
            yield piece
    finally:
        if close is not None:
            close()
