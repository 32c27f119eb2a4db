"""The engine on transformers and torch: slot KV cache, batched decoding, continuous batching, weights in flight.

Legend: R rows of a pass, Q inputs per row, K most head entries, V vocabulary. Weights are computed with in float32.
A prefill pass consumes all of a prompt but its last token and makes no logits; every draw comes from a decode pass,
which consumes one input per row. Passes never have a single row, because matrix products of one row take other kernels.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from node.engine import E_ENGINE, E_ENGINE_REQUEST, Finished, Request, WeightSource
from node.kv_cache import SlotCache
from node.recorder import Recorder
from node.scheduler import Row, Scheduler
from protocol.errors import LocalFault
from protocol.messages import SamplingRules
from protocol.reference.loader import load_config_model, set_state
from protocol.reference.routing import check_rules, record_routes
from protocol.rollout import Finish
from protocol.sampler_torch import sample_batch

if TYPE_CHECKING:
    from protocol.weights.layout import Layout

_LOG = logging.getLogger(__name__)

#: Fewest rows of a pass; products of one row go through other kernels and differ in the last bits.
MIN_ROWS: Final = 2
#: Most inputs of one prefill pass; bounds memory and how long running rows wait.
PREFILL_TOKENS: Final = 4096


class TorchEngine:
    """Implements :class:`node.engine.Engine` for any Hugging Face causal language model with full attention."""

    profile = "torch-cpu-fp32"

    def __init__(
        self, model_dir: Path, layout: Layout, rules: SamplingRules, source: WeightSource, *, slots: int,
        device: str = "cpu",
    ):
        model: Any = load_config_model(model_dir, torch.float32, device=device)
        self._model, config = model, model.config
        if config.vocab_size != rules.vocab_size:
            raise LocalFault(
                E_ENGINE, "the model's vocabulary is not the run's", expected=rules.vocab_size, got=config.vocab_size
            )
        check_rules(model, rules.routes)
        self._layout, self._rules, self._source, self._device = layout, rules, source, device
        self._max_positions = int(getattr(config, "max_position_embeddings", 2**31))
        self.capacity = max(MIN_ROWS, slots)
        self.version, self.tokens = -1, 0
        self._scheduler = Scheduler(self.capacity, rules.swap_grid)
        self._cache = SlotCache(config.num_hidden_layers, self.capacity)
        # transformers renamed the keyword on the way to 5.24; both names mean the same object.
        names = inspect.signature(type(model).forward).parameters
        self._cache_argument = {"cache" if "cache" in names else "past_key_values": self._cache}
        self._recorder = Recorder(self.capacity, rules.head_size, rules.routes)
        self._input = np.zeros(self.capacity, np.int64)  #: by record: token the next pass consumes
        self._cached = np.zeros(self.capacity, np.int64)  #: by record: inputs in the KV cache
        self._position = np.zeros(self.capacity, np.int64)  #: by record: completion position drawn next
        self._drawn = np.zeros(self.capacity, np.int64)  #: by record: tokens drawn
        self._seeds = np.zeros((self.capacity, 4), np.int64)
        self._eos = frozenset(rules.eos_token_ids)

    @property
    def open_requests(self) -> int:
        """Requests submitted and not yet returned or cancelled."""
        return len(self._scheduler.waiting) + len(self._scheduler.rows)

    @property
    def waiting(self) -> frozenset[str]:
        """Keys of requests that are not begun."""
        return frozenset(request.key for request in self._scheduler.waiting)

    def check(self, request: Request) -> None:
        """Whether the request can be obeyed.

        Raises:
            LocalFault: ``E_ENGINE_REQUEST``.
        """
        most = len(request.prompt) - request.first_position + self._rules.max_new_tokens
        if not request.prompt or most > self._max_positions:
            raise LocalFault(
                E_ENGINE_REQUEST, "prompt and completion do not fit the model",
                expected=f"1 .. {self._max_positions} positions", got=most,
            )
        if not 0 <= request.first_position < self._rules.max_new_tokens or len(request.seed) != 32:
            raise LocalFault(E_ENGINE_REQUEST, "first position or seed out of range", got=request.first_position)
        if max(request.prompt) >= self._rules.vocab_size or min(request.prompt) < 0:
            raise LocalFault(
                E_ENGINE_REQUEST, "prompt token outside the vocabulary", expected=f"< {self._rules.vocab_size}",
                got=max(request.prompt),
            )
        if not self._source.has(request.start_version):
            raise LocalFault(
                E_ENGINE_REQUEST, "the weights a request starts with are not at hand", got=request.start_version
            )

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests on.

        Raises:
            LocalFault: ``E_ENGINE_REQUEST``; then none of them was taken.
        """
        for request in requests:
            self.check(request)
        self._scheduler.submit(requests)

    @torch.inference_mode()
    def cancel(self, keys: Sequence[str]) -> None:
        """Forget requests; unknown keys are ignored."""
        dropped = frozenset(keys)
        self._scheduler.drop(dropped)
        self._remove([slot for slot, row in enumerate(self._scheduler.rows) if row.request.key in dropped])

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One exchange of weights, one round of prefills or one decode pass.

        Raises:
            LocalFault: weights that a request needs are not at hand or do not fit the model; ``E_ENGINE`` when torch
                failed, for example for want of memory.
        """
        if not self.open_requests and self.version >= self._source.newest():
            return []
        plan = self._scheduler.plan(self.version, self._source.newest())
        if plan.load is not None:
            self._load(plan.load)
        try:
            self._start(plan.start)
            return self._decode(plan.step) if plan.step else []
        except RuntimeError as error:
            raise LocalFault(E_ENGINE, "torch failed", got=f"{type(error).__name__}: {str(error)[:300]}") from error

    def close(self) -> None:
        """Free the model and the cache."""
        self._cache_argument.clear()
        del self._model, self._cache

    def _load(self, version: int) -> None:
        with self._source.state(version) as state:
            set_state(self._model, self._layout, state)
        self.version = version
        self._scheduler.loaded(version)
        _LOG.debug("weights loaded", extra={"version": version, "rows": len(self._scheduler.rows)})

    # -- starting rows -----------------------------------------------------------------------------------

    def _start(self, requests: Sequence[Request]) -> None:
        """Make rows of requests that start at the loaded version; a prompt that some row holds already is copied."""
        held = {
            (row.request.prompt, row.request.start_version): slot for slot, row in enumerate(self._scheduler.rows)
        }
        copied = [request for request in requests if (request.prompt, request.start_version) in held]
        computed = [request for request in requests if (request.prompt, request.start_version) not in held]
        for request in copied:
            self._cache.move(
                held[request.prompt, request.start_version], len(self._scheduler.rows), len(request.prompt) - 1
            )
            self._take_on([request])
        computed.sort(key=lambda request: (len(request.prompt), request.prompt))
        for batch in _batches(computed):
            self._prefill(len(self._scheduler.rows), batch)
            self._take_on(batch)

    def _take_on(self, requests: Sequence[Request]) -> None:
        for row in self._scheduler.start(requests, [self._recorder.take() for _ in requests]):
            request, record = row.request, row.record
            self._input[record] = request.prompt[-1]
            self._cached[record] = len(request.prompt) - 1
            self._position[record], self._drawn[record] = request.first_position, 0
            self._seeds[record] = np.frombuffer(request.seed, "<i8")

    def _prefill(self, first: int, requests: Sequence[Request]) -> None:
        """Fill slots ``first ...`` with all but the last token of the prompts; equal prompts are computed once."""
        prefixes: dict[tuple[int, ...], int] = {}
        copies = [prefixes.setdefault(request.prompt[:-1], len(prefixes)) for request in requests]
        width = max(len(prefix) for prefix in prefixes)
        if width == 0:
            return
        ids_RQ = np.zeros((max(MIN_ROWS, len(prefixes)), width), np.int64)
        for prefix, batch_row in prefixes.items():
            ids_RQ[batch_row, : len(prefix)] = prefix
        self._cache.prefill(first, torch.tensor(copies))
        self._model.base_model(
            input_ids=self._tensor(ids_RQ), position_ids=torch.arange(width, device=self._device)[None],
            use_cache=True, **self._cache_argument,
        )

    # -- decoding ----------------------------------------------------------------------------------------

    def _decode(self, rows: Sequence[Row]) -> list[Finished]:
        """Draw one token for each of ``rows``."""
        self._arrange(rows)
        running = self._scheduler.rows[: len(rows)]
        records = np.array([row.record for row in running])
        logits_RV, routes_RYX = self._routed(records)
        draw = sample_batch(
            logits_RV, self._tensor(self._seeds[records]), self._tensor(self._position[records]),
            self._rules,
        )
        tokens_R, lengths_R, ids_RK, codes_RK, tails_R, token_codes_R = (
            column.cpu().numpy() for column in (
                draw.tokens_B, draw.head_len_B, draw.head_ids_BK, draw.head_codes_BK, draw.tail_codes_B,
                draw.token_codes_B,
            )
        )
        self._recorder.write(
            records, self._drawn[records], tokens_R, lengths_R, ids_RK, codes_RK, tails_R, token_codes_R
        )
        if routes_RYX is not None:
            self._recorder.write_routes(records, self._drawn[records], routes_RYX)
        self._input[records] = tokens_R
        for counter in (self._cached, self._position, self._drawn):
            counter[records] += 1
        self.tokens += len(running)
        return self._collect(running, tokens_R.tolist())

    def _routed(self, records_R: np.ndarray[Any, Any]) -> tuple[torch.Tensor, np.ndarray[Any, Any] | None]:
        """Logits of one decode pass and, where the run asks for them, the (R, Y, X) experts that it took."""
        if self._rules.routes is None:
            return self._forward(records_R), None
        with record_routes(self._model) as passes:
            logits_RV = self._forward(records_R)
        return logits_RV, passes[0][: len(records_R)].cpu().numpy()

    def _forward(self, records_R: np.ndarray[Any, Any]) -> torch.Tensor:
        """(R, V) float32 logits of one decode pass over the first R slots."""
        rows = len(records_R)
        inputs, positions = self._input[records_R], self._cached[records_R]
        if rows < MIN_ROWS:
            # The companion row writes where a row that may live in its slot writes next, so it disturbs nothing.
            others = self._scheduler.rows[rows:MIN_ROWS]
            spare = [int(self._cached[row.record]) for row in others] + [0] * (MIN_ROWS - rows - len(others))
            inputs, positions = np.append(inputs, [0] * len(spare)), np.append(positions, spare)
        length = int(positions.max()) + 1
        positions_R = self._tensor(positions)
        hidden_R1 = positions_R[:, None] < torch.arange(length, device=self._device)[None]
        mask_R11L = torch.zeros(hidden_R1.shape, device=self._device).masked_fill_(hidden_R1, -torch.inf)[:, None, None]
        self._cache.decode(positions_R, length)
        output = self._model(
            input_ids=self._tensor(inputs)[:, None], position_ids=positions_R[:, None],
            attention_mask=mask_R11L, use_cache=True, **self._cache_argument,
        )
        logits: torch.Tensor = output.logits[:rows, 0].float()
        return logits

    def _collect(self, running: Sequence[Row], tokens: Sequence[int]) -> list[Finished]:
        finished, slots = [], []
        for slot, (row, token) in enumerate(zip(running, tokens, strict=True)):
            row.position += 1
            if token in self._eos:
                finish = Finish.EOS
            elif row.position == self._rules.max_new_tokens:
                finish = Finish.LENGTH
            else:
                continue
            rollout = self._recorder.rollout(
                row.record, int(self._drawn[row.record]), row.request.sample, tuple(row.segments), finish
            )
            finished.append(Finished(row.request, rollout))
            slots.append(slot)
        self._remove(slots)
        return finished

    def _tensor(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    # -- slots -------------------------------------------------------------------------------------------

    def _arrange(self, chosen: Sequence[Row]) -> None:
        """Bring the chosen rows into the first slots."""
        rows = self._scheduler.rows
        if len(chosen) == len(rows):
            return
        wanted = {row.record for row in chosen}
        outside = (slot for slot in range(len(chosen)) if rows[slot].record not in wanted)
        inside = (slot for slot in range(len(chosen), len(rows)) if rows[slot].record in wanted)
        for a, b in list(zip(outside, inside, strict=True)):
            length = max(int(self._cached[rows[a].record]), int(self._cached[rows[b].record]))
            self._cache.exchange(a, b, length)
            rows[a], rows[b] = rows[b], rows[a]

    def _remove(self, slots: Iterable[int]) -> None:
        """Free slots; the last row moves into each hole."""
        rows = self._scheduler.rows
        for slot in sorted(slots, reverse=True):
            self._recorder.release(rows[slot].record)
            last = rows.pop()
            if slot < len(rows):
                self._cache.move(len(rows), slot, int(self._cached[last.record]))
                rows[slot] = last


def _batches(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests in their order, cut so that no prefill is over ``PREFILL_TOKENS`` inputs (equal prompts count once)."""
    batches: list[list[Request]] = []
    prompts: set[tuple[int, ...]] = set()
    for request in requests:
        prompts = prompts | {request.prompt}
        if not batches or len(prompts) * len(request.prompt) > PREFILL_TOKENS:
            batches.append([])
            prompts = {request.prompt}
        batches[-1].append(request)
    return batches
