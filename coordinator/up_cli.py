"""``assay up``: a whole network on this machine."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from coordinator.presets import Preset

app = typer.Typer(
    rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.command(epilog="Example: assay up demo --preset tiny")
def up(
    directory: Annotated[Path, typer.Argument(help="Folder of the run; an earlier run in it is gone on with.")],
    preset: Annotated[str | None, typer.Option(help="tiny or smollm2 (default: tiny).")] = None,
    task: Annotated[str | None, typer.Option(help="Kind of task instead of the preset's, like gsm8k.")] = None,
    data: Annotated[Path | None, typer.Option(help="The task's data, where it needs some.", exists=True)] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the coordinator; 0: any free one.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of model and learner (default: 0).")] = None,
    max_versions: Annotated[int | None, typer.Option(min=1, help="Versions to publish.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, max=8, help="Honest nodes (default: the preset's).")] = None,
    drills: Annotated[bool, typer.Option("--drills/--no-drills", help="Run nodes that cheat on purpose.")] = True,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", exists=True, help="A record of `assay verifier calibrate`; repeatable."),
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Change the preset, like batch.groups_per_batch=8; repeatable.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines, also on a terminal.")] = False,
) -> None:
    """Run coordinator, learner, verifier, honest nodes and cheating ones here, and watch them.

    Ends by itself with a summary. Ctrl-C drains everything; the same command goes on with the run.
    Exit status: 0 the run is complete or was stopped, 1 something did not hold.
    """
    from coordinator.calibrations import read_record
    from coordinator.foundation import check_data
    from coordinator.locks import FolderLock
    from coordinator.preset_settings import with_settings
    from coordinator.presets import preset as preset_of
    from coordinator.up_network import Network
    from coordinator.up_plan import Folder, check_port, settle
    from coordinator.up_report import conclude
    from coordinator.up_view import JsonView, LiveView, View
    from protocol.clock import SystemClock

    for file in calibration or ():
        read_record(file)  # before a folder is made that remembers it
    folder = Folder(directory)

    def base_of() -> Preset:
        earlier = folder.load()
        return with_settings(
            preset_of(preset or (earlier.preset if earlier else "tiny"), task or (earlier.task if earlier else None)),
            assignments or (earlier.settings if earlier else ()),
        )

    folder.claim()
    # A wrong call leaves no folder behind.
    check_data(base_of(), data)
    if port and folder.load() is None:
        check_port(port)
    with FolderLock(folder.lock, "assay up"):
        base = base_of()
        choices = settle(
            folder,
            {
                "preset": preset, "task": task, "data": None if data is None else str(data.resolve()), "port": port,
                "seed": seed, "max_versions": max_versions, "nodes": nodes, "drills": None if drills else (),
                "calibrations": tuple(str(file.resolve()) for file in calibration) if calibration else None,
                "settings": tuple(assignments) if assignments else None,
            },
            {"preset": "tiny", "port": 0, "nodes": base.up.honest_nodes, "drills": base.up.drills},
        )
        as_json = json or not sys.stdout.isatty()
        title = f"assay up {directory}   dashboard http://127.0.0.1:{choices.port}/"
        view: View = JsonView(folder.events) if as_json else LiveView(folder.events, title)
        network = Network(folder, choices, base, view, SystemClock())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: network.ask_to_stop())
        with view:
            report = conclude(network, view)
    if not as_json:
        for line in report.lines:
            print(line)
    if not report.holds:
        raise typer.Exit(1)
