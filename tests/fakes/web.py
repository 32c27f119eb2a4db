"""A real web server of objects on loopback that can misbehave in every way a hostile mirror might."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Mode = Literal[
    "honest", "no ranges", "absent", "broken", "refusing", "truncated", "cut", "swapped", "flipped", "oversized",
    "bomb", "other range", "no reply", "slow body", "slow headers",
]

#: 16 MiB of zeros, which is what a client that unpacks it would hold.
BOMB = gzip.compress(bytes(2**24))


class Mirror:
    """Serves ``/ab/abcdef...`` out of ``objects``; ``served`` counts the bytes of bodies, ``asked`` the requests."""

    def __init__(self, objects: dict[str, bytes], mode: Mode = "honest"):
        self.objects, self.mode = objects, mode
        self.served = 0
        self.on_served: Callable[[int], None] = lambda served: None  #: told after every 16 KiB of a body
        self.asked: list[tuple[str, str | None]] = []
        self.closing = threading.Event()
        self.url = ""
        self._lock = threading.Lock()

    def count(self, nbytes: int) -> None:
        """So many more bytes were served; connections have threads of their own."""
        with self._lock:
            self.served += nbytes


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mirror: Mirror

    def log_message(self, *args: Any) -> None:
        return None

    def do_GET(self) -> None:
        key, wanted = self.path.rsplit("/", 1)[-1], self.headers.get("Range")
        mirror = self.mirror
        mirror.asked.append((key, wanted))
        data = mirror.objects.get(key)
        mode = mirror.mode
        if data is None or mode == "absent":
            self._send(404, b"")
        elif mode == "broken":
            self._send(503, b"")
        elif mode == "refusing":
            self._send(403, b"")
        elif mode == "no reply":
            mirror.closing.wait(30)
        elif mode == "slow headers":
            self._drip(b"HTTP/1.1 206 Partial Content\r\nX-Slow: " + b"x" * 4096)
        else:
            self._serve(mode, self._damage(mode, key, data), wanted)

    def _damage(self, mode: Mode, key: str, data: bytes) -> bytes:
        if mode == "truncated":
            return data[: len(data) // 2]
        if mode == "flipped":
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        if mode == "swapped":
            others = [other for name, other in sorted(self.mirror.objects.items()) if name != key]
            other = next((other for other in others if len(other) >= len(data)), b"\0" * len(data))
            return other[: len(data)]
        return data

    def _serve(self, mode: Mode, data: bytes, wanted: str | None) -> None:
        if wanted is None or mode == "no ranges":
            self._send(200, data)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1 if last else len(data), len(data))
        if start >= len(data):
            self._send(416, b"")
            return
        part, span = data[start:end], f"bytes {start}-{end - 1}/{len(data)}"
        if mode == "bomb":
            self._send(206, BOMB, span, encoding="gzip")
        elif mode == "other range":
            self._send(206, part, f"bytes {start + 1}-{end}/{len(data)}")
        elif mode == "oversized":
            self._send(206, part + bytes(2**20), span)
        elif mode == "slow body":
            self._head(206, len(part), span)
            self._drip(part)
        elif mode == "cut":
            self._head(206, len(part), span)
            self._write(part[: (len(part) + 1) // 2])
            self.close_connection = True
        else:
            self._send(206, part, span)

    def _head(self, status: int, length: int, span: str | None = None, encoding: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if span is not None:
            self.send_header("Content-Range", span)
        if encoding is not None:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()

    def _send(self, status: int, data: bytes, span: str | None = None, encoding: str | None = None) -> None:
        self._head(status, len(data), span, encoding)
        self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            for at in range(0, len(data), 2**14):
                piece = data[at : at + 2**14]
                self.mirror.count(len(piece))  # first: who has all the bytes finds them counted
                self.wfile.write(piece)
                self.mirror.on_served(self.mirror.served)
        except OSError:
            self.mirror.count(-len(piece))
            self.close_connection = True

    def _drip(self, data: bytes) -> None:
        """A byte now and then, until the client has gone or the server closes."""
        self.close_connection = True
        for at in range(len(data)):
            self._write(data[at : at + 1])
            if self.mirror.closing.wait(0.05):
                return


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error here."""


@contextmanager
def serving(mirror: Mirror) -> Iterator[Mirror]:
    """``mirror`` on a free port, until the end of the block."""
    handler = type("Handler", (_Handler,), {"mirror": mirror})
    with _Server(("127.0.0.1", 0), handler) as server:
        mirror.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield mirror
        finally:
            mirror.closing.set()
            server.shutdown()
            thread.join()
