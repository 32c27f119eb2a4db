"""Assay's checks and TOPLOC's on the same rollouts, from one prefill of the right model.

Assay commits to heads: T1 replays the draws, T2 compares heads with the reference. TOPLOC commits to the last hidden
states of the maker's own passes; the cheat is honest about its own model.

Legend: T tokens of a rollout, V vocabulary, L prompt and completion, D hidden width, B rows of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import toploc_proofs
from benchmarks.cheats import Made
from benchmarks.real_rollouts import Workload
from coordinator.presets import TORCH_CPU_FP32
from protocol.head import Head, offsets
from protocol.messages import SamplingRules
from protocol.reference import LogitsChunk, Recomputation
from protocol.reference.loader import load_config_model, set_state
from protocol.rollout import NO_CODE, Bundle, Rollout
from protocol.sampler import TAIL, draw, seed_words
from protocol.sampler_torch import sample_batch
from protocol.weights.layout import State
from verifier.divergence import TOKEN_CHECKS, Residuals, token_limits
from verifier.recompute import TorchRecomputer

_ROWS: Final = 8  #: rollouts of one prefill pass


class Reading:
    """The right model's prefill of finished rollouts: logits for T2, hidden states for TOPLOC, one pass for both."""

    def __init__(self, workload: Workload, state: State, rules: SamplingRules):
        self._model: Any = load_config_model(workload.folder)
        set_state(self._model, workload.layout, state)
        self._rules = rules
        self.seeds: list[bytes] = []
        self.hidden: list[torch.Tensor] = []
        self.redrawn: list[NDArray[np.int64]] = []  #: the tokens that the right heads and the seeds select

    @torch.no_grad()
    def replay(self, items: Sequence[Recomputation], _states: object) -> Iterator[LogitsChunk]:
        """As ``ReferenceModel.replay`` for rollouts of one version."""
        for first in range(0, len(items), _ROWS):
            batch = items[first : first + _ROWS]
            ids = [[*item.prompt, *item.rollout.tokens[:-1].tolist()] for item in batch]
            width = max(map(len, ids))
            padded_BL = torch.tensor([row + [0] * (width - len(row)) for row in ids])
            hidden_BLD = self._model.base_model(input_ids=padded_BL).last_hidden_state
            for row, item in enumerate(batch):
                begin = len(item.prompt) - 1
                hidden_TD = hidden_BLD[row, begin : begin + len(item.rollout)]
                logits_TV = self._model.lm_head(hidden_TD).float()
                self.hidden.append(hidden_TD.bfloat16())
                self.redrawn.append(self._redraw(logits_TV, self.seeds[first + row]))
                yield LogitsChunk(first + row, 0, logits_TV)

    def _redraw(self, logits_TV: torch.Tensor, seed: bytes) -> NDArray[np.int64]:
        words_T4 = torch.from_numpy(seed_words(seed).view(np.int64)).expand(len(logits_TV), 4)
        drawn = sample_batch(logits_TV, words_T4, torch.arange(len(logits_TV)), self._rules)
        tokens: NDArray[np.int64] = drawn.tokens_B.numpy()
        return tokens


@dataclass
class Seen:
    """What both schemes see of some rollouts."""

    lengths: list[int] = field(default_factory=list)
    beyond: list[NDArray[np.bool_]] = field(default_factory=list)  #: Assay: positions at which T1 or T2 fails
    by: set[str] = field(default_factory=set)  #: Assay: tiers that see it
    log_kl: list[float] = field(default_factory=list)  #: Assay: mean log-divergence of each rollout
    proofs: list[list[dict[str, float]]] = field(default_factory=list)  #: TOPLOC: errors of each proof of each rollout
    proof_bytes: int = 0
    largest: dict[str, float] = field(default_factory=dict)  #: largest residuals, nats

    @property
    def caught(self) -> int:
        """Rollouts that Assay's limits fail."""
        return sum(bool(positions.any()) for positions in self.beyond)


@dataclass(frozen=True)
class Auditor:
    """Looks at rollouts with both schemes; without TOPLOC where that is None."""

    reading: Reading
    rules: SamplingRules
    toploc: Any | None

    def look(self, made: Sequence[Made]) -> tuple[Seen, Seen]:
        """(Rollouts as they were made, the same tokens with heads and proofs made afterwards by the right model)."""
        reading = self.reading
        reading.hidden, reading.redrawn, reading.seeds = [], [], [one.seed for one in made]
        states: Any = SimpleNamespace(state=None)
        recomputer = TorchRecomputer(reading, states)  # type: ignore[arg-type]
        as_made, forged = Seen(), Seen()
        for number, (one, [residuals]) in enumerate(
            zip(made, recomputer.residuals([self._opened(one) for one in made]), strict=True)
        ):
            right_TD = reading.hidden[number]
            wrong_T = wrong_draws(one.rollout, one.seed, self.rules)
            apart_T = beyond_limits(residuals, self.rules.steps_per_nat)
            as_made.by |= ({"T1"} if wrong_T.any() else set()) | ({"T2"} if (apart_T & ~wrong_T).any() else set())
            as_made.log_kl.append(residuals.statistics.log_kl)
            _note_largest(as_made.largest, residuals)
            self._note(as_made, one, wrong_T | apart_T, one.hidden_TD if len(one.hidden_TD) else right_TD, right_TD)
            differs_T = reading.redrawn[number] != one.rollout.tokens
            forged.by |= {"T1"} if differs_T.any() else set()
            self._note(forged, one, differs_T, right_TD, right_TD)
        return as_made, forged

    def _opened(self, one: Made) -> Any:
        return SimpleNamespace(
            bundle=Bundle((one.rollout,)), seeds={one.rollout.sample: one.seed},
            run=SimpleNamespace(sampling=self.rules), lease=SimpleNamespace(prompt_tokens=list(one.prompt)),
        )

    def _note(
        self, seen: Seen, one: Made, beyond_T: NDArray[np.bool_], claimed_TD: torch.Tensor, right_TD: torch.Tensor
    ) -> None:
        seen.lengths.append(len(one.rollout))
        seen.beyond.append(beyond_T)
        if self.toploc is not None:
            proofs = toploc_proofs.build(self.toploc, claimed_TD)
            seen.proof_bytes += sum(map(len, proofs))
            seen.proofs.append(toploc_proofs.check(self.toploc, right_TD, proofs))


def wrong_draws(rollout: Rollout, seed: bytes, rules: SamplingRules) -> NDArray[np.bool_]:
    """(T,) tokens that the committed heads and the seed do not select: T1.1 at every position."""
    starts, wrong_T = offsets(rollout), np.zeros(len(rollout), np.bool_)
    for position in range(len(rollout)):
        entries = slice(starts[position], starts[position] + rollout.head_lengths[position])
        head = Head(rollout.head_ids[entries], rollout.head_codes[entries], int(rollout.tail_codes[position]))
        index = draw(head, seed, position, rules)
        from_tail = rollout.token_codes[position] != NO_CODE
        right = from_tail if index == TAIL else not from_tail and head.ids[index] == rollout.tokens[position]
        wrong_T[position] = not right
    return wrong_T


def beyond_limits(residuals: Residuals, steps_per_nat: int) -> NDArray[np.bool_]:
    """(T,) positions at which T2 would fail a rollout that ended there, under the limits of the engine's profile."""
    profile = TORCH_CPU_FP32
    beyond_T: NDArray[np.bool_] = np.zeros(len(residuals.kl_T), np.bool_)
    for (_, _, values), limit in zip(TOKEN_CHECKS, token_limits(profile, steps_per_nat), strict=True):
        beyond_T |= values(residuals) > limit
    kl_T = np.where(residuals.stochastic, residuals.kl_T, 0.0)
    mean_T = kl_T.cumsum() / np.maximum(residuals.stochastic.cumsum(), 1)
    return beyond_T | (mean_T > profile.max_mean_kl_nano * 1e-9)


def _note_largest(largest: dict[str, float], residuals: Residuals) -> None:
    entry = float(np.nanmax([np.nanmax(residuals.entry_T), residuals.tail_mass_T.max()]))
    for name, value in (
        ("mean_kl", residuals.mean_kl), ("token_kl", float(residuals.kl_T.max())), ("margin", entry)
    ):
        largest[name] = max(largest.get(name, 0.0), value)
