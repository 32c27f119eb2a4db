"""The node remembers the log's head; a coordinator that rewrites, forks or shortens its log is noticed and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.health import Health
from node.witness import LogMemory, Witness
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
    with pytest.raises(PeerFault, match="show them to others") as caught:
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
