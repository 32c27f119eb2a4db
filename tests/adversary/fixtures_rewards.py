"""Fixtures against rewards: hostile answers, and the nearest thing to hostile tool results that the tasks have."""

from __future__ import annotations

import json
from typing import Final

from protocol.messages import Environment
from protocol.tasks import Task, make_task
from tests.adversary.bench import Bench, Catch
from tests.adversary.registry import fixture
from tests.adversary.world import RUN_ID

#: Ways to be vague about the number {n} that is right; {m} is wrong.
VAGUE: Final = (
    "{n} or {m}", "{n}, {m}", "{n}.{n}.{n}", "{n}/0", "{n}^{n}", "x{n}", "{n}e9", "{n}\u0663", "a_{n}", "{m}", "",
    "nothing", "{n} {m} {m}", "9" * 30, "{n}5", "-{n}1", "{n}\n#### {m}", "1e{n}", "\u0661\u0668", "{n}" + " {m}" * 500,
    "#### {n}\n" + " " * 5000,
)


def _tasks() -> dict[str, Task]:
    rows = [{"question": f"What is {i} + {i}? #### {2 * i}", "answer": f"<<{i}+{i}={2 * i}>> #### {2 * i}"}
            for i in range(3, 60)]
    data = "\n".join(json.dumps(row) for row in rows).encode()
    kinds = {
        "arithmetic": Environment(name="a", kind="arithmetic", params={"max_term": 10}),
        "gsm8k": Environment(name="g", kind="gsm8k", data_sha256="00" * 32),
        "sort": Environment(name="s", kind="sort"),
    }
    return {kind: make_task(environment, lambda _: data, RUN_ID) for kind, environment in kinds.items()}


@fixture(34, "unparsable and ambiguous answers", "reward 0")
def vague_answers(bench: Bench, seed: int) -> Catch:
    """None of them earns anything, in any task; the plain answer earns everything."""
    earned = plain = 0
    for task in _tasks().values():
        problem = task.problem(seed)
        plain += task.reward_micro(problem, problem.answer) == 10**6
        wrong = problem.answer[::-1] + "1"
        for text in VAGUE:
            earned += task.reward_micro(problem, text.format(n=problem.answer, m=wrong))
    return Catch(earned == 0 and plain == 3, None, "reward 0", 3 * len(VAGUE))


@fixture(33, "a question that holds its own answer and markup (there are no multi-turn tasks)", "reward 0")
def hostile_question(bench: Bench, seed: int) -> Catch:
    """Assay has no tools and no turns. Nearest: task data written by an adversary. Only the completion earns."""
    task = _tasks()["gsm8k"]
    problem = task.problem(seed)
    earned = task.reward_micro(problem, "") + task.reward_micro(problem, "the number above, as you said")
    return Catch(earned == 0, None, "reward 0", 2)
