"""LoRA (arXiv 2106.09685) on the masters' side: the model always computes with whole, published matrices.

A target matrix is W = W0 + s B A with W0 frozen, s = alpha / rank. The model holds W rounded as it is published, so
nodes, verifiers and the learner agree as ever, and an adapter step goes out through the same diffs as any other. The
gradient dW that the model gets becomes dB = s dW A^T and dA = s B^T dW. What this saves is the optimiser's state and
masters (two moments and a copy of every weight), not the memory of dW.

Legend: O rows, I columns of a matrix, R rank.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from learner.config import LoraConfig
from learner.masters import Masters, value_of
from learner.ranks import Ranks
from protocol.errors import E_CONFIG, LocalFault
from protocol.weights.layout import Layout, State


class Adapters(Masters):
    """Masters of which only low-rank adapters move.

    Raises:
        LocalFault: ``E_CONFIG`` when no matrix of the model is a target, or the weights are divided among processes;
            ``E_MODEL_LAYOUT``.
    """

    def __init__(self, model: nn.Module, layout: Layout, state: State, ranks: Ranks, config: LoraConfig, seed: int):
        if ranks.size > 1:
            raise LocalFault(E_CONFIG, "adapters are trained by one process", expected="1 process", got=ranks.size)
        self._targets = [index for index, entry in enumerate(layout.entries) if _is_target(entry.name, config)]
        if not self._targets:
            raise LocalFault(
                E_CONFIG, "no matrix of the model is a target of lora.targets", expected="names like q_proj",
                got=", ".join(config.targets),
            )
        self._scale = config.alpha / config.rank
        self._factors = [_new_factors(layout.entries[index].shape, layout.entries[index].name, config.rank, seed)
                         for index in self._targets]
        super().__init__(model, layout, state, ranks)

    def _trained(self, state: State) -> list[tuple[str, Tensor]]:
        self._frozen = [value_of(state, self.layout.entries[index]).to(torch.float32) for index in self._targets]
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        named = []
        for index, (a_RI, b_OR) in zip(self._targets, self._factors, strict=True):
            self.parameters[index].requires_grad_(True)
            name = self.layout.entries[index].name
            named += [(f"{name}.lora_A", a_RI), (f"{name}.lora_B", b_OR)]
        self._write_frozen(state)
        return named

    @torch.no_grad()
    def _write_frozen(self, state: State) -> None:
        for parameter, entry in zip(self.parameters, self.layout.entries, strict=True):
            parameter.copy_(value_of(state, entry))

    @torch.no_grad()
    def push(self) -> None:
        """Give the model what is published: frozen matrices plus their adapters, rounded."""
        for index, frozen_OI, (a_RI, b_OR) in zip(self._targets, self._frozen, self._factors, strict=True):
            self.parameters[index].copy_(self.rounded(frozen_OI + self._scale * (b_OR @ a_RI), index))

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Turn the model's gradients into those of the adapters."""
        for index, (a_RI, b_OR) in zip(self._targets, self._factors, strict=True):
            gradient_OI = self.parameters[index].grad
            if gradient_OI is None:
                a_RI.grad = b_OR.grad = None
                continue
            a_RI.grad = self._scale * (b_OR.T @ gradient_OI)
            b_OR.grad = self._scale * (gradient_OI @ a_RI.T)


def _is_target(name: str, config: LoraConfig) -> bool:
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.rpartition(".")[2] in config.targets


def _new_factors(shape: tuple[int, ...], name: str, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """A uniform as in the paper's code (kaiming, a = sqrt 5), B zero: the first step starts from W0 exactly."""
    rows, columns = shape
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound = 1.0 / math.sqrt(columns)
    a_RI = torch.empty(rank, columns).uniform_(-bound, bound, generator=generator)
    return a_RI, torch.zeros(rows, rank)
