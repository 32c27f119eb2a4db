"""A whole run in memory and one temporary folder: real keys, real leases, real bundles, a tiny random model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedConfig

from coordinator.presets import TORCH_CPU_FP32
from protocol import bundle as bundles
from protocol.envelope import Envelope
from protocol.evidence import Evidence
from protocol.identity import Identity
from protocol.messages import (
    AuditPolicy,
    BatchRules,
    CheckpointManifest,
    Commitment,
    Environment,
    Lease,
    ModelSpec,
    Receipt,
    Roles,
    RouteRules,
    RunManifest,
    SamplingRules,
    UsedCheckpoint,
)
from protocol.reference import ReferenceModel, load_config_model
from protocol.rollout import Bundle, Segment, prompt_digest, rollout_seed
from protocol.store import DirectoryStore
from protocol.tasks import make_task
from protocol.tokenizer import Tokenizer
from protocol.weights.chain import publish
from protocol.weights.layout import Layout, State, copy_state, write_safetensors
from tests.adversary.generation import generate
from tests.fakes.clock import FakeClock
from verifier.checkpoints import CheckpointBook
from verifier.findings import Judgement
from verifier.model_shelf import ModelShelf
from verifier.session import Session
from verifier.states import StateRing
from verifier.submission import Submission
from verifier.tokens import Rewards

RUN_ID = "ab" * 16
VOCAB = 64
EOS = 1
PROFILE = TORCH_CPU_FP32


def llama(positions: int) -> LlamaConfig:
    """The usual model."""
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=EOS,
    )


def identity(name: str) -> Identity:
    return Identity(hashlib.sha256(name.encode()).digest())


ROOT, COORDINATOR, LEARNER, VERIFIER, NODE, LIAR = (
    identity(name) for name in ("root", "coordinator", "learner", "verifier", "node", "second verifier")
)


class World:
    """Four published versions, one environment, one node; everything an attack needs to be set up honestly first.

    Args:
        seed: of the random weights and of the beacons, and so of every draw.
        salt: for other beacons with the same weights.
        positions: most inputs the model takes.
        config: of the model; None: a small Llama.
        changes: of the run manifest: fields of ``sampling``, ``batch``, ``audit``, or whole fields.
    """

    def __init__(
        self, folder: Path, *, max_new_tokens: int = 32, tie_rows: bool = False, versions: int = 4, seed: int = 7,
        salt: str = "", positions: int = 256, config: PreTrainedConfig | None = None,
        routes: RouteRules | None = None, **changes: Any,
    ):
        torch.set_num_threads(1)
        self.folder = folder
        self.clock = FakeClock()
        self.store = DirectoryStore(folder / "store")
        self._config = config or llama(positions)
        self.rng, self._tie_rows, self._salt = np.random.default_rng(seed), tie_rows, salt.encode()
        self.states: list[State] = []
        self.checkpoints: list[tuple[CheckpointManifest, Envelope]] = []
        self._prepare_model()
        model = load_config_model(self.model_dir)
        self.engine = ReferenceModel(model, self.layout)
        self._honest: dict[str, Bundle] = {}
        self.keys = {NODE.id: NODE}
        for _ in range(versions):
            self.publish()
        self.run = self._manifest(max_new_tokens, {"sampling": {"routes": routes}} | changes)
        self.run_envelope = self.run.sign(ROOT)
        self.book = CheckpointBook(self.run)
        self.book.add(envelope for _, envelope in self.checkpoints)
        self.rewards = Rewards(self.run, self.model_dir, self.store.get)
        self.ring = StateRing(self.layout, self.book, self.store.get)
        self.shelf = ModelShelf(self.model_dir, self.layout, self.ring)
        self.session = Session(self.run, self.book, self.rewards, self.shelf)
        self.task = make_task(self.run.environments[0], self.store.get, RUN_ID)
        self.tokenizer = Tokenizer.load(self.model_dir)

    @property
    def rules(self) -> SamplingRules:
        return self.run.sampling

    def state(self, version: int) -> State:
        return self.states[version]

    # -- the coordinator's part --------------------------------------------------------------------------------

    def lease(
        self, group: int = 0, samples: Sequence[int] = (0, 1, 2, 3), start_version: int = 1, node: Identity = NODE,
    ) -> Lease:
        prompt = self.task.prompt_tokens(self.task.problem(group), self.tokenizer)
        name = f"{group} {list(samples)} {start_version} {node.id}"
        return Lease(
            run_id=RUN_ID, lease_id=hashlib.sha256(name.encode()).hexdigest()[:32], node_id=node.id,
            environment="sort", group=group, samples=list(samples), prompt_tokens=prompt,
            prompt_sha256=prompt_digest(prompt), start_version=start_version,
            beacon=self.checkpoints[start_version][0].beacon, issued_at_ms=self.clock.now_ms(),
            deadline_ms=self.clock.now_ms() + 60_000,
        )

    def seeds(self, lease: Lease) -> dict[int, bytes]:
        return {s: rollout_seed(RUN_ID, lease.beacon, lease.prompt_sha256, lease.group, s) for s in lease.samples}

    # -- the node's part ---------------------------------------------------------------------------------------

    def generate(
        self, lease: Lease, *, segments: Sequence[Segment] | None = None, states: Callable[[int], State] | None = None,
        seeds: dict[int, bytes] | None = None, prompt: Sequence[int] | None = None, logits_hook=None,
        max_new_tokens: int | None = None, **rules: int,
    ) -> Bundle:
        """An honest bundle, unless a keyword says otherwise; ``rules`` replace those of the run."""
        limit = max_new_tokens or self.rules.max_new_tokens
        return generate(
            self.engine, states or self.state, self.rules.model_copy(update={"max_new_tokens": limit} | rules),
            prompt or lease.prompt_tokens, seeds or self.seeds(lease),
            segments or [Segment(0, lease.start_version)], logits_hook=logits_hook,
        )

    def honest(self, lease: Lease) -> Bundle:
        """What an honest node makes of the lease; made once."""
        if lease.lease_id not in self._honest:
            self._honest[lease.lease_id] = self.generate(lease)
        return self._honest[lease.lease_id]

    def made(self, lease: Lease, bundle: Bundle) -> None:
        """Take ``bundle`` for what an honest node makes of the lease."""
        self._honest[lease.lease_id] = bundle

    def submission(
        self, lease: Lease, bundle: Bundle, *, signer: Identity | None = None, data: bytes | None = None,
        drawn: bool = True, **commitment: object,
    ) -> Submission:
        """Commit, receive, hand over; keywords replace fields of the commitment."""
        lease_envelope, signer = lease.sign(COORDINATOR), signer or self.keys.get(lease.node_id, NODE)
        data = bundles.encode(bundle) if data is None else data
        fields: dict[str, object] = {
            "run_id": RUN_ID, "node_id": lease.node_id, "lease_id": lease.lease_id,
            "lease_sha256": lease_envelope.digest,
            "bundle_root": bundles.bundle_root(bundle, lease_envelope.digest),
            "object_sha256": hashlib.sha256(data).hexdigest(), "object_bytes": len(data),
            "rollouts": len(bundle.rollouts), "tokens": sum(map(len, bundle.rollouts)),
            "checkpoints": self.named(segment.version for rollout in bundle.rollouts for segment in rollout.segments),
            "profile": PROFILE.name, "issued_at_ms": self.clock.now_ms(),
        }
        signed = Commitment.model_validate(fields | commitment).sign(signer)
        receipt = Receipt(
            run_id=RUN_ID, receipt_id=lease.lease_id, node_id=lease.node_id, lease_id=lease.lease_id,
            commitment_sha256=signed.digest, object_sha256=str(fields["object_sha256"]), epoch=0,
            epoch_key_sha256="00" * 32, received_at_ms=self.clock.now_ms(),
        )
        return Submission(lease_envelope, signed, receipt.sign(COORDINATOR), signer.public_key, data, drawn)

    def named(self, versions: Iterable[int]) -> list[UsedCheckpoint]:
        """Versions as a commitment names them; for one that is not out, a digest is made up."""
        return [
            UsedCheckpoint(
                version=version, manifest_sha256=self.checkpoints[version][1].digest
                if version < len(self.checkpoints) else hashlib.sha256(b"%d" % version).hexdigest(),
            )
            for version in sorted(set(versions))
        ]

    # -- the verifier's part -----------------------------------------------------------------------------------

    def judge(self, submission: Submission) -> Judgement:
        return self.session.judge([submission])[0]

    def judge_honest(self, lease: Lease, **options) -> Judgement:
        return self.judge(self.submission(lease, self.generate(lease, **options)))

    def evidence(self, submission: Submission) -> Evidence:
        return Evidence(
            root_public_key=ROOT.public_key, node_public_key=submission.node_public_key, run_manifest=self.run_envelope,
            lease=submission.lease, commitment=submission.commitment, receipt=submission.receipt, verdicts=(),
            checkpoints=tuple(envelope for _, envelope in self.checkpoints), bundle=submission.bundle,
        )

    def checkpoint_folder(self, version: int) -> Path:
        """A Hugging Face folder of one version."""
        folder = self.folder / f"hf-{version}"
        folder.mkdir(exist_ok=True)
        for path in self.model_dir.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        write_safetensors(folder / "model.safetensors", self.layout, self.states[version])
        return folder

    # -- setting up --------------------------------------------------------------------------------------------

    def _prepare_model(self) -> None:
        """Sets ``model_dir`` and ``layout``."""
        self.model_dir = _model_folder(self.folder / "model", self._config)
        self.layout = _layout(load_config_model(self.model_dir))

    def _next_state(self) -> State:
        new = next_state(self.states[-1], self.rng) if self.states else _first_state(self.layout, self.rng)
        if self._tie_rows:
            new["model.embed_tokens.weight"][10:14] = new["model.embed_tokens.weight"][10]
        return new

    def publish(self) -> None:
        """Make one more version."""
        new, beacon = self._next_state(), self.rng.bytes(32)
        version = publish(
            self.store, LEARNER, RUN_ID, self.layout, self.checkpoints[-1] if self.states else None,
            self.states[-1] if self.states else None, new, anchor=not self.states, clock=self.clock,
            beacon=hashlib.sha256(self._salt + beacon).hexdigest() if self._salt else beacon.hex(),
        )
        self.states.append(new)
        self.checkpoints.append((version.manifest, version.envelope))
        self.clock.advance(1)

    def second_manifest(self, version: int) -> Envelope:
        """Another manifest of a version by the learner: the same parent and beacon, other weights."""
        return publish(
            self.store, LEARNER, RUN_ID, self.layout, self.checkpoints[version - 1], self.states[version - 1],
            next_state(self.states[version - 1], np.random.default_rng(99)), anchor=False, clock=self.clock,
            beacon=self.checkpoints[version][0].beacon,
        ).envelope

    def _rules(self, max_new_tokens: int) -> SamplingRules:
        return SamplingRules(
            steps_per_nat=256, head_size=16, head_max_code=3_537, swap_grid=8, max_new_tokens=max_new_tokens,
            eos_token_ids=[EOS], vocab_size=VOCAB,
        )

    def _environments(self) -> list[Environment]:
        return [Environment(name="sort", kind="sort", params={"order": "ascending"})]

    def _manifest(self, max_new_tokens: int, changes: dict[str, Any]) -> RunManifest:
        files = {
            path.name: self.store.put(path.read_bytes()) for path in self.model_dir.iterdir()
            if path.suffix != ".safetensors"
        }
        self.store.put(self.layout.to_bytes())
        parts = {
            "sampling": self._rules(max_new_tokens),
            "batch": BatchRules(groups_per_batch=2, group_size=8, samples_per_lease=4, max_lag_versions=3),
            "audit": AuditPolicy(), "profiles": [PROFILE], "environments": self._environments(),
        }
        for name, change in changes.items():
            parts[name] = parts[name].model_copy(update=change) if isinstance(change, dict) else change
        return RunManifest(
            run_id=RUN_ID, name="adversary", created_at_ms=0, expires_at_ms=self.clock.now_ms() + 10**9,
            model=ModelSpec(name="tiny", layout_sha256=self.layout.sha256, files=files),
            **parts,
            roles=Roles(
                coordinator=COORDINATOR.public_key.hex(), learner=LEARNER.public_key.hex(),
                verifiers=[VERIFIER.public_key.hex(), LIAR.public_key.hex()],
            ),
        )


class RestlessWorld(World):
    """Versions that differ much, and always as much: each is the first one with other noise on its weights."""

    def _next_state(self) -> State:
        return next_state(self.states[0], self.rng, 0.2) if self.states else super()._next_state()


class ShortWorld(RestlessWorld):
    """The same with completions of very unlike lengths: the end's embedding is three times as loud as the others."""

    def _next_state(self) -> State:
        state = super()._next_state()
        if self.states:  # the first one is what all others are made of
            state["model.embed_tokens.weight"][EOS] = to_bits(3 * from_bits(state["model.embed_tokens.weight"][EOS]))
        return state


def replaced(bundle: Bundle, index: int, **columns: object) -> Bundle:
    """The bundle with some columns of one rollout replaced."""
    rollouts = list(bundle.rollouts)
    rollouts[index] = replace(rollouts[index], **columns)
    return Bundle(tuple(rollouts))


def quantised(state: State, bits: int = 8) -> State:
    """Weights rounded to ``bits`` per row, then back to bf16: the cheap way to save memory."""
    cheap = copy_state(state)
    for name, words in cheap.items():
        if words.ndim != 2:
            continue
        values = from_bits(words)
        scale = np.abs(values).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
        cheap[name] = to_bits(np.rint(values / scale) * scale)
    return cheap


def from_bits(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


def to_bits(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16).copy()


def _first_state(layout: Layout, rng: np.random.Generator) -> State:
    state = {}
    for entry in layout.entries:
        one_dimensional = len(entry.shape) == 1
        values = np.ones(entry.shape) if one_dimensional else rng.normal(0, 0.3, entry.shape)
        state[entry.name] = to_bits(values)
    return state


def next_state(state: State, rng: np.random.Generator, step: float = 0.02) -> State:
    """About what a step of AdamW does: most words stay, some move by a little."""
    new = copy_state(state)
    for name, words in new.items():
        if words.ndim == 2:
            values = from_bits(words)
            new[name] = to_bits(values * (1 + step * rng.normal(size=values.shape)))
    return new


def _layout(model: torch.nn.Module) -> Layout:
    stored: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        stored.setdefault(tensor.data_ptr(), name)
    return Layout.of({name: ("BF16", tuple(model.state_dict()[name].shape)) for name in stored.values()})


def _model_folder(folder: Path, config: PreTrainedConfig) -> Path:
    """config.json and a tokenizer of single characters."""
    config.save_pretrained(folder)
    words = ["<pad>", "<eos>", "<unk>", *"><~=abcdefghijklmnopqrstuvwxyz"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    return folder
