"""Fixtures whose catch is a matter of chance or of sums: draws, calibrated profiles, replicas."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from typing import Any

import torch

from node.unit import Unit
from protocol.messages import Commitment, Finding, Lease, Receipt, Verdict
from tests.adversary import cheats
from tests.adversary.attack import NoOpportunity
from tests.adversary.bench import Bench, Catch, caught
from tests.adversary.fixtures_bundles import MODEL
from tests.adversary.pipeline import Cheat, NodeAtWork, Pipeline
from tests.adversary.registry import fixture
from tests.adversary.stacks import Stack
from tests.adversary.world import LIAR, ROOT, RUN_ID, World, quantised
from verifier.audit import audit, read_evidence
from verifier.material import Material

INT8 = cheats.weights(cheats.rounded(8))
NODE_BF16 = Stack(dtype="bf16", batch=4)


# -- 27, 28: draws ------------------------------------------------------------------------------------------


@fixture(27, "int8 weights from a node that is audited at 5 %", "T3", *MODEL)
def at_the_floor(bench: Bench, seed: int) -> Catch:
    """What a node that was honest for long meets: one bundle in twenty is recomputed."""
    return bench.chase("floor", seed, INT8)


def _guesses_undrawn(pipeline: Pipeline, lease: Lease) -> bool:
    """What can be made of all that is public before the receipt: the key's digest, the lease."""
    epochs = pipeline.client(None).get_object("/v1/epochs")["epochs"]
    public = bytes.fromhex(epochs[0]["key_sha256"]) if epochs else b""
    return hmac.new(public, lease.lease_id.encode(), hashlib.sha256).digest()[0] < 128


@fixture(28, "int8 weights whenever the draw is guessed to miss, at 50 %", "T3", *MODEL)
def guessing(bench: Bench, seed: int) -> Catch:
    """A guess that knew anything would be caught less often than every second time."""
    pipeline = bench.pipeline("half", seed)

    def seal(world: World, unit: Unit, spooled: Any) -> Any:
        if not _guesses_undrawn(pipeline, unit.lease):
            raise NoOpportunity
        bundle = world.generate(unit.lease, states=lambda version: quantised(world.state(version)))
        made = world.submission(unit.lease, bundle)
        return replace(spooled, commitment=Commitment.from_payload(made.commitment.payload), data=made.bundle)

    return bench.chase("half", seed, Cheat(seal=seal))


# -- 19, 27, 29: sums under a calibrated profile --------------------------------------------------------------


@fixture(27, "bf16 log-probabilities off by .04 nats, inside every limit", "sum", "E_SUSPICION")
def under_the_limits(bench: Bench, seed: int) -> Catch:
    """No single rollout fails; the sum over rollouts does. In float32 the limits leave nothing that adds up."""
    return bench.chase("calibrated", seed, cheats.hooked(cheats.tilt(0.04)), stack=Stack(dtype="bf16"))


@fixture(29, "int8 weights under the name of bf16", ("sum", "T3"), "E_SUSPICION", *MODEL)
def int8_as_bf16(bench: Bench, seed: int) -> Catch:
    """The bf16 profile's limits are a thousand times wider; its null distribution is not."""
    return bench.chase("calibrated", seed, replace(INT8, profile="torch-cpu-bf16"))


@fixture(29, "int4 weights under the name of bf16", ("T3", "sum"), "E_SUSPICION", *MODEL)
def int4_as_bf16(bench: Bench, seed: int) -> Catch:
    return bench.chase("calibrated", seed, replace(cheats.weights(cheats.rounded(4)), profile="torch-cpu-bf16"))


# -- 30: replicas -------------------------------------------------------------------------------------------


@fixture(30, "int8 weights, nothing drawn, the replica made by an honest node", "T3", *MODEL)
def lonely_replica(bench: Bench, seed: int) -> Catch:
    """Not colluding: the first token that differs from the replica's settles it (T2')."""
    return bench.chase("replicated", seed, INT8, after=bench.honest)


@fixture(30, "int8 weights at both nodes, audited at 5 %", "T3", *MODEL)
def colluding(bench: Bench, seed: int) -> Catch:
    """Their replicas agree, so that replication sees nothing: the draw does, as often as it would anyway."""
    pipeline = bench.pipeline("collusion", seed)
    pair = [pipeline.node(f"pair {seed} {i}", INT8) for i in range(2)]
    found: Catch | None = None
    for _ in range(400):
        for node in pair:
            node.turn()
        pipeline.verify()
        found = next((catch for node in pair if (catch := caught(pipeline, node)) is not None), None)
        if found is not None:
            break
    honest, alarms = bench.honest(pipeline)
    handed = [one for node in pair for one in node.handed]
    rollouts, tokens = sum(one.rollouts for one in handed), sum(one.tokens for one in handed)
    found = found or Catch(False, None, "nobody")
    return replace(found, rollouts=rollouts, tokens=tokens, honest=honest, alarms=alarms)


# -- 32: verifiers ------------------------------------------------------------------------------------------


def _lie(pipeline: Pipeline, node: NodeAtWork, **changes: object) -> str:
    """A verifier of the run says that an honest bundle fails; the receipt's id."""
    handed = node.turn()
    job = pipeline.claim(LIAR)
    assert job is not None
    receipt = Receipt.from_payload(job.receipt.payload)
    finding = Finding(check="T1.1 sampler replay", ok=False, expected="0 of 1", got="1 of 1", code="E_REPLAY")
    fields: dict[str, object] = {
        "run_id": RUN_ID, "verifier_id": LIAR.id, "node_id": receipt.node_id, "lease_id": receipt.lease_id,
        "receipt_sha256": job.receipt.digest, "outcome": "fail", "code": "E_REPLAY", "tiers": ["T0"],
        "findings": [finding], "samples": [], "rewards_micro": [], "tokens": handed[0].tokens,
        "issued_at_ms": pipeline.clock.now_ms(),
    }
    pipeline.client(LIAR).verdict(Verdict.model_validate(fields | changes))
    return receipt.receipt_id


@fixture(32, "a verifier fails an honest node", "audit")
def lying_verifier(bench: Bench, seed: int) -> Catch:
    """The run acts on it, but the evidence is public: anyone's audit passes where the signed verdict says fail."""
    pipeline = bench.pipeline("liar", seed)
    node = pipeline.node(f"slandered {seed}")
    receipt_id = _lie(pipeline, node)
    evidence, run = read_evidence(pipeline.learner.evidence(receipt_id), ROOT.public_key)
    found = audit(evidence, run, Material.of([pipeline.world.store.path]))
    lie = any(verdict.verifier_id == LIAR.id and verdict.outcome == "fail" for verdict in found.verdicts)
    exposed = lie and found.judgement.outcome == "pass" and found.in_log
    pipeline.verify()
    pipeline.admin("unban", node_id=node.key.id)
    honest, alarms = bench.honest(pipeline)
    return Catch(exposed, None, "audit", node.handed[0].rollouts, node.handed[0].tokens, honest, alarms)


@fixture(32, "a failure of T2 that no second configuration confirmed", "door", "E_VERDICT")
def unconfirmed(bench: Bench, seed: int) -> Catch:
    from protocol.errors import AssayError

    pipeline = bench.pipeline("liar", seed)
    node = pipeline.node(f"half slandered {seed}")
    code = None
    try:
        _lie(pipeline, node, tiers=["T0", "T1", "T2"], code="E_HEAD_KL")
    except AssayError as error:
        code = error.code
    hurt = node.banned
    pipeline.verify()
    honest, alarms = bench.honest(pipeline)
    return Catch(code is not None and not hurt, code, "door", node.handed[0].rollouts, node.handed[0].tokens, honest,
                 alarms + node.banned)


# -- what is not seen ---------------------------------------------------------------------------------------


@fixture(5, "a checkpoint lag below the numeric noise", "T3", kind="limit",
         limit="weights whose smallest hundredth differs by one unit in the last place")
def lag_below_noise(bench: Bench, seed: int) -> Catch:
    return bench.chase("single", seed, cheats.weights(cheats.least_words(0.01)), most=4)


@fixture(4, "int8 weights under the name of bf16, one short bundle", "sum", kind="limit",
         limit="mild quantisation inside a noisy profile's limits, before the sum over bundles reaches its alarm")
def quantised_in_a_short_sample(bench: Bench, seed: int) -> Catch:
    """Four rollouts of 32 tokens: their evidence, at most 3 nats a rollout, cannot reach the alarm at 20.7."""
    return bench.chase("calibrated", seed, replace(INT8, profile="torch-cpu-bf16"), most=1)


@fixture(4, "int8 weights in bundles that are not drawn", "T3", kind="limit",
         limit="an undrawn bundle is not recomputed; the draw's odds (row 27), the screen and replicas deter")
def undrawn(bench: Bench, seed: int) -> Catch:
    return bench.chase("single undrawn", seed, INT8, most=4)


@fixture(20, "lenient speculative decoding inside the noise", "T3", kind="limit",
         limit="draft tokens taken where .0002 nats decide; measured: share of rollouts whose tokens that changes")
def lenient_speculation(bench: Bench, seed: int) -> Catch:
    """What a draft likes is raised by most of what the limit leaves for arithmetic: near ties go the draft's way."""
    changed = []

    def seal(world: World, unit: Unit, spooled: Any) -> Any:
        signs = 1.0 - 2.0 * (torch.arange(world.rules.vocab_size) % 2)
        bundle = world.generate(unit.lease, logits_hook=lambda logits, _: logits + 0.0001 * signs)
        honest = world.honest(unit.lease)
        changed.extend(a.tokens.tolist() != b.tokens.tolist()
                       for a, b in zip(bundle.rollouts, honest.rollouts, strict=True))
        made = world.submission(unit.lease, bundle)
        return replace(spooled, commitment=Commitment.from_payload(made.commitment.payload), data=made.bundle)

    found = bench.chase("new", seed, Cheat(seal=seal), most=4)
    return replace(found, note=sum(changed) / len(changed))
