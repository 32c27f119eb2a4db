"""What usually lies behind a code: hints for the human who reads a failed audit."""

from __future__ import annotations

from typing import Final

_OTHER_WEIGHTS: Final = (
    "other weights than the claimed checkpoint: quantised (int8, fp8), stale, or another model",
    "another temperature, a logit bias or a penalty applied before the draw",
    "another prompt than the lease's: a hidden system prompt, a lost or added token",
    "segments that claim a swap that did not happen, or hide one that did",
    "an engine or precision that is not the claimed profile (bf16 compute, another attention kernel, batch of one)",
)
_OTHER_TOKEN: Final = (
    "a token was edited after the draw",
    "the rollout was drawn with another seed: best-of-n, another sample, group or checkpoint beacon",
    "the engine's sampler is not the run's seeded sampler, or positions are counted from another start",
)

#: Code -> likely causes, likeliest first.
CAUSES: Final[dict[str, tuple[str, ...]]] = {
    "E_REPLAY": _OTHER_TOKEN,
    "E_HEAD_KL": _OTHER_WEIGHTS,
    "E_TOKEN_KL": ("a head was nudged so that a wanted token wins", *_OTHER_WEIGHTS),
    "E_HEAD_ENTRY": ("one head entry was changed on purpose", *_OTHER_WEIGHTS),
    "E_HEAD_MEMBERSHIP": ("a token was kept out of the head (a suppressed end of sequence)", *_OTHER_WEIGHTS),
    "E_TAIL_DRAW": ("a tail token was chosen instead of drawn", *_OTHER_WEIGHTS),
    "E_TAIL_TOKEN": ("the probability of a tail draw was made up to move an importance weight", *_OTHER_WEIGHTS),
    "E_TOKEN_MARGIN": ("heads that belong to other tokens than the ones drawn", *_OTHER_WEIGHTS),
    "E_TAIL_MASS": ("mass was moved between the head and the tail to move an importance weight", *_OTHER_WEIGHTS),
    "E_UNCALIBRATED": ("a new engine or precision that nobody has calibrated yet: docs/statistics.md",),
    "E_EOS_GRAMMAR": ("text was added after the end, or cut off before it",),
    "E_BUNDLE_ROOT": ("the uploaded bundle is not the one that was committed to",),
    "E_SAMPLE_SET": ("samples were dropped, repeated or taken from another lease",),
    "E_SEGMENT_VERSION": ("the node ran a version that the lease does not start with, or that is not published",),
    "E_SIGNATURE": ("the commitment was changed after signing, or signed with another key",),
    "E_VERSION_MISSING": ("a checkpoint that the rollouts used is in none of the given folders",),
    "E_STATE_ROOT": ("a folder or store holds damaged or other weights",),
    "E_NOT_FOUND": ("a file of the run (configuration, tokenizer, task data) is in none of the given folders",),
    "E_DISAGREE": ("numerical noise at the threshold, or a fault of this machine",),
}


def likely_causes(code: str | None) -> tuple[str, ...]:
    """Likely causes of a code, empty when we know none."""
    return CAUSES.get(code or "", ())
