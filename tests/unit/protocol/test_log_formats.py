"""Entries, proofs and log files: one encoding each, strict readers, and only our errors whatever the bytes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import log_file
from protocol.envelope import Envelope
from protocol.errors import AssayError, PeerFault
from protocol.identity import Identity
from protocol.log_entry import LogEntry
from protocol.log_file import LogFile
from protocol.log_head import LogHead, origin_of
from protocol.log_proof import LogProof, ProvenEntry, nodes_of
from protocol.transparency import inclusion_proof, root
from tests.fakes.log_tree import Tree

KEY = Identity(bytes(range(32)))
RUN_ID = "ab" * 16
ENTRIES = [LogEntry(index, 5, "verdict", {"receipt_id": f"r{index}", "code": None}) for index in range(5)]
TREE = Tree(entry.leaf for entry in ENTRIES)
HEAD = LogHead(origin_of(RUN_ID), 5, root(TREE, 5))
PROOF = LogProof(HEAD.sign(KEY), tuple(ProvenEntry(ENTRIES[i], tuple(inclusion_proof(TREE, i, 5))) for i in (1, 4)))
RUN = Envelope.sign(KEY, "application/x", b"run")

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=4,
)


def test_entries_come_back() -> None:
    for entry in ENTRIES:
        assert LogEntry.from_bytes(entry.data) == LogEntry.from_dict(json.loads(entry.data)) == entry


GOOD: dict[str, Any] = ENTRIES[1].to_dict()


@pytest.mark.parametrize(
    "value",
    [
        None, [], {}, GOOD | {"more": 1}, {key: GOOD[key] for key in ("index", "at_ms", "kind")}, GOOD | {"index": -1},
        GOOD | {"index": True}, GOOD | {"index": 2**48}, GOOD | {"index": "1"}, GOOD | {"index": 1.0},
        GOOD | {"at_ms": -1}, GOOD | {"at_ms": None}, GOOD | {"at_ms": 2**63}, GOOD | {"kind": 1}, GOOD | {"body": []},
        GOOD | {"body": {"x": 1.5}}, GOOD | {"body": {"x": {}}} | {"kind": None}, GOOD | {"body": {"x": "\ud800"}},
    ],
)
def test_strange_entries_are_refused(value: Any) -> None:
    with pytest.raises(PeerFault, match="E_LOG_ENTRY"):
        LogEntry.from_dict(value)


def test_proofs_come_back_and_hold() -> None:
    assert LogProof.from_dict(json.loads(json.dumps(PROOF.to_dict()))) == PROOF
    assert PROOF.open(RUN_ID, KEY.public_key) == HEAD


@pytest.mark.parametrize(
    "value",
    [
        None, [], {"head": 1, "entries": []}, {"head": ""}, PROOF.to_dict() | {"more": 1},
        PROOF.to_dict() | {"entries": {}}, PROOF.to_dict() | {"entries": [{"entry": GOOD}]},
        PROOF.to_dict() | {"entries": [{"entry": GOOD, "proof": "ab"}]},
        PROOF.to_dict() | {"entries": [{"entry": GOOD, "proof": ["AB" * 32]}]},
        PROOF.to_dict() | {"entries": [{"entry": GOOD, "proof": [1]}]},
        PROOF.to_dict() | {"entries": [{"entry": GOOD, "proof": ["zz"]}]},
        PROOF.to_dict() | {"entries": [{"entry": GOOD, "proof": ["ab" * 32] * 50}]},
        PROOF.to_dict() | {"entries": [{"entry": GOOD, "proof": []}] * 1001},
    ],
)
def test_strange_proofs_are_refused(value: Any) -> None:
    with pytest.raises(PeerFault, match="E_LOG_ENTRY"):
        LogProof.from_dict(value)


def test_proofs_of_other_entries_are_refused() -> None:
    first, second = PROOF.entries
    for entries in ((ProvenEntry(first.entry, second.proof),), (ProvenEntry(ENTRIES[2], first.proof),)):
        with pytest.raises(PeerFault, match="E_LOG_INCLUSION"):
            LogProof(PROOF.head, entries).open(RUN_ID, KEY.public_key)
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        PROOF.open(RUN_ID, Identity(bytes(32)).public_key)


@settings(max_examples=30)
@given(JSON, st.sampled_from(["head", "entries", "entry", "proof", "index", "body"]))
def test_any_json_raises_only_our_errors(value: Any, place: str) -> None:
    proof = PROOF.to_dict()
    if place in proof:
        proof[place] = value
    elif place in proof["entries"][0]:
        proof["entries"][0][place] = value
    else:
        proof["entries"][0]["entry"][place] = value
    with contextlib.suppress(AssayError):
        LogProof.from_dict(proof).open(RUN_ID, KEY.public_key)
    with contextlib.suppress(AssayError):
        nodes_of(value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "run.log"
    log_file.write(written, KEY.public_key, RUN, PROOF.head, ENTRIES)
    return written


def test_log_files_come_back(path: Path) -> None:
    read = LogFile.open(path)
    assert (read.root_public_key, read.run_manifest, read.head) == (KEY.public_key, RUN, PROOF.head)
    assert list(read.entries()) == list(read.entries()) == ENTRIES
    assert path.read_bytes().startswith(log_file.MAGIC)
    assert [file.name for file in path.parent.iterdir()] == ["run.log"]


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda data: b"", "E_JSON"),
        (lambda data: data[:-1], "E_LOG_FILE"),
        (lambda data: data.replace(b"assay-log.v1", b"assay-log.v2"), "E_LOG_FILE"),
        (lambda data: data.replace(KEY.public_key.hex().encode(), b"AB"), "E_LOG_FILE"),
        (lambda data: data.replace(b'"head":', b'"tail":'), "E_LOG_FILE"),
        (lambda data: data.replace(b"\n", b"\r\n"), "E_JSON"),
        (lambda data: data.replace(b'"kind":"verdict"', b'"kind":7'), "E_LOG_ENTRY"),
        (lambda data: data + b"{}\n", "E_LOG_ENTRY"),
        (lambda data: data + b"\n", "E_JSON"),
        (lambda data: data + b"\n" + b"anything at all\n", "E_JSON"),
        (lambda data: data.replace(b'\n{"at_ms"', b'\n\n{"at_ms"'), "E_JSON"),
        (lambda data: b"\n" + data, "E_JSON"),
        (lambda data: data + b"x" * (log_file.MAX_LINE_BYTES + 1) + b"\n", "E_TOO_LARGE"),
    ],
)
def test_spoilt_log_files_are_refused(path: Path, spoil: Any, code: str) -> None:
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(PeerFault) as caught:
        list(LogFile.open(path).entries())
    assert caught.value.code == code
