"""What usually lies behind a code and what to do about it: for the human who reads an audit, or runs a node."""

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

_REWRITTEN: Final = "the coordinator rewrote history, or shows different histories to different people"

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
    "E_ROUTE_MARGIN": (
        "experts were chosen to steer the output, or are not those that the heads were computed with", *_OTHER_WEIGHTS
    ),
    "E_TAIL_MASS": ("mass was moved between the head and the tail to move an importance weight", *_OTHER_WEIGHTS),
    "E_UNCALIBRATED": ("a new engine or precision that nobody has calibrated yet: docs/statistics.md",),
    "E_EOS_GRAMMAR": ("text was added after the end, or cut off before it",),
    "E_BUNDLE_ROOT": ("the uploaded bundle is not the one that was committed to",),
    "E_SAMPLE_SET": ("samples were dropped, repeated or taken from another lease",),
    "E_SEGMENT_VERSION": ("the node ran a version that the lease does not start with, or that it did not commit to",),
    "E_OTHER_MANIFEST": ("the learner signed two manifests of a version, and the node used the one that is not here",),
    "E_STEERING": (
        "the node tries several moments for new weights and hands in the completion that earns most, or least",
        "its only peer does so: a comparison of two does not say which of them",
        "better, worse, longer or shorter completions for an honest reason: fresher or older weights than its peers",
        "chance: at most 2 % of honest nodes within 10,000 groups, 1 % for reward and 1 % for length",
    ),
    "E_SWAP_PINNED": ("the node took up new weights in a lease that forbids it",),
    "E_SIGNATURE": ("what had to be signed was changed after signing, or signed with another key",),
    "E_VERSION_MISSING": ("a checkpoint that the rollouts used is in none of the given folders",),
    "E_STATE_ROOT": ("a folder or store holds damaged or other weights",),
    "E_NOT_FOUND": ("a file of the run (weights, tokenizer, task data) is in none of the given folders",),
    "E_DISAGREE": ("numerical noise at the threshold, or a fault of this machine",),
    "E_OBJECT_HASH": (
        "bundle, weights, tokenizer or task data were exchanged, in the store or the file, after they were signed for",
        "the file was damaged on its way",
    ),
    "E_WRONG_KEY": ("the file is of another run than the one whose root key you gave",),
    "E_LEASE_INCOHERENT": ("the coordinator signed a lease or a receipt that contradicts what was published",),
    "E_LOG_VERDICT": (
        "a verdict was taken out of the file", "the coordinator made up a verdict that no verifier of the run signed",
    ),
    "E_LOG_SILENT": ("the coordinator acted without writing it down, or shows an older log",),
    "E_LOG_STALE": (
        "the coordinator shows you an older log than it shows to others", "the coordinator was down for long",
        "your clock is wrong", "the coordinator's clock is wrong, or its newest entry is dated ahead to look fresh",
    ),
    "E_LOG_BEHIND": ("the copy was downloaded before the head was signed",),
    "E_LOG_ANSWER": (
        "a proxy, a portal or another server answers in the coordinator's stead", "the coordinator is broken or of "
        "another release", "the coordinator withholds what it signed",
    ),
    "E_LOG_INCLUSION": ("the answer was damaged or changed on its way, or is for another head",),
    "E_LOG_ROLLBACK": (
        "a cache or a proxy shows an older head", "the coordinator's database was restored from an older backup",
        _REWRITTEN,
    ),
    "E_LOG_FORK": (_REWRITTEN, "two coordinators of one run keep logs of their own"),
    "E_LOG_CONSISTENCY": ("the answer was damaged or changed on its way", _REWRITTEN),
    "E_LOG_ROOT": ("the download is incomplete or was changed on its way", _REWRITTEN),
    "E_LOG_ENTRY": (
        "the file was damaged or changed", "the coordinator signed an entry that nobody can read, to hide what it did"
    ),
    "E_LOG_ORDER": ("the coordinator wrote down what did not happen, or left out what did",),
    "E_DRAW_KEY": (
        "the coordinator chose its draw key after it had seen the receipts",
        "it keeps the key to itself, so that nobody can make its draws again",
    ),
    "E_DRAW_LATE": ("a receipt was drawn with a key that somebody may have known",),
    "E_DRAW_RATE": ("the coordinator spares a node, or presses it harder than the rules say",),
    "E_DRAW_SKIPPED": ("the coordinator or a verifier let a bundle pass that should have been recomputed",),
    "E_DRAW_PRETEXT": ("a node was singled out for a recomputation that nothing in the log explains",),
    "E_BATCH_UNFOUNDED": ("the learner, with the coordinator's consent, trained on what no node's work stands behind",),
    "E_VERIFIER_UNASKED": (
        "the verifier of that key looks closer at somebody than it was asked to, by mistake or on purpose",
        "the log is the coordinator's word: it may have asked the verifier to, or made the verdict up",
    ),
    "E_BAN_UNFOUNDED": (
        "a node was banned without a verdict or suspicion against it that counted", "the operator gave no reason"
    ),
}

#: (Code, step) -> likely causes and what to do, where the step that found it says more than the code.
AT: Final[dict[tuple[str, str], tuple[tuple[str, ...], str]]] = {
    ("E_WRONG_KEY", "T0.1"): (
        ("the file holds the public key of another node than the lease's: whoever made the file put it in",),
        "Get the evidence again, from the coordinator: a node's key in a file is as good as whoever made the file.",
    ),
    ("E_SIGNATURE", "T0.1"): (
        ("the commitment was changed after signing, or signed with another key than the node's",),
        "Get the evidence again, from the coordinator: it takes no commitment that its node did not sign.",
    ),
    ("E_OTHER_LEASE", "T0.1"): (
        ("whoever made the file put the commitment of one lease to another lease",),
        "Get the evidence again, from the coordinator.",
    ),
    ("E_SIGNATURE", "L.1"): (
        ("the head of the log was changed after signing", "the head is signed by another key than the coordinator's"),
        "Get the evidence again, from the coordinator.",
    ),
    ("E_LOG_INCLUSION", "L.1"): (
        ("the file was damaged or changed",), "Get the evidence again, from the coordinator.",
    ),
    ("E_LOG_ENTRY", "L.1"): (
        ("the coordinator signed an entry that nobody can read", "a coordinator of a later release"),
        "Get the evidence again, from the coordinator. If it is the same, ask the operator in public.",
    ),
}

_TRY_AGAIN: Final = (
    "Do it on another machine with the command that the audit printed. If it fails there as well, keep the evidence "
    "file and the report: together with the run's root key they convince anybody."
)
_COORDINATOR: Final = (
    "Keep both signed heads and the file you downloaded: two heads of one size prove it to anybody, others together "
    "with the entries. Ask the operator in public, and compare heads with other auditors (assay audit log --against)."
)
_COMPARE: Final = (
    "It proves nothing yet. Keep what you have, ask again, by another way (https, another network), and compare heads "
    "with other auditors (assay audit log --against)."
)
_UNSIGNED: Final = (
    "Nobody signed what was answered, so it proves nothing. Ask again, by another way (https, another network), or "
    "download the log: assay audit log URL --root HEX --save FILE."
)
#: Code -> what to do.
ADVICE: Final[dict[str, str]] = {
    "E_VERSION_MISSING": "Give a folder or store with that version by --checkpoint; it may be repeated.",
    "E_OTHER_MANIFEST": (
        "Keep the file, and look for the manifest that the node named: both signatures together prove what the learner "
        "did. As it is, the file says nothing about the node."
    ),
    "E_STATE_ROOT": "Fetch the weights again, or give another folder by --checkpoint.",
    "E_NOT_FOUND": "Give the run's object store by --checkpoint, or the single file by --data.",
    "E_DISAGREE": _TRY_AGAIN,
    "E_OBJECT_HASH": "Get what is named again, from another source. As it is, it says nothing about the node.",
    "E_WRONG_KEY": "Check that --root is the root key of this run: it stands in the run's join link.",
    "E_EVIDENCE": "Get the evidence file again: /v1/evidence/RECEIPT of the coordinator.",
    "E_LEASE_INCOHERENT": "Ask the operator: leases and receipts are signed by the coordinator, not by the node.",
    "E_LOG_ANSWER": "Try again, and another way to the coordinator. Nobody signed what was answered.",
    "E_LOG_BEHIND": "Download the log again: assay audit log URL --root HEX --save FILE.",
    "E_LOG_ROLLBACK": _COMPARE,
    "E_LOG_STALE": _COMPARE,
    "E_LOG_CONSISTENCY": _UNSIGNED,
    "E_LOG_INCLUSION": _UNSIGNED,
    "E_LOG_ROOT": _UNSIGNED,
    "E_LOG_VERDICT": "Get the evidence again, from the coordinator. If it is the same, ask the operator in public.",
    "E_LOG_FILE": "Download the log again: assay audit log URL --root HEX --save FILE.",
    "E_VERIFIER_UNASKED": "Get the receipt's evidence: it holds the verdict, if the verifier signed it; ask it why.",
    "E_BATCH_UNFOUNDED": "Keep the log (assay audit log URL --save FILE) and the plan (/v1/batches/VERSION): they are"
    " signed by coordinator and learner. Ask the operator in public.",
    "E_WITHHELD": "Ask again later: the evidence is shown once nobody can hand in a copy of the bundle.",
    "E_UNREACHABLE": "Check the address, and that the coordinator is up; then try again.",
    "E_FILE": "Check the name, its permissions and the free space.",
    "E_STEERING": "Nothing: the node works on under pinned leases. An operator who knows better may unban it,"
    " which also starts its trust anew.",
    "E_USAGE": "See assay audit --help.",
}


def advice(code: str, check: str = "") -> str:
    """What to do about a code, which ``check`` ended with."""
    placed = AT.get((code, _step(check)))
    if placed is not None:
        return placed[1]
    if code.startswith(("E_LOG_", "E_DRAW_", "E_BAN_")):
        return ADVICE.get(code, _COORDINATOR)
    return ADVICE.get(code, _TRY_AGAIN if code in CAUSES else "See the message: it says what was expected and got.")


def likely_causes(code: str | None, check: str = "") -> tuple[str, ...]:
    """Likely causes of a code, which ``check`` ended with; empty when we know none."""
    placed = AT.get((code or "", _step(check)))
    return CAUSES.get(code or "", ()) if placed is None else placed[0]


def _step(check: str) -> str:
    return check.partition(" ")[0]
