"""How many tokens of a cheat it takes to see it: Assay and TOPLOC side by side on the same rollouts.

SmolLM2-135M on GSM8K questions in full runs, the warmed-up tiny model in quick ones. Rollouts are made by the node's
own engine with one thing changed in it (``cheats.py``), audited by both schemes from one prefill of the right model
(``both_schemes.py``), and turned into tokens for power .99 at a false-alarm chance of 1e-4 by one rule for both
(``tokens_to_detect.py``). Assay's limits are T1's exact replay and those of the presets' profile; the proof that
no honest head reaches them stands in docs/spec/verification.md. TOPLOC's are the published ones, or, where fewer tokens
do with those, sums of any of its three errors.

Checkpoints lie as far apart as policy-gradient steps put them: those that ``recorded_diffs.py`` records for SmolLM2,
AdamW steps on worked answers at the preset's learning rate for the tiny model.

SmolLM2 decodes some dozens of tokens a second on a core, so a full run takes from a quarter of an hour to an hour. What
it made is kept in ``--cache``: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import harness

harness.pin_threads()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks import cheats, recorded_diffs, toploc_proofs  # noqa: E402
from benchmarks.both_schemes import Auditor, Reading, Seen  # noqa: E402
from benchmarks.cheats import Made, make  # noqa: E402
from benchmarks.real_rollouts import Workload, model_arguments, smollm2_gsm8k, tiny_sort  # noqa: E402
from benchmarks.tokens_to_detect import FALSE_ALARM, POWER, Needed, by_limits, by_sum, fewest  # noqa: E402
from coordinator.presets import TINY, TORCH_CPU_FP32, SamplingPreset  # noqa: E402
from protocol import bundle as bundles  # noqa: E402
from protocol.messages import SamplingRules  # noqa: E402
from protocol.reference.loader import export_state, load_config_model, set_state  # noqa: E402
from protocol.rollout import Bundle  # noqa: E402
from protocol.weights.layout import State  # noqa: E402

#: Cheats in one place of a rollout.
ONCE: Final = frozenset({"edited_digit"})
VERSIONS: Final = 16
LAGS: Final = (1, 4, 16)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much is made."""

    tokens: int
    honest: tuple[int, int]  #: prompts, rollouts of each
    cheat: tuple[int, int]
    slots: int = 16


FULL: Final = Size(96, (12, 4), (4, 4))
QUICK: Final = Size(8, (12, 4), (4, 4))


class Cache:
    """What was made before, in files."""

    def __init__(self, folder: Path, about: object, say: Say):
        self._folder, self._say = folder, say
        self._about = hashlib.sha256(repr(about).encode()).hexdigest()[:12]

    def get(self, name: str, make_it: Callable[[], Any]) -> Any:
        """The thing of this name, made now when it is not there."""
        file = self._folder / f"detection-{name}-{self._about}.pt"
        if not file.exists():
            self._say(f"making {name}")
            scratch = file.with_suffix(".part")
            torch.save(make_it(), scratch)
            scratch.rename(file)
        return torch.load(file, weights_only=False)  # our own file


# -- the versions of a run -------------------------------------------------------------------------------------


def versions(workload: Workload, folder: Path, seed: int, say: Say) -> dict[int, State]:
    """Versions by their lag behind the newest of ``VERSIONS``."""
    if workload.name == "tiny":
        return _trained(workload, seed)
    recording = recorded_diffs.load(folder)
    if recording is None or len(recording.chain) < VERSIONS:
        recording = recorded_diffs.record(folder, VERSIONS, seed, say)
    state, states = recording.first, {VERSIONS: recording.first}
    for number, change in enumerate(recording.chain[:VERSIONS], start=1):
        state = recording.after(change, state)
        if VERSIONS - number in (*LAGS, 0):
            states[VERSIONS - number] = state
    return states


def _trained(workload: Workload, seed: int) -> dict[int, State]:
    """One AdamW step on a worked answer per version."""
    torch.manual_seed(seed)
    model: Any = load_config_model(workload.folder).train()
    set_state(model, workload.layout, workload.state)
    optimiser = torch.optim.AdamW(model.parameters(), lr=float(TINY.learner["optim.lr"]), weight_decay=0.0)
    states = {VERSIONS: workload.state}
    for step in range(VERSIONS):
        group = 1_000 + step
        answer = workload.tokenizer.encode(str(workload.task.problem(group).answer))
        ids_1L = torch.tensor([[*workload.prompt(group), *answer]])
        model(input_ids=ids_1L, labels=ids_1L).loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if VERSIONS - 1 - step in (*LAGS, 0):
            states[VERSIONS - 1 - step] = export_state(model, workload.layout)
    return states


# -- the cheats --------------------------------------------------------------------------------------------------


def cheaters(workload: Workload, states: Mapping[int, State]) -> dict[str, dict[str, Any]]:
    """What ``make`` is told for every cheat."""
    return {
        "other_model": {"alter": cheats.fewer_layers},
        "int4_g64": {"alter": cheats.rounded(4, 64)},
        "int8_g64": {"alter": cheats.rounded(8, 64)},
        "int8_per_channel": {"alter": cheats.rounded(8, None)},
        "bf16_for_fp32": {"alter": cheats.bfloat16_arithmetic},
        **{f"stale_by_{lag}": {"state": states[lag]} for lag in LAGS},
        "temperature_0_9": {"skew": cheats.cooler(0.9)},
        "top_p_0_95": {"skew": cheats.nucleus(0.95)},
        "best_of_4": {"around": cheats.best_of_n},
        "edited_digit": {"around": cheats.edited_digit(workload.tokenizer)},
    }


@dataclass(frozen=True)
class Row:
    """One cheat as both schemes see it."""

    seen: Seen
    assay: Needed
    toploc: Needed


def measure(workload: Workload, size: Size, options: Any, say: Say) -> tuple[dict[str, Any], str]:
    """Both schemes on honest rollouts and on every cheat."""
    head_size = 32 if workload.vocab_size > 64 else 16
    preset = SamplingPreset(head_size=head_size, max_new_tokens=size.tokens, swap_grid=8)
    rules = workload.rules(**preset.model_dump(exclude={"record_routes"}))
    toploc = toploc_proofs.load(options.cache, say)
    states = versions(workload, options.cache / "recorded", options.seed, say)
    auditor = Auditor(Reading(workload, states[0], rules), rules, toploc)
    about = (workload.name, size, options.seed, options.data, rules)
    cache = Cache(options.cache, about, say)
    base = partial(make, workload, rules, slots=size.slots)
    honest_made: list[Made] = cache.get(
        "honest", partial(base, range(size.honest[0]), size.honest[1], state=states[0])
    )
    seen = "seen" if toploc is None else "seen-toploc"
    honest = cache.get(f"honest-{seen}", partial(auditor.look, honest_made))[0]
    rows: dict[str, Row] = {}
    groups = range(100, 100 + size.cheat[0])
    for name, changes in cheaters(workload, states).items():
        told = {"state": states[0]} | changes
        made = partial(cache.get, name, partial(base, groups, size.cheat[1], **told))
        as_made, forged = cache.get(f"{name}-{seen}", partial(_look, auditor, made))
        rows[name] = _row(honest, as_made, once=name in ONCE)
        if name == "other_model":
            rows["other_model_right_prefill"] = _row(honest, forged)
        say(f"{name}: assay {rows[name].assay}, toploc {rows[name].toploc}")
    return _report(workload, rules, honest, honest_made, rows)


def _look(auditor: Auditor, made: Callable[[], list[Made]]) -> tuple[Seen, Seen]:
    return auditor.look(made())


# -- tokens to detect ----------------------------------------------------------------------------------------------


def _row(honest: Seen, cheat: Seen, *, once: bool = False) -> Row:
    mean_tokens = float(np.mean(cheat.lengths))
    ours = fewest(by_limits(cheat.beyond, once=once), by_sum(honest.log_kl, cheat.log_kl, mean_tokens))
    if not cheat.proofs:
        return Row(cheat, ours, Needed(None))
    unit = min(toploc_proofs.CHUNK, round(mean_tokens))
    sums = [by_sum(_errors(honest, name), _errors(cheat, name), unit) for name in toploc_proofs.LIMITS]
    beyond = [np.array([_over(proof) for proof in proofs]) for proofs in cheat.proofs]
    return Row(cheat, ours, fewest(by_limits(beyond, unit), *sums))


def _over(proof: Mapping[str, float]) -> bool:
    return any(proof[name] > limit for name, limit in toploc_proofs.LIMITS.items())


def _errors(seen: Seen, name: str) -> list[float]:
    return [proof[name] for proofs in seen.proofs for proof in proofs]


# -- the report ----------------------------------------------------------------------------------------------------


def _report(
    workload: Workload, rules: SamplingRules, honest: Seen, made: Sequence[Made], rows: Mapping[str, Row]
) -> tuple[dict[str, Any], str]:
    tokens = sum(honest.lengths)
    packed = [Bundle(tuple(one.rollout for one in made[i : i + 8])) for i in range(0, len(made), 8)]
    result = {
        "model": workload.name, "toploc_available": bool(honest.proofs), "power": POWER,
        "false_alarm": _false_alarm(honest, rules),
        "honest_rollouts": len(honest.lengths), "honest_tokens": tokens,
        "assay_bytes_per_token": sum(len(bundles.encode(bundle)) for bundle in packed) / tokens,
        "toploc_bytes_per_token": honest.proof_bytes / tokens if honest.proofs else None,
        "rows_worse_than_toploc": sum(not row.assay.not_more_than(row.toploc) for row in rows.values()),
        "cheats": {name: _entry(row) for name, row in rows.items()},
    }
    cells = [
        (name, row.assay, "+".join(sorted(row.seen.by)), f"{row.seen.caught}/{len(row.seen.lengths)}", row.toploc)
        for name, row in rows.items()
    ]
    alarm = result["false_alarm"]
    text = harness.table(("cheat", "assay tokens", "tier", "rollouts beyond a limit", "toploc tokens"), cells)
    text += (
        f"\n~: extrapolated. Of {len(honest.lengths)} honest rollouts Assay's limits fail "
        f"{alarm['assay_rollouts_failed']}, TOPLOC's {alarm['toploc_rollouts_failed']}; largest honest residuals, and "
        "limits: " + ", ".join(f"{name} {a:.2g} / {b:.2g}" for name, (a, b) in alarm["largest_and_limit"].items())
        + f"\nbytes per token: assay {result['assay_bytes_per_token']:.1f}, toploc "
        + ("-" if not honest.proofs else f"{result['toploc_bytes_per_token']:.2f}")
    )
    return result, text


def _false_alarm(honest: Seen, rules: SamplingRules) -> dict[str, Any]:
    """What honest rollouts leave to Assay's limits, and what quantisation alone can make of them."""
    profile, steps = TORCH_CPU_FP32, rules.steps_per_nat
    limits = {
        "mean_kl": profile.max_mean_kl_nano * 1e-9, "token_kl": profile.max_token_kl_micro * 1e-6,
        "margin": profile.max_margin_micro * 1e-6,
    }
    return {
        "target": FALSE_ALARM, "assay_rollouts_failed": honest.caught,
        "toploc_rollouts_failed": sum(any(map(_over, proofs)) for proofs in honest.proofs),
        "largest_and_limit": {name: (honest.largest[name], limit) for name, limit in limits.items()},
        "quantisation_ceiling": {"kl": 1 / (8 * steps**2), "margin": 1 / (2 * steps)},
    }


def _entry(row: Row) -> dict[str, Any]:
    return {
        "assay_tokens_to_detect": row.assay.tokens, "assay_extrapolated": row.assay.extrapolated,
        "assay_tiers": sorted(row.seen.by), "toploc_tokens_to_detect": row.toploc.tokens,
        "toploc_extrapolated": row.toploc.extrapolated, "rollouts": len(row.seen.lengths),
        "beyond_a_limit": row.seen.caught, "mean_tokens": float(np.mean(row.seen.lengths)),
        "share_of_tokens_beyond": float(np.mean(np.concatenate(row.seen.beyond))),
    }


def main() -> None:
    """Run the benchmark."""
    options = model_arguments(harness.parser(__doc__))
    torch.set_num_threads(1)
    workload = tiny_sort(options.cache) if options.quick else smollm2_gsm8k(options.cache, options.data)
    say: Say = (lambda _: None) if options.json else partial(print, flush=True)
    result, text = measure(workload, QUICK if options.quick else FULL, options, say)
    harness.finish(result, text, only_json=options.json)


if __name__ == "__main__":
    main()
