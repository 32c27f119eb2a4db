"""Draws follow q exactly, replay accepts them all, and any edit is found at its position."""

import math
import subprocess
import sys

import numpy as np
import pytest

from protocol import sampler
from protocol.prng import HEAD_DOMAIN, TAIL_ID, noise, seed_words
from protocol.rollout import EMPTY_TAIL, NO_CODE
from protocol.sampler import TAIL, Head, draw, draw_tail, quantise, replay, tail_margin
from protocol.weight_table import float_weights, weight_table
from tests.fakes.rollouts import edited, make_logprobs, make_rollout, make_rules, make_seed


def _chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations by which the statistic exceeds its mean."""
    expected = counts.sum() * probabilities
    assert expected.min() >= 5
    degrees = len(counts) - 1
    return ((((counts - expected) ** 2 / expected).sum()) - degrees) / math.sqrt(2 * degrees)


def _many_winners(head: Head, seed: bytes, draws: int) -> np.ndarray:
    """Winning index per position, TAIL last, in one vectorised race."""
    ids = np.append(head.ids, np.uint32(TAIL_ID))
    weights = float_weights(1024)[np.append(head.codes, np.uint16(head.tail_code))]
    return np.argmin(noise(seed_words(seed), np.arange(draws)[:, None], HEAD_DOMAIN, ids[None]) / weights, axis=1)


def test_head_draws_follow_the_weights():
    rules, seed = make_rules(), make_seed(1)
    head = quantise(make_logprobs(np.random.default_rng(1), 1, 64, spread=1.0)[0], rules)
    winners = _many_winners(head, seed, 200_000)
    for position in range(300):
        index = draw(head, seed, position, rules)
        assert winners[position] == (index if index != TAIL else len(head.ids))
    weights = weight_table(1024)[np.append(head.codes, np.uint16(head.tail_code))].astype(float)
    assert _chi_square(np.bincount(winners, minlength=len(weights)), weights / weights.sum()) < 5


def test_draws_follow_the_weights_across_seeds():
    rules = make_rules()
    head = Head(np.array([5, 2, 60], np.uint32), np.array([710, 1420, 2000], np.uint16), 2060)
    outcomes = [draw(head, np.random.default_rng(n).bytes(32), 0, rules) for n in range(2_500)]
    weights = weight_table(1024)[[710, 1420, 2000, 2060]].astype(float)
    counts = np.bincount(np.array(outcomes) % 4, minlength=4)
    assert _chi_square(counts, weights / weights.sum()) < 5


def test_tail_draws_follow_the_probabilities():
    rules, seed = make_rules(), make_seed(2)
    logprobs = make_logprobs(np.random.default_rng(2), 1, 24, spread=1.0)[0]
    head_ids = quantise(logprobs, make_rules(vocab_size=24)).ids
    tail = np.setdiff1d(np.arange(24), head_ids)
    drawn = [draw_tail(logprobs, head_ids, seed, position, rules)[0] for position in range(3_000)]
    p = np.exp(logprobs[tail].astype(float))
    assert set(drawn) <= set(tail.tolist())
    assert _chi_square(np.bincount(drawn, minlength=24)[tail], p / p.sum()) < 5


def test_a_tail_token_records_its_own_code():
    rules = make_rules()
    logprobs = make_logprobs(np.random.default_rng(4), 1, 64)[0]
    head = quantise(logprobs, rules)
    token, code = draw_tail(logprobs, head.ids, make_seed(4), 0, rules)
    assert code == np.rint(-logprobs[token].astype(float) * 1024)


def test_the_winner_of_the_tail_has_no_margin_and_losers_have_one():
    rules, seed = make_rules(), make_seed(3)
    logprobs = make_logprobs(np.random.default_rng(3), 1, 64)[0]
    head = quantise(logprobs, rules)
    token, _ = draw_tail(logprobs, head.ids, seed, 9, rules)
    assert tail_margin(logprobs, head.ids, token, seed, 9) == 0
    others = [t for t in range(64) if t not in head.ids and t != token]
    assert all(tail_margin(logprobs, head.ids, other, seed, 9) > 0 for other in others)
    assert tail_margin(logprobs, head.ids, int(head.ids[0]), seed, 9) == math.inf


def test_a_tail_without_mass_is_our_own_bug():
    with pytest.raises(ValueError, match="tail is empty"):
        draw_tail(np.zeros(4), np.arange(4, dtype=np.uint32), make_seed(0), 0, make_rules(vocab_size=4))


def test_an_empty_tail_never_wins():
    head = Head(np.array([3], np.uint32), np.array([0], np.uint16), EMPTY_TAIL)
    assert {draw(head, make_seed(n), n, make_rules()) for n in range(200)} == {0}


def test_ties_go_to_the_lowest_id_and_never_to_the_tail(monkeypatch):
    monkeypatch.setattr(sampler, "noise", lambda words, positions, domain, ids: np.ones(np.shape(ids)))
    head = Head(np.array([9, 4, 2], np.uint32), np.array([700, 700, 800], np.uint16), 700)
    assert draw(head, make_seed(0), 0, make_rules()) == 1
    assert draw_tail(np.zeros(5), np.array([0, 1], np.uint32), make_seed(0), 0, make_rules(vocab_size=5))[0] == 2


@pytest.mark.parametrize("force_numpy", [False, True])
def test_replay_accepts_every_honest_token(monkeypatch, force_numpy):
    if force_numpy:
        monkeypatch.setattr(sampler, "compiled", lambda: None)
    for number, changes in enumerate([{}, {"head_size": 2}, {"head_size": 64, "head_max_code": 65_534}]):
        rules, seed = make_rules(**changes), make_seed(number)
        rollout = make_rollout(np.random.default_rng(number), rules, seed, length=120)
        assert replay(rollout, seed, rules) is None
    assert np.any(rollout.token_codes == NO_CODE)


def test_numba_and_numpy_find_the_same_first_fault():
    rules, rng = make_rules(), np.random.default_rng(8)
    for number in range(40):
        seed = make_seed(number)
        rollout = make_rollout(rng, rules, seed, length=30)
        at = int(rng.integers(30))
        change = [
            {"tokens": {at: int(rng.integers(64))}}, {"token_codes": {at: 5000}}, {"token_codes": {at: NO_CODE}},
            {"head_codes": {at * 3: 0}}, {"tail_codes": {at: 0}}, {"tail_codes": {at: EMPTY_TAIL}},
        ][number % 6]
        cheat = edited(rollout, **change)
        wrong = sampler._replay_numpy(cheat, seed_words(seed), float_weights(rules.steps_per_nat))
        assert replay(cheat, seed, rules) == (None if wrong < 0 else wrong)


def test_replay_finds_the_first_edited_token(rng):
    rules, seed = make_rules(), make_seed(7)
    rollout = make_rollout(rng, rules, seed, length=60)
    starts = sampler.offsets(rollout)
    for position in (0, 31, 32, 59):
        head = rollout.head_ids[starts[position] :][: rollout.head_lengths[position]]
        other = next(int(i) for i in head if i != rollout.tokens[position])
        change = {"tokens": {position: other, 59: 63}, "token_codes": {position: NO_CODE}}
        assert replay(edited(rollout, **change), seed, rules) == position


def test_replay_refuses_a_tail_draw_where_the_head_won_and_the_reverse(rng):
    rules, seed = make_rules(), make_seed(9)
    rollout = make_rollout(rng, rules, seed, length=100)
    drawn = rollout.token_codes != NO_CODE
    head_won, tail_won = int(np.flatnonzero(~drawn)[0]), int(np.flatnonzero(drawn)[0])
    outside = next(t for t in range(64) if t not in rollout.head_ids[: rollout.head_lengths[0]])
    assert replay(edited(rollout, token_codes={head_won: 9_000}), seed, rules) == head_won
    assert not drawn[0]
    assert replay(edited(rollout, tokens={0: outside}, token_codes={0: 9_000}), seed, rules) == 0
    assert replay(edited(rollout, token_codes={tail_won: NO_CODE}), seed, rules) == tail_won
    inside = int(rollout.head_ids[sampler.offsets(rollout)[tail_won]])
    assert replay(edited(rollout, tokens={tail_won: inside}), seed, rules) == tail_won


def test_another_seed_or_shifted_positions_do_not_replay(rng):
    rules, seed = make_rules(), make_seed(1)
    rollout = make_rollout(rng, rules, seed, length=100)
    assert replay(rollout, make_seed(2), rules) is not None


def test_replay_takes_columns_of_any_layout(rng):
    rules, seed = make_rules(), make_seed(1)
    rollout = make_rollout(rng, rules, seed, length=40)
    strided = np.repeat(rollout.tokens, 2)[::2]
    assert not strided.flags.c_contiguous
    assert replay(edited(rollout, tokens=strided), seed, rules) is None


def test_without_numba_replay_is_the_same(monkeypatch, rng):
    monkeypatch.setitem(sys.modules, "protocol.sampler_jit", None)
    monkeypatch.delattr("protocol.sampler_jit", raising=False)
    sampler.compiled.cache_clear()
    rules, seed = make_rules(), make_seed(1)
    rollout = make_rollout(rng, rules, seed, length=20)
    try:
        assert sampler.compiled() is None
        assert replay(rollout, seed, rules) is None
    finally:
        sampler.compiled.cache_clear()


def test_importing_the_sampler_loads_neither_torch_nor_numba():
    code = "import sys, protocol.sampler, protocol.bundle; sys.exit(any(m in sys.modules for m in ('torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=200).returncode == 0
