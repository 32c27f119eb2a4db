"""Run the benchmarks one after another and write what they measured beside what was to be reached.

    python benchmarks/report.py [--quick] [--only NAME ...] [--result NAME=FILE ...] [--out docs/benchmarks.md]

Each benchmark is a process of its own, so that none inherits the caches or the threads of another. One that fails is
reported with the end of what it said; the others still run. Results of a full run replace those in ``--out``; those of
benchmarks left out by ``--only`` are kept as they stand there. ``--result`` takes what a benchmark printed into a file
when it was run by itself, say over night, instead of running it again; the day is then that of the file.

Exit status: 0 every target is met, 1 one is missed or a benchmark failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import operator
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
#: Longest time one benchmark may take, in seconds.
LIMIT_S: Final = 3600
#: Packages whose versions decide the numbers.
PACKAGES: Final = ("torch", "numpy", "numba", "zstandard", "transformers")
_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True)
class Claim:
    """What a key of a benchmark's result has to be."""

    key: str  #: dotted path into the result
    comparison: str  #: <=, >= or ==
    target: float

    def met_by(self, value: float) -> bool:
        """Whether a measured value keeps the claim."""
        return _COMPARE[self.comparison](value, self.target)


def _claims(*lines: str) -> tuple[Claim, ...]:
    return tuple(Claim(key, comparison, float(target)) for key, comparison, target in map(str.split, lines))


#: Benchmark -> its claims. A benchmark without claims is listed with what it measured.
CLAIMS: Final[dict[str, tuple[Claim, ...]]] = {
    "sampler_replay": _claims("tokens_per_s_per_core >= 2e6", "mismatches == 0"),
    "bundle_size": _claims("smollm2_gsm8k.ratio_to_entropy <= 1.10", "smollm2_gsm8k.bytes_per_token.32 <= 64"),
    "detection_power": _claims(
        *(f"cheats.{cheat}.assay_tokens_to_detect <= {tokens}" for cheat, tokens in (
            ("other_model", 96), ("int4_g64", 96), ("int8_g64", 384), ("int8_per_channel", 384),
            ("temperature_0_9", 96), ("top_p_0_95", 96), ("best_of_4", 96), ("edited_digit", 96),
        )),
        "rows_worse_than_toploc == 0", "false_alarm.assay_rollouts_failed == 0",
    ),
    "audit_cost": _claims("t0_t1_ratio_to_generation <= 0.02", "t2_steady_state_ratio <= 0.03"),
    "statistics": _claims(
        "false_ban_exact_default <= 0.001", "false_ban_observed <= 0.05", "false_ban_clustered_most <= 0.05",
        "false_pin_exact <= 0.01",
    ),
    "weight_codec": _claims(
        "xc_vs_grail_bytes <= 0.35", "apply_verify_vs_hash <= 1.5", "two_thread_scaling >= 1.6",
        "catchup20_vs_chain <= 0.45", "gap_zstd_ratio_to_bound <= 1.15", "xc_zstd_ratio_to_bound <= 1.20",
        "xc_rans_ratio_to_bound <= 1.06", "gap_encode_vs_memcpy >= 0.12", "gap_apply_vs_memcpy >= 0.25",
        "xc_encode_vs_memcpy >= 0.10", "xc_apply_vs_memcpy >= 0.12",
    ),
    "swarm": _claims(  # at least as 2 / nodes
        *(f"store_share_per_node_worst_round.{nodes} <= {2 / nodes}" for nodes in (4, 8))
    ),
    "learner_speed": _claims(
        "vs_hf_naive >= 1.0", "vs_trl >= 1.3", "logits_memory_ratio <= 0.125", "total_memory_ratio_8192 <= 0.5"
    ),
    "centering_overhead": _claims("k32 <= 1.01", "k128 <= 1.03"),
    "staleness": _claims("default_within_noise == 1"),
    "quantised_sampler": _claims("default_within_noise == 1"),
    "inflight": _claims("inflight_vs_restart >= 1.5"),
    "routing_replay": _claims("kl_ratio_worst <= 0.5"),
}


def measure(name: str, *, quick: bool) -> dict[str, Any]:
    """The result of one benchmark, or ``{"failed": why}``."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *(["--quick"] if quick else [])]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {LIMIT_S} s"}
    lines = run.stdout.strip().splitlines()
    if run.returncode != 0 or not lines:
        return {"failed": (run.stderr.strip() or "printed nothing")[-600:]}
    return last_line(run.stdout)


def last_line(printed: str) -> dict[str, Any]:
    """The result that a benchmark printed as its last line, or ``{"failed": why}``."""
    line = (printed.strip().splitlines() or [""])[-1]
    try:
        result = json.loads(line)
    except ValueError:
        result = None
    return result if isinstance(result, dict) else {"failed": f"the last line is no JSON object: {line[:200]}"}


def look_up(result: Any, key: str) -> float | None:
    """The number at a dotted path, 1 and 0 for true and false; None when it is not there."""
    for part in key.split("."):
        if not isinstance(result, dict) or part not in result:
            return None
        result = result[part]
    return float(result) if isinstance(result, int | float) else None


def section(name: str, result: dict[str, Any], *, quick: bool, at: datetime) -> tuple[str, bool]:
    """The page's part about one benchmark, measured ``at`` a time, and whether every claim is met."""
    day = at.date().isoformat()
    lines = [f"## {name}", f"`python benchmarks/{name}.py{' --quick' if quick else ''}`, {day}", ""]
    if "failed" in result:
        return "\n".join([*lines, "Failed:", "```", str(result["failed"]), "```", ""]), False
    all_met = True
    if CLAIMS[name]:
        lines += ["| key | to reach | reached | |", "|---|---|---|---|"]
    for claim in CLAIMS[name]:
        value = look_up(result, claim.key)
        met = value is not None and claim.met_by(value)
        all_met &= met
        said = "missing" if value is None else f"{value:.4g}"
        lines.append(f"| `{claim.key}` | {claim.comparison} {claim.target:g} | {said} | {'met' if met else 'MISSED'} |")
    return "\n".join([*lines, "", "```json", json.dumps(result, indent=1), "```", ""]), all_met


def head() -> str:
    """What the numbers depend on."""
    versions = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return "\n".join([
        "# Benchmarks", "",
        "Written by `make bench`. Each file of `benchmarks/` measures Assay and its yardstick side by side in one run;",
        "the ratios carry the claim, absolute numbers are context.", "",
        f"Machine: {_cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, {versions}.", "",
    ])


def kept_sections(page: Path) -> dict[str, str]:
    """Benchmark -> its section of an earlier page."""
    if not page.exists():
        return {}
    parts = re.split(r"(?m)^(?=## )", page.read_text(encoding="utf-8"))[1:]
    return {part.split("\n", 1)[0].removeprefix("## ").strip(): part for part in parts}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or "unknown processor"


def main() -> int:
    """Command line."""
    known = [name for name in CLAIMS if (HERE / f"{name}.py").exists()]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="measure the same things smaller, under a minute each")
    parser.add_argument("--only", nargs="+", choices=known, default=[], metavar="NAME", help=", ".join(known))
    parser.add_argument(
        "--result", action="append", default=[], type=_named_file, metavar="NAME=FILE",
        help="what NAME printed when it was run by itself; only these are put in, unless --only is given too",
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "benchmarks.md", metavar="FILE")
    arguments = parser.parse_args()
    given: dict[str, Path] = dict(arguments.result)
    chosen = arguments.only or ([] if given else known)
    sections, all_met = kept_sections(arguments.out), True
    for name in (name for name in known if name in chosen or name in given):
        print(f"{name} ...", flush=True)
        if name in given:
            at = datetime.fromtimestamp(given[name].stat().st_mtime, UTC)
            result = last_line(given[name].read_text(encoding="utf-8"))
        else:
            at, result = datetime.now(UTC), measure(name, quick=arguments.quick)
        sections[name], met = section(name, result, quick=arguments.quick and name not in given, at=at)
        print(sections[name].split("```json")[0], flush=True)
        all_met &= met
        ordered = [sections[known_name] for known_name in CLAIMS if known_name in sections]
        arguments.out.write_text("\n".join([head(), *(part.rstrip() + "\n" for part in ordered)]), encoding="utf-8")
    print(f"written: {arguments.out}")
    return 0 if all_met else 1


def _named_file(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if name not in CLAIMS or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"expected NAME=FILE, a benchmark and a file that exists, got {text!r}")
    return name, Path(path)


if __name__ == "__main__":
    sys.exit(main())
