"""Envelopes: a signature holds for one kind of message by one key, and the form is strict."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import canonical
from protocol.envelope import MAX_SIGNATURES, Envelope, pae
from protocol.errors import PeerFault
from protocol.identity import Identity

TEXT = st.text("eA3=+/_é\ud800", max_size=6)
KIND = "application/vnd.assay.test.v1+json"


def _envelope(identity: Identity, payload: bytes = b"{}") -> Envelope:
    return Envelope.sign(identity, KIND, payload)


def test_pae_is_that_of_the_dsse_specification():
    kind = "http://example.com/HelloWorld"
    assert pae(kind, b"hello world") == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert pae("é", b"") == b"DSSEv1 2 \xc3\xa9 0 "


def test_an_envelope_comes_back_and_verifies(identity):
    envelope = _envelope(identity, b'{"a":1}')
    back = Envelope.from_bytes(envelope.to_bytes())
    assert back == envelope
    assert back.verify(identity.public_key, KIND) == b'{"a":1}'
    assert back.digest == envelope.digest


def test_what_was_not_signed_does_not_verify(identity):
    envelope, stranger = _envelope(identity), Identity(bytes(32))
    with pytest.raises(PeerFault, match="E_PAYLOAD_TYPE"):
        envelope.verify(identity.public_key, KIND + "x")
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        envelope.verify(stranger.public_key, KIND)
    other_kind = Envelope(KIND + "x", envelope.payload, envelope.signatures)
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        other_kind.verify(identity.public_key, KIND + "x")
    other_payload = Envelope(KIND, b"[]", envelope.signatures)
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        other_payload.verify(identity.public_key, KIND)
    claimed = Envelope(KIND, b"{}", {identity.id: stranger.sign(pae(KIND, b"{}"))})
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        claimed.verify(identity.public_key, KIND)
    stripped = Envelope(KIND, b"{}", {})
    with pytest.raises(PeerFault, match="no signature"):
        stripped.verify(identity.public_key, KIND)


def test_malformed_envelopes_are_refused(identity):
    good = _envelope(identity).to_dict()
    signature = good["signatures"][0]
    keys = sorted(Identity(bytes([n]) * 32).id for n in range(MAX_SIGNATURES + 1))
    bad = [
        None, [], "x", {}, {**good, "extra": 1}, {**good, "payloadType": 1}, {**good, "payload": None},
        {**good, "signatures": {}}, {**good, "signatures": []}, {**good, "signatures": [None]},
        {**good, "signatures": [{"keyid": "a"}]}, {**good, "signatures": [{**signature, "keyid": 1}]},
        {**good, "signatures": [{**signature, "sig": 1}]}, {**good, "signatures": [{**signature, "x": 1}]},
        {**good, "signatures": [signature, signature]},
        *({**good, "signatures": [{**signature, "keyid": key}]} for key in ("", "[/x]", "\x1b[2J", "A" * 64, "a" * 63)),
        {**good, "signatures": [{**signature, "keyid": key} for key in keys]},
        {**good, "signatures": [{**signature, "keyid": key} for key in keys[1::-1]]},
        {**good, "payload": "e30"}, {**good, "payload": "e30=\n"}, {**good, "payload": "e31="},
        {**good, "payload": "é"}, {**good, "payload": "_-=="},
    ]
    for value in bad:
        with pytest.raises(PeerFault, match="E_ENVELOPE"):
            Envelope.from_dict(value)


def test_bytes_must_be_canonical(identity):
    data = _envelope(identity).to_bytes()
    for bad in (b" " + data, data + b"\n", data[:-1], b"", data.replace(b"payloadType", b"payloadtype")):
        with pytest.raises(PeerFault):
            Envelope.from_bytes(bad)
    with pytest.raises(PeerFault, match="E_TOO_LARGE"):
        Envelope.from_bytes(bytes(2 * canonical.MAX_MESSAGE_BYTES + 1))


@given(st.dictionaries(st.sampled_from(["payloadType", "payload", "signatures"]), st.one_of(
    st.none(), st.integers(), TEXT, st.lists(st.dictionaries(
        st.sampled_from(["keyid", "sig"]), TEXT, max_size=2), max_size=3),
)))
def test_any_value_is_an_envelope_or_a_peer_fault(value):
    codes = set()
    try:
        envelope = Envelope.from_dict(value)
    except PeerFault as error:
        codes.add(error.code)
    else:
        assert envelope.to_dict() == value
        assert base64.b64decode(value["payload"]) == envelope.payload
    assert codes <= {"E_ENVELOPE"}
