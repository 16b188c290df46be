"""What the log looks like: a line for people or a JSON object for programs, and whose call it is on every line of one.

Everything that a call does runs in tasks that were begun within it, aiortc's own too, so the call's name travels with
the context of those tasks: `of_call(id)` sets it, and nobody has to name it in a message. A JSON line has the fields
`time` (UTC), `level`, `logger`, `message`, `call` where it is of a call, `process` where it is not of the server
process itself, and `error` with the traceback of an exception.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

FORMATS = ("text", "json")

_call: ContextVar[str | None] = ContextVar("call", default=None)


@contextmanager
def of_call(call_id: str) -> Iterator[None]:
    """Whatever is logged in the block, and in tasks begun in it, is of this call."""
    token = _call.set(call_id)
    try:
        yield
    finally:
        _call.reset(token)


def configure(level: str | int, kind: str, process: str | None = None) -> None:
    """Log to standard error in this way from now on; `process` names whose lines these are.

    A program around us that has set up its log keeps it as it is.
    """
    root = logging.getLogger()
    if not all(isinstance(handler.formatter, TextFormatter | JsonFormatter) for handler in root.handlers):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if kind == "json" else TextFormatter(process))
    root.handlers[:] = [handler]
    root.setLevel(level.upper() if isinstance(level, str) else level)
    logging.getLogger("aioice").setLevel(logging.WARNING)  # a line for each candidate pair and each of its states


class TextFormatter(logging.Formatter):
    """`2026-12-01 14:00:00,123 INFO webrtc_duplex.server.session: rtc_...: live`"""

    def __init__(self, process: str | None) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process or '%(name)s'}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with the call before what is said of it."""
        if (call := _call.get()) is not None:
            record.message = f"{call}: {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """A line is one JSON object."""

    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON, without the fields that say nothing."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "call": _call.get(),
            "message": record.getMessage(),
            "error": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None})
