"""The tokens of a bundle as one coded stream: which number comes after which, and what it is predicted from.

Spec: ``docs/spec/packed-bundle.md``, "Model".

Legend: T completion tokens and N head entries of the bundle. A *context* is a hash of what is known; contexts that
came up before predict what follows them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.bit_coder import Coder, code_number, compiled, hashed, past
from protocol.bundle_columns import DRAWN
from protocol.rollout import NO_CODE

# First weight set of each kind of number.
_IDS: Final = 0
_STEPS: Final = 32
_TAILS: Final = 64
_RANKS: Final = 80
_DRAWN_IDS: Final = 112
_DRAWN_CODES: Final = 144
_FRAME: Final = 160
#: Last number of a stream: one that is damaged or cut off seldom gets here with it.
END: Final = 0x5A5A


class Tokens(NamedTuple):
    """Columns of all tokens of a bundle, int64 so that one compiled function serves writing and reading."""

    starts: NDArray[np.int64]  #: (T,) 1 where a rollout begins; known to the reader
    head_lengths: NDArray[np.int64]  #: (T,) known to the reader
    tokens: NDArray[np.int64]  #: (T,)
    ranks: NDArray[np.int64]  #: (T,) place in the head, or ``DRAWN``
    tail_codes: NDArray[np.int64]  #: (T,)
    token_codes: NDArray[np.int64]  #: (T,)
    head_ids: NDArray[np.int64]  #: (N,)
    head_codes: NDArray[np.int64]  #: (N,)


@compiled
def code_column(coder: Coder, kind: int, column: NDArray[np.int64]) -> None:
    """Write or read the numbers below 2^48 of a column of the frame, each from its kind and the one before it.

    A reader stops once it is past its end.
    """
    before = 0
    for i in range(len(column)):
        if past(coder):
            return
        coder.work[0, 0] = hashed(50, kind, 0)
        coder.work[0, 1] = hashed(51, kind, before)
        before = column[i] = code_number(coder, 2, _FRAME, 48, True, column[i])


@compiled
def code_tokens(coder: Coder, width: int, columns: Tokens) -> int:
    """Write or read all tokens; ids have ``width`` bits. Returns the first position with an impossible rank, or -1.

    A reader stops once it is past its end.
    """
    contexts, ids, codes = coder.work[0], columns.head_ids, columns.head_codes
    entry = 0
    token, pair = 0, 0  # the token before, plus one, 0 before the first; hash of the two before
    for t in range(len(columns.tokens)):
        if past(coder):
            return -1
        if columns.starts[t] == 1:
            token, pair = 0, 0
        length = columns.head_lengths[t]
        before, two_before, code, step, first = 0, 0, 0, 0, 0
        for i in range(length):
            place = i if i < 4 else 3 + i // 4
            contexts[0] = hashed(1, 0, 0)
            contexts[1] = hashed(2, token, 0)
            contexts[2] = hashed(3, before, 0)
            contexts[3] = hashed(4, token, place)
            contexts[4] = hashed(5, token, before)
            contexts[5] = hashed(hashed(6, pair, before), two_before, 0)
            identity = code_number(coder, 6, _IDS, width, False, ids[entry])
            contexts[0] = hashed(10, i, 0)
            contexts[1] = hashed(11, place, _class_of(step))
            contexts[2] = hashed(12, place, _class_of(code))
            contexts[3] = hashed(13, token, identity)
            contexts[4] = hashed(hashed(14, pair, identity), before, 0)
            step = code_number(coder, 5, _STEPS, 16, True, (codes[entry] - code) & 0xFFFF)
            code = (code + step) & 0xFFFF
            ids[entry], codes[entry] = identity, code
            before, two_before = identity + 1, before
            first = code if i == 0 else first
            entry += 1
        contexts[0] = hashed(20, 0, 0)
        contexts[1] = hashed(21, _class_of(code), 0)
        contexts[2] = hashed(22, _class_of(code), _class_of(first))
        contexts[3] = hashed(23, pair, code)
        tail = columns.tail_codes[t] = code_number(coder, 4, _TAILS, 16, False, columns.tail_codes[t])
        contexts[0] = hashed(30, 0, 0)
        contexts[1] = hashed(31, _class_of(first), 0)
        contexts[2] = hashed(32, _class_of(tail), 0)
        rank = columns.ranks[t] = code_number(coder, 3, _RANKS, 8, True, (columns.ranks[t] + 1) & 255) - 1 & 255
        if rank == DRAWN:
            contexts[0] = hashed(40, 0, 0)
            contexts[1] = hashed(41, token, 0)
            columns.tokens[t] = code_number(coder, 2, _DRAWN_IDS, width, False, columns.tokens[t])
            contexts[1] = hashed(42, _class_of(tail), 0)
            columns.token_codes[t] = code_number(coder, 2, _DRAWN_CODES, 16, False, columns.token_codes[t])
        elif rank >= length:
            return t
        else:
            columns.tokens[t], columns.token_codes[t] = ids[entry - length + rank], NO_CODE
        pair, token = hashed(token, columns.tokens[t] + 1, 0), columns.tokens[t] + 1
    return -1


@compiled
def code_end(coder: Coder, value: int) -> int:
    """Write or read the last number."""
    coder.work[0, 0] = hashed(60, 0, 0)
    return code_number(coder, 1, _IDS, 16, False, value)


@compiled
def _class_of(value: int) -> int:
    """Twice the bit length of a number, plus the bit below the highest."""
    length = 0
    while value >> length:
        length += 1
    if length < 2:
        return length
    return 2 * length + ((value >> (length - 2)) & 1)
