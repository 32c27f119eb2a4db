"""Bytes that leave the learner's store when 1, 2, 4 and 8 nodes fetch one anchor and ten diffs, with and without peers.

Every node is a process that follows the checkpoints for real (chunks by hash, states by root). The store is an HTTP
server that counts what it sends. The same fetch is measured over plain HTTP beside it, round by round.
"""

from __future__ import annotations

import harness

harness.pin_threads()

# ruff: noqa: E402
import hashlib
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from protocol.clock import SystemClock
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, LocalFault
from protocol.identity import Identity
from protocol.messages import CheckpointManifest
from protocol.store import DirectoryStore
from protocol.swarm.swarm import installed
from protocol.weights.cache import ChunkCache
from protocol.weights.chain import CheckpointFollower, publish
from protocol.weights.layout import Layout, State
from protocol.weights.pool import SourcePool
from protocol.weights.sources import HttpSource

RUN_ID: Final = "5a" * 16
LEARNER: Final = Identity(hashlib.sha256(b"benchmark learner").digest())
COUNTS: Final = (1, 2, 4, 8)
DIFFS: Final = 10
DENSITY: Final = 0.01
#: The line of a learner at home, for the last comparison, in megabytes per second.
UPLINK_MB_S: Final = 10.0
_WAIT_S: Final = 120.0


# -- what is published -----------------------------------------------------------------------------------


def make_checkpoints(folder: Path, megabytes: float, seed: int) -> tuple[list[Envelope], Layout]:
    """An anchor and ten diffs of a made-up bf16 model, in a directory store."""
    rng = np.random.default_rng(seed)
    rows = max(1, int(megabytes * 2**20 / 2 / 1024))
    layout = Layout.of({"weight": ("BF16", (rows, 1024))})
    values = rng.normal(0, 0.02, (rows, 1024)).astype(np.float32)
    state: State = {"weight": (values.view(np.uint32) >> 16).astype(np.uint16)}
    store, clock = DirectoryStore(folder), SystemClock()
    envelopes: list[Envelope] = []
    previous: tuple[CheckpointManifest, Envelope] | None = None
    old: State | None = None
    for version in range(DIFFS + 1):
        done = publish(
            store, LEARNER, RUN_ID, layout, previous, old, state, anchor=version == 0, clock=clock,
            beacon=f"{version:064x}",
        )
        envelopes.append(done.envelope)
        previous, old = (done.manifest, done.envelope), state
        moved = state["weight"].copy().reshape(-1)
        moved[rng.random(moved.size) < DENSITY] += 1
        state = {"weight": moved.reshape(rows, 1024)}
    return envelopes, layout


class CountingStore:
    """Serves a directory store over HTTP with ranges, counts bytes sent, and may be held to a bandwidth."""

    def __init__(self, folder: Path):
        self.store, self.sent, self.rate = DirectoryStore(folder), 0, 0.0
        self._lock, self._free_at = threading.Lock(), 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """One range of one object."""
        key = request.path.rpartition("/")[2]
        try:
            size = self.store.size(key)
        except LocalFault as error:
            request.send_error(404 if error.code == E_NOT_FOUND else 500)
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "bytes=0-"))
        start, end = (int(span[1]), min(size, int(span[2] or size - 1) + 1)) if span else (0, size)
        data = self.store.read(key, start, end)
        request.send_response(206)
        request.send_header("Content-Length", str(len(data)))
        request.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        request.end_headers()
        for at in range(0, len(data), 65_536):
            block = data[at : at + 65_536]
            time.sleep(self._count(len(block)))
            request.wfile.write(block)

    def _count(self, nbytes: int) -> float:
        """Count bytes in; seconds until they may leave."""
        with self._lock:
            self.sent += nbytes
            if not self.rate:
                return 0.0
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + nbytes / self.rate
            return self._free_at - now

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


# -- a node ----------------------------------------------------------------------------------------------


class Node:
    """One node process, seen from inside: told by JSON lines what to do."""

    def __init__(self, published: Path, url: str, name: str):
        self._layout = Layout.from_bytes((published / "layout.json").read_bytes())
        lines = (published / "manifests.jsonl").read_bytes().splitlines()
        self._envelopes = [Envelope.from_bytes(line) for line in lines]
        self._url, self._name = url, name
        self._swarm: Any = None

    def begin(self, folder: str, mode: str) -> dict[str, Any]:
        """A fresh cache, and a host if it is to be the swarm."""
        self._pool = SourcePool([HttpSource.mirror(self._url, name="store")], ChunkCache(Path(folder) / self._name))
        self._chunks: Any = self._pool
        if mode == "http":
            return {}
        from protocol.swarm.first import SwarmFirst
        from protocol.swarm.limits import Limits
        from protocol.swarm.swarm import Swarm

        limits = Limits("/ip4/127.0.0.1/tcp/0", max_peers=16, up_bytes_s=None, down_bytes_s=None)
        identity = Identity(hashlib.sha256(f"{folder} {self._name}".encode()).digest())
        self._swarm = swarm = Swarm(
            identity, RUN_ID, LEARNER.public_key.hex(), limits, self._pool.cache.store, SystemClock()
        )
        swarm.start(wait=True)
        self._chunks = SwarmFirst(self._pool, swarm)
        return {"id": swarm.book.own_id, "address": swarm.view()["addresses"][0].partition("/p2p/")[0]}

    def meet(self, peers: list[dict[str, str]]) -> dict[str, Any]:
        """Be connected to all others."""
        if self._swarm is None:
            return {}
        others = [peer for peer in peers if peer["id"] != self._swarm.book.own_id]
        for peer in others:
            self._swarm.book.found(peer["id"], [peer["address"]], "benchmark")
        give_up = time.monotonic() + _WAIT_S
        while len(self._swarm.book.ready()) < len(others):
            if time.monotonic() > give_up:
                raise TimeoutError(f"only {len(self._swarm.book.ready())} of {len(others)} peers are connected")
            time.sleep(0.02)
        return {}

    def fetch(self) -> dict[str, Any]:
        """The way of a newcomer: one anchor, ten diffs, every state's root checked."""
        follower = CheckpointFollower(self._chunks.fetch, LEARNER.public_key, RUN_ID, self._layout, threads=1)
        manifests = [CheckpointManifest.from_payload(envelope.payload) for envelope in self._envelopes]
        refs = [ref for manifest in manifests for ref in (manifest.anchor or manifest.diff)]
        before, began = time.process_time(), time.perf_counter()
        self._chunks.fetch_all(refs)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - before
        follower.advance(self._envelopes)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"version": follower.version, "seconds": seconds, "cpu_s": cpu_s, "peak_mb": peak}

    def end(self) -> dict[str, Any]:
        """Leave."""
        if self._swarm is not None:
            self._swarm.stop()
            self._swarm = None
        return {}


def be_a_node(published: Path, url: str, name: str) -> None:
    """Do what standard input says until it ends."""
    import protocol.swarm.host  # noqa: F401 (libp2p takes a while to load; that is no part of what is measured)

    node = Node(published, url, name)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(node, order.pop("do"))(**order)), flush=True)


class Worker:
    """One node process, seen from outside."""

    def __init__(self, published: Path, url: str, name: str):
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--node", str(published), url, name], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, bufsize=1,
        )

    def say(self, do: str, **order: Any) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do} | order) + "\n")

    def hear(self) -> dict[str, Any]:
        """Its answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a node process ended with status {self._process.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()


# -- rounds ----------------------------------------------------------------------------------------------


class Network:
    """A store and node processes."""

    def __init__(self, folder: Path, megabytes: float, seed: int):
        envelopes, layout = make_checkpoints(folder / "store", megabytes, seed)
        (folder / "layout.json").write_bytes(layout.to_bytes())
        (folder / "manifests.jsonl").write_bytes(b"\n".join(envelope.to_bytes() for envelope in envelopes))
        manifests = [CheckpointManifest.from_payload(envelope.payload) for envelope in envelopes]
        self.nbytes = sum(ref.size_bytes for m in manifests for ref in (m.anchor or m.diff))
        self.chunks = sum(len(m.anchor or m.diff) for m in manifests)
        self.store, self._folder, self._rounds = CountingStore(folder / "store"), folder, 0
        self._workers = [Worker(folder, self.store.url, f"node-{i}") for i in range(max(COUNTS))]
        for worker in self._workers:
            worker.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()
        self.store.close()

    def round(self, count: int, mode: str) -> dict[str, Any]:
        """``count`` nodes fetch everything at once; bytes from the store, seconds of the slowest."""
        self._rounds += 1
        workers = self._workers[:count]
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            peers = _all(workers, "begin", folder=folder, mode=mode)
            _all(workers, "meet", peers=peers)
            before, began = self.store.sent, time.perf_counter()
            answers = _all(workers, "fetch")
            whole_s = time.perf_counter() - began
            _all(workers, "end")
        assert {answer["version"] for answer in answers} == {DIFFS}, "a node did not reach the newest version"
        seconds = max(answer["seconds"] for answer in answers)
        return {
            "store_bytes": self.store.sent - before, "seconds": seconds, "with_states_s": whole_s,
            "mb_s": count * self.nbytes / seconds / 1e6, "cpu_s": statistics.mean(a["cpu_s"] for a in answers),
            "peak_mb": max(answer["peak_mb"] for answer in answers),
        }

    @contextmanager
    def uplink(self, mb_s: float) -> Iterator[None]:
        """The store's line held to a bandwidth."""
        self.store.rate = mb_s * 1e6
        try:
            yield
        finally:
            self.store.rate = 0.0


def _all(workers: Sequence[Worker], do: str, **order: Any) -> list[dict[str, Any]]:
    for worker in workers:
        worker.say(do, **order)
    return [worker.hear() for worker in workers]


def measure(network: Network, rounds: int) -> tuple[dict[str, Any], str]:
    """The result and its table."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for count in COUNTS:
            for mode in ("http", "swarm"):
                found.setdefault((count, mode), []).append(network.round(count, mode))
    middle = {
        key: {name: statistics.median(r[name] for r in results) for name in results[0]}
        for key, results in found.items()
    }
    per_node = {str(n): middle[n, "swarm"]["store_bytes"] / n for n in COUNTS}
    worst = {str(n): max(r["store_bytes"] for r in found[n, "swarm"]) / n / network.nbytes for n in COUNTS}
    with network.uplink(UPLINK_MB_S):
        slow = {mode: network.round(max(COUNTS), mode)["seconds"] for mode in ("http", "swarm")}
    result = {
        "store_bytes_per_node": {n: round(value) for n, value in per_node.items()},
        "store_share_per_node": {n: round(value / network.nbytes, 4) for n, value in per_node.items()},
        "store_share_per_node_worst_round": {n: round(value, 4) for n, value in worst.items()},
        "bound_share_per_node": {str(n): min(1.0, 2 / n) for n in COUNTS},
        "holds": all(value <= 2 / int(n) for n, value in worst.items()),
        "swarm_mb_s": round(middle[max(COUNTS), "swarm"]["mb_s"], 1),
        "http_mb_s": round(middle[max(COUNTS), "http"]["mb_s"], 1),
        "uplink_mb_s": UPLINK_MB_S,
        "swarm_speedup_at_uplink": round(slow["http"] / slow["swarm"], 2),
        "nodes_at_uplink": max(COUNTS), "bytes": network.nbytes, "chunks": network.chunks, "rounds": rounds,
        "swarm_peak_mb": round(max(middle[n, "swarm"]["peak_mb"] for n in COUNTS)),
    }
    rows = [
        (n, mode, middle[n, mode]["store_bytes"] / n / network.nbytes, 2 / n if mode == "swarm" else 1.0,
         middle[n, mode]["seconds"], middle[n, mode]["mb_s"], middle[n, mode]["cpu_s"])
        for n in COUNTS for mode in ("http", "swarm")
    ]
    header = ("nodes", "over", "store bytes/node", "bound", "seconds", "MB/s of all", "CPU s/node")
    text = harness.table(header, rows) + (
        f"\n\n{network.nbytes / 1e6:.1f} MB in {network.chunks} chunks; store bytes/node as a share of that.\n"
        f"With the store's line held to {UPLINK_MB_S:g} MB/s, {max(COUNTS)} nodes: "
        f"{slow['http']:.1f} s over HTTP, {slow['swarm']:.1f} s with the swarm."
    )
    return result, text


def main() -> None:
    """Run the benchmark, or one node of it."""
    if sys.argv[1:2] == ["--node"]:
        be_a_node(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
        return
    args = harness.parser(__doc__).parse_args()
    if not installed():
        sys.exit("this benchmark needs the extra 'swarm': pip install 'assay-rl[swarm]'")
    with tempfile.TemporaryDirectory() as folder, Network(Path(folder), 6 if args.quick else 48, args.seed) as network:
        network.round(max(COUNTS), "swarm")  # warm-up
        result, text = measure(network, 1 if args.quick else 3)
    harness.finish(result, text, only_json=args.json)


if __name__ == "__main__":
    main()
