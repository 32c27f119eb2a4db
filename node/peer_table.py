"""Peers as a human reads them: who is connected, what went to and fro, and why somebody is not connected."""

from __future__ import annotations

from typing import Any


def lines(view: dict[str, Any], age_s: float | None) -> list[str]:
    """The swarm in a line, then a table of its peers."""
    age = "" if age_s is None else f", as of {age_s:.0f} s ago"
    if not view.get("running"):
        return [f"swarm     not running: {view.get('why') or 'the node is not running'}{age}"]
    found = view["peers"]
    head = [
        f"swarm     {view['connected']} of {len(found)} peers connected{age}",
        f"we are    {view['peer_id']}",
        f"listening {', '.join(view['addresses']) or 'nowhere'}",
        f"moved     {_mb(view['bytes_fetched'])} from peers, {_mb(view['bytes_served'])} to peers",
    ]
    return head + ([] if not found else ["", *_table(found)])


def _table(peers: list[dict[str, Any]]) -> list[str]:
    titles = ("peer", "name", "state", "from it", "to it", "MB/s", "failed", "address or reason")
    rows = [titles, *(_row(peer) for peer in peers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def _row(peer: dict[str, Any]) -> tuple[str, ...]:
    state = "connected" if peer["connected"] else "dropped" if peer["dropped"] else "away"
    where = ", ".join(peer["addresses"]) or f"came to us ({', '.join(peer['found_by'])})"
    return (
        f"..{peer['peer_id'][-8:]}", peer["name"] or "?", state, _mb(peer["bytes_fetched"]), _mb(peer["bytes_served"]),
        "-" if peer["mb_s"] is None else f"{peer['mb_s']:.1f}", str(peer["failures"]), peer["why"] or where,
    )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
