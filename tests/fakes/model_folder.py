"""A Hugging Face folder with next to no weights, for what only needs its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from protocol.weights.layout import Layout, write_safetensors


def make_model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    layout = Layout.of({"embed": ("BF16", (4, 2)), "head": ("BF16", (2, 4))})
    state = {"embed": np.zeros((4, 2), np.uint16), "head": np.ones((2, 4), np.uint16)}
    write_safetensors(folder / "model.safetensors", layout, state)
    alphabet = ["<eos>", *"<>~=abcdefghijklmnopqrstuvwxyz"]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({symbol: i for i, symbol in enumerate(alphabet)}, unk_token="<eos>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64}))
    return folder
