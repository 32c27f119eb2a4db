"""Ways to cheat while generating, for the benchmarks: the node's own torch engine with one thing changed in it.

Legend: R rows of a pass, V vocabulary, D hidden width, T tokens of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.real_rollouts import BEACON, RUN_ID, OneVersion, Workload
from node import torch_engine
from node.drill import BestOfN, EditedAnswer, exchanged
from node.engine import Engine, Request
from node.torch_engine import TorchEngine
from protocol.head import MAX_CODE, offsets
from protocol.messages import SamplingRules
from protocol.rollout import NO_CODE, Rollout, prompt_digest, rollout_seed
from protocol.sampler_torch import BatchDraw, sample_batch
from protocol.tokenizer import Tokenizer
from protocol.weights.layout import State

#: Changes a loaded model in place.
Alter = Callable[[nn.Module], None]
#: What decides the token: logits (R, V) of a pass and the run's rules, to other logits.
Skew = Callable[[Tensor], Tensor]
#: An engine around the node's.
Around = Callable[[Engine, SamplingRules], Engine]


@dataclass(frozen=True)
class Made:
    """One rollout with what its maker and its auditor know."""

    prompt: tuple[int, ...]
    seed: bytes
    rollout: Rollout
    hidden_TD: Tensor  #: last hidden states of the maker's own forward passes, bfloat16


class Watched(TorchEngine):
    """The engine, altered once its weights are loaded, keeping the last hidden state of every pass."""

    def __init__(self, workload: Workload, rules: SamplingRules, state: State, slots: int, alter: Alter | None):
        super().__init__(workload.folder, workload.layout, rules, OneVersion(state), slots=slots)
        self._alter = alter
        self.hidden: dict[str, list[Tensor]] = {}
        self._last_RQD = torch.empty(0)
        self._model.base_model.register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._last_RQD = output.last_hidden_state

    def _load(self, version: int) -> None:
        super()._load(version)
        if self._alter is not None:
            self._alter(self._model)

    def _forward(self, records_R: np.ndarray[Any, Any]) -> Tensor:
        logits_RV = super()._forward(records_R)
        for row, hidden_QD in zip(self._scheduler.rows, self._last_RQD[: len(records_R)], strict=False):
            self.hidden.setdefault(row.request.key, []).append(hidden_QD[0].bfloat16())
        return logits_RV


def make(
    workload: Workload, rules: SamplingRules, groups: Sequence[int], samples: int, *, state: State | None = None,
    alter: Alter | None = None, skew: Skew | None = None, around: Around | None = None, slots: int = 16,
) -> list[Made]:
    """Rollouts of some prompts by an engine that cheats in the named ways; by an honest one when none is named."""
    inner = Watched(workload, rules, workload.state if state is None else state, slots, alter)
    engine: Engine = inner if around is None else around(inner, rules)
    requests = [_request(tuple(workload.prompt(group)), group, sample) for group in groups for sample in range(samples)]
    engine.submit(requests)
    done: dict[str, Rollout] = {}
    with _skewed(skew):
        while engine.open_requests:
            done.update((finished.request.key, finished.rollout) for finished in engine.step())
    hidden = inner.hidden
    inner.close()
    return [
        Made(request.prompt, request.seed, done[request.key], _states(hidden, request.key, len(done[request.key])))
        for request in requests
    ]


def _request(prompt: tuple[int, ...], group: int, sample: int) -> Request:
    seed = rollout_seed(RUN_ID, BEACON, prompt_digest(list(prompt)), group, sample)
    return Request(key=f"{group}/{sample}", sample=sample, prompt=prompt, seed=seed, start_version=0)


def _states(hidden: dict[str, list[Tensor]], key: str, length: int) -> Tensor:
    """(T, D) of a rollout; empty for one that was put together from several, whose maker is honest about them."""
    found = hidden.get(key, [])
    return torch.stack(found) if len(found) == length else torch.empty(0)


@contextmanager
def _skewed(skew: Skew | None) -> Iterator[None]:
    """Let the engine draw from other logits than the ones whose head it commits."""
    if skew is None:
        yield
        return

    def draw(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: SamplingRules) -> BatchDraw:
        honest = sample_batch(logits_BV, seeds_B, positions_B, rules)
        tokens_B = sample_batch(skew(logits_BV.clone()), seeds_B, positions_B, rules).tokens_B
        inside_BK = torch.arange(honest.head_ids_BK.shape[1])[None] < honest.head_len_B[:, None]
        listed_B = ((honest.head_ids_BK == tokens_B[:, None]) & inside_BK).any(1)
        logp_B = torch.log_softmax(logits_BV.double(), -1).gather(1, tokens_B[:, None])[:, 0]
        codes_B = (logp_B * -rules.steps_per_nat).round().clamp(0, MAX_CODE).long()
        return replace(honest, tokens_B=tokens_B, token_codes_B=torch.where(listed_B, NO_CODE, codes_B))

    torch_engine.sample_batch = draw
    try:
        yield
    finally:
        torch_engine.sample_batch = sample_batch


# -- what decides the token ----------------------------------------------------------------------------------


def cooler(temperature: float) -> Skew:
    """Sample at another temperature than the run's."""
    return lambda logits_BV: logits_BV / temperature


def nucleus(mass: float) -> Skew:
    """Sample from the likeliest tokens that hold this mass."""

    def skew(logits_BV: Tensor) -> Tensor:
        ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        before_BV = ordered_BV.softmax(-1).cumsum(-1) - ordered_BV.softmax(-1)
        kept_BV = torch.where(before_BV < mass, ordered_BV, -torch.inf)
        return torch.full_like(logits_BV, -torch.inf).scatter(1, order_BV, kept_BV)

    return skew


def best_of_n(engine: Engine, rules: SamplingRules) -> Engine:
    """Four candidates per sample, the likeliest handed in."""
    return BestOfN(engine, rules)


class EditedDigit(EditedAnswer):
    """Exchanges the last digit that has another one in its head, where there is none any token, and goes on."""

    digits: frozenset[int] = frozenset()

    def _cut(self, rollout: Rollout) -> Rollout | None:
        starts = offsets(rollout)
        for position in range(len(rollout) - 2, -1, -1):
            token = int(rollout.tokens[position])
            if token in self.digits:
                head = rollout.head_ids[starts[position] :][: rollout.head_lengths[position]].tolist()
                other = next((entry for entry in head if entry in self.digits and entry != token), None)
                if other is not None:
                    return exchanged(rollout, position, other)
        return super()._cut(rollout)


def edited_digit(tokenizer: Tokenizer) -> Around:
    """One digit near the end exchanged, the rest regenerated."""
    found = [tokenizer.encode(str(digit)) for digit in range(10)]

    def around(engine: Engine, rules: SamplingRules) -> Engine:
        editor = EditedDigit(engine, rules)
        editor.digits = frozenset(ids[-1] for ids in found)
        return editor

    return around


# -- weights and arithmetic ----------------------------------------------------------------------------------


def rounded(bits: int, group: int | None) -> Alter:
    """Round the matrices symmetrically to ``bits`` per weight, one scale per ``group`` inputs or per output row."""

    @torch.no_grad()
    def alter(model: nn.Module) -> None:
        most = 2 ** (bits - 1) - 1
        for linear in _matrices(model):
            rows, columns = linear.weight.shape
            width = group if group is not None and columns % group == 0 else columns
            blocks = linear.weight.view(rows, columns // width, width)
            scale = (blocks.abs().amax(-1, keepdim=True) / most).clamp_min(1e-12)
            blocks.copy_((blocks / scale).round() * scale)

    return alter


def bfloat16_arithmetic(model: nn.Module) -> None:
    """Round what every layer hands on to bfloat16, as products of bfloat16 matrices with float32 sums do."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__.endswith("RMSNorm"):
            module.register_forward_hook(lambda _module, _args, output: output.bfloat16().float())


@torch.no_grad()
def fewer_layers(model: nn.Module) -> None:
    """A smaller model: every sixth layer passes its input on unchanged."""
    layers: Any = model.base_model.layers
    for number in range(2, len(layers), 6):
        layers[number].self_attn.o_proj.weight.zero_()
        layers[number].mlp.down_proj.weight.zero_()


def _matrices(model: nn.Module) -> Iterator[nn.Linear]:
    """Linear layers but the one that makes the logits, which serving stacks leave alone."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            yield module


