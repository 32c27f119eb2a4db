"""Gradients of presets against TRL's own ``GRPOTrainer._compute_loss``, where TRL is installed.

The locked environment has no TRL: it brings pyarrow, pandas and datasets, 330 MB for one comparison. ``make
yardsticks`` puts it beside the locked packages, in a folder of its own, and runs this file there. With TRL 1.16.0 all
twenty cases agree to a relative 1e-9.
"""

from __future__ import annotations

import types
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.corrections import PRESETS, Correction
from learner.head import LossTokens
from tests.unit.learner.loss_cases import SEQUENCES, gradients, make_head, make_tokens

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")

MAX_LENGTH = 12
OFF_POLICY_MASK = Correction(
    level="sequence_mean", statistic="k1", band=(-float("inf"), 0.2), outside="drop", inside="one", sign="negative"
)
CASES = {
    "ppo": (PRESETS["ppo"], {"epsilon_low": 0.2, "epsilon_high": 0.2}),
    "dapo": (PRESETS["dapo"], {"epsilon_low": 0.2, "epsilon_high": 0.28}),
    "two_sided": (PRESETS["two_sided"], {"epsilon_low": 0.2, "epsilon_high": 0.2, "delta": 4.0}),
    "cispo": (PRESETS["cispo"], {"loss_type": "cispo", "epsilon_high": 5.0}),
    "gspo": (PRESETS["gspo"], {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon_low": 3e-4,
                               "epsilon_high": 4e-4}),
    "is": (PRESETS["is"], {"epsilon_low": 1.0, "epsilon_high": 1e30}),
    "pg": (PRESETS["pg"], {"on_policy": True}),
    "off_policy_mask": (OFF_POLICY_MASK, {"on_policy": True, "off_policy_mask_threshold": 0.2}),
    "sequence_mean": (PRESETS["ppo"], {"loss_type": "grpo"}),
    "constant": (PRESETS["ppo"], {"loss_type": "dr_grpo"}),
}


def padded(values_N: Tensor) -> Tensor:
    """(sequences, longest) with zeros where a sequence has ended."""
    return torch.nn.utils.rnn.pad_sequence(list(values_N.split(list(SEQUENCES))), batch_first=True)


def trl_gradients(hidden: Tensor, weight: Tensor, tokens: LossTokens, advantage_S: Tensor, *, loss_type: str = "dapo",
                  delta: float | None = None, on_policy: bool = False, **settings: object) -> tuple[Tensor, ...]:
    log_p_N = torch.log_softmax(hidden @ weight.T, 1).gather(1, tokens.target_N[:, None]).squeeze(1)
    log_p, old = padded(log_p_N), padded(tokens.log_q_N)
    mask = padded(torch.ones_like(tokens.log_q_N))
    accelerator = types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = types.SimpleNamespace(**{
        "args": types.SimpleNamespace(delta=delta, steps_per_generation=1), "accelerator": accelerator,
        "model": types.SimpleNamespace(training=True), "aux_loss_enabled": False, "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None, "importance_sampling_level": "token", "beta": 0.0, "loss_type": loss_type,
        "epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False, "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False, "_metrics": {"train": defaultdict(list)}, "max_completion_length": MAX_LENGTH,
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (log_p, torch.zeros_like(log_p), None),
        "get_off_policy_mask": grpo_trainer.GRPOTrainer.get_off_policy_mask,
    } | settings)
    ids = torch.zeros(len(SEQUENCES), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids + 1, "completion_ids": mask.long(), "completion_mask": mask,
        "advantages": advantage_S, "old_per_token_logps": None if on_policy else old,
        "sampling_per_token_logps": old, "num_items_in_batch": mask.sum(),
    }
    loss = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    return torch.autograd.grad(loss, (hidden, weight))


def scales(loss_type: str) -> Tensor:
    """Aggregation scale of each token."""
    lengths = torch.tensor(SEQUENCES, dtype=torch.float64)
    per_sequence = {
        "grpo": 1 / (len(SEQUENCES) * lengths), "dr_grpo": torch.full_like(lengths, 1 / (len(SEQUENCES) * MAX_LENGTH)),
    }.get(loss_type, torch.full_like(lengths, 1 / float(lengths.sum())))
    return torch.repeat_interleave(per_sequence, torch.tensor(SEQUENCES))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mismatch", [0.05, 0.5])
def test_the_gradient_is_trls(case, mismatch):
    correction, settings = CASES[case]
    _, tokens = make_tokens(21, spread=mismatch)
    hidden, weight = make_head(21, scale=mismatch)
    advantage_S = torch.tensor([0.7, -1.1, -0.4, 0.9], dtype=torch.float64)
    expected = trl_gradients(hidden, weight, tokens, advantage_S, **settings)
    signal_N = advantage_S[tokens.sequence_N] * scales(str(settings.get("loss_type", "dapo")))
    got = gradients(hidden, weight, replace(tokens, signal_N=signal_N), correction)
    assert all(float(g.abs().max()) > 0 for g in expected)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
