"""What checking costs next to generating: T0, T1 and reward on every bundle, and T2 at the floor of the audit rate.

The node's own torch engine generates leases, the verifier's own session judges them, in turns on one core, from signed
envelopes and encoded bundles to the judgement. Ratios are seconds of checking per token over seconds of generating
per token. T2's share is its whole cost times the 5 % of bundles that are drawn in the long run; its model is loaded,
as it is in a verifier that works through the leases of one version.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import harness

harness.pin_threads()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from real_rollouts import (  # noqa: E402
    BEACON,
    RUN_ID,
    Lease,
    Workload,
    generate,
    model_arguments,
    smollm2_gsm8k,
    tiny_sort,
)

from coordinator.presets import TORCH_CPU_FP32, SamplingPreset  # noqa: E402
from protocol import messages  # noqa: E402
from protocol.bundle import bundle_root, encode  # noqa: E402
from protocol.clock import SystemClock  # noqa: E402
from protocol.identity import Identity  # noqa: E402
from protocol.messages import SamplingRules  # noqa: E402
from protocol.rollout import prompt_digest  # noqa: E402
from protocol.store import DirectoryStore  # noqa: E402
from protocol.weights.chain import publish  # noqa: E402
from verifier.checkpoints import CheckpointBook  # noqa: E402
from verifier.model_shelf import ModelShelf  # noqa: E402
from verifier.session import Session  # noqa: E402
from verifier.states import StateRing  # noqa: E402
from verifier.submission import Submission  # noqa: E402
from verifier.tokens import Rewards  # noqa: E402

FLOOR: Final = messages.AuditPolicy().floor_ppm / 1e6
COORDINATOR, LEARNER, NODE = (Identity(hashlib.sha256(name).digest()) for name in (b"coordinator", b"learner", b"node"))


class Bench:
    """A run in one folder: a published checkpoint, a verifier's session, leases signed as a coordinator does."""

    def __init__(self, workload: Workload, rules: SamplingRules, data: Path | None, folder: Path):
        self.clock, store = SystemClock(), DirectoryStore(folder)
        published = publish(
            store, LEARNER, RUN_ID, workload.layout, None, None, workload.state, anchor=True, clock=self.clock,
            beacon=BEACON,
        )
        environment = workload.environment
        if data is not None:
            environment = environment.model_copy(update={"data_sha256": store.put(data.read_bytes())})
        self.environment = environment.name
        run = messages.RunManifest(
            run_id=RUN_ID, name="audit-cost", created_at_ms=0, expires_at_ms=self.clock.now_ms() + 10**9,
            model=messages.ModelSpec(name=workload.name, layout_sha256=workload.layout.sha256, files={
                path.name: store.put(path.read_bytes()) for path in workload.folder.glob("*.json")
            }),
            environments=[environment], sampling=rules,
            batch=messages.BatchRules(groups_per_batch=1, group_size=64, samples_per_lease=8, max_lag_versions=3),
            audit=messages.AuditPolicy(), profiles=[TORCH_CPU_FP32],
            roles=messages.Roles(
                coordinator=COORDINATOR.public_key.hex(), learner=LEARNER.public_key.hex(),
                verifiers=[COORDINATOR.public_key.hex()],
            ),
        )
        book = CheckpointBook(run)
        book.add([published.envelope])
        self.manifest_sha256 = published.envelope.digest
        shelf = ModelShelf(workload.folder, workload.layout, StateRing(workload.layout, book, store.get))
        self.session = Session(run, book, Rewards(run, workload.folder, store.get), shelf)

    def submission(self, lease: Lease, *, drawn: bool) -> Submission:
        """A lease's rollouts as a node hands them in."""
        now, data = self.clock.now_ms(), encode(lease.bundle)
        digest = hashlib.sha256(data).hexdigest()
        signed_lease = messages.Lease(
            run_id=RUN_ID, lease_id=f"{lease.group:032x}", node_id=NODE.id, environment=self.environment,
            group=lease.group, samples=[rollout.sample for rollout in lease.bundle.rollouts],
            prompt_tokens=lease.prompt, prompt_sha256=prompt_digest(lease.prompt), start_version=0, beacon=BEACON,
            issued_at_ms=now, deadline_ms=now + 60_000,
        ).sign(COORDINATOR)
        commitment = messages.Commitment(
            run_id=RUN_ID, node_id=NODE.id, lease_id=f"{lease.group:032x}", lease_sha256=signed_lease.digest,
            bundle_root=bundle_root(lease.bundle, signed_lease.digest), object_sha256=digest, object_bytes=len(data),
            rollouts=len(lease.bundle.rollouts), tokens=lease.tokens, profile=TORCH_CPU_FP32.name, issued_at_ms=now,
            checkpoints=[messages.UsedCheckpoint(version=0, manifest_sha256=self.manifest_sha256)],
        ).sign(NODE)
        receipt = messages.Receipt(
            run_id=RUN_ID, receipt_id=f"{lease.group:032x}", node_id=NODE.id, lease_id=f"{lease.group:032x}",
            commitment_sha256=commitment.digest, object_sha256=digest, epoch=0, epoch_key_sha256="00" * 32,
            received_at_ms=now,
        ).sign(COORDINATOR)
        return Submission(signed_lease, commitment, receipt, NODE.public_key, data, drawn)

    def judge(self, submissions: Sequence[Submission]) -> None:
        """Judge them all; an honest submission that does not pass ends the benchmark."""
        for judgement in self.session.judge(submissions):
            if judgement.outcome != "pass":
                raise SystemExit(f"an honest bundle is judged {judgement.outcome}: {judgement.code}")


def main() -> None:
    options = model_arguments(harness.parser(__doc__))
    torch.set_num_threads(1)
    tokens = 24 if options.quick else 96
    smollm2 = smollm2_gsm8k(options.cache, options.data)
    result: dict[str, Any] = {
        "smollm2_gsm8k": _measure(smollm2, _rules(smollm2, tokens, 32), options, leases=1),
    }
    tiny = tiny_sort(options.cache)
    result["tiny"] = _measure(tiny, _rules(tiny, 8, 16), options, leases=4)
    for key in ("t0_t1_ratio_to_generation", "t2_steady_state_ratio"):
        result[key] = result["smollm2_gsm8k"][key]
    harness.finish(result, _text(result), only_json=options.json)


def _rules(workload: Workload, tokens: int, head_size: int) -> SamplingRules:
    """The presets' head rules at T = 1."""
    preset = SamplingPreset(head_size=head_size, max_new_tokens=tokens, swap_grid=2)
    return workload.rules(**preset.model_dump(exclude={"record_routes"}))


def _measure(workload: Workload, rules: SamplingRules, options: argparse.Namespace, leases: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(workload, rules, workload.data, Path(folder))
        found: dict[str, list[float]] = {"generate": [], "t0_t1": [], "t2": []}
        for turn in range(2 if options.quick else 4):
            groups = [1000 * options.seed + 100 * turn + i for i in range(leases)]
            made, seconds = generate(workload, rules, groups, 8, slots=8 * leases)
            tokens = sum(lease.tokens for lease in made)
            undrawn, drawn = ([bench.submission(lease, drawn=d) for lease in made] for d in (False, True))
            if turn == 0:  # compiles, loads the model and the task
                bench.judge(drawn)
            cheap = float(np.median([_seconds(lambda: bench.judge(undrawn)) for _ in range(5)]))  # noqa: B023
            found["generate"].append(seconds / tokens)
            found["t0_t1"].append(cheap / tokens)
            found["t2"].append((_seconds(lambda: bench.judge(drawn)) - cheap) / tokens)  # noqa: B023
    median = {name: float(np.median(values)) for name, values in found.items()}
    return {
        "generate_us_per_token": 1e6 * median["generate"], "t0_t1_us_per_token": 1e6 * median["t0_t1"],
        "t2_us_per_token": 1e6 * median["t2"],
        "t0_t1_ratio_to_generation": _ratio(found["t0_t1"], found["generate"]),
        "t2_steady_state_ratio": FLOOR * _ratio(found["t2"], found["generate"]),
    }


def _ratio(costs: Sequence[float], yardstick: Sequence[float]) -> float:
    """Median of the ratios of each turn."""
    return float(np.median(np.array(costs) / np.array(yardstick)))


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _text(result: dict[str, Any]) -> str:
    rows = [
        (name, *(found[f"{part}_us_per_token"] for part in ("generate", "t0_t1", "t2")),
         found["t0_t1_ratio_to_generation"], found["t2_steady_state_ratio"])
        for name, found in result.items() if isinstance(found, dict)
    ]
    header = ("model", "generate us/token", "T0 T1 us/token", "T2 us/token", "T0 T1 / generate", "T2 at the floor")
    return harness.table(header, rows)


if __name__ == "__main__":
    main()
