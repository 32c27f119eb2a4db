"""Mixtures of experts in files: one tensor per expert there, one per layer in the model.

Checkpoints of Mixtral and Qwen-MoE name the matrices of each expert; transformers from 5.0 on holds those of a layer in
one tensor (E, 2 I, D) of gate and up projections and one (E, D, I) of down projections, and so do layouts.

Legend: E experts, D hidden width, I width of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from protocol.errors import LocalFault, code
from protocol.weights.layout import State

E_EXPERTS = code("E_EXPERTS", "a model folder lacks some of the experts of a layer")

#: Qwen-MoE and Mixtral: prefix of the layer, expert, matrix.
_EXPERT: Final = re.compile(
    r"(?P<layer>.+\.)(?:mlp|block_sparse_moe)\.experts\.(?P<expert>\d+)\."
    r"(?P<matrix>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_GATE: Final = ".block_sparse_moe.gate.weight"
_MEANING: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def merge_experts(tensors: Mapping[str, tuple[str, tuple[int, ...]]], state: State) -> tuple[Tensors, State]:
    """Types, shapes and bit patterns under the names of the model; what has no experts of its own comes back as it is.

    Raises:
        LocalFault: ``E_EXPERTS`` when an expert of a layer is missing or unlike the others.
    """
    layers: dict[str, dict[str, dict[int, str]]] = {}
    kept: dict[str, str] = {}
    for name in tensors:
        found = _EXPERT.fullmatch(name)
        if found is None:
            kept[name.replace(_GATE, ".mlp.gate.weight") if name.endswith(_GATE) else name] = name
        else:
            matrix = _MEANING.get(found["matrix"], found["matrix"])
            layers.setdefault(found["layer"], {}).setdefault(matrix, {})[int(found["expert"])] = name
    if not layers:
        return dict(tensors), state
    merged: Tensors = {new: tensors[old] for new, old in kept.items()}
    words: State = {new: state[old] for new, old in kept.items()}
    for layer, matrices in layers.items():
        for target, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            name = f"{layer}mlp.experts.{target}"
            stacked = [_stacked(f"{layer}{part}", matrices.get(part, {}), tensors, state) for part in parts]
            words[name] = np.ascontiguousarray(np.concatenate([array for _, array in stacked], axis=1))
            merged[name] = (stacked[0][0], words[name].shape)
    return merged, words


def _stacked(
    what: str, names: dict[int, str], tensors: Mapping[str, tuple[str, tuple[int, ...]]], state: State
) -> tuple[str, np.ndarray]:
    """(type, (E, rows, columns) bit patterns) of one matrix of all experts of a layer."""
    kinds = {tensors[name] for name in names.values()}
    if sorted(names) != list(range(len(names))) or len(kinds) != 1 or len(next(iter(kinds))[1]) != 2:
        raise LocalFault(
            E_EXPERTS, f"experts of {what}", expected="experts 0, 1, ... with matrices of one type and shape",
            got=f"experts {sorted(names)[:8]}, {len(kinds)} types and shapes",
        )
    return next(iter(kinds))[0], np.stack([state[names[expert]] for expert in range(len(names))])
