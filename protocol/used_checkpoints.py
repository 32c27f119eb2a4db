"""Which checkpoint manifests the weights came from that made a bundle; part of a node's commitment.

Spec: ``docs/spec/rollout-bundle.md``, "Commitment".
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from protocol.message import Count, Hex32, Part

#: Most versions that one bundle may be made with; a commitment that names them fits into a node's message.
MAX_USED: Final = 512


class UsedCheckpoint(Part):
    """The manifest whose weights made some tokens of a bundle."""

    version: Count
    manifest_sha256: Hex32  #: digest of the manifest's payload; nobody can know it before the manifest is made


def _ascending(checkpoints: list[UsedCheckpoint]) -> list[UsedCheckpoint]:
    if any(one.version >= following.version for one, following in pairwise(checkpoints)):
        raise ValueError("versions that ascend")
    return checkpoints


#: One for each version in the segments of a bundle and no others, ascending by version.
UsedCheckpoints = Annotated[
    list[UsedCheckpoint], Field(min_length=1, max_length=MAX_USED), AfterValidator(_ascending)
]
