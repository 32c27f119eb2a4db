"""Every signed message of a run, as a frozen pydantic model with its payload type.

A message travels as a DSSE envelope whose payload is the canonical JSON of the model. No floats: fixed-point
integers carry their unit in the name (``_milli`` 1e-3, ``_micro`` 1e-6, ``_nano`` 1e-9, ``_ppm`` 1e-6 of one,
``_ms`` Unix milliseconds or a span of them). Hex strings are lower-case. Spec: ``docs/spec/messages.md``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from protocol.calibration import CalibrationRecord, Profile, RolloutScore
from protocol.identity import key_id
from protocol.message import Count, Hex16, Hex32, Message, Millis, Name, Part, Signed, TokenId, parse
from protocol.used_checkpoints import UsedCheckpoint, UsedCheckpoints

__all__ = [
    "AdmittedRequest", "AuditClaim", "AuditPolicy", "BatchGroup", "BatchPlan", "BatchRules", "CalibrationRecord",
    "CheckpointHead", "CheckpointManifest", "ChunkRef", "Commitment", "Count", "Environment", "Finding", "Hex16",
    "Hex32", "Lease", "LeaseRequest", "LeaseReturn", "Message", "Millis", "ModelSpec", "Name", "NodeHello",
    "NodeScreen", "Part", "Profile", "Receipt", "Roles", "RolloutScore", "RouteRules", "RunManifest",
    "SamplingRules", "ScreenReport", "Signed", "TokenId", "UpdateReceipt", "UploadRequest", "UsedCheckpoint",
    "Verdict", "opened_by", "parse",
]

# -- the run ---------------------------------------------------------------------------------------------


class RouteRules(Part):
    """Rollouts of a mixture of experts carry the experts of every token; ``docs/spec/rollout-bundle.md``, "Routes"."""

    layers: Annotated[int, Field(ge=1, le=1024)]  #: layers with a router
    experts: Annotated[int, Field(ge=2, le=256)]  #: of a layer
    per_token: Annotated[int, Field(ge=1, le=64)]  #: distinct experts that a layer sends a token to
    max_margin_micro: Annotated[int, Field(ge=0, le=10_000_000)] = 1_000
    #: how far, in 1e-6 of a router logit, a chosen expert may lie below the reference's own last choice


class SamplingRules(Part):
    """How every token of the run is drawn; see ``docs/spec/sampler.md``. A node that cannot obey refuses leases."""

    temperature_milli: Annotated[int, Field(ge=1, le=100_000)] = 1000  #: logits are divided by this / 1000
    steps_per_nat: Annotated[int, Field(ge=16, le=4096)] = 1024  #: one code step is 1 / steps_per_nat nats
    head_size: Annotated[int, Field(ge=1, le=255)] = 32  #: most entries a head may hold
    head_floor: Annotated[int, Field(ge=1, le=255)] = 1  #: entries a head always holds (if the vocabulary does)
    head_max_code: Annotated[int, Field(ge=1, le=65_534)] = 14_148  #: entries past the floor have code <= this
    swap_grid: Annotated[int, Field(ge=1, le=4096)] = 16  #: weights may change only before positions divisible by it
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] = 128  #: completion length limit, EOS included
    eos_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=8)]  #: any of these ends a completion
    vocab_size: Annotated[int, Field(ge=2, le=2**24)]  #: width of the logits; token ids are below it
    routes: RouteRules | None = None  #: rollouts carry their experts; None, and then not written: they do not

    @model_serializer(mode="wrap")
    def _without_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Rules without routes have the bytes that they had before there were any."""
        fields: dict[str, Any] = handler(self)
        if fields.get("routes", 0) is None:
            del fields["routes"]
        return fields


class Environment(Part):
    """A family of checkable tasks: ``protocol.tasks`` builds it from ``kind`` and ``params``."""

    name: Name
    kind: Name  #: registered name of the task class: sort, arithmetic, gsm8k
    params: dict[str, int | str] = Field(default_factory=dict)
    data_sha256: Hex32 | None = None  #: object holding the task's data, when it is not generated from the seed


class BatchRules(Part):
    """How the learner's batches are cut and how stale they may be."""

    groups_per_batch: Annotated[int, Field(ge=1, le=65_536)]
    group_size: Annotated[int, Field(ge=2, le=1024)]  #: samples per prompt
    samples_per_lease: Annotated[int, Field(ge=1, le=1024)]  #: divides group_size
    max_lag_versions: Annotated[int, Field(ge=0, le=1024)]  #: oldest version trained on: learner version minus this
    max_versions: Annotated[int, Field(ge=1)] | None = None  #: the run is complete at this version; None: endless
    lease_ms: Annotated[int, Field(ge=1000, le=86_400_000)] = 120_000  #: time a node has for a lease


class AuditPolicy(Part):
    """When a bundle is recomputed with the model: q = clip(ramp / (ramp + passes), floor, 1)."""

    ramp: Annotated[int, Field(ge=0, le=100_000)] = 20
    floor_ppm: Annotated[int, Field(ge=0, le=1_000_000)] = 50_000
    epoch_ms: Annotated[int, Field(ge=1000)] = 600_000  #: how long one draw key is used before it is revealed
    replicate_ppm: Annotated[int, Field(ge=0, le=1_000_000)] = 0  #: units that a second node makes too (T2')
    forced: Annotated[int, Field(ge=0, le=100_000)] = 20  #: next bundles audited for certain after an outlier
    forced_after_quiet: Annotated[int, Field(ge=0, le=100_000)] = 5  #: the same after a quiet spell
    quiet_ms: Annotated[int, Field(ge=1000)] = 6 * 3_600_000  #: a node that handed nothing in for this long was quiet
    unknown_profiles: bool = False  #: take nodes whose profile the run does not list: all audited, never punished by T2
    life_rollouts: Annotated[int, Field(ge=1, le=10**12)] = 1_000_000  #: audited bundles that ``alpha_ppm`` is for
    alpha_ppm: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    #: bound on the chance that statistics ban any honest node within ``life_rollouts``: alarm at ln(bundles / alpha)


class Roles(Part):
    """Public keys (hex) named by the root key."""

    coordinator: Hex32
    learner: Hex32
    verifiers: Annotated[list[Hex32], Field(min_length=1, max_length=256)]


class ModelSpec(Part):
    """The model a run trains, all but its weights."""

    name: Annotated[str, Field(max_length=200)]
    layout_sha256: Hex32  #: names, shapes, dtypes of all tensors (docs/spec/weights.md)
    files: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")], Hex32]
    #: config.json, tokenizer.json, tokenizer_config.json ...: file name -> object in the store
    state_hash: Name = "sha-256"  #: hash function of all state roots, by id: sha-256 or blake3


class RunManifest(Message):
    """What a run is; signed by the operator's root key. Everything else is checked against it."""

    TYPE: ClassVar[str] = "application/vnd.assay.run-manifest.v1+json"
    schema_version: Literal[1] = 1
    name: Annotated[str, Field(max_length=200)]
    created_at_ms: Millis
    expires_at_ms: Millis
    model: ModelSpec
    environments: Annotated[list[Environment], Field(min_length=1, max_length=64)]
    sampling: SamplingRules
    batch: BatchRules
    audit: AuditPolicy
    profiles: Annotated[list[Profile], Field(min_length=1, max_length=64)]
    roles: Roles
    protocol_min: Annotated[int, Field(ge=1)] = 1  #: oldest protocol version a node may speak
    protocol_advised: Annotated[int, Field(ge=1)] = 1


# -- weights ---------------------------------------------------------------------------------------------


class ChunkRef(Part):
    """One immutable object of a checkpoint."""

    sha256: Hex32
    size_bytes: Count  #: as stored
    max_output_bytes: Count  #: upper bound of what it decodes to


class CheckpointManifest(Message):
    """One published version of the weights; signed by the learner, linked to its parent by hash."""

    TYPE: ClassVar[str] = "application/vnd.assay.checkpoint.v1+json"
    version: Count
    parent_sha256: Hex32 | None  #: digest of the parent's manifest payload; None only for version 0
    layout_sha256: Hex32
    state_hash: Name = "sha-256"  #: hash function of its roots and leaves, by id; the run's
    state_root: Hex32
    base_root: Hex32 | None  #: state root the diff applies to; None when there is no diff
    diff: list[ChunkRef]  #: from the parent's state; empty for version 0
    anchor: list[ChunkRef]  #: the whole state; empty unless this version is an anchor
    leaves: ChunkRef | None = None  #: leaf list of the state, by which damage is located; nobody needs it to follow
    beacon: Hex32  #: fresh randomness, part of the seed of every rollout that starts at this version
    published_at_ms: Millis

    @property
    def objects(self) -> list[ChunkRef]:
        """Everything it names in the store."""
        return [*self.diff, *self.anchor, *([] if self.leaves is None else [self.leaves])]


class CheckpointHead(Message):
    """Which version is the newest; signed by the learner again and again so that a freeze is noticed."""

    TYPE: ClassVar[str] = "application/vnd.assay.checkpoint-head.v1+json"
    version: Count
    manifest_sha256: Hex32
    issued_at_ms: Millis
    expires_at_ms: Millis


# -- work ------------------------------------------------------------------------------------------------


class NodeHello(Message):
    """A node registers (or says again who it is); signed by the node's key."""

    TYPE: ClassVar[str] = "application/vnd.assay.node-hello.v1+json"
    public_key: Hex32
    name: Name
    profile: Name  #: engine profile it claims
    protocol_version: Count
    join_token: Annotated[str, Field(max_length=200)] | None
    issued_at_ms: Millis


class LeaseRequest(Message):
    """A node asks for work. The nonce makes a retry safe: the same nonce gives the same leases."""

    TYPE: ClassVar[str] = "application/vnd.assay.lease-request.v1+json"
    node_id: Hex32
    nonce: Hex16
    max_leases: Annotated[int, Field(ge=1, le=256)]
    newest_version: Count  #: newest version the node holds
    issued_at_ms: Millis


class Lease(Message):
    """Work for one node: some samples of one group. Signed by the coordinator."""

    TYPE: ClassVar[str] = "application/vnd.assay.lease.v1+json"
    lease_id: Hex16
    node_id: Hex32
    environment: Name
    group: Count
    samples: Annotated[list[Annotated[int, Field(ge=0, lt=65_536)]], Field(min_length=1, max_length=1024)]
    prompt_tokens: Annotated[list[TokenId], Field(min_length=1, max_length=131_072)]
    prompt_sha256: Hex32  #: protocol.rollout.prompt_digest(prompt_tokens)
    start_version: Count  #: every sample starts with these weights; a re-lease names the same version
    beacon: Hex32  #: beacon of start_version
    pinned: bool = False  #: the weights must not change on the way; not written when they may
    issued_at_ms: Millis
    deadline_ms: Millis

    @model_serializer(mode="wrap")
    def _without_default(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leases that are not pinned have the bytes that they had before there were pinned ones."""
        fields: dict[str, Any] = handler(self)
        if not fields.get("pinned", True):
            del fields["pinned"]
        return fields


class LeaseReturn(Message):
    """A node hands leases back unfinished (drain, refusal)."""

    TYPE: ClassVar[str] = "application/vnd.assay.lease-return.v1+json"
    node_id: Hex32
    lease_ids: Annotated[list[Hex16], Field(min_length=1, max_length=256)]
    reason: Annotated[str, Field(max_length=200)]
    issued_at_ms: Millis


class UploadRequest(Message):
    """A node asks where to put an object."""

    TYPE: ClassVar[str] = "application/vnd.assay.upload-request.v1+json"
    node_id: Hex32
    object_sha256: Hex32
    object_bytes: Annotated[int, Field(ge=1, le=256 * 2**20)]
    issued_at_ms: Millis


class Commitment(Message):
    """A node commits to the rollouts of one lease; signed by the node, sent after the upload."""

    TYPE: ClassVar[str] = "application/vnd.assay.commitment.v1+json"
    node_id: Hex32
    lease_id: Hex16
    lease_sha256: Hex32  #: digest of the lease's payload
    bundle_root: Hex32  #: Merkle root over the rollouts (docs/spec/rollout-bundle.md)
    object_sha256: Hex32  #: the encoded bundle in the store
    object_bytes: Count
    rollouts: Annotated[int, Field(ge=1, le=1024)]
    tokens: Count  #: completion tokens of all rollouts
    checkpoints: UsedCheckpoints  #: by which the weights of every version in the rollouts' segments were made
    profile: Name
    issued_at_ms: Millis


class Receipt(Message):
    """The coordinator has the commitment. Signed *before* the audit draw, which is a function of its digest."""

    TYPE: ClassVar[str] = "application/vnd.assay.receipt.v1+json"
    receipt_id: Hex16
    node_id: Hex32
    lease_id: Hex16
    commitment_sha256: Hex32
    object_sha256: Hex32
    epoch: Count
    epoch_key_sha256: Hex32  #: SHA-256 of the draw key, published when the epoch began
    received_at_ms: Millis


class AuditClaim(Message):
    """A verifier asks for the next bundle to check. The same nonce gives the same job again."""

    TYPE: ClassVar[str] = "application/vnd.assay.audit-claim.v1+json"
    verifier_id: Hex32
    nonce: Hex16
    issued_at_ms: Millis


class Finding(Part):
    """One check of an audit, in words and numbers."""

    check: Annotated[str, Field(max_length=80)]
    ok: bool
    expected: Annotated[str, Field(max_length=400)]
    got: Annotated[str, Field(max_length=400)]
    code: Annotated[str, Field(max_length=80)] | None = None
    sample: int | None = None  #: sample index the finding is about
    position: int | None = None  #: completion position of the first failing token


class Verdict(Message):
    """What a verifier found; signed by the verifier."""

    TYPE: ClassVar[str] = "application/vnd.assay.verdict.v1+json"
    verifier_id: Hex32
    node_id: Hex32
    lease_id: Hex16
    receipt_sha256: Hex32
    outcome: Literal["pass", "fail", "inconclusive"]
    code: Annotated[str, Field(max_length=80)] | None  #: None exactly when the outcome is pass
    tiers: list[Literal["T0", "T1", "T2", "T3"]]  #: tiers that were run to their end
    findings: Annotated[list[Finding], Field(max_length=256)]
    samples: list[int]  #: sample indices, in the order of rewards
    rewards_micro: list[int]  #: recomputed reward of each sample, 1e-6; empty unless T1 passed
    tokens: Count
    scores: list[RolloutScore] = Field(default_factory=list, max_length=1024)  #: of a pass with T2, if calibrated
    diverges: bool = False  #: passed, but another node's replica of the unit has other tokens
    issued_at_ms: Millis


# -- learning --------------------------------------------------------------------------------------------


class BatchGroup(Part):
    """One group of a batch: which receipts hold its samples."""

    group: Count
    receipts: list[Hex32]  #: digests of the receipts' payloads


class BatchPlan(Message):
    """What the learner is about to train on; written to the ledger before the step. Signed by the learner."""

    TYPE: ClassVar[str] = "application/vnd.assay.batch-plan.v1+json"
    version: Count  #: version this batch will make
    parent_version: Count
    groups: list[BatchGroup]
    config_sha256: Hex32  #: digest of the learner's resolved configuration
    issued_at_ms: Millis


class UpdateReceipt(Message):
    """A step is done: parent + batch -> version. Signed by the learner."""

    TYPE: ClassVar[str] = "application/vnd.assay.update-receipt.v1+json"
    version: Count
    parent_version: Count
    batch_sha256: Hex32  #: digest of the batch plan's payload
    manifest_sha256: Hex32
    config_sha256: Hex32
    metrics_micro: dict[Annotated[str, Field(max_length=80)], int]  #: step metrics, 1e-6 of their unit
    issued_at_ms: Millis


class NodeScreen(Part):
    """T1': what the learner's own forward pass says about one node's heads in one batch."""

    node_id: Hex32
    tokens: Count  #: tokens looked at
    outliers: Count  #: of them, in rollouts that stand out by themselves
    score_milli: Signed  #: one-sided z-score against rounding (fresh) or the other nodes at the same lag (stale), 1e-3
    receipts: Annotated[list[Hex32], Field(max_length=64)]  #: digests of the receipts that stand out, worst first


class AdmittedRequest(Message):
    """The learner asks for admitted groups: the answer says where bundles are that nobody else is to copy."""

    TYPE: ClassVar[str] = "application/vnd.assay.admitted-request.v1+json"
    limit: Annotated[int, Field(ge=1, le=4096)]  #: most groups of the answer
    issued_at_ms: Millis


class ScreenReport(Message):
    """T1' of the batch that made a version; signed by the learner. It forces audits and punishes nobody."""

    TYPE: ClassVar[str] = "application/vnd.assay.screen-report.v1+json"
    version: Count  #: version the batch made
    nodes: Annotated[list[NodeScreen], Field(max_length=65_536)]
    issued_at_ms: Millis


def opened_by(public_key: str | bytes) -> str:
    """Key id of a public key given as hex or bytes."""
    return key_id(bytes.fromhex(public_key) if isinstance(public_key, str) else public_key)
