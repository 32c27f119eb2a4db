"""``assay verifier``: arguments and exit codes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Final

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
    with (
        CoordinatorClient(settings.coordinator, identity, deadline_s=settings.request_deadline_s) as client,
        start(settings, client, identity, clock) as worker,
    ):
        worker.run(lambda: bool(stops))


_CALIBRATE: Final = (
    "Example: assay verifier calibrate honest/ --profile torch-cpu-bf16 --checkpoint run/store --root HEX "
    "--key run/keys/verifier.key --out bf16.calibration"
)


@app.command(epilog=_CALIBRATE)
def calibrate(
    evidence: Annotated[list[Path], typer.Argument(exists=True, help="Evidence files of honest rollouts, or folders.")],
    profile: Annotated[str, typer.Option(help="Profile of the nodes that made them.")],
    checkpoint: Annotated[list[Path], typer.Option(exists=True, file_okay=False, help="As for assay audit.")],
    root: Annotated[str, typer.Option(help="Root public key of the run, hex.")],
    key: Annotated[Path, typer.Option(help="File with the verifier's signing key.")],
    out: Annotated[Path, typer.Option(help="Where the signed record goes.")],
    headroom: Annotated[
        float, typer.Option(min=1, max=1000, help="Limits, as a multiple of what is above quantisation.")
    ] = 10.0,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads of the recomputation.")] = 1,
) -> None:
    """Measure what honest rollouts of a node profile look like to this verifier, and sign it.

    The operator puts the record into a run with `assay coordinator init --calibration FILE`.
    """
    from protocol.clock import SystemClock
    from protocol.identity import Identity, root_key
    from protocol.paths import check_input_file, check_output_file, replacing
    from verifier.calibrate import evidence_below, make_record, measure_files
    from verifier.calibration_table import print_record
    from verifier.material import Material

    files = sorted(file for path in evidence for file in (evidence_below(path) if path.is_dir() else [path]))
    inputs = [("the evidence", file) for file in files] + [("--checkpoint", folder) for folder in checkpoint]
    for file in files:
        check_input_file("the evidence", file)
    check_output_file("--out", out, [*inputs, ("--key", key)])
    trusted, identity, material = root_key(root), Identity.load(key), Material.of(checkpoint)
    measured = None
    for number, measured in enumerate(measure_files(files, trusted, profile, material, threads), start=1):
        seen = f"{len(measured.residuals)} rollouts of {len(measured.groups)} prompts"
        print(f"\r{number} of {len(files)} files, {seen}", end="", flush=True)
    print()
    record = make_record(measured, profile, identity, SystemClock().now_ms(), headroom=headroom)
    with replacing(out) as record_file:
        record_file.write(record.sign(identity).to_bytes())
    print_record(record, out)
    measured_run = None if measured is None else measured.run
    if measured_run is not None and identity.public_key.hex() not in measured_run.roles.verifiers:
        print(f"note: {key} is no verifier's key of the run that was measured", file=sys.stderr)
