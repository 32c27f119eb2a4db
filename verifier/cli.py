"""``assay verifier``: arguments and exit codes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Check what nodes handed in, and say so with evidence.", no_args_is_help=True, rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def verifier() -> None:
    """Check what nodes handed in, and say so with evidence."""


@app.command(epilog="Example: assay verifier run --coordinator http://127.0.0.1:8700 --key verifier.key --root HEX")
def run(
    coordinator: Annotated[str | None, typer.Option(help="The coordinator's address.")] = None,
    key: Annotated[Path | None, typer.Option(help="File with the verifier's signing key.")] = None,
    root: Annotated[str | None, typer.Option(help="Root public key of the run, hex.")] = None,
    store: Annotated[str | None, typer.Option(help="Read objects here: dir:PATH or s3://BUCKET/PREFIX.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder for the model's files.")] = None,
    device: Annotated[str | None, typer.Option(help="Torch device of the recomputation.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the recomputation.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of the settings.")] = None,
    assign: Annotated[list[str] | None, typer.Option("--set", help="Any setting as name=value.")] = None,
) -> None:
    """Claim submissions, check them, report verdicts. SIGTERM or Ctrl-C: finish the one in hand, exit 0."""
    from protocol.client import CoordinatorClient
    from protocol.clock import SystemClock
    from protocol.config import load_config, parse_assignment
    from protocol.identity import Identity
    from protocol.logs import setup_logging
    from verifier.config import VerifierConfig
    from verifier.worker import start

    flags = {
        "coordinator": coordinator, "key": key, "root": root, "store": store, "work": work, "device": device,
        "threads": threads,
    }
    settings, _ = load_config(
        VerifierConfig, config, "ASSAY_VERIFIER_", flags | dict(parse_assignment(text) for text in assign or [])
    )
    setup_logging(settings.log_file, settings.log_level)
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stops.append(received))
    clock, identity = SystemClock(), Identity.load(settings.key)
    with CoordinatorClient(settings.coordinator, identity, deadline_s=settings.request_deadline_s) as client:
        start(settings, client, identity, clock).run(lambda: bool(stops))
