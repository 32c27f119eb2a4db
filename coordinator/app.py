"""The FastAPI application around one coordinator."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio.to_thread
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from coordinator.config import CoordinatorConfig
from coordinator.coordinator import Coordinator
from coordinator.database import Database
from coordinator.edge import RateLimit, RequestIds, install_problem_handlers
from coordinator.keyring import Keyring
from coordinator.prompts import Prompts, TaskPrompts
from coordinator.routes import admin, log, nodes, objects, public, trusted
from coordinator.run import Run
from protocol.clock import Clock, SystemClock
from protocol.envelope import Envelope
from protocol.errors import E_CONFIG, LocalFault
from protocol.store import Store, open_store

_DASHBOARD: Final = Path(__file__).parent / "dashboard" / "index.html"


def create_app(
    config: CoordinatorConfig,
    *,
    clock: Clock | None = None,
    store: Store | None = None,
    prompts: Prompts | None = None,
) -> FastAPI:
    """The service for the run in ``config.directory``.

    Args:
        clock, store, prompts: replace the machine's clock, the configured store and the run's tasks.

    Raises:
        LocalFault: the directory is not a run's, or its database is damaged (``E_DATABASE_DAMAGED``) or has another
            schema.
        PeerFault: its manifest is not signed by its root key.
    """
    coordinator = open_coordinator(config, clock=clock or SystemClock(), store=store, prompts=prompts)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        coordinator.start()
        yield
        await anyio.to_thread.run_sync(coordinator.close)

    app = FastAPI(
        title="Assay coordinator", version="1", lifespan=lifespan, docs_url=None, redoc_url=None,
        description="Leases, submissions, verdicts, checkpoints and the books of one run. Spec: docs/spec/http-api.md",
    )
    app.state.coordinator = coordinator
    install_problem_handlers(app)
    app.add_middleware(
        RateLimit, clock=coordinator.clock, rate_per_s=config.rate_per_s, burst=config.rate_burst
    )
    app.add_middleware(RequestIds)
    for part in (public, log, nodes, trusted, objects, admin):
        app.include_router(part.router)
    page = _DASHBOARD.read_text(encoding="utf-8")
    headers = page_headers(page)

    @app.get("/", response_class=HTMLResponse, tags=["operation"])
    def dashboard() -> HTMLResponse:
        """The live page."""
        return HTMLResponse(page, headers=headers)

    return app


def page_headers(page: str) -> dict[str, str]:
    """Headers under which the page may run its own script, by hash, and reach nothing but this server."""
    script = page.split("<script>", 1)[1].split("</script>", 1)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def open_coordinator(
    config: CoordinatorConfig, *, clock: Clock, store: Store | None = None, prompts: Prompts | None = None
) -> Coordinator:
    """Open the run in ``config.directory``; raises as :func:`create_app`."""
    keyring = Keyring.load(config.directory)
    run = open_run(config.directory)
    if keyring.identity.public_key.hex() != run.manifest.roles.coordinator:
        raise LocalFault(
            E_CONFIG, "the coordinator's key is not the one that the run manifest names",
            expected=run.manifest.roles.coordinator[:16], got=keyring.identity.public_key.hex()[:16],
        )
    database = Database(config.database)
    database.check_whole()
    database.check_schema()
    objects_store = store or open_store(config.store)
    return Coordinator(
        config, run, keyring, database, objects_store,
        prompts or TaskPrompts(run.manifest, objects_store.get, config.directory / "tokenizer"), clock,
    )


def open_run(directory: Path) -> Run:
    """The run of a directory: its manifest, checked with the root key beside it.

    Raises:
        LocalFault: ``E_CONFIG`` when the files are missing.
        PeerFault: the manifest is not signed by that root key.
    """
    try:
        data = (directory / "manifest.json").read_bytes()
        root_key = (directory / "root.pub").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LocalFault(
            E_CONFIG, f"{directory} is not the directory of a run", got=str(error),
            hint="assay coordinator init DIR makes one",
        ) from None
    return Run.open(Envelope.from_bytes(data), root_key)

