from collections import Counter

import pytest

from protocol.errors import LocalFault
from protocol.messages import Environment
from protocol.tasks import E_TASK, FULL_REWARD_MICRO, make_task
from protocol.tasks.sort import solve

RUN = "ab" * 16


def environment(**params: int | str) -> Environment:
    return Environment(name="sort", kind="sort", params=params)


def test_a_problem_depends_on_run_environment_and_group_only() -> None:
    task, again = make_task(environment(), None, RUN), make_task(environment(), None, RUN)
    assert [task.problem(g) for g in range(20)] == [again.problem(g) for g in reversed(range(20))][::-1]
    assert task.problem(3) != task.problem(4)
    assert task.problem(3) != make_task(environment(), None, "cd" * 16).problem(3)
    assert task.problem(3) != make_task(environment(score="fraction"), None, RUN).problem(3)


def test_the_problems_of_a_run_never_change() -> None:
    """Frozen: another answer here means that old runs can no longer be audited."""
    task = make_task(environment(order="mixed", max_length=6, min_length=4, alphabet=10), None, "00" * 16)
    assert [(task.problem(g).prompt, task.problem(g).answer) for g in range(3)] == FROZEN


FROZEN = [("~dfhea=", "aehfd"), ("<ahjce=", "jheca"), ("<ajgbcd=", "jgdcba")]


@pytest.mark.parametrize(("order", "answer"), [("ascending", "abcd"), ("descending", "dcba"), ("reverse", "acbd")])
def test_each_order_has_its_answer(order: str, answer: str) -> None:
    assert solve(order, "dbca") == answer


def test_symbols_are_different_and_evenly_drawn() -> None:
    task = make_task(environment(max_length=3, alphabet=5), None, RUN)
    seen: Counter[str] = Counter()
    for group in range(1000):
        prompt = task.problem(group).prompt
        assert isinstance(prompt, str)
        assert len(set(prompt[1:-1])) == 3
        seen.update(prompt[1:-1])
    assert set(seen) == set("abcde")
    assert all(520 < count < 680 for count in seen.values())  # 600 expected, sd 15.5


def test_exact_score_is_all_or_nothing() -> None:
    task = make_task(environment(), None, RUN)
    problem = task.problem(0)
    assert task.reward_micro(problem, problem.answer) == FULL_REWARD_MICRO
    for wrong in (
        "",
        problem.answer[:-1],
        problem.answer + "a",
        problem.answer[::-1],
        " " + problem.answer,
        "\0" * 9999,
    ):
        assert task.reward_micro(problem, wrong) == 0


def test_fraction_score_counts_positions_and_refuses_other_lengths() -> None:
    task = make_task(environment(score="fraction", max_length=4), None, RUN)
    problem = task.problem(0)
    assert task.reward_micro(problem, problem.answer) == FULL_REWARD_MICRO
    assert task.reward_micro(problem, problem.answer[:3] + "?") == 750_000
    assert task.reward_micro(problem, problem.answer * 2) == 0


@pytest.mark.parametrize(
    "params",
    [{"order": "upwards"}, {"alphabet": 27}, {"alphabet": "ten"}, {"max_length": 11, "alphabet": 10}, {"lenght": 3}],
)
def test_bad_parameters_are_refused(params: dict[str, int | str]) -> None:
    with pytest.raises(LocalFault) as caught:
        make_task(environment(**params), None, RUN)
    assert caught.value.code == E_TASK
    assert caught.value.expected


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(LocalFault) as caught:
        make_task(Environment(name="x", kind="chess"), None, RUN)
    assert caught.value.code == E_TASK
