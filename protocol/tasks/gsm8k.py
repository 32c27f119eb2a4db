"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade-school word problems from a data object of JSON lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from protocol.errors import LocalFault
from protocol.messages import Environment
from protocol.tasks.answer import last_number, same_number
from protocol.tasks.task import (
    E_TASK_DATA,
    FULL_REWARD_MICRO,
    Problem,
    draws_for,
    int_param,
    refuse_unknown_params,
    render_prompt,
)
from protocol.tokenizer import ChatTurn, Tokenizer

#: Largest data object read, in bytes; the whole training set is 4.2 MB.
MAX_DATA_BYTES: Final = 64 * 2**20
#: What the model is told to do, and one answered question that shows the form.
INSTRUCTION: Final = "You solve a problem in a few short equations, one per line. The last number is the answer."
EXAMPLE: Final = (
    "A baker makes 3 trays of 12 rolls and sells 20 rolls for $2 each. How many rolls are left?",
    "3 * 12 = 36\n36 - 20 = 16",
)
_OPENING: Final[tuple[ChatTurn, ...]] = (
    {"role": "system", "content": INSTRUCTION},
    {"role": "user", "content": EXAMPLE[0]},
    {"role": "assistant", "content": EXAMPLE[1]},
)


@dataclass(frozen=True)
class Row:
    """One question of the data set."""

    question: str
    answer: str  #: the final number
    steps: int  #: calculations in the solution, as annotated by the data's authors: ``<<3*12=36>>``; 0: none is


class Gsm8kTask:
    """Questions drawn uniformly from the data.

    Parameters: ``max_question_chars`` (longer questions are left out), ``max_steps`` (so are questions whose solution
    takes more calculations, or does not say how many; 0: any question).
    """

    def __init__(self, environment: Environment, run_id: str, data: bytes) -> None:
        refuse_unknown_params(environment, ("max_question_chars", "max_steps"))
        longest = int_param(environment, "max_question_chars", 4000, 1, 100_000)
        steps = int_param(environment, "max_steps", 0, 0, 100)
        self._environment, self._run_id = environment, run_id
        self._rows = [row for row in parse_rows(data) if len(row.question) <= longest]
        if steps:
            self._rows = [row for row in self._rows if 1 <= row.steps <= steps]
        if not self._rows:
            few = f" and 1 to {steps} steps" if steps else ""
            raise LocalFault(E_TASK_DATA, "no question is left", expected=f"questions of <= {longest} characters{few}")

    def problem(self, group: int) -> Problem:
        """A question of the data set after the instruction to answer shortly."""
        row = draws_for(self._run_id, self._environment, group).choice(self._rows)
        return Problem((*_OPENING, {"role": "user", "content": row.question}), row.answer)

    def prompt_tokens(self, problem: Problem, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the question in the model's chat template."""
        return render_prompt(problem, tokenizer)

    def reward_micro(self, problem: Problem, completion_text: str) -> int:
        """Full reward when the last number of the text equals the answer."""
        answer = last_number(completion_text)
        return FULL_REWARD_MICRO if answer is not None and same_number(problem.answer, answer) else 0


def parse_rows(data: bytes) -> list[Row]:
    """The question of each line ``{"question": ..., "answer": "... #### 18"}``.

    Raises:
        LocalFault: ``E_TASK_DATA``, naming the first bad line.
    """
    if len(data) > MAX_DATA_BYTES:
        raise LocalFault(E_TASK_DATA, "data too large", expected=f"<= {MAX_DATA_BYTES} bytes", got=len(data))
    rows = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            rows.append(_parse_row(number, line))
    return rows


def _parse_row(number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
        question, solution = row["question"], row["answer"]
        answer = last_number(solution.rsplit("####", 1)[1])
        question.encode()  # half of a surrogate pair is no text
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise LocalFault(
            E_TASK_DATA,
            f"line {number} is not a GSM8K row",
            expected="question, answer ending in '#### number'",
            got=f"{type(error).__name__}: {error}",
        ) from None
    if not isinstance(question, str) or answer is None:
        raise LocalFault(E_TASK_DATA, f"line {number} has no number after ####", got=solution[-80:])
    return Row(question, answer, solution.count("<<"))
