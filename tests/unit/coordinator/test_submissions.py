from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import pytest

from protocol.envelope import Envelope
from protocol.errors import PeerFault
from protocol.evidence import decode
from protocol.identity import Identity
from protocol.messages import Receipt, UploadRequest, UsedCheckpoint
from tests.fakes.coordinator import RUN_ID, World, sha
from tests.unit.coordinator.conftest import MakeWorld


def used(version: int, made_up: str = "") -> UsedCheckpoint:
    return UsedCheckpoint(version=version, manifest_sha256=sha(f"manifest {version} {made_up}"))


def test_the_receipt_binds_what_was_committed(world: World) -> None:
    node = world.node().join()
    [(lease, digest)] = node.leases(1)
    reply = node.finish(lease, digest)
    receipt = Receipt.open(reply.receipt, world.keys["coordinator"].public_key, run_id=RUN_ID)
    row = world.http.get(f"/v1/receipts/{receipt.receipt_id}").json()
    assert receipt.lease_id == lease.lease_id
    assert receipt.commitment_sha256 == Envelope.from_dict(row["commitment"]).digest
    assert row["sha256"] == reply.receipt.digest
    assert receipt.epoch_key_sha256 == world.http.get("/v1/epochs").json()["epochs"][0]["key_sha256"]
    assert row["drawn"] is None  # secret until the epoch ends


def test_a_repeated_commitment_gives_the_same_receipt(world: World) -> None:
    node = world.node().join()
    [(lease, digest)] = node.leases(1)
    first = node.finish(lease, digest)
    world.clock.advance(5)  # signed anew after a restart: another date, the same bundle
    again = node.finish(lease, digest)
    assert (first.duplicate, again.duplicate) == (False, True)
    assert again.receipt.to_bytes() == first.receipt.to_bytes()
    assert world.http.get("/v1/status").json()["tokens_generated"] == 10


def test_a_second_commitment_to_one_lease_is_refused(world: World) -> None:
    node = world.node().join()
    [(lease, digest)] = node.leases(1)
    node.finish(lease, digest)
    with pytest.raises(PeerFault) as caught:
        node.finish(lease, digest, "edited")
    assert caught.value.code == "E_SECOND_COMMITMENT"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"lease_sha256": sha("another lease")}, "E_COMMITMENT_MISMATCH"),
        ({"rollouts": 1}, "E_COMMITMENT_MISMATCH"),
        ({"tokens": 1}, "E_COMMITMENT_MISMATCH"),
        ({"tokens": 33}, "E_COMMITMENT_MISMATCH"),
        ({"profile": "another"}, "E_COMMITMENT_MISMATCH"),
        ({"object_bytes": 3}, "E_COMMITMENT_MISMATCH"),
        ({"object_sha256": sha("nowhere")}, "E_OBJECT_MISSING"),
        ({"checkpoints": [used(1)]}, "E_COMMITMENT_MISMATCH"),
        ({"checkpoints": [used(0, "another")]}, "E_COMMITMENT_CHECKPOINT"),
        ({"lease_id": "00" * 16}, "E_LEASE_UNKNOWN"),
        ({"run_id": "cd" * 16}, "E_WRONG_RUN"),
        ({"node_id": sha("nobody")}, "E_NODE_UNKNOWN"),
    ],
)
def test_an_edited_commitment_is_refused_by_name(world: World, change: dict[str, Any], code: str) -> None:
    node = world.node().join()
    node.client.run_id = None  # let our own client send it
    [(lease, digest)] = node.leases(1)
    node.upload(node.bundle(lease))
    with pytest.raises(PeerFault) as caught:
        node.client.submit(node.commitment(lease, digest, **change))
    assert caught.value.code == code
    assert node.finish(lease, digest).duplicate is False  # nothing was lost


def test_a_swap_needs_a_manifest_that_is_published(world: World) -> None:
    """Nobody foresees a digest: what is named was out, whatever anybody's clock says."""
    node = world.node().join()
    [(lease, digest)] = node.leases(1)
    node.upload(node.bundle(lease))
    start = node.used(lease.start_version)
    for named in ([start, used(1)], [start, used(2**48 - 1)]):
        with pytest.raises(PeerFault) as caught:
            node.client.submit(node.commitment(lease, digest, checkpoints=named))
        assert caught.value.code == "E_COMMITMENT_CHECKPOINT"
    assert world.http.get("/v1/status").json()["tokens_generated"] == 0
    world.publish()
    both = node.commitment(lease, digest, checkpoints=[start, node.used(1)])
    assert node.client.submit(both).duplicate is False


def test_evidence_holds_the_manifests_that_are_named(make_world: MakeWorld) -> None:
    world = make_world(batch={"max_lag_versions": 3})
    world.publish()
    node = world.node().join()
    leases = node.leases(2)
    for _ in range(3):
        world.publish()
    found = []
    for (lease, digest), versions in zip(leases, ([0], [0, 2]), strict=True):
        node.upload(node.bundle(lease))
        commitment = node.commitment(lease, digest, checkpoints=[node.used(version) for version in versions])
        receipt = Receipt.from_payload(node.client.submit(commitment).receipt.payload)
        found.append(decode(world.http.get(f"/v1/evidence/{receipt.receipt_id}").content).checkpoints)
    assert [len(checkpoints) for checkpoints in found] == [1, 3]
    assert list(found[1]) == world.learner.manifests[:3]


def test_a_commitment_to_the_lease_of_another_node_is_refused(world: World) -> None:
    node, thief = world.node().join(), world.node("thief").join()
    [(lease, digest)] = node.leases(1)
    with pytest.raises(PeerFault) as caught:
        thief.finish(lease, digest)
    assert caught.value.code == "E_LEASE_UNKNOWN"


def test_the_wrong_key_is_refused(world: World) -> None:
    node = world.node().join()
    [(lease, digest)] = node.leases(1)
    message = node.commitment(lease, digest)
    answer = world.http.post("/v1/submissions", content=message.sign(Identity(b"x" * 32)).to_bytes())
    assert (answer.status_code, answer.json()["code"]) == (403, "E_WRONG_KEY")
    envelope = message.sign(node.key)
    broken = Envelope(message.TYPE, envelope.payload, dict.fromkeys(envelope.signatures, b"\0" * 64))
    answer = world.http.post("/v1/submissions", content=broken.to_bytes())
    assert answer.json()["code"] == "E_SIGNATURE"
    answer = world.http.post("/v1/submissions", content=node.hello().sign(node.key).to_bytes())
    assert answer.json()["code"] == "E_PAYLOAD_TYPE"


def grant(world: World, data: bytes) -> str:
    node = world.node().join()
    node.leases(1)
    request = UploadRequest(
        run_id=RUN_ID, node_id=node.key.id, object_sha256=hashlib.sha256(data).hexdigest(), object_bytes=len(data),
        issued_at_ms=world.clock.now_ms(),
    )
    return str(world.http.post("/v1/uploads", content=request.sign(node.key).to_bytes()).json()["url"])


def test_an_upload_address_takes_exactly_its_object(world: World) -> None:
    url = grant(world, b"the data")
    assert world.http.put(url, content=b"the data!").json()["code"] == "E_TOO_LARGE"
    assert world.http.put(url, content=b"the dato").json()["code"] == "E_OBJECT_HASH"
    assert world.http.put(url, content=b"the dat").json()["code"] == "E_OBJECT_HASH"
    assert world.http.put(url.replace("size=8", "size=9"), content=b"the data!").json()["code"] == "E_UPLOAD_URL"
    assert world.http.put(url, content=b"the data").status_code == 200
    sha256 = hashlib.sha256(b"the data").hexdigest()
    assert world.http.get(f"/v1/objects/{sha256}").content == b"the data"
    part = world.http.get(f"/v1/objects/{sha256}", headers={"range": "bytes=4-"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"data", "bytes 4-7/8")
    assert world.http.get(f"/v1/objects/{sha256}", headers={"range": "bytes=-3"}).content == b"ata"
    beyond = world.http.get(f"/v1/objects/{sha256}", headers={"range": "bytes=8-"})
    assert (beyond.status_code, beyond.json()["code"], beyond.headers["content-range"]) == (416, "E_RANGE", "bytes */8")
    assert world.http.get("/v1/objects/../../keys/root.key").status_code == 404
    assert world.http.get(f"/v1/objects/{sha('nothing')}").json()["code"] == "E_NOT_FOUND"


def test_an_object_is_hashed_once_however_many_parts_of_it_are_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, shelf, hashed = bytes(range(200)) * 1000, world.coordinator.shelf, []
    hash_of = shelf._hash

    def counted(sha256: str) -> int:
        hashed.append(sha256)
        return hash_of(sha256)

    monkeypatch.setattr(shelf, "_hash", counted)
    sha256 = world.store.put(data)

    def part(start: int) -> tuple[int, bytes]:
        answer = world.http.get(f"/v1/objects/{sha256}", headers={"range": f"bytes={start}-{start + 999}"})
        return answer.status_code, answer.content

    for start in range(0, len(data), 10_000):
        assert part(start) == (206, data[start : start + 1000])
    assert world.http.get(f"/v1/objects/{sha256}").content == data
    assert hashed == [sha256]
    file = world.store.path / sha256[:2] / sha256
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.chmod(0o644)
    file.write_bytes(data[:-1] + b"!")  # a damaged disk, as far as a file's own times can hide it
    os.utime(file, ns=times)
    status, body = part(0)
    assert status >= 500
    assert json.loads(body)["code"] == "E_OBJECT_HASH"
    world.store.put(data)  # repaired
    assert [part(0), part(5000)] == [(206, data[:1000]), (206, data[5000:6000])]
    assert hashed == [sha256] * 3
    file.unlink()
    assert part(0)[0] == 404


def test_an_upload_address_expires(world: World) -> None:
    url = grant(world, b"the data")
    world.clock.advance(301)
    assert world.http.put(url, content=b"the data").json()["code"] == "E_UPLOAD_URL"


def test_an_upload_needs_a_lease_that_is_open(world: World) -> None:
    """Not even a registered node may fill the store; what is there already is said to anybody who is one."""
    node = world.node().join()

    def refusal() -> str:
        with pytest.raises(PeerFault) as caught:
            node.upload(b"anything")
        return caught.value.code

    assert refusal() == "E_LEASE_UNKNOWN"
    [(lease, digest)] = node.leases(1)
    node.finish(lease, digest)
    assert refusal() == "E_SECOND_COMMITMENT"
    node.upload(node.bundle(lease))  # a lost answer is asked for again
    assert node.client.submit(node.commitment(lease, digest)).duplicate
    node.leases(1)
    world.clock.advance(61)
    world.coordinator.sweep()
    node.upload(b"late, but nobody else has the unit")
    world.node("other").join().leases(4)
    assert refusal() == "E_LEASE_EXPIRED"


def test_uploading_twice_sends_nothing_the_second_time(world: World) -> None:
    node = world.node().join()
    node.leases(1)
    node.upload(b"again")
    world.store.delete(hashlib.sha256(b"again").hexdigest())
    node.upload(b"again")
    node.upload(b"again")
    assert world.store.has(hashlib.sha256(b"again").hexdigest())
