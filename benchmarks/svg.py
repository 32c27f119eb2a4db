"""Two-panel line charts as SVG text, with no package and no browser: curves over steps, and finals over rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 430, 300, 46, 120
#: Okabe and Ito's colours, told apart by colour-blind readers, and dashes for who sees none.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
_DASHES: Final = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True)
class Curve:
    """One line: points, and optionally the ends of each point's interval."""

    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """One chart; y goes from 0 to 1."""

    title: str
    x_title: str
    curves: Mapping[str, Curve]
    log_x: bool = False


def chart(panels: Sequence[Panel]) -> str:
    """The panels beside each other, and the names of all curves at the right."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    width = len(panels) * _WIDTH + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{_HEIGHT}" fill="white"/>'
    ]
    parts += [_panel(panel, place * _WIDTH, names) for place, panel in enumerate(panels)]
    for place, name in enumerate(names):
        x, y = len(panels) * _WIDTH + 4, _MARGIN + 18 * place
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" {_stroke(place)}/>'
                     f'<text x="{x + 32}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _stroke(place: int) -> str:
    dash = _DASHES[(place + place // len(_COLOURS)) % len(_DASHES)]
    return f'stroke="{_COLOURS[place % len(_COLOURS)]}" stroke-width="2" fill="none"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def _panel(panel: Panel, left: float, names: Sequence[str]) -> str:
    xs = sorted({x for curve in panel.curves.values() for x in curve.xs})
    scale = math.log if panel.log_x else float
    first, span = scale(xs[0]), (scale(xs[-1]) - scale(xs[0])) or 1.0
    inner_w, inner_h = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN

    def at(x: float, y: float) -> str:
        return (f"{left + _MARGIN + inner_w * (scale(x) - first) / span:.1f},"
                f"{_MARGIN + inner_h * (1 - min(1.0, max(0.0, y))):.1f}")

    parts = [f'<text x="{left + _MARGIN}" y="24" font-size="13">{escape(panel.title)}</text>',
             f'<text x="{left + _WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(panel.x_title)}</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = at(xs[0], tick).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{float(x) + inner_w}" y2="{y}" stroke="#ddd"/>'
                     f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{tick:g}</text>')
    for tick in xs[:: max(1, len(xs) // 6)]:
        x = at(tick, 0.0).split(",")[0]
        parts.append(f'<text x="{x}" y="{_HEIGHT - _MARGIN + 16}" text-anchor="middle">{tick:g}</text>')
    for name, curve in panel.curves.items():
        stroke = _stroke(names.index(name))
        parts.append(f'<polyline points="{" ".join(map(at, curve.xs, curve.ys))}" {stroke}/>')
        for x, low, high in zip(curve.xs, curve.lows, curve.highs, strict=False):
            (x1, y1), (x2, y2) = at(x, low).split(","), at(x, high).split(",")
            parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {stroke} stroke-opacity="0.45"/>')
    return "\n".join(parts)
