"""The tree of RFC 6962: known answers, every proof of small trees, and every way to bend one."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import PeerFault
from protocol.merkle import inclusion_proof as proof_by_definition
from protocol.merkle import leaf_hash, merkle_root
from protocol.transparency import (
    EMPTY_ROOT,
    Peaks,
    check_consistency,
    check_entry,
    complete,
    consistency_proof,
    grown,
    inclusion_proof,
    root,
)
from tests.fakes.log_tree import Tree


def leaves_of(count):
    return [leaf_hash(i.to_bytes(4, "little")) for i in range(count)]


def by_definition(old, leaves, whole=True):
    """PROOF and SUBPROOF of RFC 6962, 2.1.2, word for word."""
    count = len(leaves)
    if old == count:
        return [] if whole else [merkle_root(leaves)]
    k = 1 << ((count - 1).bit_length() - 1)
    if old <= k:
        return [*by_definition(old, leaves[:k], whole), merkle_root(leaves[k:])]
    return [*by_definition(old - k, leaves[k:], False), merkle_root(leaves[:k])]


#: Roots and proofs of the eight reference leaves (``ReferenceMerklePath``, ``testdata`` of the certificate-transparency
#: project, also in transparency-dev/merkle).
LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
NODES = {
    (0, 0): "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    (0, 1): "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
    (0, 2): "0298d122906dcfc10892cb53a73992fc5b9f493ea4c9badb27b791b4127a7fe7",
    (0, 3): "07506a85fd9dd2f120eb694f86011e5bb4662e5c415a62917033d4a9624487e7",
    (0, 4): "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    (0, 5): "4271a26be0d8a84f0bd54c8c302e7cb3a3b5d1fa6780a40bcce2873477dab658",
    (0, 6): "b08693ec2e721597130641e8211e7eedccb4c26413963eee6c1e2ed16ffb1a5f",
    (0, 7): "46f6ffadd3d06a09ff3c5860d2755c8b9819db7df44251788c7d8e3180de8eb1",
    (1, 0): "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    (1, 1): "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
    (1, 2): "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
    (1, 3): "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
    (2, 0): "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    (2, 1): "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    (3, 0): "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}
ROOTS = {
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    4: "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    5: "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    6: "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    7: "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}
INCLUSION = {
    (0, 1): [], (0, 8): [(0, 1), (1, 1), (2, 1)], (5, 8): [(0, 4), (1, 3), (2, 0)], (2, 3): [(1, 0)],
    (1, 5): [(0, 0), (1, 1), (0, 4)],
}
CONSISTENCY = {
    (1, 1): [], (1, 8): [(0, 1), (1, 1), (2, 1)], (6, 8): [(1, 2), (1, 3), (2, 0)], (2, 5): [(1, 1), (0, 4)],
    (6, 7): [(1, 2), (0, 6), (2, 0)],
}


@pytest.fixture(scope="module")
def reference():
    return Tree([leaf_hash(bytes.fromhex(leaf)) for leaf in LEAVES])


def test_known_roots_and_nodes(reference):
    assert {place: node.hex() for place, node in reference.nodes.items()} == NODES
    assert {size: root(reference, size).hex() for size in ROOTS} == ROOTS
    assert root(reference, 0) == EMPTY_ROOT == hashlib.sha256(b"").digest()


def test_known_proofs(reference):
    for (index, size), places in INCLUSION.items():
        proof = [bytes.fromhex(NODES[place]) for place in places]
        assert inclusion_proof(reference, index, size) == proof
        check_entry(reference(0, index), index, size, proof, bytes.fromhex(ROOTS[size]))
    for (old, new), places in CONSISTENCY.items():
        proof = [bytes.fromhex(NODES[place]) for place in places]
        assert consistency_proof(reference, old, new) == proof
        check_consistency(old, bytes.fromhex(ROOTS[old]), new, bytes.fromhex(ROOTS[new]), proof)


def test_all_trees_up_to_forty_leaves():
    leaves = leaves_of(40)
    tree, peaks = Tree(leaves), Peaks()
    for size in range(1, 41):
        peaks.append(leaves[size - 1])
        assert root(tree, size) == peaks.root == merkle_root(leaves[:size])
        for index in range(size):
            proof = inclusion_proof(tree, index, size)
            assert proof == proof_by_definition(leaves[:size], index)
            check_entry(leaves[index], index, size, proof, peaks.root)
        for old in range(size + 1):
            proof = consistency_proof(tree, old, size)
            assert proof == (by_definition(old, leaves[:size]) if old else [])
            check_consistency(old, merkle_root(leaves[:old]), size, peaks.root, proof)
    assert len(tree.nodes) <= 2 * 40


def test_look_ups_are_logarithmic():
    tree, calls = Tree(leaves_of(3000)), []

    def counting(level, index):
        calls.append((level, index))
        return tree(level, index)

    for work in (
        lambda: root(counting, 2999), lambda: inclusion_proof(counting, 1234, 2999),
        lambda: consistency_proof(counting, 1234, 2999), lambda: grown(counting, 2999, b"x" * 32),
    ):
        calls.clear()
        work()
        assert 0 < len(calls) <= 12 + 12  # tree of height 12: a path, and the right edge that ends it


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_complete_subtrees_tile_a_range(a, b):
    begin, end = sorted((a, b))
    at = begin
    for level, index in complete(begin, end):
        assert index << level == at
        at += 1 << level
    assert at == end


# -- forgeries ---------------------------------------------------------------------------------------------


def refused(code, *arguments, check=check_consistency):
    with pytest.raises(PeerFault) as caught:
        check(*arguments)
    assert caught.value.code == code, caught.value


@pytest.mark.parametrize("changed", [0, 3, 4, 6])
def test_a_fork_is_refused_whatever_its_size(changed):
    """A log that rewrites an entry: no proof of the new history leads from the root of the old one."""
    true, forged = leaves_of(20), leaves_of(20)
    forged[changed] = leaf_hash(b"rewritten")
    fork = Tree(forged)
    refused("E_LOG_FORK", 7, merkle_root(true[:7]), 7, merkle_root(forged[:7]), [])
    for new in range(8, 21):
        for proof in (consistency_proof(fork, 7, new), consistency_proof(Tree(true), 7, new)):
            refused("E_LOG_CONSISTENCY", 7, merkle_root(true[:7]), new, root(fork, new), proof)


def test_rollbacks_are_refused():
    tree = Tree(leaves_of(9))
    for new in range(9):
        refused("E_LOG_ROLLBACK", 9, root(tree, 9), new, root(tree, new), [])


def test_wrong_sizes_are_refused():
    tree = Tree(leaves_of(40))
    for old, new in ((7, 13), (8, 13), (1, 40), (32, 40), (13, 32)):
        old_root, new_root, proof = root(tree, old), root(tree, new), consistency_proof(tree, old, new)
        for wrong in range(1, 41):
            if wrong != old and wrong < new:
                refused("E_LOG_CONSISTENCY", wrong, old_root, new, new_root, proof)
    refused("E_LOG_CONSISTENCY", -1, root(tree, 0), 3, root(tree, 3), [])
    refused("E_LOG_CONSISTENCY", 1, root(tree, 1), 2**48 + 1, root(tree, 3), [])
    refused("E_LOG_CONSISTENCY", 0, b"x" * 32, 3, root(tree, 3), [])


def test_malleable_consistency_proofs_are_refused():
    tree = Tree(leaves_of(40))
    for old, new in ((7, 13), (8, 13), (1, 40), (32, 40), (39, 40), (13, 32)):
        old_root, new_root, proof = root(tree, old), root(tree, new), consistency_proof(tree, old, new)
        bent = [
            proof[:-1], proof[1:], [*proof, proof[-1]], [proof[0], *proof], [old_root, *proof], [*proof, new_root], [],
            [*proof[:-1], proof[-1][:31]], [*proof[:-1], proof[-1] + b"\0"], [*proof, *([b"\0" * 32] * 60)],
        ]
        bent += [[*proof[:i], bytes(32), *proof[i + 1 :]] for i in range(len(proof))]
        if proof[::-1] != proof:
            bent.append(proof[::-1])
        for other in bent:
            refused("E_LOG_CONSISTENCY", old, old_root, new, new_root, other)
        refused("E_LOG_CONSISTENCY", old, bytes(32), new, new_root, proof)
        refused("E_LOG_CONSISTENCY", old, old_root, new, bytes(32), proof)
    refused("E_LOG_CONSISTENCY", 5, root(tree, 5), 5, root(tree, 5), [bytes(32)])
    refused("E_LOG_CONSISTENCY", 0, EMPTY_ROOT, 5, root(tree, 5), [bytes(32)])


def test_malleable_inclusion_proofs_are_refused():
    tree = Tree(leaves_of(13))
    for index in (0, 7, 8, 12):
        leaf, proof, top = tree(0, index), inclusion_proof(tree, index, 13), root(tree, 13)
        for bent in (proof[:-1], proof[1:], [*proof, proof[-1]], [bytes(32), *proof[1:]], [proof[0][:31], *proof[1:]]):
            refused("E_LOG_INCLUSION", leaf, index, 13, bent, top, check=check_entry)
        for wrong_index, wrong_size in ((index + 1, 13), (index - 1, 13), (index, index), (13, 13)):
            refused("E_LOG_INCLUSION", leaf, wrong_index, wrong_size, proof, top, check=check_entry)
        refused("E_LOG_INCLUSION", leaf_hash(b"another"), index, 13, proof, top, check=check_entry)
        refused("E_LOG_INCLUSION", leaf, index, 13, proof, bytes(32), check=check_entry)
    # an inner node in the place of a leaf: the count gives it away
    refused("E_LOG_INCLUSION", tree(1, 0), 0, 13, inclusion_proof(tree, 0, 13)[1:], root(tree, 13), check=check_entry)


def test_our_own_bugs_are_no_faults_of_peers():
    tree = Tree(leaves_of(3))
    for call in (lambda: inclusion_proof(tree, 3, 3), lambda: consistency_proof(tree, 4, 3)):
        with pytest.raises(IndexError):
            call()
