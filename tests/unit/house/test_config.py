from pathlib import Path

import pytest

from protocol.config import Config, load_config, parse_assignment
from protocol.errors import LocalFault


class Loss(Config):
    preset: str = "pg"
    cap: float = 2.0


class Sample(Config):
    loss: Loss = Loss()
    steps: int = 3
    names: tuple[str, ...] = ()


def test_order_is_defaults_file_environment_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 4\nnames = ['a']\n[loss]\npreset = 'tis'\ncap = 3.0\n")
    environ = {"ASSAY_T_STEPS": "5", "ASSAY_T_LOSS__PRESET": "is", "OTHER": "1"}
    config, origin = load_config(Sample, file, "ASSAY_T_", {"loss.preset": "tis+sc", "steps": None}, environ)
    assert (config.steps, config.loss.preset, config.loss.cap, config.names) == (5, "tis+sc", 3.0, ("a",))
    assert origin == {
        "steps": "environment ASSAY_T_STEPS", "loss.preset": "flag", "loss.cap": f"file {file}",
        "names": f"file {file}",
    }


def test_defaults_need_nothing() -> None:
    config, origin = load_config(Sample, None, "ASSAY_T_", {}, {})
    assert config == Sample()
    assert set(origin.values()) == {"default"}


@pytest.mark.parametrize(
    ("environ", "overrides", "named"),
    [
        ({"ASSAY_T_STEP": "5"}, {}, "step (environment ASSAY_T_STEP)"),
        ({"ASSAY_T_STEPS": "many"}, {}, "steps (environment ASSAY_T_STEPS)"),
        ({}, {"loss.cap": "big"}, "loss.cap (flag)"),
        ({}, {"steps.deep": 1, "steps": 1}, None),
        ({"ASSAY_T_STEPS": "1"}, {"steps.deep": 1}, "steps.deep"),
    ],
)
def test_bad_values_name_the_field_and_its_source(
    environ: dict[str, str], overrides: dict[str, object], named: str | None
) -> None:
    if named is None:
        assert load_config(Sample, None, "ASSAY_T_", overrides, environ)[0].steps == 1
        return
    with pytest.raises(LocalFault) as caught:
        load_config(Sample, None, "ASSAY_T_", overrides, environ)
    assert caught.value.code == "E_CONFIG"
    assert named in str(caught.value)


@pytest.mark.parametrize("content", ["steps = ", "steps = 1\nsteps = 2", "unknown = 1"])
def test_bad_files_are_configuration_faults(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(LocalFault, match="E_CONFIG"):
        load_config(Sample, file, "ASSAY_T_", {}, {})


def test_a_missing_file_is_a_configuration_fault(tmp_path: Path) -> None:
    with pytest.raises(LocalFault, match="cannot read"):
        load_config(Sample, tmp_path / "none.toml", "ASSAY_T_", {}, {})


def test_assignments() -> None:
    assert parse_assignment("names=[\"a\"]") == ("names", ["a"])
    assert parse_assignment("loss.preset=tis+sc") == ("loss.preset", "tis+sc")
    with pytest.raises(LocalFault, match="E_CONFIG"):
        parse_assignment("loss.preset")
