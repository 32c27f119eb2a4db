"""From the first process to the summary: runs a network to its end and says what came of it."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from coordinator.up_evidence import collect_evidence, save_log
from coordinator.up_network import Network
from coordinator.up_plan import write_json
from coordinator.up_summary import (
    Summary,
    in_words,
    is_final,
    read_audit_weights,
    read_summary,
    roots_equal,
    summarise,
)
from coordinator.up_view import View
from protocol.client import CoordinatorClient
from protocol.errors import AssayError


@dataclass(frozen=True)
class Report:
    """How a start of ``assay up`` ended."""

    holds: bool  #: the run is complete and kept its promises, or was stopped on request
    lines: list[str]  #: for a human


def conclude(network: Network, view: View) -> Report:
    """Run the network; write ``summary.json`` when the run is over.

    That of a run that was complete before stays as it was, and so does its running time.
    """
    summary: Summary | None = None
    earlier = read_summary(network.folder.summary)
    kept = False
    try:
        network.prepare()
        if not network.asked_to_stop:
            network.start()
        complete = not network.asked_to_stop and network.watch()
        if not network.asked_to_stop:
            summary = _sum_up(network, view)
            if summary is not None and earlier is not None and complete and is_final(earlier, summary):
                summary, kept = earlier, True
            if summary is not None and not kept:
                write_json(network.folder.summary, summary.model_dump())
    finally:
        network.drain()
        if not kept:
            network.folder.save(network.choices.model_copy(update={"wall_s": round(network.wall_s, 1)}))
    path = network.folder.path
    if summary is None:
        go_on = f"{called()} up {path}"
        view.event("stopped", {"go_on_with": go_on})
        return Report(holds=True, lines=[f"Stopped. Go on with: {go_on}"])
    files, commands = _files(network), _commands(network)
    view.event("summary", {**summary.model_dump(), "files": files, "audit_commands": commands})
    holds = complete and summary.roots_equal and summary.honest_nodes_banned == 0
    return Report(holds, [*in_words(summary), *_where(files, commands)])


def _sum_up(network: Network, view: View) -> Summary | None:
    if network.status is None:
        return None
    with CoordinatorClient(network.url, None, deadline_s=10.0) as client:
        try:
            network.look()
            evidence = collect_evidence(client, network.folder, network.status)
            save_log(client, network.folder, network.link.root)
            root = network.newest_root(client)
        except AssayError as error:
            view.event("incomplete", {"why": str(error)})
            evidence, root = {}, ""
    for attack, file in evidence.items():
        view.event("evidence", {"attack": attack, "file": str(file)})
    homes = [network.folder.home(name) for name in network.honest]
    return summarise(
        network.status, honest=network.honest, drills=network.choices.drills,
        roots_equal=roots_equal(homes, root), wall_s=network.wall_s,
        audit_weights=read_audit_weights(network.folder.verifier / "metrics.prom"),
    )


def called() -> str:
    """How to call the command from here: by name when it is on the path, else by its file."""
    script = Path(sys.executable).with_name("assay")
    found = shutil.which("assay")
    if (found is not None and Path(found) == script) or not script.exists():
        return "assay"
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


def _files(network: Network) -> dict[str, str | list[str]]:
    """Where everything is, by what it is."""
    folder = network.folder
    found: dict[str, str | list[str]] = {
        "summary": str(folder.summary), "events": str(folder.events), "logs": str(folder.log("*")),
    }
    if folder.run_log.exists():
        found["log"] = str(folder.run_log)
    found["evidence"] = [str(file) for file in sorted(folder.evidence.glob("*"))]
    return found


def _commands(network: Network) -> list[str]:
    """How to audit what was kept."""
    folder, root = network.folder, network.link.root
    store = folder.coordinator / "store"
    commands = [
        f"{called()} audit {file} --checkpoint {store} --root {root}" for file in sorted(folder.evidence.glob("*"))
    ]
    if folder.run_log.exists():
        commands.append(f"{called()} audit run {folder.run_log} --root {root}")
    return commands


def _where(files: dict[str, str | list[str]], commands: list[str]) -> list[str]:
    lines = ["", *(f"{what:<10}{path}" for what, path in files.items() if isinstance(path, str))]
    evidence = [Path(file) for file in files["evidence"]]
    if evidence:
        lines.append(f"evidence  {evidence[0].parent} ({', '.join(file.name for file in evidence)})")
    if commands:
        lines += ["", "Audit it yourself:", *(f"  {command}" for command in {commands[0]: 0, commands[-1]: 0})]
    return lines
