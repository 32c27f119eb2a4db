"""The node as a witness of the run's log: every head it sees must contain the one it saw before.

Nodes do this by themselves, so that a coordinator that rewrites what happened is noticed without anybody asking.
"""

from __future__ import annotations

import contextlib
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

    def see(self, note: str, log: Log) -> LogHead:
        """Take in a newer head.

        Raises:
            PeerFault: it is not the coordinator's; ``E_LOG_ROLLBACK``, ``E_LOG_FORK`` or ``E_LOG_CONSISTENCY`` when it
                does not contain the one before. Both signed heads are then kept: they prove it to anybody.
            Transient: no proof could be had.
            LocalFault: ``E_HOME``.
        """
        head, known = self._open(note), self.known()
        if known is not None:
            proof = log.consistency(known.size, head.size) if 0 < known.size < head.size else ()
            try:
                check_consistency(known.size, known.root, head.size, head.root, proof)
            except PeerFault as error:
                if error.code in _LIES:
                    self._home.write(self.conflict, note.encode())
                    error.hint = f"keep {self.path} and {self.conflict}: both are signed; show them to others"
                raise
        if known != head:
            self._home.write(self.path, note.encode())
        return head

    def _open(self, note: str) -> LogHead:
        return LogHead.open(note, self._run.run_id, bytes.fromhex(self._run.roles.coordinator))


class Witness(Worker):
    """Looks at the log now and then. What it finds is a trouble in the status; the node goes on."""

    name = "log"
    patience_s = EVERY_S

    def __init__(self, health: Health, log: Log, memory: LogMemory, *, every_s: float = EVERY_S):
        super().__init__(health)
        self._log, self._memory, self._every_s = log, memory, every_s

    def work(self) -> float:
        """One look."""
        with contextlib.suppress(Transient):  # other workers say that the coordinator is away
            self._memory.see(self._log.head(), self._log)
        return self._every_s
