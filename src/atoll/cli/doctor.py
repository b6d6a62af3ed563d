"""`atoll doctor RUN`: check the connection from this machine to a run, step by step.

In a store every permission is checked separately, to name the one that is missing.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from atoll import disk
from atoll.cli.coordinator_client import CoordinatorClient, credential_paths_for
from atoll.cli.run_names import RUN, StoreUrl, coordinator_url, locate_run
from atoll.cli.store_run import WholeReadStore
from atoll.cli.terminal import painted
from atoll.disk.space import RECORDS_BYTES
from atoll.errors import (
    AtollError,
    CorruptError,
    DiskFull,
    Refused,
    Unreachable,
    UsageError,
    exit_code,
)
from atoll.exchange.api import PROTOCOL, parse_info
from atoll.exchange.api.request_head import PROTOCOL_HEADER
from atoll.exchange.bucket import BucketReader
from atoll.exchange.bucket.create import require_able, require_there
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import States
from atoll.island.connection import CONNECT_S, call_to
from atoll.runtime import SystemRuntime
from atoll.security import Credentials, Role, RunUrl, calling_context, secured
from atoll.security.private_files import private_directory
from atoll.store import ProbedStore, Store, open_store
from atoll.store.client import PROBES, TEXT
from atoll.telemetry.text import format_size as shown_size

SKEW_S = 5.0
"""Beyond this, times in events and logs of two machines are hard to compare."""

ROUND_TRIPS = 5
UPLOAD_BYTES = 2**20
"""Large enough to fill a connection, small enough for a slow one."""


@dataclass(frozen=True)
class Step:
    """The result of one check."""

    name: str
    detail: str
    error: AtollError | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None


@dataclass
class CoordinatorCheck:
    """Checks a coordinator; each check uses the results of the earlier ones."""

    run: str
    url: RunUrl = field(init=False)
    pin: str | None = field(init=False, default=None)
    round_trip_s: float = field(init=False, default=0.0)

    def steps(self) -> Iterator[Step]:
        """Yield the result of each check, up to the first that fails."""
        checks: tuple[tuple[str, Callable[[], str]], ...] = (
            ("name", self._name),
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
        for name, check in checks:
            try:
                yield Step(name, check())
            except AtollError as exc:
                yield Step(name, str(exc), exc)
                return

    def _name(self) -> str:
        self.url = coordinator_url(self.run)
        return f"{self.run} is {self.url}" if self.run != str(self.url) else self.run

    def _credential(self) -> str:
        paths = credential_paths_for(self.url)
        http_client, _ = call_to(self.url, paths, role=Role.ISLAND)
        http_client.close()
        credential = Credentials(paths.credentials).find(str(self.url))
        self.pin = credential.pin if credential else None
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
        paths = credential_paths_for(self.url)
        context = calling_context(
            self.pin,
            certificate=paths.certificate,
            key=paths.certificate_key,
        )
        host = self.url.address.host
        with secured(self._socket(), context, host=host, pin=self.pin) as line:
            vouched = f"pinned {self.pin}" if self.pin else "vouched for"
            return f"{line.version()}, the certificate is {vouched}"

    def _health(self) -> str:
        with self._client() as client:
            if client.get("/health") != {"ok": True}:
                raise Refused(f"{self.url} is no coordinator of Atoll. Check the port.")
        return "a coordinator answers"

    def _token(self) -> str:
        with self._client() as client:
            info = parse_info(client.call("GET", "/info").body)
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
            times = [_timed(lambda: client.get("/health")) for _ in range(ROUND_TRIPS)]
        self.round_trip_s = statistics.median(times)
        return f"{self.round_trip_s * 1e3:.1f} ms, the median of {ROUND_TRIPS}"

    def _upload(self) -> str:
        """Time a join request that is no JSON object: it is read whole, and refused."""
        http_client, headers = call_to(
            self.url, credential_paths_for(self.url), role=Role.ISLAND
        )
        request_headers = {**headers, PROTOCOL_HEADER: str(PROTOCOL)}
        with closing(http_client):
            http_client.call("GET", "/health", headers=headers)
            seconds = _timed(
                lambda: http_client.call(
                    "POST",
                    "/islands/doctor",
                    headers={**request_headers, "Content-Type": "application/json"},
                    body=b'"' + b"x" * UPLOAD_BYTES + b'"',
                )
            )
        # The coordinator answers the head before the body is sent, and again after it.
        per_s = UPLOAD_BYTES / max(1e-4, seconds - 2 * self.round_trip_s)
        return f"about {shown_size(per_s)}/s, by one of {shown_size(UPLOAD_BYTES)}"

    def _client(self) -> CoordinatorClient:
        return CoordinatorClient.of(self.url)


def doctor(
    run: Annotated[str | None, RUN] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory on this machine for a run to serve."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the connection from this machine to a run, step by step.

    Exits with 0 when every step is well, and otherwise with the code of the first
    that failed, whose text has the remedy.
    """
    if run is None and directory is None:
        raise UsageError("Name a run, or give a directory with --dir.")
    steps = []
    for step in _all_steps(run, directory):
        steps.append(step)
        if not as_json:
            _print_step(step)
    if as_json:
        rows = [{"step": s.name, "ok": s.is_ok, "said": s.detail} for s in steps]
        typer.echo(json.dumps(rows, indent=2))
    if steps[-1].error is not None:
        raise typer.Exit(exit_code(steps[-1].error))


def _all_steps(run: str | None, directory: Path | None) -> Iterator[Step]:
    """Yield the steps up to the first that failed."""
    for step in _directory_steps(directory) if directory else ():
        yield step
        if not step.is_ok:
            return
    if run is not None:
        yield from _run_steps(run)


def _directory_steps(directory: Path) -> Iterator[Step]:
    """Yield the results of checking a directory for a run."""
    checks: tuple[tuple[str, Callable[[Path], str]], ...] = (
        ("directory", _check_private),
        ("file system", _check_file_system),
        ("free space", _check_free_space),
    )
    for name, check in checks:
        try:
            yield Step(name, check(directory))
        except AtollError as exc:
            yield Step(name, str(exc), exc)
            return


def _check_private(directory: Path) -> str:
    private_directory(directory)
    return f"{directory} is this user's alone"


def _check_file_system(directory: Path) -> str:
    traits = disk.require_able(directory)
    detail = "locks, syncs and renames"
    if not traits.has_tmpfile:
        detail += "; it has no O_TMPFILE, so updates have a name for a moment"
    if not traits.has_links:
        detail += "; it has no hard links, so private files are made under a lock"
    return detail


def _check_free_space(directory: Path) -> str:
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free < RECORDS_BYTES:
        raise DiskFull(
            f"{free} bytes are free in {directory}, and {RECORDS_BYTES} are kept for "
            "the journal of even the smallest run. Free some space there."
        )
    return f"{shown_size(free)}, of which a run keeps a reserve for its journal"


def _run_steps(run: str) -> Iterator[Step]:
    """Yield the steps to a coordinator, or to a store."""
    location = _store_of(run)
    if location is None:
        yield from CoordinatorCheck(run).steps()
        return

    yield from StoreCheck(location.url).steps()


def _store_of(run: str) -> StoreUrl | None:
    try:
        location = locate_run(run)
    except AtollError:
        return None  # the first check reports the error in the name
    return location if isinstance(location, StoreUrl) else None


def _print_step(step: Step) -> None:
    colour = typer.colors.GREEN if step.is_ok else typer.colors.RED
    verdict = painted("ok    " if step.is_ok else "failed", fg=colour)
    typer.echo(f"{verdict}  {step.name:<11} {step.detail}")


class StoreCheck:
    """Checks a store; each check uses the results of the earlier ones."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._key = f"{PROBES}{secrets.token_hex(16)}"
        self._has_put_new = True
        self._is_put = False

    def steps(self) -> Iterator[Step]:
        """Yield the result of each check, up to the first that fails."""
        checks: tuple[tuple[str, Callable[[], str]], ...] = (
            ("store", self._open),
            ("list", self._list),
            ("write", self._write),
            ("read", self._read),
            ("put once", self._put_once),
            ("ranges", self._ranges),
            ("delete", self._delete),
            ("run", self._run),
            ("clock", self._clock),
            ("round trip", self._round_trip),
            ("upload", self._upload),
        )
        for name, check in checks:
            try:
                yield Step(name, check())
            except AtollError as exc:
                self._clean_up()
                yield Step(name, str(exc), exc)
                return

    def _clean_up(self) -> None:
        """Remove the probe object, if that is allowed."""
        if self._is_put:
            with suppress(AtollError):
                self._store.remove([self._key])

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
        runtime = SystemRuntime()
        try:
            reader = BucketReader.open(
                WholeReadStore(self._store), runtime, url=self._url
            )
            reader.members.read()
            reader.read_controls()
            states = States(reader, Outcomes(reader, None))
            for fragment in range(len(reader.view.layout)):
                states.begin(fragment)
        finally:
            runtime.close()
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

    def _clock(self) -> str:
        return "not compared: nothing here depends on one"

    def _round_trip(self) -> str:
        times = [_timed(lambda: self._store.items(PROBES)) for _ in range(ROUND_TRIPS)]
        return f"{statistics.median(times) * 1e3:.1f} ms, the median of {ROUND_TRIPS}"

    def _upload(self) -> str:
        data = secrets.token_bytes(UPLOAD_BYTES)
        try:
            seconds = _timed(lambda: self._store.put(self._key, [data]))
        finally:
            self._store.remove([self._key])
        per_s = shown_size(UPLOAD_BYTES / max(1e-4, seconds))
        return f"about {per_s}/s, by one of {shown_size(UPLOAD_BYTES)}"


def _timed(act: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s
