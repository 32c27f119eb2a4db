"""A language model of a million parameters, born and schooled in half a minute on one core.

Its schooling is supervised: traces of a solver that puts symbols in order. The traces show the asked order only now
and then and its opposite otherwise, so the model can sort but does not know yet what it is asked for: about a third
of its samples earn a reward, and the rest is what reinforcement learning is for.

Legend: B sequences of a batch, L tokens of a sequence.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
from torch import Tensor
from torch.nn import functional

from protocol.tasks.sort import CHARACTERS, OPERATORS, SYMBOLS, solve

#: Symbols of a schooling problem, and how many different ones there are; the run's task must use the same.
LENGTH: Final = 6
ALPHABET: Final = 10
#: Share of the traces that show the asked (ascending) order. Sets where the reward starts.
ASKED_SHARE: Final = 0.30
#: Warm-up steps and sequences per step.
STEPS: Final = 160
BATCH: Final = 64
#: Peak learning rate of AdamW; it rises over the first RISE steps and falls linearly to a tenth.
LEARNING_RATE: Final = 3e-3
RISE: Final = 20

PAD: Final = "<pad>"
EOS: Final = "<eos>"

_SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


def make_tiny(folder: Path, seed: int, log: Callable[[str], None]) -> None:
    """Write the tiny model into ``folder``. The same seed gives the same bytes on the same kind of machine."""
    tokenizer = make_tokenizer()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _new_model(tokenizer)
            log(f"warming up a model of {sum(p.numel() for p in model.parameters()):,} parameters")
            _warm_up(model, tokenizer, random.Random(seed), log)
    finally:
        torch.set_num_threads(threads)
    save_model(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}, indent=2) + "\n",
        encoding="utf-8",
    )


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token per character of the sorting task."""
    vocabulary = {token: number for number, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    return tokenizer


def save_model(model: Any, folder: Path) -> None:
    """Save a Hugging Face model as bfloat16 safetensors, durably."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a bar for one file says nothing
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in folder.iterdir():
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())


def _new_model(tokenizer: tokenizers.Tokenizer) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    eos, pad = tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), bos_token_id=None, eos_token_id=eos, pad_token_id=pad, **_SHAPE
        )
    )


def _warm_up(model: Any, tokenizer: tokenizers.Tokenizer, choices: random.Random, log: Callable[[str], None]) -> None:
    """Next-token training on solver traces; only the answer and its end count in the loss."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RISE) * (1.0 - 0.9 * step / STEPS)
        loss = _loss(model, _traces(tokenizer, choices))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % 50 == 0:
            log(f"warm-up step {step + 1}/{STEPS}: loss {loss.item():.3f}")
    model.eval()


def _loss(model: Any, tokens_BL: Tensor) -> Tensor:
    answer_starts = LENGTH + 2  # after the operator, the symbols and "="
    logits_BLV = model(tokens_BL[:, :-1]).logits[:, answer_starts - 1 :]
    return functional.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, answer_starts:].flatten())


def _traces(tokenizer: tokenizers.Tokenizer, choices: random.Random) -> Tensor:
    """(B, L) token ids of problems with a solver's answers."""
    eos = tokenizer.token_to_id(EOS)
    rows = []
    for _ in range(BATCH):
        symbols = "".join(choices.sample(SYMBOLS[:ALPHABET], LENGTH))
        shown = "ascending" if choices.random() < ASKED_SHARE else "descending"
        text = f"{OPERATORS['ascending']}{symbols}={solve(shown, symbols)}"
        rows.append([*tokenizer.encode(text).ids, eos])
    return torch.tensor(rows)
