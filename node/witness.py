"""The node as a witness of the run's log: every head it sees must contain the one it saw before.

Nodes do this by themselves, so that a coordinator that rewrites what happened is noticed without anybody asking. In the
swarm they tell each other the heads they were shown, so that showing different logs to different nodes is noticed too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from node.health import Health
from node.home import Home
from node.worker import Worker
from protocol.errors import AssayError, PeerFault, Transient
from protocol.log_head import LogHead
from protocol.messages import RunManifest
from protocol.transparency import E_LOG_CONSISTENCY, E_LOG_FORK, E_LOG_ROLLBACK, check_consistency

#: How often the log is looked at, in seconds.
EVERY_S: Final = 60.0
#: Most heads of others that wait to be compared; older ones give way.
_MAX_HEARD: Final = 32
#: Looks at the log after which it must be as long as a head that somebody was shown before them.
_LOOKS: Final = 2
_LIES: Final = frozenset({E_LOG_CONSISTENCY, E_LOG_FORK, E_LOG_ROLLBACK})


class Log(Protocol):
    """Who has the log; :class:`protocol.log_client.LogClient` is one."""

    def head(self) -> str:
        """The newest head, a signed note."""
        ...

    def consistency(self, old: int, new: int) -> tuple[bytes, ...]:
        """Proof that the log of ``new`` entries begins with that of ``old``."""
        ...


class LogMemory:
    """The newest head this node saw, on disk; and the one that contradicts it, should there ever be one."""

    def __init__(self, home: Home, run: RunManifest):
        self._home, self._run = home, run
        self.path, self.conflict = home.path / "log.head", home.path / "log.conflict"

    def known(self) -> LogHead | None:
        """The head seen last; None when there is none that the run's coordinator signed."""
        try:
            return self._open(self.path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, AssayError):
            return None

    def contradiction(self) -> str | None:
        """The head that contradicts what we saw, from an earlier life."""
        try:
            note = self.conflict.read_text(encoding="utf-8")
            self._open(note)
        except (OSError, UnicodeDecodeError, AssayError):
            return None
        return note

    def see(self, note: str, log: Log) -> LogHead:
        """Take in a newer head.

        Raises:
            PeerFault: it is not the coordinator's; ``E_LOG_ROLLBACK``, ``E_LOG_FORK`` or ``E_LOG_CONSISTENCY`` when it
                seems not to contain the one before. Both signed heads are then kept: with the entries they prove it to
                anybody, or clear the coordinator (a proof is not signed, and a head may be an old one).
            Transient: no proof could be had.
            LocalFault: ``E_HOME``.
        """
        head, known = self._open(note), self.known()
        if known is not None:
            self._check(known, head, note, log)
        if known != head:
            self._home.write(self.path, note.encode())
        return head

    def compare(self, note: str, log: Log) -> bool:
        """Whether a head that another node was shown is of the log that we are shown; False when ours is shorter.

        Raises:
            PeerFault: as :meth:`see`: the coordinator shows different logs to different nodes.
            Transient: no proof could be had.
        """
        head, known = self._open(note), self.known()
        if known is None or head.size > known.size:
            return False
        self._check(head, known, note, log)
        return True

    def accuse(self, note: str) -> PeerFault:
        """Keep a head that the log we are shown never reached, and say so."""
        known = self.known()
        self._home.write(self.conflict, note.encode())
        return PeerFault(
            E_LOG_ROLLBACK, "the log that others were shown is longer than ours stays",
            expected=f"at least {self._open(note).size} entries", got=known.size if known else 0, hint=self._hint(),
        )

    def _check(self, old: LogHead, new: LogHead, note: str, log: Log) -> None:
        proof = log.consistency(old.size, new.size) if 0 < old.size < new.size else ()
        try:
            check_consistency(old.size, old.root, new.size, new.root, proof)
        except PeerFault as error:
            if error.code in _LIES:
                self._home.write(self.conflict, note.encode())
                error.hint = self._hint()
            raise

    def _hint(self) -> str:
        return (
            f"keep {self.path} and {self.conflict}, both signed: assay audit log URL --root HEX --against "
            f"{self.conflict} says whether they contradict each other, or an answer was spoilt on its way"
        )

    def _open(self, note: str) -> LogHead:
        return LogHead.open(note, self._run.run_id, bytes.fromhex(self._run.roles.coordinator))


class Heard:
    """Heads of the log that other nodes were shown, until they are compared. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, int]] = deque(maxlen=_MAX_HEARD)

    def add(self, note: str, looks: int = 0) -> None:
        """Keep a head, at which we looked in vain so many times."""
        with self._lock:
            self._waiting.append((note, looks))

    def take(self) -> list[tuple[str, int]]:
        """All that wait, in the order they came."""
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
        return taken


class Witness(Worker):
    """Looks at the log now and then. What it finds is a trouble in the status; the node goes on.

    Args:
        heard: what others were shown.
        tell: passes on what we were shown.
    """

    name = "log"
    patience_s = EVERY_S

    def __init__(
        self, health: Health, log: Log, memory: LogMemory, *, every_s: float = EVERY_S, heard: Heard | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ):
        super().__init__(health)
        self._log, self._memory, self._every_s, self._tell = log, memory, every_s, tell
        self._heard = heard if heard is not None else Heard()
        if (kept := memory.contradiction()) is not None:
            self._heard.add(kept)

    def work(self) -> float:
        """One look."""
        heard = deque(self._heard.take())  # before the look: what was signed by now, the log must hold
        try:
            note = self._log.head()
            self._memory.see(note, self._log)
            self._tell(note)
            while heard:
                if not self._fits(*heard[0]):
                    self._heard.add(heard[0][0], heard[0][1] + 1)
                heard.popleft()
        except PeerFault:
            heard.rotate(-1)  # it is compared again at each look, after the others: the trouble lasts while it is one
            raise
        except Transient:
            pass  # other workers say that the coordinator is away
        finally:
            for waiting in heard:
                self._heard.add(*waiting)
        return self._every_s

    def _fits(self, note: str, looks: int) -> bool:
        if self._memory.compare(note, self._log):
            return True
        if looks + 1 >= _LOOKS:
            raise self._memory.accuse(note)
        return False
