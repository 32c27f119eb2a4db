"""The residual of every token of a rollout as one SVG picture, without script: hover shows the numbers.

The vertical axis is logarithmic. The band between the limit of the mean and that of a single token is shaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH: Final = 960
_HEIGHT: Final = 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 28
#: Lowest residual shown, in nats: below the noise of float32.
_FLOOR: Final = 1e-10


@dataclass(frozen=True)
class Dot:
    """One token of a plot."""

    value: float  #: residual, nats; NaN when there is none
    title: str  #: shown on hover
    beyond: bool  #: above the limit of a single token


def residual_svg(dots: Sequence[Dot], mean_limit: float, token_limit: float) -> str:
    """An SVG element for the dots of one rollout, limits in nats."""
    values = [dot.value for dot in dots if math.isfinite(dot.value)]
    low = max(_FLOOR, min([mean_limit / 100, *(value for value in values if value > 0)]))
    high = max([token_limit * 10, *values])
    scale = _Scale(math.floor(math.log10(low)), math.ceil(math.log10(high)), len(dots))
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="residual per token">',
        _band(scale, mean_limit, token_limit), _axes(scale),
        *(_dot(scale, index, dot) for index, dot in enumerate(dots) if not math.isnan(dot.value)),
        "</svg>",
    ]
    return "\n".join(parts)


@dataclass(frozen=True)
class _Scale:
    low: int  #: decade at the bottom
    high: int  #: decade at the top
    tokens: int

    def x(self, index: float) -> float:
        return _LEFT + (index + 0.5) / max(1, self.tokens) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        at = math.log10(min(max(value, 10.0**self.low), 10.0**self.high))
        return _TOP + (self.high - at) / (self.high - self.low) * (_HEIGHT - _TOP - _BOTTOM)


def _band(scale: _Scale, mean_limit: float, token_limit: float) -> str:
    top, bottom = scale.y(token_limit), scale.y(mean_limit)
    across = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}"'
    return (
        f'<rect class="band" x="{_LEFT}" y="{top:.1f}" width="{_WIDTH - _LEFT - _RIGHT}" '
        f'height="{max(0.0, bottom - top):.1f}"><title>between the limits of the mean and of one token</title></rect>'
        f'<line class="limit" {across} y1="{top:.1f}" y2="{top:.1f}"/>'
        f'<text class="limit" x="{_WIDTH - _RIGHT}" y="{top - 3:.1f}" text-anchor="end">'
        f"limit of one token {token_limit:.3g}</text>"
        f'<line class="mean" {across} y1="{bottom:.1f}" y2="{bottom:.1f}"/>'
        f'<text class="mean" x="{_WIDTH - _RIGHT}" y="{bottom + 11:.1f}" text-anchor="end">'
        f"limit of the mean {mean_limit:.3g}</text>"
    )


def _axes(scale: _Scale) -> str:
    marks = []
    step = max(1, (scale.high - scale.low) // 6)
    for decade in range(scale.low, scale.high + 1, step):
        y = scale.y(10.0**decade)
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{decade}</text>')
    every = max(1, 10 ** math.floor(math.log10(max(1, scale.tokens / 4))))
    marks += [
        f'<text x="{scale.x(index):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{index}</text>'
        for index in range(0, scale.tokens, every)
    ]
    return "".join(marks)


def _dot(scale: _Scale, index: int, dot: Dot) -> str:
    kind = "bad" if dot.beyond else "ok"
    return (
        f'<circle class="{kind}" cx="{scale.x(index):.1f}" cy="{scale.y(dot.value):.1f}" r="2.6">'
        f"<title>{escape(dot.title)}</title></circle>"
    )
