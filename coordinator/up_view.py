"""What ``assay up`` shows: a live page on a terminal, JSON lines otherwise. Both keep ``events.jsonl``."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coordinator.up_status import NodeSeen, Status
from protocol.disk import append_line

BARS: Final = "▁▂▃▄▅▆▇█"
#: Without a terminal the state of the run is printed when it changes, and otherwise this often.
STATUS_EVERY_S: Final = 15.0
#: Events kept on the live page.
SHOWN_EVENTS: Final = 8
#: Columns of the terminal below which the table of nodes leaves out what can be missed.
WIDE: Final = 110

STATE_STYLE: Final = {"active": "green", "banned": "red", "drill": "yellow"}


class View(Protocol):
    """Where events and states go."""

    def event(self, name: str, fields: Mapping[str, object]) -> None:
        """Something happened."""

    def update(self, status: Status, processes: Mapping[str, str], elapsed_s: float) -> None:
        """The run looks like this now."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class EventLog:
    """``events.jsonl``: everything that happened, one JSON object per line, over all starts of a run."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def write(self, name: str, fields: Mapping[str, object]) -> str:
        """Append an event and return its line."""
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"ts": stamp, "event": name, **fields}, ensure_ascii=False, default=str)
        append_line(self._path, line)
        return line


class JsonView:
    """JSON lines for machines, and for logs that people read later."""

    def __init__(self, events: Path, out: IO[str] | None = None):
        self._log = EventLog(events)
        self._out = out or sys.stdout
        self._last: tuple[Any, ...] | None = None
        self._shown_at = -STATUS_EVERY_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left open."""

    def event(self, name: str, fields: Mapping[str, object]) -> None:
        """Print the event."""
        print(self._log.write(name, fields), file=self._out, flush=True)

    def update(self, status: Status, processes: Mapping[str, str], elapsed_s: float) -> None:
        """Print the state when it says something new, or after a while."""
        key = (status.version, len(status.rewards), tuple((d.node, d.caught) for d in status.drills))
        if key == self._last and elapsed_s - self._shown_at < STATUS_EVERY_S:
            return
        self._last, self._shown_at = key, elapsed_s
        rewards = status.rewards
        self.event("status", {
            "elapsed_s": round(elapsed_s, 1), "version": status.version, "of": status.run.max_versions,
            "reward_mean": round(rewards[-1], 4) if rewards else None, "tokens_per_s": round(status.tokens_per_s, 1),
            "rollouts": status.rollouts.model_dump(), "audit_queue": status.audit_queue,
            "nodes": {node.name: node.state for node in status.nodes},
            "caught": [drill.attack for drill in status.drills if drill.caught],
            "processes": dict(processes),
        })


class LiveView:
    """A page that redraws itself in the terminal."""

    def __init__(self, events: Path, title: str, console: Console | None = None):
        self._log = EventLog(events)
        self._title = title
        self._recent: deque[str] = deque(maxlen=SHOWN_EVENTS)
        self._page: RenderableType = Text("preparing ...")
        self._console = console or Console()
        self._live = Live(self._draw(), console=self._console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def event(self, name: str, fields: Mapping[str, object]) -> None:
        """Add the event to the foot of the page."""
        self._log.write(name, fields)
        words = "  ".join(f"{key} {_short(value)}" for key, value in fields.items() if value is not None)
        self._recent.append(f"{datetime.now().astimezone():%H:%M:%S}  {name:<10} {words}")
        self._live.update(self._draw())

    def update(self, status: Status, processes: Mapping[str, str], elapsed_s: float) -> None:
        """Redraw the page."""
        self._page = Group(
            _headline(status, elapsed_s), _rewards(status.rewards),
            _nodes(status.nodes, processes, wide=self._console.width >= WIDE), _drills(status),
        )
        self._live.update(self._draw())

    def _draw(self) -> RenderableType:
        foot = Text("\n".join(self._recent), style="dim", no_wrap=True, overflow="ellipsis")
        return Panel(Group(self._page, Text(), foot), title=escape(self._title), border_style="cyan")


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """One character per value, taller for larger; values outside [low, high] are clipped."""
    span = max(high - low, 1e-9)
    return "".join(BARS[int(min(max((v - low) / span, 0.0), 0.999) * len(BARS))] for v in values)


def _headline(status: Status, elapsed_s: float) -> RenderableType:
    table = Table.grid(padding=(0, 3))
    of = f" of {status.run.max_versions}" if status.run.max_versions else ""
    counts = status.rollouts
    table.add_row(
        f"[bold]version {'-' if status.version is None else status.version}[/]{of}",
        f"{status.tokens_per_s:,.0f} tokens/s",
        f"[green]{counts.accepted} accepted[/]",
        f"[red]{counts.rejected} rejected[/]",
        f"{counts.inconclusive} inconclusive",
        f"{counts.pending} waiting",
        f"{elapsed_s // 60:.0f}:{elapsed_s % 60:02.0f}",
    )
    return table


def _rewards(rewards: Sequence[float]) -> RenderableType:
    if not rewards:
        return Text("reward  -", style="bold")
    return Text.assemble(
        ("reward  ", "bold"), (sparkline(rewards[-60:]), "green"), f"  {rewards[0]:.2f} -> {rewards[-1]:.2f}"
    )


def _nodes(nodes: Sequence[NodeSeen], processes: Mapping[str, str], *, wide: bool) -> RenderableType:
    table = Table(box=None, header_style="bold", padding=(0, 2 if wide else 1, 0, 0), expand=False)
    for heading in ("node", "state", *(("process",) if wide else ())):
        table.add_column(heading, no_wrap=True)
    for heading in (*(("version", "lag") if wide else ("ver",)), "accepted", "rejected", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why rejected" if wide else "why", overflow="fold")
    for node in nodes:
        kind = "drill" if node.drill and node.state != "banned" else node.state
        reasons = ", ".join(f"{code} {count}" for code, count in sorted(node.reasons.items())[:2])
        table.add_row(
            escape(node.name), Text(node.state, style=STATE_STYLE.get(kind, "")),
            *((processes.get(node.name, "-"),) if wide else ()), _number(node.version),
            *((_number(node.lag),) if wide else ()), str(node.accepted), str(node.rejected), f"{node.tokens:,}",
            reasons,
        )
    return table


def _drills(status: Status) -> RenderableType:
    lines = [Text("drills", style="bold")] if status.drills else []
    for drill in status.drills:
        if drill.caught:
            found = f"caught after {drill.rollouts_before_caught} rollouts: {drill.code}"
            lines.append(Text(f"  {drill.attack:<14} {found}", style="green"))
        else:
            lines.append(Text(f"  {drill.attack:<14} at large", style="yellow"))
    return Group(*lines)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else "..." + text[-57:]
