"""The reading side of a coordinator over real HTTP, for what somebody with the root key alone can do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from protocol.envelope import Envelope
from protocol.identity import Identity
from protocol.messages import (
    AuditPolicy,
    BatchRules,
    Environment,
    ModelSpec,
    Profile,
    Roles,
    RunManifest,
    SamplingRules,
)
from tests.fakes.checkpoints import RUN_ID, FakeLearner

ROOT = Identity(bytes(range(32)))


def manifest_of(learner: FakeLearner, files: dict[str, str] | None = None, max_lag_versions: int = 2) -> RunManifest:
    """A run of ``learner``'s weights."""
    key = learner.identity.public_key.hex()
    return RunManifest(
        run_id=RUN_ID, name="a run", created_at_ms=0, expires_at_ms=2**50,
        model=ModelSpec(
            name="tiny", layout_sha256=learner.layout.sha256, files=files or {}, state_hash=learner.state_hash
        ),
        environments=[Environment(name="sort", kind="sort")],
        sampling=SamplingRules(eos_token_ids=[1], vocab_size=64),
        batch=BatchRules(
            groups_per_batch=1, group_size=2, samples_per_lease=1, max_lag_versions=max_lag_versions
        ),
        audit=AuditPolicy(), profiles=[Profile(name="p", max_mean_kl_nano=1, max_token_kl_micro=1, max_margin_micro=1)],
        roles=Roles(coordinator=key, learner=key, verifiers=[key]),
    )


class Office:
    """What is served; tests change it."""

    def __init__(self, learner: FakeLearner, run: RunManifest):
        self.learner, self.run, self.signer = learner, run, ROOT
        self.oldest_version_needed: Any = 0
        self.served = 0
        self.url = ""

    def answer(self, path: str, query: dict[str, list[str]]) -> bytes | None:
        learner, name = self.learner, path.rsplit("/", 1)[-1]
        if path == "/v1/run":
            return _json(self.run.sign(self.signer))
        if path == "/v1/head":
            return _json(learner.head())
        if path == "/v1/status":
            return json.dumps({"oldest_version_needed": self.oldest_version_needed}).encode()
        if path == "/v1/checkpoints":
            found = learner.list_manifests(int(query["from"][0]), int(query["to"][0]))
            return json.dumps({"manifests": [envelope.to_dict() for envelope in found]}).encode()
        if path.startswith("/v1/skips/"):
            return learner.store.announced(name)
        return learner.store.get(name) if learner.store.has(name) else None


def _json(envelope: Envelope) -> bytes:
    return json.dumps(envelope.to_dict()).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    office: Office

    def log_message(self, *args: Any) -> None:
        return None

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        data = self.office.answer(parts.path, parse_qs(parts.query))
        status, wanted = 200, self.headers.get("Range")
        if data is None:
            status, data = 404, json.dumps({"code": "E_NOT_FOUND", "fault": "local", "detail": "no"}).encode()
        elif wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            size, status = len(data), 206
            data = data[int(first) : int(last) + 1]
            self.office.served += len(data)
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


@contextmanager
def open_office(office: Office) -> Iterator[Office]:
    """``office`` on a free port, until the end of the block."""
    with _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"office": office})) as server:
        office.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield office
        finally:
            server.shutdown()
            thread.join()
