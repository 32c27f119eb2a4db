"""Telling a coordinator again what it has forgotten: its database was put back from a backup, the record is whole.

Versions are in the journal and their bytes in the store. A batch is known again where the groups it names are; the
update receipt of a batch that is not is left out.
"""

from __future__ import annotations

import logging
from typing import Final

from learner.journal import Journal, Publication
from learner.office import LearnerClient
from learner.publisher import Publisher
from protocol.api import E_BATCH, E_CHECKPOINT_CHAIN
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, AssayError, LocalFault, PeerFault, code

logger = logging.getLogger(__name__)

E_RESUME = code("E_RESUME", "the learner cannot go on from what its work directory holds")

#: Answers of a coordinator that lacks what came before: versions, or the batch that made one.
FORGOTTEN: Final = frozenset({E_CHECKPOINT_CHAIN, E_BATCH})


class Retelling:
    """Brings the coordinator to the newest version of the journal. All of it may be done again."""

    def __init__(self, client: LearnerClient, journal: Journal, publisher: Publisher):
        self._client, self._journal, self._publisher = client, journal, publisher

    def tell(self, version: int) -> None:
        """Tell of every version that the coordinator lacks, up to ``version``, each with its batch and its head.

        Raises:
            LocalFault: ``E_RESUME`` when the coordinator's versions are others, or newer than ``version``.
            PeerFault, Transient: what else the coordinator answered.
        """
        known = self._newest_known(version)
        if known is not None:
            self._check_same(known)
        for lacking in range(0 if known is None else min(known + 1, version), version + 1):
            self._tell_one(lacking)

    def _tell_one(self, version: int) -> None:
        publication = self._publication(version)
        receipt = publication.receipt if self._knows_batch(version) else None
        logger.warning(
            "the coordinator is told of a version again", extra={"version": version, "with_batch": receipt is not None}
        )
        try:
            self._publisher.tell(version, publication.manifest, receipt)
        except PeerFault as error:
            if error.code != E_CHECKPOINT_CHAIN:
                raise
            raise LocalFault(
                E_RESUME, "the run has newer versions than this work directory", expected=error.expected,
                got=f"version {version}",
                hint="put the newer work directory back; if it is lost, found a new run from the weights "
                     "(assay weights export, then assay coordinator init --model)",
            ) from None

    def _knows_batch(self, version: int) -> bool:
        """Whether the coordinator has the batch of a version in its books, now that it was posted once more."""
        planned = self._journal.plan(version)
        if planned is None:
            return False
        try:
            self._client.post_batch(planned.plan)
        except PeerFault as error:
            if error.code != E_BATCH:
                raise
            return False
        return True

    def _newest_known(self, version: int) -> int | None:
        """Newest version up to ``version`` that the coordinator has; it has all before it."""
        low, high = -1, version
        while low < high:
            middle = (low + high + 1) // 2
            if self._theirs(middle) is None:
                high = middle - 1
            else:
                low = middle
        return None if low < 0 else low

    def _check_same(self, version: int) -> None:
        theirs, ours = self._theirs(version), self._publication(version).manifest
        if theirs is not None and theirs.digest != ours.digest:
            raise LocalFault(
                E_RESUME, f"version {version} of this work directory is not the one that the run has",
                expected=theirs.digest, got=ours.digest,
                hint="give the --work that this run was learned in; from an empty one a begun run cannot go on",
            )

    def _theirs(self, version: int) -> Envelope | None:
        try:
            return self._client.checkpoint(version)
        except AssayError as error:
            if error.code != E_NOT_FOUND:
                raise
            return None

    def _publication(self, version: int) -> Publication:
        publication = self._journal.publication(version)
        if publication is None:
            raise LocalFault(
                E_RESUME, f"the journal has no publication of version {version}",
                hint="restore the work directory from a backup",
            )
        return publication
