"""What lies in deploy/ fits the code it deploys."""

import json
import re
from pathlib import Path

import pytest

import assay


def test_the_dashboard_asks_only_for_metrics_that_exist(root: Path) -> None:
    board = json.loads((root / "deploy" / "grafana" / "assay.json").read_text())
    asked = set(re.findall(r"\bassay_[a-z_]+", json.dumps(board["panels"])))
    source = (root / "coordinator" / "metrics.py").read_text()
    offered = set(re.findall(r'"(assay_[a-z_]+)"', source))
    assert asked
    assert {name.removesuffix("_total") for name in asked} <= offered


@pytest.mark.parametrize("part", ["coordinator", "node", "verifier", "learner"])
def test_units_call_commands_and_options_that_exist(root: Path, part: str) -> None:
    import importlib

    import typer

    unit = (root / "deploy" / "systemd" / f"assay-{part}.service").read_text()
    words = next(line for line in unit.splitlines() if line.startswith("ExecStart=")).split()[1:]
    assert words[0] == part
    group = typer.main.get_command(importlib.import_module(assay.PARTS[part][0]).app)
    command = group.commands[words[1]]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert "KillSignal=SIGTERM" in unit
    assert "NoNewPrivileges=yes" in unit


def test_no_unit_is_started_again_after_a_status_that_is_final(root: Path) -> None:
    from node.cli import REFUSED

    for part in ("coordinator", "node", "verifier", "learner"):
        unit = (root / "deploy" / "systemd" / f"assay-{part}.service").read_text()
        final = re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
        assert final == [f"2 {REFUSED}" if part == "node" else "2"]


def test_the_learner_gets_the_settings_of_its_run(root: Path) -> None:
    unit = (root / "deploy" / "systemd" / "assay-learner.service").read_text()
    assert "--config /var/lib/assay/learner.toml" in unit


def test_the_container_holds_every_part(root: Path) -> None:
    text = (root / "deploy" / "container" / "Containerfile").read_text()
    for part in ("protocol", "node", "verifier", "learner", "coordinator"):
        assert f"COPY {part} {part}" in text
