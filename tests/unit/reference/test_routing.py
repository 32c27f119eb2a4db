"""Routing replay: the same choices give the same numbers, gradients reach the router, and the mismatch shrinks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from protocol.errors import LocalFault
from protocol.reference.routing import E_ROUTES, record_routes, replay_routes, routers
from tests.fakes.architectures import CONFIGS, VOCABULARY

NAMES = ["mixtral", "qwen3_moe"]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (16, 48), generator=torch.Generator().manual_seed(4))


def routes_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad(), record_routes(model) as passes:
        model(ids)
    assert len(passes) == 1
    return passes[0]


def noisy(model: nn.Module, scale: float) -> nn.Module:
    """The model as a coarser engine computes it: its weights a little off."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + scale * torch.randn(parameter.shape, generator=generator))
    return other


@torch.no_grad()
def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(ids).logits.double(), -1)


def kl(log_q: Tensor, log_p: Tensor) -> float:
    """Mean KL of next-token distributions, nats."""
    return float((log_q.exp() * (log_q - log_p)).sum(-1).mean())


def test_a_pass_replayed_with_its_own_routes_is_itself(model, ids):
    routes = routes_of(model, ids)
    assert routes.shape == (ids.numel(), 2, 2)
    with torch.no_grad():
        expected = model(ids).logits
        with replay_routes(model, routes):
            torch.testing.assert_close(model(ids).logits, expected)
        torch.testing.assert_close(model(ids).logits, expected)  # nothing stays behind


def test_gradients_reach_the_router(model, ids):
    routes = routes_of(model, ids).flip(0)  # choices that are not its own
    model.zero_grad()
    with replay_routes(model, routes):
        model(ids).logits.square().mean().backward()
    assert all(float(router.weight.grad.abs().max()) > 0 for router in routers(model))


def test_replay_cuts_the_mismatch(model, ids):
    """A sampler of rounded weights: with its choices replayed, the learner is nearer to it."""
    sampler = noisy(model, 0.005)
    routes, log_q = routes_of(sampler, ids), log_probs(sampler, ids)
    assert (routes != routes_of(model, ids)).any()
    with replay_routes(model, routes):
        replayed = kl(log_q, log_probs(model, ids))
    assert replayed < 0.7 * kl(log_q, log_probs(model, ids))


def test_routes_that_do_not_fit_are_refused(model, ids):
    routes = routes_of(model, ids)
    for wrong in (routes[:, :1], routes[:-1], routes + 100):
        with pytest.raises(LocalFault) as caught, replay_routes(model, wrong):
            model(ids)
        assert caught.value.code == E_ROUTES


def test_a_dense_model_has_nothing_to_replay(ids):
    dense = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    with pytest.raises(LocalFault), record_routes(dense):
        pass
