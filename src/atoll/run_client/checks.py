"""Checks of the connection from this machine to a run, step by step.

In a store every permission is checked separately, to name the one that is missing.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress

from atoll.errors import AtollError, CorruptError, Refused, Unreachable, UsageError
from atoll.exchange.api import PROTOCOL
from atoll.exchange.api.request_head import PROTOCOL_HEADER
from atoll.exchange.bucket.create import require_able, require_there
from atoll.island.connection import CONNECT_S
from atoll.run_client.base import Check
from atoll.run_client.coordinator import (
    CoordinatorClient,
    CoordinatorRunClient,
    credential_paths_for,
)
from atoll.run_client.store import StoreObserver, WholeReadStore
from atoll.security import Credentials, RunUrl, calling_context, secured
from atoll.store import ProbedStore, Store, open_store
from atoll.store.client import PROBES, TEXT
from atoll.telemetry.text import format_size

SKEW_S = 5.0
"""Beyond this, times in events and logs of two machines are hard to compare."""


def run_checks(checks: Sequence[tuple[str, Callable[[], str]]]) -> Iterator[Check]:
    """Yield the result of each check, up to the first that fails."""
    for name, check in checks:
        try:
            yield Check(name, check())
        except AtollError as exc:
            yield Check(name, str(exc), exc)
            return


ROUND_TRIPS = 5
UPLOAD_BYTES = 2**20
"""Large enough to fill a connection, small enough for a slow one."""


def round_trip(request: Callable[[], object]) -> tuple[float, str]:
    """Return the median time of a request, also as the detail of a check."""
    median_s = statistics.median(timed(request) for _ in range(ROUND_TRIPS))
    return median_s, f"{median_s * 1e3:.1f} ms, the median of {ROUND_TRIPS}"


def upload_speed(seconds: float) -> str:
    """Return the detail of a check that has sent `UPLOAD_BYTES`."""
    per_s = format_size(UPLOAD_BYTES / max(1e-4, seconds))
    return f"about {per_s}/s, by one of {format_size(UPLOAD_BYTES)}"


def timed(act: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s


class CoordinatorCheck:
    """Checks a coordinator; each check uses the results of the earlier ones."""

    def __init__(self, url: RunUrl) -> None:
        self.url = url
        self._pin: str | None = None
        self._round_trip_s = 0.0

    def checks(self) -> Iterator[Check]:
        """Yield the result of each check, up to the first that fails."""
        return run_checks(
            (
                ("credential", self._credential),
                ("address", self._address),
                ("tcp", self._tcp),
                ("tls", self._tls),
                ("health", self._health),
                ("token", self._token),
                ("clock", self._clock),
                ("round trip", self._round_trip),
                ("upload", self._upload),
            )
        )

    def _credential(self) -> str:
        paths = credential_paths_for(self.url)
        self._client().close()
        credential = Credentials(paths.credentials).find(str(self.url))
        self._pin = credential.pin if credential else None
        if paths.token_file is not None:
            return f"a token in {paths.token_file}, by ATOLL_TOKEN_FILE"
        return f"a token is known in {paths.credentials}"

    def _address(self) -> str:
        host, port = self.url.address.host, self.url.address.port
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as exc:
            raise Unreachable(
                f"{host} has no address here: {exc.strerror or exc}. Check its "
                "spelling and this machine's DNS, or use its IP address."
            ) from exc
        return ", ".join(dict.fromkeys(str(info[4][0]) for info in infos))

    def _tcp(self) -> str:
        with closing(self._socket()):
            return f"{self.url.address} accepts"

    def _socket(self) -> socket.socket:
        address = self.url.address
        try:
            return socket.create_connection(
                (address.host, address.port), timeout=CONNECT_S
            )
        except OSError as exc:
            raise Unreachable(
                f"{address} does not accept: {exc.strerror or exc}. Check that `atoll "
                "serve` runs there, listens beyond loopback (--listen), and that every "
                f"firewall lets TCP port {address.port} through."
            ) from exc

    def _tls(self) -> str:
        if not self.url.has_tls:
            return "none: plain HTTP, on this machine only"
        paths, pin = credential_paths_for(self.url), self._pin
        context = calling_context(
            pin, certificate=paths.certificate, key=paths.certificate_key
        )
        host = self.url.address.host
        with secured(self._socket(), context, host=host, pin=pin) as line:
            vouched = f"pinned {pin}" if pin else "vouched for"
            return f"{line.version()}, the certificate is {vouched}"

    def _health(self) -> str:
        with self._client() as client:
            if client.get("/health") != {"ok": True}:
                raise Refused(f"{self.url} is no coordinator of Atoll. Check the port.")
        return "a coordinator answers"

    def _token(self) -> str:
        with closing(CoordinatorRunClient(self.url)) as run:
            info = run.info()
        return f"run {info.run}, Atoll {info.version}, protocol {PROTOCOL}"

    def _clock(self) -> str:
        with self._client() as client:
            client.get("/health")  # so that the answer comes over an open line
            before = time.time()
            coordinator_s = float(client.get("/status")["now_unix_s"])
            skew_s = coordinator_s - (before + time.time()) / 2
        detail = f"the coordinator's is {abs(skew_s):.1f} s "
        detail += "ahead" if skew_s > 0 else "behind"
        if abs(skew_s) <= SKEW_S:
            return detail
        return f"{detail}; rounds are unaffected, but logs are hard to compare: use NTP"

    def _round_trip(self) -> str:
        with self._client() as client:
            client.get("/health")
            self._round_trip_s, text = round_trip(lambda: client.get("/health"))
        return text

    def _upload(self) -> str:
        """Time a join request that is no JSON object: it is read whole, and refused."""
        body = b'"' + b"x" * UPLOAD_BYTES + b'"'
        headers = {PROTOCOL_HEADER: str(PROTOCOL)}
        with self._client() as client:
            client.get("/health")

            def send() -> None:
                with suppress(Refused, UsageError):
                    client.call("POST", "/islands/doctor", headers=headers, body=body)

            seconds = timed(send)
        # The coordinator answers the head before the body is sent, and again after it.
        return upload_speed(seconds - 2 * self._round_trip_s)

    def _client(self) -> CoordinatorClient:
        return CoordinatorClient.of(self.url)


class StoreCheck:
    """Checks a store; each check uses the results of the earlier ones."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._key = f"{PROBES}{secrets.token_hex(16)}"
        self._has_put_new = True
        self._is_put = False

    def checks(self) -> Iterator[Check]:
        """Yield the result of each check, up to the first that fails."""
        for check in run_checks(
            (
                ("store", self._open),
                ("list", self._list),
                ("write", self._write),
                ("read", self._read),
                ("put once", self._put_once),
                ("ranges", self._ranges),
                ("delete", self._delete),
                ("run", self._run),
                ("clock", lambda: "not compared: nothing here depends on one"),
                ("round trip", self._round_trip),
                ("upload", self._upload),
            )
        ):
            if not check.is_ok and self._is_put:
                with suppress(AtollError):  # removing it may not be allowed
                    self._store.remove([self._key])
            yield check

    def _open(self) -> str:
        require_there(self._url)
        self._store: Store = open_store(self._url)
        return f"{self._url}, by {type(self._store).__name__}"

    def _list(self) -> str:
        self._store.items(PROBES)
        return "allowed"

    def _write(self) -> str:
        self._store.put_new(self._key, [TEXT])
        self._is_put = True
        return "allowed"

    def _read(self) -> str:
        if self._store.get(self._key) != TEXT:
            raise CorruptError(
                f"{self._url} gives other bytes than were put at {self._key}. Do not "
                "use it."
            )
        return "allowed, and the bytes are those that were put"

    def _put_once(self) -> str:
        was_replaced = self._store.put_new(self._key, [TEXT[::-1]])
        self._has_put_new = not was_replaced and self._store.get(self._key) == TEXT
        if self._has_put_new:
            return "the first object stays"
        return "a second object replaces the first: the run must name a store.decider"

    def _ranges(self) -> str:
        reader = WholeReadStore(self._store)
        reader.get(self._key, 2, 3)
        if reader.traits.has_ranges:
            return "a part can be read by itself"
        return "objects are read whole, which costs more bytes"

    def _delete(self) -> str:
        self._store.remove([self._key])
        return "allowed"

    def _run(self) -> str:
        with StoreObserver(self._url, store=self._store) as observer:
            reader = observer.reader
        if reader.view.moved_to is not None:
            return f"{reader.run} has moved to {reader.view.moved_to}"
        settings = reader.view.settings
        if not self._has_put_new:
            require_able(ProbedStore(self._store), settings, url=self._url)
        founded = "not founded yet"
        if reader.founded:
            closed = min(round.number for round in reader.view.state.rounds) - 1
            founded = f"founded, its rosters verified to round {closed}"
        return f"{reader.run}, fingerprint {settings.fingerprint[:12]}, {founded}"

    def _round_trip(self) -> str:
        return round_trip(lambda: self._store.items(PROBES))[1]

    def _upload(self) -> str:
        data = secrets.token_bytes(UPLOAD_BYTES)
        try:
            return upload_speed(timed(lambda: self._store.put(self._key, [data])))
        finally:
            self._store.remove([self._key])
