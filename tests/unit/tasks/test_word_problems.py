import re
from pathlib import Path

import pytest

from protocol.errors import LocalFault
from protocol.messages import Environment
from protocol.tasks import E_TASK, E_TASK_DATA, FULL_REWARD_MICRO, Task, make_task
from protocol.tasks.gsm8k import parse_rows

RUN = "ab" * 16
SAMPLE = (Path(__file__).parents[2] / "data" / "gsm8k" / "sample.jsonl").read_bytes()
GSM8K = Environment(name="gsm8k", kind="gsm8k", data_sha256="0" * 64)


def gsm8k(data: bytes = SAMPLE, **params: int | str) -> Task:
    return make_task(GSM8K.model_copy(update={"params": params}), lambda _: data, RUN)


def arithmetic(**params: int | str) -> Task:
    return make_task(Environment(name="arithmetic", kind="arithmetic", params=params), None, RUN)


@pytest.mark.parametrize("params", [{}, {"max_term": 9}, {"plain_percent": 30}, {"max_term": 100, "max_factor": 12}])
def test_answers_follow_from_the_numbers_of_the_question(params: dict[str, int | str]) -> None:
    task = arithmetic(**params)
    kinds = set()
    for group in range(300):
        problem = task.problem(group)
        question = problem.prompt[-1]["content"]  # type: ignore[index]
        assert isinstance(question, str)
        a, b = (int(number) for number in re.findall(r"[0-9]+", question)[:2])
        results = {a + b: "sum", a - b: "difference", b - a: "difference", a * b: "product"}
        kinds.add(results[int(problem.answer)])
        assert int(problem.answer) >= 0
        assert task.reward_micro(problem, f"It is {problem.answer}.") == FULL_REWARD_MICRO
        assert task.reward_micro(problem, f"It is {problem.answer} or {int(problem.answer) + 1}.") == 0
    assert {"sum", "difference"} <= kinds


def test_a_share_of_the_questions_is_plain() -> None:
    task = arithmetic(plain_percent=50)
    plain = sum("What is" in str(task.problem(group).prompt) for group in range(400))
    assert 150 < plain < 250
    assert not any("What is" in str(arithmetic().problem(group).prompt) for group in range(50))


def test_questions_vary() -> None:
    task = arithmetic()
    prompts = {str(task.problem(group).prompt) for group in range(200)}
    assert len(prompts) > 190


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(LocalFault) as caught:
        arithmetic(max_term=0)
    assert caught.value.code == E_TASK


def test_gsm8k_reads_questions_and_answers() -> None:
    task = gsm8k()
    answers = {task.problem(group).answer for group in range(200)}
    assert len(answers) >= 8
    assert {"18", "3", "70000"} <= answers
    problem = task.problem(0)
    assert task.reward_micro(problem, f"work\n#### {problem.answer}") == FULL_REWARD_MICRO
    assert task.reward_micro(problem, "no idea") == 0


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"not json", b'{"question": "q", "answer": "no marker"}', b'{"question": "q", "answer": "#### x"}',
        b'{"question": 1, "answer": "#### 1"}', b'["question"]', b'{"question": "q", "answer": 3}', b"\xff\xfe",
        b'{"question": "\\ud800", "answer": "#### 1"}',
    ],
)  # fmt: skip
def test_malformed_data_is_refused(data: bytes) -> None:
    with pytest.raises(LocalFault) as caught:
        gsm8k(data)
    assert caught.value.code == E_TASK_DATA


def test_gsm8k_takes_only_questions_of_few_steps() -> None:
    steps = {row.answer: row.steps for row in parse_rows(SAMPLE)}
    few = {answer for answer, count in steps.items() if 1 <= count <= 2}
    assert 0 < len(few) < len(steps)
    task = gsm8k(max_steps=2)
    assert {task.problem(group).answer for group in range(200)} == few
    with pytest.raises(LocalFault, match="no question is left") as caught:
        gsm8k(b'{"question": "Q", "answer": "no working #### 4"}', max_steps=9)
    assert caught.value.code == E_TASK_DATA
    assert gsm8k(b'{"question": "Q", "answer": "no working #### 4"}').problem(0).answer == "4"


def test_gsm8k_without_data_is_refused() -> None:
    for environment, fetch in ((GSM8K, None), (Environment(name="g", kind="gsm8k"), lambda _: SAMPLE)):
        with pytest.raises(LocalFault) as caught:
            make_task(environment, fetch, RUN)
        assert caught.value.code == E_TASK_DATA
