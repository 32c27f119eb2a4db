"""Joining a run by its link: make the key, check the run against the pinned root, register."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Final

from node.home import Home, Pin
from protocol.api import JoinLink
from protocol.client import CoordinatorClient
from protocol.clock import Clock
from protocol.envelope import Envelope
from protocol.errors import E_USAGE, LocalFault, PeerFault, code
from protocol.identity import Identity
from protocol.message import NAME_PATTERN
from protocol.messages import NodeHello, RunManifest
from protocol.weights.state_root import usable_hash

E_NODE_OUTDATED = code("E_NODE_OUTDATED", "this release speaks an older protocol than the run accepts")

#: Version of the protocol this node speaks.
PROTOCOL_VERSION: Final = 1
#: Engine profile of the torch engine.
PROFILE: Final = "torch-cpu-fp32"


@dataclass(frozen=True)
class Joined:
    """What joining came to."""

    node_id: str
    name: str
    run: RunManifest
    state: str  #: what the coordinator says of us: active, banned
    new_key: bool


def join(link: JoinLink, home: Home, client: CoordinatorClient, clock: Clock, *, name: str | None = None) -> Joined:
    """Make ``home`` the home of a node of the run the link names. Repeating it is harmless.

    Raises:
        LocalFault: ``E_USAGE`` for a name that is none, ``E_HOME``, ``E_KEY_FILE``, ``E_NODE_OUTDATED``,
            ``E_HASH_MISSING``.
        PeerFault: ``E_HASH_UNKNOWN``; the coordinator shows a run that the link's root key did not sign, or refuses us.
        Transient: ``E_UNREACHABLE``.
    """
    if name is not None and re.fullmatch(NAME_PATTERN, name) is None:
        raise LocalFault(
            E_USAGE, "not a name for a node", got=name[:80],
            expected="1 to 64 of a-z 0-9 . _ + -, a letter or digit first", hint="--name gpu-box-1, or none at all",
        )
    envelope = client.run_manifest()
    run = _run_of(link, envelope, clock.now_ms())
    check_protocol(run)
    new_key = not home.key.exists()
    identity = Identity.load_or_create(home.key)
    chosen = name or (home.pin().name if home.joined else _host_name(identity))
    hello = greeting(run, identity, chosen, clock, token=link.token)
    client.identity = identity
    reply = client.register(hello)
    home.remember(Pin(coordinator=link.base_url, root=link.root, run_id=link.run_id, name=chosen), envelope)
    return Joined(identity.id, chosen, run, reply.state, new_key)


def _run_of(link: JoinLink, envelope: Envelope, now_ms: int) -> RunManifest:
    try:
        return RunManifest.open(envelope, link.root, run_id=link.run_id, now_ms=now_ms)
    except PeerFault as error:
        raise PeerFault(
            error.code, f"the coordinator's run manifest is not the one the link names: {error.message}",
            expected=f"run {link.run_id}, signed by the root key {link.root}", got=error.got,
            hint="ask the operator for a fresh link; if it says the same, do not trust this coordinator",
        ) from None


def greeting(run: RunManifest, identity: Identity, name: str, clock: Clock, *, token: str | None) -> NodeHello:
    """What a node says when it registers; ``token`` is needed the first time only."""
    return NodeHello(
        run_id=run.run_id, public_key=identity.public_key.hex(), name=name, profile=PROFILE,
        protocol_version=PROTOCOL_VERSION, join_token=token, issued_at_ms=clock.now_ms(),
    )


def check_protocol(run: RunManifest) -> None:
    """Whether this release may take part, and has what it takes.

    Raises:
        LocalFault: ``E_NODE_OUTDATED``, ``E_HASH_MISSING``.
        PeerFault: ``E_HASH_UNKNOWN``.
    """
    if run.protocol_min > PROTOCOL_VERSION:
        raise LocalFault(
            E_NODE_OUTDATED, "the run needs a newer release", expected=f">= {run.protocol_min}", got=PROTOCOL_VERSION,
            hint="update Assay",
        )
    usable_hash(run.model.state_hash)


def _host_name(identity: Identity) -> str:
    """The machine's name as far as the protocol allows, made unique by the key."""
    host = re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower()).strip("-.")[:40] or "node"
    return f"{host}-{identity.id[:6]}"
