"""How many tokens of a cheat it takes to see it: Assay and TOPLOC side by side on the same rollouts.

Both look at honest rollouts first and then at each cheat, with the same rule. Tokens to detect are those needed for
power .99 at a false-alarm chance of 1e-4. *Measured*: every rollout of the cheat is beyond a limit by then (T1 has no
tolerance and no false alarms; T2 limits are those of the profile, an order of magnitude above every honest value;
TOPLOC's are the published ones). *Extrapolated*, marked so: where only a share of the rollouts is beyond a limit (a
cheat may leave a rollout as it would have been), ln(.01) / ln(1 - share) rollouts; and where limits do not decide, a
sum: means and deviations of the statistic under honesty and under the cheat, taken as normal, give
n = ((z(1 - 1e-4) + z(.99)) / separation)^2. Whichever is fewer counts. A cheat that does not move the statistic
significantly is never detected.

TOPLOC commits to the last hidden states of the maker's own passes, 32 tokens to a proof; the cheat is honest about its
own model. (Needs the package ``toploc``; without it that column is empty.)
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import harness

harness.pin_threads()

from statistics import NormalDist  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from benchmarks import cheats  # noqa: E402
from benchmarks.cheats import Made, make  # noqa: E402
from benchmarks.real_rollouts import Workload, smollm2_gsm8k, tiny_sort  # noqa: E402
from coordinator.presets import TORCH_CPU_FP32  # noqa: E402
from protocol import bundle as bundles  # noqa: E402
from protocol.messages import SamplingRules  # noqa: E402
from protocol.reference import LogitsChunk, Recomputation  # noqa: E402
from protocol.reference.loader import export_state, load_config_model, set_state  # noqa: E402
from protocol.rollout import Bundle  # noqa: E402
from protocol.sampler import replay, seed_words  # noqa: E402
from protocol.sampler_torch import sample_batch  # noqa: E402
from protocol.weights.layout import State  # noqa: E402
from verifier.divergence import Residuals  # noqa: E402
from verifier.recompute import TorchRecomputer  # noqa: E402

FALSE_ALARM: Final = 1e-4
POWER: Final = 0.99
#: TOPLOC: tokens per proof, values per proof, and the thresholds its authors publish for bfloat16.
CHUNK: Final = 32
TOPK: Final = 128
TOPLOC_LIMITS: Final = {"exponent mismatches": 90.0, "mean mantissa error": 10.0, "median mantissa error": 8.0}
VERSIONS: Final = 16
LAGS: Final = (1, 4, 16)
LEARNING_RATE: Final = 1e-6
#: A mean that is away from the honest one by fewer standard errors is not called different.
SIGNIFICANT: Final = 3.0


@dataclass(frozen=True)
class Size:
    """How much is made."""

    tokens: int
    honest: tuple[int, int]  #: prompts, rollouts of each
    cheat: tuple[int, int]
    slots: int


FULL: Final = Size(96, (4, 4), (2, 3), 16)
QUICK: Final = Size(8, (8, 4), (3, 4), 16)


class Reading:
    """The right model's prefill of finished rollouts: logits for T2, hidden states for TOPLOC, one pass for both."""

    def __init__(self, workload: Workload, state: State, rules: SamplingRules):
        self._model: Any = load_config_model(workload.folder)
        set_state(self._model, workload.layout, state)
        self._rules = rules
        self.hidden: list[torch.Tensor] = []
        self.seeds: list[bytes] = []
        self.redrawn: list[NDArray[np.int64]] = []  #: the tokens that the right heads and the seeds select

    @torch.no_grad()
    def replay(self, items: Sequence[Recomputation], _states: object) -> Iterator[LogitsChunk]:
        """As ``ReferenceModel.replay`` for rollouts of one version."""
        for first in range(0, len(items), 8):
            batch = items[first : first + 8]
            ids = [[*item.prompt, *item.rollout.tokens[:-1].tolist()] for item in batch]
            width = max(map(len, ids))
            padded_BL = torch.tensor([row + [0] * (width - len(row)) for row in ids])
            hidden_BLD = self._model.base_model(input_ids=padded_BL).last_hidden_state
            for row, item in enumerate(batch):
                begin = len(item.prompt) - 1
                hidden_TD = hidden_BLD[row, begin : begin + len(item.rollout)]
                logits_TV = self._model.lm_head(hidden_TD).float()
                self.hidden.append(hidden_TD.bfloat16())
                self.redrawn.append(self._redraw(logits_TV, self.seeds[first + row]))
                yield LogitsChunk(first + row, 0, logits_TV)

    def _redraw(self, logits_TV: torch.Tensor, seed: bytes) -> NDArray[np.int64]:
        words_T4 = torch.from_numpy(seed_words(seed).view(np.int64)).expand(len(logits_TV), 4)
        drawn = sample_batch(logits_TV, words_T4, torch.arange(len(logits_TV)), self._rules)
        tokens: NDArray[np.int64] = drawn.tokens_B.numpy()
        return tokens


@dataclass
class Seen:
    """What both schemes see of some rollouts."""

    lengths: list[int] = field(default_factory=list)
    first_wrong: list[int | None] = field(default_factory=list)  #: Assay: first position beyond a limit
    by: set[str] = field(default_factory=set)  #: Assay: tiers that saw it
    log_kl: list[float] = field(default_factory=list)  #: Assay: mean log-divergence of each rollout
    proofs: list[list[dict[str, float]]] = field(default_factory=list)  #: TOPLOC: errors of each proof of each rollout
    proof_bytes: int = 0
    largest: dict[str, float] = field(default_factory=dict)  #: largest residuals, nats


def look(made: Sequence[Made], reading: Reading, rules: SamplingRules, *, heads_by_prefill: bool = False) -> Seen:
    """Audit rollouts with both schemes."""
    seen = Seen()
    reading.hidden, reading.redrawn, reading.seeds = [], [], [one.seed for one in made]
    cases: list[Any] = [
        SimpleNamespace(
            bundle=Bundle((one.rollout,)), seeds={one.rollout.sample: one.seed}, run=SimpleNamespace(sampling=rules),
            lease=SimpleNamespace(prompt_tokens=list(one.prompt)),
        )
        for one in made
    ]
    states: Any = SimpleNamespace(state=None)
    recomputer = TorchRecomputer(reading, states)  # type: ignore[arg-type]
    for number, (one, [residuals]) in enumerate(zip(made, recomputer.residuals(cases), strict=True)):
        seen.lengths.append(len(one.rollout))
        if heads_by_prefill:
            differ = np.flatnonzero(reading.redrawn[number] != one.rollout.tokens)
            wrong, tier = (int(differ[0]) if len(differ) else None), "T1"
        else:
            wrong, tier = _first_wrong(one, residuals, rules)
            _note_largest(seen.largest, residuals)
            seen.log_kl.append(residuals.statistics.log_kl)
        seen.first_wrong.append(wrong)
        seen.by |= {tier} if wrong is not None else set()
        right_TD = reading.hidden[number]
        claimed_TD = right_TD if heads_by_prefill or not len(one.hidden_TD) else one.hidden_TD
        _prove(seen, claimed_TD, right_TD)
    return seen


def _first_wrong(one: Made, residuals: Residuals, rules: SamplingRules) -> tuple[int | None, str]:
    """First position at which T1 or T2 would fail a rollout that ended there."""
    replayed = replay(one.rollout, one.seed, rules)
    if replayed is not None:
        return replayed, "T1"
    profile = TORCH_CPU_FP32
    margin = profile.max_margin_micro * 1e-6
    beyond_T = residuals.kl_T > profile.max_token_kl_micro * 1e-6
    for values_T, limit in (
        (residuals.entry_T, margin), (residuals.omitted_T, margin), (residuals.tail_draw_T, margin),
        (residuals.tail_token_T, margin), (residuals.margin_T, 2 * margin), (residuals.tail_mass_T, margin),
    ):
        beyond_T = beyond_T | (values_T > limit)
    kl_T = np.where(residuals.stochastic, residuals.kl_T, 0.0)
    mean_T = kl_T.cumsum() / np.maximum(residuals.stochastic.cumsum(), 1)
    where = np.flatnonzero(beyond_T | (mean_T > profile.max_mean_kl_nano * 1e-9))
    return (int(where[0]), "T2") if len(where) else (None, "")


def _note_largest(largest: dict[str, float], residuals: Residuals) -> None:
    entry = float(np.nanmax([np.nanmax(residuals.entry_T), residuals.tail_mass_T.max()]))
    for name, value in (
        ("mean_kl", residuals.mean_kl), ("token_kl", float(residuals.kl_T.max())), ("margin", entry)
    ):
        largest[name] = max(largest.get(name, 0.0), value)


def _prove(seen: Seen, claimed_TD: torch.Tensor, right_TD: torch.Tensor) -> None:
    """TOPLOC's proof of one rollout and what its check finds."""
    if importlib.util.find_spec("toploc") is None:
        return
    import toploc

    arguments: Any = {"decode_batching_size": CHUNK, "topk": min(TOPK, claimed_TD.shape[1]), "skip_prefill": True}
    proofs = toploc.build_proofs_bytes(list(claimed_TD[:, None]), **arguments)
    seen.proof_bytes += sum(map(len, proofs))
    results = toploc.verify_proofs_bytes(list(right_TD[:, None]), proofs, **arguments)
    seen.proofs.append([
        {
            "exponent mismatches": float(found.exp_mismatches),
            "mean mantissa error": min(float(found.mant_err_mean), 128.0),
            "median mantissa error": min(float(found.mant_err_median), 128.0),
        }
        for found in results
    ])


# -- tokens to detect ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needed:
    """Tokens for the wanted power; None: never."""

    tokens: int | None
    extrapolated: bool


def by_limits(first: Sequence[int | None], lengths: Sequence[int]) -> Needed:
    """Tokens by which every rollout is beyond a limit; if only some ever are, enough rollouts to hold one of those."""
    known = [position + 1 for position in first if position is not None]
    if len(known) == len(first):
        return Needed(max(known), False)
    if not known:
        return Needed(None, False)
    rollouts = math.ceil(math.log(1 - POWER) / math.log(1 - len(known) / len(first)))
    return Needed(math.ceil(rollouts * float(np.mean(lengths))), True)


def by_sum(honest: Sequence[float], cheat: Sequence[float], unit: float) -> Needed:
    """Tokens of a sum of a statistic that is normal under both; ``unit`` tokens give one value."""
    if not honest or not cheat:
        return Needed(None, True)
    h, c = np.asarray(honest), np.asarray(cheat)
    gap, pooled = float(c.mean() - h.mean()), math.sqrt((h.var() + c.var()) / 2)
    if gap <= SIGNIFICANT * pooled * math.sqrt(1 / len(h) + 1 / len(c)) or gap <= 0:
        return Needed(None, True)
    normal = NormalDist()
    reach = normal.inv_cdf(1 - FALSE_ALARM) + normal.inv_cdf(POWER)
    values = max(1, math.ceil((reach * pooled / gap) ** 2))
    return Needed(math.ceil(values * unit), True)


def fewest(*found: Needed) -> Needed:
    """The one that needs fewest tokens; measured ones win ties."""
    return min(found, key=lambda n: (math.inf if n.tokens is None else n.tokens, n.extrapolated))


def assay_needs(honest: Seen, cheat: Seen) -> Needed:
    """Assay: limits, else the sum of mean log-divergences."""
    return fewest(
        by_limits(cheat.first_wrong, cheat.lengths),
        by_sum(honest.log_kl, cheat.log_kl, float(np.mean(cheat.lengths))),
    )


def toploc_needs(honest: Seen, cheat: Seen) -> Needed:
    """TOPLOC: its published limits, else the best of its three errors summed up."""
    if not cheat.proofs:
        return Needed(None, False)
    first: list[int | None] = []
    for proofs in cheat.proofs:
        failing = [n for n, proof in enumerate(proofs) if any(proof[k] > v for k, v in TOPLOC_LIMITS.items())]
        first.append(CHUNK * (failing[0] + 1) - 1 if failing else None)
    unit = min(CHUNK, float(np.mean(cheat.lengths)))
    sums = [by_sum(_errors(honest, name), _errors(cheat, name), unit) for name in TOPLOC_LIMITS]
    return fewest(by_limits(first, cheat.lengths), *sums)


def _errors(seen: Seen, name: str) -> list[float]:
    return [proof[name] for proofs in seen.proofs for proof in proofs]


# -- the versions of a run -------------------------------------------------------------------------------------


def versions(workload: Workload, seed: int) -> dict[int, State]:
    """Versions by their lag behind the newest of ``VERSIONS``, one AdamW step on worked answers each."""
    torch.manual_seed(seed)
    model: Any = load_config_model(workload.folder).train()
    set_state(model, workload.layout, workload.state)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
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


Maker = Callable[[], list[Made]]


def cheaters(base: Callable[..., list[Made]], states: Mapping[int, State]) -> dict[str, Maker]:
    """Every cheat by name."""
    return {
        "other_model": partial(base, alter=cheats.fewer_layers),
        "int4_g64": partial(base, alter=cheats.rounded(4, 64)),
        "int8_g64": partial(base, alter=cheats.rounded(8, 64)),
        "int8_per_channel": partial(base, alter=cheats.rounded(8, None)),
        "bf16_for_fp32": partial(base, alter=cheats.bfloat16_arithmetic),
        **{f"stale_by_{lag}": partial(base, state=states[lag]) for lag in LAGS},
        "temperature_0.9": partial(base, skew=cheats.cooler(0.9)),
        "top_p_0.95": partial(base, skew=cheats.nucleus(0.95)),
        "best_of_4": partial(base, around=cheats.best_of_n),
        "edited_token": partial(base, around=cheats.edited),
    }


class Cache:
    """What was made before, in files: SmolLM2 decodes some dozens of tokens a second, so a run can take up another."""

    def __init__(self, folder: Path, about: object, say: Callable[[str], None]):
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


def measure(
    workload: Workload, size: Size, seed: int, cache: Cache, say: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """Both schemes on honest rollouts and on every cheat."""
    rules = workload.rules(head_size=32 if workload.vocab_size > 64 else 16, max_new_tokens=size.tokens)
    states: dict[int, State] = cache.get("versions", partial(versions, workload, seed))
    reading = Reading(workload, states[0], rules)
    base = partial(make, workload, rules, state=states[0], slots=size.slots)
    honest_made = cache.get("honest", partial(base, range(size.honest[0]), size.honest[1]))
    honest = look(honest_made, reading, rules)
    found: dict[str, tuple[Seen, Needed, Needed]] = {}
    one = partial(base, range(100, 100 + size.cheat[0]), size.cheat[1])
    for name, maker in cheaters(partial(_with, one), states).items():
        made = cache.get(name, maker)
        say(f"auditing {name}")
        found[name] = _compare(honest, look(made, reading, rules))
        if name == "other_model":
            prefilled = look(made, reading, rules, heads_by_prefill=True)
            found["other_model_right_prefill"] = _compare(honest, prefilled)
    return _report(workload, honest, honest_made, found)


def _with(one: partial[list[Made]], **changes: Any) -> list[Made]:
    return one(**changes)


def _compare(honest: Seen, cheat: Seen) -> tuple[Seen, Needed, Needed]:
    return cheat, assay_needs(honest, cheat), toploc_needs(honest, cheat)


def _report(
    workload: Workload, honest: Seen, made: Sequence[Made], found: dict[str, tuple[Seen, Needed, Needed]]
) -> tuple[dict[str, Any], str]:
    tokens = sum(honest.lengths)
    size = 8
    packed = [Bundle(tuple(one.rollout for one in made[i : i + size])) for i in range(0, len(made), size)]
    profile = TORCH_CPU_FP32
    limits = {
        "mean_kl": profile.max_mean_kl_nano * 1e-9, "token_kl": profile.max_token_kl_micro * 1e-6,
        "margin": profile.max_margin_micro * 1e-6,
    }
    wrongly = sum(first is not None for first in honest.first_wrong)
    rows, per_cheat = [], {}
    for name, (seen, ours, theirs) in found.items():
        detected = sum(first is not None for first in seen.first_wrong)
        per_cheat[name] = {
            "assay_tokens_to_detect": ours.tokens, "assay_extrapolated": ours.extrapolated and ours.tokens is not None,
            "assay_tier": "+".join(sorted(seen.by)) or None, "toploc_tokens_to_detect": theirs.tokens,
            "toploc_extrapolated": theirs.extrapolated and theirs.tokens is not None, "rollouts": len(seen.lengths),
            "beyond_a_limit": detected, "mean_tokens": float(np.mean(seen.lengths)),
        }
        rows.append((name, _mark(ours), per_cheat[name]["assay_tier"] or "", f"{detected}/{len(seen.lengths)}",
                     _mark(theirs)))
    available = bool(honest.proofs)
    result = {
        "model": workload.name, "toploc_available": available, "honest_rollouts": len(honest.lengths),
        "honest_tokens": tokens,
        "false_alarm": {
            "assay_rollouts_failed": wrongly,
            "limit_over_honest_max": {name: limits[name] / value for name, value in honest.largest.items()},
            "target": FALSE_ALARM,
        },
        "assay_bytes_per_token": sum(len(bundles.encode(bundle)) for bundle in packed) / tokens,
        "toploc_bytes_per_token": honest.proof_bytes / tokens if available else None,
        "never_worse_than_toploc": all(_not_worse(ours, theirs) for _, ours, theirs in found.values()),
        "cheats": per_cheat,
    }
    text = harness.table(("cheat", "assay tokens", "tier", "beyond a limit", "toploc tokens"), rows)
    text += (
        f"\n~: extrapolated. {wrongly} of {len(honest.lengths)} honest rollouts failed; limits over honest maxima: "
        + ", ".join(f"{name} {value:.1f}" for name, value in result["false_alarm"]["limit_over_honest_max"].items())
        + f"\nbytes per token: assay {result['assay_bytes_per_token']:.1f}, toploc {result['toploc_bytes_per_token']}"
    )
    return result, text


def _mark(needed: Needed) -> str:
    if needed.tokens is None:
        return "never"
    return f"~{needed.tokens}" if needed.extrapolated else str(needed.tokens)


def _not_worse(ours: Needed, theirs: Needed) -> bool:
    return theirs.tokens is None or (ours.tokens is not None and ours.tokens <= theirs.tokens)


def main() -> None:
    """Run the benchmark."""
    options = harness.parser(__doc__)
    options.add_argument("--model", type=Path, default=Path.home() / ".cache" / "assay-bench", metavar="DIR",
                         help="models and rollouts are made here once")
    options.add_argument("--data", type=Path, metavar="FILE", help="GSM8K data; default: the sample in tests/data")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    arguments.model.mkdir(parents=True, exist_ok=True)
    workload = tiny_sort(arguments.model) if arguments.quick else smollm2_gsm8k(arguments.model, arguments.data)
    say: Callable[[str], None] = (lambda _: None) if arguments.json else partial(print, flush=True)
    size = QUICK if arguments.quick else FULL
    cache = Cache(arguments.model, (workload.name, size, arguments.seed, LEARNING_RATE, arguments.data), say)
    result, text = measure(workload, size, arguments.seed, cache, say)
    harness.finish(result, text, only_json=arguments.json)


if __name__ == "__main__":
    main()
