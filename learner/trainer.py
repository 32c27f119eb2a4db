"""One optimiser step on one batch: microbatches, fused head, clipping, AdamW on the masters, and what to skip.

A step is a pure function of (state, batch, configuration) at a fixed number of threads; ``state_dict`` is everything
it depends on. A step that must not be taken leaves the state exactly as it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from learner.adapters import Adapters
from learner.batch import Batch
from learner.config import LearnerConfig
from learner.corrections import correction_of
from learner.ess import CapController, ess, rate_scale, weight_sums
from learner.head import LossTokens, TokenStats, chunk_rows, drawn_logprobs, head_loss, sequence_rule
from learner.losses import TokenRule, clamped, second_moment_bound, token_rule
from learner.masters import Masters
from learner.metrics import Metrics, batch_metrics, token_metrics
from learner.optimiser import make_optimiser
from learner.packing import Microbatch, microbatches
from learner.parts import read_part, write_part
from learner.ranks import Ranks, settle
from learner.reference_policy import ReferencePolicy, distance, hidden_states, pulled
from learner.schedule import learning_rate
from learner.screen import RolloutNumbers, screen
from protocol.errors import LocalFault, code
from protocol.messages import SamplingRules
from protocol.reference.loader import load_config_model
from protocol.reference.routing import check_rules, replay_routes, routers
from protocol.weights.layout import Layout, State

E_MODEL_UNSUPPORTED = code("E_MODEL_UNSUPPORTED", "the learner cannot compute this model's logits")

#: Gradient norms remembered for the outlier rule, and how many there must be before it applies.
_HISTORY, _ENOUGH = 64, 16
#: Settings of a model that change its logits after the last matrix product, which the fused head does not do.
_EXTRA_HEADS: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class StepAbandoned(Exception):
    """The process was told to stop in the middle of a step; the state is as before it."""


@dataclass(frozen=True)
class StepResult:
    """What a step did. ``skipped``: None, or why the weights did not change."""

    metrics: Metrics
    skipped: str | None


@dataclass
class _Seen:
    """What the microbatches of a step showed, in their order."""

    parts: list[TokenStats]
    lag_parts: list[Tensor]
    signal_parts: list[Tensor]
    rollouts: list[RolloutNumbers]
    distances: list[Tensor]  #: from the reference policy; empty without one

    @classmethod
    def of(cls, micro: Microbatch, stats: TokenStats, distance_N: Tensor) -> _Seen:
        tokens = micro.tokens
        return cls([stats], [tokens.lag_N], [tokens.signal_N], rollout_numbers(micro, stats), [distance_N])

    @classmethod
    def merged(cls, many: list[_Seen]) -> _Seen:
        lists = ([item for one in many for item in getattr(one, field.name)] for field in fields(cls))
        return cls(*lists)

    def stats(self) -> TokenStats:
        return TokenStats.concat(self.parts) if self.parts else TokenStats.none()

    def lags(self) -> Tensor:
        return torch.cat([torch.zeros(0, dtype=torch.int64), *self.lag_parts])

    def distance(self) -> float:
        """Mean distance from the reference policy, nats per token."""
        distances = torch.cat([torch.zeros(0), *self.distances])
        return float(distances.double().mean()) if len(distances) else 0.0

    def signals(self) -> Tensor:
        return torch.cat([torch.zeros(0), *self.signal_parts])


class Trainer:
    """The weights, the optimiser, and the step."""

    def __init__(self, model: nn.Module, layout: Layout, state: State, config: LearnerConfig, rules: SamplingRules,
                 ranks: Ranks = Ranks()):  # noqa: B008 - immutable
        _check_head(model)
        check_rules(model, rules.routes)
        self.config, self.rules, self.ranks = config, rules, ranks
        self.model = cast("Any", model.to(ranks.device))  # transformers ships no usable types
        self._reference = ReferencePolicy(model, layout, state, ranks) if config.loss.kl_coef > 0 else None
        self._together = ranks.share(model)
        self.masters = _masters(model, layout, state, config, ranks)
        self.correction = correction_of(config.loss)
        self.caps = CapController(config.loss.ess_target)
        self.steps = 0  #: optimiser steps taken
        self._norms: list[float] = []
        self._optimiser = make_optimiser(self.masters.tensors, config.optim)
        self.model.train(config.batch.gradient_checkpointing)  # layers are recomputed only in training mode
        if config.batch.gradient_checkpointing:
            # Renamed in transformers 5; the old name goes in 6.
            getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)()

    @classmethod
    def open(cls, model_dir: Path, layout: Layout, state: State, config: LearnerConfig,
             rules: SamplingRules, ranks: Ranks = Ranks()) -> Trainer:  # noqa: B008 - immutable
        """A trainer for the architecture that ``model_dir`` describes, starting from ``state``."""
        return cls(load_config_model(model_dir, torch.float32), layout, state, config, rules, ranks)

    @property
    def layout(self) -> Layout:
        """Names, types and shapes of what is published."""
        return self.masters.layout

    @property
    def size(self) -> int:
        """How many processes hold the weights."""
        return self.ranks.size

    @property
    def lost(self) -> bool:
        """Never: one process cannot lose another."""
        return False

    def published_state(self) -> State:
        """Bit patterns of the current weights, as a checkpoint carries them."""
        return self.masters.state()

    def train_step(self, batch: Batch, should_stop: Callable[[], bool] = lambda: False) -> StepResult:
        """Train on ``batch``, or say why not.

        Skipped: ``no_signal`` (no group to learn from), ``non_finite_loss``, ``non_finite_gradient``,
        ``gradient_outlier``.

        Raises:
            StepAbandoned: ``should_stop`` said so between two microbatches.
        """
        metrics = batch_metrics(batch)
        try:
            seen, skipped = self._accumulate(batch, should_stop)
            self.masters.take_gradients()
            norm = self.masters.norm()
            skipped = skipped or self._judge(norm)
            stats, lag_N = seen.stats(), seen.lags()
            sums_B3 = weight_sums(stats.weight_N, lag_N)
            scale = rate_scale(ess(sums_B3.sum(0)), self.config.loss.ess_base)
            if skipped is None:
                self._update(norm, scale)
                self.caps.observe(sums_B3)
        finally:
            self._drop_gradients()
        metrics |= token_metrics(stats, lag_N.numpy(), seen.signals().numpy())
        metrics |= {"grad_norm": norm, "lr": self._rate() * scale, "lr_scale": scale, "skipped": skipped}
        if self._reference is not None:
            metrics |= {"kl_ref": seen.distance()}
        reports = screen(seen.rollouts, self.rules.steps_per_nat, exact=self._exact())
        metrics |= {"nodes": {report.node_id: report.as_dict() for report in reports}}
        return StepResult(metrics, skipped)

    def save(self, folder: Path) -> None:
        """Write everything a later step depends on into ``folder``.

        Raises:
            LocalFault: ``E_WORK_DIR``.
        """
        write_part(folder, self.ranks.rank, self.ranks.size, self.state_dict())
        self.ranks.any(False)  # all parts are there

    def load(self, folder: Path) -> None:
        """Go back to what ``save`` wrote.

        Raises:
            LocalFault: ``E_WORK_DIR``.
        """
        self.load_state_dict(read_part(folder, self.ranks.rank, self.ranks.size))

    def wait(self) -> None:
        """Nothing to do: there is nobody to tell."""

    def close(self) -> None:
        """Nothing to do: there is nobody to tell."""

    def state_dict(self) -> dict[str, Any]:
        """Everything a later step depends on: masters, optimiser, counters, generator; this rank's rows of tensors."""
        masters = dict(zip(self.masters.names, self.masters.tensors, strict=True))
        return {
            "masters": masters,
            "optimiser": {name: dict(self._optimiser.state[tensor]) for name, tensor in masters.items()},
            "steps": self.steps,
            "norms": list(self._norms),
            "caps": self.caps.state_dict(),
            "rng": torch.get_rng_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what ``state_dict`` gave."""
        for name, master in zip(self.masters.names, self.masters.tensors, strict=True):
            master.copy_(state["masters"][name])
            slots = {slot: _copied(value, master) for slot, value in state["optimiser"][name].items()}
            self._optimiser.state[master] = slots
        self.steps, self._norms = int(state["steps"]), list(state["norms"])
        self.caps.load_state_dict(state["caps"])
        torch.set_rng_state(state["rng"])
        self.masters.push()

    # -- parts of a step ---------------------------------------------------------------------------------

    def _accumulate(self, batch: Batch, should_stop: Callable[[], bool]) -> tuple[_Seen, str | None]:
        """Gradients of the whole batch, summed over ranks, and what all ranks saw."""
        seen: list[_Seen] = []
        skipped = log_bound = None
        if self.correction.second_moment is not None:
            log_bound = self._survey(batch, self.correction.second_moment, should_stop)
        for micro in self._share(batch, should_stop):
            given = micro.to(self.ranks.device)
            log_ref_N = None if self._reference is None else self._reference.logprobs(given, **self._chunks())
            with self._routed(given):  # of the backward pass, too: layers may be computed again there
                loss, stats, distance_N = self._together(self._forward, given, log_bound, log_ref_N)
                loss.backward()  # also when it is not finite: all ranks make the same exchanges
            if not micro.idle:
                seen.append(_Seen.of(micro, stats.to_cpu(), distance_N.cpu()))
            if self.ranks.any(not bool(torch.isfinite(loss))):
                skipped = "non_finite_loss"
                break
        everything = _Seen.merged(_dealt(self.ranks.gather(seen)))
        return everything, skipped or (None if everything.parts else "no_signal")

    def _share(self, batch: Batch, should_stop: Callable[[], bool]) -> Iterator[Microbatch]:
        """This rank's microbatches; raises ``StepAbandoned`` at all ranks when one was told to stop."""
        for micro in microbatches(batch, self.config.batch, self.ranks.rank, self.ranks.size):
            if self.ranks.any(should_stop()):
                raise StepAbandoned
            yield micro

    def _forward(self, micro: Microbatch, log_bound: float | None = None, log_ref_N: Tensor | None = None
                 ) -> tuple[Tensor, TokenStats, Tensor]:
        """Loss and statistics of a microbatch, and each token's distance from the reference policy."""
        hidden_ND, weight_VD = self._hidden(micro), self.model.get_output_embeddings().weight
        tokens, distance_N, log_p_N = micro.tokens, torch.zeros(0), torch.zeros(0)
        if self.correction.level != "token" or log_ref_N is not None:
            log_p_N = drawn_logprobs(hidden_ND, weight_VD, tokens.target_N, **self._chunks())
        if log_ref_N is not None:
            tokens = pulled(micro, log_p_N, log_ref_N, self.config.loss.kl_coef)
            distance_N = distance(log_p_N, log_ref_N)
        rule = self._rule(tokens, log_bound)
        if self.correction.level != "token":
            rule = sequence_rule(rule, self.correction, tokens, log_p_N)
        return *head_loss(hidden_ND, weight_VD, tokens, rule, **self._chunks()), distance_N

    def _hidden(self, micro: Microbatch) -> Tensor:
        """(N, D) final hidden states that predict the loss tokens, float32."""
        with torch.autocast(self.ranks.device.type, torch.bfloat16, self.config.batch.compute == "bfloat16"):
            return hidden_states(self.model, micro)

    def _routed(self, micro: Microbatch) -> AbstractContextManager[object]:
        """While the block lasts, tokens go to the experts that the sampler took, as far as they are known."""
        return nullcontext() if micro.routes_MYX is None else replay_routes(self.model, micro.routes_MYX)

    def _rule(self, tokens: LossTokens, log_bound: float | None) -> TokenRule:
        loss = self.config.loss
        cap_N = self.caps.caps(tokens.lag_N, loss.cap, loss.cap_decay) if self.correction.aged else None
        return token_rule(tokens.lag_N, tokens.signal_N, self.correction, cap_N=cap_N, log_bound=log_bound)

    def _exact(self) -> bool:
        """Whether the forward pass is what a verifier computes: float32, and no router that may choose otherwise."""
        return self.config.batch.compute == "float32" and not routers(self.model)

    def _chunks(self) -> dict[str, Any]:
        rows = chunk_rows(self.model.config.vocab_size, self.config.batch.head_chunk_mib)
        return {"temperature": self.rules.temperature_milli / 1000, "rows": rows}

    @torch.no_grad()
    def _survey(self, batch: Batch, limit: float, should_stop: Callable[[], bool]) -> float:
        """Bound of |log r| for the whole batch, from a forward pass of its own."""
        seen = []
        for micro in self._share(batch, should_stop):
            given = micro.to(self.ranks.device)
            with self._routed(given):
                log_p_N = self._together(self._drawn, given).cpu()
            if not micro.idle:
                seen.append((clamped(log_p_N - micro.tokens.log_q_N), micro.tokens.signal_N))
        log_ratios, signals = zip((torch.zeros(0), torch.zeros(0)), *_dealt(self.ranks.gather(seen)), strict=True)
        return second_moment_bound(torch.cat(log_ratios), torch.cat(signals), limit)

    def _drawn(self, micro: Microbatch) -> Tensor:
        """(N,) log p of the drawn tokens."""
        weight_VD = self.model.get_output_embeddings().weight
        return drawn_logprobs(self._hidden(micro), weight_VD, micro.tokens.target_N, **self._chunks())

    def _judge(self, norm: float) -> str | None:
        if not np.isfinite(norm):
            return "non_finite_gradient"
        usual = statistics.median(self._norms) if len(self._norms) >= _ENOUGH else None
        if usual is not None and norm > self.config.optim.outlier_ratio * usual > 0:
            return "gradient_outlier"
        return None

    @torch.no_grad()
    def _update(self, norm: float, rate_scale: float) -> None:
        self._norms = [*self._norms, norm][-_HISTORY:]
        self.steps += 1
        scale = min(1.0, self.config.optim.max_grad_norm / (norm + 1e-6))
        for master in self.masters.tensors:
            if master.grad is not None:
                master.grad.mul_(scale)
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate() * rate_scale
        self._optimiser.step()
        self.masters.push()

    def _rate(self) -> float:
        return learning_rate(self.steps, self.config.optim)

    def _drop_gradients(self) -> None:
        settle(self._together)
        self.masters.drop_gradients()


def rollout_numbers(micro: Microbatch, stats: TokenStats) -> list[RolloutNumbers]:
    """What the forward pass saw of each rollout of a microbatch."""
    log_ratio_N = stats.log_ratio_N.double()
    columns = [torch.ones_like(log_ratio_N), -log_ratio_N, torch.expm1(log_ratio_N) - log_ratio_N,
               stats.head_kl_N.double()]
    sums_S4 = torch.zeros(len(micro.sequences), 4, dtype=torch.float64, device=log_ratio_N.device)
    sums_S4.index_add_(0, micro.tokens.sequence_N, torch.stack(columns, 1))
    return [
        RolloutNumbers(
            sequence.node_id, sequence.group, sequence.sample, int(sequence.lag_T[0]), int(tokens), k1, k3, kl,
            sequence.kl_limit,
        )
        for sequence, (tokens, k1, k3, kl) in zip(micro.sequences, sums_S4.tolist(), strict=True)
    ]


def _dealt(parts: list[list[Any]]) -> list[Any]:
    """What the ranks saw, in the order of the batch: microbatches were dealt like cards."""
    rounds = max(map(len, parts))
    return [mine[turn] for turn in range(rounds) for mine in parts if turn < len(mine)]


def _copied(value: Any, master: Tensor) -> Any:
    """A slot of the optimiser's state, on the master's device when it is one number per weight."""
    if not isinstance(value, Tensor):
        return value
    return value.to(master.device, copy=True) if value.ndim else value.clone()


def _masters(model: nn.Module, layout: Layout, state: State, config: LearnerConfig, ranks: Ranks) -> Masters:
    if config.lora.rank == 0:
        return Masters(model, layout, state, ranks)
    return Adapters(model, layout, state, ranks, config.lora, config.seed)


def _check_head(model: Any) -> None:
    head = model.get_output_embeddings()
    extra = [name for name in _EXTRA_HEADS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if head is None or getattr(head, "bias", None) is not None or extra:
        raise LocalFault(
            E_MODEL_UNSUPPORTED, "the model's head is not a plain matrix product",
            expected="logits = hidden @ weight.T", got=", ".join(extra) or "a bias or no head",
        )
