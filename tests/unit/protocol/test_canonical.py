"""Canonical JSON: one byte string per value."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import canonical
from protocol.errors import PeerFault

TEXT = st.text('ab"\\/\b\n\t\x00\x1f\x7f\x80é\u2028\uffff😀', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_from_their_one_encoding(value):
    try:
        data = canonical.encode(value)
    except ValueError:  # a draw deeper than the limit
        return
    assert canonical.decode(data) == value
    assert canonical.encode(canonical.decode(data)) == data
    assert canonical.digest(value) == hashlib.sha256(data).hexdigest()


@given(VALUES, st.sampled_from([{"indent": 1}, {"separators": (", ", ":")}, {"ensure_ascii": True}]))
def test_other_encodings_of_a_value_are_refused(value, style):
    other = json.dumps(value, sort_keys=True, **({"separators": (",", ":")} | style)).encode()
    try:
        same = other == canonical.encode(value)
    except ValueError:
        return
    if not same:
        with pytest.raises(PeerFault, match="E_JSON"):
            canonical.decode(other)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_peer_fault(data):
    codes = set()
    try:
        value = canonical.decode(data)
    except PeerFault as error:
        codes.add(error.code)
    else:
        assert canonical.encode(value) == data
    assert codes <= {"E_JSON"}


def test_keys_are_sorted_by_code_point():
    data = '{"a":4,"b":3,"\uffff":2,"😀":1}'.encode()
    assert canonical.encode({"😀": 1, "\uffff": 2, "b": 3, "a": 4}) == data


@pytest.mark.parametrize("value", [
    1.5, float("nan"), {1: 2}, 2**63, -(2**63) - 1, b"x", {"a": {3}}, "\ud800", object(),
])
def test_values_without_a_form_are_our_own_bug(value):
    with pytest.raises(ValueError):
        canonical.encode(value)


def _nested(levels: int):
    value: list = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_encoder_and_decoder_agree_on_the_depth():
    deepest = canonical.encode(_nested(canonical.MAX_DEPTH))
    assert canonical.decode(deepest) == _nested(canonical.MAX_DEPTH)
    with pytest.raises(ValueError, match="nested"):
        canonical.encode(_nested(canonical.MAX_DEPTH + 1))
    with pytest.raises(PeerFault, match="E_JSON"):
        canonical.decode(b"[" + deepest + b"]")
    assert canonical.decode(b'"' + b"[" * 1000 + b'"') == "[" * 1000


@pytest.mark.parametrize("data", [
    b"", b" 1", b"1 ", b"1.0", b"1e3", b"-0", b"01", b"NaN", b"Infinity", b"nul", b"'a'", b'"\xff"', b'"\\ud800"',
    b'"\\u0041"', b'{"a":1,"a":1}', b'{"b":1,"a":1}', b'{"a": 1}', b"[1,]", b"9223372036854775808", b"9" * 5000,
    b"[" * 100_000, b'{"a":' * 20 + b"1" + b"}" * 20, b"\xef\xbb\xbf1", b'"\x00"', b"1\x00",
])
def test_data_in_other_forms_is_refused(data):
    with pytest.raises(PeerFault, match="E_JSON"):
        canonical.decode(data)


def test_size_is_bounded_before_anything_is_read():
    with pytest.raises(PeerFault, match="E_TOO_LARGE"):
        canonical.decode(b"[" * 11, max_bytes=10)
