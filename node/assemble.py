"""From a joined home to a daemon: every check a node makes before it takes work."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from node.config import NodeConfig
from node.daemon import Daemon, Parts
from node.drill import drilled_engine, drilled_weights, require_enrolled
from node.engine import Engine, WeightSource
from node.explanation import ban_in_words
from node.home import Home
from node.join import PROFILE, check_protocol, greeting
from node.membership import Membership
from node.weights import Chunks, Published, Weights, fetch_model
from protocol.api import E_NODE_BANNED
from protocol.client import CoordinatorClient
from protocol.clock import Clock
from protocol.errors import E_EXPIRED, LocalFault, PeerFault, code
from protocol.identity import Identity
from protocol.messages import CheckpointManifest, RunManifest, SamplingRules
from protocol.weights.cache import ChunkCache
from protocol.weights.layout import Layout
from protocol.weights.pool import SourcePool
from protocol.weights.sources import HttpSource, source_at

E_NODE_PROFILE = code("E_NODE_PROFILE", "the run has no thresholds for this node's engine profile")

_LOG = logging.getLogger(__name__)


class EngineFactory(Protocol):
    """Makes an engine; the torch engine is imported only by its factory."""

    def __call__(
        self, model_dir: Path, layout: Layout, rules: SamplingRules, source: WeightSource, *, slots: int, threads: int
    ) -> Engine:
        """An engine for the model in ``model_dir`` that follows ``source``."""
        ...


def torch_engine(
    model_dir: Path, layout: Layout, rules: SamplingRules, source: WeightSource, *, slots: int, threads: int
) -> Engine:
    """The engine on torch and transformers, on the CPU."""
    import torch

    from node.torch_engine import TorchEngine

    torch.set_num_threads(threads)
    return TorchEngine(model_dir, layout, rules, source, slots=slots)


def connect(home: Home, config: NodeConfig, clock: Clock) -> CoordinatorClient:
    """A client for the run the home is pinned to.

    Raises:
        LocalFault: ``E_HOME``, ``E_KEY_FILE``.
    """
    pin = home.pin()
    return CoordinatorClient(
        pin.coordinator, home.identity(), run_id=pin.run_id, clock=clock, deadline_s=config.request_deadline_s
    )


def assemble(
    home: Home, config: NodeConfig, client: CoordinatorClient, clock: Clock,
    make_engine: EngineFactory = torch_engine,
) -> Daemon:
    """A daemon that is ready to run.

    Raises:
        LocalFault: ``E_HOME``, ``E_KEY_FILE``, ``E_NODE_OUTDATED``, ``E_NODE_PROFILE``, ``E_MODEL_CONFIG``.
        PeerFault: ``E_NODE_BANNED``, ``E_DRILL_NOT_ENROLLED``, ``E_EXPIRED`` (the run is over), ``E_SIGNATURE``.
        Transient: ``E_UNREACHABLE``.
    """
    run, identity = home.manifest(), home.identity()
    check_run(run, clock)
    _register(run, identity, home, client, clock)
    if config.drill is not None:
        require_enrolled(config.drill, client.node(identity.id))
        _LOG.warning("this node is a drill and cheats on purpose: %s", config.drill)
    layout = fetch_model(client, run, home.model)
    pool = open_pool(home, config, client, clock)
    membership = Membership(config, run, identity, client, pool, clock)
    weights = open_weights(
        home, config, run, layout, membership.published(client), membership.chunks, clock
    )
    source = drilled_weights(config.drill, weights, layout)
    honest = make_engine(
        home.model, layout, run.sampling, source, slots=config.batch, threads=config.threads
    )
    engine = drilled_engine(config.drill, honest, run.sampling)
    return Daemon(Parts(home, config, run, identity, client, weights, membership, engine, clock))


def check_run(run: RunManifest, clock: Clock) -> None:
    """Whether this node can take part in the run.

    Raises:
        LocalFault: ``E_NODE_OUTDATED``, ``E_NODE_PROFILE``, ``E_HASH_MISSING``.
        PeerFault: ``E_EXPIRED``, ``E_HASH_UNKNOWN``.
    """
    check_protocol(run)
    if clock.now_ms() > run.expires_at_ms:
        raise PeerFault(E_EXPIRED, "the run's manifest is past its expiry", got=run.expires_at_ms)
    names = [profile.name for profile in run.profiles]
    if PROFILE not in names:
        raise LocalFault(E_NODE_PROFILE, "no such profile in this run", expected=", ".join(names), got=PROFILE)


def open_pool(home: Home, config: NodeConfig, client: CoordinatorClient, clock: Clock) -> SourcePool:
    """Chunks of weights from the coordinator and the mirrors, kept in the home.

    Raises:
        LocalFault: ``E_STORE``, ``E_STORE_URL`` for an address among the mirrors that makes no sense.
    """
    sources = [HttpSource.coordinator(client.base_url), *map(source_at, config.mirrors)]
    return SourcePool(sources, ChunkCache(home.chunks, max_bytes=config.chunk_cache_mb * 2**20), clock=clock)


def open_weights(
    home: Home, config: NodeConfig, run: RunManifest, layout: Layout, published: Published, chunks: Chunks, clock: Clock
) -> Weights:
    """The run's weights as far as the home holds them; ``state.json`` follows them."""

    def write_state(manifest: CheckpointManifest) -> None:
        home.write_state(manifest.version, manifest.state_root, clock.now_ms())

    weights = Weights(published, chunks, run, layout, home.weights, threads=config.threads, on_version=write_state)
    weights.restore()
    return weights


def _register(run: RunManifest, identity: Identity, home: Home, client: CoordinatorClient, clock: Clock) -> None:
    reply = client.register(greeting(run, identity, home.pin().name, clock, token=None))
    if reply.state == "banned":
        record = client.node(identity.id)
        raise PeerFault(
            E_NODE_BANNED, f"this node is banned: {ban_in_words(record)}",
            hint=f"assay node explain --home {home.path}" if record.get("ban_receipt_id") else "ask the operator",
        )
