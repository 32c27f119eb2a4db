from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from node.torch_engine import TorchEngine
from protocol.weights.layout import Layout, State
from tests.unit.node.kit import FakeWeights, moved, rules, tiny_model

MakeEngine = Callable[..., TorchEngine]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Layout, dict[int, State]]:
    """(folder, layout, versions 0 to 3) of the tiny model."""
    folder = tmp_path_factory.mktemp("model")
    layout, state = tiny_model(folder)
    states = {0: state}
    for version in range(1, 4):
        states[version] = moved(states[version - 1], version)
    return folder, layout, states


@pytest.fixture
def weights(model: tuple[Path, Layout, dict[int, State]]) -> FakeWeights:
    return FakeWeights(dict(model[2]))


@pytest.fixture
def make_engine(model: tuple[Path, Layout, dict[int, State]], weights: FakeWeights) -> MakeEngine:
    def make(slots: int = 4, **changes: object) -> TorchEngine:
        return TorchEngine(model[0], model[1], rules(**changes), weights, slots=slots)

    return make
