"""The status in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST


class StatusCollector(Collector):
    """Turns one status object into metrics."""

    def __init__(self, status: Mapping[str, Any]):
        self._status = status

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The metrics of this moment."""
        status = self._status
        yield GaugeMetricFamily("assay_version", "Newest published version", value=status["version"] or 0)
        yield GaugeMetricFamily("assay_head_age_seconds", "Age of it", value=(status["head_age_ms"] or 0) / 1000)
        yield GaugeMetricFamily("assay_audit_queue", "Bundles that wait for a verdict", value=status["audit_queue"])
        yield GaugeMetricFamily(
            "assay_audit_queue_age_seconds", "Age of the oldest of them", value=status["audit_queue_age_ms"] / 1000
        )
        yield GaugeMetricFamily("assay_nodes", "Registered nodes", value=status["nodes_total"])
        yield GaugeMetricFamily(
            "assay_tokens_per_second", "Tokens handed in per second", value=status["tokens_per_s"]
        )
        yield CounterMetricFamily("assay_tokens_generated", "Tokens handed in", value=status["tokens_generated"])
        yield CounterMetricFamily("assay_tokens_trained", "Tokens trained on", value=status["tokens_trained"])
        rollouts = CounterMetricFamily("assay_rollouts", "Rollouts by outcome", labels=["outcome"])
        for outcome, count in status["rollouts"].items():
            if outcome != "pending":
                rollouts.add_metric([outcome], count)
        yield rollouts
        yield GaugeMetricFamily(
            "assay_rollouts_pending", "Rollouts that wait for a verdict", value=status["rollouts"]["pending"]
        )
        if status["reward_mean"]:
            yield GaugeMetricFamily(
                "assay_reward_mean", "Mean reward of the newest batch", value=status["reward_mean"][-1]
            )


def render(status: Mapping[str, Any]) -> bytes:
    """The status as an exposition."""
    collectors = CollectorRegistry(auto_describe=False)
    collectors.register(StatusCollector(status))
    return generate_latest(collectors)
