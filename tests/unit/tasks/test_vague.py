import json

import pytest

from protocol.messages import Environment
from protocol.tasks import FULL_REWARD_MICRO, Task, make_task
from tests.adversary.answering import VAGUE

ROWS = [{"question": f"{i} + {i}? #### {2 * i}", "answer": f"<<{i}+{i}={2 * i}>> #### {2 * i}"} for i in range(3, 60)]
ENVIRONMENTS = [
    Environment(name="a", kind="arithmetic", params={"max_term": 10}),
    Environment(name="g", kind="gsm8k", data_sha256="00" * 32),
    Environment(name="s", kind="sort"),
]
LONG = ("{n}" + " {m}" * 500, "{n}" + " " * 5000)


@pytest.fixture(params=ENVIRONMENTS, ids=lambda environment: environment.kind)
def task(request: pytest.FixtureRequest) -> Task:
    data = "\n".join(map(json.dumps, ROWS)).encode()
    return make_task(request.param, lambda _: data, "ab" * 16)


@pytest.mark.parametrize("text", VAGUE + LONG)
def test_a_vague_answer_earns_nothing_in_any_task(task: Task, text: str) -> None:
    for group in range(10):
        problem = task.problem(group)
        said = text.format(n=problem.answer, m=problem.answer[::-1] + "1")
        assert task.reward_micro(problem, said) == 0
        assert task.reward_micro(problem, problem.answer) == FULL_REWARD_MICRO
