"""Signed notes and log heads: known answers, and everything else refused."""

from __future__ import annotations

import base64
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import signed_note
from protocol.errors import AssayError, PeerFault
from protocol.identity import Identity
from protocol.log_head import LogHead, origin_of
from protocol.transparency import EMPTY_ROOT

RUN_ID = "ab" * 16
KEY = Identity(bytes(range(32)))
HEAD = LogHead(origin_of(RUN_ID), 7, bytes(range(32)))
NOTE = HEAD.sign(KEY)


def test_the_known_note_of_the_go_checksum_database_verifies():
    """From the documentation of golang.org/x/mod/sumdb/note, where the format comes from."""
    encoded = base64.b64decode("ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW")
    text = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
    note = text + (
        "\n— PeterNeumann "
        "x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
    )
    assert encoded[:1] == b"\x01"
    assert signed_note.key_hash("PeterNeumann", encoded[1:]).hex() == "c74f20a3"
    assert signed_note.verify(note, "PeterNeumann", encoded[1:]) == text


def test_a_head_comes_back():
    assert LogHead.open(NOTE, RUN_ID, KEY.public_key) == HEAD
    assert NOTE.splitlines()[:4] == [f"assay-log/{RUN_ID}", "7", base64.b64encode(bytes(range(32))).decode(), ""]
    empty = LogHead(origin_of(RUN_ID), 0, EMPTY_ROOT)
    assert LogHead.open(empty.sign(KEY), RUN_ID, KEY.public_key) == empty


def test_witnesses_and_extensions_are_tolerated():
    witnessed = NOTE + NOTE.split("\n\n")[1].replace(HEAD.origin, "witness.example/w1")
    assert LogHead.open(witnessed, RUN_ID, KEY.public_key) == HEAD
    text = NOTE.split("\n\n")[0] + "\nan extension line\n"
    assert LogHead.open(signed_note.sign(text, HEAD.origin, KEY), RUN_ID, KEY.public_key) == HEAD


SIGNATURE = NOTE.split("\n\n")[1]


def resigned(text: str) -> str:
    return signed_note.sign(text, HEAD.origin, KEY)


@pytest.mark.parametrize(
    ("note", "code"),
    [
        ("", "E_NOTE"),
        (NOTE.rstrip("\n"), "E_NOTE"),
        (NOTE.replace("\n\n", "\n"), "E_NOTE"),
        (NOTE.replace("—", "-"), "E_NOTE"),
        (NOTE.replace("\n", "\r\n"), "E_NOTE"),
        (NOTE + "\n", "E_NOTE"),
        (NOTE + "x\n", "E_NOTE"),
        (NOTE + SIGNATURE * 16, "E_NOTE"),
        (NOTE.replace("\n\n", "\n\ud800\n\n"), "E_NOTE"),
        (NOTE.split("\n\n")[0] + f"\n\n— {HEAD.origin} AAAAAA==\n", "E_NOTE"),
        (NOTE.split("\n\n")[0] + f"\n\n— {HEAD.origin} AAAAAAB=\n", "E_NOTE"),
        ("x" * 200_000, "E_TOO_LARGE"),
        (resigned("assay-log/x\n7\n"), "E_NOTE"),
        (resigned(f"{HEAD.origin}\n07\n{base64.b64encode(bytes(32)).decode()}\n"), "E_NOTE"),
        (resigned(f"{HEAD.origin}\n-7\n{base64.b64encode(bytes(32)).decode()}\n"), "E_NOTE"),
        (resigned(f"{HEAD.origin}\n７\n{base64.b64encode(bytes(32)).decode()}\n"), "E_NOTE"),
        (resigned(f"{HEAD.origin}\n{2**48 + 1}\n{base64.b64encode(bytes(32)).decode()}\n"), "E_NOTE"),
        (resigned(f"{HEAD.origin}\n7\n{base64.b64encode(bytes(31)).decode()}\n"), "E_NOTE"),
        (resigned(f"{HEAD.origin}\n7\n\n{base64.b64encode(bytes(32)).decode()}\n"), "E_NOTE"),
        (LogHead(origin_of("cd" * 16), 7, bytes(32)).sign(KEY), "E_LOG_ORIGIN"),
        (NOTE.replace("\n7\n", "\n8\n"), "E_SIGNATURE"),
        (NOTE + SIGNATURE, "E_SIGNATURE"),
        (HEAD.sign(Identity(bytes(32))), "E_SIGNATURE"),
        (NOTE.replace(f"— {HEAD.origin}", "— somebody-else"), "E_SIGNATURE"),
    ],
)
def test_everything_else_is_refused(note, code):
    with pytest.raises(PeerFault) as caught:
        LogHead.open(note, RUN_ID, KEY.public_key)
    assert caught.value.code == code


def test_a_message_signed_by_the_same_key_is_no_head():
    from protocol.envelope import Envelope

    text = NOTE.split("\n\n")[0] + "\n"
    signature = Envelope.sign(KEY, "application/x", text.encode()).signatures[KEY.id]
    line = base64.b64encode(signed_note.key_hash(HEAD.origin, KEY.public_key) + signature).decode()
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        LogHead.open(f"{text}\n— {HEAD.origin} {line}\n", RUN_ID, KEY.public_key)


@settings(max_examples=60)
@given(
    st.text(max_size=100)
    | st.builds(lambda i, sign: NOTE[:i] + sign + NOTE[i + 1 :], st.integers(0, len(NOTE)), st.characters())
)
def test_any_text_raises_only_our_errors(note):
    with contextlib.suppress(AssayError):
        assert LogHead.open(note, RUN_ID, KEY.public_key) == HEAD
