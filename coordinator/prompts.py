"""Which prompt a group has: a pure function of the run and the group's number."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Protocol

from protocol.messages import RunManifest
from protocol.model_files import fetch_model_files
from protocol.tasks import Task, make_task
from protocol.tokenizer import Tokenizer


class Prompts(Protocol):
    """Where groups get their prompts from."""

    def prompt(self, group: int) -> tuple[str, list[int]]:
        """Name of the group's environment, and the prompt's token ids."""
        ...


class TaskPrompts:
    """Prompts of the run's environments, which take turns.

    Args:
        fetch: gets an object of the store by hash (tokenizer files, task data).
        folder: where the tokenizer's files are unpacked.
    """

    def __init__(self, manifest: RunManifest, fetch: Callable[[str], bytes], folder: Path):
        self._manifest, self._fetch, self._folder = manifest, fetch, folder

    def prompt(self, group: int) -> tuple[str, list[int]]:
        """Name of the group's environment, and the prompt's token ids."""
        index = group % len(self._manifest.environments)
        task = self._tasks[index]
        return self._manifest.environments[index].name, task.prompt_tokens(task.problem(group), self._tokenizer)

    @cached_property
    def _tasks(self) -> list[Task]:
        return [make_task(env, self._fetch, self._manifest.run_id) for env in self._manifest.environments]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(fetch_model_files(self._manifest.model.files, self._folder, self._fetch))
