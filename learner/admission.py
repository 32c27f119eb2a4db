"""What the learner checks by itself before it trains on a group that the coordinator calls verified.

Cheap on a CPU and without a model: the lease is the coordinator's and names this prompt, the bundle (whose bytes the
store checked against the receipted hash) decodes, its heads are normalised, every token is the one that head and
public randomness select, and no token is staler than the bound. Rewards are the verifier's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from learner.batch import TrainingGroup, TrainingSample
from protocol import bundle, sampler
from protocol.api import AdmittedGroup, AdmittedSample
from protocol.errors import PeerFault, code
from protocol.messages import Lease, RunManifest
from protocol.rollout import Rollout, prompt_digest, rollout_seed

E_ADMITTED_GROUP = code("E_ADMITTED_GROUP", "an admitted group is incomplete or contradicts its leases")
E_ADMITTED_DRAW = code("E_ADMITTED_DRAW", "an admitted rollout holds a token that its head and seed do not select")
E_TOO_STALE = code("E_TOO_STALE", "a rollout holds tokens of a version outside the staleness bound")

#: Largest reward magnitude believed, in 1e-6: far beyond any task, small enough to stay exact in float64.
MAX_REWARD_MICRO: Final = 10**12


class Admission:
    """Turns admitted groups into training data, or says what is wrong with them.

    Args:
        manifest: the run, checked.
        beacons: beacon of each version that rollouts may still start from, as this learner published it.
    """

    def __init__(self, manifest: RunManifest, beacons: Mapping[int, str]):
        self._manifest, self._beacons = manifest, beacons

    def admit(self, group: AdmittedGroup, objects: Mapping[str, bytes], version: int) -> TrainingGroup:
        """The group as training data for a learner at ``version``; ``objects`` holds its bundles by SHA-256.

        Raises:
            PeerFault: ``E_ADMITTED_GROUP``, ``E_ADMITTED_DRAW``, or what envelope and bundle
                decoders raise: the group must never be trained on.
            PeerFault: ``E_TOO_STALE``: it may not be used at this version nor later.
        """
        expected = list(range(self._manifest.batch.group_size))
        got = [sample.sample for sample in group.samples]
        _require(got == expected, f"samples {expected}", got)
        opened: dict[str, dict[int, Rollout]] = {}
        samples = []
        for sample in group.samples:
            lease = self._lease(group, sample)
            if sample.object_sha256 not in opened:
                opened[sample.object_sha256] = self._open(objects[sample.object_sha256])
            rollout = opened[sample.object_sha256].get(sample.sample)
            if rollout is None:
                raise PeerFault(E_ADMITTED_GROUP, "a bundle lacks a sample it was admitted for", expected=sample.sample)
            self._check(rollout, lease, version)
            samples.append(TrainingSample(rollout, sample.reward_micro, sample.node_id, self._kl_limit()))
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
        _require(abs(reward) <= MAX_REWARD_MICRO, f"reward within +-{MAX_REWARD_MICRO}", reward)
        beacon = self._beacons.get(lease.start_version, lease.beacon)
        _require(lease.beacon == beacon, f"beacon {beacon} of version {lease.start_version}", lease.beacon)
        return lease

    def _kl_limit(self) -> float:
        """Mean divergence, nats per token, within which an audit would find a head honest."""
        return max(profile.max_mean_kl_nano for profile in self._manifest.profiles) / 1e9

    def _open(self, data: bytes) -> dict[int, Rollout]:
        return {rollout.sample: rollout for rollout in bundle.decode(data, self._manifest.sampling).rollouts}

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


def _require(holds: bool, expected: Any, got: Any) -> None:
    if not holds:
        raise PeerFault(E_ADMITTED_GROUP, "an admitted group does not hold together", expected=expected, got=got)
