"""Configuration of the learner: one frozen model, unknown keys refused, units in the names.

The learning part (everything but ``process``) has a digest that goes into every batch plan and update receipt, so
that anyone can see under which rules a version was made.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import Field, model_validator

from learner.corrections import Centring, Inside, Level, Outside, Sign, Statistic, correction_of
from protocol.config import Config

Preset = Literal[
    "pg", "sc", "stable_reinforce", "is", "tis", "tis+sc", "fresh_sc", "mis", "mis+sc", "icepop", "ppo", "ppo+sc",
    "dapo", "two_sided", "cispo", "gspo", "topr", "dppo", "m2po", "decoupled",
]
Aggregation = Literal["token_mean", "sequence_mean", "prompt_mean", "constant"]
Estimator = Literal["grpo", "grpo_mean", "rloo", "reinforce", "dr_grpo"]
StalenessPolicy = Literal["pace", "drop", "decay"]


class LossConfig(Config):
    """How a token's gradient is weighted (docs/learner.md, "Losses")."""

    preset: Preset = "tis+sc"
    """Row of the grid of ratio corrections (learner/corrections.py)."""
    level: Level | None = None
    """Whose ratio: token, sequence_sum, sequence_mean; None as in the preset, here and in the next six."""
    statistic: Statistic | None = None
    """What is compared with the band: ratio, tv, k1, k2, k3."""
    low: float | None = None
    """Low end of the band."""
    high: float | None = None
    """High end of the band; takes the place of the age-aware cap."""
    outside: Outside | None = None
    """Outside the band: clamp or drop."""
    inside: Inside | None = None
    """Weight inside the band: ratio or one."""
    sign: Sign | None = None
    """Advantages for which the band holds: both, positive, negative, ppo."""
    centring: Centring | None = None
    """Score centring: none, topk (committed head), draws, support; exact only where heads hold the whole vocabulary."""
    draws: Annotated[int, Field(ge=1, le=64)] = 8
    """Further seeded draws per token for centring by draws."""
    cap: Annotated[float, Field(ge=1.0, le=1000.0)] = 2.0
    """C0: largest importance ratio used at lag 0 (dimensionless)."""
    cap_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """gamma: C(lag) = 1 + (C0 - 1) gamma^lag."""
    ess_target: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Effective sample size (share of tokens) below which the cap of a lag bucket is tightened; 0: never."""
    ess_base: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """The learning rate is scaled by sqrt(min(1, ESS / this)); 0: never."""
    max_node_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Largest share of a step's signal (sum over tokens of the absolute weighted advantage) of any one node."""
    kl_coef: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Weight of the KL divergence from the run's first weights (nats per token), against the reward; 0: none."""
    aggregation: Aggregation = "token_mean"
    """What the loss is a mean over: tokens, sequences of token means, prompts of token means, or a constant."""

    @model_validator(mode="after")
    def _is_a_row(self) -> LossConfig:
        correction_of(self)
        return self


class StalenessConfig(Config):
    """What happens to tokens that are older than the weights they train (docs/learner.md, "Staleness")."""

    policy: StalenessPolicy = "pace"
    """pace: the coordinator opens no more work than can be used in time; drop: what came too late is left out and
    counted; decay: as pace, and a token weighs decay^lag."""
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """lambda of policy decay, per version of lag."""


class AdvantageConfig(Config):
    """How rewards of a group become advantages."""

    estimator: Estimator = "grpo"
    """grpo (mean and std), grpo_mean or dr_grpo (mean only), rloo (leave one out), reinforce (mean of the batch)."""
    std_floor: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-6
    """Added to the standard deviation (in units of reward)."""
    drop_no_signal: bool = True
    """Leave groups whose rewards are all equal out of the step and its denominators (DAPO's filter)."""


class OptimConfig(Config):
    """The optimiser of the fp32 masters."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw, or sgd with momentum."""
    lr: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-5
    """Learning rate after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Steps over which the learning rate rises linearly."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate falls after warm-up."""
    schedule_steps: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Step at which it has fallen to its floor; counted from the first step, warm-up included."""
    lr_floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """The floor, as a fraction of lr."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Momentum of sgd."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Global L2 norm gradients are clipped to."""
    outlier_ratio: Annotated[float, Field(gt=1.0)] = 100.0
    """A step whose gradient norm is this many times the recent median is skipped."""

    @model_validator(mode="after")
    def _falls_somewhere(self) -> OptimConfig:
        if self.schedule != "constant" and self.schedule_steps <= self.warmup_steps:
            raise ValueError("schedule_steps must be above warmup_steps for a schedule that falls")
        return self


class LoraConfig(Config):
    """Low-rank adapters in place of whole matrices (arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of the adapters; 0: train all weights."""
    alpha: Annotated[float, Field(gt=0.0, le=10_000.0)] = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the modules whose matrices get an adapter; everything else is frozen."""


class BatchConfig(Config):
    """How a batch is laid out for the model. Changes speed and memory, not what is learned."""

    max_tokens: Annotated[int, Field(ge=16, le=2**20)] = 1024
    """Token budget of a microbatch; a single longer sequence still goes through alone."""
    share_prompts: bool = True
    """Run a prompt once for several of its completions (block attention mask)."""
    head_chunk_mib: Annotated[int, Field(ge=1, le=4096)] = 24
    """Memory for one chunk of logits in the fused head, in MiB."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Type of the layers' arithmetic; the head, the loss and the masters are float32 always."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, about a third more time."""


class PublishConfig(Config):
    """What goes out after a step."""

    anchor_every_versions: Annotated[int, Field(ge=1)] = 64
    """A full anchor goes out at version 0 and at every multiple of this."""
    anchor_at_cost: Annotated[float, Field(gt=0, le=10)] = 0.15
    """An anchor goes out, too, when catching up from the last one would cost more than this share of it."""
    anchor_least_versions: Annotated[int, Field(ge=1)] = 16
    """But no sooner than so many versions after the last one: an anchor is the learner's uplink."""
    skips: bool = True
    """Merged diffs over 4, 8, 16 and 64 versions are made and announced, so that a node that was away fetches less."""
    head_ttl_ms: Annotated[int, Field(ge=1000, le=86_400_000)] = 120_000
    """How long a signed head is valid."""
    heartbeat_ms: Annotated[int, Field(ge=100, le=86_400_000)] = 20_000
    """How often the head is signed again so that a freeze is noticed."""


class ProcessConfig(Config):
    """What does not change the result of a step."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model lives. There is no falling back to another."""
    rank_timeout_s: Annotated[int, Field(ge=10, le=86_400)] = 600
    """With several processes: how long one waits for the others before it gives up."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads torch may use. A step is bit-reproducible at the same number of threads."""
    poll_ms: Annotated[int, Field(ge=10, le=600_000)] = 500
    """How often the coordinator is asked for admitted groups while waiting."""
    metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port on loopback where Prometheus finds the newest step's numbers; they are in metrics.prom in any case."""
    tensorboard: Annotated[str, Field(min_length=1)] | None = None
    """Folder for TensorBoard event files of the steps; needs the package tensorboard."""
    say_after_ms: Annotated[int, Field(ge=100)] = 10_000
    """After how long a wait says what it waits for."""
    checkpoint_every_versions: Annotated[int, Field(ge=1)] = 1
    """How often a resume point is written; versions in between are made again from the journal."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Resume points kept on disk."""


class LearnerConfig(Config):
    """Everything about one learner process."""

    loss: LossConfig = LossConfig()
    staleness: StalenessConfig = StalenessConfig()
    advantages: AdvantageConfig = AdvantageConfig()
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    batch: BatchConfig = BatchConfig()
    publish: PublishConfig = PublishConfig()
    process: ProcessConfig = ProcessConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the process's own randomness (not of any rollout)."""

    def learning_sha256(self) -> str:
        """Hex SHA-256 of every setting that can change the bytes of a published version."""
        rules = self.model_dump(mode="json", exclude={"process"})
        return hashlib.sha256(json.dumps(rules, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
