import pytest

from coordinator.preset_settings import with_settings
from coordinator.presets import preset
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
