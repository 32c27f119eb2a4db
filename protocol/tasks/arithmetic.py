"""Arithmetic word problems for a small pretrained chat model, made from templates."""

from __future__ import annotations

from typing import Final

from protocol.messages import Environment
from protocol.tasks.answer import last_number, same_number
from protocol.tasks.draws import Draws
from protocol.tasks.task import FULL_REWARD_MICRO, Problem, draws_for, int_param, refuse_unknown_params, render_prompt
from protocol.tokenizer import ChatTurn, Tokenizer

#: What the model is told to do. Short answers keep rollouts short and leave the working in plain sight.
INSTRUCTION: Final = "You are a calculator."
#: Ends every question; the smallest models forget an instruction that stands further away.
REMINDER: Final = " Write only the equation."
#: Two answered questions before the real one; they show the form and no more.
EXAMPLES: Final = (
    ("Sam has 4 pens and buys 3 more. How many pens does Sam have now?", "4 + 3 = 7"),
    ("A shop had 9 cups and sold 2. How many cups are left?", "9 - 2 = 7"),
)

NAMES: Final = ("Ada", "Ben", "Chen", "Dana", "Eli", "Fatima", "Goran", "Hana", "Ivan", "Jonas", "Kofi", "Lena")
THINGS: Final = ("apples", "books", "coins", "pencils", "marbles", "stamps", "shells", "cards", "eggs", "buttons")
#: Stories whose answer is a + b.
SUMS: Final = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in one box and {b} {things} in another. How many {things} are there in total?",
    "{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} did {name} find?",
    "{name} had {a} {things}. {other} gave {name} {b} more. How many {things} does {name} have?",
)
#: Stories whose answer is a - b, with a > b.
DIFFERENCES: Final = (
    "{name} had {a} {things} and gave {b} of them to {other}. How many {things} are left?",
    "A shop had {a} {things} and sold {b}. How many {things} are left in the shop?",
    "{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have?",
    "{name} needs {a} {things} and already has {b}. How many more {things} does {name} need?",
)
#: Stories whose answer is a * b.
PRODUCTS: Final = (
    "There are {a} bags with {b} {things} in each bag. How many {things} are there in total?",
    "{name} buys {b} {things} every day for {a} days. How many {things} does {name} buy?",
)

#: The same without a story, which a model of a hundred million parameters mostly gets right.
PLAIN: Final = "What is {a} {things} plus {b} {things}?"

_OPENING: Final[tuple[ChatTurn, ...]] = (
    {"role": "system", "content": INSTRUCTION},
    *(
        {"role": role, "content": text}
        for pair in EXAMPLES
        for role, text in (("user", pair[0] + REMINDER), ("assistant", pair[1]))
    ),
)


class ArithmeticTask:
    """One-step word problems.

    Parameters: ``max_term`` (largest term of a sum), ``max_factor`` (largest factor of a product; 0 leaves
    products out), ``plain_percent`` (share of questions that are a sum without a story around it).
    """

    def __init__(self, environment: Environment, run_id: str) -> None:
        refuse_unknown_params(environment, ("max_term", "max_factor", "plain_percent"))
        self._environment, self._run_id = environment, run_id
        self._max_term = int_param(environment, "max_term", 10, 3, 1_000_000)
        self._max_factor = int_param(environment, "max_factor", 0, 0, 1000)
        self._plain_percent = int_param(environment, "plain_percent", 0, 0, 100)

    def problem(self, group: int) -> Problem:
        """A story with numbers, names and things drawn at random."""
        question, answer = self._story(draws_for(self._run_id, self._environment, group))
        return Problem((*_OPENING, {"role": "user", "content": question + REMINDER}), str(answer))

    def _story(self, draws: Draws) -> tuple[str, int]:
        name, other = draws.sample(NAMES, 2)
        things = draws.choice(THINGS)
        if draws.below(100) < self._plain_percent:
            a, b = draws.between(2, self._max_term), draws.between(2, self._max_term)
            return PLAIN.format(things=things, a=a, b=b), a + b
        kind = draws.below(3 if self._max_factor >= 2 else 2)
        if kind == 0:
            a, b = draws.between(2, self._max_term), draws.between(2, self._max_term)
            template, answer = draws.choice(SUMS), a + b
        elif kind == 1:
            a = draws.between(3, self._max_term)
            b = draws.between(1, a - 1)
            template, answer = draws.choice(DIFFERENCES), a - b
        else:
            a, b = draws.between(2, self._max_factor), draws.between(2, self._max_factor)
            template, answer = draws.choice(PRODUCTS), a * b
        return template.format(name=name, other=other, things=things, a=a, b=b), answer

    def prompt_tokens(self, problem: Problem, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the question in the model's chat template."""
        return render_prompt(problem, tokenizer)

    def reward_micro(self, problem: Problem, completion_text: str) -> int:
        """Full reward when the last number of the text equals the answer."""
        answer = last_number(completion_text)
        return FULL_REWARD_MICRO if answer is not None and same_number(problem.answer, answer) else 0
