"""One optimiser step on one batch: microbatches, fused head, clipping, AdamW on the masters, and what to skip.

A step is a pure function of (state, batch, configuration) at a fixed number of threads; ``state_dict`` is everything
it depends on. A step that must not be taken leaves the state exactly as it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learner.batch import Batch
from learner.config import LearnerConfig, OptimConfig
from learner.head import TokenStats, chunk_rows, head_loss
from learner.losses import token_rule
from learner.masters import Masters
from learner.metrics import Metrics, batch_metrics, token_metrics
from learner.packing import Microbatch, microbatches
from learner.parts import read_part, write_part
from protocol.errors import LocalFault, code
from protocol.messages import SamplingRules
from protocol.reference.loader import load_config_model
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


class Trainer:
    """The weights, the optimiser, and the step."""

    def __init__(self, model: nn.Module, layout: Layout, state: State, config: LearnerConfig, rules: SamplingRules):
        _check_head(model)
        self.config, self.rules = config, rules
        self.model = cast("Any", model)  # transformers ships no usable types
        self.masters = Masters(model, layout, state)
        self.steps = 0  #: optimiser steps taken
        self._norms: list[float] = []
        self._optimiser = _adamw(self.masters.tensors, config.optim)
        self.model.train(config.batch.gradient_checkpointing)  # layers are recomputed only in training mode
        if config.batch.gradient_checkpointing:
            # Renamed in transformers 5; the old name goes in 6.
            getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)()

    @classmethod
    def open(cls, model_dir: Path, layout: Layout, state: State, config: LearnerConfig,
             rules: SamplingRules) -> Trainer:
        """A trainer for the architecture that ``model_dir`` describes, starting from ``state``."""
        return cls(load_config_model(model_dir, torch.float32), layout, state, config, rules)

    @property
    def layout(self) -> Layout:
        """Names, types and shapes of what is published."""
        return self.masters.layout

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
            stats, lag_N, skipped = self._accumulate(batch, should_stop)
            norm = self._gradient_norm()
            skipped = skipped or self._judge(norm)
            if skipped is None:
                self._update(norm)
        finally:
            self._drop_gradients()
        metrics |= token_metrics(stats, lag_N)
        metrics |= {"grad_norm": norm, "lr": self._rate(), "skipped": skipped}
        return StepResult(metrics, skipped)

    def save(self, folder: Path) -> None:
        """Write everything a later step depends on into ``folder``.

        Raises:
            LocalFault: ``E_WORK_DIR``.
        """
        write_part(folder, 0, 1, self.state_dict())

    def load(self, folder: Path) -> None:
        """Go back to what ``save`` wrote.

        Raises:
            LocalFault: ``E_WORK_DIR``.
        """
        self.load_state_dict(read_part(folder, 0, 1))

    def state_dict(self) -> dict[str, Any]:
        """Everything a later step depends on: masters, optimiser, counters, generator."""
        return {
            "masters": dict(zip((e.name for e in self.masters.layout.entries), self.masters.tensors, strict=True)),
            "optimiser": self._optimiser.state_dict(),
            "steps": self.steps,
            "norms": list(self._norms),
            "rng": torch.get_rng_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what ``state_dict`` gave."""
        for master, entry in zip(self.masters.tensors, self.masters.layout.entries, strict=True):
            master.copy_(state["masters"][entry.name])
        self._optimiser.load_state_dict(state["optimiser"])
        self.steps, self._norms = int(state["steps"]), list(state["norms"])
        torch.set_rng_state(state["rng"])
        self.masters.push()

    # -- parts of a step ---------------------------------------------------------------------------------

    def _accumulate(self, batch: Batch, should_stop: Callable[[], bool]
                    ) -> tuple[TokenStats | None, NDArray[np.int64], str | None]:
        parts: list[TokenStats] = []
        lags: list[Tensor] = []
        for micro in microbatches(batch, self.config.batch):
            if should_stop():
                raise StepAbandoned
            loss, stats = self._forward(micro)
            parts.append(stats)
            lags.append(micro.tokens.lag_N)
            if not bool(torch.isfinite(loss)):
                return TokenStats.concat(parts), torch.cat(lags).numpy(), "non_finite_loss"
            loss.backward()  # type: ignore[no-untyped-call]
        if not parts:
            return None, np.zeros(0, dtype=np.int64), "no_signal"
        return TokenStats.concat(parts), torch.cat(lags).numpy(), None

    def _forward(self, micro: Microbatch) -> tuple[Tensor, TokenStats]:
        hidden_BLD = self.model.base_model(
            input_ids=micro.ids_BL, attention_mask=micro.mask_11LL, position_ids=micro.positions_BL, use_cache=False
        ).last_hidden_state
        hidden_ND = hidden_BLD.flatten(0, 1).index_select(0, micro.source_N)
        weight_VD = self.model.get_output_embeddings().weight
        return head_loss(
            hidden_ND, weight_VD, micro.tokens, token_rule(micro.tokens.lag_N, self.config.loss),
            temperature=self.rules.temperature_milli / 1000,
            rows=chunk_rows(len(weight_VD), self.config.batch.head_chunk_mib),
        )

    def _gradient_norm(self) -> float:
        """Global L2 norm; 0 when there is no gradient."""
        norms = [torch.linalg.vector_norm(p.grad) for p in self.masters.parameters if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def _judge(self, norm: float) -> str | None:
        if not np.isfinite(norm):
            return "non_finite_gradient"
        usual = statistics.median(self._norms) if len(self._norms) >= _ENOUGH else None
        if usual is not None and norm > self.config.optim.outlier_ratio * usual > 0:
            return "gradient_outlier"
        return None

    @torch.no_grad()
    def _update(self, norm: float) -> None:
        self._norms = [*self._norms, norm][-_HISTORY:]
        self.steps += 1
        scale = min(1.0, self.config.optim.max_grad_norm / (norm + 1e-6))
        for master, parameter in zip(self.masters.tensors, self.masters.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.mul_(scale)
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate()
        self._optimiser.step()
        self.masters.push()

    def _rate(self) -> float:
        optim = self.config.optim
        return optim.lr * min(1.0, max(1, self.steps) / optim.warmup_steps) if optim.warmup_steps else optim.lr

    def _drop_gradients(self) -> None:
        for master, parameter in zip(self.masters.tensors, self.masters.parameters, strict=True):
            master.grad = parameter.grad = None


def _adamw(tensors: list[Tensor], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101); weight decay on matrices only, as is usual."""
    groups = [
        {"params": [t for t in tensors if t.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [t for t in tensors if t.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=(config.beta1, config.beta2),
        eps=config.eps, fused=True,
    )


def _check_head(model: Any) -> None:
    head = model.get_output_embeddings()
    extra = [name for name in _EXTRA_HEADS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if head is None or getattr(head, "bias", None) is not None or extra:
        raise LocalFault(
            E_MODEL_UNSUPPORTED, "the model's head is not a plain matrix product",
            expected="logits = hidden @ weight.T", got=", ".join(extra) or "a bias or no head",
        )
