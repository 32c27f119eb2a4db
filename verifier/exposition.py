"""The verifier's numbers for Prometheus: a text file in its work folder, replaced whole after every verdict.

The file suits node_exporter's textfile collector. ``assay up`` reads it for its summary.
"""

from __future__ import annotations

import logging
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile

from verifier.states import Moves

logger = logging.getLogger(__name__)


class Exposition:
    """Counts of this process, from its start on: verdicts by outcome, and how audited weights were come by."""

    def __init__(self, file: Path, moves: Moves):
        self._file, self._moves, self._registry = file, moves, CollectorRegistry()
        self._verdicts = Counter(
            "assay_verifier_verdicts", "Verdicts by outcome.", ["outcome"], registry=self._registry
        )
        self._gauges = {
            name: Gauge(f"assay_verifier_{name}", words, registry=self._registry)
            for name, words in (
                ("anchors_loaded", "Whole states decoded from an anchor."),
                ("diffs_applied", "Versions made by applying a diff."),
                ("versions_stepped", "Versions gone back or forth by the log of an earlier diff."),
            )
        }
        self._write()

    def verdict(self, outcome: str) -> None:
        """A verdict was given."""
        self._verdicts.labels(outcome).inc()
        self._write()

    def _write(self) -> None:
        moves = self._moves
        for name, count in zip(self._gauges, (moves.loaded, moves.applied, moves.stepped), strict=True):
            self._gauges[name].set(count)
        try:
            write_to_textfile(str(self._file), self._registry)
        except OSError as error:  # no reason to stop judging
            logger.warning("metrics cannot be written", extra={"file": str(self._file), "detail": str(error)})
