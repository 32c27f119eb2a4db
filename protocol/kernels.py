"""Compile what is compiled at its first use, ahead of that: ``python -m protocol.kernels``.

Compiled code is kept beside the sources (``__pycache__``, or ``NUMBA_CACHE_DIR``; see :mod:`protocol.jit`), so this
pays once per machine and release. Without it the first process that packs a bundle spends half a minute on it, and
several processes that start together each do.
"""

from __future__ import annotations

import numpy as np

from protocol import bundle, sampler
from protocol.messages import SamplingRules
from protocol.rollout import NO_CODE, Bundle, Finish, Rollout, Segment
from protocol.weights import bound, kernels


def compile_all() -> None:
    """Use every kernel once. Harmless, and quick, when they are compiled already or numba is missing."""
    kernels.compiled()
    bound.compiled()
    sampler.compiled()
    rules = SamplingRules(vocab_size=2, head_size=2, max_new_tokens=1, eos_token_ids=[0])
    bundle.decode(bundle.encode(Bundle((_smallest(),))), rules)


def _smallest() -> Rollout:
    """One token out of a head of two."""
    return Rollout(
        sample=0, tokens=np.array([0], np.uint32), head_lengths=np.array([2], np.uint8),
        head_ids=np.array([0, 1], np.uint32), head_codes=np.array([0, 8], np.uint16),
        tail_codes=np.array([9], np.uint16), token_codes=np.array([NO_CODE], np.uint16), segments=(Segment(0, 0),),
        finish=Finish.EOS,
    )


if __name__ == "__main__":
    compile_all()
