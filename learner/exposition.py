"""The newest step's numbers for Prometheus: a text file beside the journal, and a port if one is asked for.

The file suits node_exporter's textfile collector; it is replaced whole. Names are ``assay_learner_`` and the metric's;
numbers per lag bucket carry a label ``lag``, left-out groups a label ``reason``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server, write_to_textfile

from learner.disk import disk_faults
from learner.metrics import Metrics
from protocol.errors import E_CONFIG, LocalFault

_PREFIX = "assay_learner_"


class Exposition:
    """Gauges of the newest step.

    Raises:
        LocalFault: ``E_CONFIG`` when ``port`` cannot be opened.
    """

    def __init__(self, file: Path, port: int | None = None):
        self._file, self._registry = file, CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        if port is not None:
            try:
                start_http_server(port, addr="127.0.0.1", registry=self._registry)
            except OSError as error:
                raise LocalFault(
                    E_CONFIG, f"port {port} cannot be opened for metrics", got=str(error),
                    hint="choose another process.metrics_port",
                ) from None

    def show(self, metrics: Metrics) -> None:
        """Make these the newest numbers.

        Raises:
            LocalFault: ``E_WORK_DIR``.
        """
        for name, value in metrics.items():
            self._set(name, value)
        self._set("skipped", 0.0 if metrics.get("skipped") is None else 1.0)
        self._per("lag_tokens", "lag", metrics.get("lag_histogram", {}))
        self._per("left_out_groups", "reason", metrics.get("groups_left_out", {}))
        buckets = metrics.get("by_lag", {})
        for name in sorted({name for bucket in buckets.values() for name in bucket}):
            self._per(f"by_lag_{name}", "lag", {lag: bucket.get(name) for lag, bucket in buckets.items()})
        with disk_faults(f"write {self._file}"):
            write_to_textfile(str(self._file), self._registry)

    def _set(self, name: str, value: Any) -> None:
        if is_number(value):
            self._gauge(name).set(value)

    def _per(self, name: str, label: str, values: dict[str, Any]) -> None:
        gauge = self._gauge(name, label)
        gauge.clear()
        for key, value in values.items():
            if is_number(value):
                gauge.labels(key).set(value)

    def _gauge(self, name: str, *labels: str) -> Gauge:
        if name not in self._gauges:
            words = f"Newest step of the learner: {name.replace('_', ' ')}"
            self._gauges[name] = Gauge(_PREFIX + name, words, labels, registry=self._registry)
        return self._gauges[name]


def is_number(value: Any) -> bool:
    """Whether a metric is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
