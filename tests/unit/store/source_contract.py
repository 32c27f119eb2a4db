"""What every source of chunks must do; run over a directory and a web server here, over a real S3 service elsewhere."""

from __future__ import annotations

import hashlib

import pytest

from protocol.errors import LocalFault, PeerFault
from protocol.weights.sources import ChunkSource

DATA = bytes(range(256)) * 40
KEY = hashlib.sha256(DATA).hexdigest()
ABSENT = "ab" * 32
SIZE = len(DATA)


class SourceContract:
    """Subclasses give a ``source`` fixture that holds ``DATA``."""

    @pytest.mark.parametrize(
        ("start", "end"), [(0, None), (0, SIZE), (0, 1), (5, 9), (SIZE - 1, SIZE), (SIZE // 2, None), (1, SIZE)]
    )
    def test_parts(self, source: ChunkSource, start: int, end: int | None) -> None:
        assert source.fetch(KEY, start, end, 30.0) == DATA[start:end]

    @pytest.mark.parametrize(("start", "end"), [(0, SIZE + 1), (SIZE - 3, SIZE + 3), (SIZE, SIZE + 1)])
    def test_an_object_that_is_too_short_is_told(self, source: ChunkSource, start: int, end: int) -> None:
        with pytest.raises(PeerFault) as caught:
            source.fetch(KEY, start, end, 30.0)
        assert caught.value.code == "E_SOURCE_SHORT"
        assert source.name in caught.value.message

    @pytest.mark.parametrize("key", [ABSENT, "../../etc/passwd", "zz" * 32])
    def test_what_is_not_there(self, source: ChunkSource, key: str) -> None:
        with pytest.raises(LocalFault) as caught:
            source.fetch(key, 0, 10, 30.0)
        assert caught.value.code == "E_NOT_FOUND"
