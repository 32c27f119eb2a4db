"""Addresses of stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import LocalFault
from protocol.store import DirectoryStore, open_store
from protocol.store_s3 import S3Store


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in ((f"dir:{tmp_path}/a", tmp_path / "a"), ("dir:b/c", Path("b/c"))):
        with pytest.raises(LocalFault, match="no such object store"):
            open_store(url)
        assert not path.exists()
        store = open_store(url, make=True)
        assert isinstance(store, DirectoryStore)
        assert store.path == path
        assert path.is_dir()
        assert isinstance(open_store(url), DirectoryStore)


@pytest.mark.parametrize(
    ("url", "bucket", "prefix", "endpoint"),
    [
        ("s3://weights", "weights", "", "https://s3.eu-north-1.amazonaws.com"),
        ("s3://weights/run/1/?endpoint=http://127.0.0.1:8333", "weights", "run/1/", "http://127.0.0.1:8333"),
    ],
)
def test_s3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, bucket: str, prefix: str, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    store = open_store(url)
    assert isinstance(store, S3Store)
    assert (store._bucket, store._prefix, store._client.meta.endpoint_url) == (bucket, prefix, endpoint)
    store.close()


@pytest.mark.parametrize(
    "url",
    ["", "/var/store", "dir:", "dir://host/path", "file:///x", "s3://", "s3:///prefix", "s3://user:pass@bucket",
     "s3://bucket:80", "s3://bucket?key=secret", "s3://bucket#x", "s3://bucket?endpoint=http://[::"],
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(LocalFault) as caught:
        open_store(url)
    assert caught.value.code in ("E_STORE_URL", "E_STORE")
    assert caught.value.expected or caught.value.got


def test_an_unknown_profile_is_our_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(LocalFault) as caught:
        open_store("s3://bucket?profile=nobody")
    assert caught.value.code == "E_STORE"
