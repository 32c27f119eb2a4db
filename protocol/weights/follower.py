"""Following the learner's checkpoints: a rule engine that holds the newest verified state.

Bytes come in through ``fetch`` and ``manifests``; nothing in them is trusted before a signature or a hash says so. A
version is applied as a transaction: the state is either the old one or the new one, verified, bit by bit. Not
thread-safe: one caller at a time. Spec: ``docs/spec/weights.md``, "Following".
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from protocol.envelope import Envelope
from protocol.errors import E_OBJECT_HASH, LocalFault, PeerFault, code
from protocol.messages import CheckpointHead, CheckpointManifest, ChunkRef
from protocol.weights import snapshot
from protocol.weights.chunk import MAX_CHUNK_BYTES
from protocol.weights.diff import Undo, apply_patch, decode_anchor, decode_diff
from protocol.weights.layout import Layout, State, copy_state
from protocol.weights.link import (
    E_CHECKPOINT_GAP,
    E_CHECKPOINT_MIX,
    E_CHECKPOINT_ROLLBACK,
    Link,
    check_follows,
    open_chain,
)
from protocol.weights.state_root import state_root
from protocol.weights.streams import E_CHUNK_LIMIT

E_STATE_ROOT = code("E_STATE_ROOT", "a checkpoint's chunks do not make the state its manifest names")
E_STATE_DAMAGED = code("E_STATE_DAMAGED", "our own copy of the weights changed since it was verified")
E_NO_VERSION = code("E_NO_VERSION", "a version of the weights is not at hand and cannot be rebuilt")

#: Manifests asked for at once while walking back to an anchor.
_WINDOW: Final = 64
#: Manifests remembered; older ones are asked for again when needed.
_MAX_LINKS: Final = 4096

#: Bytes of an object by hash; may return anything, what it returns is checked.
Fetch = Callable[[str], bytes]
#: Manifests of versions first to last, both included; may return anything, what it returns is checked.
Manifests = Callable[[int, int], Sequence[Envelope]]


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
        keep_versions: int = 8,
        keep_states: int = 2,
        threads: int = 2,
    ):
        """Follow nothing yet.

        ``manifests`` is needed by :meth:`catch_up` and to rebuild old versions. ``keep_versions`` undo logs and
        ``keep_states`` whole old states are kept for :meth:`state_at`. ``threads`` hash the state.
        """
        self._fetch, self._key, self._run_id, self.layout = fetch, learner_key, run_id, layout
        self._manifests, self._threads, self._keep_states = manifests, threads, keep_states
        self._state: State | None = None
        self._link: Link | None = None
        self._links: dict[int, Link] = {}
        self._undo: deque[tuple[int, Undo]] = deque(maxlen=keep_versions)
        self._built: OrderedDict[int, State] = OrderedDict()
        self._head: tuple[CheckpointHead, Envelope] | None = None

    # -- what is held ------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """Version of the state held; None before the first."""
        return None if self._link is None else self._link.version

    @property
    def state(self) -> State:
        """The live arrays of the newest verified state. Read only: they change in place when a version is applied.

        Raises:
            LocalFault: ``E_NO_VERSION`` before the first.
        """
        if self._state is None:
            raise LocalFault(E_NO_VERSION, "no checkpoint has been followed yet")
        return self._state

    @property
    def manifest(self) -> CheckpointManifest:
        """Manifest of the state held.

        Raises:
            LocalFault: ``E_NO_VERSION`` before the first.
        """
        return self._held().manifest

    @property
    def manifest_envelope(self) -> Envelope:
        """The same as the learner signed it.

        Raises:
            LocalFault: ``E_NO_VERSION`` before the first.
        """
        return self._held().envelope

    @property
    def head(self) -> CheckpointHead | None:
        """Newest head that was accepted."""
        return None if self._head is None else self._head[0]

    def manifest_of(self, version: int) -> CheckpointManifest | None:
        """Manifest of a version that was followed, if it is remembered."""
        link = self._links.get(version)
        return None if link is None else link.manifest

    def _held(self) -> Link:
        if self._link is None:
            raise LocalFault(E_NO_VERSION, "no checkpoint has been followed yet")
        return self._link

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
        """Verify ``head``, fetch the manifests back to our version or an anchor, and advance. True when it moved.

        Raises:
            PeerFault: as :meth:`verify_head` and :meth:`advance`.
            LocalFault: ``E_NO_VERSION`` without a source of manifests.
        """
        span = self.plan(self.verify_head(head, now_ms))
        if span is None:
            return False
        before = self.version
        return self.advance(self._walk_back(*span)) != before

    def _walk_back(self, first: int, last: int) -> list[Envelope]:
        """Envelopes of versions up to ``last``, from ``first`` or from an anchor after it."""
        if self._manifests is None:
            raise LocalFault(E_NO_VERSION, f"version {last} is not at hand", hint="no source of manifests is set")
        envelopes: list[Envelope] = []
        while True:
            low = max(first, last - _WINDOW + 1)
            window = list(self._manifests(low, last))
            links = open_chain(window, self._key, self._run_id, self.layout)
            if [link.version for link in links] != list(range(low, last + 1)):
                raise PeerFault(
                    E_CHECKPOINT_GAP, "not the manifests that were asked for", expected=f"versions {low} to {last}",
                    got=", ".join(str(link.version) for link in links)[:80] or "none",
                )
            envelopes = window + envelopes
            if low == first or any(link.manifest.anchor for link in links):
                return envelopes
            last = low - 1

    # -- versions ----------------------------------------------------------------------------------------

    def advance(self, manifests: Sequence[Envelope]) -> int | None:
        """Move along consecutive manifests (ascending) to the last one; the version now held.

        From the state held through the diffs, or from an anchor among the manifests when there is no state, a gap
        before it, or fewer bytes to fetch that way. Versions already held are compared and skipped. When one fails,
        the state stays at the version before it.

        Raises:
            PeerFault: signature and schema codes, ``E_WRONG_RUN``, ``E_CHECKPOINT_LAYOUT``, ``E_CHECKPOINT_MANIFEST``,
                ``E_CHECKPOINT_GAP``, ``E_CHECKPOINT_MIX``, ``E_OBJECT_HASH``, ``E_CHUNK``, ``E_CHUNK_LIMIT``,
                ``E_STATE_ROOT``.
            LocalFault: ``E_STATE_DAMAGED`` when our own state is not what it was; the errors of ``fetch``.
        """
        links = open_chain(manifests, self._key, self._run_id, self.layout)
        for link in links:
            known = self._digest_of(link.version)
            if known is not None and known != link.digest:
                raise PeerFault(
                    E_CHECKPOINT_MIX, f"another version {link.version}", expected=known, got=link.digest
                )
        fresh = [link for link in links if self.version is None or link.version > self.version]
        if fresh:
            self._follow(fresh)
        return self.version

    def _follow(self, fresh: list[Link]) -> None:
        start = self._cheapest_start(fresh)
        if start is not None:
            self._adopt(fresh[start], self._load_anchor(fresh[start]))
            fresh = fresh[start + 1 :]
        for link in fresh:
            self._apply(link)

    def _cheapest_start(self, fresh: list[Link]) -> int | None:
        """Index of the anchor to start from, or None to use the diffs from the state held."""
        gap: PeerFault | None = None
        if self._link is None:
            gap = PeerFault(E_CHECKPOINT_GAP, "no anchor to start from", expected="a manifest with an anchor")
        elif fresh[0].version > self._link.version + 1:
            gap = PeerFault(
                E_CHECKPOINT_GAP, "versions are missing and there is no anchor after them",
                expected=self._link.version + 1, got=fresh[0].version,
            )
        else:
            check_follows(self._link, fresh[0])
        costs: dict[int | None, int] = {} if gap else {None: _bytes_of(fresh)}
        for i, link in enumerate(fresh):
            if link.manifest.anchor:
                costs[i] = sum(ref.size_bytes for ref in link.manifest.anchor) + _bytes_of(fresh[i + 1 :])
        if gap and not costs:
            raise gap
        return min(costs, key=costs.__getitem__)

    def _apply(self, link: Link) -> None:
        """Apply one diff and keep it only if the root is right."""
        state = self.state
        before = self._held()
        refs = link.manifest.diff
        patch = decode_diff(self.layout, self._chunks(refs), refs, threads=self._threads)
        undo = Undo()
        try:
            undo = apply_patch(self.layout, state, patch, threads=self._threads)
            self._check_root(link, state)
        except BaseException as error:
            undo.revert(state)
            if isinstance(error, PeerFault):
                self._check_own(before, state)
            raise
        self._undo.append((before.version, undo))
        self._hold(link)

    def _load_anchor(self, link: Link) -> State:
        refs = link.manifest.anchor
        state = decode_anchor(self._chunks(refs), self.layout, refs)
        self._check_root(link, state)
        return state

    def _adopt(self, link: Link, state: State) -> None:
        """Replace the state by a verified one."""
        self._state = state
        self._undo.clear()
        self._hold(link)

    def _hold(self, link: Link) -> None:
        self._link = self._links[link.version] = link
        while len(self._links) > _MAX_LINKS:
            del self._links[min(self._links)]

    def _chunks(self, refs: Sequence[ChunkRef]) -> Iterator[bytes]:
        """Chunks in order, each checked against its hash before anybody decodes it."""
        for ref in refs:
            if ref.size_bytes > MAX_CHUNK_BYTES:
                raise PeerFault(E_CHUNK_LIMIT, "chunk too large", expected=f"<= {MAX_CHUNK_BYTES}", got=ref.size_bytes)
            data = self._fetch(ref.sha256)
            if len(data) != ref.size_bytes or hashlib.sha256(data).hexdigest() != ref.sha256:
                raise PeerFault(
                    E_OBJECT_HASH, "the source served other bytes than the manifest names",
                    expected=f"{ref.size_bytes} bytes with hash {ref.sha256}", got=f"{len(data)} bytes",
                    hint="fetch from another source",
                )
            yield data

    def _check_root(self, link: Link, state: State) -> None:
        root = state_root(self.layout, state, threads=self._threads)
        if root != link.manifest.state_root:
            raise PeerFault(
                E_STATE_ROOT, f"version {link.version} has another root", expected=link.manifest.state_root, got=root
            )

    def _check_own(self, link: Link, state: State) -> None:
        """Before anybody is blamed: is our base still what it was?"""
        root = state_root(self.layout, state, threads=self._threads)
        if root != link.manifest.state_root:
            raise LocalFault(
                E_STATE_DAMAGED, f"our copy of version {link.version} changed", expected=link.manifest.state_root,
                got=root, hint="load the checkpoint again; if it happens twice, check the memory",
            )

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
            recent = any(before == version for before, _ in self._undo)
            self._built[version] = self._step_back(version) if recent else self._rebuild(version)
            while len(self._built) > self._keep_states:
                self._built.popitem(last=False)
        self._built.move_to_end(version)
        return self._built[version]

    def _step_back(self, version: int) -> State:
        state = copy_state(self.state)
        for before, undo in reversed(self._undo):
            undo.revert(state)
            if before == version:
                break
        return state

    def _rebuild(self, version: int) -> State:
        """Follow the chain once more, from the nearest anchor at or below ``version``."""
        other = CheckpointFollower(
            self._fetch, self._key, self._run_id, self.layout, keep_versions=0, threads=self._threads
        )
        other._links = dict(self._links)
        other.advance(self._walk_back(0, version))
        return other.state

    # -- across restarts ---------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the newest verified state, its manifest and the head into directory ``path``, atomically.

        Raises:
            LocalFault: ``E_NO_VERSION`` before the first; ``E_SNAPSHOT`` when it cannot be written.
        """
        head = None if self._head is None else self._head[1]
        snapshot.write(path, self.layout, self.state, self._held().envelope, head)

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
        self._check_own(link, saved.state)
        self._adopt(link, saved.state)
        if saved.head is not None:
            self._head = (CheckpointHead.open(saved.head, self._key, run_id=self._run_id), saved.head)
        return True


def _bytes_of(links: Sequence[Link]) -> int:
    return sum(ref.size_bytes for link in links for ref in link.manifest.diff)
