"""The torch engine against the reference forward pass and the numpy sampler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from node.engine import Finished, Request
from node.selftest import kl_of_heads
from node.torch_engine import TorchEngine
from protocol.bundle import decode, encode
from protocol.errors import LocalFault
from protocol.messages import SamplingRules
from protocol.reference.model import ReferenceModel
from protocol.rollout import NO_CODE, Bundle, Finish
from protocol.sampler import TAIL, check_head, draw, draw_tail, quantise, replay
from protocol.weights.layout import Layout, State
from tests.unit.node.conftest import MakeEngine
from tests.unit.node.kit import FakeWeights, by_sample, drain, request, rules

Model = tuple[Path, Layout, dict[int, State]]


@pytest.fixture(scope="module")
def reference(model: Model) -> ReferenceModel:
    return ReferenceModel.load(model[0], model[1])


def one_by_one(reference: ReferenceModel, state: State, asked: Request, rules_: SamplingRules) -> list[int]:
    """Generation in its plainest form: no cache, one row, the numpy sampler."""
    reference.set_state(state)
    tokens: list[int] = []
    while len(tokens) < rules_.max_new_tokens and (not tokens or tokens[-1] not in rules_.eos_token_ids):
        with torch.no_grad():
            logits = reference.model(input_ids=torch.tensor([[*asked.prompt, *tokens]])).logits[0, -1]
        logp = torch.log_softmax(logits.float(), 0).numpy()
        head = quantise(logp, rules_)
        index = draw(head, asked.seed, len(tokens), rules_)
        tokens.append(
            draw_tail(logp, head.ids, asked.seed, len(tokens), rules_)[0] if index == TAIL else int(head.ids[index])
        )
    return tokens


def divergence(reference: ReferenceModel, model: Model, done: Finished, rules_: SamplingRules) -> np.ndarray:
    logits = reference.logits_for(done.request.prompt, done.rollout, model[2].__getitem__)
    return kl_of_heads(done.rollout, torch.log_softmax(logits.double(), 1).numpy(), rules_)


def check_rollouts(finished: list[Finished], rules_: SamplingRules) -> None:
    """What every verifier checks without a model."""
    for done in finished:
        (rollout,) = decode(encode(Bundle((done.rollout,))), rules_).rollouts
        check_head(rollout, rules_)
        assert replay(rollout, done.request.seed, rules_) is None
        assert rollout.segments[0].version == done.request.start_version
        ends = np.isin(rollout.tokens, rules_.eos_token_ids)
        assert not ends[:-1].any()
        assert rollout.finish == (Finish.EOS if ends[-1] else Finish.LENGTH)
        assert ends[-1] or len(rollout) == rules_.max_new_tokens


def test_batched_generation_gives_the_tokens_of_one_row_alone(
    make_engine: MakeEngine, reference: ReferenceModel, model: Model
) -> None:
    engine, rules_ = make_engine(slots=4), rules()
    asked = [request(i, length=1 + 2 * i) for i in range(7)]
    engine.submit(asked)
    finished = by_sample(drain(engine))
    assert sorted(finished) == list(range(7))
    for one in asked:
        assert finished[one.sample].rollout.tokens.tolist() == one_by_one(reference, model[2][0], one, rules_)
    check_rollouts(list(finished.values()), rules_)
    assert any((done.rollout.token_codes != NO_CODE).any() for done in finished.values())
    assert engine.tokens == sum(len(done.rollout) for done in finished.values())


def test_a_single_request_gives_what_it_gives_in_company(make_engine: MakeEngine) -> None:
    alone, company = make_engine(slots=1), make_engine(slots=8)
    alone.submit([request(3)])
    company.submit([request(i) for i in range(8)])
    (one,), many = drain(alone), by_sample(drain(company))
    assert one.rollout.tokens.tolist() == many[3].rollout.tokens.tolist()


def test_equal_prompts_share_their_prefill(make_engine: MakeEngine) -> None:
    engine, rules_ = make_engine(slots=3), rules()
    asked = [request(i, group=5) for i in range(9)]
    engine.submit(asked)
    finished = by_sample(drain(engine))
    apart = make_engine(slots=9)
    for one in asked:
        apart.submit([one])
        (alone,) = drain(apart)
        assert alone.rollout.tokens.tolist() == finished[one.sample].rollout.tokens.tolist()
    check_rollouts(list(finished.values()), rules_)


def test_weights_change_in_flight_on_the_grid(
    make_engine: MakeEngine, weights: FakeWeights, reference: ReferenceModel, model: Model
) -> None:
    changes = {"eos_token_ids": [0], "max_new_tokens": 40}
    engine, rules_ = make_engine(slots=6, **changes), rules(**changes)
    engine.submit([request(i, length=3 + 2 * i) for i in range(6)])
    finished: list[Finished] = []
    for step in range(2000):
        weights.shown = 1 if 7 <= step < 20 else 2 if step >= 20 else 0
        finished += engine.step()
        if not engine.open_requests:
            break
    check_rollouts(finished, rules_)
    segments = [done.rollout.segments for done in finished]
    assert any(len(parts) == 3 for parts in segments)
    assert all(part.start % rules_.swap_grid == 0 for parts in segments for part in parts)
    assert max(float(divergence(reference, model, done, rules_).max()) for done in finished) < 1e-5


def test_a_segment_that_is_denied_shows(
    make_engine: MakeEngine, weights: FakeWeights, reference: ReferenceModel, model: Model
) -> None:
    engine, rules_ = make_engine(slots=4), rules()
    engine.submit([request(i) for i in range(4)])
    finished = []
    while engine.open_requests:
        finished += engine.step()
        weights.shown = 1
    crossed = next(done for done in finished if len(done.rollout.segments) > 1)
    denied = Finished(crossed.request, replace(crossed.rollout, segments=crossed.rollout.segments[:1]))
    assert float(divergence(reference, model, denied, rules_).max()) > 1e-3


def test_an_older_start_version_is_stepped_back_to(
    make_engine: MakeEngine, weights: FakeWeights, reference: ReferenceModel, model: Model
) -> None:
    engine, rules_ = make_engine(slots=4), rules()
    weights.shown = 2
    engine.submit([request(i, version=2) for i in range(3)])
    for _ in range(5):
        engine.step()
    engine.submit([request(7, version=0), request(8, version=1), request(9, version=2)])
    finished = drain(engine)
    check_rollouts(finished, rules_)
    assert {done.request.sample: done.rollout.segments[0].version for done in finished} == {
        0: 2, 1: 2, 2: 2, 7: 0, 8: 1, 9: 2
    }
    assert engine.version == 2
    assert max(float(divergence(reference, model, done, rules_).max()) for done in finished) < 1e-5


def test_an_idle_engine_takes_up_the_newest_weights(make_engine: MakeEngine, weights: FakeWeights) -> None:
    engine = make_engine()
    assert engine.version == -1
    for version in range(3):
        weights.shown = version
        assert engine.step() == []
        assert engine.version == version
    assert engine.step() == []
    assert weights.reads == [0, 1, 2]


def test_a_finished_row_is_refilled_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=4)
    engine.submit([request(i) for i in range(12)])
    starts = []
    while engine.waiting:
        before = len(engine.waiting)
        finished = engine.step()
        if finished and engine.waiting:
            engine.step()
            starts.append(before - len(engine.waiting))
    assert starts
    assert all(starts)


def test_a_request_goes_on_from_a_given_position(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.submit([request(3)])
    (whole,) = drain(engine)
    tokens = tuple(whole.rollout.tokens.tolist())
    cut = len(tokens) // 2
    engine.submit([replace(request(3), prompt=request(3).prompt + tokens[:cut], first_position=cut)])
    (rest,) = drain(engine)
    assert tuple(rest.rollout.tokens.tolist()) == tokens[cut:]
    assert rest.rollout.finish == whole.rollout.finish


def test_cancelled_requests_do_not_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=3)
    engine.submit([request(i) for i in range(7)])
    for _ in range(3):
        engine.step()
    engine.cancel([request(i).key for i in (0, 3, 5)] + ["nobody"])
    finished = by_sample(drain(engine))
    assert set(finished) == {1, 2, 4, 6}
    check_rollouts(list(finished.values()), rules())


@pytest.mark.parametrize(
    "bad",
    [
        replace(request(0), prompt=()),
        replace(request(0), prompt=(1,) * 120),
        replace(request(0), prompt=(3, 48)),
        replace(request(0), seed=b"short"),
        replace(request(0), start_version=3),
        replace(request(0), first_position=24),
    ],
    ids=["empty", "too-long", "token", "seed", "version", "position"],
)
def test_requests_it_cannot_obey_are_refused(make_engine: MakeEngine, bad: Request) -> None:
    engine = make_engine()
    with pytest.raises(LocalFault) as caught:
        engine.submit([request(1), bad])
    assert caught.value.code == "E_ENGINE_REQUEST"
    assert engine.open_requests == 0


def test_what_torch_fails_at_is_our_own_fault(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("node.torch_engine.sample_batch", out_of_memory)
    engine = make_engine()
    engine.submit([request(0)])
    with pytest.raises(LocalFault) as caught:
        drain(engine)
    assert caught.value.code == "E_ENGINE"


def test_a_model_of_another_vocabulary_is_refused(model: Model, weights: FakeWeights) -> None:
    with pytest.raises(LocalFault) as caught:
        TorchEngine(model[0], model[1], rules(vocab_size=49), weights, slots=2)
    assert caught.value.code == "E_ENGINE"
