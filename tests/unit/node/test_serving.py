"""The ways of serving that the benchmark sets beside each other do what they say, with the real engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving import MEDIAN, Load, Served, Server, lengths, make_model
from protocol.weights.layout import Layout, State

LOAD = Load(slots=8, settle=100, tokens=500, batch=4)
Model = tuple[Path, Layout, list[State]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("served")
    return folder, *make_model(folder, 0)


def serve(model: Model, way: str) -> Served:
    return Server(way, *model, LOAD, seed=1).serve()


@pytest.mark.parametrize("way", ["static", "continuous"])
def test_steady_weights_never_change(model: Model, way: str) -> None:
    served = serve(model, way)
    assert served.pauses == []
    assert set(served.lags) == {0}
    assert served.tokens == sum(served.lengths) == served.lags.total()


def test_draining_and_restarting_leave_no_lag_to_what_begins_anew(model: Model) -> None:
    drained, restarted = serve(model, "drain"), serve(model, "restart")
    assert drained.pauses
    assert len(restarted.pauses) >= len(drained.pauses)
    assert set(drained.lags) == set(restarted.lags) == {0}
    assert restarted.tokens < drained.tokens
    assert max(restarted.lengths) < max(drained.lengths)


def test_in_flight_rows_go_on_and_their_tokens_have_a_lag(model: Model) -> None:
    served, restarted = serve(model, "in-flight"), serve(model, "restart")
    assert served.pauses
    assert served.lags[1] > 0
    assert min(served.lags) == 0
    assert served.tokens > restarted.tokens


def test_lengths_have_a_long_tail() -> None:
    drawn = lengths(np.random.default_rng(0), 20_000)
    assert abs(np.median(drawn) - MEDIAN) < 1.5
    assert drawn.min() >= 1
    assert np.sort(drawn)[-1000:].sum() > 0.2 * drawn.sum()
