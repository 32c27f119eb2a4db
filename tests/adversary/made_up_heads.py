"""Heads made up around a token of the node's own choice, so that neither the replay nor k3 of the token says anything.

The token keeps the code that the checkpoint gives it. The rest of the head are ids whose noise loses, as likely as
it takes for the whole to be one; the tail is empty. Some of them are a step or two lighter or heavier, so that ln q of
the token is ln p to a hundredth of a step: closer than honest rounding gets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from protocol.head import to_codes
from protocol.messages import Lease, SamplingRules
from protocol.prng import HEAD_DOMAIN, noise, seed_words
from protocol.rollout import EMPTY_TAIL, NO_CODE, Bundle, Finish, Rollout, Segment
from protocol.weight_table import ONE_BITS, weight_table
from tests.adversary.attack import first
from tests.adversary.world import EOS, World

_Head = list[tuple[int, int]]  #: (code, id), ascending


@dataclass(frozen=True)
class _Place:
    """One position of a completion: what the checkpoint says of it, and its noise."""

    logp_V: NDArray[np.float64]
    noise_V: NDArray[np.float64]
    rules: SamplingRules

    def head(self, token: int) -> _Head | None:
        """A head under which ``token`` wins with the probability that it has; None when there is none."""
        steps, table = self.rules.steps_per_nat, weight_table(self.rules.steps_per_nat)
        code = int(to_codes(self.logp_V[token : token + 1], steps)[0])
        rest = 1.0 - math.exp(-code / steps)
        losers = np.argsort(-self.noise_V)
        losers = losers[losers != token][: self.rules.head_size - 1]
        for count in range(len(losers), 0, -1):
            base = round(-math.log(rest / count) * steps) if rest > 0 else self.rules.head_max_code + 1
            if base > self.rules.head_max_code:
                continue
            _, moved, by = min(
                (abs(self._log_sum(code, base, by, moved, count) - self._wanted(code, token)), moved, by)
                for moved in range(count + 1) for by in (1, -1, 2, -2) if base + by >= 0
            )
            if abs(self._log_sum(code, base, by, moved, count)) * steps > 0.98:
                continue
            codes = [base + by] * moved + [base] * (count - moved)
            own = self.noise_V[token] / float(table[code])
            if own < min(self.noise_V[i] / float(table[c]) for i, c in zip(losers, codes, strict=False)):
                return sorted([(code, token), *((c, int(i)) for i, c in zip(losers, codes, strict=False))])
        return None

    def _wanted(self, code: int, token: int) -> float:
        return -code / self.rules.steps_per_nat - float(self.logp_V[token])

    def _log_sum(self, code: int, base: int, by: int, moved: int, count: int) -> float:
        """ln of the sum of all weights, one being 1."""
        table = weight_table(self.rules.steps_per_nat)
        total = (count - moved) * int(table[base]) + moved * int(table[base + by]) + int(table[code])
        return math.log(total / 2**ONE_BITS)


def made_up_bundle(world: World, lease: Lease) -> Bundle:
    """The likeliest tokens and never an end, as far as a head can be made up for them.

    Raises:
        NoOpportunity: no token can win at some position.
    """
    world.engine.set_state(world.state(lease.start_version))
    return Bundle(tuple(_made_up(world, lease, sample, seed) for sample, seed in world.seeds(lease).items()))


@torch.no_grad()
def _made_up(world: World, lease: Lease, sample: int, seed: bytes) -> Rollout:
    rules, tokens, heads = world.rules, list[int](), list[_Head]()
    ids = np.arange(rules.vocab_size, dtype=np.uint32)
    cache, inputs = DynamicCache(config=world.engine.model.config), lease.prompt_tokens
    while len(tokens) < rules.max_new_tokens:
        logits_V = world.engine.model(torch.tensor([inputs]), use_cache=True, cache=cache).logits[0, -1]
        noise_V = noise(seed_words(seed), np.array([len(tokens)]), HEAD_DOMAIN, ids)
        place = _Place(logits_V.double().log_softmax(-1).numpy(), noise_V, rules)
        likeliest = [int(token) for token in np.argsort(-place.logp_V) if token != EOS]
        token, head = first((t, h) for t in likeliest if (h := place.head(t)) is not None)
        tokens.append(token)
        heads.append(head)
        inputs = [token]
    entries = [entry for head in heads for entry in head]
    return Rollout(
        sample, np.array(tokens, np.uint32), np.array([len(head) for head in heads], np.uint8),
        np.array([i for _, i in entries], np.uint32), np.array([c for c, _ in entries], np.uint16),
        np.full(len(tokens), EMPTY_TAIL, np.uint16), np.full(len(tokens), NO_CODE, np.uint16),
        (Segment(0, lease.start_version),), Finish.LENGTH,
    )
