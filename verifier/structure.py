"""T0: everything that can be checked without randomness and without a model.

The steps are numbered as in ``docs/spec/verification.md``. Steps A.1 to A.5 look at what the run's own roles signed or
carried: a failure there is never the node's and makes the audit inconclusive. Nor is one of T0.1: what the node did not
sign for this lease says nothing about it. Steps T0.2 to T0.9 look at what it signed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Final

from protocol import bundle as bundles
from protocol.bundle_columns import E_COUNTS
from protocol.errors import E_OBJECT_HASH, E_WRONG_KEY, LocalFault, PeerFault, code
from protocol.identity import key_id
from protocol.messages import Commitment, Lease, Receipt, RunManifest
from protocol.rollout import Bundle, Finish, Rollout, prompt_digest
from protocol.sampler import check_head
from verifier.checkpoints import CheckpointBook
from verifier.findings import Report, RolloutFault, counted
from verifier.states import E_VERSION_MISSING
from verifier.submission import Opened, Submission

E_LEASE_INCOHERENT = code("E_LEASE_INCOHERENT", "a lease contradicts itself, its receipt or the published checkpoints")
E_OTHER_LEASE = code("E_OTHER_LEASE", "a commitment is for another lease or another node")
E_BUNDLE_ROOT = code("E_BUNDLE_ROOT", "the committed Merkle root is not the root of the uploaded bundle")
E_SAMPLE_SET = code("E_SAMPLE_SET", "a bundle does not hold exactly the samples of its lease, each once")
E_EOS_GRAMMAR = code("E_EOS_GRAMMAR", "a completion does not end where and how the run's rules say")
E_UNKNOWN_PROFILE = code("E_UNKNOWN_PROFILE", "a commitment names a profile for which the run has no thresholds")
E_SWAP_PINNED = code("E_SWAP_PINNED", "a rollout changes weights although its lease is pinned to one version")
E_SEGMENT_VERSION = code(
    "E_SEGMENT_VERSION", "the versions in a bundle are not those that its lease and its commitment name"
)
E_OTHER_MANIFEST = code(
    "E_OTHER_MANIFEST", "the manifest at hand is not the one that the node named for a version; nobody is blamed"
)


def open_submission(run: RunManifest, submission: Submission, book: CheckpointBook, report: Report) -> Opened | None:
    """Steps A.1 to T0.3: open the envelopes and the bundle. None when one of them does not open."""
    coordinator, receipt = run.roles.coordinator, None
    lease = report.attempt(
        "A.1 lease signature", "the coordinator's",
        lambda: Lease.open(submission.lease, coordinator, run_id=run.run_id), node=False,
        got=lambda _: "the coordinator's",
    )
    if lease is None:
        return None
    if submission.receipt is not None:
        receipt = report.attempt(
            "A.2 receipt", "the coordinator's, for this commitment", lambda: _open_receipt(run, submission, lease),
            node=False, got=lambda receipt: receipt.receipt_id,
        )
    report.attempt(
        "A.3 lease coherent", "environment, prompt digest, samples, beacon", lambda: _check_lease(run, lease, book),
        node=False, got=lambda _: "coherent",
    )
    commitment = None
    if report.clean:
        commitment = report.attempt(
            "T0.1 commitment", f"node {lease.node_id[:16]}, for this lease",
            lambda: open_commitment(run, submission, lease), node=False,
            got=lambda commitment: f"node {commitment.node_id[:16]}",
        )
    if commitment is None:
        return None
    bundle = _open_bundle(run, submission, commitment, book, report)
    return None if bundle is None else Opened(run, submission, lease, receipt, commitment, bundle)


def check_structure(opened: Opened, report: Report) -> None:
    """Steps T0.4 to T0.9, each on its own; T0 is complete afterwards."""
    for check, expected, step in _STEPS:
        report.attempt(check, expected, partial(step, opened), node=True)
    report.tiers.append("T0")


def _open_bundle(
    run: RunManifest, submission: Submission, commitment: Commitment, book: CheckpointBook, report: Report
) -> Bundle | None:
    report.attempt(
        "T0.2 profile", "one that the run takes", lambda: _check_profile(run, commitment), node=True,
        got=lambda _: commitment.profile,
    )
    report.attempt(
        "A.4 object hash", commitment.object_sha256[:16], lambda: _check_object(commitment, submission.bundle),
        node=False, got=lambda _: commitment.object_sha256[:16],
    )
    report.attempt(
        "A.5 named manifests", "at hand, each the one that the commitment names",
        lambda: _check_manifests(commitment, book), node=False,
    )
    if not report.clean:
        return None
    return report.attempt(
        "T0.3 bundle decodes", "lengths, segments and sizes within the limits",
        lambda: bundles.decode(submission.bundle, run.sampling, most=(commitment.rollouts, commitment.tokens)),
        node=True,
        got=lambda bundle: f"{counted(len(bundle.rollouts), 'rollout')} in {len(submission.bundle)} bytes",
    )


# -- what the run's roles signed ---------------------------------------------------------------------------


def _open_receipt(run: RunManifest, submission: Submission, lease: Lease) -> Receipt:
    assert submission.receipt is not None
    receipt = Receipt.open(submission.receipt, run.roles.coordinator, run_id=run.run_id)
    named = (receipt.lease_id, receipt.node_id, receipt.commitment_sha256)
    ours = (lease.lease_id, lease.node_id, submission.commitment.digest)
    if named != ours:
        raise PeerFault(E_LEASE_INCOHERENT, "the receipt is for something else", expected=ours, got=named)
    if receipt.received_at_ms < lease.issued_at_ms:
        raise PeerFault(
            E_LEASE_INCOHERENT, "the receipt is older than the lease", expected=f">= {lease.issued_at_ms}",
            got=receipt.received_at_ms,
        )
    return receipt


def _check_lease(run: RunManifest, lease: Lease, book: CheckpointBook) -> None:
    if lease.environment not in {environment.name for environment in run.environments}:
        raise PeerFault(E_LEASE_INCOHERENT, "the lease names an unknown environment", got=lease.environment)
    if lease.prompt_sha256 != prompt_digest(lease.prompt_tokens) or max(lease.prompt_tokens) >= run.sampling.vocab_size:
        raise PeerFault(
            E_LEASE_INCOHERENT, "the lease's prompt does not have its digest or is outside the vocabulary",
            expected=lease.prompt_sha256, got=prompt_digest(lease.prompt_tokens),
        )
    if len(set(lease.samples)) != len(lease.samples) or max(lease.samples) >= run.batch.group_size:
        raise PeerFault(
            E_LEASE_INCOHERENT, "the lease's samples are not distinct members of a group",
            expected=f"< {run.batch.group_size}", got=lease.samples,
        )
    start = book.get(lease.start_version)
    if start is None or start.beacon != lease.beacon:
        raise PeerFault(
            E_LEASE_INCOHERENT, f"the lease's beacon is not that of version {lease.start_version}",
            expected="an unpublished version" if start is None else start.beacon, got=lease.beacon,
        )


def _check_object(commitment: Commitment, bundle: bytes) -> None:
    """The store must have given us what the node committed to; if not, it is the carrier's fault."""
    got = hashlib.sha256(bundle).hexdigest()
    if got != commitment.object_sha256:
        raise PeerFault(
            E_OBJECT_HASH, "these are not the bytes that were committed to", expected=commitment.object_sha256, got=got
        )


def _check_manifests(commitment: Commitment, book: CheckpointBook) -> str:
    """What is recomputed is what the node named: a second manifest of a version is the learner's doing alone."""
    for used in commitment.checkpoints:
        envelope = book.envelope(used.version)
        if envelope is None:
            raise LocalFault(
                E_VERSION_MISSING, "the manifest of a version is not at hand", expected=f"version {used.version}",
                got=f"versions up to {book.newest}",
            )
        if envelope.digest != used.manifest_sha256:
            raise PeerFault(
                E_OTHER_MANIFEST, f"the node named another manifest of version {used.version}",
                expected=used.manifest_sha256, got=envelope.digest,
            )
    return str([used.version for used in commitment.checkpoints])


# -- what the node signed ------------------------------------------------------------------------------------


def open_commitment(run: RunManifest, submission: Submission, lease: Lease) -> Commitment:
    """What the lease's node signed for it.

    Raises:
        PeerFault: the commitment is not signed by that node (``E_WRONG_KEY``, codes of ``Message.open``) or for another
            lease (``E_OTHER_LEASE``). Whoever put the two together did that, or changed one: nothing against the node.
    """
    key = submission.node_public_key
    if key_id(key) != lease.node_id:
        raise PeerFault(E_WRONG_KEY, "the key is not that of the lease's node", expected=lease.node_id, got=key_id(key))
    commitment = Commitment.open(submission.commitment, key, run_id=run.run_id)
    named = (commitment.node_id, commitment.lease_id, commitment.lease_sha256)
    ours = (lease.node_id, lease.lease_id, submission.lease.digest)
    if named != ours:
        raise PeerFault(E_OTHER_LEASE, "the commitment is for another lease", expected=ours, got=named)
    return commitment


def _check_profile(run: RunManifest, commitment: Commitment) -> None:
    known = [profile.name for profile in run.profiles]
    if commitment.profile not in known and not run.audit.unknown_profiles:
        raise PeerFault(
            E_UNKNOWN_PROFILE, "the run has no such profile", expected=" or ".join(known), got=commitment.profile
        )


def _check_counts(opened: Opened) -> str:
    rollouts = opened.bundle.rollouts
    got = (len(rollouts), sum(map(len, rollouts)), len(opened.submission.bundle))
    commitment = opened.commitment
    expected = (commitment.rollouts, commitment.tokens, commitment.object_bytes)
    if got != expected:
        raise PeerFault(E_COUNTS, "rollouts, tokens, bytes differ from the commitment", expected=expected, got=got)
    return f"{counted(got[0], 'rollout')}, {counted(got[1], 'token')}, {got[2]} bytes"


def _check_root(opened: Opened) -> str:
    root = bundles.bundle_root(opened.bundle, opened.submission.lease.digest)
    if root != opened.commitment.bundle_root:
        raise PeerFault(
            E_BUNDLE_ROOT, "another bundle was committed to", expected=opened.commitment.bundle_root, got=root
        )
    return root[:16]


def _check_samples(opened: Opened) -> str:
    got = [rollout.sample for rollout in opened.bundle.rollouts]
    expected = sorted(opened.lease.samples)
    if sorted(got) != expected:
        raise PeerFault(E_SAMPLE_SET, "the bundle holds other samples", expected=expected, got=got)
    return str(got)


def _check_ends(opened: Opened) -> str:
    for rollout in opened.bundle.rollouts:
        _check_end(opened, rollout)
    lengths = [len(rollout) for rollout in opened.bundle.rollouts]
    return f"{min(lengths)} to {max(lengths)} tokens"


def _check_end(opened: Opened, rollout: Rollout) -> None:
    """EOS at the end and nowhere else, or the length limit reached; the finish reason says which."""
    rules, length = opened.run.sampling, len(rollout)
    ends = [t for t, token in enumerate(rollout.tokens.tolist()) if token in rules.eos_token_ids]
    if ends and ends[0] != length - 1:
        raise RolloutFault(
            E_EOS_GRAMMAR, "tokens after the end of sequence", sample=rollout.sample, position=ends[0],
            expected="nothing after EOS", got=counted(length - 1 - ends[0], "token"),
        )
    finish = Finish.EOS if ends else Finish.LENGTH
    if rollout.finish != finish or (finish == Finish.LENGTH and length != rules.max_new_tokens):
        raise RolloutFault(
            E_EOS_GRAMMAR, "the completion stops without a reason", sample=rollout.sample, position=length - 1,
            expected=f"EOS, or {counted(rules.max_new_tokens, 'token')}",
            got=f"{rollout.finish.name} after {counted(length, 'token')}",
        )


def _check_heads(opened: Opened) -> str:
    entries = 0
    for rollout in opened.bundle.rollouts:
        try:
            check_head(rollout, opened.run.sampling)
        except PeerFault as error:
            raise RolloutFault(
                error.code, error.message, sample=rollout.sample, expected=error.expected, got=error.got
            ) from None
        entries += len(rollout.head_ids)
    return f"{entries} entries"


def _check_versions(opened: Opened) -> str:
    start, named = opened.lease.start_version, {used.version for used in opened.commitment.checkpoints}
    for rollout in opened.bundle.rollouts:
        if rollout.segments[0].version != start:
            raise RolloutFault(
                E_SEGMENT_VERSION, "the rollout begins with another version", sample=rollout.sample, position=0,
                expected=start, got=rollout.segments[0].version,
            )
        if opened.lease.pinned and len(rollout.segments) > 1:
            raise RolloutFault(
                E_SWAP_PINNED, "the lease is pinned to one version", sample=rollout.sample,
                position=rollout.segments[1].start, expected=start, got=rollout.segments[1].version,
            )
        for segment in rollout.segments:
            if segment.version not in named:
                raise RolloutFault(
                    E_SEGMENT_VERSION, "the commitment does not name this version", sample=rollout.sample,
                    position=segment.start, expected=sorted(named), got=segment.version,
                )
    used = {segment.version for rollout in opened.bundle.rollouts for segment in rollout.segments}
    if used != named:
        raise PeerFault(
            E_SEGMENT_VERSION, "the commitment names versions that no rollout used", expected=sorted(used),
            got=sorted(named),
        )
    return str(sorted(used))


#: (name of the check, what is expected, step); a step raises or says what it got.
_STEPS: Final[tuple[tuple[str, str, Callable[[Opened], str]], ...]] = (
    ("T0.4 counts and sizes", "as in the commitment", _check_counts),
    ("T0.5 Merkle root", "as in the commitment", _check_root),
    ("T0.6 sample set", "the samples of the lease, each once", _check_samples),
    ("T0.7 length and EOS", "ends at its only EOS or at the length limit", _check_ends),
    ("T0.8 heads", "sorted, within the rules, normalised", _check_heads),
    ("T0.9 segment versions", "those of lease and commitment", _check_versions),
)
