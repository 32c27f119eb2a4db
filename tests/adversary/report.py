"""Run the zoos and write what was measured: ``python -m tests.adversary.report [--trials N] [--only PART]``.

The numbers go to ``docs/attack-zoo.json``, the page made of them to ``docs/attack-zoo.md``. A part that is not run
keeps its numbers and its date. ``--render`` only writes the page again.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
PAGE: Final = DOCS / "attack-zoo.md"
NUMBERS: Final = DOCS / "attack-zoo.json"
PARTS: Final = ("attacks", "tiny", "smollm2")
#: Rollouts per stack of the tiny honest zoo: unlisted, calibrating, checked.
TINY: Final = (48, 120, 200)

logger = logging.getLogger("tests.adversary.report")


def attacks(
    folder: Path, trials: int, worlds: int, rows: range, named: str, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Power of every fixture of these rows whose name holds ``named``, in rounds of one trial each.

    The others keep what was measured before.

    What was measured is saved after each trial.
    """
    from tests.adversary.bench import Bench
    from tests.adversary.fixtures import FIXTURES
    from tests.adversary.registry import Catch, power_of

    bench = Bench(folder, worlds=worlds)
    known = {f["name"]: f for f in _numbers().get("attacks", {}).get("fixtures", ())}
    found: dict[str, Any] = {}
    catches: dict[str, list[Catch]] = {}
    for seed in range(trials):
        for fixture in FIXTURES:
            if fixture.row in rows and named in fixture.name:
                catch = fixture.trial(bench, seed)
                if fixture.kind == "caught" and not fixture.holds(catch):
                    logger.error("not caught as it must be: row %d, %s", fixture.row, fixture.name)
                    catch = replace(catch, caught=False)
                logger.info("row %d, %s: %s", fixture.row, fixture.name, catch)
                catches.setdefault(fixture.name, []).append(catch)
                power = power_of(catches[fixture.name])
                about = {"row": fixture.row, "name": fixture.name, "kind": fixture.kind, "limit": fixture.limit}
                known[fixture.name] = about | asdict(power)
                found = {"fixtures": [known[f.name] for f in FIXTURES if f.name in known], "worlds": worlds}
                save(found)
    bench.close()
    return found


def tiny(folder: Path, rollouts: Sequence[int]) -> dict[str, Any]:
    """The honest zoo on the tiny model; ``rollouts`` per stack: unlisted, calibrating, checked."""
    from tests.adversary.honest_zoo import ALL_STACKS, tiny_zoo

    unlisted, calibrating, checked = rollouts
    return tiny_zoo(folder, ALL_STACKS, unlisted=unlisted, calibrating=calibrating, checked=checked)


def smollm2(folder: Path) -> dict[str, Any]:
    """The honest zoo on SmolLM2."""
    from tests.adversary.honest_zoo import smollm2_zoo

    return smollm2_zoo(folder)


# -- the page -----------------------------------------------------------------------------------------------

HEAD: Final = """# Attack zoo and honest zoo: what was measured

Written by `python -m tests.adversary.report` from a run; do not edit. The fixtures are in `tests/adversary`, and
`make test-slow` runs them all. Each attacks the real pipeline: the coordinator's application with its database, the
node's own daemon and engine with the cheat patched in, the verifier's worker, and for T1' the learner's forward pass.
"""

ATTACKS_HEAD: Final = """## Attacks

A trial is one new key that cheats until it is caught. *Rollouts* and *tokens* are what it had handed in by then, the
bundle that gave it away included: median / 99 % quantile over the trials. *Beside* are honest rollouts in the same
runs, judged by the same code, and how many of them were refused or punished. Every trial has another key, prompts and
seeds; the weights are those of {worlds} random models. Bundles hold 4 rollouts of up to 32 tokens, those of patched
engines 1 of up to 16, those of the rows about draws 1 of up to 8.

*door*: refused by the coordinator before any verifier looks. *sum*: scores summed up over bundles
([statistics.md](statistics.md)). *peers*: better than its peers by more than chance, and no longer free to choose (the
same page). *no gain*: nobody is refused, and what was tried changes nothing.

| row | attack | variant | caught by | code | caught | rollouts | tokens | beside | false alarms |
|---|---|---|---|---|---|---|---|---|---|
"""

LIMITS_HEAD: Final = """
## What is not seen

Kept as strict expected failures: when one begins to be caught, the test says so.

| row | variant | what is not seen | handed in per trial | trials | caught | measured |
|---|---|---|---|---|---|---|
"""

NOTE: Final = """
Rows 33 and 34 run on GSM8K rows of our own making with a policy that was trained on the spot to say certain things to
certain questions; the node and every draw are honest unless the variant says otherwise. *reward 0*: the rollouts are
genuine and pass, and none of them earns anything, while plain answers of the same policy earn everything. Tasks have
one turn and no tools; what an environment could say in between is tried as a question that holds forged turns, as a
completion that holds a forged tool result, and as other questions under the same hash.
"""

HONEST: Final = {
    "tiny": "## Honest zoo, tiny model",
    "smollm2": "## Honest zoo, SmolLM2-135M on GSM8K, up to 48 tokens",
}
PASSES: Final = {
    "unlisted": "A profile that the run does not list is held to the narrowest limits and never punished: outside them "
                "it is `E_UNCALIBRATED`, inconclusive. Float32 is listed.",
    "calibrating": "Rollouts from which both profiles are calibrated, bf16 under provisional wide limits.",
    "calibrated": "Other rollouts under that calibration. What bundles say is summed up per node; the alarm is at "
                  "{alarm} nats.",
}
HONEST_TABLE: Final = """
| stack | rollouts | tokens | outcomes | banned | mean KL | bias | clipped margin | score |
|---|---|---|---|---|---|---|---|---|
"""


def render(numbers: dict[str, Any]) -> str:
    """The page."""
    text = HEAD
    if "attacks" in numbers:
        text += "\n" + _attacks(numbers["attacks"])
    for part, title in HONEST.items():
        if part in numbers:
            text += f"\n{title}\n\n{_dated(numbers[part])}\n" + _honest(numbers[part])
    return text


def _dated(part: dict[str, Any]) -> str:
    return f"Run of {part['date']}."


def _attacks(part: dict[str, Any]) -> str:
    from tests.adversary.registry import ROWS

    caught = [f for f in part["fixtures"] if f["kind"] == "caught"]
    text = ATTACKS_HEAD.format(worlds=part["worlds"])
    for f in caught:
        where = ", ".join(sorted(f["where"]))
        codes = ", ".join(f"`{code}`" for code in sorted(f["codes"])) or "-"
        tokens = _pair(f["tokens"]) if f["tokens"][1] else "-"
        share = f"{f['caught']} of {f['trials']}"
        text += (f"| {f['row']} | {ROWS[f['row']]} | {f['name']} | {where} | {codes} | {share} | "
                 f"{_pair(f['rollouts'])} | {tokens} | {f['honest']} | {f['alarms']} |\n")
    honest, alarms = (sum(f[key] for f in part["fixtures"]) for key in ("honest", "alarms"))
    trials = sum(f["trials"] for f in caught)
    text += f"\n{_dated(part)} {sum(f['caught'] for f in caught)} of {trials} trials ended in a catch; "
    text += f"{alarms} false alarms in {honest} honest rollouts beside them.\n{NOTE}{LIMITS_HEAD}"
    for f in part["fixtures"]:
        if f["kind"] == "limit":
            note = "-" if f["note"] is None else f"{f['note']:.3g}"
            text += (f"| {f['row']} | {f['name']} | {f['limit']} | {_pair(f['rollouts'])} rollouts, "
                     f"{_pair(f['tokens'])} tokens | {f['trials']} | {f['caught']} | {note} |\n")
    return text


def _pair(values: Sequence[int]) -> str:
    return str(values[0]) if values[0] == values[1] else f"{values[0]} / {values[1]}"


def _honest(part: dict[str, Any]) -> str:
    text = "Statistics: smallest / median / 99 % / largest over rollouts, in nats.\n"
    for name, about in PASSES.items():
        if name in part:
            rows = part[name]
            total = sum(row["rollouts"] for row in rows)
            banned = sum(row["banned"] for row in rows)
            text += f"\n**{name.capitalize()}: {total} rollouts, {banned} bans.** "
            text += about.format(alarm=f"{part.get('alarm_milli', 0) / 1000:.2f}") + "\n" + HONEST_TABLE
            text += "".join(_honest_row(row) for row in rows)
    return text


def _honest_row(row: dict[str, Any]) -> str:
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(row["outcomes"].items()))
    cells = [" / ".join(f"{value:.2g}" for value in row[name]) or "-" for name in ("mean_kl", "bias", "margin", "llr")]
    banned = "yes" if row["banned"] else "no"
    first = [row["stack"], str(row["rollouts"]), str(row["tokens"]), outcomes, banned]
    return "| " + " | ".join([*first, *cells]) + " |\n"


# -- running ------------------------------------------------------------------------------------------------


def _numbers() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(NUMBERS.read_text(encoding="utf-8")) if NUMBERS.exists() else {}
    return found


def main() -> None:
    """Run what is asked for and write numbers and page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--trials", type=int, default=20, help="trials per fixture (default 20)")
    parser.add_argument("--worlds", type=int, default=2, help="random models to take turns (default 2)")
    parser.add_argument("--rows", default="1-34", help="rows of the attack zoo to run, FIRST-LAST (default 1-34)")
    parser.add_argument("--named", default="", metavar="TEXT", help="of these rows, variants whose name holds TEXT")
    parser.add_argument(
        "--tiny", type=int, nargs=3, default=TINY, help=f"tiny model: rollouts per stack (default {TINY})",
        metavar=("UNLISTED", "CALIBRATING", "CHECKED"),
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part; may be repeated")
    parser.add_argument("--render", action="store_true", help="run nothing, write the page again")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tests.adversary").setLevel(logging.INFO)
    numbers = _numbers()
    first, _, last = options.rows.partition("-")
    rows = range(int(first), int(last or first) + 1)
    runs = {
        "attacks": lambda folder: attacks(folder, options.trials, options.worlds, rows, options.named, save),
        "tiny": lambda folder: tiny(folder, options.tiny),
        "smollm2": smollm2,
    }

    def save(found: dict[str, Any]) -> None:
        numbers[part] = {"date": dt.datetime.now(dt.UTC).date().isoformat()} | found
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(render(numbers), encoding="utf-8")

    for part in () if options.render else options.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="assay-zoo-") as folder:
            save(runs[part](Path(folder)))
    PAGE.write_text(render(numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
