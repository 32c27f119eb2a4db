"""A stream to one peer that speaks our errors: what libp2p raises becomes ``Transient``, deadlines are the caller's."""

from __future__ import annotations

import math
from typing import Final, Protocol

import trio
from libp2p.exceptions import BaseLibp2pError

from protocol.errors import E_UNREACHABLE, Transient

_BLOCK: Final = 64 * 2**10
#: Bytes written at once: a frame of Yamux, its header of 12 bytes included, then fits into one message of Noise.
_FRAME: Final = 65_519 - 12


class _Stream(Protocol):
    async def read(self, n: int | None = None) -> bytes: ...

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...

    async def reset(self) -> None: ...


class Line:
    """One stream. Not to be used by two tasks at once."""

    def __init__(self, peer_id: str, stream: _Stream):
        self.peer_id, self._stream = peer_id, stream

    async def read(self, count: int, *, stall_s: float | None = None) -> bytes:
        """Exactly ``count`` bytes; nothing when the stream ended before the first.

        With ``stall_s``, something has to come all so many seconds (``trio.TooSlowError``).

        Raises:
            Transient: ``E_UNREACHABLE`` when it broke or ended in between.
        """
        got = bytearray()
        while len(got) < count:
            try:
                with trio.fail_after(math.inf if stall_s is None else stall_s):
                    part = await self._stream.read(min(_BLOCK, count - len(got)))
            except EOFError:
                part = b""
            except (BaseLibp2pError, OSError, ValueError) as error:
                raise self._broken(error) from None
            if not part:
                break
            got += part
        if got and len(got) < count:
            raise self._broken(EOFError(f"{len(got)} of {count} bytes"))
        return bytes(got)

    async def write(self, data: bytes) -> None:
        """All of ``data``.

        Raises:
            Transient: ``E_UNREACHABLE`` when it broke.
        """
        try:
            for at in range(0, len(data), _FRAME):
                await self._stream.write(data[at : at + _FRAME])
        except (BaseLibp2pError, OSError, ValueError) as error:
            raise self._broken(error) from None

    async def close(self) -> None:
        """Say that nothing more comes; whatever is wrong with the stream by now does not matter."""
        try:
            await self._stream.close()
        except (BaseLibp2pError, OSError, ValueError):
            return

    async def reset(self) -> None:
        """Give the stream up."""
        try:
            await self._stream.reset()
        except (BaseLibp2pError, OSError, ValueError):
            return

    def _broken(self, error: BaseException) -> Transient:
        return Transient(
            E_UNREACHABLE, f"the stream to {self.peer_id} broke", got=f"{type(error).__name__}: {error}"[:200]
        )
