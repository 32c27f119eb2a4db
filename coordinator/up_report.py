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
from coordinator.up_summary import Summary, in_words, read_audit_weights, roots_equal, summarise
from coordinator.up_view import View
from protocol.client import CoordinatorClient
from protocol.errors import AssayError


@dataclass(frozen=True)
class Report:
    """How a start of ``assay up`` ended."""

    holds: bool  #: the run is complete and kept its promises, or was stopped on request
    lines: list[str]  #: for a human


def conclude(network: Network, view: View) -> Report:
    """Run the network; write ``summary.json`` when the run is over."""
    summary: Summary | None = None
    try:
        network.prepare()
        if not network.asked_to_stop:
            network.start()
        complete = not network.asked_to_stop and network.watch()
        if not network.asked_to_stop:
            summary = _sum_up(network, view)
    finally:
        network.drain()
        choices = network.choices.model_copy(update={"wall_s": round(network.wall_s, 1)})
        network.folder.save(choices)
    path = network.folder.path
    if summary is None:
        go_on = f"{called()} up {path}"
        view.event("stopped", {"go_on_with": go_on})
        return Report(holds=True, lines=[f"Stopped. Go on with: {go_on}"])
    view.event("summary", summary.model_dump())
    holds = complete and summary.roots_equal and summary.honest_nodes_banned == 0
    return Report(holds, [*in_words(summary), *_where(network)])


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
    summary = summarise(
        network.status, honest=network.honest, drills=network.choices.drills,
        roots_equal=roots_equal(homes, root), wall_s=network.wall_s,
        audit_weights=read_audit_weights(network.folder.verifier / "metrics.prom"),
    )
    write_json(network.folder.summary, summary.model_dump())
    return summary


def called() -> str:
    """How to call the command from here: by name when it is on the path, else by its file."""
    script = Path(sys.executable).with_name("assay")
    found = shutil.which("assay")
    if (found is not None and Path(found) == script) or not script.exists():
        return "assay"
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


def _where(network: Network) -> list[str]:
    folder = network.folder
    lines = ["", f"summary   {folder.summary}", f"events    {folder.events}", f"logs      {folder.log('*')}"]
    if folder.run_log.exists():
        lines.append(f"log       {folder.run_log}")
    files = sorted(folder.evidence.glob("*")) if folder.evidence.exists() else []
    if files:
        lines += [f"evidence  {folder.evidence} ({', '.join(file.name for file in files)})", "", "Audit it yourself:"]
        store = folder.coordinator / "store"
        lines.append(f"  {called()} audit {files[0]} --checkpoint {store} --root {network.link.root}")
    if folder.run_log.exists():
        lines.append(f"  {called()} audit run {folder.run_log} --root {network.link.root}")
    return lines
