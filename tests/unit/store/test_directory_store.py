"""The directory store: the contract, and what a crash or a bad disk does to it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.errors import LocalFault
from protocol.store import CachedFetch, DirectoryStore, Store
from tests.unit.store.store_contract import StoreContract

DATA = b"some object" * 1000
KEY = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


class TestContract(StoreContract):
    """The common contract."""

    def test_there_is_nothing_to_presign(self, store: Store) -> None:
        assert store.presign_put(KEY, 1, 60) is None
        assert store.presign_get(KEY, 60) is None


def _file(store: DirectoryStore) -> Path:
    return store.path / KEY[:2] / KEY


def test_objects_are_durable_before_they_get_their_name(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        events.append("sync " + str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(store.path)))
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    store.put(DATA)
    assert events[0].startswith("sync tmp/")
    assert events[1:] == ["rename", f"sync {KEY[:2]}", "sync ."]


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_before_the_rename_leaves_nothing(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def dies(*args: object) -> None:
        raise _Killed

    monkeypatch.setattr(os if step == "fsync" else Path, step, dies)
    with pytest.raises(_Killed):
        store.put(DATA)
    monkeypatch.undo()
    assert not store.has(KEY)
    assert not list((store.path / "tmp").iterdir())
    assert store.put(DATA) == KEY


_WRITER = """
import os, sys
from pathlib import Path
from protocol.store import DirectoryStore
store = DirectoryStore(Path(sys.argv[1]))
real = os.fsync
def dying(descriptor):
    real(descriptor)
    os.kill(os.getpid(), 9)
os.fsync = dying
store.put(b"some object" * 1000)
"""


def test_a_killed_writer_leaves_no_object(store: DirectoryStore, root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _WRITER, str(store.path)], cwd=root, check=False, timeout=200)
    assert done.returncode == -9
    assert len(list((store.path / "tmp").iterdir())) == 1
    assert not store.has(KEY)
    assert store.put(DATA) == KEY
    assert store.get(KEY) == DATA


@pytest.mark.parametrize("content", [b"", DATA[:-1], DATA[:-1] + b"X"])
def test_damaged_files_are_never_served_and_are_healed_by_a_put(store: DirectoryStore, content: bytes) -> None:
    store.put(DATA)
    _file(store).unlink()
    _file(store).write_bytes(content)
    with pytest.raises(LocalFault) as caught:
        store.get(KEY)
    assert caught.value.code == "E_OBJECT_HASH"
    store.put(DATA)
    assert store.get(KEY) == DATA


def test_objects_cannot_be_written_to(store: DirectoryStore) -> None:
    store.put(DATA)
    assert _file(store).stat().st_mode & 0o777 == 0o444


def test_many_writers_of_one_object(store: DirectoryStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: store.put(DATA), range(40))) == {KEY}
    assert store.get(KEY) == DATA
    assert not list((store.path / "tmp").iterdir())


def test_a_place_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LocalFault) as caught:
        DirectoryStore(tmp_path / "file")
    assert caught.value.code == "E_STORE"


def test_a_full_or_failing_disk(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(DATA)

    def fails(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    for target, name, call in (
        (os, "fsync", lambda: store.put(b"new")),
        (Path, "read_bytes", lambda: store.get(KEY)),
        (Path, "unlink", lambda: store.delete(KEY)),
        (Path, "stat", lambda: store.size(KEY)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fails)
            with pytest.raises(LocalFault) as caught:
                call()
        assert caught.value.code == "E_STORE"
    assert store.get(KEY) == DATA


def test_cached_fetch_heals_its_cache(store: DirectoryStore) -> None:
    asked: list[str] = []
    fetch = CachedFetch(store, lambda sha256: asked.append(sha256) or DATA)  # type: ignore[func-returns-value]
    assert fetch(KEY) == fetch(KEY) == DATA
    _file(store).unlink()
    _file(store).write_bytes(b"torn")
    assert fetch(KEY) == fetch(KEY) == DATA
    assert asked == [KEY, KEY]


def test_cached_fetch_passes_wrong_bytes_on_and_forgets_them(store: DirectoryStore) -> None:
    assert CachedFetch(store, lambda _: b"wrong")(KEY) == b"wrong"
    assert not store.has(KEY)
    assert not store.has(hashlib.sha256(b"wrong").hexdigest())


def test_reading_makes_nothing(tmp_path: Path) -> None:
    """An auditor's mirror stays as it is, and may be one that cannot be written to."""
    data = b"mirrored"
    sha256 = DirectoryStore(tmp_path).put(data)
    (tmp_path / "tmp").rmdir()
    before = sorted(tmp_path.rglob("*"))
    store = DirectoryStore(tmp_path)
    assert (store.get(sha256), store.has("0" * 64), store.announced("0" * 64)) == (data, False, None)
    assert sorted(tmp_path.rglob("*")) == before
    assert store.put(b"more") == hashlib.sha256(b"more").hexdigest()
