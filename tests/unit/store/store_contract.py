"""What every store must do; run over the directory store here and over a real S3 service in the integration tests."""

from __future__ import annotations

import hashlib

import pytest

from protocol.errors import AssayError, LocalFault, PeerFault
from protocol.store import Store

ABSENT = "ab" * 32


class StoreContract:
    """Subclasses give a ``store`` fixture."""

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000], ids=["empty", "one byte", "a megabyte"])
    def test_what_was_put_is_got(self, store: Store, data: bytes) -> None:
        sha256 = store.put(data)
        assert sha256 == hashlib.sha256(data).hexdigest()
        assert store.get(sha256) == data
        assert store.has(sha256)
        assert store.size(sha256) == len(data)

    def test_put_is_idempotent(self, store: Store) -> None:
        assert store.put(b"twice") == store.put(b"twice")
        assert store.get(hashlib.sha256(b"twice").hexdigest()) == b"twice"

    def test_absent_objects(self, store: Store) -> None:
        assert not store.has(ABSENT)
        for call in (store.get, store.size):
            with pytest.raises(LocalFault) as caught:
                call(ABSENT)
            assert caught.value.code == "E_NOT_FOUND"
        store.delete(ABSENT)

    @pytest.mark.parametrize(("start", "end"), [(0, 10), (3, 7), (0, 3), (7, 99), (10, 12), (99, 120), (4, 4)])
    def test_parts_are_what_slices_are(self, store: Store, start: int, end: int) -> None:
        sha256 = store.put(b"0123456789")
        assert store.read(sha256, start, end) == b"0123456789"[start:end]
        with pytest.raises(LocalFault) as caught:
            store.read(ABSENT, 0, 1)
        assert caught.value.code == "E_NOT_FOUND"

    def test_announcements_are_replaced_and_are_no_objects(self, store: Store) -> None:
        assert store.announced(ABSENT) is None
        for data in (b"first", b"", b"second"):
            store.announce(ABSENT, data)
            assert store.announced(ABSENT) == data
        assert not store.has(ABSENT)
        with pytest.raises(LocalFault):
            store.announce("../../etc/passwd", b"")

    def test_deleted_objects_are_gone_and_can_come_back(self, store: Store) -> None:
        sha256 = store.put(b"to be deleted")
        store.delete(sha256)
        assert not store.has(sha256)
        assert store.put(b"to be deleted") == sha256
        assert store.has(sha256)

    def test_readers_bound_the_size(self, store: Store) -> None:
        sha256 = store.put(b"0123456789")
        assert store.get(sha256, 10) == b"0123456789"
        with pytest.raises(PeerFault) as caught:
            store.get(sha256, 9)
        assert caught.value.code == "E_TOO_LARGE"

    @pytest.mark.parametrize("key", ["", "../../etc/passwd", "AB" * 32, "ab" * 31, "ab" * 32 + "/", "zz" * 32])
    def test_only_hashes_are_names(self, store: Store, key: str) -> None:
        for call in (store.get, store.size, store.has, store.delete):
            with pytest.raises(AssayError) as caught:
                call(key)
            assert caught.value.code == "E_NOT_FOUND"
