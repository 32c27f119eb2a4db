"""The reference forward pass: bit-pattern copies, batching, and segments replayed with their own weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from protocol.errors import LocalFault
from protocol.reference import Recomputation, ReferenceModel, export_state, load_config_model, set_state, usable_device
from protocol.reference import model as model_module
from protocol.rollout import EMPTY_TAIL, NO_CODE, Finish, Rollout, Segment, SwapMode
from protocol.weights.layout import Layout

VOCAB = 61


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    ).save_pretrained(path)
    return path


def _layout(model):
    names = {}
    for name, tensor in model.state_dict().items():
        names.setdefault(tensor.data_ptr(), (name, ("BF16", tuple(tensor.shape))))
    return Layout.of(dict(names.values()))


@pytest.fixture(scope="module")
def reference(folder):
    model = load_config_model(folder)
    return ReferenceModel(model, _layout(model))


def _tensors(entries):
    return {entry.name: (entry.dtype, entry.shape) for entry in entries}


def _random_state(layout, seed):
    rng = np.random.default_rng(seed)
    state = {}
    for entry in layout.entries:
        values = torch.from_numpy(rng.normal(0, 0.3, entry.shape).astype(np.float32)).bfloat16()
        state[entry.name] = values.view(torch.int16).numpy().view(np.uint16)
    return state


@pytest.fixture(scope="module")
def states(reference):
    made = {version: _random_state(reference.layout, version) for version in range(3)}
    return made.__getitem__


def _rollout(length, segments, seed=0):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.uint32)
    return Rollout(
        sample=0, tokens=tokens, head_lengths=np.ones(length, np.uint8), head_ids=tokens,
        head_codes=np.zeros(length, np.uint16), tail_codes=np.full(length, EMPTY_TAIL, np.uint16),
        token_codes=np.full(length, NO_CODE, np.uint16), segments=tuple(segments), finish=Finish.LENGTH,
    )


def _decode(reference, prompt, rollout, states):
    """The same logits as a node makes them: prefill, then one token at a time, weights swapped between passes."""
    versions = {segment.start: segment for segment in rollout.segments}
    cache, rows = None, []
    inputs = [*prompt, *rollout.tokens.tolist()]
    with torch.no_grad():
        for t in range(len(rollout)):
            segment = versions.get(t)
            fresh = segment is not None and (t == 0 or segment.mode == SwapMode.REPREFILL)
            if segment is not None:
                reference.set_state(states(segment.version))
            if fresh:
                cache = DynamicCache(config=reference.model.config)
            fed = inputs[: len(prompt) + t] if fresh else inputs[len(prompt) + t - 1 : len(prompt) + t]
            output = reference.model(input_ids=torch.tensor([fed]), use_cache=True, cache=cache)
            rows.append(output.logits[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(0, 0)],
        [Segment(0, 0), Segment(16, 1)],
        [Segment(0, 0), Segment(16, 1, SwapMode.REPREFILL)],
        [Segment(0, 0), Segment(8, 1), Segment(16, 2, SwapMode.REPREFILL)],
        [Segment(0, 0), Segment(8, 1, SwapMode.REPREFILL), Segment(16, 2)],
    ],
)
@pytest.mark.parametrize("prompt", [[5], [1, 2, 3, 4, 5, 6, 7]])
def test_prefill_replay_equals_token_by_token_decoding(reference, states, prompt, segments):
    rollout = _rollout(24, segments)
    replayed = reference.logits_for(prompt, rollout, states)
    assert replayed.shape == (24, VOCAB)
    torch.testing.assert_close(replayed, _decode(reference, prompt, rollout, states), atol=1e-4, rtol=1e-4)


def test_kept_cache_differs_from_reprefill(reference, states):
    kept = reference.logits_for([1, 2], _rollout(24, [Segment(0, 0), Segment(16, 1)]), states)
    fresh = reference.logits_for([1, 2], _rollout(24, [Segment(0, 0), Segment(16, 1, SwapMode.REPREFILL)]), states)
    assert torch.equal(kept[:16], fresh[:16]) or torch.allclose(kept[:16], fresh[:16], atol=1e-4)
    assert (kept[16:] - fresh[16:]).abs().max() > 1e-2


def test_a_batch_gives_each_item_its_own_logits(reference, states):
    items = [
        Recomputation((1, 2, 3), _rollout(length, [Segment(0, length % 2)], seed=length)) for length in (1, 5, 9, 40)
    ]
    items.append(Recomputation((7,), _rollout(20, [Segment(0, 0), Segment(16, 2)], seed=99)))
    parts = {index: [] for index in range(len(items))}
    for chunk in reference.replay(items, states):
        assert chunk.start == sum(len(part) for part in parts[chunk.item])
        parts[chunk.item].append(chunk.logits)
    for index, item in enumerate(items):
        alone = reference.logits_for(item.prompt, item.rollout, states)
        torch.testing.assert_close(torch.cat(parts[index]), alone, atol=1e-4, rtol=1e-4)


def test_completions_of_one_long_prompt_share_its_pass(reference, states, monkeypatch):
    prompt = tuple(range(model_module.MIN_SHARED_PROMPT + 8))
    ways = ([Segment(0, 1)], [Segment(0, 1)], [Segment(0, 1), Segment(8, 2)], [Segment(0, 0), Segment(4, 1)],
            [Segment(0, 0), Segment(8, 1, SwapMode.REPREFILL)])
    items = [Recomputation(prompt, _rollout(9 + n, way, seed=n)) for n, way in enumerate(ways)]
    fed = []
    inner = type(reference.model.base_model).forward
    monkeypatch.setattr(
        type(reference.model.base_model), "forward",
        lambda self, input_ids, **rest: (fed.append(input_ids.numel()), inner(self, input_ids=input_ids, **rest))[1],
    )
    parts = {index: [] for index in range(len(items))}
    for chunk in reference.replay(items, states):
        assert chunk.start == sum(len(part) for part in parts[chunk.item])
        parts[chunk.item].append(chunk.logits)
    # Six of the seven steps need the prompt, under two versions: each computes it once.
    assert sum(fed) < 4 * len(prompt)
    for index, item in enumerate(items):
        alone = reference.logits_for(item.prompt, item.rollout, states)
        torch.testing.assert_close(torch.cat(parts[index]), alone, atol=1e-4, rtol=1e-4)


def test_long_prefixes_go_through_in_pieces(reference, states):
    rollout = _rollout(60, [Segment(0, 1)])
    whole = reference.logits_for(list(range(30)), rollout, states)
    reference._tokens_per_pass = 16
    try:
        pieces = reference.logits_for(list(range(30)), rollout, states)
    finally:
        reference._tokens_per_pass = model_module.MAX_PASS_TOKENS
    torch.testing.assert_close(whole, pieces, atol=1e-4, rtol=1e-4)


def test_state_round_trips_bit_for_bit(reference):
    state = _random_state(reference.layout, 7)
    name = reference.layout.entries[0].name
    state[name].reshape(-1)[:2] = (0x8000, 0x0001)  # -0.0 and a subnormal
    reference.set_state(state)
    for key, bits in export_state(reference.model, reference.layout).items():
        assert np.array_equal(bits, state[key])


def test_tied_head_follows_the_embedding(reference, states):
    reference.set_state(states(2))
    assert torch.equal(reference.model.lm_head.weight, reference.model.model.embed_tokens.weight)


def test_skipping_initialisation_changes_nothing_but_the_weights(folder, reference, states):
    usual = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder), dtype=torch.float32).eval()
    set_state(usual, reference.layout, states(1))
    reference.set_state(states(1))
    ids = torch.arange(40)[None]
    assert torch.equal(usual(input_ids=ids).logits, reference.model(input_ids=ids).logits)


def test_a_missing_tensor_is_an_error(reference, states):
    short = Layout.of(_tensors(reference.layout.entries[1:]))
    with pytest.raises(LocalFault, match="E_MODEL_STATE"):
        set_state(reference.model, short, states(0))


def test_a_misshapen_tensor_is_an_error(reference, states):
    tensors = _tensors(reference.layout.entries)
    tensors["model.norm.weight"] = ("BF16", (33,))
    wrong = Layout.of(tensors)
    with pytest.raises(LocalFault, match="E_MODEL_STATE"):
        set_state(reference.model, wrong, states(0))


def test_a_broken_config_is_our_fault(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(LocalFault, match="E_MODEL_CONFIG"):
        load_config_model(tmp_path)


@pytest.mark.parametrize("name", ["cuda:77", "abacus", ""])
def test_a_device_that_is_not_here_is_said_so_at_once(name):
    with pytest.raises(LocalFault, match="no such device") as caught:
        usable_device(name)
    assert caught.value.code == "E_CONFIG"
    assert usable_device("cpu") == "cpu"
