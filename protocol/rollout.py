"""A rollout: what a node says it sampled, token by token.

Legend: T completion tokens, N total head entries of a rollout (sum of ``head_lengths``), Y layers of a mixture of
experts, X experts per token.
The wire form is in ``protocol.bundle``; spec: ``docs/spec/rollout-bundle.md``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

#: Token code of a token drawn from the head (its code is the head entry's own).
NO_CODE: Final = 0xFFFF
#: Tail code that means "the tail is empty": the head covers the whole vocabulary or was truncated on purpose.
EMPTY_TAIL: Final = 0xFFFF


class Finish(IntEnum):
    """Why a completion ended."""

    EOS = 0
    LENGTH = 1


class SwapMode(IntEnum):
    """How the KV cache crosses a change of weights."""

    KV_KEPT = 0  #: cached keys and values of earlier versions stay
    REPREFILL = 1  #: the whole prefix is computed again with the new version


@dataclass(frozen=True)
class Segment:
    """From completion position ``start`` on, distributions come from ``version``."""

    start: int
    version: int
    mode: SwapMode = SwapMode.KV_KEPT


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sample of a group: tokens, committed heads, segments."""

    sample: int  #: sample index within the group
    tokens: NDArray[np.uint32]  #: (T,) drawn token ids, EOS included
    head_lengths: NDArray[np.uint8]  #: (T,) entries in each head, >= 1
    head_ids: NDArray[np.uint32]  #: (N,) ids, per position in the order (code, id) ascending
    head_codes: NDArray[np.uint16]  #: (N,) quantised -logprob in steps
    tail_codes: NDArray[np.uint16]  #: (T,) quantised -log(mass outside the head); EMPTY_TAIL when there is none
    token_codes: NDArray[np.uint16]  #: (T,) NO_CODE, or the token's own code when it was drawn from the tail
    segments: tuple[Segment, ...]  #: first starts at 0; starts and versions strictly ascending
    finish: Finish
    routes: NDArray[np.uint8] | None = None  #: (T, Y, X) experts of the pass behind each token, ascending

    def __len__(self) -> int:
        return len(self.tokens)

    def versions(self) -> NDArray[np.int64]:
        """(T,) policy version of each token."""
        starts = [segment.start for segment in self.segments] + [len(self)]
        return np.repeat([s.version for s in self.segments], np.diff(starts)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Bundle:
    """All rollouts of one lease."""

    rollouts: tuple[Rollout, ...]


def prompt_digest(prompt_tokens: list[int]) -> str:
    """Hex SHA-256 of the prompt's token ids as little-endian uint32."""
    return hashlib.sha256(np.asarray(prompt_tokens, dtype="<u4").tobytes()).hexdigest()


def rollout_seed(run_id: str, beacon: str, prompt_sha256: str, group: int, sample: int) -> bytes:
    """32-byte seed of a rollout. No node id and no choice of the node is in it (docs/spec/sampler.md)."""
    return hashlib.sha256(
        b"assay.rollout-seed.v1\0" + bytes.fromhex(run_id) + bytes.fromhex(beacon) + bytes.fromhex(prompt_sha256)
        + group.to_bytes(8, "little") + sample.to_bytes(4, "little")
    ).digest()
