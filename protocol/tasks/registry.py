"""From an environment of the run manifest to the task it names."""

from __future__ import annotations

from collections.abc import Callable

from protocol.errors import LocalFault
from protocol.messages import Environment
from protocol.tasks.arithmetic import ArithmeticTask
from protocol.tasks.gsm8k import Gsm8kTask
from protocol.tasks.sort import SortTask
from protocol.tasks.task import E_TASK, E_TASK_DATA, Task

Fetch = Callable[[str], bytes]
Maker = Callable[[Environment, Fetch | None, str], Task]


def _gsm8k(environment: Environment, fetch: Fetch | None, run_id: str) -> Task:
    if environment.data_sha256 is None or fetch is None:
        raise LocalFault(E_TASK_DATA, f"environment {environment.name} needs a data object", expected="data_sha256")
    return Gsm8kTask(environment, run_id, fetch(environment.data_sha256))


#: Every ``kind`` an environment may name, and what makes its task.
KINDS: dict[str, Maker] = {
    "sort": lambda environment, _, run_id: SortTask(environment, run_id),
    "arithmetic": lambda environment, _, run_id: ArithmeticTask(environment, run_id),
    "gsm8k": _gsm8k,
}


def make_task(environment: Environment, fetch: Fetch | None, run_id: str) -> Task:
    """The task of an environment; ``fetch`` gets its data object by hash (kinds with data only).

    Raises:
        LocalFault: ``E_TASK`` unknown kind or bad parameters; ``E_TASK_DATA`` data missing or malformed.
    """
    maker = KINDS.get(environment.kind)
    if maker is None:
        raise LocalFault(
            E_TASK, f"environment {environment.name}: unknown kind", expected=f"one of {', '.join(KINDS)}",
            got=environment.kind,
        )
    return maker(environment, fetch, run_id)
