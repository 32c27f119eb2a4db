"""Drills cheat as they say, and only there; what they hand in is well formed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from node.drill import (
    EditedAnswer,
    RoundedWeights,
    drilled_engine,
    drilled_weights,
    require_enrolled,
    round_to_int8,
)
from node.engine import Engine, Finished
from node.selftest import _stochastic_mean, kl_of_heads
from node.torch_engine import TorchEngine
from protocol.bundle import decode, encode
from protocol.errors import PeerFault
from protocol.reference.model import ReferenceModel
from protocol.rollout import EMPTY_TAIL, Bundle
from protocol.sampler import check_head, replay
from protocol.weights.layout import Layout, State
from tests.unit.node.kit import FakeWeights, drain, request, rules

Model = tuple[Path, Layout, dict[int, State]]


def run_drill(name: str, model: Model, weights: FakeWeights, *, newest: int = 3) -> tuple[Engine, list[Finished]]:
    weights.shown = newest
    source = drilled_weights(name, weights, model[1])  # type: ignore[arg-type]
    honest = TorchEngine(model[0], model[1], rules(), source, slots=8)
    engine = drilled_engine(name, honest, rules())  # type: ignore[arg-type]
    engine.submit([request(i, version=newest) for i in range(6)])
    finished = drain(engine)
    assert sorted(done.request.sample for done in finished) == list(range(6))
    for done in finished:
        assert done.request == request(done.request.sample, version=newest)
        (rollout,) = decode(encode(Bundle((done.rollout,))), rules()).rollouts
        check_head(rollout, rules())
        assert rollout.segments[0].version == newest
    return engine, finished


def mean_kl(model: Model, finished: list[Finished]) -> float:
    reference = ReferenceModel.load(model[0], model[1])
    found = []
    for done in finished:
        logits = reference.logits_for(done.request.prompt, done.rollout, model[2].__getitem__)
        found.append(kl_of_heads(done.rollout, torch.log_softmax(logits.double(), 1).numpy(), rules()))
    return float(np.concatenate(found).mean())


def mismatches(finished: list[Finished]) -> list[int | None]:
    return [replay(done.rollout, done.request.seed, rules()) for done in finished]


def test_best_of_n_has_honest_heads_and_other_randomness(model: Model, weights: FakeWeights) -> None:
    engine, finished = run_drill("best-of-n", model, weights)
    assert engine.capacity == 2
    assert sum(found is not None for found in mismatches(finished)) == 6
    assert mean_kl(model, finished) < 1e-6


def test_int8_replays_and_diverges(model: Model, weights: FakeWeights) -> None:
    _, finished = run_drill("int8", model, weights)
    assert mismatches(finished) == [None] * 6
    assert mean_kl(model, finished) > 1e-4


def test_stale_replays_and_diverges(model: Model, weights: FakeWeights) -> None:
    _, finished = run_drill("stale", model, weights)
    assert mismatches(finished) == [None] * 6
    assert mean_kl(model, finished) > 1e-4
    assert weights.reads == [1]


def test_edited_answer_differs_in_one_token_and_has_honest_heads(model: Model, weights: FakeWeights) -> None:
    _, finished = run_drill("edited-answer", model, weights)
    assert mean_kl(model, finished) < 1e-6
    weights.shown = 3
    honest = TorchEngine(model[0], model[1], rules(), weights, slots=8)
    honest.submit([done.request for done in finished])
    truth = {done.request.sample: done.rollout.tokens for done in drain(honest)}
    edits = 0
    for done, wrong in zip(finished, mismatches(finished), strict=True):
        whole = truth[done.request.sample]
        if wrong is not None:
            edits += 1
            assert done.rollout.tokens[:wrong].tolist() == whole[:wrong].tolist()
            assert done.rollout.tokens[wrong] != whole[wrong]
    assert edits >= 4


def test_an_edit_keeps_the_segments_lawful(model: Model, weights: FakeWeights) -> None:
    engine = EditedAnswer(TorchEngine(model[0], model[1], rules(), weights, slots=4), rules())
    engine.submit([request(i) for i in range(4)])
    finished: list[Finished] = []
    for step in range(500):
        weights.shown = min(3, step // 8)
        finished += engine.step()
    assert len(finished) == 4
    for done in finished:
        decode(encode(Bundle((done.rollout,))), rules())
    assert max(len(done.rollout.segments) for done in finished) > 1


@pytest.mark.parametrize("name", ["best-of-n", "edited-answer"])
def test_a_drill_forgets_what_is_cancelled(name: str, model: Model, weights: FakeWeights) -> None:
    honest = TorchEngine(model[0], model[1], rules(), weights, slots=8)
    engine = drilled_engine(name, honest, rules())  # type: ignore[arg-type]
    engine.submit([request(i) for i in range(5)])
    assert engine.waiting == {request(i).key for i in range(5)}
    engine.step()
    engine.step()
    engine.cancel([request(i).key for i in (0, 4)])
    assert {done.request.sample for done in drain(engine)} == {1, 2, 3}


def test_rounding_keeps_255_levels_per_row() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((3, 4, 500)).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    rounded = round_to_int8(bits)
    assert rounded.dtype == bits.dtype
    assert rounded.shape == bits.shape
    back = (rounded.astype(np.uint32) << 16).view(np.float32)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    step = np.abs(exact).max(axis=2, keepdims=True) / 127
    assert (np.abs(back - exact) <= 0.5 * step + np.abs(exact) * 2**-8).all()
    assert max(len(np.unique(row)) for row in rounded.reshape(-1, 500)) <= 255
    assert (round_to_int8(np.zeros((2, 3), np.uint16)) == 0).all()


def test_norms_are_not_rounded(model: Model, weights: FakeWeights) -> None:
    with RoundedWeights(weights, model[1]).state(0) as state, weights.state(0) as honest:
        assert (state["model.norm.weight"] == honest["model.norm.weight"]).all()
        assert (state["model.embed_tokens.weight"] != honest["model.embed_tokens.weight"]).any()


@pytest.mark.parametrize("record", [{}, {"drill": None}, {"drill": "stale"}])
def test_a_drill_needs_enrolment_for_exactly_its_name(record: dict[str, str | None]) -> None:
    with pytest.raises(PeerFault) as caught:
        require_enrolled("int8", record)
    assert caught.value.code == "E_DRILL_NOT_ENROLLED"
    require_enrolled("int8", {"drill": "int8"})


def test_the_self_tests_mean_leaves_certain_tokens_out(model: Model, weights: FakeWeights) -> None:
    _, finished = run_drill("int8", model, weights)
    rollout = finished[0].rollout
    kl_T = np.ones(len(rollout))
    assert _stochastic_mean(rollout, kl_T, rules()) in {0.0, 1.0}
    certain = replace(
        rollout, head_lengths=np.full(len(rollout), 1, np.uint8), head_ids=rollout.tokens,
        head_codes=np.zeros(len(rollout), np.uint16), tail_codes=np.full(len(rollout), EMPTY_TAIL, np.uint16),
    )
    assert _stochastic_mean(certain, kl_T, rules()) == 0.0
