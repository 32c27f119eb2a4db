"""Units: a lease the node accepted, the requests it makes of the engine, and what came back so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from node.engine import Request
from protocol.envelope import Envelope
from protocol.errors import E_EXPIRED, PeerFault, code
from protocol.identity import key_id
from protocol.messages import CheckpointManifest, Lease, RunManifest
from protocol.rollout import Bundle, Rollout, prompt_digest, rollout_seed

E_LEASE_NODE = code("E_LEASE_NODE", "a lease is made out to another node")
E_LEASE_ENVIRONMENT = code("E_LEASE_ENVIRONMENT", "a lease names an environment the run does not have")
E_LEASE_SAMPLES = code("E_LEASE_SAMPLES", "a lease names samples twice or outside its group")
E_LEASE_PROMPT = code("E_LEASE_PROMPT", "a lease's prompt does not match its hash or its vocabulary")
E_LEASE_VERSION = code("E_LEASE_VERSION", "a lease starts at a version that is unknown or beyond the staleness bound")
E_LEASE_BEACON = code("E_LEASE_BEACON", "a lease's beacon is not the one its checkpoint was published with")


class Checkpoints(Protocol):
    """What a lease is compared with."""

    def newest(self) -> int:
        """Newest version at hand."""
        ...

    def manifest_of(self, version: int) -> CheckpointManifest:
        """The learner's manifest of a version."""
        ...


@dataclass(eq=False)
class Unit:
    """A lease under way."""

    lease: Lease
    envelope: Envelope
    deadline_ms: int  #: on our clock, which may differ from the coordinator's
    rollouts: dict[int, Rollout] = field(default_factory=dict)  #: by sample

    @property
    def id(self) -> str:
        """The lease's id."""
        return self.lease.lease_id

    @property
    def complete(self) -> bool:
        """Whether every sample is there."""
        return len(self.rollouts) == len(self.lease.samples)

    def request_keys(self) -> list[str]:
        """Keys of its requests."""
        return [f"{self.id}/{sample}" for sample in self.lease.samples]

    def requests(self) -> list[Request]:
        """One request per sample; the seeds follow from the lease alone."""
        lease, prompt = self.lease, tuple(self.lease.prompt_tokens)
        return [
            Request(
                key=key, sample=sample, prompt=prompt, start_version=lease.start_version, pinned=lease.pinned,
                seed=rollout_seed(lease.run_id, lease.beacon, lease.prompt_sha256, lease.group, sample),
            )
            for key, sample in zip(self.request_keys(), lease.samples, strict=True)
        ]

    def bundle(self) -> Bundle:
        """The rollouts in the order of the lease's samples."""
        return Bundle(tuple(self.rollouts[sample] for sample in self.lease.samples))


def unit_of_key(key: str) -> str:
    """The lease id in a request's key."""
    return key.partition("/")[0]


def open_lease(
    envelope: Envelope, run: RunManifest, public_key: bytes, checkpoints: Checkpoints, now_ms: int
) -> Unit:
    """The unit of a lease that arrives at ``now_ms``, once everything in it holds.

    The time it leaves is counted from its arrival: an honest node's clock may be off by minutes.

    Raises:
        PeerFault: signature and schema codes, ``E_WRONG_RUN``, ``E_LEASE_NODE``, ``E_EXPIRED``,
            ``E_LEASE_ENVIRONMENT``, ``E_LEASE_SAMPLES``, ``E_LEASE_PROMPT``, ``E_LEASE_VERSION``, ``E_LEASE_BEACON``.
        Transient: the manifest of its version cannot be fetched.
    """
    lease = Lease.open(envelope, run.roles.coordinator, run_id=run.run_id)
    if lease.node_id != key_id(public_key):
        raise PeerFault(E_LEASE_NODE, "not our lease", expected=key_id(public_key), got=lease.node_id)
    if lease.deadline_ms <= lease.issued_at_ms:
        raise PeerFault(
            E_EXPIRED, "the lease was over when it was made", expected=f"> {lease.issued_at_ms}", got=lease.deadline_ms
        )
    names = [environment.name for environment in run.environments]
    if lease.environment not in names:
        raise PeerFault(
            E_LEASE_ENVIRONMENT, "unknown environment", expected=", ".join(names)[:200], got=lease.environment
        )
    if len(set(lease.samples)) != len(lease.samples) or max(lease.samples) >= run.batch.group_size:
        raise PeerFault(
            E_LEASE_SAMPLES, "samples of a lease", expected=f"distinct, below {run.batch.group_size}",
            got=str(lease.samples)[:80],
        )
    _check_prompt(lease, run)
    _check_version(lease, run, checkpoints)
    return Unit(lease, envelope, now_ms + lease.deadline_ms - lease.issued_at_ms)


def _check_prompt(lease: Lease, run: RunManifest) -> None:
    digest = prompt_digest(lease.prompt_tokens)
    if digest != lease.prompt_sha256:
        raise PeerFault(E_LEASE_PROMPT, "not the prompt of its hash", expected=lease.prompt_sha256, got=digest)
    if max(lease.prompt_tokens) >= run.sampling.vocab_size:
        raise PeerFault(
            E_LEASE_PROMPT, "prompt token outside the vocabulary", expected=f"< {run.sampling.vocab_size}",
            got=max(lease.prompt_tokens),
        )


def _check_version(lease: Lease, run: RunManifest, checkpoints: Checkpoints) -> None:
    newest = checkpoints.newest()
    if not newest - run.batch.max_lag_versions <= lease.start_version <= newest:
        raise PeerFault(
            E_LEASE_VERSION, "start version out of bounds",
            expected=f"{newest - run.batch.max_lag_versions} .. {newest}", got=lease.start_version,
        )
    beacon = checkpoints.manifest_of(lease.start_version).beacon
    if lease.beacon != beacon:
        raise PeerFault(
            E_LEASE_BEACON, f"not the beacon of version {lease.start_version}", expected=beacon, got=lease.beacon
        )
