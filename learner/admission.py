"""What the learner checks by itself before it trains on a group that the coordinator calls verified.

Cheap on a CPU and without a model: the lease is the coordinator's and names this prompt; its node committed to the
bundle, the coordinator has receipted that, and a verifier of the run has passed it (``protocol.provenance``); the
bundle (whose bytes the store checked against the hash) decodes and has the committed root, its heads are normalised,
every token is the one that head and public randomness select, and no token is staler than the bound. Rewards are those
of the signed verdict. What does not hold is the coordinator's fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from learner.batch import TrainingGroup, TrainingSample
from protocol import bundle, sampler
from protocol.api import AdmittedGroup, AdmittedSample
from protocol.errors import PeerFault, code
from protocol.messages import Lease, RunManifest
from protocol.provenance import Provenance, open_provenance
from protocol.rollout import Bundle, Rollout, prompt_digest, rollout_seed
from protocol.tasks import FULL_REWARD_MICRO

E_ADMITTED_GROUP = code("E_ADMITTED_GROUP", "an admitted group is incomplete or contradicts its leases")
E_ADMITTED_DRAW = code("E_ADMITTED_DRAW", "an admitted rollout holds a token that its head and seed do not select")
E_TOO_STALE = code("E_TOO_STALE", "a rollout holds tokens of a version outside the staleness bound")


class Admission:
    """Turns admitted groups into training data, or says what is wrong with them.

    Args:
        manifest: the run, checked.
        beacons: beacon of each version that rollouts may still start from, as this learner published it.
        unproved: take groups without any proof, too: a plan that was written before there were proofs has none.
    """

    def __init__(self, manifest: RunManifest, beacons: Mapping[int, str], *, unproved: bool = False):
        self._manifest, self._beacons, self._unproved = manifest, beacons, unproved

    @property
    def max_lag(self) -> int:
        """Versions after which a group is too old."""
        return self._manifest.batch.max_lag_versions

    def admit(self, group: AdmittedGroup, objects: Mapping[str, bytes], version: int) -> TrainingGroup:
        """The group as training data for a learner at ``version``; ``objects`` holds its bundles by SHA-256.

        Raises:
            PeerFault: ``E_ADMITTED_GROUP``, ``E_ADMITTED_DRAW``, what ``open_provenance`` raises, or what envelope
                and bundle decoders raise: the group must never be trained on.
            PeerFault: ``E_TOO_STALE``: it may not be used at this version nor later.
        """
        expected = list(range(self._manifest.batch.group_size))
        got = [sample.sample for sample in group.samples]
        _require(got == expected, f"samples {expected}", got)
        opened: dict[str, _Opened] = {}
        samples = []
        for sample in group.samples:
            lease = self._lease(group, sample)
            if sample.receipt_sha256 not in opened:
                proof = self._proof(group, sample, lease)
                opened[sample.receipt_sha256] = self._open(sample, proof, objects[sample.object_sha256])
            found = opened[sample.receipt_sha256]
            rollout = found.rollout(sample)
            self._check(rollout, lease, version)
            samples.append(TrainingSample(rollout, sample.reward_micro, sample.node_id, found.kl_limit))
        return TrainingGroup(group.group, list(group.prompt_tokens), tuple(samples))

    def is_stale(self, group: AdmittedGroup, version: int) -> bool:
        """Whether the group's first tokens are too old for a learner at ``version``."""
        return group.start_version < version - self._manifest.batch.max_lag_versions

    def _lease(self, group: AdmittedGroup, sample: AdmittedSample) -> Lease:
        manifest = self._manifest
        lease = Lease.open(sample.lease, manifest.roles.coordinator, run_id=manifest.run_id)
        got = (lease.group, lease.environment, lease.start_version, lease.node_id, lease.prompt_tokens)
        wanted = (group.group, group.environment, group.start_version, sample.node_id, group.prompt_tokens)
        _require(got == wanted, wanted[:4], got[:4])
        _require(lease.prompt_sha256 == prompt_digest(lease.prompt_tokens), "the digest of the prompt", "another")
        _require(sample.sample in lease.samples, f"a sample of {lease.samples}", sample.sample)
        reward = sample.reward_micro
        _require(0 <= reward <= FULL_REWARD_MICRO, f"reward of 0 to {FULL_REWARD_MICRO}", reward)
        beacon = self._beacons.get(lease.start_version, lease.beacon)
        _require(lease.beacon == beacon, f"beacon {beacon} of version {lease.start_version}", lease.beacon)
        return lease

    def _proof(self, group: AdmittedGroup, sample: AdmittedSample, lease: Lease) -> Provenance | None:
        """What stands behind the sample's bundle; None for a group without proofs where such groups are taken."""
        if not group.proofs and self._unproved:
            return None
        proofs = {proof.receipt.digest: proof for proof in group.proofs}
        _require(sample.receipt_sha256 in proofs, f"a proof for receipt {sample.receipt_sha256}", sorted(proofs))
        found = open_provenance(self._manifest, lease, sample.lease.digest, proofs[sample.receipt_sha256])
        wanted = found.commitment.object_sha256
        _require(sample.object_sha256 == wanted, f"the bundle {wanted} that was committed to", sample.object_sha256)
        return found

    def _open(self, sample: AdmittedSample, proof: Provenance | None, data: bytes) -> _Opened:
        limits = {profile.name: profile.max_mean_kl_nano / 1e9 for profile in self._manifest.profiles}
        if proof is None:
            opened = bundle.decode(data, self._manifest.sampling)
            return _Opened(sample.lease.digest, _by_sample(opened), None, max(limits.values()))
        commitment = proof.commitment
        opened = bundle.decode(data, self._manifest.sampling, most=(commitment.rollouts, commitment.tokens))
        root = bundle.bundle_root(opened, sample.lease.digest)
        _require(root == commitment.bundle_root, f"the root {commitment.bundle_root} that was committed to", root)
        used = {segment.version for rollout in opened.rollouts for segment in rollout.segments}
        named = {checkpoint.version for checkpoint in commitment.checkpoints}
        _require(used == named, f"versions {sorted(named)}, as committed to", sorted(used))
        limit = limits.get(commitment.profile, max(limits.values()))
        return _Opened(sample.lease.digest, _by_sample(opened), proof.rewards_micro, limit)

    def _check(self, rollout: Rollout, lease: Lease, version: int) -> None:
        rules = self._manifest.sampling
        oldest = version - self._manifest.batch.max_lag_versions
        first, last = rollout.segments[0].version, rollout.segments[-1].version
        _require(first == lease.start_version, f"start version {lease.start_version}", first)
        _require(not lease.pinned or len(rollout.segments) == 1, "one segment", len(rollout.segments))
        _require(last <= version, f"versions up to {version}", last)
        if first < oldest:
            raise PeerFault(E_TOO_STALE, "a rollout is too stale", expected=f"version >= {oldest}", got=first)
        sampler.check_head(rollout, rules)
        seed = rollout_seed(
            self._manifest.run_id, lease.beacon, lease.prompt_sha256, lease.group, rollout.sample
        )
        position = sampler.replay(rollout, seed, rules)
        if position is not None:
            raise PeerFault(
                E_ADMITTED_DRAW, f"sample {rollout.sample} of group {lease.group} does not replay",
                expected="the token that head and seed select", got=f"another at position {position}",
            )


@dataclass(frozen=True)
class _Opened:
    """A bundle and what is known of it."""

    lease_sha256: str
    rollouts: dict[int, Rollout]
    rewards_micro: dict[int, int] | None  #: of the verdict; None: without a proof
    kl_limit: float  #: mean divergence, nats per token, within which an audit would find its heads honest

    def rollout(self, sample: AdmittedSample) -> Rollout:
        """The rollout of a sample, whose lease and reward are those of the bundle.

        Raises:
            PeerFault: ``E_ADMITTED_GROUP``.
        """
        digest, number = sample.lease.digest, sample.sample
        _require(digest == self.lease_sha256, f"the lease {self.lease_sha256} of the bundle", digest)
        if self.rewards_micro is not None:
            reward = self.rewards_micro.get(number)
            _require(sample.reward_micro == reward, f"the verdict's reward {reward}", sample.reward_micro)
        if number not in self.rollouts:
            raise PeerFault(E_ADMITTED_GROUP, "a bundle lacks a sample it was admitted for", expected=number)
        return self.rollouts[number]


def _by_sample(opened: Bundle) -> dict[int, Rollout]:
    return {rollout.sample: rollout for rollout in opened.rollouts}


def _require(holds: bool, expected: Any, got: Any) -> None:
    if not holds:
        raise PeerFault(E_ADMITTED_GROUP, "an admitted group does not hold together", expected=expected, got=got)
