"""One process of several that train on a pickled batch; started by ``torch.distributed.run`` from the tests.

Arguments: folder with ``model/``, ``batches.pt`` and ``config.json``; results go there. ``--die RANK`` ends that rank
in the middle of the second step.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from learner.config import LearnerConfig
from learner.crew import Lead, follow
from learner.ranks import Ranks, rank_faults, whole
from learner.trainer import Trainer
from tests.fakes.learning import load_model, sampling_rules


def run(folder: Path, dying: int | None) -> None:
    config = LearnerConfig.model_validate_json((folder / "config.json").read_text())
    batches = pickle.loads((folder / "batches.pt").read_bytes())
    torch.set_num_threads(1)
    ranks = Ranks.join(config.process)
    layout, state = load_model(folder / "model")
    with rank_faults():
        trainer = Trainer.open(folder / "model", layout, state, config, sampling_rules(), ranks)
    if dying == ranks.rank:
        kill_in_step(trainer, 2)
    if ranks.rank > 0:
        follow(trainer, ranks)
    else:
        lead(Lead(trainer, ranks), folder, batches)
    if dying is None:
        gradients = gather_gradients(trainer, batches[0])
        if ranks.rank == 0:
            torch.save(gradients, folder / "gradients.pt")
    ranks.leave()


def lead(trainer: Lead, folder: Path, batches: list[Any]) -> None:
    trainer.wait()
    metrics = [trainer.train_step(batch).metrics for batch in batches]
    (folder / "saved").mkdir()
    trainer.save(folder / "saved")
    (folder / "state.pickle").write_bytes(pickle.dumps((metrics, trainer.published_state())))
    trainer.close()


def gather_gradients(trainer: Trainer, batch: Any) -> list[torch.Tensor]:
    trainer._accumulate(batch, lambda: False)
    return [whole(p.grad) for p in trainer.masters.parameters if p.grad is not None]


def kill_in_step(trainer: Trainer, number: int) -> None:
    forward, calls = trainer._forward, [0]

    def strike(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*given)

    trainer._forward = strike  # type: ignore[method-assign]


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[3]) if "--die" in sys.argv else None)
