"""Log lines of the sidecar on standard error: one JSON object a line, or text for people."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Final

import msgspec

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0))}  # control characters


class JsonLines(logging.Formatter):
    """One object a line: `time`, `level`, `logger`, `message`, the facts that came with it, and `trace` of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            line |= facts
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextLines(logging.Formatter):
    """Time, level and message, and the facts as `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{self.formatTime(record)} {record.levelname.lower()} {record.getMessage()}"
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            text += "".join(f" {name}={value}" for name, value in facts.items() if value != "")
        text = text.translate(_ESCAPES)  # a request's key may hold anything, a forged line too
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def set_up(level: str, form: str) -> None:
    """Have all loggers of this process write to standard error. For the process of the sidecar only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("rdma_kv").setLevel(level.upper())
