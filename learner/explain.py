"""A learner's plans and steps in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from learner.config import LearnerConfig
from learner.corrections import correction_of
from learner.journal import Journal, PlannedStep, Publication
from protocol.api import AdmittedGroup
from protocol.errors import E_NOT_FOUND, LocalFault
from protocol.messages import CheckpointManifest, RunManifest
from protocol.weights.layout import Layout

_MIB = 2**20


def explain_step(journal: Journal, version: int) -> list[str]:
    """What made ``version``: which groups, which rewards, how stale, what the step did.

    Raises:
        LocalFault: ``E_NOT_FOUND`` when the journal does not know the version.
    """
    publication, planned = journal.publication(version), journal.plan(version)
    if publication is None and planned is None:
        raise LocalFault(E_NOT_FOUND, f"version {version} is not in the journal", expected="a version made here")
    lines: list[str] = []
    if planned is not None:
        lines += _plan_lines(planned)
    if publication is None:
        lines.append("The step is not done: the learner takes it up again when it starts.")
    else:
        lines += _publication_lines(publication, told=journal.told(version))
    return lines


def _plan_lines(planned: PlannedStep) -> Iterator[str]:
    plan = planned.plan
    yield (
        f"Version {plan.version} comes from version {plan.parent_version} and {len(plan.groups)} groups "
        f"(waited {planned.wait_s:.1f} s for them; settings {plan.config_sha256[:16]})."
    )
    for group in planned.groups:
        yield "  " + _group_line(group, plan.parent_version)


def _group_line(group: AdmittedGroup, parent: int) -> str:
    rewards = [sample.reward_micro / 1e6 for sample in group.samples]
    nodes = sorted({sample.node_id[:8] for sample in group.samples})
    mean = sum(rewards) / max(1, len(rewards))
    signal = "" if len(set(rewards)) > 1 else ", all equal: nothing to learn"
    return (
        f"group {group.group} ({group.environment}): {len(rewards)} samples, reward {mean:.3f} "
        f"[{min(rewards):g}, {max(rewards):g}]{signal}; started {parent - group.start_version} versions back; "
        f"by {', '.join(nodes)}"
    )


def _publication_lines(publication: Publication, *, told: bool) -> Iterator[str]:
    manifest = CheckpointManifest.from_payload(publication.manifest.payload)
    metrics = publication.metrics
    if publication.receipt is None:
        yield f"Version {manifest.version} is the run's first: a whole anchor, made by no batch."
    elif metrics.get("skipped"):
        yield f"The step was skipped ({metrics['skipped']}); the weights are those of the version before."
    else:
        yield (
            f"It trained on {metrics['tokens']} tokens, lag {_number(metrics, 'lag_mean')} on average and "
            f"{metrics['lag_max']} at most; loss {_number(metrics, 'loss')}, gradient norm "
            f"{_number(metrics, 'grad_norm')} at learning rate {metrics['lr']:g}."
        )
        yield (
            f"Sampler against learner: KL {_number(metrics, 'kl')} nats per token, effective sample size "
            f"{_number(metrics, 'ess')}, largest ratio {_number(metrics, 'ratio_max')}, "
            f"{_number(metrics, 'truncated')} of the tokens truncated."
        )
    if metrics.get("groups_left_out"):
        left_out = ", ".join(f"{count} {reason}" for reason, count in metrics["groups_left_out"].items())
        yield f"Groups left out of the step: {left_out}."
    sizes = f"diff {metrics.get('diff_bytes', 0)} bytes" + (
        f", anchor {metrics['anchor_bytes']} bytes" if metrics.get("anchor_bytes") else ""
    )
    yield f"Published as {manifest.state_root[:16]} ({sizes} of {metrics['full_bytes']}); " + (
        "everybody was told." if told else "not announced yet."
    )


def _number(metrics: dict[str, Any], name: str) -> str:
    value = metrics.get(name)
    return "not a number" if value is None else f"{value:.4g}"


def explain_rules(config: LearnerConfig, manifest: RunManifest) -> list[str]:
    """What the run's batch rules and the learner's settings mean."""
    batch, loss = manifest.batch, config.loss
    cap = 1 + (loss.cap - 1) * loss.cap_decay**batch.max_lag_versions
    lines = [
        f"A step takes {batch.groups_per_batch} groups of {batch.group_size} samples, "
        f"{batch.groups_per_batch * batch.group_size} rollouts of at most {manifest.sampling.max_new_tokens} tokens.",
        f"A token may be at most {batch.max_lag_versions} versions older than the weights it trains: groups that start "
        f"earlier are cancelled, and no more than {(batch.max_lag_versions + 1) * batch.groups_per_batch} are open.",
    ]
    correction = correction_of(loss)
    if correction.aged:
        lines.append(
            f"Importance ratios are cut at {loss.cap:g} for fresh tokens and at {cap:.3g} for the stalest"
            + (", fresh tokens are only centred" if correction.unit_at_lag_0 else "") + "."
        )
    if config.staleness.policy == "decay":
        lines.append(f"A token weighs {config.staleness.decay:g} to the power of its lag.")
    if batch.max_versions is not None:
        lines.append(f"The run is complete at version {batch.max_versions}.")
    return lines


def explain_memory(config: LearnerConfig, layout: Layout, vocab: int, processes: int = 1) -> list[str]:
    """A rough estimate of the memory a step takes in the first process, without activations."""
    weights = sum(entry.nbytes // entry.words.itemsize for entry in layout.entries)
    parts = {
        "weights, masters, gradients, two moments (fp32)": 5 * 4 * weights // processes,
        "published states (old and new)": 2 * layout.nbytes,
        "head: logits of a chunk": config.batch.head_chunk_mib * _MIB,
        "head: gradient of the output matrix": 4 * max(vocab * entry.shape[-1] for entry in layout.entries
                                                       if entry.shape and entry.shape[0] == vocab),
    }
    lines = [f"{name}: {size / _MIB:.0f} MiB" for name, size in parts.items()]
    total = sum(parts.values()) / _MIB
    if processes > 1:
        lines.append(f"of {processes} processes, which hold {1 / processes:.0%} of the weights each")
    return [*lines, f"together about {total:.0f} MiB, and activations of {config.batch.max_tokens} tokens"]
