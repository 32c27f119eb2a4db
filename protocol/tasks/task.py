"""What a task is: a problem per group, as a pure function of the run, and an exact reward for a completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from protocol import canonical
from protocol.errors import LocalFault, code
from protocol.messages import Environment
from protocol.tasks.draws import Draws
from protocol.tokenizer import ChatTurn, Tokenizer

E_TASK = code("E_TASK", "an environment names an unknown task or carries parameters that the task refuses")
E_TASK_DATA = code("E_TASK_DATA", "a task's data object is missing or malformed")

#: Reward of a right answer: 1.0 in units of 1e-6.
FULL_REWARD_MICRO: Final = 1_000_000


@dataclass(frozen=True)
class Problem:
    """One question with its answer. A conversation is rendered in the model's chat template, a string is not."""

    prompt: str | tuple[ChatTurn, ...]
    answer: str


class Task(Protocol):
    """A family of checkable problems. Coordinator and verifier build it alone and agree on every bit."""

    def problem(self, group: int) -> Problem:
        """The problem of a group: a pure function of run id, environment and group."""

    def prompt_tokens(self, problem: Problem, tokenizer: Tokenizer) -> list[int]:
        """Token ids that the model completes."""

    def reward_micro(self, problem: Problem, completion_text: str) -> int:
        """Reward of an untrusted completion, 0 to ``FULL_REWARD_MICRO``; never raises on its content."""


def render_prompt(problem: Problem, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a problem's prompt: plain text as it is, a conversation through the chat template."""
    if isinstance(problem.prompt, str):
        return tokenizer.encode(problem.prompt)
    return tokenizer.encode_chat(problem.prompt)


def draws_for(run_id: str, environment: Environment, group: int) -> Draws:
    """The random choices that make a group's problem."""
    return Draws(run_id, canonical.digest(environment.model_dump(mode="json")), str(group))


def int_param(environment: Environment, name: str, default: int, low: int, high: int) -> int:
    """An integer parameter within its range.

    Raises:
        LocalFault: ``E_TASK``.
    """
    value = environment.params.get(name, default)
    if not isinstance(value, int) or not low <= value <= high:
        raise LocalFault(E_TASK, f"environment {environment.name}: bad {name}", expected=f"{low}..{high}", got=value)
    return value


def choice_param(environment: Environment, name: str, default: str, allowed: tuple[str, ...]) -> str:
    """A text parameter out of a few allowed values.

    Raises:
        LocalFault: ``E_TASK``.
    """
    value = environment.params.get(name, default)
    if not isinstance(value, str) or value not in allowed:
        raise LocalFault(
            E_TASK, f"environment {environment.name}: bad {name}", expected=f"one of {', '.join(allowed)}", got=value
        )
    return value


def refuse_unknown_params(environment: Environment, known: tuple[str, ...]) -> None:
    """A misspelt parameter must not silently mean its default.

    Raises:
        LocalFault: ``E_TASK``.
    """
    unknown = sorted(set(environment.params) - set(known))
    if unknown:
        raise LocalFault(
            E_TASK,
            f"environment {environment.name}: unknown parameters",
            expected=f"among {', '.join(known) or 'none'}",
            got=", ".join(unknown),
        )
