"""Routing replay (R3, arXiv 2510.11370): mixture-of-experts layers that take the experts another forward pass took.

A router picks the k largest of its scores, so rounding that moves a score past its neighbour sends a token to another
expert, and the two passes' distributions jump apart. Replay keeps the *choice* and lets everything else be computed
anew: the weights of the chosen experts are the present router's scores, so gradients reach it as ever.

Legend: N tokens of a pass in the order of its flattened (B, L) inputs, Y layers with a router, E experts, X experts per
token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from protocol.errors import LocalFault, code

E_ROUTES = code("E_ROUTES", "recorded expert choices do not fit the model or the pass")

#: (N, Y, X) expert indices; uint8 while a layer has at most 256 experts.
Routes = NDArray[np.uint8]
#: Most experts of a layer that a route's byte can name.
MAX_EXPERTS = 256


def routers(model: nn.Module) -> list[nn.Module]:
    """The model's routers from the first layer on; empty for a dense model.

    A router is what Mixtral's and Qwen3-MoE's are in transformers: it returns (logits, scores, indices).
    """
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextmanager
def record_routes(model: nn.Module) -> Iterator[list[Tensor]]:
    """While the block lasts, every forward pass appends its (N, Y, X) choices (int64) to the list given.

    Raises:
        LocalFault: ``E_ROUTES`` for a dense model.
    """
    found = _routers_of(model)
    passes: list[Tensor] = []
    layers: list[Tensor] = []

    def note(_: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        layers.append(output[2].detach())
        if len(layers) == len(found):
            passes.append(torch.stack(layers, dim=1))
            layers.clear()

    with ExitStack() as stack:
        for router in found:
            stack.callback(router.register_forward_hook(note).remove)
        yield passes


@contextmanager
def replay_routes(model: nn.Module, routes_NYX: Tensor) -> Iterator[None]:
    """While the block lasts, tokens go to ``routes_NYX`` (int64), row n being token n of the flattened inputs.

    Raises:
        LocalFault: ``E_ROUTES`` for a dense model, another number of layers, tokens or experts.
    """
    found = _routers_of(model)
    if routes_NYX.ndim != 3 or routes_NYX.shape[1] != len(found):
        raise LocalFault(
            E_ROUTES, "recorded choices are not of this model", expected=f"(tokens, {len(found)}, experts per token)",
            got=tuple(routes_NYX.shape),
        )
    with ExitStack() as stack:
        for layer, router in enumerate(found):
            stack.callback(router.register_forward_hook(partial(_choose, routes_NYX[:, layer])).remove)
        yield


def _choose(routes_NX: Tensor, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    logits_NE, scores_NX, own_NX = output
    if routes_NX.shape != own_NX.shape or int(routes_NX.max()) >= logits_NE.shape[1]:
        raise LocalFault(
            E_ROUTES, "recorded choices do not fit the pass", expected=tuple(own_NX.shape), got=tuple(routes_NX.shape)
        )
    chosen_NX = torch.softmax(logits_NE.float(), dim=-1).gather(1, routes_NX)
    if getattr(router, "norm_topk_prob", True):
        chosen_NX = chosen_NX / chosen_NX.sum(dim=-1, keepdim=True)
    return logits_NE, chosen_NX.to(scores_NX.dtype), routes_NX


def _routers_of(model: nn.Module) -> list[nn.Module]:
    found = routers(model)
    if not found:
        raise LocalFault(E_ROUTES, "the model has no routers that can be recorded", expected="a mixture of experts")
    return found
