"""The node remembers the log's head; a coordinator that rewrites, forks or shortens its log is noticed and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.health import Health
from node.witness import Heard, LogMemory, Witness
from protocol.errors import E_UNREACHABLE, PeerFault, Transient
from protocol.identity import Identity
from protocol.log_head import LogHead, origin_of
from protocol.merkle import leaf_hash
from protocol.transparency import consistency_proof, root
from tests.fakes.clock import FakeClock
from tests.fakes.log_tree import Tree
from tests.unit.node.office import COORDINATOR, RUN_ID, make_home, run_manifest


class FakeLog:
    """A log that a test writes, and rewrites."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.away = False

    def grow(self, *texts: str) -> None:
        for text in texts:
            self.tree.append(leaf_hash(text.encode()))

    def head(self, key: Identity = COORDINATOR) -> str:
        if self.away:
            raise Transient(E_UNREACHABLE, "away")
        return LogHead(origin_of(RUN_ID), self.tree.size, root(self.tree, self.tree.size)).sign(key)

    def consistency(self, old: int, new: int) -> tuple[bytes, ...]:
        return tuple(consistency_proof(self.tree, old, new))


@pytest.fixture
def log() -> FakeLog:
    return FakeLog()


@pytest.fixture
def memory(tmp_path: Path) -> LogMemory:
    run = run_manifest()
    return LogMemory(make_home(tmp_path, run), run)


def test_a_log_that_grows_is_followed(memory: LogMemory, log: FakeLog) -> None:
    assert memory.known() is None
    for texts in ([], ["a"], ["b", "c"], [], ["d"]):
        log.grow(*texts)
        assert memory.see(log.head(), log) == memory.known()
        assert memory.path.read_text() == log.head()
    assert not memory.conflict.exists()


@pytest.mark.parametrize(
    ("history", "code"),
    [(["a", "x", "c"], "E_LOG_FORK"), (["a", "x", "c", "d"], "E_LOG_CONSISTENCY"), (["a", "b"], "E_LOG_ROLLBACK")],
)
def test_a_log_that_was_rewritten_is_noticed(memory: LogMemory, log: FakeLog, history: list[str], code: str) -> None:
    log.grow("a", "b", "c")
    before = log.head()
    memory.see(before, log)
    other = FakeLog()
    other.grow(*history)
    with pytest.raises(PeerFault, match="--against") as caught:
        memory.see(other.head(), other)
    assert caught.value.code == code
    assert (memory.path.read_text(), memory.conflict.read_text()) == (before, other.head())


def test_a_head_of_somebody_else_is_refused(memory: LogMemory, log: FakeLog) -> None:
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        memory.see(log.head(Identity(bytes(32))), log)
    assert not memory.path.exists()
    memory.path.write_text("damaged")
    log.grow("a")
    assert memory.see(log.head(), log).size == 1


def test_the_worker_tells_troubles_and_goes_on(memory: LogMemory, log: FakeLog) -> None:
    witness = Witness(Health(FakeClock()), log, memory)
    log.grow("a", "b")
    assert witness.round() == 60
    log.away = True
    assert witness.round() == 60
    assert witness.health.troubles() == []
    log.away, log.tree = False, Tree([leaf_hash(b"x")])
    witness.round()
    assert "E_LOG_ROLLBACK" in str(witness.health.troubles())
    assert witness.health.ending is None


# -- what others were shown ------------------------------------------------------------------------------


def rounds(witness: Witness) -> list[str]:
    """What stands in the status after three more looks."""
    return [(witness.round(), str(witness.health.troubles()))[1] for _ in range(3)]


@pytest.mark.parametrize("theirs", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_heads_of_the_same_log_are_no_trouble(memory: LogMemory, log: FakeLog, theirs: list[str]) -> None:
    other, told, heard = FakeLog(), list[str](), Heard()
    other.grow(*theirs)
    log.grow("a", "b", "c")
    witness = Witness(Health(FakeClock()), log, memory, heard=heard, tell=told.append)
    heard.add(other.head())
    assert rounds(witness) == ["[]"] * 3
    assert told == [log.head()] * 3
    assert heard.take() == []


@pytest.mark.parametrize(
    ("theirs", "code"),
    [(["x"], "E_LOG_CONSISTENCY"), (["a", "x", "c"], "E_LOG_FORK"), (["a", "b", "c", "d"], "E_LOG_ROLLBACK")],
)
def test_two_logs_for_two_nodes_are_noticed_by_whoever_hears_of_both(
    memory: LogMemory, log: FakeLog, theirs: list[str], code: str
) -> None:
    other, heard = FakeLog(), Heard()
    other.grow(*theirs)
    log.grow("a", "b", "c")
    witness = Witness(Health(FakeClock()), log, memory, heard=heard)
    heard.add(other.head())
    assert code in rounds(witness)[-1]  # and it lasts
    assert memory.conflict.read_text() == other.head()
    assert code in rounds(Witness(Health(FakeClock()), log, memory))[-1]  # after a restart too


def test_a_head_that_is_ahead_of_ours_is_compared_once_ours_is_as_long(memory: LogMemory, log: FakeLog) -> None:
    other, heard = FakeLog(), Heard()
    other.grow("a", "b", "c")
    log.grow("a", "b")
    witness = Witness(Health(FakeClock()), log, memory, heard=heard)
    heard.add(other.head())
    assert (witness.round(), witness.health.troubles()) == (60, [])
    log.grow("c", "d")
    assert rounds(witness) == ["[]"] * 3
    assert not memory.conflict.exists()


def test_heads_wait_while_the_coordinator_is_away_and_are_bounded(memory: LogMemory, log: FakeLog) -> None:
    heard = Heard()
    for size in range(100):
        log.grow(str(size))
        heard.add(log.head())
    witness = Witness(Health(FakeClock()), log, memory, heard=heard)
    log.away = True
    witness.round()
    waiting = heard.take()
    assert [looks for _, looks in waiting] == [0] * 32
    for note, looks in waiting:
        heard.add(note, looks)
    log.away = False
    assert rounds(witness) == ["[]"] * 3
    assert heard.take() == []
