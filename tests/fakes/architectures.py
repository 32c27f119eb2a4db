"""Small random models of the architectures that a run may use, as Hugging Face folders in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

VOCABULARY = 48
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4,
        tie_word_embeddings=False, **_COMMON,
    ),
    # SmolLM2: Llama with few key-value heads, tied embeddings and a long rope.
    "smollm2": LlamaConfig(
        hidden_size=24, intermediate_size=48, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0}, rms_norm_eps=1e-5, **_COMMON,
    ),
    # Qwen3: norms of queries and keys, heads wider than hidden / heads.
    "qwen3": Qwen3Config(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=True, **_COMMON,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, norm_topk_prob=True, tie_word_embeddings=False,
        **_COMMON,
    ),
    "mixtral": MixtralConfig(
        hidden_size=32, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, sliding_window=None, **_COMMON,
    ),
}


def architecture_folder(name: str, folder: Path, seed: int = 0) -> Path:
    """``config.json`` and ``model.safetensors`` under the model's own tensor names (experts of a layer in one)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
