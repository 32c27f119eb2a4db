"""Five ways for an engine to serve a stream of requests while weights change: see ``inflight.py``."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from node.engine import Finished, Request
from node.torch_engine import TorchEngine
from protocol.messages import SamplingRules
from protocol.reference.loader import export_state
from protocol.weights.layout import Layout, State

VOCABULARY, PROMPT, LONGEST = 2048, 16, 256
MEDIAN, SIGMA = 24.0, 1.0
RULES: Final = SamplingRules(
    eos_token_ids=[0], vocab_size=VOCABULARY, head_size=32, swap_grid=16, max_new_tokens=LONGEST
)
STEADY: Final = ("static", "continuous")
MOVING: Final = ("drain", "restart", "in-flight")
#: Completions between two versions.
BATCHES: Final = (48, 96)
#: Different weights that versions go through in turn.
_STATES: Final = 3


@dataclass(frozen=True)
class Load:
    """How much is served."""

    slots: int = 32
    settle: int = 3_000  #: tokens drawn before a measurement, so that rows of all ages are under way
    tokens: int = 8_000  #: drawn in one measurement
    batch: int = BATCHES[0]  #: mean completions between two versions
    batches: tuple[int, ...] = BATCHES  #: values of ``batch`` to measure
    rounds: int = 3


@dataclass
class Served:
    """What one way of serving came to."""

    seconds: float = 0.0
    tokens: int = 0  #: of finished completions
    drawn: int = 0  #: all
    lengths: list[int] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)  #: tokens by lag

    def add(self, finished: list[Finished], newest: int) -> None:
        """Count completions that ended while ``newest`` was the newest version."""
        for done in finished:
            self.tokens += len(done.rollout)
            self.lengths.append(len(done.rollout))
            self.lags.update((newest - versions(done)).tolist())


def versions(done: Finished) -> NDArray[np.int64]:
    """(T,) version of each token drawn; segments count from where the completion began, before the request."""
    first = done.request.first_position
    segments = tuple(replace(segment, start=segment.start - first) for segment in done.rollout.segments)
    return replace(done.rollout, segments=segments).versions()


class Versions:
    """A ``node.engine.WeightSource`` that holds every version there is."""

    def __init__(self, states: list[State]):
        self._states, self.shown = states, 0

    def newest(self) -> int:
        """Newest version."""
        return self.shown

    def has(self, version: int) -> bool:
        """Whether it was published."""
        return 0 <= version <= self.shown

    @contextmanager
    def state(self, version: int) -> Iterator[State]:
        """Its bit patterns."""
        yield self._states[version % len(self._states)]


def lengths(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Lengths of completions, in tokens."""
    return np.clip(rng.lognormal(np.log(MEDIAN), SIGMA, count), 1, LONGEST).astype(np.int64)


class Stream:
    """Requests without end, the same for every way of serving."""

    def __init__(self, seed: int):
        self._rng, self._count = np.random.default_rng(seed), 0

    def take(self, count: int, version: int) -> list[Request]:
        """The next requests, to begin under ``version``."""
        return [self._one(version) for _ in range(count)]

    def _one(self, version: int) -> Request:
        self._count += 1
        length = int(lengths(self._rng, 1)[0])
        return Request(
            key=f"unit{self._count}/0", sample=0, start_version=version, first_position=LONGEST - length,
            prompt=tuple(self._rng.integers(1, VOCABULARY, PROMPT).tolist()),
            seed=hashlib.sha256(b"%d" % self._count).digest(),
        )


def make_model(folder: Path, seed: int) -> tuple[Layout, list[State]]:
    """The configuration in ``folder``, the layout and some versions of the weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.1,
    )
    config.save_pretrained(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    names = {name: ("BF16", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    names.pop("lm_head.weight")
    layout = Layout.of(names, {"lm_head.weight": "model.embed_tokens.weight"})
    states = []
    for _ in range(_STATES):
        states.append(export_state(model, layout))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
    return layout, states


class Server:
    """Serves the stream in one of the ways for a number of decode passes."""

    def __init__(self, way: str, folder: Path, layout: Layout, states: list[State], load: Load, seed: int):
        self._way, self._load, self._stream = way, load, Stream(seed)
        self._versions = Versions(states)
        self._engine = TorchEngine(folder, layout, RULES, self._versions, slots=load.slots)
        self._open: dict[str, Request] = {}
        self.served = Served()
        self._coming = 0
        self._version_tokens = load.batch * float(lengths(np.random.default_rng(0), 100_000).mean())
        self._engine.step()  # the first version is loaded before anything is timed

    def serve(self) -> Served:
        """Run; the processor time is that of everything the engine does."""
        self._until(self._load.settle)
        self.served, before, started = Served(), self._engine.tokens, time.process_time()
        self._until(before + self._load.tokens)
        self.served.seconds = time.process_time() - started
        self.served.drawn = self._engine.tokens - before
        self._engine.close()
        return self.served

    def _until(self, tokens: int) -> None:
        while self._engine.tokens < tokens:
            self._publish()
            self._fill()
            self._step()

    def _publish(self) -> None:
        """Show the engine a new version when it is time and the way of serving lets it in."""
        if self._way in STEADY:
            return
        self._coming = int(self._engine.tokens / self._version_tokens)
        if self._coming == self._versions.shown or (self._way == "drain" and self._open):
            return
        self._versions.shown = self._coming
        if self._way == "restart":
            self._engine.cancel(list(self._open))
            again = [replace(request, start_version=self._coming) for request in self._open.values()]
            self._submit(again)

    def _fill(self) -> None:
        """Hand in as many requests as there is room for, where the way of serving allows."""
        free = self._load.slots - len(self._open)
        waits = self._way == "static" or (self._way == "drain" and self._coming != self._versions.shown)
        if free and not (waits and self._open):
            self._submit(self._stream.take(free, self._versions.shown))

    def _submit(self, requests: list[Request]) -> None:
        self._engine.submit(requests)
        self._open |= {request.key: request for request in requests}

    def _step(self) -> None:
        before, started = self._engine.version, time.process_time()
        finished = self._engine.step()
        if self._engine.version != before:
            self.served.pauses.append(time.process_time() - started)
        self.served.add(finished, self._versions.shown)
        for done in finished:
            del self._open[done.request.key]
