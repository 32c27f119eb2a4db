"""fp32 masters of the weights, and what of them is published.

The model computes with the *published* bit patterns (bf16 widened to fp32), as every node does, so that at lag 0 the
learner's distribution is the sampler's. Gradients are applied to the masters, which keep the steps too small for bf16.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from learner.parts import rows_of
from learner.ranks import Ranks, local, whole
from protocol.errors import LocalFault, code
from protocol.weights.layout import Entry, Layout, State

E_MODEL_LAYOUT = code("E_MODEL_LAYOUT", "the learner's model does not have exactly the tensors of the layout")

#: dtype of the layout -> (torch type of the value, torch type of the bit pattern).
_TYPES: Final[dict[str, tuple[torch.dtype, torch.dtype]]] = {
    "BF16": (torch.bfloat16, torch.int16), "F16": (torch.float16, torch.int16), "F32": (torch.float32, torch.int32),
}


class Masters:
    """Masters of every tensor of a layout, beside the parameters that compute.

    ``parameters`` are in the order of the layout; tied ones appear once. ``tensors`` are what the optimiser moves, by
    ``names``: here a master of each parameter, of which this rank holds its rows when the model is divided.

    Raises:
        LocalFault: ``E_MODEL_LAYOUT`` when model and layout do not match tensor for tensor.
    """

    def __init__(self, model: nn.Module, layout: Layout, state: State, ranks: Ranks):
        self.layout = layout
        self.parameters = _match(model, layout)
        self.ranks = ranks
        trained = self._trained(state)
        self.names, self.tensors = [name for name, _ in trained], [tensor for _, tensor in trained]
        self.push()

    def _trained(self, state: State) -> list[tuple[str, Tensor]]:
        """What the optimiser moves, by name."""
        return [(entry.name, _rows(value_of(state, entry), self.ranks)) for entry in self.layout.entries]

    @torch.no_grad()
    def push(self) -> None:
        """Give the model what is published of the masters."""
        for index, master in enumerate(self.tensors):
            local(self.parameters[index]).copy_(self.rounded(master, index))

    def rounded(self, value: Tensor, index: int) -> Tensor:
        """``value`` in the published type of entry ``index``: to nearest, ties to even."""
        return value.to(_TYPES[self.layout.entries[index].dtype][0])

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Hand the model's gradients to the masters."""
        for master, parameter in zip(self.tensors, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else local(parameter.grad)

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for tensor in (*self.tensors, *self.parameters):
            tensor.grad = None

    def norm(self) -> float:
        """Global L2 norm of the gradients taken, over all ranks; 0 when there is none."""
        norms = [torch.linalg.vector_norm(tensor.grad) for tensor in self.tensors if tensor.grad is not None]
        if not norms:
            return 0.0
        mine = torch.linalg.vector_norm(torch.stack(norms))
        return float(mine if self.ranks.size == 1 else self.ranks.total(mine.square()).sqrt())

    @torch.no_grad()
    def state(self) -> State:
        """The masters as published bit patterns: rounded to nearest, ties to even. A call that all ranks make."""
        state: State = {}
        for parameter, entry in zip(self.parameters, self.layout.entries, strict=True):
            value, bits = _TYPES[entry.dtype]
            rounded = whole(parameter).to("cpu", value).contiguous()  # exact: ``push`` has rounded already
            state[entry.name] = rounded.view(bits).numpy().view(entry.words).copy()
        return state


def _rows(value: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of a whole tensor, as fp32 on the rank's device."""
    mine = value if ranks.size == 1 else rows_of(value, ranks.rank, ranks.size)
    return mine.to(ranks.device, torch.float32, copy=True)


def _match(model: nn.Module, layout: Layout) -> list[nn.Parameter]:
    by_name = dict(model.named_parameters(remove_duplicate=False))
    found: list[nn.Parameter] = []
    for entry in layout.entries:
        parameter = by_name.get(entry.name)
        if parameter is None or tuple(parameter.shape) != entry.shape:
            raise LocalFault(
                E_MODEL_LAYOUT, f"tensor {entry.name} does not match the model", expected=entry.shape,
                got=None if parameter is None else tuple(parameter.shape),
            )
        found.append(parameter)
    covered = {id(parameter) for parameter in found}
    missing = [name for name, parameter in by_name.items() if id(parameter) not in covered]
    if missing or len(covered) != len(found):
        raise LocalFault(
            E_MODEL_LAYOUT, "the layout does not cover the model's parameters exactly once",
            expected="each parameter once", got=f"{missing[0]} missing" if missing else "a tied tensor twice",
        )
    return found


def value_of(state: State, entry: Entry) -> Tensor:
    """A tensor of ``state`` in its own type."""
    value, bits = _TYPES[entry.dtype]
    signed = "<i2" if bits is torch.int16 else "<i4"
    return torch.from_numpy(state[entry.name].view(signed).copy()).view(value)
