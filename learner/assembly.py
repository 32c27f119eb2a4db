"""Putting a learner process together. Imports torch; what can fail without it is in ``learner.places``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from learner.checkpoint import ResumePoints
from learner.config import LearnerConfig
from learner.journal import Journal
from learner.places import Places, learner_key, read_model
from learner.run import Learner
from learner.trainer import Trainer
from protocol.client import CoordinatorClient
from protocol.clock import Clock
from protocol.errors import E_CONFIG, LocalFault
from protocol.messages import RunManifest
from protocol.store import open_store


def assemble(places: Places, config: LearnerConfig, client: CoordinatorClient, manifest: RunManifest, clock: Clock,
             should_stop: Callable[[], bool]) -> Learner:
    """A learner ready to run, signing with the client's key.

    Raises:
        LocalFault: a file is missing or does not fit the run; ``E_WRONG_KEY`` when the key is not the run's learner.
    """
    identity = learner_key(client, manifest)
    layout, state = read_model(places.model)
    if layout.sha256 != manifest.model.layout_sha256:
        raise LocalFault(
            E_CONFIG, f"the model in {places.model} is not the run's",
            expected=f"layout {manifest.model.layout_sha256}", got=f"layout {layout.sha256}",
            hint="give the folder that the run was made with",
        )
    journal = Journal(places.work)
    journal.write_run(client.run_manifest())
    journal.write_settings(config)
    torch.set_num_threads(config.process.threads)
    torch.manual_seed(config.seed)
    return Learner(
        client=client, store=open_store(places.store), identity=identity, manifest=manifest,
        trainer=Trainer.open(places.model, layout, state, config, manifest.sampling),
        journal=journal, points=ResumePoints(places.work), config=config, clock=clock,
        should_stop=should_stop,
    )
