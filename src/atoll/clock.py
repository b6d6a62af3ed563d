"""Time as a parameter: only faces and hosts make the real one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Says what time it is. Hosts are the only callers."""

    def now_s(self) -> float:
        """Return seconds that only ever grow; the origin means nothing."""
        ...


class SystemClock:
    """The machine's own monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()
