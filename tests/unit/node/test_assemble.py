"""What a node checks before it takes work; joining; the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from node.assemble import assemble
from node.cli import app
from node.config import NodeConfig
from node.home import Home
from node.join import join
from protocol.api import JoinLink
from protocol.clock import SystemClock
from protocol.errors import AssayError, LocalFault
from tests.unit.node.office import ROOT, RUN_ID, FakeCoordinator, FakeEngine, make_home, run_manifest, state_of

LINK = JoinLink("127.0.0.1", 1, ROOT.public_key.hex(), RUN_ID, "a-token-of-a-test")


def fake_engine(model_dir: Path, layout: Any, rules: Any, source: Any, *, slots: int, threads: int) -> FakeEngine:
    return FakeEngine(source, slots)


def build(tmp_path: Path, office: FakeCoordinator, **settings: Any) -> Any:
    home, client = make_home(tmp_path, office.run), office
    config = NodeConfig(home=tmp_path, **settings)
    return assemble(home, config, client, SystemClock(), fake_engine)  # type: ignore[arg-type]


def refusal(tmp_path: Path, office: FakeCoordinator, **settings: Any) -> str:
    with pytest.raises(AssayError) as caught:
        build(tmp_path, office, **settings)
    return caught.value.code


def test_a_joined_home_makes_a_daemon(tmp_path: Path) -> None:
    office = FakeCoordinator()
    daemon = build(tmp_path, office)
    assert daemon.look()["version"] == -1


def test_what_keeps_a_node_from_starting_has_a_name(tmp_path: Path) -> None:
    office = FakeCoordinator(run_manifest(expires_at_ms=1))
    assert refusal(tmp_path / "a", office) == "E_EXPIRED"
    office = FakeCoordinator(run_manifest(protocol_min=2))
    assert refusal(tmp_path / "b", office) == "E_NODE_OUTDATED"
    other = [run_manifest().profiles[0].model_copy(update={"name": "vllm-bf16"})]
    assert refusal(tmp_path / "c", FakeCoordinator(run_manifest(profiles=other))) == "E_NODE_PROFILE"
    office = FakeCoordinator()
    office.state, office.record = "banned", {"ban_reason": "made up tokens", "ban_code": "E_REPLAY"}
    assert refusal(tmp_path / "d", office) == "E_NODE_BANNED"
    assert refusal(tmp_path / "e", FakeCoordinator(), drill="int8") == "E_DRILL_NOT_ENROLLED"


def test_an_enrolled_drill_starts(tmp_path: Path) -> None:
    office = FakeCoordinator()
    office.record = {"state": "active", "drill": "best-of-n"}
    daemon = build(tmp_path, office, drill="best-of-n", batch=8)
    assert daemon.look()["capacity"] == 2


def test_joining_pins_the_run_and_repeating_it_keeps_the_key(tmp_path: Path) -> None:
    home, office = Home(tmp_path / "home"), FakeCoordinator()
    client: Any = office
    first = join(LINK, home, client, SystemClock(), name="worker")
    again = join(LINK, home, client, SystemClock())
    assert first.new_key
    assert not again.new_key
    assert (first.node_id, first.name) == (again.node_id, again.name)
    assert home.pin().root == LINK.root
    assert home.manifest() == office.run


@pytest.mark.parametrize("name", ["Ada", "my node", "a\n", "", "x" * 65, "-x", "é"])
def test_a_name_that_is_none_is_a_wrong_call_and_makes_no_key(tmp_path: Path, name: str) -> None:
    home, client = Home(tmp_path / "home"), FakeCoordinator()
    with pytest.raises(LocalFault, match="a-z 0-9") as caught:
        join(LINK, home, cast(Any, client), SystemClock(), name=name)
    assert caught.value.code == "E_USAGE"
    assert not home.key.exists()


@pytest.mark.parametrize(
    ("link", "code"),
    [
        (JoinLink("h", 1, "22" * 32, RUN_ID, "a-token-of-a-test"), "E_SIGNATURE"),
        (JoinLink("h", 1, ROOT.public_key.hex(), "22" * 16, "a-token-of-a-test"), "E_WRONG_RUN"),
    ],
)
def test_a_run_that_the_link_does_not_name_is_not_joined(tmp_path: Path, link: JoinLink, code: str) -> None:
    home, office = Home(tmp_path / "home"), FakeCoordinator()
    client: Any = office
    with pytest.raises(AssayError) as caught:
        join(link, home, client, SystemClock())
    assert caught.value.code == code
    assert not home.joined


def test_a_run_by_a_hash_that_is_unknown_or_missing_here_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    for name, code in (("md5", "E_HASH_UNKNOWN"), ("blake3", "E_HASH_MISSING")):
        run = run_manifest()
        run = run.model_copy(update={"model": run.model.model_copy(update={"state_hash": name})})
        home, office = Home(tmp_path / name), FakeCoordinator(run)
        client: Any = office
        with pytest.raises(AssayError) as caught:
            join(LINK, home, client, SystemClock())
        assert caught.value.code == code
        assert caught.value.hint
        assert not home.joined


def cli(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_bad_calls_exit_2(tmp_path: Path) -> None:
    home = str(tmp_path)
    make_home(tmp_path, run_manifest())
    code, said = cli("run", "--home", home, "--drill", "steal")
    assert code == 2
    assert "E_CONFIG" in said
    assert "drill" in said
    assert cli("run", "--home", home, "--batch", "0")[0] == 2
    assert cli("run", "--home", home, "--batch", "many")[0] == 2
    assert cli("dance")[0] == 2
    code, said = cli("join", "http://127.0.0.1:8700", "--home", home)
    assert code == 2
    assert "E_JOIN_LINK" in said


def test_a_home_that_is_none_exits_2(tmp_path: Path) -> None:
    for command in ("run", "status", "selftest", "pause", "resume"):
        code, said = cli(command, "--home", str(tmp_path / "none"))
        assert code == 2, (command, said)
        assert "E_NO_HOME" in said
        assert "assay node join LINK" in said


def test_dry_run_says_where_settings_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_home(tmp_path, run_manifest())
    (tmp_path / "node.toml").write_text("poll_s = 3.5\n")
    monkeypatch.setenv("ASSAY_NODE_PREFETCH", "0.25")
    file = str(tmp_path / "node.toml")
    code, said = cli("run", "--home", str(tmp_path), "--batch", "3", "--config", file, "--dry-run")
    assert code == 0
    assert "batch = 3  # flag" in said
    assert "prefetch = 0.25  # environment ASSAY_NODE_PREFETCH" in said
    assert f"poll_s = 3.5  # file {tmp_path / 'node.toml'}" in said
    assert "threads = 1  # default" in said


def test_status_shows_age_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = FakeCoordinator()
    office.publish(state_of(0))
    daemon = build(tmp_path, office)
    now = SystemClock().now_ms()
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: now)
    status = daemon.status() | {"pid": 2**22 + 1, "updated_at_ms": now - 5_000}
    Home(tmp_path).write_status(status)
    code, said = cli("status", "--home", str(tmp_path))
    assert code == 1
    assert "not running" in said
    assert "as of 5 s ago" in said
    assert "why idle" in said
    code, said = cli("status", "--home", str(tmp_path), "--json")
    assert json.loads(said)["running"] is False


def test_pause_and_resume(tmp_path: Path) -> None:
    home = make_home(tmp_path, run_manifest())
    assert cli("pause", "--home", str(tmp_path)) == (0, "paused\n")
    assert home.paused
    assert cli("resume", "--home", str(tmp_path)) == (0, "resumed\n")
    assert not home.paused


def test_no_torch_outside_the_torch_engine(root: Path) -> None:
    script = (
        "import sys, node.cli, node.assemble, node.daemon, node.drill, node.engine, node.scheduler, node.selftest\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=root, timeout=100).returncode == 0
