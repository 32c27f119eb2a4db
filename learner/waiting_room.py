"""Admitted groups on their way into a batch: fetched, checked once, kept until they are used or gone."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from learner.admission import E_ADMITTED_GROUP, E_TOO_STALE, Admission
from learner.batch import TrainingGroup
from learner.journal import Journal
from learner.staleness import DroppedTokens
from protocol import bundle
from protocol.api import AdmittedGroup
from protocol.errors import AssayError, PeerFault
from protocol.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadyGroup:
    """A group that may be trained on."""

    admitted: AdmittedGroup
    data: TrainingGroup


class WaitingRoom:
    """Checks each admitted group once, however often the coordinator lists it."""

    def __init__(self, store: Store, admission: Admission, journal: Journal):
        self._store, self._admission, self._journal = store, admission, journal
        self._ready: dict[int, ReadyGroup] = {}
        self._stale: set[int] = set()
        self._used: set[int] = set()
        self._trained: dict[int, int] = {}  #: groups of published versions that are not stale yet, and the version
        self._read = 0  #: newest version whose plan was looked at
        self.dropped = DroppedTokens()

    def ready(self, listed: list[AdmittedGroup], version: int) -> list[ReadyGroup]:
        """Those of ``listed`` that a learner at ``version`` may train on, in the same order.

        A group with a fault is quarantined and logged; one whose bundles cannot be read now is left for later.
        """
        self._note_trained(version)
        listed = [group for group in listed if not self._again(group)]
        names = {group.group for group in listed}
        self._count_dropped(names, version)
        self._stale &= names
        self._ready = {g.group: self._ready[g.group] for g in listed if self._is_known(g, version)}
        for group in listed:
            if group.group not in self._ready and not self._journal.quarantined(group.group):
                self._take(group, version)
        return [self._ready[group.group] for group in listed if group.group in self._ready]

    def _note_trained(self, version: int) -> None:
        """Remember which groups made the versions up to ``version``, as long as they could be listed again."""
        oldest = version - self._admission.max_lag
        for made in range(max(self._read + 1, oldest), version + 1):
            planned = self._journal.plan(made)
            self._trained |= {} if planned is None else {entry.group: made for entry in planned.plan.groups}
        self._trained = {group: made for group, made in self._trained.items() if made >= oldest}
        self._read = version

    def _again(self, group: AdmittedGroup) -> bool:
        """Whether the group was trained on before; nothing is trained on twice, however well it is signed."""
        made = self._trained.get(group.group)
        if made is not None and group.start_version >= made:
            return False  # what begins at or after a version cannot have made it
        if made is not None and not self._journal.quarantined(group.group):
            self._refuse(group, PeerFault(
                E_ADMITTED_GROUP, "a group is listed that was trained on already", got=f"used for version {made}",
            ))
        return made is not None

    def _count_dropped(self, listed: set[int], version: int) -> None:
        """Count what waited here, was never used and is listed no more because it got too old."""
        for number, ready in self._ready.items():
            if self._admission.is_stale(ready.admitted, version) and number not in self._used:
                lengths = [len(sample.rollout) for sample in ready.data.samples]
                self.dropped.add(ready.admitted.environment, lengths)
        self._used &= listed | set(self._ready)

    def _is_known(self, group: AdmittedGroup, version: int) -> bool:
        """Whether the group was checked before, is the same in every detail, and did not get too stale since."""
        known = self._ready.get(group.group)
        return known is not None and known.admitted == group and not self._admission.is_stale(group, version)

    def data_of(self, group: AdmittedGroup, version: int) -> TrainingGroup:
        """A planned group as training data: as it waits here, or read from the store and checked again.

        Raises:
            PeerFault: what ``Admission.admit`` finds.
            LocalFault, Transient: a bundle cannot be read.
        """
        self._used.add(group.group)
        known = self._ready.get(group.group)
        if known is not None and known.admitted == group:
            return known.data
        return self._admission.admit(group, self._bundles(group), version)

    def _take(self, group: AdmittedGroup, version: int) -> None:
        try:
            bundles = self._bundles(group)
        except AssayError as error:
            logger.warning("bundles of a group cannot be read now", extra={"group": group.group, "detail": str(error)})
            return
        try:
            data = self._admission.admit(group, bundles, version)
        except PeerFault as error:
            self._refuse(group, error)
        else:
            self._ready[group.group] = ReadyGroup(group, data)

    def _refuse(self, group: AdmittedGroup, error: PeerFault) -> None:
        fields = {"group": group.group, "detail": str(error)}
        if error.code != E_TOO_STALE:
            logger.warning("an admitted group is refused", extra=fields)
            self._journal.quarantine_group(group.group, error.code, str(error))
        elif group.group not in self._stale:
            logger.warning("a group came too late", extra=fields)
            self._stale.add(group.group)

    def _bundles(self, group: AdmittedGroup) -> dict[str, bytes]:
        hashes = sorted({sample.object_sha256 for sample in group.samples})
        return {sha256: self._store.get(sha256, bundle.MAX_BYTES) for sha256 in hashes}
