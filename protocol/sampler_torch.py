"""The sampler for a batch of logits on any torch device: bit for bit what ``protocol.sampler`` does per position.

Run it eagerly: a compiler that fuses ``a * b + c`` would change draws.

Legend: B rows of a batch, T positions, V vocabulary, K = min(head_size, V) entries of a head.
Spec: ``docs/spec/sampler.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from protocol.errors import LocalFault
from protocol.head import E_LOGITS, MAX_CODE
from protocol.messages import SamplingRules
from protocol.prng import (
    HEAD_DOMAIN,
    ID_STEP,
    LN2,
    MIX_1,
    MIX_2,
    POSITION_STEP,
    SERIES,
    SQRT_HALF,
    TAIL_DOMAIN,
    TAIL_ID,
)
from protocol.rollout import EMPTY_TAIL, NO_CODE
from protocol.sampler import compiled
from protocol.weight_table import float_weights

_ID_BITS: Final = 24  #: SamplingRules bounds the vocabulary by 2^24


@dataclass(frozen=True, eq=False)
class Heads:
    """Heads of a batch, int64, zero beyond each row's length."""

    lengths_B: Tensor
    ids_BK: Tensor
    codes_BK: Tensor
    tail_codes_B: Tensor  #: ``EMPTY_TAIL`` where there is no tail


@dataclass(frozen=True, eq=False)
class BatchDraw:
    """One drawn token per row with its head; int64, heads zero beyond each row's length."""

    tokens_B: Tensor
    head_len_B: Tensor
    head_ids_BK: Tensor
    head_codes_BK: Tensor
    tail_codes_B: Tensor  #: ``EMPTY_TAIL`` where there is no tail
    token_codes_B: Tensor  #: ``NO_CODE``, or the token's own code when it was drawn from the tail


@dataclass(frozen=True, eq=False)
class _Scaled:
    """Logits made ready, as ``head.normalise`` does it."""

    x_BV: Tensor  #: float32, logits / T
    top_B1: Tensor  #: float64, maximum of each row
    masses_BV: Tensor  #: float64, exp(x - top)
    log_total_B1: Tensor  #: float64, ln of the sum of masses

    def logprobs(self, ids_BK: Tensor) -> Tensor:
        """(B, K) float64 log-probabilities of ids."""
        return self.x_BV.gather(1, ids_BK).double() - self.top_B1 - self.log_total_B1


def heads_from_logits(logits_TV: Tensor, rules: SamplingRules) -> Heads:
    """The heads of logits without a draw.

    Args:
        logits_TV: (T, V) floating-point logits of the model, before the temperature.

    Raises:
        LocalFault: ``E_LOGITS``.
    """
    return _quantise(_scale(logits_TV, rules), rules)


def sample_batch(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: SamplingRules) -> BatchDraw:
    """Draw one token per row.

    Args:
        logits_BV: (B, V) floating-point logits of the model, before the temperature.
        seeds_B: (B, 4) int64, each row ``prng.seed_words(seed)`` reinterpreted as int64; same device.
        positions_B: (B,) int64 completion positions; same device.

    Raises:
        LocalFault: ``E_LOGITS``.
    """
    scaled = _scale(logits_BV, rules)
    heads = _quantise(scaled, rules)
    tokens_B = _head_race(heads, seeds_B, positions_B, rules)
    token_codes_B = torch.full_like(tokens_B, NO_CODE)
    rows = torch.nonzero(tokens_B == TAIL_ID).squeeze(1)
    if len(rows):
        tokens_B[rows] = _tail_race(scaled.masses_BV, rows, seeds_B, positions_B)
        logp_B1 = scaled.logprobs(tokens_B.clamp(max=logits_BV.shape[1] - 1)[:, None])
        token_codes_B[rows] = _codes(logp_B1[rows, 0], rules)
    return BatchDraw(tokens_B, heads.lengths_B, heads.ids_BK, heads.codes_BK, heads.tail_codes_B, token_codes_B)


def _scale(logits_BV: Tensor, rules: SamplingRules) -> _Scaled:
    x_BV = logits_BV.float()
    if rules.temperature_milli != 1000:
        # By a tensor: on some devices division by a number is multiplication by its rounded reciprocal.
        x_BV = x_BV / torch.full_like(x_BV[:, :1], rules.temperature_milli / 1000)
    top_B1 = x_BV.amax(dim=1, keepdim=True).double()
    if not bool(top_B1.isfinite().all()):
        raise LocalFault(E_LOGITS, "logits are not usable", expected="a finite maximum in every row")
    masses_BV = x_BV.double().sub_(top_B1).exp_()
    return _Scaled(x_BV, top_B1, masses_BV, masses_BV.sum(dim=1, keepdim=True).log())


def _quantise(scaled: _Scaled, rules: SamplingRules) -> Heads:
    """Heads as ``sampler.quantise`` makes them. Zeroes the masses of head ids in place: what is left is the tail."""
    ids_BK = _top_ids(scaled.x_BV, rules.head_size)
    k = ids_BK.shape[1]
    order_BK = ((_codes(scaled.logprobs(ids_BK), rules) << _ID_BITS) | ids_BK).sort(dim=1).values
    codes_BK, ids_BK = order_BK >> _ID_BITS, order_BK & ((1 << _ID_BITS) - 1)
    lengths_B = (codes_BK <= rules.head_max_code).sum(dim=1).clamp_(min=min(rules.head_floor, k))
    inside_BK = torch.arange(k, device=ids_BK.device)[None] < lengths_B[:, None]
    kept_BK = torch.where(inside_BK, 0.0, scaled.masses_BV.gather(1, ids_BK))
    scaled.masses_BV.scatter_(1, ids_BK, kept_BK)
    tail_B1 = scaled.masses_BV.sum(dim=1, keepdim=True)
    tail_codes_B1 = torch.where(tail_B1 > 0, _codes(tail_B1.log() - scaled.log_total_B1, rules), EMPTY_TAIL)
    ids_BK, codes_BK = torch.where(inside_BK, ids_BK, 0), torch.where(inside_BK, codes_BK, 0)
    return Heads(lengths_B, ids_BK, codes_BK, tail_codes_B1.squeeze(1))


def _codes(logp: Tensor, rules: SamplingRules) -> Tensor:
    """int64 codes of float64 log-probabilities: nearest step, ties to even, clipped to 0..65534."""
    return (logp * -float(rules.steps_per_nat)).round_().clamp_(0, MAX_CODE).long()


def _top_ids(x_BV: Tensor, size: int) -> Tensor:
    """(B, K) ids of the largest values, in no particular order; among equals at the boundary the lowest ids."""
    batch, vocabulary = x_BV.shape
    if size >= vocabulary:
        return torch.arange(vocabulary, device=x_BV.device).expand(batch, vocabulary)
    values_BK, ids_BK = x_BV.topk(size + 1, dim=1, sorted=True)
    tied_B = values_BK[:, size - 1] == values_BK[:, size]
    ids_BK = ids_BK[:, :size]
    if bool(tied_B.any()):
        ids_BK = ids_BK.clone()
        boundary_B1 = values_BK[tied_B, size - 1 : size]
        x_BV = x_BV[tied_B]
        rank_BV = (x_BV > boundary_B1).long() * (2 << _ID_BITS) + (x_BV == boundary_B1).long() * (1 << _ID_BITS)
        rank_BV -= torch.arange(vocabulary, device=x_BV.device)
        ids_BK[tied_B] = rank_BV.topk(size, dim=1).indices
    return ids_BK


def _head_race(heads: Heads, seeds_B: Tensor, positions_B: Tensor, rules: SamplingRules) -> Tensor:
    """(B,) winning token id of each head, ``TAIL_ID`` where the tail wins."""
    device = heads.ids_BK.device
    kernel = compiled() if device.type == "cpu" else None
    if kernel is not None:
        arrays = (heads.lengths_B, heads.ids_BK, heads.codes_BK, heads.tail_codes_B, seeds_B, positions_B)
        return torch.from_numpy(
            kernel.head_races(*(array.contiguous().numpy() for array in arrays), float_weights(rules.steps_per_nat))
        )
    weights = _weights(rules.steps_per_nat, device)
    inside_BK = torch.arange(heads.ids_BK.shape[1], device=device)[None] < heads.lengths_B[:, None]
    ids_BK = torch.cat([heads.ids_BK, torch.full_like(heads.tail_codes_B, TAIL_ID)[:, None]], dim=1)
    weights_BK = torch.cat(
        [torch.where(inside_BK, weights[heads.codes_BK], 0.0), weights[heads.tail_codes_B][:, None]], dim=1
    )
    scores_BK = _noise(seeds_B, positions_B, HEAD_DOMAIN, ids_BK) / weights_BK
    best_B1 = scores_BK.amin(dim=1, keepdim=True)
    return torch.where(scores_BK == best_B1, ids_BK, TAIL_ID).amin(dim=1)


@lru_cache(maxsize=8)
def _weights(steps_per_nat: int, device: torch.device) -> Tensor:
    """(65536,) float64 weights of all codes."""
    return torch.tensor(float_weights(steps_per_nat), device=device)


def _tail_race(masses_BV: Tensor, rows: Tensor, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """(R,) winning id of the tail race of each of the R ``rows``; ids of the head have mass 0."""
    kernel = compiled() if masses_BV.device.type == "cpu" else None
    if kernel is not None:
        arrays = (masses_BV, rows, seeds_B, positions_B)
        return torch.from_numpy(kernel.tail_races(*(array.contiguous().numpy() for array in arrays)))
    ids_V = torch.arange(masses_BV.shape[1], device=masses_BV.device)[None]
    scores_RV = _noise(seeds_B[rows], positions_B[rows], TAIL_DOMAIN, ids_V) / masses_BV[rows]
    best_R1 = scores_RV.amin(dim=1, keepdim=True)
    return torch.where(scores_RV == best_R1, ids_V, TAIL_ID).amin(dim=1)


# -- noise: protocol.prng on int64 tensors, which wrap modulo 2^64 like uint64 ------------------------------


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(MIX_2)
    return z ^ _shift(z, 31)


def _noise(seeds_B: Tensor, positions_B: Tensor, domain: int, ids_BK: Tensor) -> Tensor:
    """(B, K) float64 noise E."""
    k0, k1, k2, k3 = (word[:, None] for word in seeds_B.unbind(1))
    counter = (positions_B[:, None] << 1) | domain
    keys_B1 = k2 ^ _mix64(k1 ^ _mix64(k0 + counter * _signed(POSITION_STEP)))
    h_BK = _mix64(k3 ^ _mix64(keys_B1 + ids_BK * _signed(ID_STEP)))
    return exponential((_shift(h_BK, 12).double() + 0.5) * 2.0**-52)


def exponential(u: Tensor) -> Tensor:
    """-ln u of float64 values in (0, 1), with the bits of ``prng.exponential``."""
    m, exponent = torch.frexp(u)
    low = m < SQRT_HALF
    m = torch.where(low, m + m, m)
    k = (low.int() - exponent).double()
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = torch.full_like(z, SERIES[-1])
    for c in SERIES[-2::-1]:
        p = p * z + c
    return k * LN2 - s * p
