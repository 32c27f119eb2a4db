"""Where a learner finds what it works with, and whether it may: everything that can go wrong before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol.client import CoordinatorClient
from protocol.errors import E_CONFIG, E_WRONG_KEY, LocalFault
from protocol.identity import Identity, root_key
from protocol.messages import RunManifest
from protocol.root_trust import open_run_manifest
from protocol.store import Store, open_store
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
        LocalFault: ``E_USAGE`` when ``root`` is not a public key.
        PeerFault: what is wrong with the manifest.
        Transient: the coordinator cannot be reached.
    """
    return open_run_manifest(client.run_manifest(), root_key(root), now_ms=now_ms)


def learner_key(client: CoordinatorClient, manifest: RunManifest) -> Identity:
    """The key that the client signs with, once it is known to be the run's learner.

    Raises:
        LocalFault: ``E_WRONG_KEY``.
    """
    got = "no key" if client.identity is None else client.identity.public_key.hex()
    if client.identity is None or got != manifest.roles.learner:
        raise LocalFault(
            E_WRONG_KEY, "this key is not the run's learner", expected=manifest.roles.learner, got=got,
            hint="give the key file learner.key of the run",
        )
    return client.identity


def run_store(url: str, manifest: RunManifest) -> Store:
    """The object store at ``url``, once it is known to be the run's: founding the run put the model's layout there.

    Raises:
        LocalFault: ``E_CONFIG`` when it is not; ``E_STORE_URL``, ``E_STORE``.
    """
    store = open_store(url)
    if not store.has(manifest.model.layout_sha256):
        raise LocalFault(
            E_CONFIG, "this object store is not the run's", expected=f"object {manifest.model.layout_sha256}",
            got=f"none in {url}",
            hint="give the store that the coordinator serves: dir:DIR/store, or the --store the run was founded with",
        )
    return store


def read_model(folder: Path) -> tuple[Layout, State]:
    """Layout and weights of a Hugging Face folder.

    Raises:
        LocalFault: ``E_CONFIG`` without safetensors files; ``E_STATE``.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LocalFault(
            E_CONFIG, f"no weights in {folder}", expected="*.safetensors", got="none",
            hint="make a model with: assay learner init-model --preset tiny --out DIR",
        )
    return read_safetensors(*files)
