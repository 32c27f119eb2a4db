"""Heads: how they are cut, what they mean, and what T0 refuses."""

import numpy as np
import pytest

from protocol.errors import LocalFault, PeerFault
from protocol.head import check_head, offsets, to_codes, token_entries
from protocol.rollout import EMPTY_TAIL, NO_CODE
from protocol.sampler import behaviour_logprobs, head_logprobs, quantise, tail_logprobs
from tests.fakes.rollouts import edited, make_logprobs, make_rollout, make_rules, make_seed


def test_a_head_holds_the_most_likely_ids_by_code_then_id():
    logits = np.log(np.array([0.05, 0.4, 0.05, 0.3, 0.1, 0.1]))
    head = quantise(logits, make_rules(vocab_size=6, head_size=5))
    assert head.ids.tolist() == [1, 3, 4, 5, 0]
    assert head.codes.tolist() == to_codes(logits[head.ids], 1024).tolist()
    assert head.tail_code == round(-np.log(0.05) * 1024)


def test_ties_at_the_boundary_go_to_the_lowest_ids():
    logits = np.zeros(10)
    logits[7] = 1.0
    assert quantise(logits, make_rules(vocab_size=10, head_size=4)).ids.tolist() == [7, 0, 1, 2]


def test_entries_past_the_floor_obey_the_largest_code():
    logits = np.array([0.0, -3.0, -4.0, -9.0, -10.0])
    rules = make_rules(vocab_size=5, head_size=4, head_max_code=1024)
    assert quantise(logits, rules).ids.tolist() == [0]
    assert quantise(logits, rules.model_copy(update={"head_floor": 3})).ids.tolist() == [0, 1, 2]
    assert quantise(logits, rules.model_copy(update={"head_floor": 200})).ids.tolist() == [0, 1, 2, 3]


def test_a_head_of_the_whole_vocabulary_has_an_empty_tail():
    head = quantise(np.zeros(8), make_rules(vocab_size=8, head_size=32))
    assert len(head.ids) == 8
    assert head.tail_code == EMPTY_TAIL


def test_impossible_ids_make_an_empty_tail():
    logits = np.full(20, -np.inf)
    logits[:3] = 0.0
    head = quantise(logits, make_rules(vocab_size=20, head_size=5))
    assert head.ids.tolist() == [0, 1, 2]
    assert head.tail_code == EMPTY_TAIL


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_our_own_fault(bad):
    logits = np.zeros(8)
    logits[3] = bad
    with pytest.raises(LocalFault, match="E_LOGITS"):
        quantise(logits, make_rules(vocab_size=8))


def test_quantise_normalises_logits(rng):
    logprobs = make_logprobs(rng, 1, 64)[0].astype(np.float64)
    a, b = quantise(logprobs, make_rules()), quantise(logprobs + 17.25, make_rules())
    assert a.ids.tolist() == b.ids.tolist()
    assert a.codes.tolist() == b.codes.tolist()
    assert a.tail_code == b.tail_code


def test_q_sums_to_one_and_is_near_p(rng):
    rules, length = make_rules(), 50
    logprobs = make_logprobs(np.random.default_rng(3), length, 64)
    rollout = make_rollout(np.random.default_rng(3), rules, make_seed(1), length=length)
    q = np.add.reduceat(np.exp(head_logprobs(rollout, rules)), offsets(rollout)) + np.exp(tail_logprobs(rollout, rules))
    assert np.allclose(q, 1, rtol=0, atol=1e-12)
    rows = np.repeat(np.arange(length), rollout.head_lengths)
    assert np.allclose(head_logprobs(rollout, rules), logprobs[rows, rollout.head_ids], rtol=0, atol=1 / 1024)
    behaviour = behaviour_logprobs(rollout, rules)
    assert np.allclose(behaviour, logprobs[np.arange(length), rollout.tokens], rtol=0, atol=1 / 1024)
    assert np.any(rollout.token_codes != NO_CODE)
    assert np.any(rollout.token_codes == NO_CODE)


def test_tail_logprobs_of_an_empty_tail():
    rules = make_rules(vocab_size=8, head_size=8, head_max_code=60_000)
    rollout = make_rollout(np.random.default_rng(0), rules, make_seed(0), length=5)
    assert np.all(tail_logprobs(rollout, rules) == -np.inf)


def test_token_entries(rng):
    rollout = make_rollout(rng, make_rules(), make_seed(2))
    entries = token_entries(rollout)
    drawn = rollout.token_codes != NO_CODE
    assert np.all((entries < 0) == drawn)
    assert np.array_equal(rollout.head_ids[entries[~drawn]], rollout.tokens[~drawn])


def test_behaviour_of_a_token_without_a_code_is_refused(rng):
    rules = make_rules()
    rollout = make_rollout(rng, rules, make_seed(2))
    tail = int(np.flatnonzero(rollout.token_codes != NO_CODE)[0])
    with pytest.raises(PeerFault, match="E_TOKEN_CODE"):
        behaviour_logprobs(edited(rollout, token_codes={tail: NO_CODE}), rules)


@pytest.mark.parametrize("changes", [
    {}, {"head_size": 3}, {"head_size": 64, "head_max_code": 65_534}, {"head_floor": 9, "head_max_code": 100},
    {"steps_per_nat": 16, "head_max_code": 90}, {"steps_per_nat": 4096, "head_max_code": 30_000}, {"head_max_code": 1},
])
@pytest.mark.parametrize("spread", [0.0, 2.0, 30.0])
def test_honest_heads_pass(changes, spread):
    rules = make_rules(**changes)
    rollout = make_rollout(np.random.default_rng(5), rules, make_seed(5), length=60, spread=spread)
    check_head(rollout, rules)


def _rollout():
    """Rules, a rollout, and a position in its middle with a full head whose token is in it."""
    rules = make_rules()
    rollout = make_rollout(np.random.default_rng(11), rules, make_seed(11), length=30)
    inside = rollout.token_codes == NO_CODE
    position = int(np.flatnonzero(inside & (rollout.head_lengths == 12))[2])
    return rules, rollout, position, int(offsets(rollout)[position])


def test_head_faults_name_the_code_and_the_position():
    rules, rollout, position, start = _rollout()
    last = start + 11
    tail = int(np.flatnonzero(rollout.token_codes != NO_CODE)[0])
    ids, codes = rollout.head_ids, rollout.head_codes
    outside = next(i for i in range(64) if i not in ids[start : start + 12])
    faults = {
        "E_HEAD_ID": [
            ({"head_ids": {last: 64}}, position), ({"head_ids": {last: 2**32 - 1}}, position),
            ({"tokens": {tail: 64}}, tail),
        ],
        "E_HEAD_ORDER": [
            ({"head_ids": {start: ids[start + 1], start + 1: ids[start]},
              "head_codes": {start: codes[start + 1], start + 1: codes[start]}}, position),
        ],
        "E_HEAD_DUPLICATE": [({"head_ids": {last: ids[start]}}, position)],
        "E_HEAD_CODE": [
            ({"head_codes": {last: 6_001}}, position), ({"head_codes": {last: EMPTY_TAIL}}, position),
        ],
        "E_HEAD_NOT_NORMALISED": [
            ({"tail_codes": {position: EMPTY_TAIL}}, position), ({"head_codes": {start: codes[start] // 2}}, position),
        ],
        "E_TOKEN_CODE": [
            ({"tokens": {position: outside}}, position), ({"token_codes": {tail: NO_CODE}}, tail),
            ({"token_codes": {tail: 0}}, tail), ({"token_codes": {position: 5_000}}, position),
        ],
    }
    for code, cases in faults.items():
        for change, where in cases:
            with pytest.raises(PeerFault) as caught:
                check_head(edited(rollout, **change), rules)
            assert caught.value.code == code, change
            assert f"position {where}" in caught.value.message


def test_head_sizes_outside_the_rules_are_refused():
    rules, rollout, _, _ = _rollout()
    with pytest.raises(PeerFault, match="E_HEAD_SIZE"):
        check_head(rollout, rules.model_copy(update={"head_size": 11}))
    with pytest.raises(PeerFault, match="E_HEAD_SIZE"):
        check_head(rollout, rules.model_copy(update={"head_size": 40, "head_floor": 13}))


def test_a_tail_cannot_hold_more_than_its_ids_can():
    """Entries were moved into the tail, which keeps the sum: a cheat would steer draws through the unchecked tail."""
    rules = make_rules(head_size=12, vocab_size=64)
    head = quantise(np.array([0.0, -1.0] + [-9.0] * 62), rules)
    mass = float(np.exp(head.codes[1] / -1024) + np.exp(-head.tail_code / 1024))
    rollout = make_rollout(np.random.default_rng(0), rules, make_seed(0), length=1)
    cheat = edited(
        rollout, tokens=np.array([0], np.uint32), head_lengths=np.array([1], np.uint8),
        head_ids=np.array([0], np.uint32), head_codes=head.codes[:1],
        tail_codes=np.array([round(-np.log(mass) * 1024)], np.uint16), token_codes=np.array([NO_CODE], np.uint16),
    )
    with pytest.raises(PeerFault, match="E_TAIL_CODE"):
        check_head(cheat, rules.model_copy(update={"head_max_code": 6_000}))


def test_a_head_of_the_whole_vocabulary_cannot_have_a_tail():
    rules = make_rules(vocab_size=8, head_size=8, head_max_code=60_000)
    rollout = make_rollout(np.random.default_rng(0), rules, make_seed(0), length=5)
    check_head(rollout, rules)
    with pytest.raises(PeerFault, match="E_TAIL_CODE"):
        check_head(edited(rollout, tail_codes={2: 60_000}), rules)
