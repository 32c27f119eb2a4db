"""The reference forward pass: logits of every completion token under the exact checkpoints of its segments.

Legend: T completion tokens, P prompt tokens, V vocabulary, B rows of a batch, Y layers with a router, X experts per
token.

The distribution of completion token t comes from the forward pass that consumes input P - 1 + t (input 0 is the
first prompt token). A segment with start s governs that pass for t = s and all later ones. With ``KV_KEPT`` the
keys and values of inputs before P - 1 + s stay as the earlier versions computed them; with ``REPREFILL`` the whole
prefix is computed again. Where a rollout carries expert choices, that pass takes those of row t; inputs before
P - 1 and prefixes that are computed again are routed by the model itself.
Spec: ``docs/spec/verification.md``, "Recomputation".
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from transformers import DynamicCache

from protocol.reference.loader import Attention, load_config_model, set_state
from protocol.reference.routing import OWN, replay_routes
from protocol.rollout import Rollout, SwapMode

if TYPE_CHECKING:
    from protocol.weights.layout import Layout, State

#: Most inputs one forward pass consumes; longer prefixes go through the cache in pieces.
MAX_PASS_TOKENS: Final = 2048
#: Most logits one forward pass makes, so that V = 150,000 and V = 64 need the same memory (128 MiB of float32).
MAX_PASS_LOGITS: Final = 32 * 2**20
#: Prompts of at least this many tokens are computed once for all their completions; below, the extra pass costs more.
MIN_SHARED_PROMPT: Final = 32


@dataclass(frozen=True)
class Recomputation:
    """A completion to be scored: its prompt and what was committed."""

    prompt: tuple[int, ...]
    rollout: Rollout


@dataclass(frozen=True)
class LogitsChunk:
    """Logits that predict completion tokens ``start`` .. ``start + n - 1`` of one item."""

    item: int  #: index into the items asked for
    start: int
    logits: torch.Tensor  #: (n, V), the model's compute type, temperature not applied
    route_margins: torch.Tensor | None = None  #: (n,) largest margin of a layer's choice; None without routes


@dataclass(frozen=True)
class _Step:
    """One item's inputs that go through one version."""

    item: int
    version: int
    feed: range  #: inputs consumed; begins at 0 when no cache is used
    keep: int  #: first of them whose output is wanted
    continued: bool  #: the next segment goes on from this step's cache


class ReferenceModel:
    """A model by configuration whose weights are set, version by version, from bit patterns."""

    def __init__(self, model: nn.Module, layout: Layout, device: str = "cpu"):
        self.model, self.layout, self.device = model, layout, device
        config: Any = model.config
        self.vocab_size = int(config.vocab_size)
        self._loaded: tuple[Callable[[int], State], int] | None = None
        self._tokens_per_pass = max(16, min(MAX_PASS_TOKENS, MAX_PASS_LOGITS // self.vocab_size))
        # transformers 5.2x renamed the keyword; both names mean the same object.
        names = inspect.signature(type(model).forward).parameters
        self._cache_keyword = "cache" if "cache" in names else "past_key_values"

    @classmethod
    def load(
        cls, model_dir: Path, layout: Layout, *, device: str = "cpu", dtype: torch.dtype = torch.float32,
        attention: Attention = "sdpa",
    ) -> ReferenceModel:
        """Build the model of ``model_dir/config.json``; weights are undefined until :meth:`set_state`.

        Raises:
            LocalFault: ``E_MODEL_CONFIG``.
        """
        return cls(load_config_model(model_dir, dtype, device=device, attention=attention), layout, device)

    def set_state(self, state: State) -> None:
        """Load a version's weights.

        Raises:
            LocalFault: ``E_MODEL_STATE``.
        """
        self._loaded = None
        set_state(self.model, self.layout, state)

    def logits_for(self, prompt: Sequence[int], rollout: Rollout, states: Callable[[int], State]) -> torch.Tensor:
        """(T, V) logits that predict each completion token, segments replayed with their own versions."""
        chunks = list(self.replay([Recomputation(tuple(prompt), rollout)], states))
        return torch.cat([chunk.logits for chunk in sorted(chunks, key=lambda chunk: chunk.start)])

    @torch.no_grad()
    def replay(self, items: Sequence[Recomputation], states: Callable[[int], State]) -> Iterator[LogitsChunk]:
        """Logits of many completions, version by version, so that each version is loaded once.

        Chunks of one item come in ascending order of position; items interleave. Peak memory is one chunk plus
        the caches of items that cross a swap. A version that the call before left loaded is not loaded again.

        Raises:
            LocalFault: whatever ``states`` raises for a version that is not at hand, ``E_MODEL_STATE``.
        """
        steps = [step for index, item in enumerate(items) for step in _steps(index, item)]
        caches: dict[int, Any] = {}
        for version in sorted({step.version for step in steps}):
            if self._loaded != (states, version):
                self.set_state(states(version))
                self._loaded = (states, version)
            mine = [step for step in steps if step.version == version]
            asked = Counter(items[step.item].prompt for step in mine if step.feed.start == 0)
            shared = {p: self._prefix_cache(p) for p, n in asked.items() if n > 1 and len(p) >= MIN_SHARED_PROMPT}
            alone = [s for s in mine if s.feed.start or s.continued or len(s.feed) > self._tokens_per_pass]
            batched = [step for step in mine if step not in alone]
            yield from self._batched(items, [s for s in batched if items[s.item].prompt not in shared])
            for prompt, cache in shared.items():
                yield from self._after_prompt(items, [s for s in batched if items[s.item].prompt == prompt], cache)
            for step in alone:
                if step.feed.start == 0 and items[step.item].prompt in shared:
                    prompt = items[step.item].prompt
                    caches[step.item] = copy.deepcopy(shared[prompt])
                    step = replace(step, feed=range(len(prompt) - 1, step.feed.stop))
                yield from self._through_cache(items[step.item], step, caches)

    def _prefix_cache(self, prompt: tuple[int, ...]) -> Any:
        """The cache after all of a prompt but its last token, under the loaded version."""
        cache = DynamicCache(config=self.model.config)
        base: Any = self.model.base_model
        for begin in range(0, len(prompt) - 1, self._tokens_per_pass):
            piece = prompt[begin : min(begin + self._tokens_per_pass, len(prompt) - 1)]
            ids_1L = torch.tensor([piece], device=self.device)
            base(input_ids=ids_1L, use_cache=True, **{self._cache_keyword: cache})
        return cache

    def _after_prompt(
        self, items: Sequence[Recomputation], steps: list[_Step], cache: Any
    ) -> Iterator[LogitsChunk]:
        """Completions of one prompt side by side behind its cache, padded on the right."""
        if not steps:
            return
        begin = len(items[steps[0].item].prompt) - 1
        for batch in _pack([replace(step, feed=range(begin, step.feed.stop)) for step in steps], self._tokens_per_pass):
            rows = copy.deepcopy(cache)
            rows.batch_repeat_interleave(len(batch))
            yield from self._pass(items, batch, **{self._cache_keyword: rows})

    def _batched(self, items: Sequence[Recomputation], steps: list[_Step]) -> Iterator[LogitsChunk]:
        """Whole prefixes side by side, padded on the right: causal attention never looks at the padding."""
        for batch in _pack(steps, self._tokens_per_pass):
            yield from self._pass(items, batch)

    def _pass(self, items: Sequence[Recomputation], batch: list[_Step], **cache: Any) -> Iterator[LogitsChunk]:
        """One forward pass over inputs that begin at the same place."""
        begin, width = batch[0].feed.start, max(len(step.feed) for step in batch)
        ids_BL = torch.zeros((len(batch), width), dtype=torch.int64)
        for row, step in enumerate(batch):
            ids_BL[row, : len(step.feed)] = torch.tensor(_inputs(items[step.item], step.feed))
        first = min(step.keep for step in batch) - begin
        kept = torch.arange(first, width, device=self.device)
        with self._routed([(items[step.item], step, step.feed) for step in batch], width) as margins_NY:
            logits_BKV = self.model(
                input_ids=ids_BL.to(self.device), use_cache=bool(cache), logits_to_keep=kept, **cache
            ).logits
        for row, step in enumerate(batch):
            wanted = slice(step.keep - begin - first, len(step.feed) - first)
            margins = None if margins_NY is None else margins_NY.amax(1).view(len(batch), width)[row, first:][wanted]
            yield LogitsChunk(
                step.item, step.keep + 1 - len(items[step.item].prompt), logits_BKV[row, wanted], margins
            )

    def _through_cache(self, item: Recomputation, step: _Step, caches: dict[int, Any]) -> Iterator[LogitsChunk]:
        cache = caches.pop(step.item, None)
        if cache is None:
            cache = DynamicCache(config=self.model.config)
        for begin in range(step.feed.start, step.feed.stop, self._tokens_per_pass):
            piece = range(begin, min(begin + self._tokens_per_pass, step.feed.stop))
            ids_1L = torch.tensor([_inputs(item, piece)], device=self.device)
            keep = max(step.keep - begin, 0)
            kept = torch.arange(min(keep, len(piece) - 1), len(piece), device=self.device)
            with self._routed([(item, step, piece)], len(piece)) as margins_NY:
                output = self.model(
                    input_ids=ids_1L, use_cache=True, logits_to_keep=kept, **{self._cache_keyword: cache}
                )
            if keep < len(piece):
                margins = None if margins_NY is None else margins_NY.amax(1)[keep:]
                yield LogitsChunk(step.item, begin + keep + 1 - len(item.prompt), output.logits[0], margins)
        if step.continued:
            caches[step.item] = cache

    def _routed(
        self, rows: Sequence[tuple[Recomputation, _Step, range]], width: int
    ) -> AbstractContextManager[torch.Tensor | None]:
        """The recorded choices of a pass of ``width`` inputs per row: of each row the item, its step, its inputs."""
        shape = next((item.rollout.routes.shape[1:] for item, *_ in rows if item.rollout.routes is not None), None)
        if shape is None:
            return nullcontext()
        routes_BLYX = torch.full((len(rows), width, *shape), OWN)
        for row, (item, step, span) in enumerate(rows):
            if item.rollout.routes is not None:
                first, offset = max(step.keep, span.start), len(item.prompt) - 1
                chosen = item.rollout.routes[max(first - offset, 0) : max(span.stop - offset, 0)]
                routes_BLYX[row, first - span.start : len(span)] = torch.from_numpy(chosen.astype("int64"))
        return replay_routes(self.model, routes_BLYX.flatten(0, 1).to(self.device))


def _steps(index: int, item: Recomputation) -> list[_Step]:
    """How the inputs of one item are divided among its segments."""
    segments = item.rollout.segments
    offset = len(item.prompt) - 1
    steps = []
    for number, segment in enumerate(segments):
        last = number + 1 == len(segments)
        stop = offset + (len(item.rollout) if last else segments[number + 1].start)
        kept = number > 0 and segment.mode == SwapMode.KV_KEPT
        continued = not last and segments[number + 1].mode == SwapMode.KV_KEPT
        keep = offset + segment.start
        steps.append(_Step(index, segment.version, range(keep if kept else 0, stop), keep, continued))
    return steps


def _inputs(item: Recomputation, span: range) -> list[int]:
    """Token ids of inputs ``span``: the prompt, then the completion without its last token."""
    prompt = len(item.prompt)
    head = list(item.prompt[span.start : span.stop])
    tail: list[int] = item.rollout.tokens[max(span.start - prompt, 0) : max(span.stop - prompt, 0)].tolist()
    return head + tail


def _pack(steps: list[_Step], budget: int) -> Iterator[list[_Step]]:
    """Batches of similar length whose padded size stays within ``budget`` inputs."""
    batch: list[_Step] = []
    for step in sorted(steps, key=lambda step: len(step.feed)):
        if batch and (len(batch) + 1) * len(step.feed) > budget:
            yield batch
            batch = []
        batch.append(step)
    if batch:
        yield batch
