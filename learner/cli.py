"""``assay learner``: run the learner, look at its steps, make a first model."""

from __future__ import annotations

import json
import os
import signal
import threading
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from learner.config import LearnerConfig
    from protocol.messages import RunManifest

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train on verified rollouts and publish checkpoints.",
)


class ModelPreset(StrEnum):
    """First models that can be made here."""

    TINY = "tiny"
    SMOLLM2 = "smollm2"


@app.command(epilog="Example: assay learner run --coordinator http://127.0.0.1:8700 --root HEX --key keys/learner.key "
                    "--store dir:store --model model --work learner --set loss.preset=tis+sc")
def run(
    coordinator: Annotated[str, typer.Option(help="URL of the coordinator.")],
    key: Annotated[Path, typer.Option(help="Key file of the learner.")],
    root: Annotated[str, typer.Option(help="Root public key of the run, hex.")],
    store: Annotated[str, typer.Option(help="Object store: dir:PATH or s3://BUCKET/PREFIX.")],
    model: Annotated[Path, typer.Option(help="Hugging Face folder with the run's first weights.")],
    work: Annotated[Path, typer.Option(help="Work directory: journal, resume points, metrics.jsonl.")],
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    max_versions: Annotated[int | None, typer.Option(min=0, help="Stop after this version.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="A setting, for example loss.preset=tis+sc; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and end.")] = False,
    log: Annotated[Path | None, typer.Option(
        "--log", "--log-file", help="Log file (JSON lines); else standard error. torchrun needs the longer name.",
    )] = None,
) -> None:
    """Train until the run is complete. SIGTERM stops cleanly; the same command goes on from there."""
    from learner.config import LearnerConfig
    from learner.places import Places, learner_key, open_run
    from protocol.client import CoordinatorClient
    from protocol.clock import SystemClock
    from protocol.config import load_config, parse_assignment
    from protocol.identity import Identity
    from protocol.logs import setup_logging

    settings, provenance = load_config(
        LearnerConfig, config, "ASSAY_LEARNER_", dict(parse_assignment(text) for text in assignments or [])
    )
    places, clock, stop = Places(coordinator, key, root, store, model, work), SystemClock(), threading.Event()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank > 0:
        if not dry_run:
            _serve_rank(model, settings, log, rank)
        return
    with CoordinatorClient(coordinator, Identity.load(key), clock=clock) as client:
        manifest = open_run(client, root, clock.now_ms())
        client.run_id = manifest.run_id
        learner_key(client, manifest)
        if dry_run:
            _print_plan(model, settings, provenance, manifest, size)
            return
        setup_logging(log)
        _stop_on_signals(stop)
        from learner.assembly import assemble, joined

        with joined(settings.process) as ranks:
            learner = assemble(places, settings, client, manifest, clock, stop.is_set, ranks)
            outcome = learner.run(max_versions)
            learner.trainer.close()
    print(f"{outcome} at version {learner.version}")


def _serve_rank(model: Path, settings: LearnerConfig, log: Path | None, rank: int) -> None:
    """Any rank but the first. It ends when the first says so: SIGTERM goes to all of them at once."""
    from protocol.logs import setup_logging

    setup_logging(log and log.with_name(f"{log.name}.{rank}"))
    _stop_on_signals(threading.Event())
    from learner.assembly import joined, serve_rank

    with joined(settings.process) as ranks:
        serve_rank(model, settings, ranks)


@app.command("explain-step", epilog="Example: assay learner explain-step 12 --work learner")
def explain_step_command(
    version: Annotated[int, typer.Argument(min=0, help="Version that the step made.")],
    work: Annotated[Path, typer.Option(help="Work directory of the learner.", exists=True, file_okay=False)],
) -> None:
    """Say in words which rollouts made a version and what the step did."""
    from learner.explain import explain_step
    from learner.journal import Journal

    print("\n".join(explain_step(Journal(work), version)))


@app.command("replay", epilog="Example: assay learner replay 12 --work learner --model model --store dir:store "
                              "--root HEX")
def replay_command(
    version: Annotated[int, typer.Argument(min=0, help="Version to make again.")],
    work: Annotated[Path, typer.Option(help="Work directory of the learner.", exists=True, file_okay=False)],
    model: Annotated[Path, typer.Option(help="Hugging Face folder with the run's first weights.")],
    store: Annotated[str, typer.Option(help="Object store with the run's bundles.")],
    root: Annotated[str, typer.Option(help="Root public key of the run, hex.")],
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch; as many as the learner had.")] = 1,
) -> None:
    """Make a version again from the record and compare it, bit by bit, with what was published."""
    from learner.checkpoint import ResumePoints
    from learner.journal import Journal
    from protocol.identity import root_key
    from protocol.root_trust import open_run_manifest
    from protocol.store import open_store

    journal = Journal(work)
    manifest = open_run_manifest(journal.run(), root_key(root))
    import torch

    from learner.replay import E_LEARNER_REPLAY, Replay, first_trainer
    from protocol.errors import LocalFault

    torch.set_num_threads(threads)
    replay = Replay(journal, ResumePoints(work), open_store(store), manifest, first_trainer(model, manifest))
    for step in replay.versions(version):
        print(f"version {step.version}: published {step.published_root}, made again {step.root}"
              + (f" (step skipped: {step.skipped})" if step.skipped else ""))
        if not step.agrees:
            raise LocalFault(
                E_LEARNER_REPLAY, f"version {step.version} is not what its record makes", expected=step.published_root,
                got=step.root,
                hint="if threads, processor family and torch are the learner's, the record was changed",
            )
    print(f"version {version} follows from its record")


@app.command("steps", epilog="Example: assay learner steps --work learner --watch")
def steps_command(
    work: Annotated[Path, typer.Option(help="Work directory of the learner.", exists=True, file_okay=False)],
    last: Annotated[int, typer.Option(min=1, help="How many versions to show.")] = 20,
    watch: Annotated[bool, typer.Option("--watch", help="Go on showing until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per version, with everything.")] = False,
) -> None:
    """Show the last steps as a table, the newest by lag, and warnings in words."""
    from rich.console import Console
    from rich.live import Live

    from learner.journal import Journal
    from learner.table import WIDE, steps_table
    from protocol.clock import SystemClock

    if as_json and watch:
        raise typer.BadParameter("--json cannot --watch: ask again instead", param_hint="--json")
    journal, clock, console = Journal(work), SystemClock(), Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    if as_json:
        print("\n".join(json.dumps(metrics) for metrics in journal.metrics()[-last:]))
        return
    if not watch:
        console.print(steps_table(journal.metrics()[-last:], console))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(steps_table(journal.metrics()[-last:], console), refresh=True)
            clock.sleep(1.0)


@app.command("plot", epilog="Example: assay learner plot --work learner --out learner.html")
def plot_command(
    work: Annotated[Path, typer.Option(help="Work directory of the learner.", exists=True, file_okay=False)],
    out: Annotated[Path, typer.Option(help="HTML file to write; it needs no other file and no network.")],
) -> None:
    """Draw the metrics of all versions as one self-contained page."""
    from learner.disk import write_file
    from learner.journal import Journal
    from learner.plot import page
    from protocol.paths import check_output_file

    check_output_file("--out", out, [("--work", work)])
    lines = Journal(work).metrics()
    write_file(out, page(lines, f"learner in {work.resolve().name}: {len(lines)} versions").encode())
    print(f"{len(lines)} versions in {out}")


@app.command("init-model", epilog="Example: assay learner init-model --preset tiny --out model")
def init_model_command(
    preset: Annotated[ModelPreset, typer.Option(help="Which model to make.")],
    out: Annotated[Path, typer.Option(help="Folder to make; it must not exist or be empty.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and of the warm-up.")] = 0,
) -> None:
    """Make a run's first model: a small one on the spot, or SmolLM2 from its Python package."""
    from learner.genesis import init_model

    typer.echo(f"making the {preset.value} model (up to a minute) ...", err=True)
    init_model(preset.value, out, seed)
    print(f"{preset.value} model in {out}")


def _print_plan(model: Path, settings: LearnerConfig, provenance: dict[str, str], manifest: RunManifest,
                processes: int) -> None:
    from learner.explain import explain_memory, explain_rules
    from learner.places import read_model
    from protocol.config import flatten

    for name, value in flatten(settings.model_dump(mode="json")):
        print(f"{name} = {value}  ({provenance[name]})")
    layout, _ = read_model(model)
    memory = explain_memory(settings, layout, manifest.sampling.vocab_size, processes)
    for line in [*explain_rules(settings, manifest), *memory]:
        print(line)


def _stop_on_signals(stop: threading.Event) -> None:
    """First SIGTERM or SIGINT: stop cleanly. A second one ends the process at once."""

    def handle(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
