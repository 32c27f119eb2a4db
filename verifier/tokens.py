"""T1: exact replay of every draw from the committed head and the seed, and the reward recomputed from the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from protocol.errors import PeerFault, code
from protocol.messages import Lease, RunManifest
from protocol.rollout import Finish, Rollout
from protocol.sampler import replay
from protocol.tasks import Task, make_task
from protocol.tokenizer import Tokenizer
from verifier.findings import Report, RolloutFault, counted
from verifier.submission import Opened

E_REPLAY = code("E_REPLAY", "a token is not the one that its committed head and the seed select")
E_PROMPT = code("E_PROMPT", "the lease's prompt is not the one that the task makes for its group")


_SAME: Final = "0 tokens differ"


class Rewards:
    """The run's tasks: what was asked, and what a completion is worth. Built when first needed."""

    def __init__(self, run: RunManifest, model_dir: Path, fetch: Callable[[str], bytes]):
        self._run, self._model_dir, self._fetch = run, model_dir, fetch
        self._tokenizer: Tokenizer | None = None
        self._tasks: dict[str, Task] = {}

    def check_prompt(self, lease: Lease) -> None:
        """The prompt is the task's own.

        Raises:
            PeerFault: ``E_PROMPT`` (the coordinator's doing); LocalFault: task or tokenizer files are missing.
        """
        task = self._task(lease.environment)
        expected = task.prompt_tokens(task.problem(lease.group), self._load_tokenizer())
        if expected != lease.prompt_tokens:
            raise PeerFault(
                E_PROMPT, f"another prompt for group {lease.group} of {lease.environment}",
                expected=f"{len(expected)} tokens {expected[:8]}...",
                got=f"{len(lease.prompt_tokens)} tokens {lease.prompt_tokens[:8]}...",
            )

    def reward_micro(self, lease: Lease, rollout: Rollout) -> int:
        """Reward of one completion in 1e-6; the EOS token is no part of the text."""
        task = self._task(lease.environment)
        return task.reward_micro(task.problem(lease.group), self.text(rollout))

    def text(self, rollout: Rollout) -> str:
        """The completion as text, without EOS."""
        ids = rollout.tokens.tolist()
        return self._load_tokenizer().decode(ids[:-1] if rollout.finish == Finish.EOS else ids)

    def _task(self, name: str) -> Task:
        if name not in self._tasks:
            environment = next(e for e in self._run.environments if e.name == name)
            self._tasks[name] = make_task(environment, self._fetch, self._run.run_id)
        return self._tasks[name]

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self._model_dir)
        return self._tokenizer


def check_tokens(opened: Opened, report: Report) -> None:
    """Step T1.1: every token of every rollout is the one that its head and the seed select."""
    report.attempt("T1.1 sampler replay", _SAME, lambda: _replay(opened), node=True)


def check_rewards(opened: Opened, rewards: Rewards, report: Report) -> tuple[int, ...]:
    """Steps T1.2 and T1.3: the prompt is the task's; reward of each rollout in 1e-6, in the bundle's order."""
    lease = opened.lease
    report.attempt(
        "T1.2 prompt", f"the task's for group {lease.group}", lambda: rewards.check_prompt(lease), node=False,
        got=lambda _: f"the same {counted(len(lease.prompt_tokens), 'token')}",
    )
    found = report.attempt(
        "T1.3 rewards", "recomputed from the text",
        lambda: tuple(rewards.reward_micro(lease, rollout) for rollout in opened.bundle.rollouts), node=False,
        got=lambda found: ", ".join(f"{reward / 1e6:g}" for reward in found),
    )
    return found or ()


def _replay(opened: Opened) -> str:
    for rollout in opened.bundle.rollouts:
        wrong = replay(rollout, opened.seeds[rollout.sample], opened.run.sampling)
        if wrong is not None:
            raise RolloutFault(
                E_REPLAY, "not the token that head and seed select", sample=rollout.sample, position=wrong,
                expected=_SAME, got=f"token {rollout.tokens[wrong]} at position {wrong} of sample {rollout.sample}",
            )
    return f"0 of {counted(sum(map(len, opened.bundle.rollouts)), 'token')} differ"
