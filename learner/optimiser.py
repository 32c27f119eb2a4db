"""The optimisers that move the masters."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.config import OptimConfig


def make_optimiser(tensors: list[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) or SGD with momentum, over fp32 ``tensors``.

    Weight decay is on matrices only, as is usual; AdamW's is decoupled from the gradient, SGD's is the classic one.
    """
    groups = [
        {"params": [t for t in tensors if t.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [t for t in tensors if t.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
