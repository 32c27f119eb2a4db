"""Microbatches: sequences laid out for the model by a token budget, deterministically.

Two layouts with the same gradients. ``share_prompts`` runs a prompt once for several completions: one row holds
blocks ``prompt, completion, completion, ...`` and a mask lets a completion see its prompt and itself. Without it each
completion is a row of its own, padded on the right, sorted by length. The last token of a completion is predicted but
never fed in.

Where the sampler's experts are known, the pass behind each loss token is routed to them (R3, see
``protocol.reference.routing``); a prompt that is run once takes the first completion's for its last token.

Legend: B rows, L row length, M = B L inputs, N loss tokens, Y layers with a router, X experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.batch import Batch, Sequence
from learner.config import BatchConfig
from learner.head import LossTokens
from protocol.reference.routing import OWN

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True)
class Microbatch:
    """What goes through the model at once."""

    ids_BL: Tensor  #: int64 input tokens
    positions_BL: Tensor | None  #: int64; None means 0..L-1 in every row
    mask_11LL: Tensor | None  #: bool, True = may attend; None means causal
    source_N: Tensor  #: int64 flat index into (B, L) of the input that predicts each loss token
    tokens: LossTokens
    sequences: tuple[Sequence, ...]  #: in the order of ``tokens.sequence_N``
    routes_MYX: Tensor | None = None  #: int64 experts of each input, ``OWN`` where not known; None: none is known
    idle: bool = False  #: there to keep a rank in step with the others; its numbers mean nothing

    def to(self, device: torch.device) -> Microbatch:
        """The same on ``device``."""
        if device.type == "cpu":
            return self
        return replace(self, **_moved(self, device), tokens=replace(self.tokens, **_moved(self.tokens, device)))


@dataclass(frozen=True)
class _Block:
    """A prompt and some of its completions."""

    sequences: list[Sequence]

    @property
    def length(self) -> int:
        return len(self.sequences[0].prompt) + sum(len(s.tokens_T) - 1 for s in self.sequences)


def _moved(thing: object, device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) for name, value in vars(thing).items() if isinstance(value, Tensor)}


def microbatches(batch: Batch, config: BatchConfig, rank: int = 0, size: int = 1) -> Iterator[Microbatch]:
    """The share of ``rank`` of ``size``; over all ranks every sequence of ``batch`` once.

    A pure function of its arguments. Each microbatch is within the budget unless one sequence alone is longer. All
    ranks get equally many: the last round is filled up with idle ones.
    """
    layouts = _layouts(batch, config, _budget(batch, config, size))
    for start in range(0, len(layouts), size):
        yield layouts[start + rank]() if start + rank < len(layouts) else _idle(batch)


def _layouts(batch: Batch, config: BatchConfig, budget: int) -> list[Callable[[], Microbatch]]:
    """Every microbatch of the batch, not laid out yet."""
    if config.share_prompts:
        return [partial(_shared, blocks) for blocks in _pack(list(_blocks(batch, budget)), budget)]
    return [partial(_padded, rows) for rows in _cut(batch, budget)]


def _budget(batch: Batch, config: BatchConfig, size: int) -> int:
    """Tokens of a microbatch: small enough that every rank has something to do."""
    if size == 1:
        return config.max_tokens
    if config.share_prompts:
        total = sum(block.length for block in _blocks(batch, config.max_tokens))
    else:
        total = sum(map(_input_length, batch.sequences))
    return min(config.max_tokens, max(1, -(-total // size)))


def _idle(batch: Batch) -> Microbatch:
    """One token of the batch's first sequence with no weight in the loss: finite numbers and a zero gradient."""
    first = batch.sequences[0]
    cut = {f.name: getattr(first, f.name)[:1] for f in fields(Sequence) if _per_token(f.name, first)}
    one = replace(first, **(cut | {"signal_T": np.zeros(1), "scale_T": np.zeros(1)}))
    return replace(_padded([one]), idle=True)


def _per_token(name: str, sequence: Sequence) -> bool:
    return "_T" in name and getattr(sequence, name) is not None


def _blocks(batch: Batch, budget: int) -> Iterator[_Block]:
    """Each group's completions cut into blocks within the budget."""
    for _, members in groupby(batch.sequences, key=lambda s: s.group):
        block: list[Sequence] = []
        for sequence in members:
            if block and _Block([*block, sequence]).length > budget:
                yield _Block(block)
                block = []
            block.append(sequence)
        yield _Block(block)


def _pack(blocks: list[_Block], budget: int) -> Iterator[list[_Block]]:
    """First fit in decreasing length: few rows, little waste."""
    bins: list[list[_Block]] = []
    room: list[int] = []
    for block in sorted(blocks, key=lambda b: -b.length):
        place = next((i for i, free in enumerate(room) if free >= block.length), None)
        if place is None:
            bins.append([block])
            room.append(budget - block.length)
        else:
            bins[place].append(block)
            room[place] -= block.length
    yield from bins


def _cut(batch: Batch, budget: int) -> Iterator[list[Sequence]]:
    """Rows in ascending length, cut so that rows times longest row stays within the budget."""
    rows: list[Sequence] = []
    for sequence in sorted(batch.sequences, key=_input_length):
        if rows and (len(rows) + 1) * _input_length(sequence) > budget:
            yield rows
            rows = []
        rows.append(sequence)
    if rows:
        yield rows


def _input_length(sequence: Sequence) -> int:
    return len(sequence.prompt) + len(sequence.tokens_T) - 1


def _shared(blocks: list[_Block]) -> Microbatch:
    ids, positions, owners, sources = [], [], [], []
    offset = owner = 0
    for block in blocks:
        prompt = block.sequences[0].prompt
        last = offset + len(prompt) - 1
        prompt_owner = owner
        ids.append(prompt)
        positions.append(np.arange(len(prompt)))
        owners.append(np.full((len(prompt), 2), prompt_owner))
        offset += len(prompt)
        for sequence in block.sequences:
            owner += 1
            fed = len(sequence.tokens_T) - 1
            ids.append(sequence.tokens_T[:-1])
            positions.append(len(prompt) + np.arange(fed))
            owners.append(np.tile([prompt_owner, owner], (fed, 1)))
            sources.append(np.concatenate([[last], offset + np.arange(fed)]))
            offset += fed
        owner += 1
    sequences = [sequence for block in blocks for sequence in block.sequences]
    return Microbatch(
        ids_BL=torch.from_numpy(np.concatenate(ids)[None]),
        positions_BL=torch.from_numpy(np.concatenate(positions)[None]),
        mask_11LL=torch.from_numpy(_mask(np.concatenate(owners))[None, None]),
        source_N=torch.from_numpy(np.concatenate(sources)),
        tokens=_loss_tokens(sequences),
        sequences=tuple(sequences),
        routes_MYX=_routes(offset, sequences, sources),
    )


def _mask(owner_L2: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(L, L): j is seen by i when it comes no later and belongs to i's prompt or to i's own completion."""
    prompt_L, own_L = owner_L2[:, 0], owner_L2[:, 1]
    seen_LL = (own_L[None, :] == prompt_L[:, None]) | (own_L[None, :] == own_L[:, None])
    return np.tril(seen_LL)


def _padded(rows: list[Sequence]) -> Microbatch:
    length = max(map(_input_length, rows))
    ids_BL = np.zeros((len(rows), length), dtype=np.int64)
    sources = []
    for row, sequence in enumerate(rows):
        ids_BL[row, : _input_length(sequence)] = np.concatenate([sequence.prompt, sequence.tokens_T[:-1]])
        sources.append(row * length + len(sequence.prompt) - 1 + np.arange(len(sequence.tokens_T)))
    return Microbatch(
        torch.from_numpy(ids_BL), None, None, torch.from_numpy(np.concatenate(sources)), _loss_tokens(rows),
        tuple(rows), _routes(ids_BL.size, rows, sources),
    )


def _routes(inputs: int, sequences: list[Sequence], sources: list[NDArray[np.int64]]) -> Tensor | None:
    """(M, Y, X) experts of every input; ``sources``: of each sequence the inputs that predict its tokens."""
    pairs = zip(sequences, sources, strict=True)
    known = [(sequence.routes_TYX, source_T) for sequence, source_T in pairs if sequence.routes_TYX is not None]
    if not known:
        return None
    routes_MYX = np.full((inputs, *known[0][0].shape[1:]), OWN)
    for routes_TYX, source_T in reversed(known):  # so that the first has the last word on a shared input
        routes_MYX[source_T] = routes_TYX
    return torch.from_numpy(routes_MYX)


def _loss_tokens(sequences: list[Sequence]) -> LossTokens:
    width = max(sequence.head_ids_TK.shape[1] for sequence in sequences)

    def floats(values: list[NDArray[np.float64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(values).astype(np.float32))

    return LossTokens(
        target_N=torch.from_numpy(np.concatenate([s.tokens_T for s in sequences])),
        log_q_N=floats([s.log_q_T for s in sequences]),
        signal_N=floats([s.signal_T for s in sequences]),
        lag_N=torch.from_numpy(np.concatenate([s.lag_T for s in sequences])),
        head_ids_NK=torch.from_numpy(np.concatenate([_widen(s.head_ids_TK, width) for s in sequences])),
        head_q_NK=floats([_widen(s.head_q_TK, width) for s in sequences]),
        head_valid_NK=torch.from_numpy(np.concatenate([
            np.pad(s.head_valid_TK, ((0, 0), (0, width - s.head_valid_TK.shape[1]))) for s in sequences
        ])),
        tail_q_N=floats([s.tail_q_T for s in sequences]),
        sequence_N=torch.from_numpy(np.repeat(np.arange(len(sequences)), [len(s.tokens_T) for s in sequences])),
        draws_NS=floats(draws) if (draws := [s.draws_TS for s in sequences if s.draws_TS is not None]) else None,
    )


def _widen(values_TK: NDArray[_T], width: int) -> NDArray[_T]:
    """Pad to ``width`` columns by repeating the first."""
    missing = width - values_TK.shape[1]
    return np.concatenate([values_TK, np.repeat(values_TK[:, :1], missing, axis=1)], axis=1)
