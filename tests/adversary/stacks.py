"""Ways to compute the same rollouts: the node's own engine in other arithmetic, and plain engines around one model.

What an honest node may run on: compute type, attention kernel, threads, batch, padding side, cache or prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import DynamicCache

import node.torch_engine as torch_engine
from node.engine import Engine, Finished, Request, WeightSource
from protocol.messages import SamplingRules
from protocol.prng import seed_words
from protocol.reference.loader import load_config_model, set_state
from protocol.rollout import Segment
from protocol.sampler_torch import sample_batch
from protocol.weights.layout import Layout
from tests.adversary.generation import Row, record

LogitsHook = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Stack:
    """One way of computing. ``mode`` "engine" is the node's torch engine, which pads nothing."""

    mode: Literal["engine", "decode", "prefill"] = "engine"
    dtype: Literal["fp32", "bf16"] = "fp32"
    attention: Literal["sdpa", "eager"] = "sdpa"
    batch: int = 8
    threads: int = 1
    padding: Literal["none", "left", "right"] = "none"

    @property
    def profile(self) -> str:
        return f"torch-cpu-{self.dtype}"

    @property
    def name(self) -> str:
        padding = "" if self.padding == "none" else f", padded {self.padding}"
        return f"{self.dtype} {self.mode}, {self.attention}, batch {self.batch}, threads {self.threads}{padding}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32


def engine_of(stack: Stack, model_dir: Path, layout: Layout, rules: SamplingRules, source: WeightSource) -> Engine:
    """An engine that computes as ``stack`` says."""
    if stack.mode == "engine":
        return _patched_engine(stack, model_dir, layout, rules, source)
    return PlainEngine(stack, model_dir, layout, rules, source)


def _patched_engine(
    stack: Stack, model_dir: Path, layout: Layout, rules: SamplingRules, source: WeightSource
) -> Engine:
    """The node's engine around a model of the stack's compute type and attention."""

    def load(folder: Path, _dtype: torch.dtype, *, device: str = "cpu") -> torch.nn.Module:
        return load_config_model(folder, stack.torch_dtype, device=device, attention=stack.attention)

    honest, torch_engine.load_config_model = torch_engine.load_config_model, load
    try:
        engine = torch_engine.TorchEngine(model_dir, layout, rules, source, slots=stack.batch)
    finally:
        torch_engine.load_config_model = honest
    engine.profile = stack.profile
    _threaded(engine, stack.threads)
    return engine


def _threaded(engine: Any, threads: int) -> None:
    step = engine.step

    def threaded() -> list[Finished]:
        with torch_threads(threads):
            return list(step())

    engine.step = threaded


@contextmanager
def torch_threads(threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PlainEngine:
    """Implements ``node.engine.Engine`` with one batch at a time, from the prompt to the last token of the longest."""

    def __init__(
        self, stack: Stack, model_dir: Path, layout: Layout, rules: SamplingRules, source: WeightSource
    ):
        self._stack, self._layout, self._rules, self._source = stack, layout, rules, source
        self._model: Any = load_config_model(model_dir, stack.torch_dtype, attention=stack.attention)
        self.profile, self.capacity = stack.profile, stack.batch
        self.version, self.tokens = -1, 0
        self._open: dict[str, Request] = {}

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(self._open)

    def check(self, request: Request) -> None:
        return None

    def submit(self, requests: Sequence[Request]) -> None:
        self._open.update((request.key, request) for request in requests)

    def cancel(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._open.pop(key, None)

    def close(self) -> None:
        del self._model

    @torch.no_grad()
    def step(self) -> list[Finished]:
        if not self._open:
            return []
        version = min(request.start_version for request in self._open.values())
        batch = [r for r in self._open.values() if r.start_version == version][: self._stack.batch]
        if self._stack.padding == "none":  # one length at a time
            batch = [r for r in batch if len(r.prompt) == len(batch[0].prompt)]
        with self._source.state(version) as state:
            set_state(self._model, self._layout, state)
        self.version = version
        with torch_threads(self._stack.threads):
            rows = self._run(batch)
        for request in batch:
            del self._open[request.key]
        self.tokens += sum(len(row.tokens) for row in rows)
        return [
            Finished(request, row.rollout([Segment(0, version)])) for request, row in zip(batch, rows, strict=True)
        ]

    def _run(self, batch: Sequence[Request]) -> list[Row]:
        rows = [Row(request.sample) for request in batch]
        seeds_B4 = torch.stack([torch.from_numpy(seed_words(request.seed).view("<i8")) for request in batch])
        inputs = [list(request.prompt) for request in batch]
        cache, fed = DynamicCache(config=self._model.config), 0
        for position in range(self._rules.max_new_tokens):
            if self._stack.mode == "prefill":
                cache, fed = None, 0
            logits_BV = self._forward(inputs, cache, fed)
            fed = max(map(len, inputs))
            drawn = sample_batch(
                logits_BV, seeds_B4, torch.full((len(rows),), position, dtype=torch.int64), self._rules
            )
            for index, row in enumerate(rows):
                if row.finish is None:
                    record(row, drawn, index, self._rules)
                inputs[index].append(int(drawn.tokens_B[index]))
            if all(row.finish is not None for row in rows):
                break
        return rows

    def _forward(self, inputs: list[list[int]], cache: DynamicCache | None, fed: int) -> torch.Tensor:
        """(B, V) float32 logits of the last input of each row.

        Right padding cannot go on from a cache, so it is computed anew every time.
        """
        longest = max(map(len, inputs))
        left = self._stack.padding != "right"
        ids_BL = torch.zeros((len(inputs), longest), dtype=torch.int64)
        mask_BL = torch.zeros((len(inputs), longest), dtype=torch.int64)
        for index, row in enumerate(inputs):
            where = slice(longest - len(row), longest) if left else slice(0, len(row))
            ids_BL[index, where], mask_BL[index, where] = torch.tensor(row), 1
        positions_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
        words: dict[str, Any] = {"position_ids": positions_BL[:, fed:]}
        if self._stack.padding != "none":
            words["attention_mask"] = mask_BL
        if cache is not None:
            words |= {"cache": cache, "use_cache": True}
        last_B = torch.tensor([longest - 1 if left else len(row) - 1 for row in inputs])
        logits_BLV = self._model(input_ids=ids_BL[:, fed:], **words).logits
        logits: torch.Tensor = logits_BLV[torch.arange(len(inputs)), last_B - fed].float()
        return logits


#: The fp32 stacks of the honest zoo, and those in bf16.
FP32 = (
    Stack(), Stack(batch=16), Stack(batch=2, threads=2), Stack(attention="eager"), Stack("decode", batch=1),
    Stack("decode", batch=16, padding="left"), Stack("prefill", batch=8, padding="right"),
    Stack("prefill", batch=1, attention="eager"),
    Stack("decode", batch=8, threads=8, attention="eager", padding="left"),
)
BF16 = (
    Stack(dtype="bf16"), Stack(dtype="bf16", batch=16, threads=2), Stack(dtype="bf16", attention="eager"),
    Stack("decode", dtype="bf16", batch=1), Stack("prefill", dtype="bf16", batch=8, padding="right"),
    Stack("decode", dtype="bf16", batch=8, padding="left"),
)
