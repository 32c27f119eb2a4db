"""Real diffs for ``weight_codec.py``: a policy gradient moves SmolLM2-135M, and every published version is kept.

Masters are fp32 and begin *dithered*. The package at hand ships SmolLM2 in 4 and 8 bits (GGUF types Q4_1 and Q8_0), so
its weights lie on a few points per block of 32, and one in a hundred embeddings is exactly zero, which no weight of a
trained bf16 model is. Each master is therefore drawn uniformly from the interval that its quantised value stands for
(of a norm's weights, which are not quantised: from the one that rounds to their bf16 number). The model samples its own
completions; advantages are a group's normalised rewards; AdamW steps on the masters. Recorded are the first published
state and, per step, which bf16 words changed to what. The same gradients at other learning rates give one diff each of
another density.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.weights.layout import Layout, State, copy_state, read_safetensors, write_safetensors

#: Learning rate of the recorded chain, and those of single diffs from the same state.
CHAIN_LR: Final = 1e-6
SINGLE_LRS: Final = (3e-7, 4e-6)
#: Steps taken before the first recorded state, so that AdamW's moments are no longer those of its first step.
_WARM_UP: Final = 3
#: Batches of 8 rollouts, used in turns.
_BATCHES: Final = 2
#: What a recording is made by; one of another recipe is made anew.
_RECIPE: Final = 2
_BETA_1, _BETA_2, _EPS = 0.9, 0.999, 1e-8
#: Weights that share a step in GGUF, and the tensor that has 8 bits; the other matrices have 4.
_QUANTISED_TOGETHER: Final = 32
_EIGHT_BITS: Final = ("model.embed_tokens.weight",)
_PROMPTS: Final = (
    "What is {a} plus {b}? Think step by step.", "Tom has {a} apples and buys {b} more. How many has he now?",
    "Write a short sentence with the numbers {a} and {b}.", "Which is larger, {a} or {b}? Explain.",
)


@dataclass(frozen=True)
class Recording:
    """A state and the diffs recorded from it: ``chain`` one after the other, ``singles`` each from the first state."""

    layout: Layout
    first: State
    chain: list[tuple[NDArray[np.uint32], NDArray[np.uint16]]]
    singles: dict[float, tuple[NDArray[np.uint32], NDArray[np.uint16]]]

    def after(self, change: tuple[NDArray[np.uint32], NDArray[np.uint16]], state: State) -> State:
        """``state`` with words at canonical positions replaced."""
        new = copy_state(state)
        where, words = change
        for entry in self.layout.entries:
            lo, hi = np.searchsorted(where, (entry.offset // 2, (entry.offset + entry.nbytes) // 2))
            new[entry.name].reshape(-1)[where[lo:hi] - np.uint32(entry.offset // 2)] = words[lo:hi]
        return new


def load(folder: Path) -> Recording | None:
    """What :func:`record` left in ``folder``; None when there is nothing."""
    if not (folder / "done.json").exists():
        return None
    files = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    if files.get("recipe") != _RECIPE:
        return None
    layout, first = read_safetensors(folder / "first.safetensors")
    return Recording(
        layout, first, [_read(folder / name) for name in files["chain"]],
        {float(lr): _read(folder / name) for lr, name in files["singles"].items()},
    )


def record(folder: Path, steps: int, seed: int, log: Callable[[str], None]) -> Recording:
    """Train for ``steps`` steps and write the recording; takes minutes."""
    import torch

    from learner.genesis_smollm2 import convert_smollm2

    folder.mkdir(parents=True, exist_ok=True)
    model_dir = folder / "model"
    if not (model_dir / "config.json").exists():
        convert_smollm2(model_dir, 0, log)
    torch.manual_seed(seed)
    trainer = _Trainer(model_dir, seed)
    rollouts = _sampled(folder / "rollouts.pt", trainer, log)
    chain: list[str] = []
    singles: dict[str, str] = {}
    for step in range(_WARM_UP + steps):
        update = trainer.update(rollouts[step % len(rollouts)], step)
        before = trainer.published()
        if step == _WARM_UP:
            write_safetensors(folder / "first.safetensors", _layout(before), before)
            for lr in SINGLE_LRS:
                singles[repr(lr)] = _write(folder, f"single-{lr!r}", before, trainer.published(update, lr))
        trainer.apply(update)
        if step >= _WARM_UP:
            chain.append(_write(folder, f"step-{step - _WARM_UP:03d}", before, trainer.published()))
            done = {"recipe": _RECIPE, "chain": chain, "singles": singles}
            (folder / "done.json").write_text(json.dumps(done), encoding="utf-8")
            log(f"recorded step {len(chain)} of {steps}")
    recording = load(folder)
    assert recording is not None
    return recording


def _sampled(file: Path, trainer: _Trainer, log: Callable[[str], None]) -> list[Any]:
    """Batches of rollouts, sampled once."""
    import torch

    if not file.exists():
        log("sampling completions")
        torch.save(trainer.sample(), file)
    batches: list[Any] = torch.load(file)
    return batches


class _Trainer:
    """SmolLM2 with dithered fp32 masters and AdamW without weight decay (Loshchilov and Hutter 2019)."""

    def __init__(self, model_dir: Path, seed: int):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.parameters = dict(sorted(self._model.named_parameters()))
        self._random = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        self._masters = [_unquantised(name, p.detach(), generator) for name, p in self.parameters.items()]
        self._first = [torch.zeros_like(m) for m in self._masters]
        self._second = [torch.zeros_like(m) for m in self._masters]
        self.push()

    def push(self) -> None:
        """Compute with the published weights."""
        with self._torch.no_grad():
            for parameter, master in zip(self.parameters.values(), self._masters, strict=True):
                parameter.copy_(master.to(self._torch.bfloat16))

    def published(self, update: list[Any] | None = None, lr: float = 0.0) -> State:
        """The masters rounded to bf16, or what they would be after ``update``."""
        state: State = {}
        for i, (name, master) in enumerate(zip(self.parameters, self._masters, strict=True)):
            moved = (master if update is None else master - lr * update[i]).to(self._torch.bfloat16)
            state[name] = moved.contiguous().view(self._torch.int16).numpy().view("<u2")
        return state

    def sample(self) -> list[tuple[Any, Any, Any]]:
        """Batches of (tokens, mask of completion tokens, advantages); groups of 4 samples per prompt."""
        self._tokenizer.padding_side = "left"
        self._tokenizer.pad_token = self._tokenizer.eos_token
        batches = []
        for _ in range(_BATCHES):
            numbers = self._random.integers(2, 99, (2, 2))
            prompts = [
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": str(self._random.choice(_PROMPTS)).format(a=a, b=b)}],
                    tokenize=False, add_generation_prompt=True,
                )
                for a, b in numbers for _ in range(4)
            ]
            batch = self._tokenizer(prompts, return_tensors="pt", padding=True)
            with self._torch.no_grad():
                tokens = self._model.generate(**batch, max_new_tokens=32, do_sample=True, top_k=0)
            start = batch["input_ids"].shape[1]
            mask = self._torch.zeros_like(tokens, dtype=self._torch.float32)
            mask[:, start:] = (tokens[:, start:] != self._tokenizer.eos_token_id).float()
            texts = self._tokenizer.batch_decode(tokens[:, start:], skip_special_tokens=True)
            hits = [float(str(a + b) in text) - len(text) / 1000 for (a, b), text in
                    zip(np.repeat(numbers, 4, axis=0), texts, strict=True)]
            rewards = self._torch.tensor(hits).reshape(2, 4)
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
            batches.append((tokens, mask, advantages.reshape(-1)))
        return batches

    def update(self, batch: tuple[Any, Any, Any], step: int) -> list[Any]:
        """AdamW's direction for the policy gradient of one batch (REINFORCE with a group baseline)."""
        tokens, mask, advantages = batch
        self._model.zero_grad()
        logits = self._model(tokens).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = -(logprobs * mask[:, 1:] * advantages[:, None]).sum() / mask.sum()
        loss.backward()
        directions = []
        with self._torch.no_grad():
            for parameter, first, second in zip(self.parameters.values(), self._first, self._second, strict=True):
                gradient = parameter.grad
                first.mul_(_BETA_1).add_(gradient, alpha=1 - _BETA_1)
                second.mul_(_BETA_2).addcmul_(gradient, gradient, value=1 - _BETA_2)
                root = (second / (1 - _BETA_2 ** (step + 1))).sqrt_().add_(_EPS)
                directions.append(first / (1 - _BETA_1 ** (step + 1)) / root)
        return directions

    def apply(self, update: list[Any]) -> None:
        """Move the masters at the chain's learning rate and publish."""
        for master, direction in zip(self._masters, update, strict=True):
            master.sub_(direction, alpha=CHAIN_LR)
        self.push()


def dithered(weights: Any, generator: Any) -> Any:
    """fp32 numbers drawn uniformly from those that round to the bf16 weights."""
    import torch

    bits = weights.to(torch.bfloat16).view(torch.int16).to(torch.int32) << 16
    noise = torch.randint(-(2**15) + 1, 2**15, weights.shape, generator=generator, dtype=torch.int32)
    # A pattern of all zeros has no pattern below it in the same sign.
    return (bits + torch.where(bits & 0x7FFFFFFF == 0, noise.abs(), noise)).view(torch.float32)


def _unquantised(name: str, weights: Any, generator: Any) -> Any:
    """fp32 numbers drawn uniformly from those that the quantiser, or rounding to bf16, maps to ``weights``."""
    import torch

    if weights.ndim == 1:
        return dithered(weights, generator)
    blocks = weights.reshape(-1, _QUANTISED_TOGETHER)
    if name in _EIGHT_BITS:  # Q8_0: multiples of a step, up to 127 of them
        step = blocks.abs().amax(1, keepdim=True) / 127
    else:  # Q4_1: 16 numbers at equal distances
        step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
    noise = torch.rand(blocks.shape, generator=generator) - 0.5
    return torch.addcmul(blocks, step, noise).reshape(weights.shape)


def _layout(state: State) -> Layout:
    return Layout.of({name: ("BF16", words.shape) for name, words in state.items()})


def _write(folder: Path, name: str, before: State, after: State) -> str:
    """Write the canonical positions of changed words and what they are now; the file's name."""
    places, words = [], []
    for entry in _layout(before).entries:
        old, new = before[entry.name].reshape(-1), after[entry.name].reshape(-1)
        changed = np.flatnonzero(old != new)
        places.append((changed + entry.offset // 2).astype(np.uint32))
        words.append(new[changed])
    file = folder / f"{name}.npz"
    np.savez(file, where=np.concatenate(places), words=np.concatenate(words))
    return file.name


def _read(path: Path) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    with np.load(path) as file:
        return file["where"], file["words"]
