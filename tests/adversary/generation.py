"""A plain generate loop over the real sampler: an engine without its scheduling. Cheats enter by its hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache

from protocol.messages import SamplingRules
from protocol.prng import seed_words
from protocol.reference import ReferenceModel
from protocol.rollout import Bundle, Finish, Rollout, Segment, SwapMode
from protocol.sampler_torch import sample_batch
from protocol.weights.layout import State

LogitsHook = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass
class Row:
    """Columns of a rollout under construction."""

    sample: int
    tokens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    tails: list[int] = field(default_factory=list)
    token_codes: list[int] = field(default_factory=list)
    finish: Finish | None = None

    def rollout(self, segments: Sequence[Segment]) -> Rollout:
        assert self.finish is not None
        return Rollout(
            sample=self.sample, tokens=np.array(self.tokens, np.uint32), head_lengths=np.array(self.lengths, np.uint8),
            head_ids=np.array(self.ids, np.uint32), head_codes=np.array(self.codes, np.uint16),
            tail_codes=np.array(self.tails, np.uint16), token_codes=np.array(self.token_codes, np.uint16),
            segments=tuple(segment for segment in segments if segment.start < len(self.tokens)), finish=self.finish,
        )


@torch.no_grad()
def generate(
    model: ReferenceModel,
    states: Callable[[int], State],
    rules: SamplingRules,
    prompt: Sequence[int],
    seeds: Mapping[int, bytes],
    segments: Sequence[Segment],
    *,
    logits_hook: LogitsHook | None = None,
) -> Bundle:
    """Decode all samples side by side with a KV cache; weights are swapped as ``segments`` say."""
    rows = [Row(sample) for sample in seeds]
    # A dummy row keeps the batch above one, as an engine does.
    seeds_B = torch.stack([torch.from_numpy(seed_words(seed).view(np.int64)) for seed in [*seeds.values(), bytes(32)]])
    inputs_BL = torch.tensor([list(prompt)] * len(seeds_B))
    swaps = {segment.start: segment for segment in segments}
    cache = DynamicCache(config=model.model.config)
    fed = 0
    for position in range(rules.max_new_tokens):
        if position in swaps:
            model.set_state(states(swaps[position].version))
            if swaps[position].mode == SwapMode.REPREFILL:
                cache, fed = DynamicCache(config=model.model.config), 0
        logits_BV = model.model(input_ids=inputs_BL[:, fed:], use_cache=True, cache=cache).logits[:, -1]
        fed = inputs_BL.shape[1]
        if logits_hook is not None:
            logits_BV = logits_hook(logits_BV, position)
        drawn = sample_batch(logits_BV, seeds_B, torch.full((len(seeds_B),), position), rules)
        for index, row in enumerate(rows):
            if row.finish is None:
                record(row, drawn, index, rules)
        if all(row.finish is not None for row in rows):
            break
        inputs_BL = torch.cat([inputs_BL, drawn.tokens_B[:, None]], dim=1)
    return Bundle(tuple(row.rollout(segments) for row in rows))


def record(row: Row, drawn, index: int, rules: SamplingRules) -> None:
    """Note what was drawn for the row at ``index`` of the batch."""
    length = int(drawn.head_len_B[index])
    row.tokens.append(int(drawn.tokens_B[index]))
    row.lengths.append(length)
    row.ids += drawn.head_ids_BK[index, :length].tolist()
    row.codes += drawn.head_codes_BK[index, :length].tolist()
    row.tails.append(int(drawn.tail_codes_B[index]))
    row.token_codes.append(int(drawn.token_codes_B[index]))
    if row.tokens[-1] in rules.eos_token_ids:
        row.finish = Finish.EOS
    elif len(row.tokens) == rules.max_new_tokens:
        row.finish = Finish.LENGTH
