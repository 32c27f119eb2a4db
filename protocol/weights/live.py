"""The live copy of the weights: changed by whole, verified versions only, and stepped back by undo logs.

Applying is a transaction: the state is either the old version or the new one, verified, bit by bit. Not thread-safe.
Spec: ``docs/spec/weights.md``, "Following".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from protocol.errors import LocalFault, PeerFault, code
from protocol.messages import ChunkRef
from protocol.weights import damage
from protocol.weights.cache import Fetch, verified_chunks
from protocol.weights.diff import apply_patch, decode_anchor, decode_diff
from protocol.weights.layout import Layout, State, copy_state
from protocol.weights.link import Link
from protocol.weights.state_root import hash_named, leaf_list, root_of
from protocol.weights.undo import Undo

E_STATE_ROOT = code("E_STATE_ROOT", "a checkpoint's chunks do not make the state its manifest names")
E_STATE_DAMAGED = code("E_STATE_DAMAGED", "our own copy of the weights changed since it was verified")
E_NO_VERSION = code("E_NO_VERSION", "a version of the weights is not at hand and cannot be rebuilt")


class LiveState:
    """One state in memory, the link that names it, and undo logs to the ``keep_versions`` states before it."""

    def __init__(self, layout: Layout, *, keep_versions: int, threads: int):
        self.layout, self._threads = layout, threads
        self._held: tuple[Link, State] | None = None
        self._undo: deque[tuple[int, Undo]] = deque(maxlen=keep_versions)
        self._leaves: list[bytes] = []  #: of the state held; empty when they were not computed by us

    @property
    def link(self) -> Link | None:
        """What names the state; None before the first."""
        return None if self._held is None else self._held[0]

    @property
    def held(self) -> tuple[Link, State]:
        """The state and what names it; ``E_NO_VERSION`` before the first."""
        if self._held is None:
            raise LocalFault(E_NO_VERSION, "no checkpoint has been followed yet")
        return self._held

    # -- moving ------------------------------------------------------------------------------------------

    def apply(self, link: Link, refs: Sequence[ChunkRef], fetch: Fetch) -> None:
        """Apply a diff or skip to ``link`` and keep it only if the root is right; else every bit is put back.

        Raises:
            PeerFault: ``E_OBJECT_HASH``, ``E_CHUNK``, ``E_CHUNK_LIMIT``, ``E_STATE_ROOT``.
            LocalFault: ``E_STATE_DAMAGED`` when the state was not what it should be; the errors of ``fetch``.
        """
        before, state = self.held
        patch = decode_diff(self.layout, verified_chunks(fetch, refs), refs, threads=self._threads)
        undo = Undo()
        try:
            undo = apply_patch(self.layout, state, patch, threads=self._threads)
            leaves = self._check_root(link, state, fetch)
        except BaseException as error:
            undo.revert(state)
            if isinstance(error, PeerFault):
                self.check_own(before, state, fetch)
            raise
        self._undo.append((before.version, undo))
        self._held, self._leaves = (link, state), leaves

    def load_anchor(self, link: Link, fetch: Fetch) -> None:
        """Replace the state by the anchor of ``link``.

        Raises:
            PeerFault, LocalFault: as :meth:`apply`.
        """
        refs = link.manifest.anchor
        state = decode_anchor(verified_chunks(fetch, refs), self.layout, refs)
        self.adopt(link, state, self._check_root(link, state, fetch))

    def adopt(self, link: Link, state: State, leaves: Sequence[bytes] = ()) -> None:
        """Replace the state by a verified one; ``leaves`` if they were computed."""
        self._held, self._leaves = (link, state), list(leaves)
        self._undo.clear()

    # -- checking ----------------------------------------------------------------------------------------

    def _check_root(self, link: Link, state: State, fetch: Fetch) -> list[bytes]:
        """The leaves of ``state``, which must lead to the root of ``link``; if not, the error says where it differs."""
        leaves, root = self._hash(link, state)
        if root != link.manifest.state_root:
            where = damage.locate(self.layout, link.manifest, leaves, fetch)
            raise PeerFault(
                E_STATE_ROOT, f"version {link.version} has another root" + (f", differing in {where}" if where else ""),
                expected=link.manifest.state_root, got=root,
            )
        return leaves

    def check_own(self, link: Link, state: State, fetch: Fetch) -> list[bytes]:
        """The leaves of a state of ours, which should be that of ``link``; nobody else is to blame if it is not.

        Raises:
            LocalFault: ``E_STATE_DAMAGED``, naming the tensors and byte ranges as far as that can be found out.
        """
        leaves, root = self._hash(link, state)
        if root == link.manifest.state_root:
            return leaves
        if link is self.link and len(self._leaves) == len(leaves):
            where = damage.in_words(damage.damages(self.layout, self._leaves, leaves))
        else:
            where = damage.locate(self.layout, link.manifest, leaves, fetch)
        raise LocalFault(
            E_STATE_DAMAGED, f"our copy of version {link.version} changed" + (f" in {where}" if where else ""),
            expected=link.manifest.state_root, got=root,
            hint="load the checkpoint again; if it happens twice, check the memory",
        )

    def _hash(self, link: Link, state: State) -> tuple[list[bytes], str]:
        hash_id = hash_named(link.manifest.state_hash)
        leaves = leaf_list(self.layout, state, threads=self._threads, hash_id=hash_id)
        return leaves, root_of(self.layout, leaves, hash_id)

    # -- stepping back -----------------------------------------------------------------------------------

    def reaches(self, version: int) -> bool:
        """Whether :meth:`back_to` gives this version."""
        return any(before == version for before, _ in self._undo)

    def last_before(self, version: int) -> int | None:
        """The newest version below ``version`` that :meth:`back_to` gives."""
        return max((before for before, _ in self._undo if before < version), default=None)

    def back_to(self, version: int) -> State:
        """A copy, stepped back to ``version``."""
        state = copy_state(self.held[1])
        for before, undo in reversed(self._undo):
            undo.revert(state)
            if before == version:
                break
        return state
