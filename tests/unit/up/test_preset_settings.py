import math

import pytest

from coordinator.preset_settings import with_settings
from coordinator.presets import preset
from coordinator.quantisation import ARITHMETIC_MICRO
from protocol.errors import LocalFault


def test_single_numbers_of_a_preset_are_changed() -> None:
    base = preset("tiny")
    changed = with_settings(
        base, ["batch.groups_per_batch=8", 'up.drills=["int8"]', "learner.optim.lr=1e-4", "learner.loss.preset=tis+sc"]
    )
    assert changed.batch.groups_per_batch == 8
    assert changed.up.drills == ("int8",)
    assert changed.learner["optim.lr"] == 1e-4
    assert changed.learner["loss.preset"] == "tis+sc"
    assert changed.sampling == base.sampling
    assert with_settings(base, []) is base


@pytest.mark.parametrize(
    "assignment", ["batch.groups=8", "batch.groups_per_batch=many", "batch.groups_per_batch", "name.x=1", "size=1"]
)
def test_bad_settings_are_named(assignment: str) -> None:
    with pytest.raises(LocalFault, match="E_CONFIG"):
        with_settings(preset("tiny"), [assignment])


@pytest.mark.parametrize(("name", "task"), [("tiny", None), ("smollm2", None), ("smollm2", "gsm8k")])
def test_quantisation_alone_never_reaches_a_limit(name: str, task: str | None) -> None:
    """The bounds of docs/spec/verification.md, "Thresholds": half a step per entry, 1 / (8 steps^2) per head."""
    chosen = preset(name, task)
    steps = chosen.sampling.steps_per_nat
    assert chosen.sampling.head_max_code == round(steps * math.log(1e6))
    for profile in chosen.profiles:
        assert min(profile.max_mean_kl_nano / 1e3, profile.max_token_kl_micro) > 1e6 / (8 * steps**2)
        assert profile.max_margin_micro > 1e6 * 0.5 / steps + 3 * ARITHMETIC_MICRO
