"""A learner's step beside a plain Hugging Face step and TRL's GRPO loss, on the same batch of SmolLM2-135M.

Same weights, sequences, advantages, mask and optimiser (AdamW, fp32), in turns in one process:

* ``assay``: ``Trainer.train_step`` with its default loss (TIS, score centring), prompts run once, fused head. It also
  keeps fp32 masters beside the weights that compute.
* ``hf``: every completion a row, ``log_softmax`` over the logits of the whole batch, gather, policy gradient.
* ``trl``: TRL's own ``GRPOTrainer._compute_loss`` (DAPO loss type) with its fused head, which computes the logits of
  the loss tokens again in the backward pass, on the same rows; null when TRL is not installed (``make yardsticks``).
* ``assay_unshared``: as ``assay``, but each completion is a row with its own copy of the prompt: what is left is the
  head (not with ``--quick``).

The batch is small (four completions of 48 tokens to a prompt of 48), so that two busy cores are done in minutes. Times
are processor time of one thread: the machine may be shared. ``logits_memory`` is the resident peak of forward and
backward of head and loss for 2,048 tokens; ``total_memory`` is a whole step over 8,192 tokens with weights, gradients
and optimiser, counted (see ``learner_memory.py``): the learner in microbatches of its default token budget,
``total_memory_ratio_8192_one_pass`` without microbatches. ``counted_vs_resident`` is the one way over the other for a
pass of 512 tokens.
"""

from __future__ import annotations

import harness  # first: sets the import path and the threads

harness.pin_threads()

# ruff: noqa: E402
import contextlib
import time
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import learner_memory as memory_of
import numpy as np
import torch
from torch import Tensor, nn

from learner.batch import Batch, Sequence
from learner.config import LearnerConfig
from learner.trainer import Trainer
from protocol.messages import SamplingRules
from protocol.reference.loader import load_config_model
from protocol.weights.layout import read_safetensors

HEAD: Final = memory_of.HEAD
MIB: Final = 2**20


def make_batch(seed: int, prompts: int, prompt: int, samples: int, length: int, vocab: int) -> Batch:
    """Completions of one length with made-up heads that hold 90 % of the mass."""
    rng = np.random.default_rng(seed)
    sequences = []
    for group in range(prompts):
        shared = rng.integers(10, vocab, prompt)
        for sample in range(samples):
            heads = np.sort(rng.dirichlet(np.full(HEAD, 0.3), length) * 0.9)[:, ::-1].copy()
            ids = np.stack([rng.choice(vocab, HEAD, replace=False) for _ in range(length)])
            sequences.append(Sequence(
                group=group, sample=sample, prompt=shared, tokens_T=ids[:, 0], log_q_T=np.log(heads[:, 0]),
                signal_T=np.full(length, (-1.0) ** sample / (prompts * samples * length)),
                lag_T=np.ones(length, np.int64), head_ids_TK=ids, head_q_TK=heads,
                head_valid_TK=np.ones((length, HEAD), bool), tail_q_T=np.full(length, 0.1), node_id=str(sample),
            ))
    return Batch(1, tuple(sequences), tuple([0] * len(sequences)), prompts, {})


class Rows:
    """The same batch as padded rows, as the other two want it."""

    def __init__(self, batch: Batch):
        sequences = batch.sequences
        self.prompt_BL = torch.from_numpy(np.stack([s.prompt for s in sequences]))
        self.completion_BL = torch.from_numpy(np.stack([s.tokens_T for s in sequences]))
        self.old_BL = torch.from_numpy(np.stack([s.log_q_T for s in sequences])).float()
        self.advantage_B = torch.tensor([float(s.signal_T.sum()) * len(sequences) for s in sequences])
        self.ids_BL = torch.cat([self.prompt_BL, self.completion_BL], dim=1)


def hf_loss(model: Any, rows: Rows) -> Tensor:
    """REINFORCE with truncated importance sampling over full logits."""
    logits_BLV = model(rows.ids_BL, use_cache=False).logits[:, :-1]
    log_p_BL = torch.log_softmax(logits_BLV, dim=-1).gather(2, rows.ids_BL[:, 1:, None]).squeeze(2)
    log_p_BL = log_p_BL[:, rows.prompt_BL.shape[1] - 1 :]
    weight_BL = (log_p_BL.detach() - rows.old_BL).exp().clamp(max=2.0)
    return -(weight_BL * rows.advantage_B[:, None] * log_p_BL).mean()


def trl_loss(model: nn.Module) -> Callable[[Rows], Tensor] | None:
    """TRL's loss bound to what it needs of a trainer; None without TRL."""
    try:
        from trl.trainer.grpo_trainer import GRPOTrainer, add_fused_lm_head
    except ImportError:
        return None
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))  # as GRPOTrainer does
    accelerator = types.SimpleNamespace(
        num_processes=1, is_main_process=True, gather=lambda x: x, reduce=lambda x, **_: x,
        autocast=contextlib.nullcontext,
    )
    trainer = types.SimpleNamespace(
        args=types.SimpleNamespace(delta=None, steps_per_generation=1), model=model, accelerator=accelerator,
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=0.0, loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2,
        use_vllm=False, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    trainer._get_per_token_logps_and_entropies = types.MethodType(
        GRPOTrainer._get_per_token_logps_and_entropies, trainer
    )

    def loss(rows: Rows) -> Tensor:
        inputs = {
            "prompt_ids": rows.prompt_BL, "prompt_mask": torch.ones_like(rows.prompt_BL),
            "completion_ids": rows.completion_BL, "completion_mask": torch.ones_like(rows.completion_BL),
            "advantages": rows.advantage_B, "old_per_token_logps": rows.old_BL,
            "num_items_in_batch": torch.tensor(float(rows.completion_BL.numel())),
        }
        value: Tensor = GRPOTrainer._compute_loss(trainer, model, inputs)
        return value

    return loss


# -- memory ------------------------------------------------------------------------------------------------


def memory(folder: Path, width: int, vocab: int, tokens: int) -> dict[str, Any]:
    """Peaks and their ratios; ``tokens``: of head and loss."""
    ours, plain = (memory_of.resident_peak("head", which, folder, tokens, width, vocab) for which in memory_of.LOSSES)
    found: dict[str, Any] = {
        "logits_memory_tokens": tokens, "logits_memory_ratio": ours / plain, "logits_memory_mib": ours / MIB,
        "logits_memory_mib_hf": plain / MIB,
    }
    (budgeted, weights), (one_pass, _), (naive, _) = (
        memory_of.counted_step(memory_of.LOSSES[which], folder, count)
        for which, count in (("ours", LearnerConfig().batch.max_tokens), ("ours", 8192), ("plain", 8192))
    )
    # Weights and two moments; the learner has masters as well. Gradients are made by the pass itself.
    budgeted, one_pass, naive = budgeted + 4 * weights, one_pass + 4 * weights, naive + 3 * weights
    found |= {
        "total_memory_ratio_8192": budgeted / naive, "total_memory_ratio_8192_one_pass": one_pass / naive,
        "total_memory_mib": budgeted / MIB, "total_memory_mib_hf": naive / MIB, "counted_vs_resident": {},
    }
    for which, loss in memory_of.LOSSES.items():
        counted, _ = memory_of.counted_step(loss, folder, memory_of.CHECKED_TOKENS)
        resident = memory_of.resident_peak("step", which, folder, memory_of.CHECKED_TOKENS, width, vocab)
        found["counted_vs_resident"][which] = counted / resident
    return found


# -- speed -------------------------------------------------------------------------------------------------


def other_step(
    model: nn.Module, optimiser: torch.optim.Optimizer, loss: Callable[[Rows], Tensor], rows: Rows
) -> Callable[[], object]:
    """A step of a plain training loop."""

    def step() -> None:
        loss(rows).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def contenders(folder: Path, batch: Batch, vocab: int, *, unshared: bool) -> dict[str, Callable[[], object]]:
    """The learner twice, each with weights of its own; the other two share theirs and the optimiser."""
    rules = SamplingRules(head_size=HEAD, max_new_tokens=4096, eos_token_ids=[2], vocab_size=vocab)
    layout, state = read_safetensors(folder / "model.safetensors")
    rows = Rows(batch)
    found: dict[str, Callable[[], object]] = {}
    for name, share in (("assay", True), ("assay_unshared", False))[: 2 if unshared else 1]:
        config = LearnerConfig.model_validate({"batch": {"share_prompts": share, "max_tokens": 4096}})
        trainer = Trainer.open(folder, layout, state, config, rules)
        found[name] = lambda trainer=trainer: trainer.train_step(batch)  # type: ignore[misc]
    shared: Any = trainer.model
    plain = load_config_model(folder, torch.float32)
    plain.load_state_dict(shared.state_dict())
    plain.train()
    optimiser = torch.optim.AdamW(plain.parameters(), lr=1e-6, fused=True)
    found["hf"] = other_step(plain, optimiser, lambda rows: hf_loss(plain, rows), rows)
    trl = trl_loss(plain)
    if trl is not None:
        found["trl"] = other_step(plain, optimiser, trl, rows)
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", type=Path, default=Path("model-smollm2"), help="folder of SmolLM2; made if missing")
    arguments = parser.parse_args()
    folder: Path = arguments.model
    if not (folder / "model.safetensors").exists():
        from learner.genesis_smollm2 import convert_smollm2

        convert_smollm2(folder, 0, print if not arguments.json else lambda _: None)
    config = load_config_model(folder, torch.float32).config
    vocab, width = int(config.vocab_size), int(config.hidden_size)
    shape = {"prompts": 1, "prompt": 16, "samples": 2, "length": 16} if arguments.quick else {
        "prompts": 1, "prompt": 48, "samples": 4, "length": 48}
    batch = make_batch(arguments.seed, **shape, vocab=vocab)
    works = contenders(folder, batch, vocab, unshared=not arguments.quick)
    timings = harness.interleave(works, rounds=2 if arguments.quick else 3, clock=time.process_time)
    works.clear()  # and with it the models, before the machine's memory is needed
    sizes = memory(folder, width, vocab, 512 if arguments.quick else 2048)
    medians = {name: timing.median for name, timing in timings.items()}
    result: dict[str, Any] = {"tokens": batch.tokens, **shape} | sizes | {
        "vs_hf_naive": medians["hf"] / medians["assay"],
        "vs_trl": medians["trl"] / medians["assay"] if "trl" in medians else None,
    }
    if "assay_unshared" in medians:
        result |= {f"vs_{name}_unshared": medians[name] / medians["assay_unshared"]
                   for name in ("hf", "trl") if name in medians}
    result |= {f"tokens_per_cpu_s_{name}": batch.tokens / median for name, median in medians.items()}
    rows = [(name, t.median, t.spread, batch.tokens / t.median) for name, t in timings.items()]
    text = harness.table(["step", "processor s", "spread", "tokens per s"], rows)
    text += "\n\n" + harness.table(["memory", "MiB", "Hugging Face, MiB", "ratio"], [
        (f"head and loss, {result['logits_memory_tokens']} tokens", result["logits_memory_mib"],
         result["logits_memory_mib_hf"], result["logits_memory_ratio"]),
        ("whole step, 8,192 tokens", result["total_memory_mib"], result["total_memory_mib_hf"],
         result["total_memory_ratio_8192"]),
    ])
    harness.finish(result, text, only_json=arguments.json)


if __name__ == "__main__":
    main()
