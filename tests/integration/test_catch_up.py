"""Catching up over real parts: a coordinator process, the learner's publisher, a node's weights over HTTP.

A node that was away for 20 versions and a new one take the cheapest way there is; the bytes that came are those that
were printed, and no combination of what was published costs less.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from learner.config import LearnerConfig
from learner.publisher import Publisher
from node.weights import Weights
from protocol.api import JoinLink
from protocol.client import CoordinatorClient
from protocol.clock import SystemClock
from protocol.envelope import Envelope
from protocol.identity import Identity
from protocol.messages import CheckpointManifest, RunManifest
from protocol.store import DirectoryStore
from protocol.weights.cache import ChunkCache
from protocol.weights.layout import Layout, State, write_safetensors
from protocol.weights.pool import SourcePool
from protocol.weights.skips import index_name, read_announcement
from protocol.weights.sources import HttpSource
from tests.fakes.checkpoints import same_bits
from tests.fakes.model_folder import make_model_folder
from tests.integration.test_coordinator_process import COORDINATOR, Server

WORDS = 60_000
LAYOUT = Layout.of({"a": ("BF16", (WORDS,))})
AWAY_SINCE, NEWEST = 6, 26


def walk() -> Iterator[State]:
    """bf16 roundings of fp32 masters under a momentum of random gradients; about 2 % of the words change."""
    rng = np.random.default_rng(0)
    masters = (rng.standard_normal(WORDS) * 0.04).astype(np.float32)
    momentum = np.zeros_like(masters)
    while True:
        bits = masters.view(np.uint32)
        yield {"a": ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)}
        momentum = 0.9 * momentum + 0.1 * rng.standard_normal(WORDS).astype(np.float32)
        masters = masters - np.float32(4e-6) * momentum


class Run:
    """A coordinator process with a publisher that goes on; nodes come and go."""

    def __init__(self, server: Server, folder: Path, stack: ExitStack):
        self._stack = stack
        self._folder, self.store = folder, DirectoryStore(server.directory / "store")
        link = JoinLink.parse((server.directory / "link.txt").read_text())
        self.url = server.start()
        key = Identity.load(server.directory / "keys" / "learner.key")
        self.learner = stack.enter_context(CoordinatorClient(self.url, key))
        self.run = RunManifest.open(self.learner.run_manifest(), link.root)
        config = LearnerConfig.model_validate({"publish": {"anchor_every_versions": 1000}}).publish
        self._publisher = Publisher(self.learner, self.store, key, self.run, LAYOUT, config, SystemClock())
        self._states = walk()
        self.manifests: list[CheckpointManifest] = []
        self._last: tuple[tuple[CheckpointManifest, Envelope], State] | None = None

    def publish_until(self, version: int) -> None:
        while len(self.manifests) <= version:
            new = next(self._states)
            before, old = (None, None) if self._last is None else self._last
            made = self._publisher.make(before, old, new)
            self._publisher.tell(made.manifest.version, made.envelope, None)
            self.manifests.append(made.manifest)
            self._last = (made.manifest, made.envelope), new

    @property
    def state(self) -> State:
        assert self._last is not None
        return self._last[1]

    def node(self, name: str) -> tuple[Weights, SourcePool]:
        pool = SourcePool([HttpSource.coordinator(self.url)], ChunkCache(self._folder / name / "c"))
        self._stack.callback(pool.close)
        client = self._stack.enter_context(CoordinatorClient(self.url, None))
        return Weights(client, pool, self.run, LAYOUT, self._folder / name / "weights"), pool

    def cheapest(self, held: int | None) -> int:
        """Bytes of the cheapest combination of anchor, diffs and skips, by a plain search."""
        cost = {} if held is None else {held: 0}
        for manifest in self.manifests[0 if held is None else held + 1 :]:
            ways = [sum(ref.size_bytes for ref in manifest.anchor)] if manifest.anchor else []
            if manifest.version - 1 in cost:
                ways.append(cost[manifest.version - 1] + sum(ref.size_bytes for ref in manifest.diff))
            for skip in read_announcement(self.store.announced(index_name(manifest)), self.run.run_id):
                if skip.from_version in cost:
                    ways.append(cost[skip.from_version] + skip.nbytes)
            cost[manifest.version] = min(ways)
        return cost[self.manifests[-1].version]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    model = make_model_folder(tmp_path / "model")
    for file in model.glob("*.safetensors"):
        file.unlink()
    write_safetensors(model / "model.safetensors", LAYOUT, next(walk()))
    subprocess.run(
        [*COORDINATOR, "init", str(tmp_path / "run"), "--preset", "tiny", "--model", str(model)],
        check=True, capture_output=True, timeout=200,
    )
    server = Server(tmp_path / "run")
    try:
        with ExitStack() as stack:
            yield Run(server, tmp_path, stack)
    finally:
        if server.process is not None and server.process.poll() is None:
            server.process.kill()
            server.process.wait(30)


def printed(caplog: pytest.LogCaptureFixture) -> int:
    """The bytes of the last way that the log told of."""
    ways = [record.getMessage() for record in caplog.records if record.getMessage().startswith("weights: ")]
    found = re.search(r": ([\d,]+) B in all", ways[-1])
    assert found is not None
    print(ways[-1], file=sys.stderr)
    return int(found[1].replace(",", ""))


def test_who_was_away_and_who_is_new_take_the_cheapest_way(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run.publish_until(AWAY_SINCE)
    away, pool = run.node("away")
    assert away.poll(SystemClock().now_ms())
    before = pool.scores()[0].delivered
    run.publish_until(NEWEST)
    chain = sum(ref.size_bytes for manifest in run.manifests[AWAY_SINCE + 1 :] for ref in manifest.diff)
    assert away.poll(SystemClock().now_ms())
    came = pool.scores()[0].delivered - before
    assert came == printed(caplog) == run.cheapest(AWAY_SINCE)
    assert came <= 0.45 * chain
    with away.state(NEWEST) as state:
        assert same_bits(state, run.state)

    new, pool = run.node("new")
    assert new.poll(SystemClock().now_ms())
    came = pool.scores()[0].delivered
    anchor = max(sum(ref.size_bytes for ref in manifest.anchor) for manifest in run.manifests)
    assert came == printed(caplog) == run.cheapest(None)
    assert came <= 1.15 * anchor
    with new.state(NEWEST) as state:
        assert same_bits(state, run.state)
