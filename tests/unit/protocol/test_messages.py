"""Messages: strict fields, signed by the right key, of the right run, in time."""

import importlib

import pytest

from protocol import canonical, messages
from protocol.errors import PeerFault
from protocol.identity import Identity
from protocol.messages import CheckpointHead, Commitment, Lease, Message, parse

RUN = "00" * 16


def _head(**changes) -> CheckpointHead:
    return CheckpointHead(**({
        "run_id": RUN, "version": 3, "manifest_sha256": "ab" * 32, "issued_at_ms": 1_000, "expires_at_ms": 2_000,
    } | changes))


def test_a_message_comes_back(identity):
    head = _head()
    assert CheckpointHead.from_payload(head.to_payload()) == head
    envelope = head.sign(identity)
    for key in (identity.public_key, identity.public_key.hex()):
        assert CheckpointHead.open(envelope, key, run_id=RUN, now_ms=2_000) == head


def test_kinds_are_told_apart():
    kinds = [cls.TYPE for cls in Message.__subclasses__()]
    assert len(set(kinds)) == len(kinds) >= 14
    assert all(kind.startswith("application/vnd.assay.") and kind.endswith("+json") for kind in kinds)


def test_opening_checks_key_kind_run_and_time(identity):
    envelope = _head().sign(identity)
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        CheckpointHead.open(envelope, Identity(bytes(32)).public_key)
    with pytest.raises(PeerFault, match="E_PAYLOAD_TYPE"):
        Commitment.open(envelope, identity.public_key)
    with pytest.raises(PeerFault, match="E_WRONG_RUN"):
        CheckpointHead.open(envelope, identity.public_key, run_id="11" * 16)
    with pytest.raises(PeerFault, match="E_EXPIRED"):
        CheckpointHead.open(envelope, identity.public_key, now_ms=2_001)


@pytest.mark.parametrize("change", [
    {"version": -1}, {"version": 2**48}, {"version": "3"}, {"version": True}, {"version": None},
    {"manifest_sha256": "AB" * 32}, {"manifest_sha256": "ab" * 31}, {"manifest_sha256": "ab" * 32 + "\n"},
    {"run_id": "0" * 31}, {"issued_at_ms": 2**53}, {"extra": 1},
])
def test_fields_that_do_not_fit_are_named(change):
    value = {**_head().model_dump(), **change}
    with pytest.raises(PeerFault) as caught:
        CheckpointHead.from_payload(canonical.encode(value))
    assert caught.value.code == "E_SCHEMA"
    assert next(iter(change)) in caught.value.message


@pytest.mark.parametrize("value", [None, [], 3, "x", {}, {"version": 1.5}, {"a": b"x"}])
def test_values_of_another_shape_are_refused(value):
    with pytest.raises(PeerFault, match="E_SCHEMA"):
        parse(CheckpointHead, value)


def test_payloads_must_be_canonical():
    payload = _head().to_payload()
    for bad in (b" " + payload, payload.replace(b":3", b":3.0"), payload[:-1] + b',"version":3}'):
        with pytest.raises(PeerFault, match="E_JSON"):
            CheckpointHead.from_payload(bad)


def test_lists_are_bounded():
    lease = {
        "run_id": RUN, "lease_id": "1" * 32, "node_id": "2" * 64, "environment": "sort", "group": 1, "samples": [0],
        "prompt_tokens": [1], "prompt_sha256": "3" * 64, "start_version": 0, "beacon": "4" * 64, "issued_at_ms": 1,
        "deadline_ms": 2,
    }
    parse(Lease, lease)
    for change in ({"samples": []}, {"samples": [0] * 1025}, {"samples": [65_536]}, {"prompt_tokens": []},
                   {"prompt_tokens": [2**31]}, {"environment": "Sort"}, {"environment": ""}):
        with pytest.raises(PeerFault, match="E_SCHEMA"):
            parse(Lease, lease | change)


def test_opened_by_names_the_key(identity):
    assert messages.opened_by(identity.public_key) == messages.opened_by(identity.public_key.hex()) == identity.id


def test_the_specification_lists_every_message(root):
    for module in ("protocol.calibration", "protocol.weights.skips", "protocol.swarm.announce"):
        importlib.import_module(module)
    page = (root / "docs" / "spec" / "messages.md").read_text(encoding="utf-8")
    for cls in Message.__subclasses__():
        name = cls.TYPE.removeprefix("application/vnd.assay.").removesuffix(".v1+json")
        assert f"| `{cls.__name__}` | {name} |" in page


def test_a_lease_that_is_not_pinned_has_the_bytes_of_leases_before_there_were_pinned_ones():
    lease = Lease(
        run_id=RUN, lease_id="00" * 16, node_id="00" * 32, environment="sort", group=0, samples=[0],
        prompt_tokens=[1], prompt_sha256="00" * 32, start_version=0, beacon="00" * 32, issued_at_ms=0, deadline_ms=1,
    )
    assert b"pinned" not in lease.to_payload()
    pinned = lease.model_copy(update={"pinned": True})
    assert b'"pinned":true' in pinned.to_payload()
    for one in (lease, pinned):
        assert Lease.from_payload(one.to_payload()) == one
