"""Bytes per token of packed bundles by head size, next to the entropy of what they hold and to the simple form.

Rollouts of SmolLM2-135M on GSM8K at T = 1 (high entropy: heads are full and a tenth of the tokens come from the tail)
and of the warmed-up tiny model, one bundle per prompt as a lease has it. They are made once with heads of 32 at 1/4096
nat and coarsened from there. *Entropy* is the order-0 entropy of every field (ids, differences of codes, tail codes,
ranks, tail draws, head lengths) counted over all bundles together: what a coder needs that knows all frequencies
beforehand but no context.

The quantisation step is chosen by what it costs and what it blurs: the divergence of honest heads from the reference
(the floor under every threshold) next to that of heads computed with int8 weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import harness

harness.pin_threads()

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from real_rollouts import (  # noqa: E402
    NATS,
    Lease,
    Workload,
    coarsen,
    fine_leases,
    model_arguments,
    smollm2_gsm8k,
    tiny_sort,
)

from node.drill import round_to_int8  # noqa: E402
from node.selftest import kl_of_heads  # noqa: E402
from protocol.bundle import decode, encode, encode_simple  # noqa: E402
from protocol.bundle_columns import DRAWN, Draws, Frame  # noqa: E402
from protocol.messages import SamplingRules  # noqa: E402
from protocol.reference.model import ReferenceModel  # noqa: E402
from protocol.rollout import Bundle, Rollout  # noqa: E402
from protocol.sampler_torch import heads_from_logits  # noqa: E402

STEPS: Final = 256  #: the default of the presets
STEP_CHOICES: Final = (64, 128, 256, 512, 1024)


def main() -> None:
    options = model_arguments(harness.parser(__doc__))
    tiny = _measure(*fine_leases(tiny_sort(options.cache), options), (8, 16))
    workload = smollm2_gsm8k(options.cache, options.data)
    leases, rules = fine_leases(workload, options)
    smollm2 = _measure(leases, rules, (8, 16, 32))
    steps = _trade_off(workload, leases, rules, rollouts=1 if options.quick else 6)
    result = {"steps_per_nat": STEPS, "smollm2_gsm8k": smollm2, "tiny": tiny, "steps": steps}
    harness.finish(result, _text(result), only_json=options.json)


# -- bytes -------------------------------------------------------------------------------------------------


def _measure(leases: Sequence[Lease], rules: SamplingRules, head_sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes and entropy per token at each head size; every bundle is decoded again and compared."""
    tokens = sum(lease.tokens for lease in leases)
    packed, simple, entropy = {}, {}, {}
    for size in head_sizes:
        bundles = [Bundle(tuple(coarsen(r, STEPS, size) for r in lease.bundle.rollouts)) for lease in leases]
        data = [encode(bundle) for bundle in bundles]
        coarse = rules.model_copy(update={"head_size": size})
        if any(encode(decode(d, coarse)) != d for d in data):
            raise SystemExit("a bundle does not come back as it was")
        packed[str(size)] = round(sum(map(len, data)) / tokens, 3)
        simple[str(size)] = round(sum(len(encode_simple(bundle)) for bundle in bundles) / tokens, 3)
        entropy[str(size)] = round(sum(fields(bundles).values()) / tokens, 3)
    ratios = {size: round(packed[size] / entropy[size], 4) for size in packed}
    return {
        "tokens": tokens, "bundles": len(leases), "bytes_per_token": packed, "entropy_bytes_per_token": entropy,
        "simple_form_bytes_per_token": simple, "ratio_by_head": ratios, "ratio_to_entropy": max(ratios.values()),
    }


def fields(bundles: Sequence[Bundle]) -> dict[str, float]:
    """Order-0 entropy of each field over all bundles, in bytes."""
    columns: dict[str, list[NDArray[Any]]] = {}
    for bundle in bundles:
        frame, draws = Frame.of(bundle), Draws.of(bundle)
        differences = np.diff(draws.head_code.astype(np.int64), prepend=0)
        differences[frame.head_starts()] = draws.head_code[frame.head_starts()]
        drawn = draws.rank == DRAWN
        for name, column in {
            "ids": draws.head_id, "differences": differences, "tail codes": draws.tail_code, "ranks": draws.rank,
            "tail tokens": draws.token[drawn], "their codes": draws.token_code[drawn],
            "head lengths": frame.head_length,
        }.items():
            columns.setdefault(name, []).append(column)
    return {name: _entropy(np.concatenate(parts)) for name, parts in columns.items()}


def _entropy(values: NDArray[Any]) -> float:
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8) if len(counts) else 0.0


# -- the step ----------------------------------------------------------------------------------------------


def _trade_off(
    workload: Workload, leases: Sequence[Lease], rules: SamplingRules, rollouts: int
) -> dict[str, dict[str, float]]:
    """By steps per nat: bytes, and the mean divergence per token of honest heads and of heads from int8 weights."""
    import torch

    model = ReferenceModel.load(workload.folder, workload.layout)
    int8 = {
        entry.name: round_to_int8(workload.state[entry.name]) if len(entry.shape) > 1 else workload.state[entry.name]
        for entry in workload.layout.entries
    }
    chosen = [(lease.prompt, r) for lease in leases for r in lease.bundle.rollouts[:1]][:rollouts]
    honest, cheat = (
        [model.logits_for(prompt, rollout, states) for prompt, rollout in chosen]
        for states in ({0: workload.state}.__getitem__, {0: int8}.__getitem__)
    )
    tokens = sum(lease.tokens for lease in leases)
    found = {}
    for steps in STEP_CHOICES:
        coarse = rules.model_copy(update={"steps_per_nat": steps, "head_max_code": round(NATS * steps)})
        bundles = [Bundle(tuple(coarsen(r, steps, 32) for r in lease.bundle.rollouts)) for lease in leases]
        kls = {}
        for name, logits in (("honest_kl", honest), ("int8_kl", cheat)):
            kl_T = np.concatenate([
                kl_of_heads(_committed(rollout, x_TV, coarse), torch.log_softmax(y_TV.double(), 1).numpy(), coarse)
                for (_, rollout), x_TV, y_TV in zip(chosen, logits, honest, strict=True)
            ])
            kls[name], kls[f"{name}_max"] = float(kl_T.mean()), float(kl_T.max())
        found[str(steps)] = {
            "bytes_per_token": round(sum(len(encode(b)) for b in bundles) / tokens, 3), **kls,
            "int8_over_honest": kls["int8_kl"] / kls["honest_kl"], "honest_kl_bound": 1 / (8 * steps**2),
        }
    return found


def _committed(rollout: Rollout, logits_TV: Any, rules: SamplingRules) -> Rollout:
    """The rollout's tokens with the heads that these logits give."""
    heads = heads_from_logits(logits_TV, rules)
    inside = np.arange(heads.ids_BK.shape[1]) < heads.lengths_B.numpy()[:, None]
    return replace(
        rollout, head_lengths=heads.lengths_B.numpy().astype(np.uint8),
        head_ids=heads.ids_BK.numpy()[inside].astype(np.uint32),
        head_codes=heads.codes_BK.numpy()[inside].astype(np.uint16),
        tail_codes=heads.tail_codes_B.numpy().astype(np.uint16),
    )


def _text(result: dict[str, Any]) -> str:
    rows = [
        (name, size, found["bytes_per_token"][size], found["entropy_bytes_per_token"][size],
         found["ratio_by_head"][size], found["simple_form_bytes_per_token"][size])
        for name, found in result.items() if isinstance(found, dict) and "ratio_by_head" in found
        for size in found["bytes_per_token"]
    ]
    steps = [
        (steps, found["bytes_per_token"], found["honest_kl"], found["honest_kl_bound"], found["int8_kl"],
         found["int8_over_honest"]) for steps, found in result["steps"].items()
    ]
    return "\n\n".join([
        harness.table(("model", "head", "B/token", "entropy", "ratio", "simple form"), rows),
        harness.table(("steps/nat", "B/token", "honest KL", "its bound", "int8 KL", "int8/honest"), steps),
    ])


if __name__ == "__main__":
    main()
