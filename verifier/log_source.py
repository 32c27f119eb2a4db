"""Where a log is read from: a live coordinator, or a file that was downloaded. Nothing it gives is checked here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from protocol.client import CoordinatorClient
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, E_SCHEMA, E_UNREACHABLE, AssayError, LocalFault, PeerFault, Transient, code
from protocol.log_client import LogClient
from protocol.log_entry import LogEntry
from protocol.log_file import LogFile
from protocol.log_head import LogHead
from protocol.log_proof import LogProof, ProvenEntry

E_LOG_ANSWER = code(
    "E_LOG_ANSWER", "an answer about a log is an error or malformed; nobody signed it, so it says nothing about anybody"
)

#: Entries asked for at once.
_PAGE: Final = 1000
_T = TypeVar("_T")


class LogSource(Protocol):
    """A log that can be read from its beginning."""

    @property
    def run_manifest(self) -> Envelope:
        """The run manifest."""

    @property
    def head(self) -> str:
        """The newest head, a signed note; always the same one."""

    def entries(self, size: int) -> Iterator[LogEntry]:
        """The entries under a head of this size."""


class LiveLog:
    """The log of a running coordinator. Its head is the one that was the newest when this was made.

    What comes over the wire is signed by nobody until a head or a hash speaks for it, and whoever sits in between can
    answer anything. So errors and answers that make no sense are a ``LocalFault`` ``E_LOG_ANSWER``, whatever code they
    claim, or ``Transient`` ``E_UNREACHABLE``, here as in every method.
    """

    def __init__(self, client: CoordinatorClient):
        self._client, self._log = client, LogClient(client)
        self.run_manifest, self.head = _ask("the run manifest", client.run_manifest), _ask("the head", self._newest)

    def entries(self, size: int) -> Iterator[LogEntry]:
        """The first ``size`` entries, page by page."""
        at = 0
        while at < size:
            limit = min(size - at, _PAGE)
            page = _ask(f"entries from {at} on", partial(self._log.entries, at, limit))
            if not 0 < len(page) <= limit:
                raise _no_answer(f"entries from {at} on", f"1 to {limit} entries", len(page))
            yield from page
            at += len(page)

    def consistency(self, old: int, new: int) -> tuple[bytes, ...]:
        """Proof that the first ``new`` entries begin with the first ``old``."""
        return _ask(f"a proof from {old} to {new} entries", lambda: self._log.consistency(old, new))

    def newest(self, size: int) -> ProvenEntry:
        """The last entry of the first ``size``, with its proof."""
        return _ask(f"entry {size - 1}", lambda: self._log.inclusion(size - 1, size))

    def proof_about(self, receipt_id: str) -> LogProof:
        """What the log holds on a receipt.

        Raises:
            LocalFault: ``E_NOT_FOUND`` when the coordinator says that it knows none of this id.
        """
        try:
            return self._log.proof_about(receipt_id)
        except AssayError as error:
            if error.code == E_NOT_FOUND:
                raise LocalFault(
                    E_NOT_FOUND, "the coordinator says that its log holds no such receipt", expected="a receipt's id",
                    got=receipt_id, hint="compare the id, and the run; who holds the signed receipt, show it to others",
                ) from None
            raise _in_our_words(f"receipt {receipt_id}", error) from None

    def plan(self, version: int) -> Envelope:
        """The learner's batch plan of a version."""
        def question() -> Envelope:
            return _envelope(self._client.get_object(f"/v1/batches/{version}").get("plan"))

        return _ask(f"the batch plan of version {version}", question)

    def _newest(self) -> str:
        head = self._log.head()
        LogHead.peek(head)
        return head


class FileLog:
    """A downloaded log."""

    def __init__(self, path: Path):
        self._file = LogFile.open(path)
        self.run_manifest, self.head = self._file.run_manifest, self._file.head
        self.root_public_key = self._file.root_public_key  #: the key the run manifest claims to be signed by

    def entries(self, size: int) -> Iterator[LogEntry]:
        """All entries; should there be more than ``size``, whoever counts them will notice."""
        return self._file.entries()


def _envelope(value: Any) -> Envelope:
    if not isinstance(value, dict):
        raise PeerFault(E_SCHEMA, "the coordinator's answer holds no envelope", got=str(value)[:80])
    return Envelope.from_dict(value)


def _ask(what: str, question: Callable[[], _T]) -> _T:
    try:
        return question()
    except AssayError as error:
        raise _in_our_words(what, error) from None


def _in_our_words(what: str, error: AssayError) -> AssayError:
    """An error that may have come over the wire: its class, code and texts are whatever somebody wrote there."""
    if isinstance(error, Transient) and error.code == E_UNREACHABLE:
        return Transient(E_UNREACHABLE, _plain(error.message), got=_plain(error.got), hint=_plain(error.hint))
    fault = _no_answer(what, error.expected or what, f"{error.code}: {error.message}: {error.got}")
    fault.hint = "try again; if it stays so, reach the coordinator another way, or ask its operator"
    return fault


def _no_answer(what: str, expected: object, got: object) -> LocalFault:
    return LocalFault(E_LOG_ANSWER, f"no answer when asked for {what}", expected=_plain(expected), got=_plain(got))


def _plain(text: object) -> str:
    """Text that can be printed anywhere: JSON may carry halves of characters."""
    return str(text)[:300].encode("ascii", "backslashreplace").decode()
