"""Known answers: every file under ``tests/vectors`` that is about weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.envelope import Envelope
from protocol.errors import PeerFault
from protocol.messages import ChunkRef
from protocol.weights.diff import apply_patch, decode_anchor, decode_diff, encode_anchor, encode_diff
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import Layout, State
from protocol.weights.state_root import decode_leaves, encode_leaves, hash_named, leaf_list, root_of
from tests.fakes.checkpoints import same_bits

_VECTORS = Path(__file__).resolve().parents[2] / "vectors"


def _cases(folder: str) -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in sorted((_VECTORS / folder).glob("*.json"))]


def _load(path: Path) -> tuple[dict[str, Any], str | None]:
    """The case, and the code it must be refused with; the name says whether it must."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert path.stem.endswith("_fail") == ("error" in value)
    return value, value.get("error")


def _state(layout: Layout, tensors: dict[str, str]) -> State:
    return {
        e.name: np.frombuffer(bytearray.fromhex(tensors[e.name]), e.words).reshape(e.shape) for e in layout.entries
    }


def _filled(layout: Layout) -> State:
    data = b"".join(hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(-(-layout.nbytes // 32)))
    return {
        e.name: np.frombuffer(data[e.offset : e.offset + e.nbytes], e.words).reshape(e.shape) for e in layout.entries
    }


def test_there_are_cases() -> None:
    counts = {folder: len(_cases(folder)) for folder in
              ("layout", "state-root", "leaf-list", "weight-diff", "checkpoint")}
    assert counts == {"layout": 14, "state-root": 7, "leaf-list": 15, "weight-diff": 48, "checkpoint": 25}


@pytest.mark.parametrize("path", _cases("layout"))
def test_layout(path: Path) -> None:
    case, error = _load(path)
    if error:
        with pytest.raises(PeerFault) as caught:
            Layout.from_bytes(case["layout"].encode())
        assert caught.value.code == error
        return
    layout = Layout.from_bytes(case["layout"].encode())
    assert (layout.sha256, layout.nbytes) == (case["sha256"], case["nbytes"])
    assert {e.name: e.offset for e in layout.entries} == case["offsets"]


@pytest.mark.parametrize("path", _cases("state-root"))
def test_state_root(path: Path) -> None:
    case, _ = _load(path)
    layout = Layout.from_bytes(case["layout"].encode())
    state = _state(layout, case["state"]) if "state" in case else _filled(layout)
    hash_id = hash_named(case.get("state_hash", "sha-256"))
    leaves = leaf_list(layout, state, hash_id=hash_id)
    assert [leaf.hex() for leaf in leaves] == case["leaves"]
    assert root_of(layout, leaves, hash_id) == case["root"]


@pytest.mark.parametrize("path", _cases("leaf-list"))
def test_leaf_list(path: Path) -> None:
    case, error = _load(path)
    layout, data = Layout.from_bytes(case["layout"].encode()), bytes.fromhex(case["list"])
    if error:
        with pytest.raises(PeerFault) as caught:
            decode_leaves(layout, data, case["root"])
        assert caught.value.code == error
        return
    hash_id, leaves = decode_leaves(layout, data, case["root"])
    assert hash_id == hash_named(case["state_hash"])
    assert [leaf.hex() for leaf in leaves] == case["leaves"]
    assert encode_leaves(layout, leaves, hash_id) == data


@pytest.mark.parametrize("path", _cases("weight-diff"))
def test_weight_diff(path: Path) -> None:
    case, error = _load(path)
    layout = Layout.from_bytes(case["layout"].encode())
    chunks = [bytes.fromhex(chunk) for chunk in case["chunks"]]
    refs = [
        ChunkRef(sha256="0" * 64, size_bytes=len(chunk), max_output_bytes=most)
        for chunk, most in zip(chunks, case["max_output_bytes"], strict=True)
    ]
    if error:
        with pytest.raises(PeerFault) as caught:
            apply_patch(layout, _state(layout, case["old"]), decode_diff(layout, chunks, refs))
        assert caught.value.code == error
        return
    new = _state(layout, case["new"])
    if case["kind"] == "anchor":
        assert same_bits(decode_anchor(chunks, layout, refs), new)
        assert same_bits(decode_anchor(encode_anchor(layout, new), layout), new)
        return
    live, old = _state(layout, case["old"]), _state(layout, case["old"])
    apply_patch(layout, live, decode_diff(layout, chunks, refs))
    assert same_bits(live, new)
    apply_patch(layout, old, decode_diff(layout, encode_diff(layout, old, new)))
    assert same_bits(old, new)


@pytest.mark.parametrize("path", _cases("checkpoint"))
def test_checkpoint(path: Path) -> None:
    case, error = _load(path)
    layout = Layout.from_bytes(case["layout"].encode())
    follower = CheckpointFollower(
        lambda sha256, size: bytes.fromhex(case["objects"][sha256]), case["learner_key"], case["run_id"], layout,
        state_hash=case.get("state_hash"),
    )

    def follow() -> None:
        follower.verify_head(Envelope.from_dict(case["head"]), case["now_ms"])
        follower.advance([Envelope.from_dict(manifest) for manifest in case["manifests"]])

    if error:
        with pytest.raises(PeerFault) as caught:
            follow()
        assert caught.value.code == error
        return
    follow()
    assert follower.manifest.state_root == case["state_root"]
    assert same_bits(follower.state, _state(layout, case["new"]))
