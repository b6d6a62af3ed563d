"""A webhook that is called when a bad finding of a run begins or ends.

The body is JSON that chat services show: `{"text", "run", "finding"}`. Calls are rare:
one in a minute, and twenty in an hour; a call that fails is not repeated, and the next
event tries again.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from atoll.errors import Unreachable, UsageError
from atoll.telemetry.events import Event
from atoll.telemetry.findings import Severity

MIN_PAUSE_S, HOUR_S, MAX_PER_HOUR = 60.0, 3600.0, 20
TIMEOUT_S = 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Post = Callable[[str, bytes], None]


class Webhook:
    """Calls a URL for events of findings, at a bounded rate.

    Args:
        url: HTTPS, or HTTP on this machine.
        run: The name of the run in the body.
        post: Sends a body to a URL.
        now_unix_s: The clock of the rate; events of the past are not posted.

    Raises:
        UsageError: the URL is neither.
    """

    def __init__(
        self,
        url: str,
        run: str,
        *,
        post: Post | None = None,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        parts = urlsplit(url)
        is_local = parts.scheme == "http" and parts.hostname in LOOPBACK
        if not parts.hostname or not (parts.scheme == "https" or is_local):
            raise UsageError(
                "A webhook needs an https:// URL, or http:// of this machine. Its URL "
                "is a secret: name a variable that holds it, webhook:env:NAME."
            )
        self._url, self._run = url, run
        self._post, self._now_unix_s = post or _post, now_unix_s
        self._bad: dict[tuple[str, str | None], str] = {}
        """Messages of bad findings that have begun, by kind and island."""

        self._calls_unix_s: deque[float] = deque(maxlen=MAX_PER_HOUR)
        self.skipped = 0
        """Findings that exceeded the rate."""

    def __call__(self, event: Event) -> None:
        """Post an event of a bad finding.

        Raises:
            Unreachable: the URL does not accept it. The next event tries again.
        """
        fields = event.fields
        finding = str(fields.get("kind")), _text(fields.get("island"))
        if event.name == "finding_began" and fields.get("severity") == Severity.BAD:
            message = str(fields.get("message"))
            self._bad[finding] = message
            text = f"{self._run}: {message} {fields.get('remedy') or ''}".strip()
        elif event.name == "finding_ended" and finding in self._bad:
            text = f"{self._run}: over: {self._bad.pop(finding)}"
        else:
            return
        now_unix_s = self._now_unix_s()
        if now_unix_s - event.at_unix_s > HOUR_S:
            return
        if not self._may_call(now_unix_s):
            self.skipped += 1
            return
        body = {"text": text, "run": self._run, "finding": finding[0]}
        self._post(self._url, json.dumps(body).encode())

    def _may_call(self, now_unix_s: float) -> bool:
        calls = self._calls_unix_s
        last = calls[-1] if calls else -math.inf
        is_full = len(calls) == MAX_PER_HOUR and now_unix_s - calls[0] < HOUR_S
        if is_full or now_unix_s - last < MIN_PAUSE_S:
            return False
        calls.append(now_unix_s)
        return True


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


class _NoRedirect(HTTPRedirectHandler):
    """A redirect would send the body to a URL that the user has not named."""

    def redirect_request(self, *args: object) -> None:
        return None


def _post(url: str, body: bytes) -> None:
    request = Request(url, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S):
            pass
    except (OSError, HTTPException) as exc:
        if isinstance(exc, HTTPError):
            exc.close()
        host = urlsplit(url).hostname
        raise Unreachable(
            f"The webhook at {host} does not accept findings: {exc}. Check its URL."
        ) from exc
