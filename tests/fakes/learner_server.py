"""A learner's coordinator as an HTTP server on loopback, for learners that are real processes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from protocol.api import AdmittedReply
from protocol.envelope import Envelope
from protocol.errors import PeerFault
from protocol.identity import Identity
from protocol.messages import AdmittedRequest, BatchPlan, CheckpointManifest, ScreenReport, UpdateReceipt
from protocol.store import DirectoryStore
from tests.fakes.learning import (
    LEARNER,
    FakeCoordinator,
    Speaker,
    admitted_group,
    load_model,
    make_model_dir,
    run_manifest,
    sampling_rules,
)

ROOT_KEY = Identity(b"r" * 32)
VERSIONS = 3


class Server(ThreadingHTTPServer):
    """The learner's side of the HTTP API over ``FakeCoordinator``."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.store = make_model_dir(folder / "model"), DirectoryStore(folder / "store")
        layout, _ = load_model(self.model)
        self.store.put(layout.to_bytes())  # as founding a run does
        self.manifest = run_manifest(layout, max_versions=VERSIONS)
        self.client = FakeCoordinator()
        self.lock = threading.Lock()
        self.stocked = threading.Event()

    def stock(self) -> None:
        """Admit groups of version 0 once its beacon is known."""
        speaker = Speaker(self.model, sampling_rules())
        beacon = CheckpointManifest.from_payload(self.client.manifests[0].payload).beacon
        groups = [
            admitted_group(speaker.group(g, beacon=beacon), self.store, beacon=beacon) for g in range(2 * VERSIONS)
        ]
        self.client.groups = groups
        self.stocked.set()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        with self.server.lock:
            if self.path == "/v1/run":
                self.answer(self.server.manifest.sign(ROOT_KEY).to_dict())

    def do_POST(self) -> None:
        envelope = Envelope.from_dict(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        client = self.server.client
        try:
            with self.server.lock:
                if self.path == "/v1/admitted":
                    groups = client.admitted(AdmittedRequest.open(envelope, LEARNER.public_key).limit)
                    self.answer(AdmittedReply(groups=groups).model_dump(mode="json"))
                    return
                if self.path == "/v1/checkpoints":
                    client.publish_checkpoint(envelope)
                elif self.path == "/v1/head":
                    client.publish_head(envelope)
                elif self.path == "/v1/batches":
                    client.post_batch(BatchPlan.open(envelope, LEARNER.public_key))
                elif self.path == "/v1/updates":
                    client.post_update(UpdateReceipt.open(envelope, LEARNER.public_key))
                elif self.path == "/v1/screens":
                    client.post_screen(ScreenReport.open(envelope, LEARNER.public_key))
        except PeerFault as error:
            self.answer(error.problem() | {"fault": "peer"}, status=error.status)
        else:
            self.answer({"duplicate": False})

    def answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the learner was killed while it waited
            self.close_connection = True


def arguments(server: Server, folder: Path, *more: str) -> list[str]:
    return [
        "run", "--coordinator", f"http://127.0.0.1:{server.server_port}", "--root", ROOT_KEY.public_key.hex(),
        "--key", str(folder / "learner.key"), "--store", f"dir:{server.store.path}", "--model", str(server.model),
        "--work", str(folder / "work"), "--log", str(folder / "learner.log"),
        "--set", "optim.lr=0.01", "--set", "process.poll_ms=50", *more,
    ]
