from __future__ import annotations

import pytest

from protocol.errors import PeerFault
from protocol.identity import Identity
from protocol.log_head import LogHead, origin_of
from protocol.swarm.log_notes import LogNotes
from protocol.swarm.wire import MAX_HEAD_BYTES

COORDINATOR, RUN = Identity(b"c" * 32), "ab" * 16


def note(size: int, root: int = 0, *, signer: Identity = COORDINATOR, run_id: str = RUN) -> bytes:
    return LogHead(origin_of(run_id), size, bytes([root]) * 32).sign(signer).encode()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def notes(told: list[str]) -> LogNotes:
    return LogNotes(COORDINATOR.public_key, RUN, told.append)


def test_the_largest_travels_and_all_that_is_new_is_told(notes: LogNotes, told: list[str]) -> None:
    assert notes.size == -1
    assert [notes.hear(note(size)) for size in (7, 7, 3, 8)] == [True, False, False, True]
    assert told == [note(size).decode() for size in (7, 3, 8)]
    assert notes.size == 8


def test_a_contradiction_travels_once_and_is_told_each_time(notes: LogNotes, told: list[str]) -> None:
    assert [notes.hear(note(7, root)) for root in (0, 1, 2, 1)] == [True, True, False, False]
    assert told == [note(7, root).decode() for root in (0, 1, 2, 1)]


def test_what_we_were_shown_ourselves_is_not_told_to_us(notes: LogNotes, told: list[str]) -> None:
    assert notes.hear(note(7), own=True)
    assert not notes.hear(note(7), own=True)
    assert told == []
    assert not notes.hear(note(7))
    assert told == []


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (note(9, signer=Identity(b"x" * 32)), "E_SIGNATURE"),
        (note(9, run_id="cd" * 16), "E_LOG_ORIGIN"),
        (b"no note", "E_NOTE"),
        (b"\xff" + note(9), "E_NOTE"),
        (b" " * (MAX_HEAD_BYTES + 1), "E_TOO_LARGE"),
    ],
)
def test_what_the_coordinator_did_not_say_is_refused_by_name(
    notes: LogNotes, told: list[str], data: bytes, code: str
) -> None:
    notes.hear(note(7))
    with pytest.raises(PeerFault) as caught:
        notes.hear(data)
    assert caught.value.code == code
    assert (notes.size, len(told)) == (7, 1)
