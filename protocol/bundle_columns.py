"""A bundle as plain columns over all its rollouts: what both wire forms carry, and the limits both keep.

Legend: R rollouts, G segments, T completion tokens, N head entries of the bundle, Y layers with a router, X experts per
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import PeerFault, code
from protocol.head import offsets, token_entries
from protocol.messages import RouteRules, SamplingRules
from protocol.rollout import NO_CODE, Bundle, Finish, Rollout, Segment, SwapMode

E_BUNDLE_COLUMNS = code("E_BUNDLE_COLUMNS", "a bundle's columns contradict each other or the run's limits")
E_BUNDLE_ROUTES = code(
    "E_BUNDLE_ROUTES", "a bundle's expert choices are missing, not asked for, out of range or not ascending"
)
E_COUNTS = code("E_COUNTS", "a commitment states other counts or sizes than its bundle has")
E_SEGMENTS = code("E_SEGMENTS", "a rollout's segments are not in order, not on the swap grid, or past its end")

#: Most rollouts of a bundle; a lease names no more samples.
MAX_ROLLOUTS: Final = 1024
#: Rank of a token that was drawn from the tail.
DRAWN: Final = 255


@dataclass(frozen=True, eq=False)
class Frame:
    """The columns that say how a bundle is cut."""

    sample: NDArray[Any]  #: (R,) sample index within the group
    length: NDArray[Any]  #: (R,) completion tokens
    finish: NDArray[Any]  #: (R,)
    segments: NDArray[Any]  #: (R,) segments of each rollout
    segment_start: NDArray[Any]  #: (G,)
    segment_version: NDArray[Any]  #: (G,)
    segment_mode: NDArray[Any]  #: (G,)
    head_length: NDArray[Any]  #: (T,)

    @classmethod
    def of(cls, bundle: Bundle) -> Frame:
        """The frame of a bundle."""
        rollouts = bundle.rollouts
        segments = [segment for rollout in rollouts for segment in rollout.segments]
        return cls(
            sample=np.array([rollout.sample for rollout in rollouts], np.uint32),
            length=np.array([len(rollout) for rollout in rollouts], np.uint32),
            finish=np.array([int(rollout.finish) for rollout in rollouts], np.uint8),
            segments=np.array([len(rollout.segments) for rollout in rollouts], np.uint16),
            segment_start=np.array([segment.start for segment in segments], np.uint32),
            segment_version=np.array([segment.version for segment in segments], np.uint64),
            segment_mode=np.array([int(segment.mode) for segment in segments], np.uint8),
            head_length=np.concatenate([rollout.head_lengths for rollout in rollouts]),
        )

    def check(self, entries: int, rules: SamplingRules) -> None:
        """Counts agree with each other and stay within the run's limits, so that slicing by them is safe.

        Raises:
            PeerFault: ``E_BUNDLE_COLUMNS``.
        """
        require(1 <= len(self.sample) <= MAX_ROLLOUTS, f"1 to {MAX_ROLLOUTS} rollouts", len(self.sample))
        lengths, head_lengths = self.length, self.head_length
        require(lengths.min() >= 1 and lengths.max() <= rules.max_new_tokens,
                f"1 to {rules.max_new_tokens} tokens per rollout", f"{lengths.min()} to {lengths.max()}")
        require(int(lengths.sum(dtype=np.int64)) == len(head_lengths), "token counts that add up", len(head_lengths))
        require(head_lengths.min() >= 1 and head_lengths.max() <= rules.head_size,
                f"heads of 1 to {rules.head_size} entries", f"{head_lengths.min()} to {head_lengths.max()}")
        require(int(head_lengths.sum(dtype=np.int64)) == entries, "head lengths that add up", entries)
        require(self.finish.max() <= max(Finish), "a known finish reason", self.finish.max())

    def head_starts(self) -> NDArray[np.int64]:
        """(T,) index of each position's first head entry."""
        starts: NDArray[np.int64] = np.cumsum(self.head_length, dtype=np.int64) - self.head_length
        return starts


@dataclass(frozen=True, eq=False)
class Draws:
    """The columns of what was drawn from what."""

    rank: NDArray[Any]  #: (T,) place of the token in its head, or ``DRAWN``
    token: NDArray[Any]  #: (T,)
    tail_code: NDArray[Any]  #: (T,)
    token_code: NDArray[Any]  #: (T,)
    head_id: NDArray[Any]  #: (N,)
    head_code: NDArray[Any]  #: (N,)
    routes: NDArray[Any] | None = None  #: (T, Y, X)

    @classmethod
    def of(cls, bundle: Bundle) -> Draws:
        """The draws of a bundle."""
        return cls(
            rank=np.concatenate([_ranks(rollout) for rollout in bundle.rollouts]).astype(np.uint8),
            token=_joined(bundle, "tokens"), tail_code=_joined(bundle, "tail_codes"),
            token_code=_joined(bundle, "token_codes"), head_id=_joined(bundle, "head_ids"),
            head_code=_joined(bundle, "head_codes"),
            routes=None if bundle.rollouts[0].routes is None else _joined(bundle, "routes"),
        )


def check_sayable(bundle: Bundle) -> None:
    """Whether a wire form can carry the bundle.

    Raises:
        ValueError: a head token carries a token code, only some rollouts have routes, or there is no rollout (our own
            bug).
    """
    if not bundle.rollouts:
        raise ValueError("a bundle holds at least one rollout")
    if len({rollout.routes is None for rollout in bundle.rollouts}) > 1:
        raise ValueError("some rollouts of a bundle have routes, others have none")
    for rollout in bundle.rollouts:
        if np.any((token_entries(rollout) >= 0) & (rollout.token_codes != NO_CODE)):
            raise ValueError("a token of the head carries a token code")


def to_bundle(frame: Frame, draws: Draws, rules: SamplingRules) -> Bundle:
    """The bundle of checked columns.

    Raises:
        PeerFault: ``E_SEGMENTS``, ``E_BUNDLE_ROUTES``.
    """
    check_routes(draws.routes, rules.routes)
    token_ends = np.cumsum(frame.length, dtype=np.int64)
    entry_ends = np.append(frame.head_starts(), len(draws.head_id))[token_ends]
    tokens, head_ids = draws.token.astype(np.uint32, copy=False), draws.head_id.astype(np.uint32, copy=False)
    head_lengths = frame.head_length.astype(np.uint8, copy=False)
    head_codes, tail_codes, token_codes = (
        codes.astype(np.uint16, copy=False) for codes in (draws.head_code, draws.tail_code, draws.token_code)
    )
    segments = _segments(frame, rules)
    rollouts, first, start = [], 0, 0
    for index, (last, end) in enumerate(zip(token_ends.tolist(), entry_ends.tolist(), strict=True)):
        rollouts.append(Rollout(
            int(frame.sample[index]), tokens[first:last], head_lengths[first:last], head_ids[start:end],
            head_codes[start:end], tail_codes[first:last], token_codes[first:last], segments[index],
            Finish(int(frame.finish[index])), None if draws.routes is None else draws.routes[first:last],
        ))
        first, start = last, end
    return Bundle(tuple(rollouts))


def require(holds: Any, expected: str, got: Any) -> None:
    """Refuse columns that do not fit.

    Raises:
        PeerFault: ``E_BUNDLE_COLUMNS``.
    """
    if not holds:
        raise PeerFault(E_BUNDLE_COLUMNS, "columns do not fit", expected=expected, got=got)


def check_most(rollouts: int, tokens: int, most: tuple[int, int] | None) -> None:
    """Refuse a bundle that says it holds more than was committed to, before work is spent on it.

    Args:
        most: rollouts and tokens of the commitment; None where there is none.

    Raises:
        PeerFault: ``E_COUNTS``.
    """
    if most is not None and (rollouts > most[0] or tokens > most[1]):
        raise PeerFault(
            E_COUNTS, "more rollouts or tokens than were committed to", expected=f"<= {most}", got=(rollouts, tokens)
        )


def check_routes(routes_TYX: NDArray[Any] | None, rules: RouteRules | None) -> None:
    """Expert choices are there exactly when the run asks for them, of its shape, in range, distinct and ascending.

    Raises:
        PeerFault: ``E_BUNDLE_ROUTES``.
    """
    if routes_TYX is None or rules is None:
        if (routes_TYX is None) != (rules is None):
            expected, got = ("none", "some") if rules is None else ("those of every token", "none")
            raise PeerFault(E_BUNDLE_ROUTES, "expert choices", expected=expected, got=got)
        return
    shape = (rules.layers, rules.per_token)
    if routes_TYX.shape[1:] != shape:
        raise PeerFault(
            E_BUNDLE_ROUTES, "shape of expert choices", expected=f"{shape} per token", got=routes_TYX.shape[1:]
        )
    known = routes_TYX.max() < rules.experts
    if not known or np.any(routes_TYX[:, :, 1:] <= routes_TYX[:, :, :-1]):
        raise PeerFault(
            E_BUNDLE_ROUTES, "expert choices", expected=f"ascending numbers below {rules.experts}",
            got="not ascending" if known else routes_TYX.max(),
        )


def _ranks(rollout: Rollout) -> NDArray[np.int64]:
    entries = token_entries(rollout)
    return np.where(entries >= 0, entries - offsets(rollout), DRAWN)


def _joined(bundle: Bundle, column: str) -> NDArray[Any]:
    return np.concatenate([getattr(rollout, column) for rollout in bundle.rollouts])


def _segments(frame: Frame, rules: SamplingRules) -> list[tuple[Segment, ...]]:
    most = (frame.length.astype(np.int64) - 1) // rules.swap_grid + 1
    if np.any(frame.segments > most):
        raise PeerFault(E_SEGMENTS, "too many segments", expected=f"one per {rules.swap_grid} tokens", got="more")
    counts = frame.segments.tolist()
    starts, versions, modes = (
        column.tolist() for column in (frame.segment_start, frame.segment_version, frame.segment_mode)
    )
    if sum(counts) != len(starts) or any(mode > max(SwapMode) for mode in modes):
        raise PeerFault(E_SEGMENTS, "segment columns", expected="counts that add up, known modes", got=counts[:8])
    segments, first = [], 0
    for count, length in zip(counts, frame.length.tolist(), strict=True):
        part = tuple(
            Segment(starts[i], versions[i], SwapMode(modes[i])) for i in range(first, first + count)
        )
        _check_segments(part, length, rules)
        segments.append(part)
        first += count
    return segments


def _check_segments(segments: tuple[Segment, ...], length: int, rules: SamplingRules) -> None:
    ordered = all(a.start < b.start and a.version < b.version for a, b in pairwise(segments))
    on_grid = all(segment.start % rules.swap_grid == 0 for segment in segments)
    last = segments[-1] if segments else Segment(length, 0)
    if last.start >= length or segments[0].start != 0 or not ordered or not on_grid or last.version >= 2**48:
        raise PeerFault(
            E_SEGMENTS, "segments of a rollout",
            expected=f"ascending starts from 0 below {length} on a grid of {rules.swap_grid}, ascending versions",
            got=[(segment.start, segment.version) for segment in segments[:8]],
        )
