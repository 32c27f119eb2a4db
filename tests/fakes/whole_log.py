"""Reads a coordinator's whole log as a suspicious stranger would."""

from __future__ import annotations

import httpx

from protocol.log_entry import LogEntry, check_root, read_on
from protocol.log_head import LogHead
from protocol.transparency import Peaks


def read_log(http: httpx.Client, run_id: str, public_key: bytes, page: int = 1000) -> list[LogEntry]:
    """All entries of the log, once they are known to be those under its signed head."""
    head = LogHead.open(http.get("/v1/log/head").text, run_id, public_key)
    peaks, entries = Peaks(), []
    while peaks.size < head.size:
        limit = min(page, head.size - peaks.size)
        more = http.get("/v1/log", params={"from": peaks.size, "limit": limit}).json()["entries"]
        read = [LogEntry.from_dict(entry) for entry in more]
        read_on(peaks, read)
        entries += read
    check_root(peaks, head.size, head.root)
    return entries
