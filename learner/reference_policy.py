"""The pull towards a reference policy: the run's first weights.

With a coefficient b the objective loses b KL(p || p_ref) at every token. Its gradient with respect to p is
E_p[(log p_a - log p_ref,a) grad log p_a], because the expected score is 0; so the pull is an advantage of its own,
``-b (log p_a - log p_ref,a)`` with the log-ratio held constant, and goes through the same correction and centring as
the reward's. (As an estimator this is the gradient of k2; the k3 loss, by contrast, has the gradient of the reverse
KL: Schulman 2020, "Approximating KL divergence"; Tang & Munos 2025, arXiv 2506.09477.)

It costs a second copy of the weights and a forward pass without gradients, and the logits of the loss tokens twice.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from learner.head import LossTokens, drawn_logprobs
from learner.losses import clamped
from learner.packing import Microbatch
from learner.ranks import Ranks
from protocol.reference.loader import set_state
from protocol.weights.layout import Layout, State


class ReferencePolicy:
    """The run's first weights, frozen, divided among the ranks as the learner's are."""

    def __init__(self, model: nn.Module, layout: Layout, state: State, ranks: Ranks):
        self._model: Any = copy.deepcopy(model).requires_grad_(False).eval()
        set_state(self._model, layout, state)
        self._together = ranks.share(self._model)

    @torch.no_grad()
    def logprobs(self, micro: Microbatch, *, temperature: float, rows: int) -> Tensor:
        """(N,) log p_ref of the drawn tokens, natural log at the run's temperature."""
        log_ref_N: Tensor = self._together(self._drawn, micro, temperature, rows)
        return log_ref_N

    def _drawn(self, micro: Microbatch, temperature: float, rows: int) -> Tensor:
        weight_VD = self._model.get_output_embeddings().weight
        hidden_ND = hidden_states(self._model, micro)
        return drawn_logprobs(hidden_ND, weight_VD, micro.tokens.target_N, temperature=temperature, rows=rows)


def pulled(micro: Microbatch, log_p_N: Tensor, log_ref_N: Tensor, coefficient: float) -> LossTokens:
    """The loss tokens with the pull added to their signal."""
    scale = np.concatenate([sequence.scale_T for sequence in micro.sequences]).astype(np.float32)
    scale_N = torch.from_numpy(scale).to(log_p_N.device)
    pull_N = coefficient * scale_N * clamped(log_p_N - log_ref_N)
    return replace(micro.tokens, signal_N=micro.tokens.signal_N - pull_N)


def distance(log_p_N: Tensor, log_ref_N: Tensor) -> Tensor:
    """(N,) k3 of p against p_ref at tokens drawn from near p, nats: never negative."""
    log_ratio_N = clamped(log_ref_N - log_p_N)
    return torch.expm1(log_ratio_N) - log_ratio_N


def hidden_states(model: Any, micro: Microbatch) -> Tensor:
    """(N, D) final hidden states that predict the loss tokens, float32."""
    hidden_BLD = model.base_model(
        input_ids=micro.ids_BL, attention_mask=micro.mask_11LL, position_ids=micro.positions_BL, use_cache=False
    ).last_hidden_state
    hidden_ND: Tensor = hidden_BLD.flatten(0, 1).index_select(0, micro.source_N)
    return hidden_ND.float()
