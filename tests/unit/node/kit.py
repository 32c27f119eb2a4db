"""What the node's tests share: a tiny random model, weights that move when told, rules, requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from node.engine import Engine, Finished, Request
from protocol.errors import LocalFault
from protocol.messages import SamplingRules
from protocol.reference.loader import export_state
from protocol.weights.follower import E_NO_VERSION
from protocol.weights.layout import Layout, State

VOCABULARY = 48


def rules(**changes: object) -> SamplingRules:
    values: dict[str, object] = {
        "eos_token_ids": [1], "vocab_size": VOCABULARY, "head_size": 8, "head_max_code": 4096, "swap_grid": 4,
        "max_new_tokens": 24,
    }
    return SamplingRules(**(values | changes))  # type: ignore[arg-type]


def tiny_model(folder: Path) -> tuple[Layout, State]:
    """A random Llama's config.json in ``folder``, its layout and its bit patterns."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.3,
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    names = {name: ("BF16", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    names.pop("lm_head.weight")
    layout = Layout.of(names, {"lm_head.weight": "model.embed_tokens.weight"})
    return layout, export_state(model, layout)


def moved(state: State, seed: int, scale: float = 0.05) -> State:
    """Another version of ``state``: every tensor a little different."""
    rng = np.random.default_rng(seed)
    new: State = {}
    for name, bits in state.items():
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        values = values + scale * rng.standard_normal(values.shape).astype(np.float32)
        new[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return new


class FakeWeights:
    """A ``WeightSource`` whose newest version is what the test says."""

    def __init__(self, states: dict[int, State]):
        self.states, self.shown, self.reads = states, 0, list[int]()

    def newest(self) -> int:
        return self.shown

    def has(self, version: int) -> bool:
        return version in self.states and version <= self.shown

    @contextmanager
    def state(self, version: int) -> Iterator[State]:
        if version not in self.states:
            raise LocalFault(E_NO_VERSION, "not here", got=version)
        self.reads.append(version)
        yield self.states[version]


def request(number: int, *, version: int = 0, length: int = 6, group: int | None = None) -> Request:
    rng = np.random.default_rng(number if group is None else group + 1000)
    return Request(
        key=f"unit{number}/{number}", sample=number, prompt=tuple(int(t) for t in rng.integers(2, VOCABULARY, length)),
        seed=hashlib.sha256(b"%d" % number).digest(), start_version=version,
    )


def drain(engine: Engine, most_steps: int = 2000) -> list[Finished]:
    """Step until nothing is open."""
    finished: list[Finished] = []
    for _ in range(most_steps):
        if not engine.open_requests:
            return finished
        finished += engine.step()
    raise AssertionError("the engine does not come to an end")


def by_sample(finished: Sequence[Finished]) -> dict[int, Finished]:
    assert len({done.request.sample for done in finished}) == len(finished)
    return {done.request.sample: done for done in finished}
