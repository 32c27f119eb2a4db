"""A learner's surroundings in memory: a tiny model, rollouts sampled from it, a coordinator that hands them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.batch import TrainingGroup, TrainingSample
from learner.checkpoint import ResumePoints
from learner.config import LearnerConfig
from learner.journal import Journal
from learner.publisher import Publisher
from learner.run import Learner
from learner.trainer import Trainer
from protocol import bundle, sampler
from protocol.api import E_BATCH, E_CHECKPOINT_CHAIN, AdmittedGroup, AdmittedSample, BundleProof
from protocol.envelope import Envelope
from protocol.errors import LocalFault, PeerFault
from protocol.identity import Identity
from protocol.messages import (
    AuditPolicy,
    BatchPlan,
    BatchRules,
    CheckpointHead,
    CheckpointManifest,
    Commitment,
    Environment,
    Lease,
    ModelSpec,
    Profile,
    Receipt,
    Roles,
    RunManifest,
    SamplingRules,
    ScreenReport,
    UpdateReceipt,
    UsedCheckpoint,
    Verdict,
)
from protocol.rollout import NO_CODE, Bundle, Finish, Rollout, Segment, prompt_digest, rollout_seed
from protocol.store import DirectoryStore, Store
from protocol.weights.layout import Layout, State, read_safetensors
from tests.fakes.clock import FakeClock

RUN_ID = "ab" * 16
VOCAB = 40
COORDINATOR, LEARNER, VERIFIER, NODE = (Identity(letter * 32) for letter in (b"c", b"l", b"v", b"n"))


def beacon_of(version: int) -> str:
    """A beacon that every repetition of a test sees again."""
    return f"{version:064x}"


def sampling_rules(**changes: object) -> SamplingRules:
    values: dict[str, object] = {
        "head_size": 8, "max_new_tokens": 12, "eos_token_ids": [2], "vocab_size": VOCAB, "swap_grid": 2,
    }
    return SamplingRules.model_validate(values | changes)


def make_model_dir(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A Llama of some ten thousand parameters in bf16, as a Hugging Face folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, max_position_embeddings=128, initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load_model(folder: Path) -> tuple[Layout, State]:
    return read_safetensors(folder / "model.safetensors")


def run_manifest(layout: Layout, **batch: int | None) -> RunManifest:
    rules: dict[str, int | None] = {
        "groups_per_batch": 2, "group_size": 4, "samples_per_lease": 2, "max_lag_versions": 50, "max_versions": None,
    }
    return RunManifest(
        run_id=RUN_ID, name="test", created_at_ms=0, expires_at_ms=2**50,
        model=ModelSpec(name="tiny", layout_sha256=layout.sha256, files={}),
        environments=[Environment(name="sort", kind="sort")], sampling=sampling_rules(),
        batch=BatchRules.model_validate(rules | batch), audit=AuditPolicy(),
        profiles=[Profile(name="torch", max_mean_kl_nano=1, max_token_kl_micro=1, max_margin_micro=1)],
        roles=Roles(
            coordinator=COORDINATOR.public_key.hex(), learner=LEARNER.public_key.hex(),
            verifiers=[VERIFIER.public_key.hex()],
        ),
    )


class Speaker:
    """Samples rollouts from a trainer's published weights with the run's own sampler."""

    def __init__(self, folder: Path, rules: SamplingRules):
        layout, state = load_model(folder)
        self.rules = rules
        self.model = Trainer.open(folder, layout, state, LearnerConfig(), rules).model

    @torch.no_grad()
    def rollout(self, prompt: list[int], group: int, sample: int, *, version: int = 0, beacon: str = "") -> Rollout:
        seed = rollout_seed(RUN_ID, beacon or beacon_of(version), prompt_digest(prompt), group, sample)
        tokens: list[int] = []
        heads: list[sampler.Head] = []
        codes: list[int] = []
        for position in range(self.rules.max_new_tokens):
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, -1] * 1000 / self.rules.temperature_milli
            logprobs = torch.log_softmax(logits, -1).numpy()
            head = sampler.quantise(logprobs, self.rules)
            index = sampler.draw(head, seed, position, self.rules)
            token, token_code = (
                sampler.draw_tail(logprobs, head.ids, seed, position, self.rules)
                if index == sampler.TAIL else (int(head.ids[index]), NO_CODE)
            )
            tokens.append(int(token))
            heads.append(head)
            codes.append(token_code)
            if token in self.rules.eos_token_ids:
                break
        return Rollout(
            sample=sample,
            tokens=np.array(tokens, np.uint32),
            head_lengths=np.array([len(h.ids) for h in heads], np.uint8),
            head_ids=np.concatenate([h.ids for h in heads]).astype(np.uint32),
            head_codes=np.concatenate([h.codes for h in heads]).astype(np.uint16),
            tail_codes=np.array([h.tail_code for h in heads], np.uint16),
            token_codes=np.array(codes, np.uint16),
            segments=(Segment(0, version),),
            finish=Finish.EOS if tokens[-1] in self.rules.eos_token_ids else Finish.LENGTH,
        )

    def group(
        self, group: int, size: int = 4, *, version: int = 0, beacon: str = "", rewards: list[int] | None = None
    ) -> TrainingGroup:
        """A whole group; a completion's reward counts its even tokens."""
        prompt = [3 + group % 30, 5, 7, 4 + group % 7]
        rollouts = [self.rollout(prompt, group, sample, version=version, beacon=beacon) for sample in range(size)]
        given = rewards or [int((r.tokens % 2 == 0).sum()) * 50_000 for r in rollouts]
        return TrainingGroup(group, prompt, tuple(map(TrainingSample, rollouts, given)))


def admitted_group(
    data: TrainingGroup, store: Store, *, per_lease: int = 2, version: int = 0, beacon: str = ""
) -> AdmittedGroup:
    """``data`` as the coordinator lists it, its bundles put into ``store``."""
    samples, proofs = [], []
    for start in range(0, len(data.samples), per_lease):
        part = data.samples[start : start + per_lease]
        made = Bundle(tuple(s.rollout for s in part))
        lease = Lease(
            run_id=RUN_ID, lease_id=f"{data.group:016x}{start:016x}", node_id=NODE.id, environment="sort",
            group=data.group, samples=[s.rollout.sample for s in part], prompt_tokens=data.prompt_tokens,
            prompt_sha256=prompt_digest(data.prompt_tokens), start_version=version, beacon=beacon or beacon_of(version),
            issued_at_ms=1, deadline_ms=2,
        )
        proof = proof_of(lease, made, store.put(bundle.encode(made)), [s.reward_micro for s in part])
        proofs.append(proof)
        samples += [
            AdmittedSample(
                sample=s.rollout.sample, receipt_sha256=proof.receipt.digest,
                object_sha256=Receipt.from_payload(proof.receipt.payload).object_sha256,
                lease=lease.sign(COORDINATOR), reward_micro=s.reward_micro, node_id=NODE.id,
            )
            for s in part
        ]
    return AdmittedGroup(
        group=data.group, environment="sort", start_version=version, prompt_tokens=data.prompt_tokens, samples=samples,
        proofs=proofs,
    )


def proof_of(lease: Lease, made: Bundle, object_sha256: str, rewards: list[int]) -> BundleProof:
    """What node, coordinator and verifier sign for a bundle that passes."""
    lease_sha256, common = lease.sign(COORDINATOR).digest, {"run_id": RUN_ID, "node_id": NODE.id}
    commitment = Commitment(
        **common, lease_id=lease.lease_id, lease_sha256=lease_sha256,
        bundle_root=bundle.bundle_root(made, lease_sha256), object_sha256=object_sha256, object_bytes=1,
        rollouts=len(made.rollouts), tokens=sum(map(len, made.rollouts)), profile="torch", issued_at_ms=2,
        checkpoints=[
            UsedCheckpoint(version=version, manifest_sha256=f"{version:064x}")
            for version in sorted({segment.version for rollout in made.rollouts for segment in rollout.segments})
        ],
    ).sign(NODE)
    receipt = Receipt(
        **common, receipt_id=lease.lease_id, lease_id=lease.lease_id, commitment_sha256=commitment.digest,
        object_sha256=object_sha256, epoch=0, epoch_key_sha256="00" * 32, received_at_ms=3,
    ).sign(COORDINATOR)
    verdict = Verdict(
        **common, verifier_id=VERIFIER.id, lease_id=lease.lease_id, receipt_sha256=receipt.digest, outcome="pass",
        code=None, tiers=["T0", "T1"], findings=[], samples=lease.samples, rewards_micro=rewards, tokens=1,
        issued_at_ms=4,
    ).sign(VERIFIER)
    return BundleProof(
        node_public_key=NODE.public_key.hex(), commitment=commitment, receipt=receipt, verdict=verdict
    )


@dataclass
class FakeCoordinator:
    """The coordinator's side of the learner's messages, with its rules about order and repetition."""

    groups: list[AdmittedGroup] = field(default_factory=list)
    manifests: dict[int, Envelope] = field(default_factory=dict)
    plans: dict[int, BatchPlan] = field(default_factory=dict)
    receipts: dict[int, UpdateReceipt] = field(default_factory=dict)
    heads: list[CheckpointHead] = field(default_factory=list)
    screens: dict[int, ScreenReport] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  #: groups that no batch can name (any more)
    on_call: Callable[[str], None] = lambda name: None

    def admitted(self, limit: int) -> list[AdmittedGroup]:
        self.on_call("admitted")
        used = {entry.group for plan in self.plans.values() for entry in plan.groups}
        return [group for group in self.groups if group.group not in used | self.lost][:limit]

    def post_batch(self, plan: BatchPlan) -> None:
        self.on_call("post_batch")
        known = self.plans.get(plan.version)
        if known is None and plan.parent_version != self.heads[-1].version:
            raise PeerFault(E_BATCH, "the batch does not follow the newest version")
        if known is not None and known != plan:
            raise PeerFault("E_CONFLICT", "this version has another batch")
        if known is None and self.lost & {entry.group for entry in plan.groups}:
            raise PeerFault(E_BATCH, "a group cannot be used", got="unknown")
        self.plans[plan.version] = plan
        self.on_call("post_batch done")

    def publish_checkpoint(self, manifest: Envelope) -> None:
        self.on_call("publish_checkpoint")
        opened = CheckpointManifest.open(manifest, LEARNER.public_key, run_id=RUN_ID)
        known = self.manifests.get(opened.version)
        if known is not None and known.digest != manifest.digest:
            raise PeerFault(E_CHECKPOINT_CHAIN, "another manifest", expected=known.digest, got=manifest.digest)
        if known is None and opened.version != len(self.manifests):
            raise PeerFault(E_CHECKPOINT_CHAIN, "a gap", expected=len(self.manifests), got=opened.version)
        self.manifests[opened.version] = manifest
        self.on_call("publish_checkpoint done")

    def publish_head(self, head: Envelope) -> None:
        self.on_call("publish_head")
        opened = CheckpointHead.open(head, LEARNER.public_key, run_id=RUN_ID)
        if opened.version not in self.manifests or (self.heads and opened.version < self.heads[-1].version):
            raise PeerFault(E_CHECKPOINT_CHAIN, "the head does not fit", got=opened.version)
        self.heads.append(opened)

    def checkpoint(self, version: int) -> Envelope:
        if version not in self.manifests:
            raise LocalFault("E_NOT_FOUND", "no such version", got=version)
        return self.manifests[version]

    def forget(self, version: int) -> None:
        """As a database that is put back: nothing after ``version`` was ever heard of."""
        for heard in (self.manifests, self.plans, self.receipts, self.screens):
            for later in [at for at in heard if at > version]:
                del heard[later]
        self.heads = [head for head in self.heads if head.version <= version]

    def post_screen(self, report: ScreenReport) -> None:
        self.on_call("post_screen")
        known = self.screens.setdefault(report.version, report)
        assert known == report
        self.on_call("post_screen done")

    def post_update(self, receipt: UpdateReceipt) -> None:
        self.on_call("post_update")
        if receipt.version not in self.plans:
            raise PeerFault(E_BATCH, "no such batch")
        known = self.receipts.setdefault(receipt.version, receipt)
        assert known == receipt
        self.on_call("post_update done")

    def roots(self) -> list[str]:
        """State roots of all published versions."""
        return [
            CheckpointManifest.from_payload(self.manifests[version].payload).state_root
            for version in sorted(self.manifests)
        ]


def make_learner(
    work: Path, model: Path, store: Store, client: FakeCoordinator, *, config: LearnerConfig | None = None,
    manifest: RunManifest | None = None, clock: FakeClock | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Learner:
    """A learner as ``learner.assembly`` makes it, but with known beacons."""
    layout, state = load_model(model)
    config = config or LearnerConfig.model_validate({"optim": {"lr": 1e-2}})
    manifest = manifest or run_manifest(layout)
    clock = clock or FakeClock()
    journal = Journal(work)
    publisher = Publisher(
        client, store, LEARNER, manifest, layout, config.publish, clock,
        beacon=lambda: beacon_of(0 if (newest := journal.newest_publication()) is None else newest + 1),
    )
    return Learner(
        client=client, store=store, identity=LEARNER, manifest=manifest,
        trainer=Trainer.open(model, layout, state, config, manifest.sampling), journal=journal,
        points=ResumePoints(work), config=config, clock=clock, should_stop=should_stop, publisher=publisher,
    )


def stocked(model: Path, store: DirectoryStore, count: int) -> FakeCoordinator:
    """A coordinator with ``count`` admitted groups of version 0."""
    speaker = Speaker(model, sampling_rules())
    return FakeCoordinator(groups=[admitted_group(speaker.group(g), store) for g in range(count)])
