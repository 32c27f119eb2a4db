"""Cheats as patches of a node: other weights under its engine, another engine, other requests, another forward pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from node.engine import Engine, Finished, Request, WeightSource
from protocol.head import MAX_CODE
from protocol.rollout import NO_CODE, Rollout
from protocol.sampler_torch import heads_from_logits
from protocol.weights.layout import State, copy_state
from tests.adversary.pipeline import Cheat
from tests.adversary.world import World, from_bits, quantised, to_bits

Change = Callable[[World, int], State]


class ChangedWeights:
    """A ``WeightSource`` that gives other weights than it says."""

    def __init__(self, world: World, source: WeightSource, change: Change):
        self._world, self._source, self._change = world, source, change
        self.newest, self.has = source.newest, source.has

    @contextmanager
    def state(self, version: int) -> Iterator[State]:
        yield self._change(self._world, version)


def weights(change: Change, **others: Any) -> Cheat:
    """A node that computes with what ``change`` gives for a version."""
    return Cheat(weights=lambda world, source: ChangedWeights(world, source, change), **others)


def other_model(world: World, _version: int) -> State:
    """Random weights of the right shapes."""
    rng = np.random.default_rng(99)
    return {
        name: words if words.ndim == 1 else to_bits(rng.normal(0, 0.3, words.shape))
        for name, words in world.state(0).items()
    }


def smaller_model(world: World, version: int) -> State:
    """The right model without its last layer."""
    state = copy_state(world.state(version))
    for name, words in state.items():
        if ".layers.1." in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            words[:] = 0
    return state


def rounded(bits: int) -> Change:
    return lambda world, version: quantised(world.state(version), bits)


def fp8(world: World, version: int) -> State:
    """Weights rounded to float8 with four exponent bits, one scale per row."""
    state = copy_state(world.state(version))
    for name, words in state.items():
        if words.ndim == 2:
            values = torch.from_numpy(from_bits(words).copy())
            scale = values.abs().amax(1, keepdim=True) / 448
            state[name] = to_bits(((values / scale).to(torch.float8_e4m3fn).float() * scale).numpy())
    return state


def older(versions: int) -> Change:
    return lambda world, version: world.state(max(0, version - versions))


def moved(relative: float) -> Change:
    """All weights off by a relative amount in a random direction, in float32 before they are rounded to bf16 again."""

    def change(world: World, version: int) -> State:
        rng = np.random.default_rng(5)
        state = copy_state(world.state(version))
        for name, words in state.items():
            if words.ndim == 2:
                values = from_bits(words)
                state[name] = to_bits(values * (1 + relative * rng.choice([-1, 1], size=values.shape)))
        return state

    return change


def least_words(share: float) -> Change:
    """One unit in the last place in the smallest weights of each matrix, as after a very small step."""

    def change(world: World, version: int) -> State:
        state = copy_state(world.state(version))
        for words in state.values():
            if words.ndim == 2:
                size = np.abs(from_bits(words))
                words[size <= np.quantile(size, share)] ^= 1
        return state

    return change


# -- the forward pass ---------------------------------------------------------------------------------------

#: (R, V) logits, (R,) completion positions, (R,) input tokens -> (R, V) logits
Hook = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def hooked(hook: Hook, **others: Any) -> Cheat:
    """A node whose logits go through ``hook`` before it samples."""

    def engine(_world: World, honest: Engine) -> Engine:
        patched: Any = honest
        forward = patched._forward

        def changed(records: Any) -> torch.Tensor:
            positions, inputs = patched._position[records], patched._input[records]
            return hook(forward(records), torch.from_numpy(positions), torch.from_numpy(inputs))

        patched._forward = changed
        return honest

    return Cheat(engine=engine, **others)


def top_p(share: float) -> Hook:
    """Keep the likeliest tokens that hold ``share`` of the mass."""

    def hook(logits_RV: torch.Tensor, _positions: torch.Tensor, _inputs: torch.Tensor) -> torch.Tensor:
        ordered, ids = logits_RV.softmax(-1).sort(descending=True)
        gone = ordered.cumsum(-1) - ordered > share
        return logits_RV.masked_fill(torch.zeros_like(gone).scatter(1, ids, gone), -60.0)

    return hook


def repetition_penalty(penalty: float) -> Hook:
    """The last token is made less likely."""

    def hook(logits_RV: torch.Tensor, _positions: torch.Tensor, inputs_R: torch.Tensor) -> torch.Tensor:
        last_R1 = inputs_R[:, None]
        value_R1 = logits_RV.gather(1, last_R1)
        return logits_RV.scatter(1, last_R1, torch.where(value_R1 > 0, value_R1 / penalty, value_R1 * penalty))

    return hook


def tilt(nats: float) -> Hook:
    """Log-probabilities of even tokens raised and of odd ones lowered by ``nats``."""

    def hook(logits_RV: torch.Tensor, _positions: torch.Tensor, _inputs: torch.Tensor) -> torch.Tensor:
        signs = 1.0 - 2.0 * (torch.arange(logits_RV.shape[1]) % 2)
        return logits_RV + nats * signs

    return hook


def bonus(token: int, nats: float, first: int = 0, last: int = 2**30) -> Hook:
    """One token made likelier at some positions."""

    def hook(logits_RV: torch.Tensor, positions_R: torch.Tensor, _inputs: torch.Tensor) -> torch.Tensor:
        here_R = (positions_R >= first) & (positions_R <= last)
        changed = logits_RV.clone()
        changed[here_R, token] += nats
        return changed

    return hook


def quantised_cache() -> Cheat:
    """Keys and values rounded to 8 bits per row as they are stored."""

    def rounded_states(states: torch.Tensor) -> torch.Tensor:
        scale = states.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return (states / scale).round() * scale

    def engine(_world: World, honest: Engine) -> Engine:
        patched: Any = honest
        for layer in patched._cache.layers:
            update = layer.update
            layer.update = lambda keys, values, *rest, _update=update, **words: _update(
                rounded_states(keys), rounded_states(values), *rest, **words
            )
        return honest

    return Cheat(engine=engine)


# -- requests and finished rollouts -------------------------------------------------------------------------


class Wrapped:
    """An engine around the honest one; ``asked`` changes requests, ``done`` what comes back for the original."""

    def __init__(
        self, inner: Engine, *, asked: Callable[[Request], Request] = lambda request: request,
        done: Callable[[Request, Rollout], Rollout] = lambda _request, rollout: rollout,
    ):
        self._inner, self._asked, self._done = inner, asked, done
        self._open: dict[str, Request] = {}
        self.check, self.cancel, self.close = inner.check, inner.cancel, inner.close
        self.profile = inner.profile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, requests: Sequence[Request]) -> None:
        self._open.update((request.key, request) for request in requests)
        self._inner.submit([self._asked(request) for request in requests])

    def step(self) -> list[Finished]:
        out = []
        for done in self._inner.step():
            request = self._open.pop(done.request.key)
            out.append(Finished(request, self._done(request, done.rollout)))
        return out


def asking(change: Callable[[Request], Request]) -> Cheat:
    """A node that asks its engine for something else than the lease says."""
    return Cheat(engine=lambda _world, honest: Wrapped(honest, asked=change))  # type: ignore[arg-type, return-value]


def own_seed(request: Request) -> Request:
    return replace(request, seed=hashlib.sha256(b"mine" + request.seed).digest())


def heads_by_prefill(request: Request, rollout: Rollout, world: World) -> Rollout:
    """The rollout's tokens with the heads of the right checkpoint: what a proof of the forward pass sees."""
    logits_TV = world.engine.logits_for(request.prompt, rollout, world.state)
    heads = heads_from_logits(logits_TV, world.rules)
    lengths = heads.lengths_B.numpy()
    inside = np.arange(heads.ids_BK.shape[1])[None] < lengths[:, None]
    ids, codes = heads.ids_BK.numpy(), heads.codes_BK.numpy()
    in_head = ((ids == rollout.tokens[:, None]) & inside).any(1)
    logp_T = torch.log_softmax(logits_TV.double(), -1).numpy()[np.arange(len(rollout)), rollout.tokens.astype(np.int64)]
    own = np.clip(np.rint(-logp_T * world.rules.steps_per_nat), 0, MAX_CODE)
    return replace(
        rollout, head_lengths=lengths.astype(np.uint8), head_ids=ids[inside].astype(np.uint32),
        head_codes=codes[inside].astype(np.uint16), tail_codes=heads.tail_codes_B.numpy().astype(np.uint16),
        token_codes=np.where(in_head, NO_CODE, own).astype(np.uint16),
    )


def proved_by_prefill(change: Change, *, free: bool) -> Cheat:
    """Tokens of another model, heads of the right one; ``free``: with the node's own randomness."""

    def engine(world: World, honest: Engine) -> Engine:
        wrapped: Any = Wrapped(
            honest, asked=own_seed if free else lambda request: request,
            done=lambda request, rollout: heads_by_prefill(request, rollout, world),
        )
        return wrapped

    return Cheat(weights=lambda world, source: ChangedWeights(world, source, change), engine=engine)
