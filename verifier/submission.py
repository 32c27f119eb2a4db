"""A submission as it comes in (envelopes and bytes) and as it is once its parts are opened."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from protocol.envelope import Envelope
from protocol.messages import Commitment, Lease, Profile, Receipt, RunManifest
from protocol.rollout import Bundle, rollout_seed


@dataclass(frozen=True)
class Submission:
    """What is to be judged. Nothing in it has been checked."""

    lease: Envelope
    commitment: Envelope
    receipt: Envelope | None  #: None only in a node's own dry run
    node_public_key: bytes
    bundle: bytes  #: encoded
    drawn: bool  #: recompute with the model as well
    replica: Submission | None = None  #: what another node made of the same unit
    confirm: bool = False  #: suspicion of the node is high: let T3 confirm what speaks against it


@dataclass
class Opened:
    """A submission whose envelopes are open; ``bundle`` is set once it is decoded."""

    run: RunManifest
    submission: Submission
    lease: Lease
    receipt: Receipt | None
    commitment: Commitment
    bundle: Bundle

    @cached_property
    def seeds(self) -> dict[int, bytes]:
        """Seed of each sample of the lease."""
        lease = self.lease
        return {
            sample: rollout_seed(self.run.run_id, lease.beacon, lease.prompt_sha256, lease.group, sample)
            for sample in lease.samples
        }

    @property
    def known_profile(self) -> Profile | None:
        """The run's entry for the profile the node claims; None where the run takes unlisted ones."""
        return next((p for p in self.run.profiles if p.name == self.commitment.profile), None)

    @property
    def profile(self) -> Profile:
        """Limits for this submission: those of its profile, for an unlisted one the narrowest of the run."""
        return self.known_profile or min(self.run.profiles, key=lambda p: (p.max_mean_kl_nano, p.max_token_kl_micro))
