from __future__ import annotations

from pathlib import Path

import pytest

from protocol.config import Config, load_config
from protocol.errors import LocalFault, exit_status
from protocol.logs import setup_logging


class Loss(Config):
    preset: str = "tis"


class Settings(Config):
    key: Path
    batch: int = 8
    loss: Loss = Loss()


def refused(file: Path | None = None, environ: dict[str, str] | None = None, **flags: object) -> LocalFault:
    with pytest.raises(LocalFault, match="E_CONFIG") as caught:
        load_config(Settings, file, "ASSAY_T_", flags, environ=environ or {})
    return caught.value


def test_an_unknown_setting_is_called_that_and_near_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("bach = 3\n")
    error = refused(tmp_path / "a.toml", key="k")
    assert error.message == f"there is no setting bach (file {tmp_path / 'a.toml'})"
    assert error.expected == "batch"
    assert refused(environ={"ASSAY_T_LOSS__PRESETS": "x"}, key="k").expected == "loss.preset"
    assert refused(environ={"ASSAY_T_PRESET": "x"}, key="k").expected == "loss.preset"
    assert refused(environ={"ASSAY_T_ZZZ": "x"}, key="k").expected == "one of key, batch, loss.preset"


def test_a_setting_that_is_needed_says_how_to_give_it() -> None:
    error = refused()
    assert (error.message, error.got) == ("key is not set", "nothing")
    assert "--help" in str(error.hint)


def test_a_value_that_does_not_fit_names_its_origin() -> None:
    error = refused(environ={"ASSAY_T_BATCH": "many"}, key="k")
    assert (error.message, error.expected, error.got) == (
        "batch (environment ASSAY_T_BATCH) does not fit", "an integer", "'many'",
    )


def test_an_unknown_log_level_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(LocalFault, match="ZORK") as caught:
        setup_logging(tmp_path / "log", "ZORK")
    assert exit_status(caught.value) == 2
    assert "WARNING" in str(caught.value.expected)
    assert not (tmp_path / "log").exists()
