"""Skips: merged diffs over several versions, which anybody may build and nobody needs to trust.

A skip says which chunks lead from the state of one version to that of a later one. A receiver believes none of it: both
roots must be those of signed checkpoint manifests, and after it is applied the state must have the signed root. Skips
are announced in the index of a store, under a name that follows from the signed manifest they lead to.
Spec: ``docs/spec/weights.md``, "Skips".
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from protocol import canonical
from protocol.envelope import Envelope
from protocol.errors import E_SCHEMA, PeerFault, code
from protocol.identity import Identity
from protocol.messages import CheckpointManifest, ChunkRef, Count, Hex32, Message
from protocol.store import MAX_ANNOUNCEMENT_BYTES, Store
from protocol.weights.chunk import MAX_CHUNK_BYTES, MAX_CHUNK_OUTPUT, chunk_output
from protocol.weights.diff import encode_diff
from protocol.weights.layout import Layout, State

E_SKIP = code("E_SKIP", "a skip contradicts the signed manifests, or is larger than the diffs it stands for")

logger = logging.getLogger(__name__)

#: Skips end only at multiples of this. Changing it hides the skips of others.
SKIP_EVERY: Final = 4
#: How many versions a skip leads over, if its builder chooses nothing else.
SKIP_LENGTHS: Final = (4, 8, 16, 64)
#: Most skips read from one announcement.
_MAX_SKIPS: Final = 16
_FORMAT: Final = "assay.skips.v1"

#: What stands in the index under a name; may return anything, what it returns is checked.
FindSkips = Callable[[str], bytes | None]


class CheckpointSkip(Message):
    """A diff over several versions. Signed by whoever built it, so that a bad one can be traced."""

    TYPE: ClassVar[str] = "application/vnd.assay.checkpoint-skip.v1+json"
    relay: Hex32  #: public key of the builder; the learner's is nothing special
    layout_sha256: Hex32
    from_version: Count
    to_version: Count
    base_root: Hex32  #: state root it applies to
    state_root: Hex32  #: state root it makes
    chunks: Annotated[list[ChunkRef], Field(min_length=1, max_length=65_536)]

    @property
    def nbytes(self) -> int:
        """Bytes to fetch."""
        return sum(ref.size_bytes for ref in self.chunks)


def index_name(manifest: CheckpointManifest) -> str:
    """Where the skips that end at a version are announced: a hash of run, version and signed root."""
    text = f"{_FORMAT}/{manifest.run_id}/{manifest.version}/{manifest.state_root}"
    return hashlib.sha256(text.encode()).hexdigest()


def read_announcement(data: bytes | None, run_id: str) -> list[CheckpointSkip]:
    """Well-formed skips of an announcement whose own signature is right; whatever else stands there is passed over."""
    if data is None or len(data) >= MAX_ANNOUNCEMENT_BYTES:
        return []
    found = []
    for envelope in _envelopes(data)[:_MAX_SKIPS]:
        try:
            skip = CheckpointSkip.from_payload(envelope.payload)
            found.append(CheckpointSkip.open(envelope, skip.relay, run_id=run_id))
        except PeerFault as error:
            logger.info("a skip is not readable", extra={"code": error.code})
    return found


def _envelopes(data: bytes) -> list[Envelope]:
    try:
        value: Any = canonical.decode(data)
        if not isinstance(value, dict) or value.get("format") != _FORMAT or not isinstance(value.get("skips"), list):
            raise PeerFault(E_SCHEMA, "not an announcement of skips")
        return [Envelope.from_dict(item) for item in value["skips"]]
    except PeerFault as error:
        logger.info("an announcement of skips is not readable", extra={"code": error.code})
        return []


def check_skip(skip: CheckpointSkip, manifests: Mapping[int, CheckpointManifest]) -> None:
    """Whether a skip may be tried: it leads from one signed root to another, by fewer bytes than the diffs between.

    ``manifests`` holds the signed manifests of all versions it leads over, both ends included.

    Raises:
        PeerFault: ``E_SKIP``.
    """
    base, target = manifests.get(skip.from_version), manifests.get(skip.to_version)
    if base is None or target is None or skip.from_version >= skip.to_version:
        raise PeerFault(E_SKIP, "a skip between versions that are not on our way", got=_span(skip))
    signed = (base.state_root, target.state_root, target.layout_sha256)
    if (skip.base_root, skip.state_root, skip.layout_sha256) != signed:
        raise PeerFault(E_SKIP, f"skip {_span(skip)} names roots that the learner did not sign", expected=signed)
    between = [manifests.get(version) for version in range(skip.from_version + 1, skip.to_version + 1)]
    diffs = sum(ref.size_bytes for manifest in between if manifest is not None for ref in manifest.diff)
    if skip.nbytes >= diffs:
        raise PeerFault(E_SKIP, f"skip {_span(skip)} saves nothing", expected=f"< {diffs} bytes", got=skip.nbytes)
    largest = max(skip.chunks, key=lambda ref: (ref.size_bytes, ref.max_output_bytes))
    if largest.size_bytes > MAX_CHUNK_BYTES or any(ref.max_output_bytes > MAX_CHUNK_OUTPUT for ref in skip.chunks):
        raise PeerFault(E_SKIP, f"skip {_span(skip)} has a chunk over the limits", got=largest.size_bytes)


@dataclass(frozen=True)
class SkipMaker:
    """Builds skips and announces them: a relay, or the learner's publisher."""

    store: Store
    identity: Identity
    run_id: str
    layout: Layout
    lengths: Sequence[int] = SKIP_LENGTHS

    def due(self, version: int) -> list[int]:
        """Versions from which skips to ``version`` are wanted; none unless it is a multiple of ``SKIP_EVERY``."""
        if version % SKIP_EVERY:
            return []
        return [version - length for length in self.lengths if length <= version]

    def make(
        self, target: CheckpointManifest, state: State, bases: Iterable[tuple[CheckpointManifest, State]]
    ) -> list[CheckpointSkip]:
        """Write the chunks of skips from ``bases`` to ``target``, then announce them beside those of others.

        ``state`` and the states of ``bases`` are verified; a base is used before the next one is asked for.

        Raises:
            LocalFault: ``E_STATE``, ``E_STORE``.
            Transient: the store cannot be reached.
        """
        name = index_name(target)
        others = [] if (data := self.store.announced(name)) is None else _envelopes(data)
        known = {skip.from_version for skip in read_announcement(data, self.run_id)}
        made, envelopes = [], []
        for base, old in bases:
            if base.version in known:
                continue
            skip = self._encode(base, old, target, state)
            made.append(skip)
            envelopes.append(skip.sign(self.identity))
        if made:
            value = {"format": _FORMAT, "skips": [e.to_dict() for e in [*envelopes, *others][:_MAX_SKIPS]]}
            self.store.announce(name, canonical.encode(value))
        return made

    def _encode(
        self, base: CheckpointManifest, old: State, target: CheckpointManifest, new: State
    ) -> CheckpointSkip:
        chunks = encode_diff(self.layout, old, new)
        return CheckpointSkip(
            run_id=self.run_id, relay=self.identity.public_key.hex(), layout_sha256=self.layout.sha256,
            from_version=base.version, to_version=target.version, base_root=base.state_root,
            state_root=target.state_root,
            chunks=[
                ChunkRef(sha256=self.store.put(chunk), size_bytes=len(chunk), max_output_bytes=chunk_output(chunk))
                for chunk in chunks
            ],
        )


def announced_skips(
    find: FindSkips | None, manifest: CheckpointManifest, manifests: Mapping[int, CheckpointManifest],
    refused: Iterable[str] = (),
) -> list[CheckpointSkip]:
    """Skips that end at ``manifest`` and may be tried.

    ``refused`` holds public keys of relays whose skips were wrong before.

    Raises:
        AssayError: the place of announcements cannot be asked.
    """
    if find is None or manifest.version % SKIP_EVERY:
        return []
    usable = []
    for skip in read_announcement(find(index_name(manifest)), manifest.run_id):
        if skip.relay in refused or skip.from_version not in manifests:
            continue
        try:
            check_skip(skip, manifests)
        except PeerFault as error:
            logger.warning("a skip is refused", extra={"code": error.code, "relay": skip.relay, "detail": str(error)})
            continue
        usable.append(skip)
    return usable


def _span(skip: CheckpointSkip) -> str:
    return f"{skip.from_version} to {skip.to_version}"
