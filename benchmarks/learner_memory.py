"""Memory of a learner's step, counted in two ways; ``learner_speed.py`` makes claims of it.

* *Resident*: the work runs in a process of its own whose allocator hands every freed block back to the kernel; the
  peak of its resident memory, less what it held before, is what the work needed, scratch space of the matrix products
  included. This is what the claim about head and loss rests on.
* *Counted*: bytes of live storages, operation by operation, on tensors without data. A whole step over 8,192 tokens
  needs 15 GB the naive way, so it is counted; the same count at ``CHECKED_TOKENS`` stands beside the resident peak.
"""

from __future__ import annotations

import harness  # first: sets the import path and the threads

harness.pin_threads()

# ruff: noqa: E402
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from learner.config import LearnerConfig
from learner.corrections import PRESETS
from learner.head import LossTokens, chunk_rows, head_loss
from learner.losses import token_rule

HEAD: Final = 32
#: Tokens of the passes that are measured both ways.
CHECKED_TOKENS: Final = 512
#: Longest row of a pass.
ROW: Final = 512

Loss = Callable[[Tensor, Tensor], Tensor]


def made_up_tokens(count: int) -> LossTokens:
    """Loss tokens with heads of 32."""
    ids_NK = torch.arange(HEAD).repeat(count, 1)
    float_N, long_N = torch.full((count,), -3.0), torch.zeros(count, dtype=torch.int64)
    return LossTokens(
        long_N, float_N, torch.ones(count), long_N + 1, ids_NK, torch.full((count, HEAD), 0.9 / HEAD),
        torch.ones(count, HEAD, dtype=torch.bool), torch.full((count,), 0.1), long_N,
    )


def fused_loss(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """The product's loss (TIS, score centring) with default chunks."""
    tokens = made_up_tokens(len(hidden_ND))
    rule = token_rule(tokens.lag_N, tokens.signal_N, PRESETS["tis+sc"], cap_N=torch.full_like(tokens.signal_N, 2.0))
    rows = chunk_rows(len(weight_VD), LearnerConfig().batch.head_chunk_mib)
    return head_loss(hidden_ND, weight_VD, tokens, rule, temperature=1.0, rows=rows)[0]


def plain_loss(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """``log_softmax`` over full logits."""
    target_N1 = torch.zeros(len(hidden_ND), 1, dtype=torch.int64)
    return -torch.log_softmax(hidden_ND @ weight_VD.T, dim=-1).gather(1, target_N1).mean()


LOSSES: Final[dict[str, Loss]] = {"ours": fused_loss, "plain": plain_loss}


def head_work(loss: Loss, tokens: int, width: int, vocab: int) -> Callable[[], Any]:
    """Forward and backward of head and loss; its inputs are there before."""
    hidden_ND, weight_VD = torch.randn(tokens, width).requires_grad_(), torch.randn(vocab, width).requires_grad_()
    return lambda: loss(hidden_ND, weight_VD).backward()  # type: ignore[no-untyped-call]


def step_work(loss: Loss, folder: Path, tokens: int) -> tuple[Callable[[], Any], int]:
    """Forward and backward of a whole model over rows of ``ROW`` tokens, and the bytes of its weights."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    ids_BL = torch.zeros(max(1, tokens // ROW), min(ROW, tokens), dtype=torch.int64)

    def work() -> None:
        hidden_BLD = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
        loss(hidden_BLD.flatten(0, 1), model.get_output_embeddings().weight).backward()  # type: ignore[no-untyped-call]

    return work, sum(parameter.numel() * 4 for parameter in model.parameters())


# -- counted -----------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages that operations make and that are still alive."""

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


def counted_step(loss: Loss, folder: Path, tokens: int) -> tuple[int, int]:
    """(peak bytes of a pass over the model without its weights, bytes of the weights), on tensors without data."""
    with FakeTensorMode(), LiveBytes() as live:
        work, weights = step_work(loss, folder, tokens)
        live.now = live.peak = 0
        work()
    return live.peak, weights


# -- resident ----------------------------------------------------------------------------------------------


def resident_peak(what: str, which: str, folder: Path, tokens: int, width: int, vocab: int) -> int:
    """Bytes by which the work's process grew at its peak. ``what``: head or step; ``which``: ours or plain."""
    arguments = [what, which, str(folder), str(tokens), str(width), str(vocab)]
    # Blocks from 64 KiB on are mapped and unmapped one by one, so that what is freed is gone.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if run.returncode:
        raise RuntimeError(f"measuring memory failed: {run.stderr[-500:]}")
    return int(json.loads(run.stdout.splitlines()[-1])["bytes"])


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _measure(what: str, which: str, folder: str, tokens: str, width: str, vocab: str) -> int:
    torch.manual_seed(0)
    small = head_work(LOSSES[which], 16, int(width), 64)  # libraries are loaded and warm
    small()
    if what == "head":
        work = head_work(LOSSES[which], int(tokens), int(width), int(vocab))
    else:
        work, _ = step_work(LOSSES[which], Path(folder), int(tokens))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here (man 5 proc)
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


if __name__ == "__main__":
    print(json.dumps({"bytes": _measure(*sys.argv[1:])}))
