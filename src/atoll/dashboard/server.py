"""The server of the page: one port of this machine, for the person who looks.

Rule 1: every request passes `_refusal` first: the host it names is ours, and no other
        site has caused it. So a foreign page cannot use it, nor a name that resolves
        to this machine.
Rule 2: there is no cookie. The secret of a session travels in a header, which only our
        page sends; only the page itself and the exchange of a code for a session need
        none.
Rule 3: an answer never holds a credential of the run.
Rule 4: files are read at the start, from a fixed list: no path of a request reaches
        the disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final

from atoll.dashboard.feed import RunFeed
from atoll.dashboard.sessions import Sessions, WrongCode
from atoll.errors import (
    AtollError,
    CorruptError,
    Refused,
    SettingsError,
    StoreDenied,
    Unreachable,
    UsageError,
)
from atoll.http import (
    DeferredResponse,
    Listener,
    ListenerLimits,
    Problem,
    Request,
    Response,
    as_json,
    as_problem,
)
from atoll.run_client import Action, Command
from atoll.runtime import Clock, SystemClock
from atoll.security import MustWait
from atoll.settings import parse_assignment

PAGE: Final = resources.files("atoll.dashboard") / "page"

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

SCHEME: Final = "atoll-session "
MAX_BODY_BYTES: Final = 16 * 1024
MAX_VALUE_CHARACTERS: Final = 200
MAX_VALUES: Final = 32
PAGE_EVENTS: Final = 200
LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "[::1]")
LIMITS: Final = ListenerLimits(max_connections=256)

Handler = Callable[[Request], Response | DeferredResponse]


class DashboardServer:
    """Serves the page and its data. Close it.

    Args:
        feed: The run; the caller starts and closes it.
        sessions: Decides who may look.
        port: Port to listen on, on this machine only; 0: any free one.
        may_control: Whether those who may look may also control the run.
        names: Names of this server behind a proxy.
    """

    def __init__(
        self,
        feed: RunFeed,
        sessions: Sessions,
        *,
        port: int,
        may_control: bool,
        names: Iterable[str] = (),
        clock: Clock | None = None,
    ) -> None:
        self._feed, self._sessions = feed, sessions
        self._may_control = may_control
        self._clock = clock or SystemClock()
        self._listener = Listener(
            self._handle,
            host="127.0.0.1",
            port=port,
            clock=self._clock,
            limits=LIMITS,
            judge=self._judge,
        )
        self.port = self._listener.address[1]
        loopback_hosts = [f"{name}:{self.port}" for name in LOOPBACK_NAMES]
        self._hosts = frozenset({*loopback_hosts, *(name.lower() for name in names)})
        self._origins = frozenset(
            f"{scheme}://{host}" for scheme in ("http", "https") for host in self._hosts
        )
        self._routes: Mapping[tuple[str, str], Handler] = {
            ("DELETE", "/api/session"): self._close_session,
            ("GET", "/api/first"): self._first,
            ("GET", "/api/feed"): self._changes,
            ("GET", "/api/events"): self._events,
            ("POST", "/api/check"): self._check,
            ("POST", "/api/control"): self._control,
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Serve from now on."""
        self._listener.start()

    def close(self) -> None:
        """Stop serving. Safe to repeat."""
        self._listener.close(grace_s=1.0)

    def _judge(self, request: Request) -> Response | None:
        """Return the refusal of a request before its body is read, or None."""
        try:
            self._require_ours(request)
            if request.body.length_bytes > MAX_BODY_BYTES:
                message = f"A body may have {MAX_BODY_BYTES} bytes."
                raise Problem(413, "length", message)
            if request.path.startswith("/api/") and not self._is_code(request):
                self._require_session(request)
        except Problem as problem:
            return secured(as_problem(problem))
        return None

    def _require_ours(self, request: Request) -> None:
        headers = request.headers
        if headers.get("host", "").lower() not in self._hosts:
            raise Problem(
                421,
                "host",
                f"This server is not {headers.get('host', '')[:80]!r}. Behind a proxy "
                "start it with --host NAME.",
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in self._origins:
            raise Problem(403, "origin", "Another site may not use this server.")
        if headers.get("sec-fetch-site", "none") in ("same-origin", "none"):
            return
        # A link may lead here from anywhere: the page holds nothing of the run.
        is_link = (
            request.method == "GET"
            and not request.path.startswith("/api/")
            and headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        if not is_link:
            raise Problem(403, "site", "Another site may not use this server.")

    def _is_code(self, request: Request) -> bool:
        return (request.method, request.path) == ("POST", "/api/session")

    def _require_session(self, request: Request) -> None:
        if not self._sessions.is_open(_session_of(request), now_s=self._clock.now_s()):
            raise Problem(
                401,
                "session",
                "This page has no session, or it is over. Press Enter where `atoll "
                "dashboard` runs: it prints a new link.",
            )

    def _handle(self, request: Request) -> Response | DeferredResponse:
        refusal = self._judge(request)
        if refusal is not None:
            return refusal
        try:
            answer = self._answer(request)
        except Problem as problem:
            answer = as_problem(problem)
        except AtollError as exc:
            answer = as_problem(problem_of(exc))
        if isinstance(answer, DeferredResponse):
            return answer
        return secured(answer, is_stored=not request.path.startswith("/api/"))

    def _answer(self, request: Request) -> Response | DeferredResponse:
        key = (request.method, request.path)
        if self._is_code(request):
            return self._open_session(request)
        if key in self._routes:
            return self._routes[key](request)
        if request.path.startswith("/api/"):
            raise Problem(404, "route", f"There is no {request.method} {request.path}.")
        if request.method != "GET":
            raise Problem(405, "method", "Only GET.", headers={"allow": "GET"})
        return _asset(request)

    def _open_session(self, request: Request) -> Response:
        code = body_of(request).get("code")
        if not isinstance(code, str):
            raise Problem(400, "code", "The body must be an object with a code.")
        try:
            session = self._sessions.open(
                code, address=request.address[0], now_s=self._clock.now_s()
            )
        except WrongCode as exc:
            raise Problem(403, "code", str(exc)) from exc
        except MustWait as exc:
            message = f"Ten wrong links in a minute. Wait {exc.wait_s:.0f} s."
            raise Problem(429, "wait", message) from exc
        return as_json({"session": session.reveal()})

    def _close_session(self, request: Request) -> Response:
        self._sessions.close(_session_of(request))
        return as_json({})

    def _first(self, request: Request) -> Response:
        may = ["look", "control"] if self._may_control else ["look"]
        return as_json({**self._feed.first(), "may": may})

    def _changes(self, request: Request) -> Response | DeferredResponse:
        number = whole(request.query.get("after", "0"), "after")
        return self._feed.after(number, respond=lambda news: secured(as_json(news)))

    def _events(self, request: Request) -> Response:
        page = self._feed.older_events(
            request.query.get("before", ""), limit=PAGE_EVENTS
        )
        events = [event.as_dict() for event in page.events]
        return as_json({"events": events, "before": page.before})

    def _check(self, request: Request) -> Response:
        return as_json({"values": self._feed.check(values_in(body_of(request)))})

    def _control(self, request: Request) -> Response:
        if not self._may_control:
            raise Problem(
                403,
                "role",
                "This dashboard only looks: it was started with --read-only, or "
                "without the token of an operator.",
            )
        body = body_of(request)
        if body.get("run") != self._feed.status.get("run"):
            raise Problem(
                409,
                "run",
                f"The page is of another run than {self._feed.status.get('run')}. "
                "Reload it.",
            )
        epoch = body.get("if_epoch")
        if epoch is not None and (
            isinstance(epoch, bool) or not isinstance(epoch, int)
        ):
            raise Problem(400, "if_epoch", "if_epoch must be a whole number.")
        reply = self._feed.control(command_in(body), if_epoch=epoch)
        return as_json({"message": reply.message, "state": reply.status.state})


def secured(response: Response, *, is_stored: bool = False) -> Response:
    """Return a response with the headers that bind a browser."""
    cache_control = "no-cache" if is_stored else "no-store"
    headers = {**response.headers, **HEADERS, "cache-control": cache_control}
    return replace(response, headers=headers)


def problem_of(exc: AtollError) -> Problem:
    """Return the problem that reports an error to a page."""
    match exc:
        case SettingsError():
            return Problem(400, "settings", str(exc))
        case UsageError():
            return Problem(400, "usage", str(exc))
        case StoreDenied():
            return Problem(403, "denied", str(exc))
        case Refused():
            return Problem(409, "refused", str(exc))
        case Unreachable():
            return Problem(502, "unreachable", str(exc))
        case CorruptError():
            return Problem(502, "corrupt", str(exc))
    return Problem(502, "run", str(exc))


def body_of(request: Request) -> Mapping[str, Any]:
    """Return the JSON object in a body.

    Raises:
        Problem: it is none, or too large.
    """
    if request.headers.get("content-type", "").split(";")[0] != "application/json":
        raise Problem(415, "type", "The body must be application/json.")
    data = request.body.read(MAX_BODY_BYTES)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Problem(400, "body", "The body must be a JSON object.")
    return body


def values_in(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a body: texts by dotted keys, as on a command line.

    Raises:
        Problem: they have another form.
        SettingsError: a value is malformed.
    """
    values = body.get("values")
    if (
        not isinstance(values, dict)
        or not 0 < len(values) <= MAX_VALUES
        or not all(map(_is_short_text, values.values()))
    ):
        raise Problem(
            400,
            "values",
            f"values must be an object of 1 to {MAX_VALUES} texts of at most "
            f"{MAX_VALUE_CHARACTERS} characters.",
        )
    return dict(parse_assignment(f"{key}={value}") for key, value in values.items())


def _is_short_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_VALUE_CHARACTERS


def command_in(body: Mapping[str, Any]) -> Command:
    """Return the command in a body.

    Raises:
        Problem: there is none.
        SettingsError: a value to set is malformed.
    """
    try:
        action = Action(str(body.get("action")))
    except ValueError as exc:
        actions = ", ".join(action.value for action in Action)
        raise Problem(400, "action", f"action must be one of {actions}.") from exc
    if action is Action.SET:
        return Command(action, values=values_in(body))
    if action is not Action.EVICT:
        return Command(action)
    island = body.get("island")
    if not _is_short_text(island) or not island:
        raise Problem(400, "island", "evict needs the name of an island.")
    return Command(action, island=str(island))


def whole(text: str, key: str) -> int:
    """Return the whole number in a query.

    Raises:
        Problem: it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise Problem(400, key, f"{key}={text[:40]!r} must be a whole number.")
    return int(text)


def _session_of(request: Request) -> str:
    header = request.headers.get("authorization", "")
    is_session = header.lower().startswith(SCHEME)
    return header[len(SCHEME) :].strip() if is_session else ""


@cache
def assets() -> Mapping[str, tuple[str, bytes, str]]:
    """Return type, content and ETag of each file of the page, by its path."""
    by_path = {}
    for path, file in _files(PAGE, ""):
        suffix = f".{path.rpartition('.')[2]}"
        if suffix in TYPES:
            data = file.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            by_path[path] = (TYPES[suffix], data, etag)
    return by_path


def _files(directory: Traversable, prefix: str) -> Iterable[tuple[str, Traversable]]:
    for entry in directory.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry


def _asset(request: Request) -> Response:
    """Return a file of the page; any path below `/run` is the page itself."""
    path = request.path
    is_page = path == "/" or request.segments[:1] == ("run",)
    name = "index.html" if is_page else path.removeprefix("/page/")
    is_listed = is_page or path.startswith("/page/")
    if not is_listed or name not in assets():
        raise Problem(404, "route", f"There is no {path[:80]}.")
    content_type, data, etag = assets()[name]
    if request.headers.get("if-none-match") == etag:
        return Response(status=304, headers={"etag": etag})
    return Response(headers={"content-type": content_type, "etag": etag}, body=data)
