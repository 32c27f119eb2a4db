"""Committed heads of the rows in progress, kept in flat buffers until a row is finished.

Legend: R rows of a pass, K most head entries, Y layers with a router, X experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.messages import RouteRules
from protocol.rollout import Finish, Rollout, Segment

_Ints = NDArray[Any]


class Recorder:
    """Draws of up to ``records`` rows, by record index and completion position counted from the row's first."""

    def __init__(self, records: int, head_size: int, routes: RouteRules | None = None):
        shape = (0, 0) if routes is None else (routes.layers, routes.per_token)
        self._free = list(range(records - 1, -1, -1))
        self._tokens = np.zeros((records, 64), np.uint32)
        self._lengths = np.zeros((records, 64), np.uint8)
        self._ids = np.zeros((records, 64, head_size), np.uint32)
        self._codes = np.zeros((records, 64, head_size), np.uint16)
        self._tails = np.zeros((records, 64), np.uint16)
        self._token_codes = np.zeros((records, 64), np.uint16)
        self._with_routes = routes is not None
        self._routes = np.zeros((records, 64, *shape), np.uint8)

    def take(self) -> int:
        """A record index of one's own."""
        return self._free.pop()

    def release(self, record: int) -> None:
        """Give a record index back."""
        self._free.append(record)

    def write(
        self, records_R: _Ints, at_R: _Ints, tokens_R: _Ints, lengths_R: _Ints, ids_RK: _Ints, codes_RK: _Ints,
        tails_R: _Ints, token_codes_R: _Ints,
    ) -> None:
        """Note one draw of each row."""
        if int(at_R.max()) >= self._tokens.shape[1]:
            self._grow()
        width = ids_RK.shape[1]
        self._tokens[records_R, at_R] = tokens_R
        self._lengths[records_R, at_R] = lengths_R
        self._ids[records_R, at_R, :width] = ids_RK
        self._codes[records_R, at_R, :width] = codes_RK
        self._tails[records_R, at_R] = tails_R
        self._token_codes[records_R, at_R] = token_codes_R

    def write_routes(self, records_R: _Ints, at_R: _Ints, routes_RYX: _Ints) -> None:
        """Note the experts of the pass behind each row's draw; after :meth:`write`."""
        self._routes[records_R, at_R] = np.sort(routes_RYX, axis=2)

    def rollout(
        self, record: int, length: int, sample: int, segments: tuple[Segment, ...], finish: Finish
    ) -> Rollout:
        """What was noted for a row, as a rollout."""
        lengths = self._lengths[record, :length].copy()
        used = np.arange(self._ids.shape[2]) < lengths[:, None]
        return Rollout(
            sample=sample, tokens=self._tokens[record, :length].copy(), head_lengths=lengths,
            head_ids=self._ids[record, :length][used], head_codes=self._codes[record, :length][used],
            tail_codes=self._tails[record, :length].copy(), token_codes=self._token_codes[record, :length].copy(),
            segments=segments, finish=finish,
            routes=self._routes[record, :length].copy() if self._with_routes else None,
        )

    def _grow(self) -> None:
        for name in ("_tokens", "_lengths", "_ids", "_codes", "_tails", "_token_codes", "_routes"):
            old = getattr(self, name)
            new = np.zeros((old.shape[0], 2 * old.shape[1], *old.shape[2:]), old.dtype)
            new[:, : old.shape[1]] = old
            setattr(self, name, new)
