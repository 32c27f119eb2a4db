"""Fixtures against the coordinator: leases, receipts, uploads, and the bytes that reach its decoders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from node.unit import Unit
from protocol import bundle as bundles
from protocol.client import CoordinatorClient
from protocol.errors import AssayError
from protocol.merkle import leaf_hash, node_hash
from protocol.messages import Commitment, Lease, LeaseRequest, NodeHello, UploadRequest
from protocol.rollout import Bundle, rollout_seed
from tests.adversary.bench import Bench, Catch, sealing
from tests.adversary.pipeline import Cheat, NodeAtWork, Pipeline, commitment_of
from tests.adversary.registry import fixture
from tests.adversary.world import COORDINATOR, RUN_ID, World, identity


def _refused(bench: Bench, pipeline: Pipeline, act: Callable[[], object], rollouts: int = 4) -> Catch:
    """What the coordinator says to one act; the honest node works on."""
    try:
        act()
        code = None
    except AssayError as error:
        code = error.code
    honest, alarms = bench.honest(pipeline)
    return Catch(code is not None, code, "door", rollouts, honest=honest, alarms=alarms)


def _lease(node: NodeAtWork, number: int = 1) -> list[tuple[Lease, str]]:
    """Leases by the node's own client, with the digests of their payloads."""
    clock = node.pipeline.clock
    request = LeaseRequest(
        run_id=RUN_ID, node_id=node.key.id, nonce=hashlib.sha256(f"{clock.now_ms()}".encode()).hexdigest()[:32],
        max_leases=number, newest_version=node.pipeline.shown, issued_at_ms=clock.now_ms(),
    )
    clock.advance(0.001)
    return [(Lease.from_payload(e.payload), e.digest) for e in node.client.lease(request).leases]


def _commit(node: NodeAtWork, lease: Lease, bundle: Bundle, **changes: object) -> Commitment:
    """Upload a bundle and commit to it."""
    made = node.pipeline.world.submission(lease, bundle, signer=node.key)
    commitment = Commitment.from_payload(made.commitment.payload).model_copy(update=changes)
    _upload(node, made.bundle)
    node.client.submit(commitment)
    return commitment


def _upload(node: NodeAtWork, data: bytes) -> None:
    node.client.upload(UploadRequest(
        run_id=RUN_ID, node_id=node.key.id, object_sha256=hashlib.sha256(data).hexdigest(), object_bytes=len(data),
        issued_at_ms=node.pipeline.clock.now_ms(),
    ), data)


# -- 8, 9, 10: what a node may choose -----------------------------------------------------------------------


@fixture(8, "every unit dropped until its version is stale", "no gain")
def dropping(bench: Bench, seed: int) -> Catch:
    """A dropped unit comes back with the same seeds, and is forfeited once too stale: nothing is ever re-rolled."""
    pipeline = bench.pipeline("dropping", seed)
    picky, other = pipeline.node(f"picky {seed}"), pipeline.node(f"other {seed}")
    [(first, _)] = _lease(picky)
    pipeline.clock.advance(pipeline.world.run.batch.lease_ms / 1000 + 1)
    again = next(lease for lease, _ in _lease(other, 4) if (lease.group, lease.samples) == (first.group, first.samples))
    same = (again.beacon, again.start_version, again.prompt_sha256) == (
        first.beacon, first.start_version, first.prompt_sha256
    )
    pipeline.clock.advance(pipeline.world.run.batch.lease_ms / 1000 + 1)
    pipeline.coordinator.sweep()
    pipeline.show(pipeline.shown + pipeline.world.run.batch.max_lag_versions + 1)
    row = picky.row
    answers = row["dropped"] == 1 and row["forfeited"] == len(first.samples) and row["audited_passes"] == 0
    honest, alarms = bench.honest(pipeline)
    return Catch(same and answers, None, "no gain", len(first.samples), honest=honest, alarms=alarms)


@fixture(9, "one unit asked for under many keys and nonces", "no gain")
def grinding(bench: Bench, seed: int) -> Catch:
    """Eight keys lease the same unit in turn, each with its own nonce: one seed per sample."""
    pipeline = bench.pipeline("dropping", seed)
    found: dict[tuple[int, int], set[bytes]] = {}
    wanted: tuple[int, tuple[int, ...]] | None = None
    for number in range(8):
        node = pipeline.node(f"grinder {seed} {number}")
        leases = [lease for lease, _ in _lease(node, 1 if wanted is None else 4)]
        lease = leases[0] if wanted is None else next(x for x in leases if (x.group, tuple(x.samples)) == wanted)
        wanted = (lease.group, tuple(lease.samples))
        for sample in lease.samples:
            seed_ = rollout_seed(RUN_ID, lease.beacon, lease.prompt_sha256, lease.group, sample)
            found.setdefault((lease.group, sample), set()).add(seed_)
        pipeline.clock.advance(pipeline.world.run.batch.lease_ms / 1000 + 1)
    honest, alarms = bench.honest(pipeline)
    return Catch(all(len(s) == 1 for s in found.values()), None, "no gain", 8 * len(found), honest=honest,
                 alarms=alarms)


@fixture(10, "a lease of the node's own making", "door", "E_LEASE_UNKNOWN", "E_COMMITMENT_MISMATCH")
def forged_lease(bench: Bench, seed: int) -> Catch:
    """The node looks for a group with an easy prompt and signs the lease for it in the coordinator's name."""
    pipeline = bench.pipeline("undrawn", seed)
    node = pipeline.node(f"forger {seed}")
    [(lease, _)] = _lease(node)
    easy = pipeline.world.lease(group=1000 + seed, samples=lease.samples, start_version=lease.start_version)
    wanted = easy.model_copy(update={"node_id": node.key.id, "lease_id": lease.lease_id})
    digest = wanted.sign(identity("somebody")).digest
    bundle = pipeline.world.generate(wanted)
    return _refused(bench, pipeline, lambda: _commit(node, lease, bundle, lease_sha256=digest))


# -- 17, 21, 23: one lease, one bundle ----------------------------------------------------------------------


@fixture(17, "the object in the store exchanged after the check", "no gain", "E_OBJECT_HASH")
def exchanged_object(bench: Bench, seed: int) -> Catch:
    """Whoever holds the store serves other bytes under the receipt's hash: every reader checks them first."""
    pipeline = bench.pipeline("undrawn", seed)
    node = pipeline.node(f"store keeper {seed}")
    one = node.turn()[0]
    pipeline.verify()
    sha256 = _object_of(pipeline, one.receipt_id)
    path = next(path for path in pipeline.world.store.path.rglob(sha256))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        return replace(_refused(bench, pipeline, lambda: pipeline.learner.fetch(sha256)), where="no gain")
    finally:
        path.write_bytes(good)


def _object_of(pipeline: Pipeline, receipt_id: str) -> str:
    from protocol.envelope import Envelope
    from protocol.messages import Receipt

    body = pipeline.client(None).get_object(f"/v1/receipts/{receipt_id}")
    return Receipt.from_payload(Envelope.from_dict(body["receipt"]).payload).object_sha256


@fixture(21, "another node's bundle handed in as one's own", ("T1", "T0", "door"), "E_REPLAY", "E_SAMPLE_SET",
         "E_COMMITMENT_MISMATCH")
def stolen(bench: Bench, seed: int) -> Catch:
    """Bundles are public in the store; the thief hands one in for its own lease."""
    pipeline = bench.pipeline("undrawn", seed)
    victim = pipeline.node(f"victim {seed}")
    receipt = victim.turn()[0].receipt_id
    data = pipeline.learner.fetch(_object_of(pipeline, receipt))

    def seal(world: World, unit: Unit, spooled: Any) -> Any:
        return _sealed_with(world, unit, spooled, bundles.decode(data, world.rules))

    return bench.chase("undrawn", seed, Cheat(seal=seal))


def _sealed_with(world: World, unit: Unit, spooled: Any, bundle: Bundle) -> Any:
    made = world.submission(unit.lease, bundle)
    return replace(spooled, commitment=Commitment.from_payload(made.commitment.payload), data=made.bundle)


@fixture(21, "the same commitment sent again", "no gain")
def replayed(bench: Bench, seed: int) -> Catch:
    """Eight copies of a commitment: one receipt, paid once."""
    pipeline = bench.pipeline("undrawn", seed)
    node = pipeline.node(f"echo {seed}")
    [(lease, _)] = _lease(node)
    commitment = _commit(node, lease, pipeline.world.generate(lease))
    replies = {node.client.submit(commitment).receipt.digest for _ in range(7)}
    pipeline.verify()
    row = node.row
    once = len(replies) == 1 and row["accepted"] == 4 and row["credit_pending"] == commitment.tokens
    honest, alarms = bench.honest(pipeline)
    return Catch(once, None, "no gain", 4, commitment.tokens, honest, alarms)


@fixture(23, "a second root for one lease", "door", "E_SECOND_COMMITMENT")
def second_root(bench: Bench, seed: int) -> Catch:
    pipeline = bench.pipeline("undrawn", seed)
    node = pipeline.node(f"two roots {seed}")
    [(lease, _)] = _lease(node)
    world = pipeline.world
    _commit(node, lease, world.generate(lease))
    other = world.generate(lease, seeds={s: bytes([s]) * 32 for s in lease.samples})
    return _refused(bench, pipeline, lambda: _commit(node, lease, other))


@fixture(23, "other bytes uploaded under the receipted hash", "door", "E_OBJECT_HASH", "E_TOO_LARGE")
def swapped_payload(bench: Bench, seed: int) -> Catch:
    """The upload address of the receipted object is used again, with an edited bundle."""
    pipeline = bench.pipeline("undrawn", seed)
    node = pipeline.node(f"swapper {seed}")
    [(lease, _)] = _lease(node)
    data = bundles.encode(pipeline.world.generate(lease))
    request = UploadRequest(
        run_id=RUN_ID, node_id=node.key.id, object_sha256=hashlib.sha256(data).hexdigest(), object_bytes=len(data),
        issued_at_ms=pipeline.clock.now_ms(),
    )
    grant = node.client._post("/v1/uploads", request.sign(node.key))
    edited = data[:-1] + bytes([data[-1] ^ 1])

    def put() -> None:
        node.client._retry("put", lambda t: node.client._read("PUT", grant["url"], t, 1 << 20, content=edited))

    return _refused(bench, pipeline, put)


# -- 18, 24, 25, 26: what a commitment and a bundle may say --------------------------------------------------


def _post_payload(client: CoordinatorClient, key: Any, commitment: Commitment, **extra: object) -> None:
    """A commitment with fields that the message does not have, signed by the node."""
    from protocol import canonical
    from protocol.envelope import Envelope

    payload = canonical.encode(json.loads(commitment.to_payload()) | extra)
    client._post("/v1/submissions", Envelope.sign(key, Commitment.TYPE, payload))


@fixture(18, "a reward inside the commitment", "door", "E_SCHEMA")
def claimed_reward(bench: Bench, seed: int) -> Catch:
    """Nodes have no say in rewards: there is no field for one."""
    pipeline = bench.pipeline("undrawn", seed)
    node = pipeline.node(f"rewarded {seed}")
    [(lease, _)] = _lease(node)
    made = pipeline.world.submission(lease, pipeline.world.generate(lease), signer=node.key)
    commitment = Commitment.from_payload(made.commitment.payload)
    rewards = [10**6] * 4
    return _refused(
        bench, pipeline, lambda: _post_payload(node.client, node.key, commitment, rewards_micro=rewards)
    )


def _malleable(world: World, lease: Lease, bundle: Bundle, how: str) -> str:
    """A bundle root that a careless Merkle tree would take for the right one."""
    digest = lease.sign(COORDINATOR).digest
    honest = bundles.bundle_root(bundle, digest)
    if how == "a leaf for the root":
        return leaf_hash(bytes.fromhex(honest)).hex()
    if how == "a node of the root with itself":
        return node_hash(bytes.fromhex(honest), bytes.fromhex(honest)).hex()
    doubled = Bundle((*bundle.rollouts, bundle.rollouts[-1]))
    return bundles.bundle_root(doubled, digest)


def _register_malleable(how: str) -> None:
    @fixture(24, f"Merkle tree: {how}", "T0", "E_BUNDLE_ROOT")
    def trial(bench: Bench, seed: int) -> Catch:
        def seal(world: World, unit: Unit, spooled: Any) -> Any:
            return commitment_of(spooled, bundle_root=_malleable(world, unit.lease, unit.bundle(), how))

        return bench.chase("undrawn", seed, Cheat(seal=seal))


for _how in ("the last rollout twice", "a leaf for the root", "a node of the root with itself"):
    _register_malleable(_how)


@fixture(25, "a body of nested lists", "door", "E_JSON", "E_TOO_LARGE", "E_SCHEMA")
def deep_json(bench: Bench, seed: int) -> Catch:
    pipeline = bench.pipeline("undrawn", seed)
    node = pipeline.node(f"deep {seed}")
    body = b"[" * 20_000 + b"]" * 20_000
    return _refused(bench, pipeline, lambda: node.client._retry(
        "post", lambda t: node.client._read("POST", "/v1/submissions", t, 1 << 20, content=body)
    ), 0)


@fixture(25, "a million tokens claimed", "door", "E_COMMITMENT_MISMATCH")
def million_tokens(bench: Bench, seed: int) -> Catch:
    return bench.chase("undrawn", seed, Cheat(seal=lambda _w, _u, spooled: commitment_of(spooled, tokens=10**6)))


def _nan(world: World, lease: Lease) -> Any:
    """Columns of the simple form replaced by bit patterns of NaN and infinity."""
    import zstandard

    plain = bytearray(zstandard.ZstdDecompressor().decompress(bundles.encode_simple(world.honest(lease))))
    plain[-64:] = np.array([np.nan, np.inf] * 8, np.float32).tobytes()
    data = zstandard.ZstdCompressor().compress(bytes(plain))
    return world.submission(lease, world.honest(lease), data=data)


def _lying_shapes(world: World, lease: Lease) -> Any:
    """The header of the simple form promises 2^40 entries."""
    import zstandard

    plain = zstandard.ZstdDecompressor().decompress(bundles.encode_simple(world.honest(lease)))
    length = int.from_bytes(plain[:8], "little")
    header = json.loads(plain[8 : 8 + length])
    for entry in header.values():
        if "shape" in entry:
            entry["shape"] = [2**40]
    text = json.dumps(header, separators=(",", ":")).encode()
    data = zstandard.ZstdCompressor().compress(len(text).to_bytes(8, "little") + text + plain[8 + length :])
    return world.submission(lease, world.honest(lease), data=data)


DECODER: Final = (
    "E_BUNDLE_FRAME", "E_BUNDLE_COLUMNS", "E_BUNDLE_PACKED", "E_TOO_LARGE", "E_BUNDLE_HEADER", "E_COUNTS",
    "E_BUNDLE_ROOT", "E_HEAD_NOT_NORMALISED", "E_HEAD_ORDER", "E_BUNDLE_CANONICAL",
)


@fixture(25, "NaN and infinity in the columns", "T0", *DECODER)
def nan_columns(bench: Bench, seed: int) -> Catch:
    return bench.chase("undrawn", seed, sealing(_nan))


@fixture(25, "shapes of 2^40 entries", "T0", *DECODER)
def lying_shapes(bench: Bench, seed: int) -> Catch:
    return bench.chase("undrawn", seed, sealing(_lying_shapes))


def _short_heads(world: World, lease: Lease) -> Any:
    """Heads cut to their first entry, the rest called tail: fewer entries to compare."""
    bundle = world.generate(lease, head_size=1)
    return world.submission(lease, bundle)


@fixture(26, "heads of one entry, so that there is little to compare", ("T0", "T3"), "E_TAIL_CODE", "E_HEAD_SIZE",
         "E_HEAD_MEMBERSHIP")
def short_heads(bench: Bench, seed: int) -> Catch:
    return bench.chase("new", seed, sealing(_short_heads))


@fixture(26, "a field that asks for no audit", "door", "E_SCHEMA")
def no_audit_please(bench: Bench, seed: int) -> Catch:
    pipeline = bench.pipeline("undrawn", seed)
    node = pipeline.node(f"shy {seed}")
    [(lease, _)] = _lease(node)
    made = pipeline.world.submission(lease, pipeline.world.generate(lease), signer=node.key)
    commitment = Commitment.from_payload(made.commitment.payload)
    return _refused(bench, pipeline, lambda: _post_payload(node.client, node.key, commitment, drawn=False))


@fixture(29, "a profile that the run does not list", "door", "E_PROFILE")
def strange_profile(bench: Bench, seed: int) -> Catch:
    pipeline = bench.pipeline("undrawn", seed)
    node = pipeline.node(f"stranger {seed}")
    hello = NodeHello(
        run_id=RUN_ID, public_key=node.key.public_key.hex(), name="node", profile="anything-goes", protocol_version=1,
        join_token=None, issued_at_ms=pipeline.clock.now_ms(),
    )
    return _refused(bench, pipeline, lambda: node.client.register(hello))
