"""A calibration record for a human: counts, limits, and the levels of each stratum."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from protocol.calibration import CalibrationRecord, Stratum
from verifier.audit_table import plain


def print_record(record: CalibrationRecord, file: Path) -> None:
    """Print what was measured and where the record is."""
    profile, console = record.profile, Console()
    say = console.print
    say(f"profile {profile.name}: {record.rollouts} rollouts, {record.stochastic_tokens} stochastic tokens")
    say(
        f"limits: mean KL {profile.max_mean_kl_nano * 1e-9:.3g}, token KL {profile.max_token_kl_micro * 1e-6:.3g}, "
        f"margin {profile.max_margin_micro * 1e-6:.3g} nats"
    )
    strata = [] if profile.calibration is None else profile.calibration.strata
    if not strata:
        say("too few prompts for levels: evidence will not be summed up (300, with rollouts of like length, at least)")
    for stratum in strata:
        console.print(_table(stratum))
    say(f"written to {plain(file)}", highlight=False)


def _table(stratum: Stratum) -> Table:
    table = Table(box=None, title=f"from {stratum.min_tokens} tokens on ({stratum.rollouts} rollouts, one of a prompt)")
    for column in ("exceeded by", "ln KL", "|bias - centre|", "margin"):
        table.add_column(column, justify="right")
    columns = (
        [f"{value / 1e3:.3f}" for value in stratum.log_kl_milli], [f"{v / 1e9:.3g}" for v in stratum.bias_nano],
        [f"{v / 1e9:.3g}" for v in stratum.margin_nano],
    )
    for row in range(max(map(len, columns))):
        cells = [column[row] if row < len(column) else "" for column in columns]
        table.add_row(f"1 in {2 ** (row + 1)}", *cells)
    return table
