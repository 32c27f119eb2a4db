"""Merkle trees: the shape of RFC 6962, and every known way to bend one is refused."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import PeerFault
from protocol.merkle import (
    bind_count,
    check_inclusion,
    counted_root,
    inclusion_proof,
    leaf_hash,
    merkle_root,
    node_hash,
)


def _leaves(count: int) -> list[bytes]:
    return [leaf_hash(i.to_bytes(4, "little")) for i in range(count)]


def _by_definition(leaves: list[bytes]) -> bytes:
    """RFC 6962, 2.1, word for word."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + _by_definition(leaves[:k]) + _by_definition(leaves[k:])).digest()


@pytest.mark.parametrize("count", [*range(20), 31, 32, 33, 100, 257])
def test_root_is_that_of_the_rfc(count):
    assert merkle_root(_leaves(count)) == _by_definition(_leaves(count))


def test_root_of_the_rfc_6962_reference_leaves():
    """Leaves and roots of the test data in the certificate-transparency-go tree (eight leaves of growing length)."""
    data = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    leaves = [leaf_hash(bytes.fromhex(d)) for d in data]
    roots = {
        1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
        3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
        8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    }
    for count, root in roots.items():
        assert merkle_root(leaves[:count]).hex() == root


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 33])
def test_every_leaf_proves_its_place_and_no_other(count):
    leaves = _leaves(count)
    root = merkle_root(leaves)
    for index in range(count):
        proof = inclusion_proof(leaves, index)
        check_inclusion(leaves[index], index, count, proof, root)
        for other in range(count):
            if other != index:
                with pytest.raises(PeerFault, match="E_MERKLE_PROOF"):
                    check_inclusion(leaves[index], other, count, proof, root)


def test_malformed_proofs_are_refused():
    leaves = _leaves(5)
    root, proof = merkle_root(leaves), inclusion_proof(leaves, 3)
    for index, count, bad in [
        (-1, 5, proof), (5, 5, proof), (3, 3, proof), (3, 5, proof[:-1]), (3, 5, [*proof, proof[0]]), (3, 5, []),
        (3, 5, [proof[0][:31], *proof[1:]]), (3, 5, proof[::-1]), (3, 5, [proof[0]] * 60), (0, 0, []),
        (3, 2**40, proof),
    ]:
        with pytest.raises(PeerFault, match="E_MERKLE_PROOF"):
            check_inclusion(leaves[3], index, count, bad, root)
    with pytest.raises(IndexError):
        inclusion_proof(leaves, 5)


def test_a_doubled_last_leaf_has_another_root():
    """In trees that pad by doubling, n and n + 1 leaves can share a root (CVE-2012-2459)."""
    for count in range(1, 20):
        leaves = _leaves(count)
        assert merkle_root(leaves) != merkle_root([*leaves, leaves[-1]])
        assert counted_root(leaves) != counted_root([*leaves, leaves[-1]])


def test_a_node_does_not_pass_for_a_leaf():
    leaves = _leaves(4)
    left, right = merkle_root(leaves[:2]), merkle_root(leaves[2:])
    assert merkle_root([left, right]) == merkle_root(leaves)  # which is why the count is bound ...
    assert counted_root([left, right]) != counted_root(leaves)
    assert leaf_hash(leaves[0] + leaves[1]) != node_hash(leaves[0], leaves[1])  # ... and the domains are apart


def test_a_wrong_count_has_another_root():
    root = merkle_root(_leaves(4))
    assert len({bind_count(root, count) for count in range(100)}) == 100
    assert bind_count(root, 4) == counted_root(_leaves(4))
    assert counted_root([]) != merkle_root([])


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40), st.data())
def test_proofs_hold_for_any_leaves(leaves, data):
    index = data.draw(st.integers(0, len(leaves) - 1))
    check_inclusion(leaves[index], index, len(leaves), inclusion_proof(leaves, index), merkle_root(leaves))
