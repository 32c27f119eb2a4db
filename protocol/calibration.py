"""Profiles of a run: the limits of one node profile, and what honest rollouts of it look like to the verifier.

Derivations: ``docs/statistics.md``. Fixed-point integers carry their unit in the name, as in ``protocol.messages``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from protocol.message import Count, Hex32, Message, Millis, Name, Part, Signed

Levels = Annotated[list[Signed], Field(max_length=32)]  #: ascending thresholds


class Stratum(Part):
    """Null distributions of honest rollouts of some length: level j is exceeded with a chance of at most 2^-(j+1)."""

    min_tokens: Annotated[int, Field(ge=1, lt=2**31)]  #: fewest stochastic tokens of a rollout that belongs here
    rollouts: Count  #: honest rollouts the levels were taken from, each of another group
    log_kl_milli: Levels  #: mean log-divergence, 1e-3 of a natural log of nats
    bias_centre_nano: Signed  #: median of the signed bias, 1e-9 nats
    bias_nano: Levels  #: distance of the signed bias from its centre, 1e-9 nats
    margin_nano: Levels  #: mean clipped margin, 1e-9 nats


class Calibration(Part):
    """What honest rollouts of a node profile look like to one profile of the verifier (docs/statistics.md)."""

    verifier_profile: Name  #: configuration of the T2 reference the numbers hold for
    confidence_ppm: Annotated[int, Field(ge=0, le=1_000_000)]  #: that every level of every stratum is met
    record_sha256: Hex32 | None = None  #: digest of the signed record this was taken from
    strata: Annotated[list[Stratum], Field(max_length=16)]  #: ascending by ``min_tokens``; shorter ones: nothing


class Profile(Part):
    """A calibrated way to compute log-probs (engine, dtype) and the T2 thresholds that hold for it."""

    name: Name  #: for example torch-cpu-fp32
    max_mean_kl_nano: Count  #: mean KL(committed head || reference) per stochastic token of a rollout, 1e-9 nats
    max_token_kl_micro: Count  #: the same for any single token, 1e-6 nats
    max_margin_micro: Count  #: how far a tail draw may lose under the reference, 1e-6 nats
    calibration: Calibration | None = None  #: None: limits alone judge a rollout, nothing is summed up over bundles


class RolloutScore(Part):
    """What the statistics of one recomputed rollout say, next to the run's calibration (docs/statistics.md)."""

    sample: int
    tokens: Count  #: stochastic tokens
    log_kl_milli: Signed
    bias_nano: Signed
    margin_nano: Signed
    llr_milli: Annotated[int, Field(ge=-500, le=3000)]  #: evidence against honesty, 1e-3 nats, as T3 confirms it


class CalibrationRecord(Message):
    """A calibration and where it comes from; signed by the verifier that measured it."""

    TYPE: ClassVar[str] = "application/vnd.assay.calibration.v1+json"
    verifier_public_key: Hex32  #: the signer's
    profile: Profile  #: node profile with the limits chosen and the null distributions
    layout_sha256: Hex32  #: of the model the rollouts were made with
    rollouts: Count
    tokens: Count
    stochastic_tokens: Count
    versions: list[Count]  #: checkpoint versions the rollouts used
    evidence_sha256: list[Hex32]  #: evidence files the rollouts were read from, ascending
    issued_at_ms: Millis
