"""A follower in a process of its own, killed with -9 while it downloads, applies and saves."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.weights.layout import Layout
from tests.fakes.checkpoints import RUN_ID, FakeLearner
from tests.fakes.store import MemoryStore
from tests.fakes.web import Mirror, serving

LAYOUT = Layout.of({"embed": ("BF16", (2000, 1200)), "layers": ("BF16", (3_000_000,)), "norm": ("F32", (1000,))})
VERSIONS = 4

_CHILD = """
import json, sys
from pathlib import Path
from protocol.envelope import Envelope
from protocol.weights.cache import ChunkCache
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import Layout
from protocol.weights.pool import SourcePool
from protocol.weights.sources import HttpSource
from protocol.weights.state_root import state_root

home = Path(sys.argv[1])
case = json.loads((home / "case.json").read_text())
layout = Layout.from_bytes(case["layout"].encode())
pool = SourcePool([HttpSource.mirror(case["url"])], ChunkCache(home / "chunks"))
follower = CheckpointFollower(pool.fetch, case["key"], case["run"], layout, threads=1)
follower.load(home / "weights")
print("ready", follower.version, flush=True)
for version, manifest in enumerate(case["manifests"]):
    if follower.version is None or version > follower.version:
        envelope = Envelope.from_dict(manifest)
        pool.fetch_all(follower._way([envelope]).refs)
        print("apply", version, flush=True)
        follower.advance([envelope])
        follower.save(home / "weights")
print("root", state_root(layout, follower.state), flush=True)
"""


@dataclass
class Follower:
    """Starts the child, and again, on one home."""

    home: Path
    root: Path

    def start(self) -> subprocess.Popen[str]:
        with (self.home / "stderr").open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(self.home)], cwd=self.root, text=True, stdout=subprocess.PIPE,
                stderr=errors,
            )

    def finish(self) -> str:
        """The root it reaches when nobody kills it."""
        with self.start() as child:
            said, _ = child.communicate(timeout=240)
        assert child.returncode == 0, (self.home / "stderr").read_text()
        return said.split()[-1]

    def killed_while_downloading(self, mirror: Mirror, after: int) -> None:
        """Killed when so many more bytes were served, or when it is done."""
        with self.start() as child:
            limit = mirror.served + after

            def kill(served: int) -> None:
                if served >= limit:
                    child.kill()

            mirror.on_served = kill
            child.communicate(timeout=240)
            mirror.on_served = lambda served: None

    def killed_while_applying(self, seconds: float) -> None:
        """Killed a moment after it began to apply a version: while decoding, writing, hashing or saving."""
        with self.start() as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("apply"):
                    time.sleep(seconds)
                    child.kill()
                    break
            child.communicate(timeout=240)


def test_twenty_kills_cost_a_chunk_each_at_most_and_never_the_state(tmp_path: Path, root: Path) -> None:
    follow_while_killed(tmp_path, root, seed=2, kills=20)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3, 7))
def test_a_hundred_kills(tmp_path: Path, root: Path, seed: int) -> None:
    follow_while_killed(tmp_path, root, seed=seed, kills=100)


def follow_while_killed(tmp_path: Path, root: Path, *, seed: int, kills: int) -> None:
    """Each kill costs a chunk at most, and the state that is reached is the right one."""
    rng, store = random.Random(seed), MemoryStore()
    learner = FakeLearner(store, layout=LAYOUT, seed=seed)
    learner.publish_many(VERSIONS)
    refs = [ref for manifest in learner.manifests for ref in [*manifest.anchor, *manifest.diff]]
    total, largest = sum(ref.size_bytes for ref in refs), max(ref.size_bytes for ref in refs)
    with serving(Mirror(store.objects)) as mirror:
        (tmp_path / "case.json").write_text(json.dumps({
            "url": mirror.url, "layout": LAYOUT.to_bytes().decode(), "key": learner.identity.public_key.hex(),
            "run": RUN_ID, "manifests": [envelope.to_dict() for envelope in learner.envelopes],
        }))
        follower = Follower(tmp_path, root)
        downloads = 0
        for _ in range(kills):
            if mirror.served < total and rng.random() < 0.6:
                downloads += 1
                follower.killed_while_downloading(mirror, rng.randrange(1, 2 * total // kills))
            else:
                follower.killed_while_applying(rng.random() * 0.2)
        assert follower.finish() == learner.manifests[-1].state_root
        assert downloads
        assert mirror.served <= total + kills * largest
        served = mirror.served
        assert follower.finish() == learner.manifests[-1].state_root
        assert mirror.served == served
