"""Writes the known-answer files of checkpoint chains; see ``make_weights``, which runs this."""

from __future__ import annotations

import hashlib
from typing import Any

from protocol import canonical
from protocol.envelope import Envelope
from protocol.identity import Identity
from protocol.messages import CheckpointHead, CheckpointManifest, ChunkRef
from protocol.weights.chunk import chunk_output
from protocol.weights.diff import encode_anchor, encode_diff
from protocol.weights.layout import State, copy_state
from protocol.weights.state_root import HASH_NAMES, encode_leaves, leaf_list, leaf_list_bytes, root_of
from tests.vectors.make_states import SMALL, hexed, small_state, write

LEARNER = Identity(hashlib.sha256(b"assay test vector: learner").digest())
OTHER = Identity(hashlib.sha256(b"assay test vector: somebody else").digest())
RUN_ID = "0123456789abcdef" * 2
NOW_MS = 1_800_000_000_000


def chains() -> None:
    chain = _Chain()
    states = [small_state()]
    for v in range(3):
        new = copy_state(states[-1])
        new["embed"][v] += 1
        new["bias"][v] ^= 1
        states.append(new)
    links = [chain.link(None, None, states[0], anchor=True)]
    for v in range(1, 4):
        links.append(chain.link(links[-1], states[v - 1], states[v], anchor=v == 2))
    envelopes = [link[1] for link in links]
    head = chain.head(links[3])

    def case(
        name: str, manifests: list[Envelope], given: Envelope, error: str | None, now_ms: int = NOW_MS,
        **about: str,
    ) -> None:
        write("checkpoint", name if error is None else f"{name}_fail", {
            "learner_key": LEARNER.public_key.hex(), "run_id": RUN_ID, "layout": SMALL.to_bytes().decode(),
            "now_ms": now_ms, "head": given.to_dict(), "manifests": [m.to_dict() for m in manifests],
            "objects": chain.objects_of(manifests), **about,
            **({"error": error} if error else {"state_root": _last_root(manifests), "new": hexed(states[-1])}),
        })

    case("chain", envelopes, head, None)
    case("joiner", envelopes[2:], head, None)
    case("expired-head", envelopes, head, "E_EXPIRED", NOW_MS + 3_600_000)
    case("head-by-another", envelopes, chain.head(links[3], OTHER), "E_SIGNATURE")
    case("head-of-another-run", envelopes, chain.head(links[3], run_id="00" * 16), "E_WRONG_RUN")
    case("manifest-as-head", envelopes, envelopes[3], "E_PAYLOAD_TYPE")
    case("head-names-another", envelopes, chain.head((links[3][0], envelopes[2])), "E_CHECKPOINT_MIX")
    case("no-anchor", envelopes[1:2], chain.head(links[1]), "E_CHECKPOINT_GAP")
    case("gap", [envelopes[0], *envelopes[2:]], head, "E_CHECKPOINT_GAP")
    def lying(**about: int) -> dict[str, Any]:
        return {"diff": [{**ref.model_dump(), **about} for ref in links[3][0].diff]}

    for name, error, change in (
        ("another-parent", "E_CHECKPOINT_MIX", {"parent_sha256": "00" * 32}),
        ("another-base", "E_CHECKPOINT_MIX", {"base_root": "00" * 32}),
        ("another-layout", "E_CHECKPOINT_LAYOUT", {"layout_sha256": "00" * 32}),
        ("no-base", "E_CHECKPOINT_MANIFEST", {"base_root": None}),
        ("wrong-root", "E_STATE_ROOT", {"state_root": "00" * 32}),
        ("another-versions-diff", "E_STATE_ROOT", {"diff": [r.model_dump() for r in links[1][0].diff]}),
        ("lying-size", "E_OBJECT_HASH", lying(size_bytes=9)),
        ("lying-output", "E_CHUNK_LIMIT", lying(max_output_bytes=1)),
    ):
        bad = CheckpointManifest.model_validate({**links[3][0].model_dump(), **change})
        signed = chain.sign(bad)
        case(name, [*envelopes[:3], signed], chain.head((bad, signed)), error)
    named = {name: _named(name, states) for name in HASH_NAMES}
    for name, (other, others) in named.items():
        signed_by = [link[1] for link in others]
        chain.objects |= other.objects
        case(f"leaves-{name}", signed_by, other.head(others[3]), None, state_hash=name)
        if name == "blake3":
            case("blake3-in-a-sha-256-run", signed_by, other.head(others[3]), "E_CHECKPOINT_HASH", state_hash="sha-256")
    for name, error, change in (
        ("hash-changes-on-the-way", "E_CHECKPOINT_HASH", {"state_hash": "blake3"}),
        ("unknown-hash", "E_HASH_UNKNOWN", {"state_hash": "md5"}),
        ("leaf-list-of-another-size", "E_CHECKPOINT_MANIFEST", {
            "leaves": chain.put(bytes(51), 51).model_dump()
        }),
    ):
        bad = CheckpointManifest.model_validate({**links[3][0].model_dump(), **change})
        case(name, [*envelopes[:3], bad.sign(LEARNER)], chain.head((bad, bad.sign(LEARNER))), error)
    case("manifest-by-another", [*envelopes[:3], chain.sign(links[3][0], OTHER)], head, "E_SIGNATURE")
    damaged = links[3][0].diff[0].sha256
    chain.objects[damaged] = chain.objects[damaged][:-1] + bytes([chain.objects[damaged][-1] ^ 1])
    case("one-bit", envelopes[2:], head, "E_OBJECT_HASH")


def _last_root(manifests: list[Envelope]) -> str:
    return CheckpointManifest.from_payload(manifests[-1].payload).state_root


def _named(state_hash: str, states: list[State]) -> tuple[_Chain, list[tuple[CheckpointManifest, Envelope]]]:
    """Versions 0 to 3 whose manifests name the hash function and leaf lists."""
    chain = _Chain(state_hash)
    links = [chain.link(None, None, states[0], anchor=True)]
    for v in range(1, 4):
        links.append(chain.link(links[-1], states[v - 1], states[v], anchor=v == 2))
    return chain, links


class _Chain:
    """Signs manifests with fixed times and keeps the objects they name.

    Without ``state_hash`` the manifests are as they were before there was one; readers take that for SHA-256.
    """

    def __init__(self, state_hash: str | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self._state_hash = state_hash

    def link(
        self, parent: tuple[CheckpointManifest, Envelope] | None, old: State | None, new: State, *, anchor: bool
    ) -> tuple[CheckpointManifest, Envelope]:
        version = 0 if parent is None else parent[0].version + 1
        state_hash = self._state_hash or "sha-256"
        leaves = leaf_list(SMALL, new, hash_id=HASH_NAMES[state_hash])
        manifest = CheckpointManifest(
            run_id=RUN_ID, version=version, state_hash=state_hash,
            parent_sha256=None if parent is None else parent[1].digest,
            layout_sha256=SMALL.sha256, state_root=root_of(SMALL, leaves, HASH_NAMES[state_hash]),
            base_root=None if parent is None else parent[0].state_root,
            diff=[] if old is None else [self.put(c, chunk_output(c)) for c in encode_diff(SMALL, old, new)],
            anchor=[self.put(c, chunk_output(c)) for c in encode_anchor(SMALL, new)] if anchor else [],
            leaves=self._listed(leaves),
            beacon=hashlib.sha256(b"beacon %d" % version).hexdigest(), published_at_ms=NOW_MS - 10_000 + version,
        )
        return manifest, self.sign(manifest)

    def sign(self, manifest: CheckpointManifest, identity: Identity = LEARNER) -> Envelope:
        if self._state_hash is not None:
            return manifest.sign(identity)
        value = manifest.model_dump(mode="json", exclude={"state_hash", "leaves"})
        return Envelope.sign(identity, manifest.TYPE, canonical.encode(value))

    def _listed(self, leaves: list[bytes]) -> ChunkRef | None:
        if self._state_hash is None:
            return None
        return self.put(encode_leaves(SMALL, leaves, HASH_NAMES[self._state_hash]), leaf_list_bytes(SMALL))

    def put(self, data: bytes, max_output_bytes: int) -> ChunkRef:
        sha256 = hashlib.sha256(data).hexdigest()
        self.objects[sha256] = data
        return ChunkRef(sha256=sha256, size_bytes=len(data), max_output_bytes=max_output_bytes)

    def head(
        self, link: tuple[CheckpointManifest, Envelope], identity: Identity = LEARNER, run_id: str = RUN_ID
    ) -> Envelope:
        return CheckpointHead(
            run_id=run_id, version=link[0].version, manifest_sha256=link[1].digest, issued_at_ms=NOW_MS - 1000,
            expires_at_ms=NOW_MS + 600_000,
        ).sign(identity)

    def objects_of(self, manifests: list[Envelope]) -> dict[str, str]:
        refs = [
            ref for envelope in manifests for m in [CheckpointManifest.from_payload(envelope.payload)]
            for ref in m.objects
        ]
        return {ref.sha256: self.objects[ref.sha256].hex() for ref in refs}
