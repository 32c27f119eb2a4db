"""Sources of chunks: anything that hands out bytes of an object by hash. None of them is trusted.

A source returns parts, and a part has no hash; whether they were right is known when the chunk is whole
(:mod:`protocol.weights.pool`). Spec: ``docs/spec/store.md``, "Reading from a source one does not trust".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Protocol

import httpx

from protocol.clock import Clock, SystemClock
from protocol.errors import E_STORE, E_TOO_LARGE, E_UNREACHABLE, AssayError, LocalFault, PeerFault, Transient, code
from protocol.store import PresignedRequest, Store, check_key, missing, open_store

E_SOURCE_SLOW = code("E_SOURCE_SLOW", "a source of weights did not deliver a part before its deadline")
E_SOURCE_SHORT = code("E_SOURCE_SHORT", "a source of weights holds a shorter object than the signed manifest names")
E_SOURCE_REPLY = code("E_SOURCE_REPLY", "a source of weights answered something else than the bytes asked for")

#: Longest wait for a connection, in seconds.
_CONNECT_S: Final = 5.0
#: How long a presigned request is good for, in seconds.
_PRESIGNED_S: Final = 600
#: Never asked for through the proxy that the environment may name.
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(?:\d{1,18}|\*)")


class ChunkSource(Protocol):
    """Where parts of objects come from. ``fetch`` is called from any thread, several at a time."""

    name: str  #: how a human tells it from others; unique in a pool

    def fetch(self, key: str, start: int, end: int | None, deadline_s: float) -> bytes:
        """Bytes ``start`` to ``end`` (None: to the end) of the object with SHA-256 ``key``, within ``deadline_s``.

        Fewer bytes, but at least one, mean that the transfer was cut and may be resumed. The bytes need not be right.

        Raises:
            LocalFault: ``E_NOT_FOUND`` when it does not have the object; other codes when it will not serve us.
            Transient: it cannot serve now; ``E_SOURCE_SLOW`` when the deadline passed.
            PeerFault: it breaks a rule (``E_SOURCE_SHORT``, ``E_TOO_LARGE``, ``E_SOURCE_REPLY``) and is not to be
                asked again.
        """
        ...


class StoreSource:
    """An object store of ours, or a folder somebody else fills. Directories answer at once or not at all."""

    def __init__(self, name: str, store: Store):
        self.name, self._store = name, store

    def fetch(self, key: str, start: int, end: int | None, deadline_s: float) -> bytes:
        """See :meth:`ChunkSource.fetch`."""
        stop = self._store.size(key) if end is None else end
        data = self._store.read(key, start, stop)
        if len(data) < stop - start:
            raise _short(self.name, key, stop, start + len(data))
        return data


class HttpSource:
    """Objects behind HTTP with ranges: presigned requests, a static mirror, or the coordinator.

    Args:
        name: how it is named in reports.
        locate: the request that reads an object.
        follow_redirects: only for a source that was pinned by hand, such as the coordinator.
        transport: replaces the network (tests).
    """

    def __init__(
        self, name: str, locate: Callable[[str], PresignedRequest], *, follow_redirects: bool = False,
        proxies: bool = True, transport: httpx.BaseTransport | None = None, clock: Clock | None = None,
    ):
        self.name, self._locate, self._clock = name, locate, clock or SystemClock()
        self._http = httpx.Client(
            transport=transport, follow_redirects=follow_redirects, trust_env=proxies,
            limits=httpx.Limits(max_connections=16, max_keepalive_connections=8),
        )

    @classmethod
    def mirror(cls, base_url: str, *, name: str | None = None) -> HttpSource:
        """A web server that serves a directory store as it lies: ``BASE/ab/abcdef...``."""
        base = base_url.rstrip("/")
        return cls(
            name or base, lambda key: PresignedRequest("GET", f"{base}/{key[:2]}/{check_key(key)}", {}),
            proxies=_may_proxy(base),
        )

    @classmethod
    def coordinator(cls, base_url: str, *, name: str = "coordinator") -> HttpSource:
        """A coordinator, which serves objects itself or redirects to its store."""
        base = base_url.rstrip("/")
        return cls(
            name, lambda key: PresignedRequest("GET", f"{base}/v1/objects/{check_key(key)}", {}),
            follow_redirects=True, proxies=_may_proxy(base),
        )

    @classmethod
    def presigned(cls, name: str, store: Store) -> HttpSource:
        """A store that presigns: unlike its own client, requests then end at the deadline."""

        def locate(key: str) -> PresignedRequest:
            request = store.presign_get(key, _PRESIGNED_S)
            if request is None:
                raise LocalFault(E_STORE, f"{name} does not presign requests", hint="read it as a directory")
            return request

        probe = store.presign_get("00" * 32, _PRESIGNED_S)
        return cls(name, locate, proxies=probe is None or _may_proxy(probe.url))

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def fetch(self, key: str, start: int, end: int | None, deadline_s: float) -> bytes:
        """See :meth:`ChunkSource.fetch`."""
        deadline = self._clock.monotonic() + deadline_s
        request = self._locate(key)
        headers = {**request.headers, "Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        timeout = httpx.Timeout(deadline_s, connect=min(_CONNECT_S, deadline_s))
        got = bytearray()
        try:
            with self._http.stream(request.method, request.url, headers=headers, timeout=timeout) as response:
                skip = self._check(response, key, start, end)
                self._read(response, got, skip, None if end is None else end - start, deadline)
        except httpx.TimeoutException as error:
            raise self._slow(key, error) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            if not got:
                raise Transient(E_UNREACHABLE, f"{self.name} does not answer", got=_words(error)) from None
            return bytes(got)
        if end is not None and len(got) < end - start:
            raise _short(self.name, key, end, start + len(got))
        return bytes(got)

    def _check(self, response: httpx.Response, key: str, start: int, end: int | None) -> int:
        """Whether the answer may be read; how many bytes of it lie before ``start``."""
        if response.status_code not in (200, 206):
            raise self._refusal(response, key, start, end)
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise PeerFault(
                E_SOURCE_REPLY, f"{self.name} compresses what was asked for as it is", expected="identity", got=encoding
            )
        if response.status_code == 200:
            return start
        span = response.headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(span)
        if match is None or int(match[1]) != start or (end is not None and int(match[2]) >= end):
            raise PeerFault(
                E_SOURCE_REPLY, f"{self.name} sends another range", expected=f"bytes {start}-", got=span[:80]
            )
        return 0

    def _read(
        self, response: httpx.Response, got: bytearray, skip: int, wanted: int | None, deadline: float
    ) -> None:
        """Append to ``got`` what comes after ``skip`` bytes; never more than ``wanted``."""
        for part in response.iter_raw():
            if self._clock.monotonic() > deadline:
                raise self._slow(response.url.path, f"{len(got)} bytes")
            used = part[skip:]
            skip = max(0, skip - len(part))
            got += used
            if wanted is not None and len(got) > wanted:
                if response.status_code == 200:  # ranges are not served here: the rest of the object may follow
                    del got[wanted:]
                    return
                raise PeerFault(E_TOO_LARGE, f"{self.name} sends more than was asked for", expected=wanted)

    def _refusal(self, response: httpx.Response, key: str, start: int, end: int | None) -> AssayError:
        status = response.status_code
        if status in (404, 410):
            return missing(key)
        if status == 416:
            return _short(self.name, key, start + 1 if end is None else end, start)
        if status in (408, 425, 429) or status >= 500:
            error = Transient(E_UNREACHABLE, f"{self.name} cannot serve now", got=f"status {status}")
            after = response.headers.get("retry-after", "")
            error.retry_after_s = float(after) if after.isdecimal() and len(after) < 6 else 0.0
            return error
        return LocalFault(E_STORE, f"{self.name} refuses to serve {key[:16]}", got=f"status {status}")

    def _slow(self, key: str, got: object) -> Transient:
        return Transient(E_SOURCE_SLOW, f"{self.name} did not deliver in time", got=got, expected=key[-64:])


def source_of(store: Store, name: str) -> ChunkSource:
    """The best way to read a store in parts: presigned over HTTP where it presigns, else directly."""
    if store.presign_get("00" * 32, _PRESIGNED_S) is None:
        return StoreSource(name, store)
    return HttpSource.presigned(name, store)


def source_at(url: str) -> ChunkSource:
    """The source at an address: ``http(s)://`` a mirror, ``dir:PATH`` or ``s3://BUCKET/PREFIX`` a store.

    Raises:
        LocalFault: ``E_STORE_URL``, ``E_STORE``.
    """
    if url.startswith(("http://", "https://")):
        return HttpSource.mirror(url)
    return source_of(open_store(url), url.partition("?")[0])


def _may_proxy(url: str) -> bool:
    return httpx.URL(url).host not in _LOOPBACK


def _short(name: str, key: str, expected: int, got: int) -> PeerFault:
    return PeerFault(
        E_SOURCE_SHORT, f"{name} has too little of object {key[:16]}", expected=f">= {expected} bytes", got=got
    )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
