"""The learner's metrics as one self-contained page of curves."""

from __future__ import annotations

from typing import Any, Final

from learner.metrics import Metrics
from protocol.errors import E_CONFIG, LocalFault

#: One picture each: title, metrics drawn in it, whether the scale is logarithmic.
PANELS: Final[tuple[tuple[str, tuple[str, ...], bool], ...]] = (
    ("reward", ("reward_mean",), False),
    ("KL of the sampler against the learner, nats per token", ("kl", "head_kl", "kl_ref"), True),
    ("effective sample size", ("ess", "ess_used"), False),
    ("importance ratio", ("ratio_p01", "ratio_p50", "ratio_p99", "ratio_max"), True),
    ("share of tokens cut", ("truncated", "truncated_positive", "truncated_negative"), False),
    ("head mass", ("head_mass_q", "head_mass_p"), False),
    ("entropy, nats", ("entropy",), False),
    ("lag, versions", ("lag_mean", "lag_max"), False),
    ("gradient norm", ("grad_norm",), True),
    ("learning rate", ("lr",), False),
    ("seconds", ("wait_s", "step_s", "publish_s"), False),
    ("bytes of a diff", ("diff_bytes",), True),
)
#: Drawn per lag bucket.
BY_LAG: Final = ("ess", "kl", "truncated", "tokens")


def page(lines: list[Metrics], title: str) -> str:
    """HTML of all panels, needing no other file and no network.

    Raises:
        LocalFault: ``E_CONFIG`` without plotly.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise LocalFault(
            E_CONFIG, "plots need the package plotly", hint="pip install 'assay-rl[plots]'"
        ) from None
    panels = [(name, _curves(lines, metrics), log) for name, metrics, log in PANELS]
    panels += [(f"{name} by lag", _bucket_curves(lines, name), name == "kl") for name in BY_LAG]
    panels = [panel for panel in panels if panel[1]]
    rows = max(1, -(-len(panels) // 2))
    figure = make_subplots(rows=rows, cols=2, subplot_titles=[name for name, _, _ in panels])
    for place, (_, curves, log) in enumerate(panels):
        where = {"row": place // 2 + 1, "col": place % 2 + 1}
        for name, (xs, ys) in curves.items():
            figure.add_scatter(x=xs, y=ys, name=name, mode="lines+markers", **where)
        figure.update_yaxes(type="log" if log else "linear", **where)
        figure.update_xaxes(title_text="version", **where)
    figure.update_layout(height=340 * rows, title_text=title, template="plotly_white")
    html: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return html


_Curves = dict[str, tuple[list[Any], list[Any]]]


def _curves(lines: list[Metrics], names: tuple[str, ...]) -> _Curves:
    """Each metric that some line has, over versions; a number that was not finite is a gap."""
    return {
        name: ([line["version"] for line in lines], [line.get(name) for line in lines])
        for name in names if any(line.get(name) is not None for line in lines)
    }


def _bucket_curves(lines: list[Metrics], name: str) -> _Curves:
    curves: _Curves = {}
    for line in lines:
        for lag, values in line.get("by_lag", {}).items():
            xs, ys = curves.setdefault(f"{name}, lag {lag}", ([], []))
            xs.append(line["version"])
            ys.append(values.get(name))
    return curves
