"""Putting a learner process together. Imports torch; what can fail without it is in ``learner.places``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from learner.checkpoint import ResumePoints
from learner.config import LearnerConfig, ProcessConfig
from learner.crew import Lead, Opening, follow
from learner.exposition import Exposition
from learner.journal import Journal
from learner.metrics import Metrics
from learner.places import Places, learner_key, read_model, run_store
from learner.ranks import Ranks, rank_faults
from learner.run import Learner
from learner.trainer import Trainer
from protocol.client import CoordinatorClient
from protocol.clock import Clock
from protocol.errors import E_CONFIG, LocalFault
from protocol.messages import RunManifest, SamplingRules
from protocol.weights.layout import Layout, State
from protocol.weights.state_root import usable_hash


def assemble(places: Places, config: LearnerConfig, client: CoordinatorClient, manifest: RunManifest, clock: Clock,
             should_stop: Callable[[], bool], ranks: Ranks = Ranks()) -> Learner:  # noqa: B008 - immutable
    """A learner ready to run, signing with the client's key; of several ranks this is the first.

    Raises:
        LocalFault: a file is missing or does not fit the run; ``E_WRONG_KEY`` when the key is not the run's learner;
            ``E_RANK_LOST``.
    """
    identity = learner_key(client, manifest)
    layout, state = read_model(places.model)
    if layout.sha256 != manifest.model.layout_sha256:
        raise LocalFault(
            E_CONFIG, f"the model in {places.model} is not the run's",
            expected=f"layout {manifest.model.layout_sha256}", got=f"layout {layout.sha256}",
            hint="give the folder that the run was made with",
        )
    usable_hash(manifest.model.state_hash)
    store = run_store(places.store, manifest)
    journal = Journal(places.work)
    journal.write_run(client.run_manifest())
    journal.write_settings(config)
    ranks.tell(Opening(manifest.sampling, layout.sha256, config.learning_sha256()))
    trainer = _trainer(places.model, layout, state, config, manifest.sampling, ranks)
    return Learner(
        client=client, store=store, identity=identity, manifest=manifest,
        trainer=trainer if ranks.size == 1 else Lead(trainer, ranks), journal=journal,
        points=ResumePoints(places.work), config=config, clock=clock, should_stop=should_stop,
        show=_views(places, config.process),
    )


def _views(places: Places, config: ProcessConfig) -> Callable[[Metrics], None]:
    """Everybody who is shown the numbers of a version."""
    views = [Exposition(places.work / "metrics.prom", config.metrics_port).show]
    if config.tensorboard is not None:
        from learner.event_files import EventFiles

        views.append(EventFiles(Path(config.tensorboard)).show)

    def show(metrics: Metrics) -> None:
        for view in views:
            view(metrics)

    return show


@contextmanager
def joined(config: ProcessConfig) -> Iterator[Ranks]:
    """The group of this learner's processes while the block lasts. Raises ``E_CONFIG``, ``E_RANK_LOST``."""
    ranks = Ranks.join(config)
    yield ranks
    ranks.leave()  # not after a fault: the others may be gone, and the end of the process tells them


def serve_rank(model: Path, config: LearnerConfig, ranks: Ranks) -> None:
    """A rank other than the first, from its start to its end.

    Raises:
        LocalFault: a file is missing or does not fit; ``E_RANK_LOST``.
    """
    layout, state = read_model(model)
    opening: Opening = ranks.hear()
    opening.check(layout.sha256, config.learning_sha256())
    follow(_trainer(model, layout, state, config, opening.rules, ranks), ranks)


def _trainer(model: Path, layout: Layout, state: State, config: LearnerConfig, rules: SamplingRules,
             ranks: Ranks) -> Trainer:
    torch.set_num_threads(config.process.threads)
    torch.manual_seed(config.seed + ranks.rank)
    with rank_faults():
        return Trainer.open(model, layout, state, config, rules, ranks)
