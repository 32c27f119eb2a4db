"""Metrics on view: Prometheus, the table, the page of curves."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from learner.cli import app
from learner.event_files import EventFiles, scalars
from learner.exposition import Exposition
from learner.plot import page
from learner.table import steps_table
from protocol.errors import E_CONFIG, LocalFault
from tests.fakes.ports import unclaimed_ports

STEP = {
    "version": 3, "reward_mean": 0.25, "loss": None, "kl": 1e-4, "head_kl": 2e-4, "ess": 0.91, "ess_used": 0.95,
    "ratio_p99": 1.5, "ratio_max": 4.0, "truncated": 0.02, "head_mass_q": 0.97, "lag_mean": 1.5, "lag_max": 3,
    "lag_histogram": {"0": 5, "3": 7}, "groups_left_out": {"no_signal": 2}, "skipped": None, "diff_bytes": 1234,
    "by_lag": {"0": {"tokens": 5, "kl": 1e-9, "ess": 1.0}, "2-3": {"tokens": 7, "kl": 2e-4, "ess": 0.8}},
}
LOW = STEP | {
    "version": 4, "ess": 0.2, "by_lag": {"1": {"tokens": 3, "kl": 0.1, "ess": 0.2}}, "lag_histogram": {"1": 3},
}


def test_prometheus_sees_the_newest_step_only(tmp_path):
    exposition = Exposition(tmp_path / "metrics.prom")
    exposition.show(STEP)
    text = (tmp_path / "metrics.prom").read_text()
    for line in (
        "assay_learner_ess 0.91", 'assay_learner_by_lag_ess{lag="2-3"} 0.8', 'assay_learner_lag_tokens{lag="3"} 7.0',
        'assay_learner_left_out_groups{reason="no_signal"} 2.0', "assay_learner_skipped 0.0",
    ):
        assert line in text.splitlines()
    assert "assay_learner_loss" not in text
    exposition.show(LOW | {"skipped": "non_finite_loss"})
    text = (tmp_path / "metrics.prom").read_text()
    assert 'lag="2-3"' not in text
    assert "assay_learner_skipped 1.0" in text.splitlines()


def test_tensorboard_gets_numbers_and_nothing_else():
    found = scalars(STEP)
    assert found["step/ess"] == 0.91
    assert found["by_lag/kl/2-3"] == 2e-4
    assert found["lag_tokens/3"] == 7
    assert found["left_out/no_signal"] == 2
    assert not {"step/loss", "step/skipped", "step/version", "step/by_lag"} & set(found)


def test_event_files_read_back(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventFiles(tmp_path)
    files.show(STEP)
    files.show(LOW)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("step/ess")] == [
        (3, pytest.approx(0.91)), (4, pytest.approx(0.2))]
    assert [e.step for e in events.Scalars("by_lag/kl/1")] == [4]


def test_tensorboard_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(LocalFault) as caught:
        EventFiles(tmp_path)
    assert caught.value.code == E_CONFIG
    assert "pip install tensorboard" in str(caught.value)


def test_prometheus_over_http(tmp_path):
    [port] = unclaimed_ports(1)
    Exposition(tmp_path / "metrics.prom", port).show(STEP)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert b"assay_learner_ess 0.91" in answer.read()
    with pytest.raises(LocalFault) as caught:
        Exposition(tmp_path / "metrics.prom", port)
    assert caught.value.code == E_CONFIG


def work_dir(folder: Path) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in (STEP, LOW)))
    return folder


def test_the_table_warns_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")  # of no terminal: what is piped is never cut
    result = CliRunner().invoke(app, ["steps", "--work", str(work_dir(tmp_path))], catch_exceptions=False)
    assert result.exit_code == 0
    assert "effective sample size 0.20 is below 0.3" in result.output
    for word in ("0.91", "1,234", "by lag"):
        assert word in result.output
    empty = tmp_path / "empty"
    empty.mkdir()
    assert CliRunner().invoke(app, ["steps", "--work", str(empty)], catch_exceptions=False).exit_code == 0


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_narrow_terminal_does_without_columns_and_says_so(width):
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(steps_table([STEP, LOW], console))
    text = captured.get()
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    for heading in ("version", "reward", "ESS", "lag"):
        assert heading in text
    assert ("not shown" in text) == (width < 200)
    assert "diff B" in text  # as a column or as what is not shown


def test_steps_as_json_hold_everything(tmp_path):
    result = CliRunner().invoke(app, ["steps", "--work", str(work_dir(tmp_path)), "--json", "--last", "1"])
    assert [json.loads(line) for line in result.output.splitlines()] == [LOW]
    assert CliRunner().invoke(app, ["steps", "--work", str(tmp_path), "--json", "--watch"]).exit_code == 2


def test_the_page_needs_nothing_else(tmp_path):
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["plot", "--work", str(work_dir(tmp_path)), "--out", str(out)])
    assert result.exit_code == 0, result.output
    html = out.read_text()
    assert "ess, lag 2-3" in html
    assert "effective sample size" in html
    assert 'src="http' not in html
    assert page([], "nothing yet").startswith("<!doctype html>")


def test_the_page_never_takes_the_place_of_what_it_is_made_of(tmp_path):
    work = work_dir(tmp_path)
    before = {path: path.read_bytes() for path in work.iterdir() if path.is_file()}
    assert before
    for path in before:
        result = CliRunner().invoke(app, ["plot", "--work", str(work), "--out", str(path)])
        assert isinstance(result.exception, LocalFault)
        assert "would overwrite" in result.exception.message
    assert {path: path.read_bytes() for path in work.iterdir() if path.is_file()} == before
