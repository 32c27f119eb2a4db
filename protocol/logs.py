"""Logging: JSON lines ``{ts, level, logger, msg, **fields}`` to a rotating file or to stderr.

A field is added with ``logger.info("lease taken", extra={"lease_id": ...})``.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from protocol.errors import E_CONFIG, AssayError, LocalFault

#: A log file is rotated at this size, and this many old ones are kept.
MAX_LOG_BYTES: Final = 16 * 2**20
KEPT_LOGS: Final = 4

#: Attributes every record has; whatever else is there was passed as ``extra``.
_BUILT_IN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: Libraries whose INFO lines say nothing about a run.
_CHATTY: Final = ("httpx", "httpcore", "urllib3", "botocore", "boto3", "s3transfer", "numba", "filelock", "alembic")


class JsonLines(logging.Formatter):
    """One JSON object per record; values that JSON cannot hold are written as ``str``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        line.update((k, v) for k, v in vars(record).items() if k not in _BUILT_IN and not k.startswith("_"))
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = self.formatException(record.exc_info)
            if isinstance(record.exc_info[1], AssayError):
                line.setdefault("code", record.exc_info[1].code)
        return json.dumps(line, ensure_ascii=False, default=str)


def setup_logging(path: Path | None = None, level: str = "INFO") -> None:
    """Send the process's logs to ``path`` (rotated), or to stderr when there is none. Safe to call again.

    Raises:
        LocalFault: ``E_CONFIG`` for an unknown level.
    """
    if level.upper() not in logging.getLevelNamesMapping():
        raise LocalFault(E_CONFIG, "unknown log_level", expected="DEBUG, INFO, WARNING or ERROR", got=level[:80])
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_LOGS, encoding="utf-8"
        )
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, JsonLines):
            root.removeHandler(old)
            old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
