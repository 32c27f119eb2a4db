from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import PeerFault
from protocol.swarm import wire
from protocol.swarm.wire import Answer, Status, Wish, turn

KEY = "5a" * 32
WISH = Wish(KEY, 100, 50, 0)


def test_a_wish_is_48_bytes_and_comes_back() -> None:
    wish = Wish(KEY, 2**40, wire.MAX_PIECE_BYTES, wire.MAX_WAIT_MS)
    assert len(wish.encode()) == wire.WISH_BYTES == 48
    assert Wish.decode(wish.encode()) == wish
    assert WISH.encode().hex() == KEY + "0000000000000064" + "00000032" + "00000000"


@pytest.mark.parametrize(
    "wish",
    [
        Wish(KEY, 0, 0), Wish(KEY, 0, wire.MAX_PIECE_BYTES + 1), Wish(KEY, 2**48, 1),
        Wish(KEY, 0, 1, wire.MAX_WAIT_MS + 1),
    ],
)
def test_a_wish_outside_the_limits_is_refused(wish: Wish) -> None:
    with pytest.raises(PeerFault) as caught:
        Wish.decode(wish.encode())
    assert caught.value.code == "E_SWARM_WIRE"


def test_an_answer_fits_its_wish() -> None:
    here = Answer(Status.HERE, 150, 50)
    assert Answer.decode(here.encode(), WISH, 150) == here
    short = Answer(Status.HERE, 120, 20)
    assert Answer.decode(short.encode(), WISH, 120) == short
    assert Answer.decode(Answer(Status.COMING).encode(), WISH, 150).status is Status.COMING


@pytest.mark.parametrize(
    "answer",
    [
        Answer(Status.HERE, 150, 49), Answer(Status.HERE, 150, 51), Answer(Status.HERE, 151, 50),
        Answer(Status.HERE, 150, 0), Answer(Status.HERE, 150, 2**32 - 1), Answer(Status.ABSENT, 150, 0),
        Answer(Status.BUSY, 0, 1),
    ],
)
def test_an_answer_of_another_length_is_refused_before_it_is_read(answer: Answer) -> None:
    with pytest.raises(PeerFault) as caught:
        Answer.decode(answer.encode(), WISH, 150)
    assert caught.value.code == "E_SWARM_WIRE"


@given(st.binary(min_size=wire.ANSWER_BYTES, max_size=wire.ANSWER_BYTES))
def test_any_answer_is_read_or_refused(data: bytes) -> None:
    with suppress(PeerFault):
        assert Answer.decode(data, WISH, 150).encode() == data


@given(st.binary(min_size=wire.WISH_BYTES, max_size=wire.WISH_BYTES))
def test_any_wish_is_read_or_refused(data: bytes) -> None:
    with suppress(PeerFault):
        assert Wish.decode(data).encode() == data


def test_keys_and_statuses_come_back() -> None:
    keys = [KEY, "00" * 32]
    data = wire.encode_keys(keys)
    assert wire.decode_count(data[:4], wire.MAX_KEYS) == 2
    assert wire.decode_keys(data[4:]) == keys
    assert wire.decode_statuses(b"\x00\x02") == [Status.HERE, Status.ABSENT]


@pytest.mark.parametrize("count", [0, wire.MAX_KEYS + 1])
def test_a_count_outside_the_limits_is_refused(count: int) -> None:
    with pytest.raises(PeerFault):
        wire.decode_count(wire.encode_count(count), wire.MAX_KEYS)


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(PeerFault):
        wire.decode_statuses(b"\x00\x04")


def test_turns_are_the_same_for_all_fair_and_hardly_move_when_somebody_leaves() -> None:
    peers = [f"peer-{i}" for i in range(8)]
    keys = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(800)]
    firsts = Counter(turn(key, peers)[0] for key in keys)
    assert set(firsts) == set(peers)
    assert max(firsts.values()) < 2 * min(firsts.values())
    for key in keys:
        order = turn(key, reversed(peers))
        assert order == turn(key, peers)
        assert turn(key, [peer for peer in peers if peer != order[3]]) == [*order[:3], *order[4:]]
