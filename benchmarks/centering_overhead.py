"""What score centring costs: the fused head with and without it, interleaved, for heads of 32 and 128 entries.

The three matrix products of the head are the same in both, so that their noise would only hide the difference. Each
round therefore times, in random order, everything between the products (``logits_gradient``) with and without
centring, and the whole forward and backward pass of the head without. The ratio is 1 + difference / whole: median over
the rounds, with a bootstrap interval of 95 %. It is of the head alone; with the model's body a step's overhead is
smaller still. Processor time, because the machine may be shared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import harness

harness.pin_threads()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from learner.corrections import PRESETS  # noqa: E402
from learner.head import LossTokens, head_loss, logits_gradient  # noqa: E402
from learner.losses import TokenRule, token_rule  # noqa: E402

HEADS = (32, 128)
#: Hidden width and vocabulary of SmolLM2-135M.
WIDTH, VOCAB = 576, 49_152


def make_tokens(logits_NV: Tensor, head: int, generator: torch.Generator) -> LossTokens:
    """Tokens drawn from a sampler one rounding step away from the learner, lag 1, with its heads."""
    count = len(logits_NV)
    q_NV = torch.softmax(logits_NV + 0.05 * torch.randn(logits_NV.shape, generator=generator), dim=1)
    top = q_NV.topk(head, dim=1)
    target_N1 = torch.multinomial(q_NV, 1, generator=generator)
    return LossTokens(
        target_N=target_N1[:, 0], log_q_N=q_NV.gather(1, target_N1)[:, 0].log(),
        signal_N=torch.randn(count, generator=generator) / count, lag_N=torch.ones(count, dtype=torch.int64),
        head_ids_NK=top.indices, head_q_NK=top.values, head_valid_NK=torch.ones(count, head, dtype=torch.bool),
        tail_q_N=1.0 - top.values.sum(dim=1), sequence_N=torch.zeros(count, dtype=torch.int64),
    )


def rule_of(preset: str, tokens: LossTokens) -> TokenRule:
    """``tis`` or ``tis+sc`` at the default cap."""
    caps = torch.full_like(tokens.signal_N, 1.9)
    return token_rule(tokens.lag_N, tokens.signal_N, PRESETS[preset], cap_N=caps)


def measure(works: dict[str, Callable[[Tensor], object]], logits_NV: Tensor, rounds: int,
            order: random.Random) -> dict[str, list[float]]:
    """Processor seconds of each round, after one round of warm-up; every work may use up its copy of the logits."""
    found: dict[str, list[float]] = {name: [] for name in works}
    buffer_NV = logits_NV.clone()
    for turn in range(rounds + 1):
        for name in order.sample(sorted(works), len(works)):
            buffer_NV.copy_(logits_NV)
            started = time.process_time()
            works[name](buffer_NV)
            if turn:
                found[name].append(time.process_time() - started)
    return found


def interval(values: list[float], seed: int) -> tuple[float, float, float]:
    """Median and its bootstrap interval of 95 %."""
    data = np.asarray(values)
    picks = np.random.default_rng(seed).integers(0, len(data), (2000, len(data)))
    low, high = np.quantile(np.median(data[picks], axis=1), [0.025, 0.975])
    return float(np.median(data)), float(low), float(high)


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    rows, rounds, whole_rounds = (96, 30, 4) if arguments.quick else (170, 60, 8)
    generator = torch.Generator().manual_seed(arguments.seed)
    # Half of the positions are certain, as in a trained model: their tail of p is small.
    sharpness_N1 = torch.where(torch.arange(rows) % 2 == 0, 4.0, 1.0)[:, None]
    hidden_ND = (torch.randn(rows, WIDTH, generator=generator) * sharpness_N1).requires_grad_()
    weight_VD = (torch.randn(VOCAB, WIDTH, generator=generator) * 2.5 / WIDTH**0.5).requires_grad_()
    logits_NV = (hidden_ND @ weight_VD.T).detach()
    by_head = {head: make_tokens(logits_NV, head, generator) for head in HEADS}

    def between(preset: str, tokens: LossTokens) -> Callable[[Tensor], object]:
        rule = rule_of(preset, tokens)
        return lambda buffer_NV: logits_gradient(buffer_NV, tokens, rule)

    def whole(_: Tensor, tokens: LossTokens = by_head[HEADS[0]]) -> None:
        hidden_ND.grad = weight_VD.grad = None
        loss, _stats = head_loss(hidden_ND, weight_VD, tokens, rule_of("tis", tokens), temperature=1.0, rows=rows)
        loss.backward()  # type: ignore[no-untyped-call]

    order = random.Random(arguments.seed)
    works = {f"{preset} k{head}": between(preset, by_head[head]) for head in HEADS for preset in ("tis", "tis+sc")}
    seconds = measure({"whole": whole}, logits_NV, whole_rounds // 2, order)
    between_seconds = measure(works, logits_NV, rounds, order)
    seconds["whole"] += measure({"whole": whole}, logits_NV, whole_rounds - whole_rounds // 2, order)["whole"]
    whole_s = float(np.median(seconds["whole"]))
    result: dict[str, Any] = {"tokens": rows, "vocabulary": VOCAB, "hidden": WIDTH, "rounds": rounds, "head_s": whole_s}
    lines = []
    for head in HEADS:
        plain, centred = between_seconds[f"tis k{head}"], between_seconds[f"tis+sc k{head}"]
        ratios = [1.0 + (c - p) / whole_s for c, p in zip(centred, plain, strict=True)]
        median, low, high = interval(ratios, arguments.seed)
        result |= {f"k{head}": median, f"k{head}_low": low, f"k{head}_high": high}
        lines.append((head, float(np.median(plain)), float(np.median(centred)), median, f"[{low:.4f}, {high:.4f}]"))
    text = harness.table(["head", "between products without, s", "with, s", "ratio of the whole", "95 %"], lines)
    harness.finish(result, text, only_json=arguments.json)


if __name__ == "__main__":
    main()
