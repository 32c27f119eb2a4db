"""Many independent small transformers computed at once, so that a sweep over seeds and rates costs few large products.

Run r of the stack never touches run s: every matrix product is batched over runs, and the optimiser's step, its
clipping and its rate are each run's own.

Legend: R runs, B rows, L positions, D width, H attention heads, V vocabulary, T completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from protocol.messages import SamplingRules
from protocol.sampler_torch import sample_batch
from protocol.weight_table import log_weights

Weights = dict[str, Tensor]

#: AdamW's constants, those of ``learner.config.OptimConfig``.
BETA1, BETA2, EPS = 0.9, 0.95, 1e-8


@dataclass(frozen=True)
class Shape:
    """Of one transformer: pre-norm, learned positions, tied embeddings, ReLU layers of twice the width."""

    vocab: int
    width: int = 48
    layers: int = 2
    heads: int = 2
    positions: int = 12

    def parameters(self) -> int:
        """Weights of one run."""
        return (self.vocab + self.positions) * self.width + self.layers * 8 * self.width**2


def new_weights(shape: Shape, seeds: list[int]) -> Weights:
    """One freshly drawn transformer per seed."""
    return stack([_one(shape, torch.Generator().manual_seed(seed)) for seed in seeds])


def _one(shape: Shape, generator: torch.Generator) -> Weights:
    def normal(rows: int, columns: int, std: float) -> Tensor:
        return std * torch.randn(rows, columns, generator=generator)

    width, deep = shape.width, math.sqrt(2 * shape.layers)
    weights = {"embed": normal(shape.vocab, width, 0.05), "place": normal(shape.positions, width, 0.05)}
    for layer in range(shape.layers):
        weights |= {
            f"{layer}.qkv": normal(width, 3 * width, width**-0.5),
            f"{layer}.out": normal(width, width, width**-0.5 / deep),
            f"{layer}.up": normal(width, 2 * width, width**-0.5),
            f"{layer}.down": normal(2 * width, width, (2 * width) ** -0.5 / deep),
        }
    return weights


def stack(runs: list[Weights]) -> Weights:
    """Runs of no stack yet, as one stack."""
    return {name: torch.stack([run[name] for run in runs]) for name in runs[0]}


def pick(weights: Weights, runs: list[int]) -> Weights:
    """The runs of a stack by index, repeated as asked."""
    return {name: value[runs].clone() for name, value in weights.items()}


def published(masters: Weights) -> Weights:
    """The bits that sampler and learner compute with: masters rounded to bfloat16."""
    return {name: value.detach().to(torch.bfloat16).float() for name, value in masters.items()}


class Cache:
    """Keys and values of one generation."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, the new ones included."""
        if layer in self.layers:
            old_key, old_value = self.layers[layer]
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self.layers[layer] = key, value
        return key, value

    def repeat(self, times: int) -> None:
        """Every row ``times`` times in a row."""
        self.layers = {
            layer: (key.repeat_interleave(times, 0), value.repeat_interleave(times, 0))
            for layer, (key, value) in self.layers.items()
        }


def hidden(weights: Weights, shape: Shape, ids_RBL: Tensor, start: int = 0, cache: Cache | None = None) -> Tensor:
    """(R, B, L, D) final hidden states of inputs at positions ``start ...``."""
    runs, rows, length = ids_RBL.shape
    offsets_R11 = torch.arange(runs)[:, None, None] * shape.vocab
    x = functional.embedding(ids_RBL + offsets_R11, weights["embed"].flatten(0, 1))
    x = (x + weights["place"][:, None, start : start + length]).view(runs, rows * length, shape.width)
    for layer in range(shape.layers):
        mixed = torch.bmm(_norm(x), weights[f"{layer}.qkv"])
        parts = mixed.view(runs * rows, length, 3, shape.heads, shape.width // shape.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        if cache is not None:
            key, value = cache.extend(layer, key, value)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        x = x + torch.bmm(seen.transpose(1, 2).reshape(runs, rows * length, shape.width), weights[f"{layer}.out"])
        x = x + torch.bmm(torch.bmm(_norm(x), weights[f"{layer}.up"]).relu(), weights[f"{layer}.down"])
    return _norm(x).view(runs, rows, length, shape.width)


def logits(weights: Weights, hidden_RBLD: Tensor) -> Tensor:
    """(R, B, L, V) logits of hidden states."""
    runs, rows, length, width = hidden_RBLD.shape
    flat = torch.bmm(hidden_RBLD.reshape(runs, rows * length, width), weights["embed"].transpose(1, 2))
    return flat.view(runs, rows, length, -1)


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6)


@dataclass(frozen=True)
class Draws:
    """Completions with their committed heads, all (R, B, T, ...) and int64 or float32. K head entries."""

    tokens: Tensor
    log_q: Tensor  #: of the drawn token
    head_ids: Tensor
    head_q: Tensor
    head_valid: Tensor
    tail_q: Tensor


@torch.no_grad()
def generate(weights: Weights, shape: Shape, prompts_RPL: Tensor, seeds_RB4: Tensor, rules: SamplingRules) -> Draws:
    """``rules.max_new_tokens`` tokens for each row with the run's seeded sampler (``protocol.sampler_torch``).

    B is a multiple of the P prompts: row b belongs to prompt b // (B / P). Rows go on after their end token; the
    caller leaves out what follows it.
    """
    runs, prompts, length = prompts_RPL.shape
    rows, cache, found = seeds_RB4.shape[1], Cache(), []
    hidden(weights, shape, prompts_RPL[:, :, :-1], 0, cache)
    cache.repeat(rows // prompts)
    inputs_RB1 = prompts_RPL[:, :, -1:].repeat_interleave(rows // prompts, dim=1)
    for position in range(rules.max_new_tokens):
        states = hidden(weights, shape, inputs_RB1, length - 1 + position, cache)
        draw = sample_batch(
            logits(weights, states).flatten(0, 2), seeds_RB4.flatten(0, 1),
            torch.full((runs * rows,), position), rules,
        )
        inputs_RB1 = draw.tokens_B.view(runs, rows, 1)
        found.append(draw)
    table = torch.from_numpy(log_weights(rules.steps_per_nat).copy())
    parts = [_committed(draw.tokens_B, draw.head_len_B, draw.head_ids_BK, draw.head_codes_BK, draw.tail_codes_B,
                        draw.token_codes_B, table) for draw in found]
    columns = (torch.stack(column, 1).unflatten(0, (runs, rows)) for column in zip(*parts, strict=True))
    return Draws(*columns)


def _committed(tokens_B: Tensor, lengths_B: Tensor, ids_BK: Tensor, codes_BK: Tensor, tail_codes_B: Tensor,
               token_codes_B: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """The fields of ``Draws`` for one position: probabilities are the integer weights over their sum."""
    valid_BK = torch.arange(ids_BK.shape[1]) < lengths_B[:, None]
    head_BK = torch.where(valid_BK, table[codes_BK].exp(), 0.0)
    tail_B = table[tail_codes_B].exp()
    total_B = head_BK.sum(1) + tail_B
    hit_BK = valid_BK & (ids_BK == tokens_B[:, None])
    in_head_B = hit_BK.any(1)
    own_B = torch.where(in_head_B, (hit_BK * head_BK).sum(1), table[token_codes_B].exp())
    padded_BK = torch.where(valid_BK, ids_BK, ids_BK[:, :1])
    head_q_BK = torch.where(valid_BK, head_BK, head_BK[:, :1]) / total_B[:, None]
    return (tokens_B, (own_B / total_B).log().float(), padded_BK, head_q_BK.float(), valid_BK,
            (tail_B / total_B).float())


class Adam:
    """Adam for a stack, after clipping, with a rate of its own for each run. Moves the masters in place."""

    def __init__(self, masters: Weights):
        self.masters = masters
        self._first = {name: torch.zeros_like(value) for name, value in masters.items()}
        self._second = {name: torch.zeros_like(value) for name, value in masters.items()}
        self._steps_R = torch.zeros(len(next(iter(masters.values()))))

    @torch.no_grad()
    def step(self, gradients: Weights, rate_R: Tensor, max_norm: float) -> Tensor:
        """(R,) norms before clipping. A run whose norm is not finite, or 0, is left as it is."""
        norm_R = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
        live_R = norm_R.isfinite() & (norm_R > 0)
        scale_R = torch.where(live_R, (max_norm / (norm_R + 1e-6)).clamp(max=1.0), 0.0)
        self._steps_R += live_R
        count_R = self._steps_R.clamp(min=1)
        size_R = rate_R / (1 - BETA1**count_R)
        root_R = (1 - BETA2**count_R).sqrt()
        for name, master in self.masters.items():
            shape = (-1, *[1] * (master.ndim - 1))
            live = live_R.view(shape)
            gradient = torch.where(live, gradients[name], 0.0) * scale_R.view(shape)
            first, second = self._first[name], self._second[name]
            first.copy_(torch.where(live, BETA1 * first + (1 - BETA1) * gradient, first))
            second.copy_(torch.where(live, BETA2 * second + (1 - BETA2) * gradient.square(), second))
            move = size_R.view(shape) * first / (second.sqrt() / root_R.view(shape) + EPS)
            master -= torch.where(live, move, 0.0)
        return norm_R


def gradients_of(weights: Weights, backward: Callable[[Weights], None]) -> Weights:
    """Gradients that ``backward`` leaves at leaves with the values of ``weights``."""
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    backward(leaves)
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


_NARROWEST: Final = 2


def quantised(weights: Weights, bits: int) -> Weights:
    """What an engine with ``bits``-bit weights holds: each matrix to the nearest of its column's symmetric steps."""
    if bits < _NARROWEST:
        raise ValueError(f"{bits} bits hold no sign and a step; at least {_NARROWEST}")
    most = 2 ** (bits - 1) - 1
    found = {}
    for name, value in weights.items():
        axis = 2 if name in ("embed", "place") else 1  # by row of the vocabulary, by output of a matrix
        step = (value.abs().amax(dim=axis, keepdim=True) / most).clamp(min=1e-12)
        found[name] = (value / step).round().clamp(-most, most) * step
    return found
