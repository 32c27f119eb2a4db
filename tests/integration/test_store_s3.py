"""The S3 store against a real service: the contract, presigned requests and what a tamperer can do with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import httpx
import pytest
from botocore.config import Config

from protocol.errors import LocalFault, Transient
from protocol.store import PresignedRequest, open_store
from protocol.store_s3 import S3Store
from protocol.weights.cache import ChunkCache
from protocol.weights.pool import SourcePool
from protocol.weights.sources import ChunkSource, HttpSource, StoreSource, source_of
from tests.fakes.checkpoints import FakeLearner, same_bits
from tests.fakes.seaweedfs import ACCESS_KEY, BUCKET, SECRET_KEY, S3Service, s3_service
from tests.unit.store.source_contract import DATA as SOURCE_DATA
from tests.unit.store.source_contract import KEY as SOURCE_KEY
from tests.unit.store.source_contract import SourceContract
from tests.unit.store.store_contract import StoreContract

DATA = bytes(range(256)) * 64
KEY = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    with s3_service(tmp_path_factory.mktemp("s3")) as service:
        yield service


@pytest.fixture(scope="module")
def store(service: S3Service) -> Iterator[S3Store]:
    store = S3Store(
        BUCKET, prefix="run/1", endpoint=service.endpoint, access_key=ACCESS_KEY, secret_key=SECRET_KEY
    )
    yield store
    store.close()


class TestContract(StoreContract):
    """The common contract."""


def send(request: PresignedRequest | None, data: bytes = b"", **headers: str) -> httpx.Response:
    assert request is not None
    return httpx.request(
        request.method, request.url, headers={**request.headers, **headers}, content=data or None, timeout=30
    )


def test_presigned_put_and_get(store: S3Store) -> None:
    store.delete(KEY)
    assert send(store.presign_put(KEY, len(DATA), 60), DATA).status_code == 200
    assert store.get(KEY) == DATA
    assert send(store.presign_put(KEY, len(DATA), 60), DATA).is_success
    whole = send(store.presign_get(KEY, 60))
    assert (whole.status_code, whole.content) == (200, DATA)
    part = send(store.presign_get(KEY, 60), Range="bytes=10-19")
    assert (part.status_code, part.content) == (206, DATA[10:20])


def test_a_presigned_put_takes_only_the_object_it_is_for(store: S3Store) -> None:
    store.delete(KEY)
    request = store.presign_put(KEY, len(DATA), 60)
    assert request is not None
    other = DATA[:-1] + b"X"
    assert send(request, other).status_code == 400
    other_sum = {"x-amz-checksum-sha256": store.presign_put("00" * 32, 1, 60).headers["x-amz-checksum-sha256"]}  # type: ignore[union-attr]
    assert send(request, other, **other_sum).status_code in (400, 403)
    assert send(request, DATA + b"more", **{"Content-Length": str(len(DATA) + 4)}).status_code in (400, 403)
    elsewhere = request.url.replace(KEY, "cd" * 32)
    assert httpx.put(elsewhere, headers=request.headers, content=DATA, timeout=30).status_code == 403
    longer = request.url.replace("X-Amz-Expires=60", "X-Amz-Expires=600000")
    assert longer != request.url
    assert httpx.put(longer, headers=request.headers, content=DATA, timeout=30).status_code == 403
    assert not store.has(KEY)
    assert not store.has("cd" * 32)


def test_nothing_is_public(store: S3Store, service: S3Service) -> None:
    store.put(DATA)
    url = f"{service.endpoint}/{BUCKET}/run/1/{KEY[:2]}/{KEY}"
    assert httpx.get(url, timeout=30).status_code == 403
    assert httpx.put(url, content=b"x", timeout=30).status_code == 403
    request = store.presign_get(KEY, 60)
    assert request is not None
    assert httpx.put(request.url, content=b"x", timeout=30).status_code == 403


def test_bytes_damaged_in_the_service_are_never_served(store: S3Store, service: S3Service) -> None:
    store.put(DATA)
    client = boto3.client(
        "s3", endpoint_url=service.endpoint, region_name="us-east-1", aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY, config=Config(signature_version="s3v4"),
    )
    client.put_object(Bucket=BUCKET, Key=f"run/1/{KEY[:2]}/{KEY}", Body=DATA[:-1] + b"X")
    client.close()
    with pytest.raises(LocalFault) as caught:
        store.get(KEY)
    assert caught.value.code == "E_OBJECT_HASH"
    store.delete(KEY)


def test_many_writers_of_one_object(store: S3Store) -> None:
    store.delete(KEY)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: store.put(DATA), range(24))) == {KEY}
    assert store.get(KEY) == DATA


def test_wrong_credentials_and_wrong_bucket_are_our_fault(service: S3Service) -> None:
    for bucket, secret in ((BUCKET, "wrong"), ("no-such-bucket", SECRET_KEY)):
        store = S3Store(bucket, endpoint=service.endpoint, access_key=ACCESS_KEY, secret_key=secret)
        with pytest.raises(LocalFault) as caught:
            store.get(KEY)
        assert caught.value.code == "E_STORE"
        assert caught.value.hint
        store.close()


def test_a_service_that_is_gone_is_transient() -> None:
    store = S3Store(BUCKET, endpoint="http://127.0.0.1:9", access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    with pytest.raises(Transient) as caught:
        store.has(KEY)
    assert caught.value.code == "E_UNREACHABLE"
    store.close()


def test_a_chain_of_checkpoints_over_s3(
    service: S3Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert urlsplit(service.endpoint).hostname == "127.0.0.1"
    store = open_store(f"s3://{BUCKET}/chain?endpoint={service.endpoint}&region=us-east-1")
    assert isinstance(store, S3Store)
    learner = FakeLearner(store)
    learner.publish_many(4)
    follower = learner.follower()
    assert follower.catch_up(learner.head(), learner.clock.now_ms())
    assert same_bits(follower.state, learner.states[3])
    store.close()


class TestSource(SourceContract):
    """The contract of sources, presigned and with the store's own client."""

    @pytest.fixture(params=["presigned", "client"])
    def source(self, request: pytest.FixtureRequest, store: S3Store) -> Iterator[ChunkSource]:
        store.put(SOURCE_DATA)
        if request.param == "client":
            yield StoreSource("s3", store)
            return
        source = source_of(store, "s3")
        assert isinstance(source, HttpSource)
        with closing(source):
            yield source


def test_an_expired_or_forged_request_is_refused_and_nobody_is_blamed(store: S3Store, tmp_path: Path) -> None:
    store.put(SOURCE_DATA)

    def forged(key: str) -> PresignedRequest:
        request = store.presign_get(key, 60)
        assert request is not None
        return PresignedRequest("GET", request.url.replace("X-Amz-Signature=", "X-Amz-Signature=00"), {})

    with closing(HttpSource("forged", forged)) as bad, closing(HttpSource.presigned("s3", store)) as good:
        with pytest.raises(LocalFault) as caught:
            bad.fetch(SOURCE_KEY, 0, 10, 30.0)
        assert caught.value.code == "E_STORE"
        pool = SourcePool([bad, good], ChunkCache(tmp_path))
        assert pool.fetch(SOURCE_KEY, len(SOURCE_DATA)) == SOURCE_DATA
        assert [score.dropped for score in pool.scores()] == [None, None]
