"""Tables. Times are Unix milliseconds, digests lower-case hex, envelopes their canonical bytes.

The schema is made by the migrations in ``coordinator/alembic``; a test holds the two together.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, LargeBinary, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class NodeState(StrEnum):
    """Whether a node may work."""

    ACTIVE = "active"
    BANNED = "banned"


class GroupState(StrEnum):
    """Life of a group: open -> admitted -> consumed, or cancelled."""

    OPEN = "open"
    ADMITTED = "admitted"
    CONSUMED = "consumed"
    CANCELLED = "cancelled"


class UnitState(StrEnum):
    """Life of a unit, the part of a group that one lease covers."""

    OPEN = "open"
    LEASED = "leased"
    SUBMITTED = "submitted"
    VERIFIED = "verified"
    CANCELLED = "cancelled"


class LeaseState(StrEnum):
    """How a lease stands."""

    ACTIVE = "active"
    SUBMITTED = "submitted"
    EXPIRED = "expired"
    RETURNED = "returned"
    CANCELLED = "cancelled"


class ReceiptState(StrEnum):
    """How far the check of a submission is."""

    PENDING = "pending"
    CLAIMED = "claimed"
    PASS = "pass"
    FAIL = "fail"
    ASIDE = "aside"  #: inconclusive too often; nobody's fault
    VOID = "void"  #: removed because its node was banned


class CreditState(StrEnum):
    """Credit is pending until its batch is consumed."""

    PENDING = "pending"
    SETTLED = "settled"
    VOID = "void"


class Base(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: BigInteger().with_variant(Integer(), "sqlite"),
        str: String(200),
        bytes: LargeBinary(),
        list[int]: JSON(),
        list[str]: JSON(),
        dict[str, Any]: JSON(),
    }


class Meta(Base):
    """Single values: the upload secret, the newest signed head."""

    __tablename__ = "meta"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[bytes]


class Counter(Base):
    """Running totals, kept in the transactions that change them, so that the status costs no scan."""

    __tablename__ = "counters"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int]


class Node(Base):
    """A registered key."""

    __tablename__ = "nodes"
    id: Mapped[str] = mapped_column(primary_key=True)
    public_key: Mapped[str]
    name: Mapped[str]
    profile: Mapped[str]
    protocol_version: Mapped[int]
    state: Mapped[str]
    ban_code: Mapped[str | None]
    ban_reason: Mapped[str | None] = mapped_column(String(400))
    ban_receipt_id: Mapped[str | None]
    ban_until_ms: Mapped[int | None]
    joined_ms: Mapped[int]
    last_seen_ms: Mapped[int] = mapped_column(index=True)
    version: Mapped[int] = mapped_column(default=0)  #: newest version it said to hold
    audited_passes: Mapped[int] = mapped_column(default=0)  #: since its last incident
    accepted: Mapped[int] = mapped_column(default=0)  #: rollouts
    rejected: Mapped[int] = mapped_column(default=0)
    inconclusive: Mapped[int] = mapped_column(default=0)
    tokens: Mapped[int] = mapped_column(default=0)  #: completion tokens it handed in
    dropped: Mapped[int] = mapped_column(default=0)  #: leases that ran out in its hands
    forfeited: Mapped[int] = mapped_column(default=0)  #: rollouts cancelled because it dropped or held them
    drop_streak: Mapped[int] = mapped_column(default=0)  #: leases dropped since its last submission
    forced_audits: Mapped[int] = mapped_column(default=0)  #: next bundles that are audited for certain
    submitted_ms: Mapped[int | None]  #: when it last handed something in
    reward_micro: Mapped[int] = mapped_column(default=0)  #: recent distance of its rewards from everybody's, 1e-6
    suspicion_milli: Mapped[int] = mapped_column(default=0)  #: what audited rollouts say against it, 1e-3 nats
    suspicion_rollouts: Mapped[int] = mapped_column(default=0)  #: audited rollouts that went into it
    luck_milli: Mapped[int] = mapped_column(default=0)  #: how much better than its peers' its samples are, 1e-3 nats
    length_milli: Mapped[int] = mapped_column(default=0)  #: how much longer they are, 1e-3 nats
    worse_milli: Mapped[int] = mapped_column(default=0)  #: how much worse than its peers' they are, 1e-3 nats
    shorter_milli: Mapped[int] = mapped_column(default=0)  #: how much shorter they are, 1e-3 nats
    pinned_ms: Mapped[int | None]  #: since when its leases are pinned to one version, for that
    uncalibrated: Mapped[int] = mapped_column(default=0)  #: bundles beyond all known limits, less those that passed


class NodeReason(Base):
    """How often a code was given for a node's rejected or inconclusive bundles, or for pinning its leases."""

    __tablename__ = "node_reasons"
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"), primary_key=True)
    code: Mapped[str] = mapped_column(primary_key=True)
    count: Mapped[int]


class Peer(Base):
    """Where a node's swarm host said it listens; soft state that lapses."""

    __tablename__ = "peers"
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"), primary_key=True)
    addresses: Mapped[list[str]]
    announced_ms: Mapped[int] = mapped_column(index=True)


class JoinToken(Base):
    """An invitation; only the token's hash is kept."""

    __tablename__ = "join_tokens"
    token_sha256: Mapped[str] = mapped_column(primary_key=True)
    label: Mapped[str]
    created_ms: Mapped[int]
    expires_ms: Mapped[int]
    uses_left: Mapped[int | None]
    revoked_ms: Mapped[int | None]


class Drill(Base):
    """A key of the operator's that cheats on purpose."""

    __tablename__ = "drills"
    node_id: Mapped[str] = mapped_column(primary_key=True)
    attack: Mapped[str]
    enrolled_ms: Mapped[int]
    caught_ms: Mapped[int | None]
    code: Mapped[str | None]
    receipt_id: Mapped[str | None]
    rollouts_before_caught: Mapped[int | None]


class Group(Base):
    """All samples of one prompt, started from one version."""

    __tablename__ = "groups"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    environment: Mapped[str]
    prompt_tokens: Mapped[list[int]]
    prompt_sha256: Mapped[str]
    start_version: Mapped[int]
    beacon: Mapped[str]
    state: Mapped[str]
    cause: Mapped[str | None]  #: why it was cancelled
    consumed_version: Mapped[int | None] = mapped_column(index=True)
    created_ms: Mapped[int]
    __table_args__ = (Index("groups_by_state", "state", "id"),)


class Unit(Base):
    """The samples of a group that one lease covers."""

    __tablename__ = "units"
    id: Mapped[int] = mapped_column(primary_key=True)
    group_id: Mapped[int] = mapped_column(ForeignKey("groups.id"), index=True)
    samples: Mapped[list[int]]
    state: Mapped[str]
    lease_id: Mapped[str | None]  #: the newest real lease
    receipt_id: Mapped[str | None]  #: the submission that counts
    replicate: Mapped[bool] = mapped_column(default=False)  #: a second node is to make it too
    __table_args__ = (Index("units_by_state", "state", "id"),)


class Lease(Base):
    """A unit in a node's hands. A shadow lease (a drill's, or a replica) never changes its unit."""

    __tablename__ = "leases"
    id: Mapped[str] = mapped_column(primary_key=True)
    unit_id: Mapped[int] = mapped_column(ForeignKey("units.id"), index=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"))
    nonce: Mapped[str]
    shadow: Mapped[bool]
    replica: Mapped[bool] = mapped_column(default=False)  #: a shadow of a real unit by an honest node, which is paid
    state: Mapped[str]
    issued_ms: Mapped[int]
    deadline_ms: Mapped[int]
    rollouts: Mapped[int]
    envelope: Mapped[bytes]
    sha256: Mapped[str]
    __table_args__ = (
        Index("leases_by_nonce", "node_id", "nonce"),
        Index("leases_by_deadline", "state", "deadline_ms"),
        Index("leases_by_node", "node_id", "state"),
    )


class Receipt(Base):
    """A submission and how far its check is."""

    __tablename__ = "receipts"
    id: Mapped[str] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(unique=True)
    lease_id: Mapped[str] = mapped_column(ForeignKey("leases.id"), unique=True)
    unit_id: Mapped[int] = mapped_column(ForeignKey("units.id"))
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"))
    shadow: Mapped[bool]
    envelope: Mapped[bytes]
    commitment: Mapped[bytes]
    commitment_sha256: Mapped[str]
    bundle_root: Mapped[str]
    object_sha256: Mapped[str]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    epoch: Mapped[int] = mapped_column(ForeignKey("epochs.id"), index=True)
    rate_ppm: Mapped[int]
    drawn: Mapped[bool]
    received_ms: Mapped[int] = mapped_column(index=True)
    state: Mapped[str]
    code: Mapped[str | None]
    available_ms: Mapped[int]  #: not to be claimed before this
    claims: Mapped[int] = mapped_column(default=0)  #: that lapsed without a verdict
    claimed_by: Mapped[str | None]  #: who holds it, or gave it back without an answer
    claim_nonce: Mapped[str | None]
    inconclusive: Mapped[int] = mapped_column(default=0)  #: verdicts of that kind so far
    review: Mapped[bool] = mapped_column(default=False)  #: passed once, and looked at again because of an outlier
    review_ms: Mapped[int | None]  #: since when
    rewards: Mapped[dict[str, Any] | None]  #: sample index -> reward in 1e-6, once passed
    decided_ms: Mapped[int | None]
    __table_args__ = (
        Index("receipts_by_state", "state", "available_ms"),
        Index("receipts_by_node", "node_id", "state"),
    )


class Verdict(Base):
    """What a verifier said, as it said it."""

    __tablename__ = "verdicts"
    id: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(unique=True)
    receipt_id: Mapped[str] = mapped_column(ForeignKey("receipts.id"), index=True)
    verifier_id: Mapped[str]
    outcome: Mapped[str]
    code: Mapped[str | None]
    envelope: Mapped[bytes]
    received_ms: Mapped[int]


class Epoch(Base):
    """A span of time with one draw key, committed to when it begins and revealed when it ends."""

    __tablename__ = "epochs"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    key: Mapped[bytes]
    key_sha256: Mapped[str]
    began_ms: Mapped[int]
    ended_ms: Mapped[int | None]


class Credit(Base):
    """Verified tokens of one receipt; at most one entry per receipt, so that nothing is credited twice."""

    __tablename__ = "credits"
    receipt_id: Mapped[str] = mapped_column(ForeignKey("receipts.id"), primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"))
    tokens: Mapped[int]
    state: Mapped[str]
    at_ms: Mapped[int]
    __table_args__ = (Index("credits_by_node", "node_id", "state"),)


class Checkpoint(Base):
    """A published version."""

    __tablename__ = "checkpoints"
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sha256: Mapped[str]
    envelope: Mapped[bytes]
    state_root: Mapped[str]
    beacon: Mapped[str]
    diff_bytes: Mapped[int]
    anchor_bytes: Mapped[int]
    full_bytes: Mapped[int]  #: decoded size of the anchor; 0 when there is none
    published_ms: Mapped[int]
    received_ms: Mapped[int]


class Batch(Base):
    """What the learner trained on, and what came out."""

    __tablename__ = "batches"
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sha256: Mapped[str]
    plan: Mapped[bytes]
    posted_ms: Mapped[int]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    reward_micro: Mapped[int]  #: mean over the samples, 1e-6
    lag_milli: Mapped[int]  #: mean lag in versions over the samples, 1e-3
    update: Mapped[bytes | None]
    metrics: Mapped[dict[str, Any] | None]  #: the learner's own, 1e-6 of their unit


class Screen(Base):
    """What the learner's forward pass said about the nodes of one batch."""

    __tablename__ = "screens"
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sha256: Mapped[str]
    envelope: Mapped[bytes]
    received_ms: Mapped[int]


class Event(Base):
    """An entry of the append-only log: a leaf of its Merkle tree (docs/spec/log.md)."""

    __tablename__ = "log_entries"
    index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  #: from 0, without gaps
    kind: Mapped[str]
    receipt_id: Mapped[str | None] = mapped_column(index=True)  #: the receipt it is about, if any
    data: Mapped[bytes]  #: the leaf: canonical JSON


class LogNode(Base):
    """Hash of a complete subtree of the log: of entries ``index * 2**level`` up to ``(index + 1) * 2**level``."""

    __tablename__ = "log_nodes"
    level: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    hash: Mapped[bytes]
