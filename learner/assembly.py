"""Putting a learner process together from addresses and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from learner.checkpoint import ResumePoints
from learner.config import LearnerConfig
from learner.journal import Journal
from learner.run import Learner
from learner.trainer import Trainer
from protocol.client import CoordinatorClient
from protocol.clock import Clock
from protocol.errors import E_CONFIG, E_NOT_FOUND, E_WRONG_KEY, LocalFault
from protocol.identity import Identity
from protocol.messages import RunManifest
from protocol.store import open_store
from protocol.weights.layout import Layout, State, read_safetensors


@dataclass(frozen=True)
class Places:
    """Where a learner finds what it works with."""

    coordinator: str  #: URL
    key: Path  #: the learner's key file
    root: str  #: root public key, hex
    store: str  #: address of the object store
    model: Path  #: Hugging Face folder with the run's first weights
    work: Path  #: journal, resume points, metrics


def open_run(client: CoordinatorClient, root: str, now_ms: int) -> RunManifest:
    """The run manifest, once it is known to be signed by ``root`` and not expired.

    Raises:
        LocalFault: ``E_CONFIG`` when ``root`` is not a public key.
        PeerFault: what is wrong with the manifest.
        Transient: the coordinator cannot be reached.
    """
    try:
        key = bytes.fromhex(root)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise LocalFault(E_CONFIG, "--root is not a public key", expected="64 hex digits", got=root[:80])
    return RunManifest.open(client.run_manifest(), key, now_ms=now_ms)


def read_model(folder: Path) -> tuple[Layout, State]:
    """Layout and weights of a Hugging Face folder.

    Raises:
        LocalFault: ``E_NOT_FOUND`` without safetensors files; ``E_STATE``.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LocalFault(
            E_NOT_FOUND, f"no weights in {folder}", expected="*.safetensors", got="none",
            hint="make a model with: assay learner init-model --preset tiny --out DIR",
        )
    return read_safetensors(*files)


def assemble(places: Places, config: LearnerConfig, client: CoordinatorClient, manifest: RunManifest, clock: Clock,
             should_stop: Callable[[], bool]) -> Learner:
    """A learner ready to run.

    Raises:
        LocalFault: a file is missing or does not fit the run; ``E_WRONG_KEY`` when the key is not the run's learner.
    """
    identity = Identity.load(places.key)
    if identity.public_key.hex() != manifest.roles.learner:
        raise LocalFault(
            E_WRONG_KEY, "this key is not the run's learner", expected=manifest.roles.learner,
            got=identity.public_key.hex(),
        )
    layout, state = read_model(places.model)
    if layout.sha256 != manifest.model.layout_sha256:
        raise LocalFault(
            E_CONFIG, f"the model in {places.model} is not the run's",
            expected=f"layout {manifest.model.layout_sha256}", got=f"layout {layout.sha256}",
            hint="give the folder that the run was made with",
        )
    torch.set_num_threads(config.process.threads)
    torch.manual_seed(config.seed)
    return Learner(
        client=client, store=open_store(places.store), identity=identity, manifest=manifest,
        trainer=Trainer.open(places.model, layout, state, config, manifest.sampling),
        journal=Journal(places.work), points=ResumePoints(places.work), config=config, clock=clock,
        should_stop=should_stop,
    )
