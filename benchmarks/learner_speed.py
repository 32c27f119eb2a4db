"""A learner's step beside a plain Hugging Face step and TRL's GRPO loss, on the same batch of SmolLM2-135M.

Same weights, sequences, advantages, mask and optimiser (AdamW, fp32):

* ``assay``: ``Trainer.train_step`` with its default loss (TIS, score centring), prompts run once, fused head. It also
  keeps fp32 masters beside the weights that compute.
* ``hf``: every completion a padded row, ``log_softmax`` over the logits of the whole batch, gather, policy gradient.
* ``trl``: TRL's own ``GRPOTrainer._compute_loss`` (DAPO loss type) with its fused head, which computes the logits of
  the loss tokens again in the backward pass, on the same rows; null when TRL is not installed.
* ``assay_unshared``: as ``assay``, but each completion is a row with its own copy of the prompt: what is left is the
  head (not with ``--quick``).

Times are processor time of one thread: the machine may be shared. Memory is the peak of live tensor bytes, counted
operation by operation on tensors without storage, so that 8,192 tokens need no 20 GB; ``logits_memory`` is forward
and backward of head and loss for 2,048 tokens, ``total_memory`` a whole step with weights and optimiser. The learner's
total is that of its default token budget; ``total_memory_ratio_8192_one_pass`` is without microbatches.
"""

from __future__ import annotations

import contextlib
import time
import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import harness

harness.pin_threads()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from learner.batch import Batch, Sequence  # noqa: E402
from learner.config import LearnerConfig  # noqa: E402
from learner.corrections import PRESETS  # noqa: E402
from learner.head import LossTokens, chunk_rows, head_loss  # noqa: E402
from learner.losses import token_rule  # noqa: E402
from learner.trainer import Trainer  # noqa: E402
from protocol.messages import SamplingRules  # noqa: E402
from protocol.reference.loader import load_config_model  # noqa: E402
from protocol.weights.layout import read_safetensors  # noqa: E402

HEAD: Final = 32
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
        num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, autocast=contextlib.nullcontext
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


class LiveBytes(TorchDispatchMode):
    """Counts bytes of tensors that operations make and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return made

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_bytes(work: Callable[[LiveBytes], Any]) -> int:
    """Peak of what ``work`` makes, on tensors without storage."""
    with FakeTensorMode(), LiveBytes() as live:
        work(live)
    return live.peak


def fake_tokens(count: int) -> LossTokens:
    ids_NK = torch.zeros(count, HEAD, dtype=torch.int64)
    float_N, long_N = torch.zeros(count), torch.zeros(count, dtype=torch.int64)
    return LossTokens(
        long_N, float_N, float_N, long_N, ids_NK, torch.zeros(count, HEAD), torch.ones(count, HEAD, dtype=torch.bool),
        float_N, long_N,
    )


def fused_loss(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """The product's loss with default chunks."""
    tokens = fake_tokens(len(hidden_ND))
    rule = token_rule(tokens.lag_N, tokens.signal_N, PRESETS["tis+sc"], cap_N=torch.ones_like(tokens.signal_N))
    rows = chunk_rows(len(weight_VD), LearnerConfig().batch.head_chunk_mib)
    return head_loss(hidden_ND, weight_VD, tokens, rule, temperature=1.0, rows=rows)[0]


def plain_loss(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    target_N1 = torch.zeros(len(hidden_ND), 1, dtype=torch.int64)
    return torch.log_softmax(hidden_ND @ weight_VD.T, dim=-1).gather(1, target_N1).mean()


def head_peak(loss: Callable[[Tensor, Tensor], Tensor], tokens: int, width: int, vocab: int) -> int:
    """Peak of forward and backward of head and loss, without its inputs."""
    def work(live: LiveBytes) -> None:
        hidden_ND, weight_VD = torch.zeros(tokens, width).requires_grad_(), torch.zeros(vocab, width).requires_grad_()
        live.now = live.peak = 0
        loss(hidden_ND, weight_VD).backward()  # type: ignore[no-untyped-call]

    return peak_bytes(work)


def step_peak(folder: Path, tokens: int, copies: int, loss: Callable[[Tensor, Tensor], Tensor]) -> int:
    """Peak of a pass over rows of 512 tokens, and ``copies`` of the weights: parameters, moments and so on."""
    def work(live: LiveBytes) -> None:
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        weights = sum(p.numel() * 4 for p in model.parameters())
        live.now = live.peak = copies * weights
        length = min(512, tokens)
        ids_BL = torch.zeros(tokens // length, length, dtype=torch.int64)
        hidden_BLD = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
        loss(hidden_BLD.flatten(0, 1), model.get_output_embeddings().weight).backward()  # type: ignore[no-untyped-call]

    return peak_bytes(work)


def memory(folder: Path, width: int, vocab: int) -> dict[str, Any]:
    """Peaks and their ratios."""
    ours, plain = head_peak(fused_loss, 2048, width, vocab), head_peak(plain_loss, 2048, width, vocab)
    budget = LearnerConfig().batch.max_tokens
    # Weights and two moments; the learner has masters as well. Gradients are made by the pass itself.
    whole_plain = step_peak(folder, 8192, 3, plain_loss)
    whole_ours, one_pass = step_peak(folder, budget, 4, fused_loss), step_peak(folder, 8192, 4, fused_loss)
    return {
        "logits_memory_ratio": ours / plain, "logits_memory_mib": ours / MIB, "logits_memory_mib_hf": plain / MIB,
        "total_memory_ratio_8192": whole_ours / whole_plain, "total_memory_ratio_8192_one_pass": one_pass / whole_plain,
        "total_memory_mib": whole_ours / MIB, "total_memory_mib_hf": whole_plain / MIB,
    }


# -- speed -------------------------------------------------------------------------------------------------


def other_step(model: nn.Module, loss: Callable[[Rows], Tensor], rows: Rows) -> Callable[[], object]:
    """A step of a plain training loop."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        loss(rows).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def contenders(folder: Path, batch: Batch, vocab: int, *, unshared: bool) -> dict[str, Callable[[], object]]:
    """Each with a model of its own."""
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
    found["hf"] = other_step(plain, lambda rows: hf_loss(plain, rows), rows)
    trl = trl_loss(plain)
    if trl is not None:
        found["trl"] = other_step(plain, trl, rows)
    return found


def processor_seconds(works: dict[str, Callable[[], object]], rounds: int, warm_up: int) -> dict[str, harness.Timing]:
    """Processor time of each in turns."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warm_up + rounds):
        for name, work in works.items():
            started = time.process_time()
            work()
            if turn >= warm_up:
                found[name].append(time.process_time() - started)
    return {name: harness.Timing(tuple(seconds)) for name, seconds in found.items()}


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
    sizes = memory(folder, width, vocab)
    shape = {"prompts": 1, "prompt": 16, "samples": 4, "length": 16} if arguments.quick else {
        "prompts": 1, "prompt": 48, "samples": 8, "length": 48}
    batch = make_batch(arguments.seed, **shape, vocab=vocab)
    works = contenders(folder, batch, vocab, unshared=not arguments.quick)
    timings = processor_seconds(works, rounds=2 if arguments.quick else 3, warm_up=1)
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
        ("head and loss, 2,048 tokens", result["logits_memory_mib"], result["logits_memory_mib_hf"],
         result["logits_memory_ratio"]),
        ("whole step, 8,192 tokens", result["total_memory_mib"], result["total_memory_mib_hf"],
         result["total_memory_ratio_8192"]),
    ])
    harness.finish(result, text, only_json=arguments.json)


if __name__ == "__main__":
    main()
