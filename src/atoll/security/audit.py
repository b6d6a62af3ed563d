"""What is recorded of who was let in: events that cannot hold a secret.

Rule 1: every field is a number, a word from a closed list, or an IP address that was
read and written again. No field takes text that a caller wrote, so none can carry what
a caller should have kept to itself.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.security.addresses import ip_of
from atoll.security.policy import ROUTES, UNLISTED, Route
from atoll.security.tokens import Role


class What(enum.Enum):
    """What was asked for. The values are names of events, and stable."""

    REQUEST = "request"
    CODE_MADE = "code_made"
    CODE_REDEEMED = "code_redeemed"
    HANDSHAKE = "handshake"
    CONNECTION = "connection"
    CONTROL = "control"


class Answer(enum.Enum):
    """What the caller was told."""

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


class Action(enum.Enum):
    """What an operator may ask of a run."""

    PAUSE = "pause"
    RESUME = "resume"
    SAVE = "save"
    DRAIN = "drain"
    STOP = "stop"
    EVICT = "evict"
    SET = "set"


@dataclass(frozen=True, kw_only=True)
class Audit:
    """One thing that somebody was allowed or denied."""

    what: What
    answer: Answer
    address: str
    """The IP address that it came from."""

    at_unix_s: float
    role: Role | None = None
    """What the caller proved to be; None if nothing."""

    route: Route = UNLISTED
    action: Action | None = None
    """Which control it was."""

    untold: int = 0
    """How many like it were not told before it."""

    def __post_init__(self) -> None:
        # Types are hints, and a hint has never stopped a string.
        _require(self.what, What)
        _require(self.answer, Answer)
        _require(self.role, Role, optional=True)
        _require(self.action, Action, optional=True)
        if not any(self.route is row for row in (*ROUTES, UNLISTED)):
            raise UsageError("route must be a row of policy.ROUTES. Use route_of().")
        object.__setattr__(self, "address", _address(self.address))
        object.__setattr__(self, "at_unix_s", _number(self.at_unix_s))
        object.__setattr__(self, "untold", int(_number(self.untold)))

    def as_event(self) -> dict[str, str | float]:
        """Return the event as plain values, for a line of JSON."""
        event: dict[str, str | float] = {
            "what": self.what.value,
            "answer": self.answer.value,
            "address": self.address,
            "at_unix_s": self.at_unix_s,
            "role": self.role.value if self.role else "none",
            "route": self.route.name,
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
    # A zone ("fe80::1%eth0") is text of anybody's choosing.
    ip = ip_of(text.partition("%")[0]) if isinstance(text, str) else None
    if ip is None:
        raise UsageError("An audit's address must be an IP address.")
    return str(ip)


def _number(value: float) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError("An audit's times and counts must be finite numbers.")
    return float(value)
