"""Put symbols in order: small enough for a model of a few million parameters, exact to check.

A prompt is an operator, the symbols and ``=``: ``>dbca=`` asks for ``abcd`` (ascending), ``<dbca=`` for ``dcba``
(descending), ``~dbca=`` for ``acbd`` (reversed).
"""

from __future__ import annotations

from typing import Final

from protocol.messages import Environment
from protocol.tasks.task import (
    FULL_REWARD_MICRO,
    Problem,
    choice_param,
    draws_for,
    int_param,
    refuse_unknown_params,
    render_prompt,
)
from protocol.tokenizer import Tokenizer

#: Operator of each kind of order.
OPERATORS: Final = {"ascending": ">", "descending": "<", "reverse": "~"}
#: Symbols a problem may use, smallest first.
SYMBOLS: Final = "abcdefghijklmnopqrstuvwxyz"
#: Every character of any prompt or answer.
CHARACTERS: Final = "".join(OPERATORS.values()) + "=" + SYMBOLS


class SortTask:
    """Sorting or reversing.

    Parameters: ``order`` (ascending, descending, reverse, mixed), ``min_length``, ``max_length`` (symbols in a
    problem, all different), ``alphabet`` (symbols to choose from), ``score`` (``exact``: all or nothing;
    ``fraction``: the part of positions that are right, 0 when the length is wrong).
    """

    def __init__(self, environment: Environment, run_id: str) -> None:
        refuse_unknown_params(environment, ("order", "min_length", "max_length", "alphabet", "score"))
        self._environment, self._run_id = environment, run_id
        self._order = choice_param(environment, "order", "ascending", (*OPERATORS, "mixed"))
        self._alphabet = int_param(environment, "alphabet", 10, 2, len(SYMBOLS))
        self._max_length = int_param(environment, "max_length", 6, 1, self._alphabet)
        self._min_length = int_param(environment, "min_length", self._max_length, 1, self._max_length)
        self._score = choice_param(environment, "score", "exact", ("exact", "fraction"))

    def problem(self, group: int) -> Problem:
        """Different symbols in random order, and the order they must be put in."""
        draws = draws_for(self._run_id, self._environment, group)
        order = draws.choice(tuple(OPERATORS)) if self._order == "mixed" else self._order
        length = draws.between(self._min_length, self._max_length)
        symbols = "".join(draws.sample(SYMBOLS[: self._alphabet], length))
        return Problem(f"{OPERATORS[order]}{symbols}=", solve(order, symbols))

    def prompt_tokens(self, problem: Problem, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the prompt, one per character."""
        return render_prompt(problem, tokenizer)

    def reward_micro(self, problem: Problem, completion_text: str) -> int:
        """Full reward for exactly the answer; with ``score = fraction`` the part of positions that are right."""
        if self._score == "exact" or len(completion_text) != len(problem.answer):
            return FULL_REWARD_MICRO if completion_text == problem.answer else 0
        right = sum(got == want for got, want in zip(completion_text, problem.answer, strict=True))
        return FULL_REWARD_MICRO * right // len(problem.answer)


def solve(order: str, symbols: str) -> str:
    """``symbols`` in the asked order."""
    if order == "reverse":
        return symbols[::-1]
    return "".join(sorted(symbols, reverse=order == "descending"))
