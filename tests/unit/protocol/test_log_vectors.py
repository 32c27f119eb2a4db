"""Known answers of the transparency log: trees, proofs, heads; and forged ones, each refused by its named code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import CODES, PeerFault
from protocol.identity import Identity
from protocol.log_head import LogHead, origin_of
from protocol.merkle import leaf_hash
from protocol.transparency import (
    Peaks,
    check_consistency,
    check_entry,
    consistency_proof,
    inclusion_proof,
    root,
)
from tests.fakes.log_tree import Tree

CASES = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).resolve().parents[2] / "vectors" / "log").glob("*.json"))
}


def tree_of(leaves: list[str]) -> Tree:
    return Tree(leaf_hash(bytes.fromhex(leaf)) for leaf in leaves)


def nodes(proof: list[str]) -> list[bytes]:
    return [bytes.fromhex(node) for node in proof]


def check(case: dict[str, Any]) -> None:
    if case["kind"] == "head":
        head = LogHead.open(case["note"], case["run_id"], bytes.fromhex(case["public_key"]))
        assert head == LogHead(origin_of(case["run_id"]), case["size"], bytes.fromhex(case["root"]))
    elif case["kind"] == "inclusion":
        leaf = leaf_hash(bytes.fromhex(case["leaf"]))
        check_entry(leaf, case["index"], case["size"], nodes(case["proof"]), bytes.fromhex(case["root"]))
    else:
        old_root, new_root = bytes.fromhex(case["old_root"]), bytes.fromhex(case["new_root"])
        check_consistency(case["old"], old_root, case["new"], new_root, nodes(case["proof"]))


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("_fail")])
def test_forgeries_are_refused(name: str) -> None:
    case = CASES[name]
    with pytest.raises(PeerFault) as caught:
        check(case)
    assert caught.value.code == case["error"]
    assert case["error"] in CODES


def test_there_are_enough_forgeries() -> None:
    assert len([name for name in CASES if name.endswith("_fail")]) >= 40


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case["kind"] == "head" and "error" not in case]
)
def test_heads(name: str) -> None:
    check(CASES[name])
    if "seed" in CASES[name]:
        head = LogHead(origin_of(CASES[name]["run_id"]), CASES[name]["size"], bytes.fromhex(CASES[name]["root"]))
        assert head.sign(Identity(bytes.fromhex(CASES[name]["seed"]))) == CASES[name]["note"]


def test_roots() -> None:
    case, peaks = CASES["roots"], Peaks()
    tree = tree_of(case["leaves"])
    for size, wanted in enumerate(case["roots"]):
        assert root(tree, size).hex() == peaks.root.hex() == wanted
        if size < len(case["leaves"]):
            peaks.append(leaf_hash(bytes.fromhex(case["leaves"][size])))


def test_inclusion() -> None:
    case = CASES["inclusion"]
    tree, roots = tree_of(case["leaves"]), nodes(case["roots"])
    for index, size, proof in case["proofs"]:
        assert inclusion_proof(tree, index, size) == nodes(proof)
        check_entry(tree(0, index), index, size, nodes(proof), roots[size])


def test_consistency() -> None:
    case = CASES["consistency"]
    tree, roots = tree_of(case["leaves"]), nodes(case["roots"])
    for old, new, proof in case["proofs"]:
        assert consistency_proof(tree, old, new) == nodes(proof)
        check_consistency(old, roots[old], new, roots[new], nodes(proof))
