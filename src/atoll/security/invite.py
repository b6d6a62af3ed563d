"""An invite: one paste that makes another machine an island of a run.

    atoll://HOST:PORT/RUN,pin=64 HEX DIGITS,code=32 HEX DIGITS

Rule 1: no character of it means anything to a shell, so it needs no quotes ('&' would
send the command to the background; only the brackets of an IPv6 address are special in
some shells).
Rule 2: it has one spelling, and any other is refused.
Rule 3: no message repeats the pasted text: it may hold a code, or be a token.
Rule 4: `pin` is left out where an authority vouches for the coordinator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from atoll.errors import UsageError
from atoll.security.addresses import Address, RunUrl, parse_address
from atoll.security.tls import parse_pin
from atoll.security.tokens import Secret

SCHEME = "atoll://"
MAX_INVITE_BYTES = 1024
MAX_RUN_BYTES = 128
CODE_DIGITS = 32

_CODE = re.compile(r"[0-9a-f]{32}", re.ASCII)
_INVITE = re.compile(
    r"atoll://(?P<address>[^/,]+)/(?P<run>[^/,]+)"
    r"(,pin=(?P<pin>[0-9a-f]{64}))?,code=(?P<code>[0-9a-f]{32})",
    re.ASCII,
)
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True, kw_only=True)
class Invite:
    """The address of a run, the pin of its coordinator, and a one-time code."""

    address: Address
    run: str
    """The run's name, so that another run at the same address is noticed."""

    pin: str | None
    """The coordinator's fingerprint; None where an authority vouches for it."""

    code: Secret

    def __post_init__(self) -> None:
        _check_run(self.run)
        if self.pin is not None:
            object.__setattr__(self, "pin", parse_pin(self.pin))
        if not _CODE.fullmatch(self.code.reveal()):
            raise UsageError(f"A code has {CODE_DIGITS} hexadecimal digits.")

    @property
    def url(self) -> RunUrl:
        """The URL that the run is known by; an invite is for TLS only."""
        return RunUrl("https", self.address)

    def reveal(self) -> str:
        """Return the text to paste. It is secret until its code is used."""
        pin = f",pin={self.pin.removeprefix('sha256:')}" if self.pin else ""
        run = quote(self.run, safe="")
        return f"{SCHEME}{self.address}/{run}{pin},code={self.code.reveal()}"


def is_invite(text: str) -> bool:
    """Return whether `text` starts like an invite, and not like a run's URL."""
    return text.strip().lower().startswith(SCHEME)


def parse_invite(text: str) -> Invite:
    """Return the invite that was pasted; blanks around it are fine.

    Raises:
        UsageError: it is not an invite, or not complete.
    """
    pasted = text.strip()
    if len(pasted) > MAX_INVITE_BYTES:
        raise _not_whole(f"it has more than {MAX_INVITE_BYTES} characters")
    if not pasted.startswith(SCHEME):
        raise _not_whole(f"it does not start with {SCHEME}")
    if re.search(r"[^\x21-\x7e]", pasted):
        raise _not_whole("there is a blank or a foreign character in it")
    match = _INVITE.fullmatch(pasted)
    if not match:
        raise _not_whole(_missing(pasted))
    return _checked(pasted, match)


def _checked(pasted: str, match: re.Match[str]) -> Invite:
    try:
        invite = Invite(
            address=parse_address(match["address"]),
            run=unquote(match["run"], errors="strict"),
            pin=match["pin"],
            code=Secret(match["code"]),
        )
    except (UsageError, UnicodeDecodeError):
        # Without its cause, which quotes the pasted text.
        raise _not_whole("its address or its run's name is malformed") from None
    if invite.reveal() != pasted:
        raise _not_whole("its address or its run's name is spelt another way")
    return invite


def _missing(pasted: str) -> str:
    parts = pasted.removeprefix(SCHEME).split(",")
    if "/" not in parts[0]:
        return "it names no host:port/run"
    if not parts[-1].startswith("code="):
        return "its code is missing at the end"
    if len(parts[-1]) != len("code=") + CODE_DIGITS:
        return f"its code has not {CODE_DIGITS} digits"
    return "it is not host:port/run, then its pin, then its code"


def _not_whole(reason: str) -> UsageError:
    return UsageError(
        f"That is no whole invite: {reason}. Copy it again as `atoll invite` printed "
        "it."
    )


def _check_run(run: str) -> None:
    try:
        size_bytes = len(run.encode())
    except UnicodeEncodeError:
        size_bytes = 0
    is_path = "/" in run or run in (".", "..")
    if is_path or _UNPRINTABLE.search(run) or not 0 < size_bytes <= MAX_RUN_BYTES:
        raise UsageError(
            f"{run[:MAX_RUN_BYTES]!r} names no run: a name has 1 to {MAX_RUN_BYTES} "
            "bytes of printable text, without '/'."
        )
