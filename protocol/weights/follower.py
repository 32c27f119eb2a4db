"""Following the learner's checkpoints: a rule engine that holds the newest verified state.

Bytes come in through ``fetch``, ``manifests`` and ``skips``; nothing in them is trusted before a signature or a hash
says so. A version is applied as a transaction: the state is either the old one or the new one, verified, bit by bit.
Not thread-safe: one caller at a time. Spec: ``docs/spec/weights.md``, "Following".
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, AssayError, LocalFault, PeerFault
from protocol.messages import CheckpointHead, CheckpointManifest
from protocol.weights import snapshot
from protocol.weights.cache import Fetch
from protocol.weights.layout import Layout, State
from protocol.weights.link import (
    E_CHECKPOINT_MIX,
    E_CHECKPOINT_ROLLBACK,
    Link,
    Manifests,
    check_follows,
    check_hash,
    open_chain,
    walk_back,
)
from protocol.weights.live import E_NO_VERSION, E_STATE_DAMAGED, E_STATE_ROOT, LiveState
from protocol.weights.skips import FindSkips
from protocol.weights.streams import E_CHUNK, E_CHUNK_LIMIT
from protocol.weights.way import Step, Way, cheapest_way

logger = logging.getLogger(__name__)

#: Manifests remembered; older ones are asked for again when needed.
_MAX_LINKS: Final = 4096

#: Faults of a skip that are its builder's doing.
_RELAY_FAULTS: Final = frozenset({E_CHUNK, E_CHUNK_LIMIT, E_STATE_ROOT})


class CheckpointFollower:
    """The newest verified state, and cheap access to the versions just before it."""

    def __init__(
        self,
        fetch: Fetch,
        learner_key: bytes | str,
        run_id: str,
        layout: Layout,
        *,
        manifests: Manifests | None = None,
        skips: FindSkips | None = None,
        state_hash: str | None = None,
        keep_versions: int = 8,
        keep_states: int = 2,
        threads: int = 2,
    ):
        """Follow nothing yet.

        ``manifests`` is needed by :meth:`catch_up` and to rebuild old versions; ``skips`` finds announced skips.
        ``state_hash`` is the hash function that the run's manifest names; None takes any, but the same all along.
        ``keep_versions`` undo logs and ``keep_states`` whole old states are kept for :meth:`state_at`. ``threads``
        hash the state.
        """
        self._fetch, self._key, self._run_id, self.layout = fetch, learner_key, run_id, layout
        self._manifests, self._skips, self._threads, self._keep_states = manifests, skips, threads, keep_states
        self._state_hash = state_hash
        self._live = LiveState(layout, keep_versions=keep_versions, threads=threads)
        self._links: dict[int, Link] = {}
        self._built: OrderedDict[int, State] = OrderedDict()
        self._head: tuple[CheckpointHead, Envelope] | None = None
        self._refused: set[str] = set()  #: relays whose skips were wrong

    # -- what is held ------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """Version of the state held; None before the first."""
        return None if self._live.link is None else self._live.link.version

    @property
    def state(self) -> State:
        """The live arrays of the newest verified state; ``E_NO_VERSION`` before the first.

        Read only: they change in place when a version is applied.
        """
        return self._live.held[1]

    @property
    def manifest(self) -> CheckpointManifest:
        """Manifest of the state held; ``E_NO_VERSION`` before the first."""
        return self._live.held[0].manifest

    @property
    def manifest_envelope(self) -> Envelope:
        """The same as the learner signed it; ``E_NO_VERSION`` before the first."""
        return self._live.held[0].envelope

    @property
    def head(self) -> CheckpointHead | None:
        """Newest head that was accepted."""
        return None if self._head is None else self._head[0]

    def manifest_of(self, version: int) -> CheckpointManifest | None:
        """Manifest of a version that was followed, if it is remembered."""
        link = self._links.get(version)
        return None if link is None else link.manifest

    def digest_of(self, version: int) -> str | None:
        """Digest of the manifest that :meth:`state_at` makes a version by, once it has; None before that."""
        link = self._links.get(version)
        return None if link is None else link.digest

    # -- heads -------------------------------------------------------------------------------------------

    def verify_head(self, envelope: Envelope, now_ms: int) -> CheckpointHead:
        """Accept the learner's word on which version is the newest.

        Raises:
            PeerFault: signature and schema codes, ``E_WRONG_RUN``, ``E_EXPIRED`` (frozen: nobody shows us a fresh
                head), ``E_CHECKPOINT_ROLLBACK``, ``E_CHECKPOINT_MIX`` (another manifest for a version we know).
        """
        head = CheckpointHead.open(envelope, self._key, run_id=self._run_id, now_ms=now_ms)
        newest = max(self.version or 0, self._head[0].version if self._head else 0)
        if head.version < newest:
            raise PeerFault(E_CHECKPOINT_ROLLBACK, "head goes back", expected=f">= {newest}", got=head.version)
        known = self._digest_of(head.version)
        if known is not None and known != head.manifest_sha256:
            raise PeerFault(
                E_CHECKPOINT_MIX, f"head names another version {head.version}", expected=known,
                got=head.manifest_sha256,
            )
        if self._head is None or head.issued_at_ms >= self._head[0].issued_at_ms or head.version > newest:
            self._head = (head, envelope)
        return head

    def _digest_of(self, version: int) -> str | None:
        """Digest of the manifest of ``version``, if a manifest or a head told us."""
        if version in self._links:
            return self._links[version].digest
        head = self.head
        return head.manifest_sha256 if head is not None and head.version == version else None

    def plan(self, head: CheckpointHead) -> tuple[int, int] | None:
        """First and last version whose manifests :meth:`advance` needs to reach ``head``; None when it is reached."""
        first = 0 if self.version is None else self.version + 1
        return (first, head.version) if first <= head.version else None

    def catch_up(self, head: Envelope, now_ms: int) -> bool:
        """Verify ``head``, fetch the manifests on the way, and go the cheapest way. True when the state moved.

        Raises:
            PeerFault: as :meth:`verify_head` and :meth:`advance`.
            LocalFault: ``E_NO_VERSION`` without a source of manifests; as :meth:`advance`.
        """
        way = self.way_to(head, now_ms)
        return way is not None and self.follow(way)

    def way_to(self, head: Envelope, now_ms: int) -> Way | None:
        """The first half of :meth:`catch_up`: the cheapest way to ``head``, for :meth:`follow`; None when it is held.

        Raises:
            PeerFault, LocalFault: as :meth:`catch_up`.
        """
        span = self.plan(self.verify_head(head, now_ms))
        if span is None:
            return None
        return self._way(self._walk_back(*span, past_anchors=self._live.link is not None))

    def _walk_back(self, first: int, last: int, *, past_anchors: bool) -> list[Envelope]:
        if self._manifests is None:
            raise LocalFault(E_NO_VERSION, f"version {last} is not at hand", hint="no source of manifests is set")
        return walk_back(
            self._manifests, first, last, self._key, self._run_id, self.layout, past_anchors=past_anchors
        )

    # -- versions ----------------------------------------------------------------------------------------

    def advance(self, manifests: Sequence[Envelope]) -> int | None:
        """Move along consecutive manifests (ascending) to the last one; the version now held.

        The way is the one with the fewest bytes to fetch: diffs, skips that are announced, or an anchor among the
        manifests. Versions already held are compared and skipped. When a step fails, the state stays at the version
        before it; a skip that fails is replaced by the next cheapest way.

        Raises:
            PeerFault: signature and schema codes, ``E_WRONG_RUN``, ``E_CHECKPOINT_LAYOUT``, ``E_CHECKPOINT_MANIFEST``,
                ``E_CHECKPOINT_GAP``, ``E_CHECKPOINT_MIX``, ``E_OBJECT_HASH``, ``E_CHUNK``, ``E_CHUNK_LIMIT``,
                ``E_STATE_ROOT``.
            LocalFault: ``E_STATE_DAMAGED`` when our own state is not what it was; the errors of ``fetch``.
        """
        way = self._way(manifests)
        if way is not None:
            self.follow(way)
        return self.version

    def _way(self, manifests: Sequence[Envelope]) -> Way | None:
        """The cheapest way along checked manifests; None when the last of them is held."""
        links = open_chain(manifests, self._key, self._run_id, self.layout)
        for link in links:
            if self._state_hash is not None:
                check_hash(link, self._state_hash)
            known = self._digest_of(link.version)
            if known is not None and known != link.digest:
                raise PeerFault(
                    E_CHECKPOINT_MIX, f"another version {link.version}", expected=known, got=link.digest
                )
        fresh = [link for link in links if self.version is None or link.version > self.version]
        if not fresh:
            return None
        held = self._live.link
        if held is not None and fresh[0].version == held.version + 1:
            check_follows(held, fresh[0])
        return cheapest_way(fresh, held, self._skips, refused_relays=self._refused)

    def follow(self, way: Way) -> bool:
        """The second half of :meth:`catch_up`: fetch and apply, step by step. True when the state moved.

        Raises:
            PeerFault, LocalFault: as :meth:`advance`; ``E_NO_VERSION`` when the way starts from another version.
        """
        if way.held != self.version:
            raise LocalFault(E_NO_VERSION, "the way starts elsewhere", expected=way.held, got=self.version)
        before, relays, gone = self.version, set(self._refused), set[tuple[str, int]]()
        while True:
            logger.info("weights: %s", way.describe(), extra={"bytes": way.nbytes, "target": way.target.version})
            failed = self._take_steps(way)
            if failed is None:
                return self.version != before
            step, error = failed
            if step.relay is None:
                gone.add((step.kind, step.link.version))
            relays.update([step.relay] if step.relay else [])
            rest = [link for link in way.fresh if self.version is None or link.version > self.version]
            try:
                way = cheapest_way(rest, self._live.link, self._skips, refused_relays=relays, without=gone)
            except PeerFault:
                raise error from None

    def _take_steps(self, way: Way) -> tuple[Step, AssayError] | None:
        """Go until the target, or until a step fails that another way may avoid: a skip, or what is nowhere now."""
        for step in way.steps:
            before = self.version
            try:
                if step.kind == "anchor":
                    self._live.load_anchor(step.link, self._fetch)
                else:
                    self._live.apply(step.link, step.refs, self._fetch)
            except AssayError as error:
                if error.code == E_STATE_DAMAGED or (step.relay is None and error.code != E_NOT_FOUND):
                    raise
                if step.relay is not None and error.code in _RELAY_FAULTS:
                    self._refused.add(step.relay)
                logger.warning("a %s failed", step.kind, extra={"relay": step.relay, "detail": str(error)})
                return step, error
            self._remember(step.link)
            if step.kind != "anchor":
                passed = (link for link in way.fresh if (before or 0) < link.version < step.link.version)
                self._links.update((link.version, link) for link in passed)
        return None

    def _remember(self, link: Link) -> None:
        self._links[link.version] = link
        while len(self._links) > _MAX_LINKS:
            del self._links[min(self._links)]

    # -- older versions ----------------------------------------------------------------------------------

    def state_at(self, version: int) -> State:
        """The state of ``version``, to be read only: live when it is the newest, else stepped back or rebuilt.

        Raises:
            LocalFault: ``E_NO_VERSION`` when it is newer than what is held, or cannot be rebuilt.
            PeerFault: as :meth:`advance`, when it has to be rebuilt and what is fetched is bad.
        """
        if version == self.version:
            return self.state
        if self.version is None or version > self.version:
            raise LocalFault(E_NO_VERSION, f"version {version} is not here yet", got=f"newest is {self.version}")
        if version not in self._built:
            recent = self._live.reaches(version)
            self._built[version] = self._live.back_to(version) if recent else self._rebuild(version)
            while len(self._built) > self._keep_states:
                self._built.popitem(last=False)
        self._built.move_to_end(version)
        return self._built[version]

    def _rebuild(self, version: int) -> State:
        """Follow the chain once more: from an older state that an undo log leads to, else from an anchor."""
        other = CheckpointFollower(
            self._fetch, self._key, self._run_id, self.layout, skips=self._skips,
            state_hash=self._state_hash, keep_versions=0, threads=self._threads,
        )
        other._links = dict(self._links)
        start = self._live.last_before(version)
        if start is not None and start in self._links:
            other._live.adopt(self._links[start], self._live.back_to(start))
            other.advance(self._walk_back(start + 1, version, past_anchors=True))
        else:
            other.advance(self._walk_back(0, version, past_anchors=False))
        self._links.setdefault(version, other._live.held[0])
        return other.state

    # -- across restarts ---------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the newest verified state, its manifest and the head into directory ``path``, atomically.

        Raises:
            LocalFault: ``E_NO_VERSION`` before the first; ``E_SNAPSHOT`` when it cannot be written.
        """
        head = None if self._head is None else self._head[1]
        snapshot.write(path, self.layout, self.state, self.manifest_envelope, head)

    def load(self, path: Path) -> bool:
        """Take up what :meth:`save` wrote, with every signature and the root checked again; False when there is none.

        Raises:
            LocalFault: ``E_SNAPSHOT`` when it is damaged; ``E_STATE_DAMAGED`` when the root does not fit.
            PeerFault: signature and schema codes when it is of another run or learner.
        """
        saved = snapshot.read(path, self.layout)
        if saved is None:
            return False
        (link,) = open_chain([saved.manifest], self._key, self._run_id, self.layout)
        if self._state_hash is not None:
            check_hash(link, self._state_hash)
        self._live.adopt(link, saved.state, self._live.check_own(link, saved.state, self._fetch))
        self._remember(link)
        if saved.head is not None:
            self._head = (CheckpointHead.open(saved.head, self._key, run_id=self._run_id), saved.head)
        return True

