"""Numbers of one step, for people and for the update receipt.

Ratios r = p_a / q_a are over the drawn tokens; KL is of q against p, estimated as k1 = -log r and
k3 = r - 1 - log r (nats per token), and as ``head_kl`` without sampling noise; chi2 = mean r^2 - 1.
ESS = (sum r)^2 / (N sum r^2), 1 when learner and sampler agree; ``ess_used`` is that of the weights that were used.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from learner.batch import Batch
from learner.ess import bucket_name, bucket_of
from learner.head import TokenStats

Metrics = dict[str, Any]

#: Below this effective sample size most of the batch carries no weight.
LOW_ESS: Final = 0.3
#: Below this head mass score centring sees too little of the distribution.
LOW_HEAD_MASS: Final = 0.9


def batch_metrics(batch: Batch) -> Metrics:
    """What is known before the step."""
    lag = _lags(batch)
    rewards = np.asarray(batch.rewards_micro, dtype=np.float64) * 1e-6
    return {
        "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "groups": batch.groups,
        "groups_left_out": batch.left_out,
        "samples": len(batch.rewards_micro),
        "tokens": batch.tokens,
        "node_share_max": max(batch.node_shares.values(), default=0.0),
        "lag_mean": float(lag.mean()) if len(lag) else 0.0,
        "lag_max": int(lag.max()) if len(lag) else 0,
        "lag_histogram": {str(v): int(n) for v, n in zip(*np.unique(lag, return_counts=True), strict=True)},
    }


def token_metrics(stats: TokenStats, lag_N: NDArray[np.int64], signal_N: NDArray[np.float32]) -> Metrics:
    """What the forward pass saw; zeros when no token was trained on."""
    if len(stats.loss_N) == 0:
        return dict.fromkeys(_TOKEN_KEYS, 0.0) | dict.fromkeys(_WHOLE_KEYS, 1.0) | {"by_lag": {}}
    values = {field.name: getattr(stats, field.name).double().cpu().numpy() for field in fields(TokenStats)}
    log_ratio, truncated = values["log_ratio_N"], values["truncated_N"]
    ratio = np.exp(log_ratio)
    return {
        "loss": float(values["loss_N"].sum()),
        "kl": _k3(log_ratio),
        "kl_k1": float(-log_ratio.mean()),
        "chi2": float((ratio**2).mean() - 1.0),
        "ess": _ess(ratio),
        "ess_used": _ess(values["weight_N"]),
        "ratio_p01": float(np.quantile(ratio, 0.01)),
        "ratio_p50": float(np.quantile(ratio, 0.5)),
        "ratio_p99": float(np.quantile(ratio, 0.99)),
        "ratio_max": float(ratio.max()),
        "truncated": float(truncated.mean()),
        "truncated_positive": _mean(truncated[signal_N > 0]),
        "truncated_negative": _mean(truncated[signal_N < 0]),
        "entropy": float(values["entropy_N"].mean()),
        "head_kl": float(values["head_kl_N"].mean()),
        "head_mass_p": float(values["head_p_N"].mean()),
        "head_mass_q": float(values["head_q_N"].mean()),
        "centring_l1": float(values["centring_N"].mean()),
        "by_lag": by_lag(values, lag_N),
    }


def by_lag(values: dict[str, NDArray[np.float64]], lag_N: NDArray[np.int64]) -> dict[str, Metrics]:
    """The numbers that staleness moves, per bucket of lags."""
    bucket_N = bucket_of(torch.from_numpy(lag_N)).numpy()
    found = {}
    for bucket in np.unique(bucket_N).tolist():
        chosen = {name: value[bucket_N == bucket] for name, value in values.items()}
        log_ratio = chosen["log_ratio_N"]
        ratio = np.exp(log_ratio)
        found[bucket_name(bucket)] = {
            "tokens": len(ratio), "kl": _k3(log_ratio), "kl_k1": float(-log_ratio.mean()),
            "chi2": float((ratio**2).mean() - 1.0), "ess": _ess(ratio), "ess_used": _ess(chosen["weight_N"]),
            "ratio_p99": float(np.quantile(ratio, 0.99)), "ratio_max": float(ratio.max()),
            "truncated": float(chosen["truncated_N"].mean()), "centring_l1": float(chosen["centring_N"].mean()),
        }
    return found


_TOKEN_KEYS: Final = (
    "loss", "kl", "kl_k1", "chi2", "ratio_p01", "ratio_p50", "ratio_p99", "ratio_max", "truncated",
    "truncated_positive", "truncated_negative", "entropy", "head_kl", "centring_l1",
)
_WHOLE_KEYS: Final = ("ess", "ess_used", "head_mass_p", "head_mass_q")


def warnings_of(metrics: Metrics) -> list[str]:
    """What a person should look at, in words."""
    if metrics["skipped"]:
        return [f"step skipped ({metrics['skipped']}): the weights did not change"]
    found: list[str] = []
    if metrics["ess"] < LOW_ESS:
        found.append(
            f"effective sample size {metrics['ess']:.2f} is below {LOW_ESS}: rollouts are too stale or another model "
            "made them; lower max_lag_versions or the learning rate"
        )
    if metrics["head_mass_q"] < LOW_HEAD_MASS:
        found.append(
            f"heads hold {metrics['head_mass_q']:.2f} of the sampler's mass, below {LOW_HEAD_MASS}: raise head_size "
            "for the next run"
        )
    return found


def as_micro(metrics: Metrics) -> dict[str, int]:
    """Scalar metrics in 1e-6 of their unit, for a signed update receipt; what is not finite is left out.

    ``skipped`` becomes 1 when the step was skipped, for whatever reason, else 0.
    """
    scalars = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    scalars["skipped"] = float(metrics.get("skipped") is not None)
    return {name: round(value * 1e6) for name, value in scalars.items() if math.isfinite(value) and abs(value) < 1e12}


def finite(metrics: Metrics) -> Metrics:
    """``metrics`` with None for numbers that are not finite, so that they fit into JSON."""
    return {name: _finite(value) for name, value in metrics.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return finite(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lags(batch: Batch) -> NDArray[np.int64]:
    return np.concatenate([s.lag_T for s in batch.sequences]) if batch.sequences else np.zeros(0, dtype=np.int64)


def _k3(log_ratio: NDArray[np.float64]) -> float:
    return float((np.expm1(log_ratio) - log_ratio).mean())


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _ess(weight: NDArray[np.float64]) -> float:
    squares = float((weight**2).sum())
    return float(weight.sum() ** 2 / (len(weight) * squares)) if squares > 0 else 0.0
