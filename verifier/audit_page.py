"""An audit as one HTML page that needs nothing else: no script, no font, no address is loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import jinja2
import numpy as np
from numpy.typing import NDArray

from protocol import bundle as bundles
from protocol.errors import AssayError
from protocol.head import behaviour_logprobs
from protocol.messages import Profile
from protocol.model_files import fetch_model_files
from protocol.paths import replacing
from protocol.rollout import NO_CODE, Rollout
from protocol.text import printable
from protocol.tokenizer import Tokenizer
from verifier.audit import Audit
from verifier.audit_table import command
from verifier.divergence import Residuals
from verifier.material import Material
from verifier.residual_plot import Dot, residual_svg

#: Most tokens drawn on one page; the worst rollouts come first.
MAX_TOKENS: Final = 20_000
_QUANTILES: Final = (0.5, 0.9, 0.99, 1.0)
_QUANTITIES: Final = (("divergence", "kl_T"), ("head entry", "entry_T"), ("membership", "omitted_T"),
                      ("tail draw", "tail_draw_T"), ("tail code", "tail_token_T"),
                      ("margin of the draw", "margin_T"), ("tail mass", "tail_mass_T"))


def write_page(
    path: Path, result: Audit, file: Path, checkpoints: list[Path], data: list[Path], material: Material, *,
    pinned: bool,
) -> None:
    """Write the page of an audit."""
    page = render(result, file, checkpoints, data, material, pinned=pinned)
    with replacing(path) as output:
        output.write(page.encode(errors="backslashreplace"))


def render(
    result: Audit, file: Path, checkpoints: list[Path], data: list[Path], material: Material, *, pinned: bool
) -> str:
    """The page of an audit."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )
    environment.filters["plain"] = printable
    charts, left_out = _charts(result, _tokenizer(result, material))
    return environment.get_template("audit.html.jinja").render(
        audit=result, judgement=result.judgement, first=result.first_failure, pinned=pinned, charts=charts,
        left_out=left_out, causes=result.causes,
        command=command(result, file, checkpoints, data),
    )


@dataclass(frozen=True)
class Chart:
    """One rollout on the page."""

    rollout: Rollout
    logq: NDArray[np.float64]  #: natural-log probability each token was drawn with
    residuals: Residuals | None
    profile: Profile
    texts: Sequence[str]  #: of each token

    @property
    def limits(self) -> tuple[float, float]:
        """Limits of the mean and of a single token, nats."""
        return self.profile.max_mean_kl_nano * 1e-9, self.profile.max_token_kl_micro * 1e-6

    @cached_property
    def dots(self) -> list[Dot]:
        """Every token with its numbers."""
        limit = self.limits[1]
        kl = np.full(len(self.rollout), np.nan) if self.residuals is None else self.residuals.kl_T
        return [Dot(float(kl[t]), self._title(t, float(kl[t])), bool(kl[t] > limit)) for t in range(len(self.rollout))]

    @property
    def svg(self) -> str:
        """The picture; empty without residuals."""
        return "" if self.residuals is None else residual_svg(self.dots, *self.limits)

    @property
    def tokens(self) -> list[tuple[str, str, str]]:
        """(class, text, title) of each token."""
        tail = self.rollout.token_codes != NO_CODE
        kinds = ["bad" if dot.beyond else "tail" if tail[t] else "" for t, dot in enumerate(self.dots)]
        return [(kind, text, dot.title) for kind, text, dot in zip(kinds, self.texts, self.dots, strict=True)]

    @property
    def quantiles(self) -> list[tuple[str, list[str]]]:
        """Quantiles of each residual over the rollout, nats."""
        if self.residuals is None:
            return []
        rows = []
        for name, column in _QUANTITIES:
            values = getattr(self.residuals, column)
            values = values[~np.isnan(values)]
            cells = [f"{np.quantile(values, q):.3g}" for q in _QUANTILES] if len(values) else ["–"] * len(_QUANTILES)
            rows.append((name, cells))
        return rows

    @property
    def worst(self) -> float:
        """Largest divergence, for sorting."""
        return 0.0 if self.residuals is None else float(np.nanmax(self.residuals.kl_T))

    def _title(self, t: int, kl: float) -> str:
        drawn = "" if self.rollout.token_codes[t] == NO_CODE else ", drawn from the tail"
        version = next(s.version for s in reversed(self.rollout.segments) if s.start <= t)
        measured = "" if np.isnan(kl) else f"; divergence {kl:.3g} nats"
        return (
            f"position {t}, token {int(self.rollout.tokens[t])} {self.texts[t]!r}, version {version}; "
            f"probability {np.exp(self.logq[t]):.4g}{drawn}{measured}"
        )


def _charts(result: Audit, tokenizer: Tokenizer | None) -> tuple[list[Chart], int]:
    """The rollouts that fit on a page, and how many are not drawn."""
    try:
        rollouts = bundles.decode(result.bundle, result.run.sampling).rollouts
        profile = _profile(result)
    except AssayError:
        return [], 0  # the findings say what is wrong with it
    residuals = {found.sample: found for found in result.residuals}
    charts = []
    for rollout in rollouts:
        try:
            logq = behaviour_logprobs(rollout, result.run.sampling)
        except AssayError:
            continue  # tokens outside their heads have no probability; the findings say so
        texts = [_text(int(token), tokenizer) for token in rollout.tokens]
        charts.append(Chart(rollout, logq, residuals.get(rollout.sample), profile, texts))
    charts.sort(key=lambda chart: (-chart.worst, chart.rollout.sample))
    room = MAX_TOKENS
    shown: list[Chart] = []
    for chart in charts:
        room -= len(chart.rollout)
        if room < 0 and shown:
            break
        shown.append(chart)
    return shown, len(rollouts) - len(shown)


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    """The token's text; its id where it has none, as special tokens do, so that there is something to point at."""
    text = tokenizer.decode([token]) if tokenizer else ""
    return text or f"\u27e8{token}\u27e9"


def _profile(result: Audit) -> Profile:
    named = result.profile
    return next((p for p in result.run.profiles if p.name == named), result.run.profiles[0])


def _tokenizer(result: Audit, material: Material) -> Tokenizer | None:
    """The run's tokenizer, when its files are at hand."""
    with tempfile.TemporaryDirectory(prefix="assay-page-") as folder:
        try:
            return Tokenizer.load(fetch_model_files(result.run.model.files, Path(folder), material.fetch))
        except AssayError:
            return None
