"""Honest rollouts of a model that is nothing but seeded logits; numpy only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.messages import SamplingRules
from protocol.rollout import NO_CODE, Bundle, Finish, Rollout, Segment
from protocol.sampler import TAIL, draw, draw_tail, quantise


def make_rules(**changes: Any) -> SamplingRules:
    """Rules of a small run; ``changes`` override fields."""
    fields: dict[str, Any] = {
        "vocab_size": 64, "head_size": 12, "head_max_code": 6_000, "max_new_tokens": 128, "swap_grid": 16,
        "eos_token_ids": [0],
    }
    return SamplingRules(**(fields | changes))


def make_seed(number: int) -> bytes:
    """A 32-byte seed."""
    return np.random.default_rng(number).bytes(32)


def make_logprobs(rng: np.random.Generator, length: int, vocabulary: int, spread: float = 2.0) -> NDArray[np.float32]:
    """(T, V) float32 log-probabilities of a made-up model; a larger spread is a more certain model."""
    logits = (rng.standard_normal((length, vocabulary)) * spread).astype(np.float32)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs: NDArray[np.float32] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logprobs


def make_rollout(
    rng: np.random.Generator, rules: SamplingRules, seed: bytes, *, length: int = 40, sample: int = 0,
    segments: tuple[Segment, ...] = (Segment(0, 3),), spread: float = 2.0,
) -> Rollout:
    """An honest rollout of ``length`` tokens drawn under ``seed``; end-of-sequence ids do not end it."""
    tokens, token_codes, heads = [], [], []
    for position, logprobs in enumerate(make_logprobs(rng, length, rules.vocab_size, spread)):
        head = quantise(logprobs, rules)
        index = draw(head, seed, position, rules)
        token, code = (int(head.ids[index]), NO_CODE) if index != TAIL else draw_tail(
            logprobs, head.ids, seed, position, rules
        )
        tokens.append(token)
        token_codes.append(code)
        heads.append(head)
    return Rollout(
        sample, np.array(tokens, np.uint32), np.array([len(head.ids) for head in heads], np.uint8),
        np.concatenate([head.ids for head in heads]), np.concatenate([head.codes for head in heads]),
        np.array([head.tail_code for head in heads], np.uint16), np.array(token_codes, np.uint16), segments,
        Finish.LENGTH,
    )


def make_bundle(rng: np.random.Generator, rules: SamplingRules, *, samples: int = 3, length: int = 40) -> Bundle:
    """Rollouts of samples 0, 1, ... under ``make_seed(sample)``."""
    return Bundle(tuple(
        make_rollout(rng, rules, make_seed(sample), length=length + sample, sample=sample) for sample in range(samples)
    ))


def edited(rollout: Rollout, **columns: Any) -> Rollout:
    """A copy in which each named column is changed: ``column={index: value}``; other fields are replaced whole."""
    changes: dict[str, Any] = {}
    for name, change in columns.items():
        if isinstance(change, dict):
            column = getattr(rollout, name).copy()
            for index, value in change.items():
                column[index] = value
            change = column
        changes[name] = change
    return replace(rollout, **changes)
