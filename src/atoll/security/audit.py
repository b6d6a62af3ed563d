"""Audit events: allowed and refused requests. They cannot contain a secret.

Rule 1: every field is a number, a word from a closed list, or an IP address that was
parsed and formatted again. No field takes text that a caller wrote, so none can carry a
caller's secret.

The rate limiter reports each kind ten times a minute; the rest is only counted. A
refusal costs the caller nothing, so there may be a thousand of them a second.
Rule 2: each kind has its own limit, so that a scan of the port does not hide a wrong
token.
Rule 3: kinds are words of a closed list, so there are few of them.
Rule 4: time is a parameter.
"""

from __future__ import annotations

import enum
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.routes import ROUTES, UNLISTED, Role, Route
from atoll.security.addresses import ip_of


class AuditKind(enum.Enum):
    """The kind of request. The values are part of events, and stable."""

    REQUEST = "request"
    CODE_MADE = "code_made"
    CODE_REDEEMED = "code_redeemed"
    HANDSHAKE = "handshake"
    CONNECTION = "connection"
    CONTROL = "control"


class AuditAnswer(enum.Enum):
    """The answer to the caller. The values are part of events, and stable."""

    ALLOWED = "allowed"
    NO_TOKEN = "no_token"
    WRONG_ROLE = "wrong_role"
    WRONG_CODE = "wrong_code"
    WRONG_PROOF = "wrong_proof"
    MUST_WAIT = "must_wait"
    NO_CERTIFICATE = "no_certificate"
    WRONG_CERTIFICATE = "wrong_certificate"
    NO_TLS = "no_tls"
    OLD_TLS = "old_tls"
    BAD_TLS = "bad_tls"
    TOO_MANY = "too_many"
    IDLE = "idle"
    FULL = "full"
    SLOW_READER = "slow_reader"
    SLOW_TRANSFER = "slow_transfer"


class AuditAction(enum.Enum):
    """The control actions of an operator."""

    PAUSE = "pause"
    RESUME = "resume"
    SAVE = "save"
    DRAIN = "drain"
    STOP = "stop"
    EVICT = "evict"
    SET = "set"


@dataclass(frozen=True, kw_only=True)
class AuditEvent:
    """One request that was allowed or denied."""

    kind: AuditKind
    answer: AuditAnswer
    address: str
    """The caller's IP address."""

    at_unix_s: float
    role: Role | None = None
    """The caller's verified role; None without one."""

    route: Route = UNLISTED
    action: AuditAction | None = None
    """The control action, if it was one."""

    untold: int = 0
    """Number of similar requests before it without an event."""

    def __post_init__(self) -> None:
        # Type hints are not enforced at run time, and a string could be a secret.
        _require(self.kind, AuditKind)
        _require(self.answer, AuditAnswer)
        _require(self.role, Role, optional=True)
        _require(self.action, AuditAction, optional=True)
        if not any(self.route is row for row in (*ROUTES, UNLISTED)):
            raise UsageError("route must be a row of routes.ROUTES. Use find_route().")
        object.__setattr__(self, "address", _address(self.address))
        object.__setattr__(self, "at_unix_s", _number(self.at_unix_s))
        object.__setattr__(self, "untold", int(_number(self.untold)))

    def as_event(self) -> dict[str, str | float]:
        """Return the event as plain values, for a line of JSON."""
        event: dict[str, str | float] = {
            "what": self.kind.value,
            "answer": self.answer.value,
            "address": self.address,
            "at_unix_s": self.at_unix_s,
            "role": self.role.value if self.role else "none",
            "route": self.route.title,
        }
        if self.action:
            event["action"] = self.action.value
        return event | ({"untold": self.untold} if self.untold else {})


def _require(value: object, kind: type[enum.Enum], *, optional: bool = False) -> None:
    if not (isinstance(value, kind) or (optional and value is None)):
        raise UsageError(
            f"An audit's {kind.__name__.lower()} must be a member of {kind.__name__}."
        )


def _address(text: str) -> str:
    # A zone ("fe80::1%eth0") is arbitrary text of the caller.
    ip = ip_of(text.partition("%")[0]) if isinstance(text, str) else None
    if ip is None:
        raise UsageError("An audit's address must be an IP address.")
    return str(ip)


def _number(value: float) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError("An audit's times and counts must be finite numbers.")
    return float(value)


MAX_REPORTS = 10
WITHIN_S = 60.0


class RateLimiter:
    """Rate limiter for audit events: `max_reports` per `within_s` and kind.

    The rest is only counted. Threads may share it.
    """

    def __init__(
        self, *, max_reports: int = MAX_REPORTS, within_s: float = WITHIN_S
    ) -> None:
        self._within_s = within_s
        self._told_s: defaultdict[Hashable, deque[float]] = defaultdict(
            lambda: deque(maxlen=max_reports)
        )
        self._untold: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def untold(self, kind: Hashable, *, now_s: float) -> int | None:
        """Return how many of a kind were suppressed since the last report.

        None: suppress this one too; it is counted.
        """
        with self._lock:
            told_s = self._told_s[kind]
            is_full = len(told_s) == told_s.maxlen
            if is_full and now_s < told_s[0] + self._within_s:
                self._untold[kind] += 1
                return None
            told_s.append(now_s)
            return self._untold.pop(kind, 0)
