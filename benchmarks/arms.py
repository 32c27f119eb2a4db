"""Training runs for the experiments on stale and foreign samplers: sorting in small, many runs at once.

A run is a small transformer, warmed on a solver's traces, that learns to sort from rollouts of a *sampler* whose
weights are not the learner's. Rollouts are drawn by the network's own seeded sampler from committed heads; advantages,
corrections, age-aware caps, the ESS rule for the rate and the gradient of every token are the learner's own code. The
optimiser is AdamW on float32 masters; sampler and learner compute with masters rounded to bfloat16.

Runs of one method are a stack over learning rates and seeds. Seeds are paired: the warmed model, the problems and the
sampler's randomness of a seed are the same for every method and rate.

Legend: R runs, S seeds, G groups of a step, B completions of a step, T completion tokens, N loss tokens of all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import flock, sorting
from learner.advantages import batch_advantages
from learner.config import AdvantageConfig, LossConfig
from learner.corrections import correction_of
from learner.ess import CapController, ess, rate_scale, weight_sums
from learner.head import LossTokens, TokenStats, logits_gradient
from learner.losses import token_rule
from protocol.messages import SamplingRules

#: The methods in the order of the tables. ``tis`` and ``tis+sc`` have the constant cap of the literature; ``default``
#: is what a run gets without settings (the preset ``tis+sc``, whose cap falls with age), ``aged tis`` the same cap
#: without centring, ``fresh sc`` the default of before, which takes the ratio of fresh tokens for 1.
METHODS: Final[dict[str, LossConfig]] = {
    "pg": LossConfig(preset="pg"),
    "sc": LossConfig(preset="sc"),
    "ppo": LossConfig(preset="ppo"),
    "mis": LossConfig(preset="mis"),
    "tis": LossConfig(preset="tis", high=2.0),
    "aged tis": LossConfig(preset="tis"),
    "tis+sc": LossConfig(preset="tis", high=2.0, centring="topk"),
    "fresh sc": LossConfig(preset="fresh_sc"),
    "default": LossConfig(),
}
RULES: Final = SamplingRules(
    steps_per_nat=1024, head_size=8, eos_token_ids=[sorting.EOS], vocab_size=sorting.VOCABULARY,
    max_new_tokens=sorting.ANSWER,
)
_MICRO: Final = 1_000_000
MAX_NORM: Final = 1.0
#: Kinds of randomness of a seed.
_WARM, _TRAIN, _TEST = range(3)


@dataclass(frozen=True)
class Size:
    """How large an experiment is."""

    shape: flock.Shape = flock.Shape(sorting.VOCABULARY)  # noqa: RUF009 (immutable)
    warm_steps: int = 300
    warm_batch: int = 128
    warm_rate: float = 3e-3
    steps: int = 128
    groups: int = 8
    group_size: int = 8
    test_every: int = 32
    test_problems: int = 256


@dataclass
class Run:
    """What one run came to."""

    method: str
    rate: float
    seed: int
    steps: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  #: of the learner's own policy on held-out problems
    kl: list[float] = field(default_factory=list)  #: mean k3 estimate of KL(q || p) of the step's tokens, nats
    ess: list[float] = field(default_factory=list)  #: of the ratios, before truncation
    cut: list[float] = field(default_factory=list)  #: share of tokens outside the band

    @property
    def final(self) -> float:
        """Reward at the end: the mean of the last two tests."""
        return float(np.mean(self.rewards[-2:]))

    @property
    def collapsed(self) -> bool:
        """Whether less than half of its own best is left at the end."""
        return self.final < max(self.rewards) / 2


#: From a step and the learner's weights to the sampler's.
Sampler = Callable[[int, flock.Weights], flock.Weights]
#: A fresh sampler, and the lag of its tokens by step.
MakeSampler = Callable[[], tuple[Sampler, Callable[[int], int]]]


def refreshed_every(steps: int) -> MakeSampler:
    """A sampler that takes up the learner's weights every ``steps`` steps: lags 0 to ``steps`` - 1."""

    def make() -> tuple[Sampler, Callable[[int], int]]:
        held: dict[str, flock.Weights] = {}

        def sampler(step: int, current: flock.Weights) -> flock.Weights:
            if step % steps == 0:
                held["weights"] = {name: value.clone() for name, value in current.items()}
            return held["weights"]

        return sampler, lambda step: step % steps

    return make


def quantised_to(bits: int) -> MakeSampler:
    """A sampler with the learner's newest weights in ``bits`` bits: lag 0."""
    return lambda: (lambda _, current: flock.quantised(current, bits), lambda _: 0)


def warmed(size: Size, seeds: Sequence[int], say: Callable[[str], None]) -> flock.Weights:
    """One transformer per seed, taught by a solver's traces to answer in form and now and then right."""
    masters = flock.new_weights(size.shape, [1_000_003 * seed + 1 for seed in seeds])
    adam, rngs = flock.Adam(masters), [_rng(seed, _WARM, 0) for seed in seeds]
    for step in range(size.warm_steps):
        ids = torch.from_numpy(np.stack([sorting.traces(rng, size.warm_batch) for rng in rngs]))
        losses: list[float] = []

        def backward(leaves: flock.Weights, ids: Tensor = ids, losses: list[float] = losses) -> None:
            states = flock.hidden(leaves, size.shape, ids[:, :, :-1])[:, :, sorting.PROMPT - 1 :]
            logp = flock.logits(leaves, states).log_softmax(-1)
            loss_R = -logp.gather(-1, ids[:, :, sorting.PROMPT :, None]).mean((1, 2, 3))
            losses.append(float(loss_R.mean().detach()))
            loss_R.sum().backward()  # type: ignore[no-untyped-call]

        gradients = flock.gradients_of(masters, backward)
        rate = size.warm_rate * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / size.warm_steps)
        adam.step(gradients, torch.full((len(seeds),), rate), MAX_NORM)
        if (step + 1) % 100 == 0:
            say(f"warm-up step {step + 1}/{size.warm_steps}: loss {losses[-1]:.3f}")
    return masters


def train(method: str, base: flock.Weights, seeds: Sequence[int], rates: Sequence[float], size: Size,
          make_sampler: MakeSampler,
          say: Callable[[str], None] = lambda _: None) -> list[Run]:
    """One run per rate and seed; ``base`` holds the warmed model of each seed."""
    runs = [Run(method, rate, seed) for rate in rates for seed in seeds]
    masters = flock.pick(base, [index for _ in rates for index in range(len(seeds))])
    config, adam, rate_R = METHODS[method], flock.Adam(masters), torch.tensor([run.rate for run in runs])
    controllers = [CapController(config.ess_target) for _ in runs]
    sampler, lag_at = make_sampler()
    for step in range(size.steps):
        current = flock.published(masters)
        if step % size.test_every == 0:
            _test(runs, step, current, size)
            say(f"{method} step {step}: " + " ".join(f"{run.rewards[-1]:.2f}" for run in runs))
        lag = lag_at(step)
        prompts, draws, rewards = rollouts(sampler(step, current), [run.seed for run in runs], step, size)
        signal, valid = signals(rewards, draws)
        seen: list[TokenStats] = []

        def backward(leaves: flock.Weights, *, lag: int = lag, prompts: Tensor = prompts, draws: flock.Draws = draws,
                     signal: Tensor = signal, valid: Tensor = valid, seen: list[TokenStats] = seen) -> None:
            seen.append(backward_of(leaves, size.shape, prompts, draws, signal, valid, lag, config, controllers))

        gradients = flock.gradients_of(current, backward)
        scale_R = _after(runs, step, size, seen[0], valid, lag, config, controllers)
        adam.step(gradients, rate_R * scale_R, MAX_NORM)
    _test(runs, size.steps, flock.published(masters), size)
    say(f"{method} step {size.steps}: " + " ".join(f"{run.rewards[-1]:.2f}" for run in runs))
    return runs


def rollouts(weights: flock.Weights, seeds: Sequence[int], step: int, size: Size
             ) -> tuple[Tensor, flock.Draws, NDArray[np.int64]]:
    """(R, G, 7) prompts, completions of ``group_size`` per prompt, (R, G, group_size) rewards in 1e-6."""
    return _rollouts(weights, [_rng(seed, _TRAIN, step) for seed in seeds], size.groups, size.group_size, size)


def _rollouts(weights: flock.Weights, rngs: Sequence[np.random.Generator], groups: int, samples: int, size: Size
              ) -> tuple[Tensor, flock.Draws, NDArray[np.int64]]:
    prompts_RG7 = np.stack([sorting.problems(rng, groups) for rng in rngs])
    words = np.stack([rng.integers(-(2**63), 2**63, (groups * samples, 4)) for rng in rngs])
    draws = flock.generate(weights, size.shape, torch.from_numpy(prompts_RG7), torch.from_numpy(words), RULES)
    every_RB7 = prompts_RG7.repeat(samples, axis=1)
    tokens = draws.tokens.numpy()
    right = sorting.right(every_RB7.reshape(-1, sorting.PROMPT), tokens.reshape(-1, sorting.ANSWER))
    rewards = right.astype(np.int64).reshape(len(rngs), groups, samples) * _MICRO
    return torch.from_numpy(prompts_RG7), draws, rewards


def signals(rewards: NDArray[np.int64], draws: flock.Draws) -> tuple[Tensor, Tensor]:
    """((R, B, T) aggregation scale times advantage, whether a token is trained on), as ``learner.batch`` makes them.

    Groups without signal are left out; the scale is one over the run's tokens (``token_mean``).
    """
    config = AdvantageConfig()
    advantages = np.stack([np.concatenate(batch_advantages(run.tolist(), config)) for run in rewards])
    has_signal = (rewards.min(2) != rewards.max(2)).repeat(rewards.shape[2], axis=1)
    ends = draws.tokens == sorting.EOS
    valid = (ends.cumsum(2) - ends.long() == 0) & torch.from_numpy(has_signal)[:, :, None]
    tokens_R = valid.sum((1, 2)).clamp(min=1)
    signal = torch.from_numpy(advantages).float()[:, :, None] / tokens_R[:, None, None]
    return torch.where(valid, signal, 0.0), valid


def backward_of(leaves: flock.Weights, shape: flock.Shape, prompts: Tensor, draws: flock.Draws, signal: Tensor,
                valid: Tensor, lag: int, config: LossConfig, controllers: Sequence[CapController]) -> TokenStats:
    """Leave the gradient of the learner's loss at the leaves; statistics of the N tokens."""
    if not valid.any():
        return TokenStats.none()
    correction = correction_of(config)
    every = prompts.repeat_interleave(draws.tokens.shape[1] // prompts.shape[1], dim=1)
    ids = torch.cat([every, draws.tokens[:, :, :-1]], dim=2)
    states = flock.hidden(leaves, shape, ids)[:, :, sorting.PROMPT - 1 :]
    logits_NV = flock.logits(leaves, states)[valid]
    lag_N = torch.full((len(logits_NV),), lag)
    tokens = LossTokens(
        target_N=draws.tokens[valid], log_q_N=draws.log_q[valid], signal_N=signal[valid], lag_N=lag_N,
        head_ids_NK=draws.head_ids[valid], head_q_NK=draws.head_q[valid], head_valid_NK=draws.head_valid[valid],
        tail_q_N=draws.tail_q[valid], sequence_N=torch.zeros(len(lag_N), dtype=torch.int64),
    )
    caps_R = torch.stack([c.caps(torch.tensor([lag]), config.cap, config.cap_decay)[0] for c in controllers])
    run_N = valid.nonzero()[:, 0]
    cap_N = caps_R[run_N] if correction.aged else None
    rule = token_rule(lag_N, tokens.signal_N, correction, cap_N=cap_N)
    gradient_NV, stats = logits_gradient(logits_NV.detach().clone(), tokens, rule)
    logits_NV.backward(gradient_NV)  # type: ignore[no-untyped-call]
    return stats


def _after(runs: Sequence[Run], step: int, size: Size, stats: TokenStats, valid: Tensor, lag: int, config: LossConfig,
           controllers: Sequence[CapController]) -> Tensor:
    """(R,) factors of the rates by the ESS of the weights used; moves the controllers, notes what was seen."""
    scales, first = [], 0
    for index, count in enumerate(valid.flatten(1).sum(1).tolist()):
        mine = slice(first, first + count)
        first += count
        sums = weight_sums(stats.weight_N[mine], torch.full((count,), lag))
        scales.append(rate_scale(ess(sums.sum(0)), config.ess_base))
        controllers[index].observe(sums)
        if (step + 1) % size.test_every == 0:
            log_ratio = stats.log_ratio_N[mine].double()
            ratio_sums = weight_sums(log_ratio.exp(), torch.full((count,), lag))
            runs[index].kl.append(float((log_ratio.expm1() - log_ratio).mean()) if count else 0.0)
            runs[index].ess.append(ess(ratio_sums.sum(0)))
            runs[index].cut.append(float(stats.truncated_N[mine].mean()) if count else 0.0)
    return torch.tensor(scales)


def _test(runs: Sequence[Run], step: int, weights: flock.Weights, size: Size) -> None:
    """Reward of the learner's own policy on the seed's held-out problems, one completion each."""
    rngs = [_rng(run.seed, _TEST, 0) for run in runs]
    _, _, rewards = _rollouts(weights, rngs, size.test_problems, 1, size)
    for run, reward in zip(runs, rewards.mean((1, 2)) / _MICRO, strict=True):
        run.steps.append(step)
        run.rewards.append(float(reward))


def _rng(seed: int, kind: int, step: int) -> np.random.Generator:
    return np.random.default_rng([seed, kind, step])
