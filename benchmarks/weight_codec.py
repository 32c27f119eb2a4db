"""Bytes and speed of weight diffs: ours, and the layouts others ship, on the same changes.

    python benchmarks/weight_codec.py [--quick] [--json] [--seed N] [--cache DIR] [--record N]

Diffs are real (recorded by ``recorded_diffs.py`` in ``--cache``, which takes minutes once; ``--record 0`` and
``--quick`` do without where there is no recording) and synthetic, of three densities. Bytes are set against the order-0
entropy of positions and steps, and for XC against that per exponent of the old word. Speeds are per thread, against
``np.copyto`` of the whole state. Against hashing, and two threads against one, stands the median of what many rounds
say, each of which runs the two within a second of each other. Beside that stands what a second process brings, which
shares nothing with the first: more than that the cores do not have.
"""

from __future__ import annotations

import harness  # first: it puts the project on the path

# ruff: noqa: I001
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalFault
from protocol.weights.bound import diff_bound
from protocol.weights.chunk import Method
from protocol.weights.diff import (
    DIFF_SEGMENT_BYTES,
    apply_patch,
    decode_anchor,
    decode_diff,
    encode_anchor,
    encode_diff,
)
from protocol.weights.layout import Layout, State, copy_state
from protocol.weights.coder import Coder
import whole_diffs
from recorded_diffs import CHAIN_LR, Recording, load, record
from rival_codecs import RIVALS

#: Step sizes of synthetic diffs, for about 0.1, 1 and 5 % density.
SYNTHETIC_STEPS: Final = {"synthetic 0.1 %": 2.4e-8, "synthetic 1 %": 3.4e-7, "synthetic 5 %": 2.4e-6}
#: Where the recording is kept.
_CACHE: Final = Path.home() / ".cache" / "assay-bench" / "weight-codec"
#: Versions of a catch-up.
CATCH_UP: Final = 20
#: Ours: name -> method and entropy coder.
OURS: Final = {
    "gap_zstd": (Method.GAP, Coder.ZSTD), "gap_rans": (Method.GAP, Coder.RANS),
    "xc_zstd": (Method.XC, Coder.ZSTD), "xc_rans": (Method.XC, Coder.RANS),
}


@dataclass(frozen=True)
class Case:
    """One diff to code."""

    name: str
    layout: Layout
    old: State
    new: State


@dataclass(frozen=True)
class Codec:
    """``encode`` gives what travels; ``apply`` decodes it and changes a state, and gives what puts that back."""

    encode: Callable[[], Any]
    apply: Callable[[Any, State], Callable[[], None]]

    @staticmethod
    def size(data: Any) -> int:
        """Bytes of what travels."""
        return len(data) if isinstance(data, bytes) else sum(map(len, data))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--cache", type=Path, default=_CACHE, metavar="DIR", help=f"folder of the recording ({_CACHE})")
    parser.add_argument(
        "--record", type=int, default=CATCH_UP, metavar="N",
        help=f"steps to record there if there are none yet ({CATCH_UP})",
    )
    options = parser.parse_args()
    harness.pin_threads()
    recording = load(options.cache)
    if recording is None and options.record and not options.quick:
        say = partial(print, file=sys.stderr, flush=True)
        try:
            recording = record(options.cache, options.record, options.seed, say)
        except (ImportError, LocalFault) as error:
            say(f"no recording, only synthetic diffs: {error}")
    rounds = 3 if options.quick else 5
    cases = list(_cases(recording, options.quick, options.seed))
    densities = {case.name: _measure(case, rounds) for case in cases}
    main_case = next((case for case in cases if case.name == _name(CHAIN_LR)), cases[1])
    large = _large(main_case, options.seed)
    result = {
        "densities": densities, "main": main_case.name,
        "recorded_steps": 0 if recording is None else len(recording.chain),
        **whole_diffs.measure(large.layout, large.old, large.new, rounds),
        **_catch_up(recording, options.quick, options.seed),
        **_summary(densities, main_case.name),
    }
    harness.finish(result, _text(result), only_json=options.json)


# -- what is coded ---------------------------------------------------------------------------------------


def _name(lr: float) -> str:
    return f"recorded, lr {lr:.0e}"


def _cases(recording: Recording | None, quick: bool, seed: int) -> Iterator[Case]:
    if recording is not None:
        changes = {**recording.singles, CHAIN_LR: recording.chain[0]}
        for lr in (CHAIN_LR,) if quick else sorted(changes):
            new = recording.after(changes[lr], recording.first)
            yield _part(Case(_name(lr), recording.layout, recording.first, new), 2**26 if quick else None)
    drift = Drift(2**23 if quick else 2**26, seed)
    for name, step in SYNTHETIC_STEPS.items():
        old = drift.published()
        drift.move(step)
        yield Case(name, drift.layout, old, drift.published())


def _large(case: Case, seed: int) -> Case:
    """The case, or a synthetic one where it is too small for work on several threads."""
    if case.layout.nbytes > DIFF_SEGMENT_BYTES:
        return case
    drift = Drift(DIFF_SEGMENT_BYTES, seed)  # words: two segments
    old = drift.published()
    drift.move(SYNTHETIC_STEPS["synthetic 1 %"])
    return Case("large", drift.layout, old, drift.published())


def _part(case: Case, nbytes: int | None) -> Case:
    """The first tensors of a case, about ``nbytes`` of state; all of it for None."""
    if nbytes is None:
        return case
    names = [entry.name for entry in case.layout.entries if entry.offset + entry.nbytes <= nbytes]
    if not names:
        names = [case.layout.entries[0].name]
    layout = Layout.of({e.name: (e.dtype, e.shape) for e in case.layout.entries if e.name in names})
    return Case(case.name, layout, {n: case.old[n] for n in names}, {n: case.new[n] for n in names})


class Drift:
    """Synthetic weights with the statistics of a trained model.

    Normal, with a spread per tensor and masters anywhere between two bf16 numbers; every step is of like size with a
    random sign that mostly lasts, as under AdamW with momentum.
    """

    def __init__(self, words: int, seed: int):
        self._rng = np.random.default_rng(seed)
        rows = words // 8 // 512
        spreads = [0.01, 0.02, 0.02, 0.03, 0.04, 0.06, 0.1, 0.15]
        self._masters = {
            f"layer.{i}": (self._rng.standard_normal((rows, 512), np.float32) * np.float32(s)) for i, s in
            enumerate(spreads)
        }
        self._signs = {name: self._sign(m) for name, m in self._masters.items()}
        self.layout = Layout.of({name: ("BF16", m.shape) for name, m in self._masters.items()})

    def _sign(self, like: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._rng.choice(np.array([-1, 1], np.float32), like.shape)

    def published(self) -> State:
        """Masters rounded to nearest, ties to even."""
        state: State = {}
        for name, master in self._masters.items():
            bits = master.view(np.uint32)
            state[name] = ((bits + (bits >> 16 & 1) + 0x7FFF) >> 16).astype("<u2")
        return state

    def move(self, step: float) -> None:
        """One optimiser step."""
        for name, master in self._masters.items():
            fresh = self._rng.random(master.shape, np.float32) < 0.15
            self._signs[name] = np.where(fresh, self._sign(master), self._signs[name])
            master += np.float32(step) * self._signs[name]


# -- measuring -------------------------------------------------------------------------------------------


def _codecs(case: Case, threads: int = 1) -> dict[str, Codec]:
    """Everybody on the same case; ours on ``threads`` threads."""
    found: dict[str, Codec] = {}
    for name, rival in RIVALS.items():
        found[name] = Codec(partial(rival.encode, case.old, case.new), _overwriting(rival.apply, case.old))
    found["full_planes"] = Codec(
        lambda: encode_anchor(case.layout, case.new, threads=threads),
        _overwriting(lambda state, data: _keep(state, decode_anchor(data, case.layout, threads=threads)), case.old),
    )
    for name, (method, entropy) in OURS.items():
        found[name] = Codec(
            partial(encode_diff, case.layout, case.old, case.new, method=method, entropy=entropy, threads=threads),
            partial(_apply_ours, case.layout, threads=threads),
        )
    return found


def _apply_ours(layout: Layout, data: list[bytes], state: State, threads: int) -> Callable[[], None]:
    undo = apply_patch(layout, state, decode_diff(layout, data, threads=threads), threads=threads)
    return lambda: undo.revert(state)


def _overwriting(apply: Callable[[State, Any], None], old: State) -> Callable[[Any, State], Callable[[], None]]:
    def run(data: Any, state: State) -> Callable[[], None]:
        apply(state, data)
        return lambda: _keep(state, old)

    return run


def _keep(state: State, words: State) -> None:
    for name, array in words.items():
        np.copyto(state[name], array)


def _measure(case: Case, rounds: int) -> dict[str, Any]:
    bound = diff_bound(case.layout, case.old, case.new)
    changed, order_0, given = bound.changed, bound.order_0, bound.exponent
    codecs = _codecs(case)
    data = {name: codec.encode() for name, codec in codecs.items()}
    live = copy_state(case.old)
    for name, codec in codecs.items():
        reset = codec.apply(data[name], live)
        assert all((live[n] == case.new[n]).all() for n in live), name
        reset()
        assert all((live[n] == case.old[n]).all() for n in live), name
    scratch = copy_state(case.old)
    encode = harness.interleave(
        {"copy": lambda: _keep(scratch, case.old), **{n: c.encode for n, c in codecs.items()}}, rounds=rounds
    )
    apply = _applied(codecs, data, live, rounds)
    words = case.layout.nbytes // 2
    return {
        "density": changed / words, "words": words, "changed": changed, "bound_order0_bytes": round(order_0),
        "bound_exponent_bytes": round(given), "copy_gb_s": case.layout.nbytes / encode["copy"].median / 1e9,
        "codecs": {
            name: {
                "bytes": Codec.size(data[name]), "ratio_vs_full": case.layout.nbytes / Codec.size(data[name]),
                "ratio_to_bound": Codec.size(data[name]) / (given if name.startswith("xc") else order_0),
                "encode_vs_memcpy": encode["copy"].median / encode[name].median, "encode_spread": encode[name].spread,
                "apply_vs_memcpy": encode["copy"].median / apply[name].median, "apply_spread": apply[name].spread,
            }
            for name in codecs
        },
    }


def _applied(
    codecs: dict[str, Codec], data: dict[str, Any], live: State, rounds: int
) -> dict[str, harness.Timing]:
    """Times of decoding and applying, in turns; putting the state back is not timed."""
    found: dict[str, list[float]] = {name: [] for name in codecs}
    for _ in range(rounds):
        for name, codec in codecs.items():
            started = time.perf_counter()
            reset = codec.apply(data[name], live)
            found[name].append(time.perf_counter() - started)
            reset()
    return {name: harness.Timing(tuple(seconds)) for name, seconds in found.items()}


def _catch_up(recording: Recording | None, quick: bool, seed: int) -> dict[str, Any]:
    """Bytes of one diff over many versions against the diffs one by one; also over what was recorded, if shorter."""
    recorded = 0 if recording is None else len(recording.chain)
    found: dict[str, Any] = {}
    if recording is not None and not quick:
        bytes_of = _merged_and_chain(recording.layout, _recorded_states(recording), min(recorded, CATCH_UP))
        found = {"catchup_recorded_versions": min(recorded, CATCH_UP), "catchup_recorded_vs_chain": bytes_of}
    if recorded >= CATCH_UP and found:
        return {**found, "catchup20_vs_chain": found["catchup_recorded_vs_chain"], "catchup20_kind": "recorded"}
    drift = Drift(2**22 if quick else 2**24, seed + 1)
    ratio = _merged_and_chain(drift.layout, _drifted_states(drift), CATCH_UP)
    return {**found, "catchup20_vs_chain": ratio, "catchup20_kind": "synthetic"}


def _merged_and_chain(layout: Layout, states: Iterator[State], versions: int) -> float:
    """Bytes of one diff over ``versions`` steps, over those of its steps one by one."""
    first = previous = next(states)
    chain = 0
    for _ in range(versions):
        following = next(states)
        chain += Codec.size(encode_diff(layout, previous, following))
        previous = following
    return Codec.size(encode_diff(layout, first, previous)) / chain


def _recorded_states(recording: Recording) -> Iterator[State]:
    state = recording.first
    yield state
    for change in recording.chain:
        state = recording.after(change, state)
        yield state


def _drifted_states(drift: Drift) -> Iterator[State]:
    while True:
        yield drift.published()
        drift.move(SYNTHETIC_STEPS["synthetic 1 %"])


def _summary(densities: dict[str, Any], main_case: str) -> dict[str, Any]:
    """Where the claims are kept worst, over the cases they are made for."""
    xc_vs_grail = {
        name: case["codecs"]["xc_rans"]["bytes"] / case["codecs"]["grail_v31"]["bytes"]
        for name, case in densities.items()
    }
    speeds = densities[main_case]["codecs"]
    dense = [case for case in densities.values() if case["density"] >= 0.003]
    return {
        "xc_vs_grail_bytes": xc_vs_grail[main_case], "xc_vs_grail_bytes_by": xc_vs_grail,
        "gap_ratio_to_bound": max((c["codecs"]["gap_rans"]["ratio_to_bound"] for c in dense), default=None),
        "gap_zstd_ratio_to_bound": max((c["codecs"]["gap_zstd"]["ratio_to_bound"] for c in dense), default=None),
        **{
            f"{codec}_ratio_to_bound": max(c["codecs"][codec]["ratio_to_bound"] for c in densities.values())
            for codec in ("xc_zstd", "xc_rans")
        },
        **{
            f"{codec.removesuffix('_rans')}_{what}_vs_memcpy": speeds[codec][f"{what}_vs_memcpy"]
            for codec in ("gap_rans", "xc_rans") for what in ("encode", "apply")
        },
    }


def _text(result: dict[str, Any]) -> str:
    parts = []
    for name, case in result["densities"].items():
        rows = [
            (codec, m["bytes"], m["ratio_vs_full"], m["ratio_to_bound"], m["encode_vs_memcpy"], m["apply_vs_memcpy"])
            for codec, m in case["codecs"].items()
        ]
        title = f"{name}: {case['words']:,} words, {100 * case['density']:.3g} % changed"
        header = ("codec", "bytes", "vs full", "to bound", "encode / memcpy", "apply / memcpy")
        parts += [title, harness.table(header, rows), ""]
    rest = {key: value for key, value in result.items() if isinstance(value, int | float | str)}
    return "\n".join([*parts, harness.table(("what", "measured"), list(rest.items()))])


if __name__ == "__main__":
    main()
