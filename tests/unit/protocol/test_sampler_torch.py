"""The batched sampler is the sampler, bit for bit, with and without numba."""

import numpy as np
import pytest
import torch

from protocol import sampler_torch
from protocol.errors import LocalFault
from protocol.rollout import NO_CODE
from protocol.sampler import TAIL, draw, draw_tail, quantise, seed_words
from protocol.sampler_torch import heads_from_logits, sample_batch
from tests.fakes.rollouts import make_rules, make_seed


def _batch(rng, rows, vocabulary, spread=2.0):
    logits = torch.from_numpy((rng.standard_normal((rows, vocabulary)) * spread).astype(np.float32))
    seeds = [make_seed(n) for n in range(rows)]
    words = torch.from_numpy(np.stack([seed_words(seed).view(np.int64) for seed in seeds]))
    return logits, seeds, words, torch.arange(rows) * 3


def _assert_same_as_numpy(logits, seeds, words, positions, rules, device="cpu"):
    drawn = sample_batch(logits.to(device), words.to(device), positions.to(device), rules)
    heads = heads_from_logits(logits.to(device), rules)
    scaled = logits.numpy() / np.float32(rules.temperature_milli / 1000)
    tails = 0
    for b, seed in enumerate(seeds):
        head, position = quantise(scaled[b], rules), int(positions[b])
        index = draw(head, seed, position, rules)
        token, code = (int(head.ids[index]), NO_CODE) if index != TAIL else draw_tail(
            scaled[b], head.ids, seed, position, rules
        )
        tails += index == TAIL
        n = int(drawn.head_len_B[b])
        assert (int(drawn.tokens_B[b]), int(drawn.token_codes_B[b])) == (token, code)
        for length, ids, codes, tail in (
            (drawn.head_len_B, drawn.head_ids_BK, drawn.head_codes_BK, drawn.tail_codes_B),
            (heads.lengths_B, heads.ids_BK, heads.codes_BK, heads.tail_codes_B),
        ):
            assert int(length[b]) == len(head.ids)
            assert ids[b, :n].tolist() == head.ids.tolist()
            assert codes[b, :n].tolist() == head.codes.tolist()
            assert not ids[b, n:].any()
            assert not codes[b, n:].any()
            assert int(tail[b]) == head.tail_code
    return tails


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize(("rows", "vocabulary", "changes"), [
    (64, 64, {}), (33, 5_000, {"head_size": 32, "head_max_code": 14_148}), (40, 10, {"head_size": 255}),
    (40, 64, {"temperature_milli": 700, "head_floor": 3, "head_max_code": 700}), (1, 2, {"head_size": 1}),
    (40, 300, {"steps_per_nat": 4096, "head_max_code": 65_534, "head_size": 200}),
])
def test_draws_and_heads_are_those_of_numpy(monkeypatch, numba, rows, vocabulary, changes):
    if not numba:
        monkeypatch.setattr(sampler_torch, "compiled", lambda: None)
    rules = make_rules(**({"vocab_size": vocabulary} | changes))
    batch = _batch(np.random.default_rng(rows), rows, vocabulary)
    tails = _assert_same_as_numpy(*batch, rules)
    if vocabulary == 5_000:
        assert tails > 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("rows", "vocabulary", "changes"), [
    (64, 64, {}), (64, 49_152, {"head_size": 32, "head_max_code": 14_148}),
])
def test_a_gpu_draws_the_same(rows, vocabulary, changes):
    rules = make_rules(**({"vocab_size": vocabulary} | changes))
    _assert_same_as_numpy(*_batch(np.random.default_rng(rows), rows, vocabulary), rules, device="cuda")


def test_ties_at_the_boundary_go_to_the_lowest_ids():
    rng = np.random.default_rng(0)
    logits, seeds, words, positions = _batch(rng, 30, 200)
    logits = (logits * 2).round() / 2
    _assert_same_as_numpy(logits, seeds, words, positions, make_rules(vocab_size=200))
    _assert_same_as_numpy(torch.zeros(30, 200), seeds, words, positions, make_rules(vocab_size=200))


def test_impossible_ids_are_never_drawn():
    logits, seeds, words, positions = _batch(np.random.default_rng(1), 30, 40)
    logits[:, 5:] = -torch.inf
    _assert_same_as_numpy(logits, seeds, words, positions, make_rules(vocab_size=40))


def test_a_row_does_not_depend_on_its_batch():
    logits, _, words, positions = _batch(np.random.default_rng(2), 16, 3_000)
    rules = make_rules(vocab_size=3_000)
    whole = sample_batch(logits, words, positions, rules)
    for b in range(16):
        alone = sample_batch(logits[b : b + 1], words[b : b + 1], positions[b : b + 1], rules)
        for name in ("tokens_B", "head_len_B", "head_ids_BK", "head_codes_BK", "tail_codes_B", "token_codes_B"):
            assert torch.equal(getattr(alone, name)[0], getattr(whole, name)[b]), name


def test_half_precision_and_strided_inputs_are_taken():
    logits, _, words, positions = _batch(np.random.default_rng(3), 4, 64)
    rules = make_rules()
    reference = sample_batch(logits.bfloat16().float(), words, positions, rules)
    strided = sample_batch(logits.bfloat16().T.contiguous().T, words.T.contiguous().T, positions, rules)
    assert torch.equal(reference.tokens_B, strided.tokens_B)
    same_seed = sample_batch(logits, words[:1].expand(4, 4), positions, rules)
    assert same_seed.tokens_B.shape == (4,)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_numbers_are_our_own_fault(bad):
    logits, _, words, positions = _batch(np.random.default_rng(4), 4, 64)
    logits[2, 7] = bad
    with pytest.raises(LocalFault, match="E_LOGITS"):
        sample_batch(logits, words, positions, make_rules())
    with pytest.raises(LocalFault, match="E_LOGITS"):
        heads_from_logits(logits, make_rules())


def test_the_input_is_left_alone():
    logits, _, words, positions = _batch(np.random.default_rng(5), 8, 64)
    for changes in ({}, {"temperature_milli": 500}):
        before = logits.clone()
        sample_batch(logits, words, positions, make_rules(**changes))
        assert torch.equal(logits, before)
