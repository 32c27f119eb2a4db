"""Named settings of a whole run: what to train, on which tasks, with which rules.

Everything an operator would otherwise have to decide stands here with its reason; the numbers of ``tiny`` and
``smollm2`` were tuned on two CPU cores that carry the whole network.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from protocol.errors import E_CONFIG, LocalFault
from protocol.messages import AuditPolicy, BatchRules, Environment, Profile, RouteRules, SamplingRules

#: T2 thresholds of the torch engine in float32 on a CPU, derived and not measured: docs/spec/verification.md,
#: "Thresholds", which also says when a calibration record takes their place. Honest heads sit on
#: the floor of quantisation: at 1/256 nat rounding moves no entry by more than 1.953e-3 nats and no head by more than a
#: divergence of 1.9e-6; weights rounded to 8 bits measure 0.2 and 2e-3 on average. What the margin leaves for
#: arithmetic, 2.5e-4 nats, is what a node can settle near ties with: six times what float32 stacks differ by.
TORCH_CPU_FP32: Final = Profile(
    name="torch-cpu-fp32", max_mean_kl_nano=2_000, max_token_kl_micro=5, max_margin_micro=2_200
)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SamplingPreset(_Frozen):
    """``SamplingRules`` without what only the model's tokenizer knows."""

    temperature_milli: int = 1000  #: logits are divided by this / 1000
    steps_per_nat: int = 256  #: one code step is 1 / steps_per_nat nats; finer ones cost bytes and show nothing more
    head_size: int = 32  #: most entries a head may hold
    head_max_code: int = 3_537  #: a head holds what is likelier than 1e-6 (13.8 nats in steps)
    swap_grid: int = 16  #: weights may change only before positions divisible by it
    max_new_tokens: int = 128  #: completion length limit, EOS included
    record_routes: bool = False  #: rollouts of a mixture of experts carry the experts of every token


class UpPreset(_Frozen):
    """How ``assay up`` lays the network out on one machine."""

    honest_nodes: int = 2
    node_batch: int = 8  #: rollouts a node decodes at once
    cheater_batch: int = 2  #: the same for the drill node, which only has to be caught
    drills: tuple[str, ...] = ("best-of-n", "int8", "stale", "edited-answer")  #: run one after another
    time_limit_s: int = 300  #: the network drains after this even when the run is not complete


class Preset(_Frozen):
    """A run in one word."""

    name: str
    model: str  #: what ``learner init-model --preset`` is asked for
    state_hash: Literal["sha-256", "blake3"] = "sha-256"
    #: hash function of state roots; blake3 takes less than half the time, and its package on every machine of the run
    environments: tuple[Environment, ...]
    sampling: SamplingPreset
    batch: BatchRules
    audit: AuditPolicy
    profiles: tuple[Profile, ...]
    learner: dict[str, str | int | float]  #: the learner's settings, keys as in ``learner run --set``
    up: UpPreset

    def sampling_rules(
        self, eos_token_ids: list[int], vocab_size: int, routes: RouteRules | None = None
    ) -> SamplingRules:
        """The sampling rules once the model's tokenizer and its experts are known."""
        return SamplingRules(
            **self.sampling.model_dump(exclude={"record_routes"}), eos_token_ids=eos_token_ids, vocab_size=vocab_size,
            routes=routes,
        )


TINY: Final = Preset(
    name="tiny",
    model="tiny",
    environments=(
        Environment(name="sort", kind="sort", params={"order": "ascending", "max_length": 6, "alphabet": 10}),
    ),
    sampling=SamplingPreset(head_size=16, swap_grid=2, max_new_tokens=8),
    batch=BatchRules(
        groups_per_batch=32, group_size=8, samples_per_lease=8, max_lag_versions=4, max_versions=16, lease_ms=30_000
    ),
    audit=AuditPolicy(ramp=20, floor_ppm=50_000, epoch_ms=60_000),
    profiles=(TORCH_CPU_FP32,),
    learner={"optim.lr": 1.5e-4, "loss.preset": "tis", "process.poll_ms": 1500},
    up=UpPreset(node_batch=32, cheater_batch=4, time_limit_s=600),
)

SMOLLM2: Final = Preset(
    name="smollm2",
    model="smollm2",
    environments=(Environment(name="arithmetic", kind="arithmetic", params={"max_term": 10, "plain_percent": 40}),),
    sampling=SamplingPreset(temperature_milli=700, head_size=32, swap_grid=4, max_new_tokens=14),
    batch=BatchRules(
        groups_per_batch=6, group_size=8, samples_per_lease=4, max_lag_versions=3, max_versions=12, lease_ms=180_000
    ),
    audit=AuditPolicy(ramp=20, floor_ppm=50_000, epoch_ms=300_000),
    profiles=(TORCH_CPU_FP32,),
    learner={"optim.lr": 3e-5, "loss.preset": "tis"},
    up=UpPreset(node_batch=8, cheater_batch=2, time_limit_s=1_440),
)

#: GSM8K with the same model: long rollouts that seldom earn a reward, so fewer of them.
SMOLLM2_GSM8K: Final = SMOLLM2.model_copy(
    update={
        "environments": (Environment(name="gsm8k", kind="gsm8k", params={"max_question_chars": 240, "max_steps": 2}),),
        "sampling": SamplingPreset(temperature_milli=600, head_size=32, swap_grid=8, max_new_tokens=64),
        "batch": SMOLLM2.batch.model_copy(update={"groups_per_batch": 6, "group_size": 8, "max_versions": 6}),
    }
)

_PRESETS: Final = {"tiny": TINY, "smollm2": SMOLLM2}


def preset(name: str, task: str | None = None) -> Preset:
    """The preset called ``name``; ``task`` replaces its tasks by another kind it supports.

    A ``gsm8k`` environment comes without ``data_sha256``: the caller puts the data into the store and fills it in.

    Raises:
        LocalFault: ``E_CONFIG`` for an unknown name or a task the preset's model cannot do.
    """
    if name not in _PRESETS:
        raise LocalFault(E_CONFIG, "unknown preset", expected=f"one of {', '.join(_PRESETS)}", got=name)
    chosen = _PRESETS[name]
    if task is None or task == chosen.environments[0].kind:
        return chosen
    if name == "smollm2" and task == "gsm8k":
        return SMOLLM2_GSM8K
    supported = {"tiny": "sort", "smollm2": "arithmetic, gsm8k"}[name]
    raise LocalFault(E_CONFIG, f"preset {name} cannot do this task", expected=f"one of {supported}", got=task)
