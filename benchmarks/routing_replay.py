"""Routing replay (R3): how much of the sampler-learner mismatch of a mixture of experts is the experts' choice.

A random Qwen3-MoE and a random Mixtral play the learner (float32). The sampler is the same model computed in bfloat16,
or with weights a little off (a quantised engine). Both read the same tokens. KL of the sampler's against the learner's
next-token distribution, in nats per token, with the learner's own choice of experts and with the sampler's replayed.
"""

from __future__ import annotations

import harness  # first: sets the import path

harness.pin_threads()

# ruff: noqa: E402
import copy
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from protocol.reference.routing import record_routes, replay_routes

COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "initializer_range": 0.12, "tie_word_embeddings": False,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        intermediate_size=128, moe_intermediate_size=32, num_experts=32, num_experts_per_tok=4, head_dim=16,
        norm_topk_prob=True, **COMMON,
    ),
    "mixtral": MixtralConfig(
        intermediate_size=64, num_local_experts=8, num_experts_per_tok=2, sliding_window=None, **COMMON
    ),
}
SAMPLERS = ("bf16", "noise 0.5 %", "noise 2 %")


def sampler_of(model: nn.Module, kind: str, seed: int) -> nn.Module:
    """The learner's model as a coarser engine computes it."""
    other = copy.deepcopy(model)
    if kind == "bf16":
        return other.to(torch.bfloat16)
    scale = float(kind.split()[1]) / 100
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + scale * torch.randn(parameter.shape, generator=generator))
    return other


@torch.no_grad()
def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(ids).logits.double(), -1)


def kl(log_q: Tensor, log_p: Tensor) -> float:
    return float((log_q.exp() * (log_q - log_p)).sum(-1).mean())


def measure(model: nn.Module, kind: str, ids: Tensor, seed: int) -> dict[str, float]:
    """KL with and without replay, the share of choices that differ, and the time replay adds to a pass."""
    sampler = sampler_of(model, kind, seed)
    with record_routes(sampler) as sampled:
        log_q = log_probs(sampler, ids)
    started = time.perf_counter()
    with record_routes(model) as own:
        free = kl(log_q, log_probs(model, ids))
    between = time.perf_counter()
    with replay_routes(model, sampled[0]):
        replayed = kl(log_q, log_probs(model, ids))
    done = time.perf_counter()
    differs = (sampled[0].sort(-1).values != own[0].sort(-1).values).any(-1).double().mean()
    return {
        "kl": free, "kl_replayed": replayed, "ratio": replayed / free, "choices_that_differ": float(differs),
        "time_ratio": (done - between) / (between - started),
    }


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    rows, length = (4, 64) if arguments.quick else (16, 256)
    found: dict[str, dict[str, float]] = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(arguments.seed)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        ids = torch.randint(0, COMMON["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(7))
        for kind in SAMPLERS:
            found[f"{name}, {kind}"] = measure(model, kind, ids, arguments.seed)
    columns = ("kl", "kl_replayed", "ratio", "choices_that_differ", "time_ratio")
    text = harness.table(("sampler", *columns), [(name, *(v[c] for c in columns)) for name, v in found.items()])
    worst = max(values["ratio"] for values in found.values())
    result = {"tokens": rows * length, "kl_ratio_worst": worst, "cases": found, "seed": arguments.seed}
    harness.finish(result, text, only_json=arguments.json)


if __name__ == "__main__":
    main()
