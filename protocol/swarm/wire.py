"""The bytes peers exchange on streams of the swarm: wishes, answers, lists of keys. Spec: ``docs/spec/swarm.md``."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from protocol.errors import PeerFault, code

E_SWARM = code("E_SWARM", "the swarm cannot run here")
E_SWARM_WIRE = code("E_SWARM_WIRE", "a peer of the swarm breaks the rules of its protocol")

#: Most bytes one wish may ask for: what a server holds in memory for it. A chunk takes several.
MAX_PIECE_BYTES: Final = 2**20
#: Most keys in one question who has what.
MAX_KEYS: Final = 1024
#: Largest signed head that is passed on.
MAX_HEAD_BYTES: Final = 16 * 2**10
#: Longest time a server keeps a wish waiting for a chunk that is on its way, in milliseconds.
MAX_WAIT_MS: Final = 10_000
KEY_BYTES: Final = 32

_WISH: Final = struct.Struct(">32sQII")
_ANSWER: Final = struct.Struct(">BQI")
_COUNT: Final = struct.Struct(">I")
WISH_BYTES: Final = _WISH.size
ANSWER_BYTES: Final = _ANSWER.size
COUNT_BYTES: Final = _COUNT.size


def chunk_protocol(run_id: str) -> str:
    """Protocol of wishes for pieces of chunks."""
    return f"/assay/{run_id}/chunk/1"


def have_protocol(run_id: str) -> str:
    """Protocol of questions who has what."""
    return f"/assay/{run_id}/have/1"


def head_protocol(run_id: str) -> str:
    """Protocol to ask for the newest head."""
    return f"/assay/{run_id}/head/1"


def head_topic(run_id: str) -> str:
    """Gossip topic of heads."""
    return f"/assay/{run_id}/heads/1"


def log_topic(run_id: str) -> str:
    """Gossip topic of heads of the run's log."""
    return f"/assay/{run_id}/log/1"


class Status(IntEnum):
    """How a server stands towards one key."""

    HERE = 0  #: the bytes follow
    COMING = 1  #: it is fetching the chunk
    ABSENT = 2  #: it has no such chunk and is not fetching it
    BUSY = 3  #: ask again later


@dataclass(frozen=True)
class Wish:
    """Bytes ``start`` to ``start + length`` of the chunk ``key``; wait up to ``wait_ms`` while it is not there."""

    key: str  #: SHA-256, hex
    start: int
    length: int
    wait_ms: int = 0

    def encode(self) -> bytes:
        """Its bytes."""
        return _WISH.pack(bytes.fromhex(self.key), self.start, self.length, self.wait_ms)

    @classmethod
    def decode(cls, data: bytes) -> Wish:
        """Read :data:`WISH_BYTES` bytes.

        Raises:
            PeerFault: ``E_SWARM_WIRE`` outside the limits.
        """
        key, start, length, wait_ms = _WISH.unpack(data)
        if not 0 < length <= MAX_PIECE_BYTES or start >= 2**48 or wait_ms > MAX_WAIT_MS:
            raise PeerFault(
                E_SWARM_WIRE, "a wish outside the limits", expected=f"1 to {MAX_PIECE_BYTES} bytes",
                got=f"{length} bytes from {start}, wait {wait_ms} ms",
            )
        return cls(key.hex(), start, length, wait_ms)


@dataclass(frozen=True)
class Answer:
    """What stands before the bytes: how many follow (``length``), and the size of the whole chunk."""

    status: Status
    total: int = 0
    length: int = 0

    def encode(self) -> bytes:
        """Its bytes."""
        return _ANSWER.pack(self.status, self.total, self.length)

    @classmethod
    def decode(cls, data: bytes, wish: Wish, size: int) -> Answer:
        """Read :data:`ANSWER_BYTES` bytes, the answer to ``wish`` about a chunk of ``size`` bytes.

        Raises:
            PeerFault: ``E_SWARM_WIRE``: another length than asked for, bytes where there are none, no such status.
        """
        number, total, length = _ANSWER.unpack(data)
        if number not in Status.__members__.values():
            raise PeerFault(E_SWARM_WIRE, "no such status", expected="0 to 3", got=number)
        answer = cls(Status(number), total, length)
        here = answer.status is Status.HERE
        expected = (size, min(wish.length, size - wish.start)) if here else (0, 0)
        if (total, length) != expected:
            raise PeerFault(
                E_SWARM_WIRE, f"{answer.status.name} with another length than the signed manifest says",
                expected=f"{expected[1]} bytes of {expected[0]}", got=f"{length} bytes of {total}",
            )
        return answer


def encode_keys(keys: Sequence[str]) -> bytes:
    """A question who has these chunks."""
    assert 0 < len(keys) <= MAX_KEYS
    return _COUNT.pack(len(keys)) + b"".join(bytes.fromhex(key) for key in keys)


def decode_count(data: bytes, most: int) -> int:
    """A number of things that follow, from 1 to ``most``.

    Raises:
        PeerFault: ``E_SWARM_WIRE``.
    """
    (count,) = _COUNT.unpack(data)
    if not 0 < count <= most:
        raise PeerFault(E_SWARM_WIRE, "a count outside the limits", expected=f"1 to {most}", got=count)
    return int(count)


def encode_count(count: int) -> bytes:
    """The inverse of :func:`decode_count`."""
    return _COUNT.pack(count)


def decode_keys(data: bytes) -> list[str]:
    """The keys in what follows the count."""
    return [data[i : i + KEY_BYTES].hex() for i in range(0, len(data), KEY_BYTES)]


def decode_statuses(data: bytes) -> list[Status]:
    """One status a byte.

    Raises:
        PeerFault: ``E_SWARM_WIRE``.
    """
    if not set(data) <= {int(status) for status in Status}:
        raise PeerFault(E_SWARM_WIRE, "no such status", expected="0 to 3", got=max(data))
    return [Status(byte) for byte in data]


def turn(key: str, peers: Iterable[str]) -> list[str]:
    """Peers in the order in which they should ask the store for a chunk: the same for all who know the same peers.

    Rendezvous hashing: by SHA-256 of key and peer, so that each peer is first for its share of the chunks and a peer
    that goes away moves nobody else's turn.
    """
    return sorted(peers, key=lambda peer: weight(key, peer))


def weight(key: str, peer: str) -> bytes:
    """Where a peer stands in the order of a chunk: smaller is earlier."""
    return hashlib.sha256(f"{key} {peer}".encode()).digest()
