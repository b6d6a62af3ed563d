"""What a reader of logs could see of an error."""

from __future__ import annotations

import logging
import traceback


def everything_shown(exc: BaseException) -> str:
    """Return all that a message, a log line and a traceback would print of `exc`."""
    record = logging.LogRecord("atoll", logging.ERROR, "", 0, "%s", (exc,), None)
    lines = traceback.format_exception(exc)
    return "\n".join([str(exc), repr(exc), record.getMessage(), *lines])
