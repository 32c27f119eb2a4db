"""The evidence file: one encoding, a strict decoder, and only our errors whatever the bytes."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import log_file
from protocol.envelope import Envelope
from protocol.errors import PeerFault
from protocol.evidence import MAGIC, MAX_VERDICTS, Evidence, decode, encode
from protocol.identity import Identity

KEY = Identity(hashlib.sha256(b"evidence").digest())


def _envelope(text: str) -> Envelope:
    return Envelope.sign(KEY, "application/x", text.encode())


def _evidence(**changes) -> Evidence:
    fields = {
        "root_public_key": KEY.public_key, "node_public_key": KEY.public_key, "run_manifest": _envelope("run"),
        "lease": _envelope("lease"), "commitment": _envelope("commitment"), "receipt": _envelope("receipt"),
        "verdicts": (_envelope("verdict"),), "checkpoints": (_envelope("0"), _envelope("1")), "bundle": b"bundle",
    }
    return Evidence(**(fields | changes))


@pytest.mark.parametrize("changes", [{}, {"receipt": None}, {"verdicts": (), "checkpoints": ()}])
def test_round_trip(changes):
    evidence = _evidence(**changes)
    data = encode(evidence)
    assert decode(data) == evidence
    assert encode(decode(data)) == data
    assert evidence.sha256 == hashlib.sha256(data).hexdigest()


def _spoil(data: bytes, kind: str) -> bytes:
    header = len(MAGIC) + 4
    length = int.from_bytes(data[8:12], "little")
    body, bundle = data[header : header + length], data[header + length :]

    def again(new: bytes) -> bytes:
        return MAGIC + len(new).to_bytes(4, "little") + new + bundle

    def without(first: bytes, last: bytes, instead: bytes) -> bytes:
        return again(body[: body.index(first)] + instead + body[body.index(last) :])

    return {
        "empty": b"",
        "magic": b"ASSAYEV2" + data[8:],
        "no length": data[:10],
        "length beyond the file": data[:8] + (2**31).to_bytes(4, "little") + data[12:],
        "length beyond the limit": data[:8] + (2**32 - 1).to_bytes(4, "little") + data[12:],
        "no bundle": data[: header + length],
        "not JSON": again(b"x" * 10),
        "not canonical": again(body.replace(b":", b": ", 1)),
        "a list": again(b"[]"),
        "missing key": again(body.replace(b'"lease"', b'"leash"')),
        "short key": again(body.replace(KEY.public_key.hex().encode(), KEY.public_key.hex()[:-2].encode(), 1)),
        "upper-case key": again(body.replace(KEY.public_key.hex().encode(), KEY.public_key.hex().upper().encode(), 1)),
        "null lease": without(b'"lease":', b',"node_public_key"', b'"lease":null'),
        "verdicts no list": again(body[: body.index(b'"verdicts":')] + b'"verdicts":{}}'),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("empty", "E_EVIDENCE"), ("magic", "E_EVIDENCE"), ("no length", "E_EVIDENCE"),
        ("length beyond the file", "E_EVIDENCE"), ("length beyond the limit", "E_EVIDENCE"),
        ("no bundle", "E_EVIDENCE"), ("not JSON", "E_JSON"), ("not canonical", "E_JSON"), ("a list", "E_EVIDENCE"),
        ("missing key", "E_EVIDENCE"), ("short key", "E_EVIDENCE"), ("upper-case key", "E_EVIDENCE"),
        ("null lease", "E_ENVELOPE"), ("verdicts no list", "E_EVIDENCE"),
    ],
)
def test_malformed(kind, code):
    with pytest.raises(PeerFault, match=code):
        decode(_spoil(encode(_evidence()), kind))


def test_a_log_is_told_apart():
    with pytest.raises(PeerFault, match="assay audit log FILE") as caught:
        decode(log_file.MAGIC + b'"head":""}')
    assert caught.value.code == "E_EVIDENCE"


def test_too_many_verdicts():
    with pytest.raises(PeerFault, match="E_EVIDENCE"):
        decode(encode(_evidence(verdicts=(_envelope("v"),) * (MAX_VERDICTS + 1))))


_GOOD = encode(_evidence())


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(_GOOD) - 1), st.integers(0, 255), st.integers(0, len(_GOOD)))
def test_any_damage_gives_evidence_or_our_error(at, byte, cut):
    data = bytearray(_GOOD)
    data[at] = byte
    for candidate in (bytes(data), _GOOD[:cut], _GOOD[:at] + _GOOD[cut:]):
        try:
            decode(candidate)
        except PeerFault:
            continue
