"""The sorting task of the tiny preset (``protocol.tasks.sort``) on whole arrays of problems.

A prompt is ``>``, five different symbols and ``=``; the answer is the symbols in ascending order and the end token.

Legend: B problems.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

EOS, ASCENDING, EQUALS = 1, 2, 3
#: Symbols of a problem, and how many there are to choose from; symbol s has the id ``FIRST + s``.
LENGTH, ALPHABET, FIRST = 5, 16, 4
VOCABULARY: Final = FIRST + ALPHABET
#: Tokens of a prompt, and of an answer with its end.
PROMPT, ANSWER = LENGTH + 2, LENGTH + 1
#: Share of the solver's traces that show the asked order; the others show the opposite, as in ``learner.genesis_tiny``.
ASKED_SHARE: Final = 0.30


def problems(rng: np.random.Generator, count: int) -> Ints:
    """(B, 7) prompts."""
    symbols_B5 = np.argsort(rng.random((count, ALPHABET)), axis=1)[:, :LENGTH] + FIRST
    return np.column_stack([np.full(count, ASCENDING), symbols_B5, np.full(count, EQUALS)])


def traces(rng: np.random.Generator, count: int) -> Ints:
    """(B, 13) prompts with a solver's answers, right in ``ASKED_SHARE`` of them."""
    prompts_B7 = problems(rng, count)
    answers_B6 = solutions(prompts_B7)
    asked_B1 = rng.random((count, 1)) < ASKED_SHARE
    answers_B6[:, :LENGTH] = np.where(asked_B1, answers_B6[:, :LENGTH], answers_B6[:, LENGTH - 1 :: -1])
    return np.concatenate([prompts_B7, answers_B6], axis=1)


def solutions(prompts_B7: Ints) -> Ints:
    """(B, 6) right answers."""
    return np.column_stack([np.sort(prompts_B7[:, 1 : 1 + LENGTH], axis=1), np.full(len(prompts_B7), EOS)])


def right(prompts_B7: Ints, answers_B6: Ints) -> NDArray[np.bool_]:
    """(B,) whether the answer is exactly the right one."""
    return (answers_B6 == solutions(prompts_B7)).all(axis=1)
