"""Metrics, explanations, settings, the command line, and the files of the work directory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from learner.cli import app
from learner.config import LearnerConfig, LossConfig, Preset
from learner.corrections import PRESETS
from learner.disk import whole_directory
from learner.explain import explain_memory, explain_rules, explain_step
from learner.journal import Journal
from learner.metrics import as_micro, finite, warnings_of
from learner.publisher import Publisher
from protocol.config import load_config, parse_assignment
from protocol.disk import json_lines
from protocol.errors import E_CONFIG, E_NOT_FOUND, E_UNREACHABLE, LocalFault, Transient
from protocol.store import DirectoryStore
from tests.fakes.learning import LEARNER, FakeCoordinator, load_model, make_learner, run_manifest, stocked


@pytest.fixture(scope="module")
def done(model_dir, tmp_path_factory) -> Path:
    """A work directory after two versions."""
    work, store = tmp_path_factory.mktemp("work"), DirectoryStore(tmp_path_factory.mktemp("store"))
    make_learner(work, model_dir, store, stocked(model_dir, store, 4)).run(2)
    return work


# -- settings ----------------------------------------------------------------------------------------------


def test_presets_of_the_configuration_are_those_of_the_losses():
    assert set(get_args(Preset)) == set(PRESETS)
    for preset in PRESETS:
        assert LossConfig(preset=preset).preset == preset
    with pytest.raises(ValueError, match="preset"):
        LossConfig(preset="ppo2")


def test_settings_come_from_assignments(tmp_path):
    overrides = dict(map(parse_assignment, ["loss.preset=tis", "optim.lr=3e-4", "batch.share_prompts=false"]))
    config, provenance = load_config(LearnerConfig, None, "ASSAY_LEARNER_", overrides, {})
    assert (config.loss.preset, config.optim.lr, config.batch.share_prompts) == ("tis", 3e-4, False)
    assert provenance["loss.preset"] == "flag"
    with pytest.raises(LocalFault) as caught:
        load_config(LearnerConfig, None, "ASSAY_LEARNER_", {"loss.presets": "tis"}, {})
    assert caught.value.code == E_CONFIG


def test_only_what_changes_a_version_is_in_the_digest():
    base = LearnerConfig()
    threads = LearnerConfig.model_validate({"process": {"poll_ms": 99}})
    rate = LearnerConfig.model_validate({"optim": {"lr": 2e-5}})
    assert base.learning_sha256() == threads.learning_sha256() != rate.learning_sha256()


# -- metrics -----------------------------------------------------------------------------------------------


def test_what_is_not_finite_never_reaches_json_or_a_receipt():
    metrics = {
        "loss": math.nan, "ess": math.inf, "kl": 0.25, "tokens": 7, "skipped": None, "by_lag": {"1": {"kl": math.nan}},
    }
    assert as_micro(metrics) == {"kl": 250_000, "tokens": 7_000_000, "skipped": 0}
    assert as_micro({"skipped": "no_signal"}) == {"skipped": 1_000_000}
    json.dumps(finite(metrics), allow_nan=False)
    assert finite(metrics)["by_lag"]["1"]["kl"] is None


def test_warnings_are_in_words():
    fine = {"ess": 0.9, "head_mass_q": 0.99, "skipped": None}
    assert warnings_of(fine) == []
    assert "effective sample size" in warnings_of(fine | {"ess": 0.1})[0]
    assert "head_size" in warnings_of(fine | {"head_mass_q": 0.5})[0]
    assert "non_finite_loss" in warnings_of(fine | {"skipped": "non_finite_loss", "ess": None})[0]


# -- words -------------------------------------------------------------------------------------------------


def test_explain_step(done):
    journal = Journal(done)
    text = "\n".join(explain_step(journal, 2))
    assert "Version 2 comes from version 1 and 2 groups" in text
    assert "started 1 versions back" in text
    assert "everybody was told" in text
    assert "the run's first" in explain_step(journal, 0)[0]
    with pytest.raises(LocalFault) as caught:
        explain_step(journal, 9)
    assert caught.value.code == E_NOT_FOUND


def test_explain_rules_and_memory(model_dir):
    layout, _ = load_model(model_dir)
    rules = "\n".join(explain_rules(LearnerConfig(), run_manifest(layout, max_versions=9)))
    assert "2 groups of 4 samples" in rules
    assert "complete at version 9" in rules
    assert "MiB" in explain_memory(LearnerConfig(), layout, 40)[-1]


def test_the_command_line(done, tmp_path):
    runner = CliRunner()
    result = runner.invoke(app, ["explain-step", "1", "--work", str(done)])
    assert result.exit_code == 0
    assert "Version 1 comes from version 0" in result.output
    assert runner.invoke(app, ["explain-step", "1"]).exit_code == 2
    assert runner.invoke(app, ["init-model", "--preset", "huge", "--out", str(tmp_path / "m")]).exit_code == 2
    assert runner.invoke(app, ["run", "--help"]).exit_code == 0


# -- files -------------------------------------------------------------------------------------------------


def test_a_torn_line_is_ended_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"version": 1}\n{"versi')
    journal = Journal(tmp_path)
    journal.write_metrics({"version": 2})
    journal.write_metrics({"version": 3})
    assert [line["version"] for line in json_lines(path)] == [1, 2, 3]


def test_a_directory_is_there_whole_or_not_at_all(tmp_path):
    with pytest.raises(ZeroDivisionError), whole_directory(tmp_path / "d") as folder:
        (folder / "a").write_text(str(1 / 0))
    assert not (tmp_path / "d").exists()
    for content in ("one", "two"):
        with whole_directory(tmp_path / "d") as folder:
            (folder / "a").write_text(content)
        assert (tmp_path / "d" / "a").read_text() == content


def test_a_damaged_journal_is_named(done, tmp_path):
    (tmp_path / "batches" / "00000001").mkdir(parents=True)
    (tmp_path / "batches" / "00000001" / "plan.json").write_text("{}")
    with pytest.raises(LocalFault, match="damaged"):
        Journal(tmp_path).plan(1)


# -- heartbeat ---------------------------------------------------------------------------------------------


def test_the_head_is_signed_again_and_again(done, model_dir, tmp_path, clock):
    layout, state = load_model(model_dir)
    client = FakeCoordinator()
    config = LearnerConfig.model_validate({"publish": {"heartbeat_ms": 100, "head_ttl_ms": 5000}}).publish
    publisher = Publisher(client, DirectoryStore(tmp_path), LEARNER, run_manifest(layout), layout, config, clock)
    publisher.beat()
    assert client.heads == []
    made = publisher.make(None, None, state)
    publisher.tell(0, made.envelope, None)
    clock.advance(2)
    failures = iter([True, False])

    def fail_once(name: str) -> None:
        if next(failures, False):
            raise Transient(E_UNREACHABLE, "away")

    client.on_call = fail_once
    publisher.start()
    publisher._stop.wait(0.5)
    publisher.close()
    assert len(client.heads) >= 2
    assert client.heads[-1].issued_at_ms == client.heads[0].issued_at_ms + 2000
    assert client.heads[-1].expires_at_ms == client.heads[-1].issued_at_ms + 5000
    assert client.heads[-1].manifest_sha256 == made.envelope.digest
