"""Checkable tasks: the problem of every group and the exact reward of a completion.

Coordinator (prompts) and verifier (rewards) build the same task from the run manifest and agree on every bit.
Imports only ``protocol``; math-verify is loaded when the first number is compared.
"""

from protocol.tasks.registry import make_task
from protocol.tasks.task import E_TASK, E_TASK_DATA, FULL_REWARD_MICRO, Problem, Task

__all__ = ["E_TASK", "E_TASK_DATA", "FULL_REWARD_MICRO", "Problem", "Task", "make_task"]
