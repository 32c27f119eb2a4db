"""Sources of chunks: the contract over a directory and a web server, and what a hostile server can answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from protocol.errors import AssayError
from protocol.store import DirectoryStore
from protocol.weights.sources import ChunkSource, HttpSource, StoreSource, source_of
from tests.fakes.web import Mirror, Mode, serving
from tests.unit.store.source_contract import DATA, KEY, SIZE, SourceContract


class TestDirectory(SourceContract):
    @pytest.fixture
    def source(self, tmp_path: Path) -> ChunkSource:
        store = DirectoryStore(tmp_path)
        store.put(DATA)
        return source_of(store, "folder")


class TestMirror(SourceContract):
    @pytest.fixture(params=["honest", "no ranges"])
    def source(self, request: pytest.FixtureRequest) -> Iterator[ChunkSource]:
        with serving(Mirror({KEY: DATA}, request.param)) as mirror, closing(HttpSource.mirror(mirror.url)) as source:
            yield source


def test_a_directory_is_read_directly(tmp_path: Path) -> None:
    assert isinstance(source_of(DirectoryStore(tmp_path), "folder"), StoreSource)


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("absent", "E_NOT_FOUND"), ("broken", "E_UNREACHABLE"), ("refusing", "E_STORE"),
        ("truncated", "E_SOURCE_SHORT"), ("oversized", "E_TOO_LARGE"), ("bomb", "E_SOURCE_REPLY"),
        ("other range", "E_SOURCE_REPLY"), ("slow body", "E_SOURCE_SLOW"), ("no reply", "E_SOURCE_SLOW"),
    ],
)
def test_bad_answers_are_told_apart(mode: Mode, code: str) -> None:
    with serving(Mirror({KEY: DATA}, mode)) as mirror, closing(HttpSource.mirror(mirror.url, name="m")) as source:
        with pytest.raises(AssayError) as caught:
            source.fetch(KEY, 0, SIZE, 0.3 if code == "E_SOURCE_SLOW" else 30.0)
        assert caught.value.code == code
        # nothing is decompressed, and little beyond what was asked for is read
        assert mirror.served <= SIZE + 2**20


def test_a_cut_transfer_gives_what_came() -> None:
    with serving(Mirror({KEY: DATA}, "cut")) as mirror, closing(HttpSource.mirror(mirror.url)) as source:
        assert source.fetch(KEY, 100, SIZE, 30.0) == DATA[100 : 100 + (SIZE - 100) // 2]


def test_a_server_that_is_gone() -> None:
    with closing(HttpSource.mirror("http://127.0.0.1:9")) as source, pytest.raises(AssayError) as caught:
        source.fetch(KEY, 0, SIZE, 5.0)
    assert caught.value.code == "E_UNREACHABLE"


def test_a_mirror_cannot_send_us_elsewhere() -> None:
    import httpx

    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(307, headers={"location": "http://10.0.0.1/secret"})

    from protocol.store import PresignedRequest

    with closing(HttpSource(
        "m", lambda key: PresignedRequest("GET", f"http://m/{key}", {}), transport=httpx.MockTransport(answer)
    )) as source:
        with pytest.raises(AssayError) as caught:
            source.fetch(KEY, 0, SIZE, 5.0)
        assert caught.value.code == "E_STORE"
    assert len(asked) == 1
