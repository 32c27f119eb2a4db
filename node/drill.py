"""Drills: nodes of the operator's own that cheat on purpose in a named way, to measure that they are caught.

A drill wraps the engine or its weights; the daemon around it is the honest one. It runs only with a key that the
coordinator enrolled for exactly this drill, whose work never reaches the learner.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from node.config import DrillName
from node.engine import Engine, Finished, Request, WeightSource
from protocol.errors import LocalFault, PeerFault, code
from protocol.head import offsets
from protocol.messages import SamplingRules
from protocol.rollout import NO_CODE, Rollout
from protocol.sampler import behaviour_logprobs
from protocol.weights.layout import Layout, State

E_DRILL_NOT_ENROLLED = code("E_DRILL_NOT_ENROLLED", "this key is not enrolled by the operator as a drill of that name")

#: Candidates per sample of the drill best-of-n.
CANDIDATES: Final = 4
#: Versions by which the drill stale lags behind what it claims.
STALE_VERSIONS: Final = 2


def require_enrolled(drill: DrillName, record: dict[str, Any]) -> None:
    """Whether the coordinator's record of this node allows the drill.

    Raises:
        PeerFault: ``E_DRILL_NOT_ENROLLED``.
    """
    if record.get("drill") != drill:
        raise PeerFault(
            E_DRILL_NOT_ENROLLED, f"not enrolled as a drill: {drill}", expected=drill,
            got=record.get("drill") or "an ordinary node",
            hint=f"the operator enrols it: assay coordinator drill NODE_ID {drill} --dir DIR",
        )


def drilled_weights(drill: DrillName | None, source: WeightSource, layout: Layout) -> WeightSource:
    """The weights that the engine of this drill computes with."""
    if drill == "int8":
        return RoundedWeights(source, layout)
    return StaleWeights(source) if drill == "stale" else source


def drilled_engine(drill: DrillName | None, engine: Engine, rules: SamplingRules) -> Engine:
    """The engine of this drill around an honest one."""
    if drill == "best-of-n":
        return BestOfN(engine, rules)
    return EditedAnswer(engine, rules) if drill == "edited-answer" else engine


# -- weights ---------------------------------------------------------------------------------------------


class StaleWeights:
    """Gives an older version under the name of a newer one."""

    def __init__(self, source: WeightSource):
        self._source = source

    def newest(self) -> int:
        """Newest version of the honest source."""
        return self._source.newest()

    def has(self, version: int) -> bool:
        """Whether the honest source has it."""
        return self._source.has(version)

    @contextmanager
    def state(self, version: int) -> Iterator[State]:
        """The state of ``STALE_VERSIONS`` before."""
        with self._source.state(max(0, version - STALE_VERSIONS)) as state:
            yield state


class RoundedWeights:
    """Gives weights rounded to 8 bits per output channel, as a node that serves int8 would compute with."""

    def __init__(self, source: WeightSource, layout: Layout):
        self._source, self._layout = source, layout
        self._rounded: OrderedDict[int, State] = OrderedDict()

    def newest(self) -> int:
        """Newest version of the honest source."""
        return self._source.newest()

    def has(self, version: int) -> bool:
        """Whether the honest source has it."""
        return self._source.has(version)

    @contextmanager
    def state(self, version: int) -> Iterator[State]:
        """The rounded state; the last two are kept."""
        if version not in self._rounded:
            with self._source.state(version) as state:
                self._rounded[version] = {
                    entry.name: round_to_int8(state[entry.name]) if entry.dtype == "BF16" and len(entry.shape) > 1
                    else state[entry.name].copy()
                    for entry in self._layout.entries
                }
            while len(self._rounded) > 2:
                self._rounded.popitem(last=False)
        yield self._rounded[version]


def round_to_int8(bits: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 bit patterns of weights rounded to 255 levels per row (symmetric), as bfloat16 bit patterns."""
    values = (bits.astype(np.uint32) << 16).view(np.float32).reshape(-1, bits.shape[-1])
    scale = np.abs(values).max(axis=1, keepdims=True) / 127
    scale[scale == 0] = 1
    rounded = (np.rint(values / scale) * scale).astype(np.float32).view(np.uint32)
    nearest_even = (rounded + 0x7FFF + ((rounded >> 16) & 1)) >> 16
    result: NDArray[Any] = nearest_even.astype(bits.dtype).reshape(bits.shape)
    return result


# -- engines ---------------------------------------------------------------------------------------------


class _Wrapped:
    """An engine around another one; what a drill does not change is passed through."""

    def __init__(self, inner: Engine, rules: SamplingRules):
        self._inner, self._rules = inner, rules

    @property
    def profile(self) -> str:
        """As the honest engine."""
        return self._inner.profile

    @property
    def version(self) -> int:
        """As the honest engine."""
        return self._inner.version

    @property
    def tokens(self) -> int:
        """As the honest engine."""
        return self._inner.tokens

    def check(self, request: Request) -> None:
        """As the honest engine."""
        self._inner.check(request)

    def close(self) -> None:
        """As the honest engine."""
        self._inner.close()


class BestOfN(_Wrapped):
    """Makes several candidates with randomness of its own and hands in the one that looks best. Heads are honest."""

    def __init__(self, inner: Engine, rules: SamplingRules):
        super().__init__(inner, rules)
        self._open: dict[str, Request] = {}
        self._found: dict[str, list[Rollout]] = {}

    @property
    def capacity(self) -> int:
        """Samples at once."""
        return max(1, self._inner.capacity // CANDIDATES)

    @property
    def open_requests(self) -> int:
        """Samples under way."""
        return len(self._open)

    @property
    def waiting(self) -> frozenset[str]:
        """Samples none of whose candidates is begun."""
        waiting = self._inner.waiting
        return frozenset(key for key in self._open if waiting.issuperset(_candidates(key)))

    def submit(self, requests: Sequence[Request]) -> None:
        """Take each request on several times."""
        self._inner.submit([
            replace(request, key=key, seed=secrets.token_bytes(32))
            for request in requests for key in _candidates(request.key)
        ])
        self._open.update((request.key, request) for request in requests)

    def cancel(self, keys: Sequence[str]) -> None:
        """Forget samples with all of their candidates."""
        self._inner.cancel([candidate for key in keys for candidate in _candidates(key)])
        for key in keys:
            self._open.pop(key, None)
            self._found.pop(key, None)

    def step(self) -> list[Finished]:
        """As the honest engine, one rollout per sample."""
        chosen = []
        for done in self._inner.step():
            key = done.request.key.partition("#")[0]
            found = self._found.setdefault(key, [])
            found.append(done.rollout)
            if len(found) == CANDIDATES:
                best = max(found, key=lambda rollout: float(behaviour_logprobs(rollout, self._rules).mean()))
                chosen.append(Finished(self._open.pop(key), best))
                del self._found[key]
        return chosen


class EditedAnswer(_Wrapped):
    """Changes one token near the end of an honest rollout and regenerates what follows it. Heads are honest."""

    def __init__(self, inner: Engine, rules: SamplingRules):
        super().__init__(inner, rules)
        self._edited: dict[str, Finished] = {}

    @property
    def capacity(self) -> int:
        """As the honest engine."""
        return self._inner.capacity

    @property
    def open_requests(self) -> int:
        """As the honest engine."""
        return self._inner.open_requests

    @property
    def waiting(self) -> frozenset[str]:
        """As the honest engine, without edits under way."""
        return self._inner.waiting - self._edited.keys()

    def submit(self, requests: Sequence[Request]) -> None:
        """As the honest engine."""
        self._inner.submit(requests)

    def cancel(self, keys: Sequence[str]) -> None:
        """As the honest engine."""
        self._inner.cancel(keys)
        for key in keys:
            self._edited.pop(key, None)

    def step(self) -> list[Finished]:
        """As the honest engine; each rollout comes back for a second round."""
        out = []
        for done in self._inner.step():
            first = self._edited.pop(done.request.key, None)
            if first is not None:
                out.append(Finished(first.request, _join(first.rollout, done.rollout)))
            elif not self._edit(done):
                out.append(done)
        return out

    def _edit(self, done: Finished) -> bool:
        """Change a token and let the engine go on from there; False when there is nothing to change."""
        cut = self._cut(done.rollout)
        if cut is None:
            return False
        request = replace(
            done.request, prompt=done.request.prompt + tuple(cut.tokens.tolist()), first_position=len(cut),
            start_version=cut.segments[-1].version,
        )
        try:
            self._inner.submit([request])
        except LocalFault:
            return False
        self._edited[request.key] = Finished(done.request, cut)
        return True

    def _cut(self, rollout: Rollout) -> Rollout | None:
        """The rollout up to its last token but one that has an alternative in its head, with that token exchanged."""
        starts = offsets(rollout)
        for position in range(len(rollout) - 2, -1, -1):
            head = rollout.head_ids[starts[position] :][: rollout.head_lengths[position]]
            barred = {int(rollout.tokens[position]), *self._rules.eos_token_ids}
            other = next((token for token in head.tolist() if token not in barred), None)
            if other is not None:
                return exchanged(rollout, position, other)
        return None


def _candidates(key: str) -> list[str]:
    return [f"{key}#{number}" for number in range(CANDIDATES)]


def exchanged(rollout: Rollout, position: int, token: int) -> Rollout:
    """The rollout up to ``position``, whose token is another one of its head."""
    end = position + 1
    entries = int(rollout.head_lengths[:end].sum(dtype=np.int64))
    tokens, token_codes = rollout.tokens[:end].copy(), rollout.token_codes[:end].copy()
    tokens[position], token_codes[position] = token, NO_CODE
    return replace(
        rollout, tokens=tokens, token_codes=token_codes, head_lengths=rollout.head_lengths[:end],
        head_ids=rollout.head_ids[:entries], head_codes=rollout.head_codes[:entries],
        tail_codes=rollout.tail_codes[:end], routes=None if rollout.routes is None else rollout.routes[:end],
        segments=tuple(segment for segment in rollout.segments if segment.start <= position),
    )


def _join(first: Rollout, rest: Rollout) -> Rollout:
    """One rollout of a prefix and what the engine made after it; the first segment of ``rest`` continues the prefix."""
    columns = ["tokens", "head_lengths", "head_ids", "head_codes", "tail_codes", "token_codes"]
    if first.routes is not None:
        columns.append("routes")
    joined: dict[str, Any] = {name: np.concatenate([getattr(first, name), getattr(rest, name)]) for name in columns}
    return replace(rest, segments=first.segments + rest.segments[1:], **joined)
