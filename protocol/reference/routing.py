"""Routing replay (R3, arXiv 2510.11370): mixture-of-experts layers that take the experts another forward pass took.

A router picks the k largest of its scores, so rounding that moves a score past its neighbour sends a token to another
expert, and the two passes' distributions jump apart. Replay keeps the *choice* and lets everything else be computed
anew: the weights of the chosen experts are the present router's scores, so gradients reach it as ever.

A choice that is replayed is also judged: its *margin* is by how much the least wanted of the chosen experts lies below
the last one that the present router would have taken, in router logits; 0 when the choices are the same. Rounding makes
small margins; a choice made on purpose makes large ones.

Legend: N tokens of a pass in the order of its flattened (B, L) inputs, Y layers with a router, E experts, X experts per
token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from protocol.errors import LocalFault, code
from protocol.messages import RouteRules

E_ROUTES = code("E_ROUTES", "recorded expert choices do not fit the model or the pass")

#: In a row of routes: the router's own choice.
OWN: Final = -1


def routers(model: nn.Module) -> list[nn.Module]:
    """The model's routers from the first layer on; empty for a dense model.

    A router is what Mixtral's and Qwen3-MoE's are in transformers: it returns (logits, scores, indices).
    """
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def check_rules(model: nn.Module, rules: RouteRules | None) -> None:
    """Whether the model has the layers and experts that the run's rules name; nothing to check without rules.

    Raises:
        LocalFault: ``E_ROUTES``.
    """
    if rules is None:
        return
    found: list[Any] = _routers_of(model)
    shapes = {(int(router.num_experts), int(router.top_k)) for router in found}
    expected = (rules.layers, {(rules.experts, rules.per_token)})
    if (len(found), shapes) != expected:
        raise LocalFault(
            E_ROUTES, "the model's experts are not those of the run's rules",
            expected=f"{rules.layers} layers, {rules.experts} experts, {rules.per_token} per token",
            got=f"{len(found)} layers, (experts, per token) {sorted(shapes)}",
        )


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
def replay_routes(model: nn.Module, routes_NYX: Tensor) -> Iterator[Tensor]:
    """While the block lasts, tokens go to ``routes_NYX`` (int64), row n being token n of the flattened inputs.

    A choice of ``OWN`` is the router's own. Gives (N, Y) margins, float64, which the passes of the block fill in.

    Raises:
        LocalFault: ``E_ROUTES`` for a dense model, another number of layers, tokens or experts.
    """
    found = _routers_of(model)
    if routes_NYX.ndim != 3 or routes_NYX.shape[1] != len(found):
        raise LocalFault(
            E_ROUTES, "recorded choices are not of this model", expected=f"(tokens, {len(found)}, experts per token)",
            got=tuple(routes_NYX.shape),
        )
    margins_NY = torch.zeros(routes_NYX.shape[:2], dtype=torch.float64, device=routes_NYX.device)
    with ExitStack() as stack:
        for layer, router in enumerate(found):
            chosen = partial(_choose, routes_NYX[:, layer], margins_NY[:, layer])
            stack.callback(router.register_forward_hook(chosen).remove)
        yield margins_NY


def _choose(
    routes_NX: Tensor, margins_N: Tensor, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...]:
    logits_NE, scores_NX, own_NX = output
    if routes_NX.shape != own_NX.shape or int(routes_NX.max()) >= logits_NE.shape[1]:
        raise LocalFault(
            E_ROUTES, "recorded choices do not fit the pass", expected=tuple(own_NX.shape), got=tuple(routes_NX.shape)
        )
    taken_NX = torch.where(routes_NX >= 0, routes_NX, own_NX)
    with torch.no_grad():
        wide_NE = logits_NE.detach().double()
        margins_N.copy_(wide_NE.gather(1, own_NX).amin(1) - wide_NE.gather(1, taken_NX).amin(1))
    chosen_NX = torch.softmax(logits_NE.float(), dim=-1).gather(1, taken_NX)
    if getattr(router, "norm_topk_prob", True):
        chosen_NX = chosen_NX / chosen_NX.sum(dim=-1, keepdim=True)
    return logits_NE, chosen_NX.to(scores_NX.dtype), taken_NX


def _routers_of(model: nn.Module) -> list[nn.Module]:
    found = routers(model)
    if not found:
        raise LocalFault(E_ROUTES, "the model has no routers that can be recorded", expected="a mixture of experts")
    return found
