"""`atoll doctor RUN`: what stands between this machine and a run, step by step.

What stands between this machine and a run in a store, step by step.

Every permission is asked for by itself, so that the one that is missing is named.
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
from atoll.cli.coordinator_client import Asking, surroundings_for
from atoll.cli.run_names import RUN, StoreUrl, place_of, url_of
from atoll.cli.store_run import WholeReads
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
from atoll.exchange.api.routes import PROTOCOL_HEADER
from atoll.exchange.bucket import BucketReader, ThreadTiming
from atoll.exchange.bucket.create import require_able, require_there
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import States
from atoll.island.connection import CONNECT_S, call_to
from atoll.security import Credentials, Role, RunUrl, calling_context, secured
from atoll.security.private_files import private_directory
from atoll.store import ProbedStore, Store, open_store
from atoll.store.client import PROBES, TEXT
from atoll.telemetry.text import format_size as shown_size

SKEW_S = 5.0
"""Beyond this, times in events and logs of two machines are hard to compare."""

ROUND_TRIPS = 5
UPLOAD_BYTES = 2**20
"""Enough to fill a line for a moment, little enough for a slow one."""


@dataclass(frozen=True)
class Step:
    """What one look has shown."""

    name: str
    said: str
    error: AtollError | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None


@dataclass
class Examination:
    """Looks at a run, each look on what the last one found."""

    run: str
    url: RunUrl = field(init=False)
    pin: str | None = field(init=False, default=None)
    round_trip_s: float = field(init=False, default=0.0)

    def steps(self) -> Iterator[Step]:
        """Yield what each look shows, and end with the first that fails."""
        looks: tuple[tuple[str, Callable[[], str]], ...] = (
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
        for name, look in looks:
            try:
                yield Step(name, look())
            except AtollError as exc:
                yield Step(name, str(exc), exc)
                return

    def _name(self) -> str:
        self.url = url_of(self.run)
        return f"{self.run} is {self.url}" if self.run != str(self.url) else self.run

    def _credential(self) -> str:
        surroundings = surroundings_for(self.url)
        caller, _ = call_to(self.url, surroundings, role=Role.ISLAND)
        caller.close()
        known = Credentials(surroundings.credentials).find(str(self.url))
        self.pin = known.pin if known else None
        if surroundings.token_file is not None:
            return f"a token in {surroundings.token_file}, by ATOLL_TOKEN_FILE"
        return f"a token is known in {surroundings.credentials}"

    def _address(self) -> str:
        host, port = self.url.address.host, self.url.address.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as exc:
            raise Unreachable(
                f"{host} has no address here: {exc.strerror or exc}. Check its "
                "spelling and this machine's DNS, or use its IP address."
            ) from exc
        return ", ".join(dict.fromkeys(str(each[4][0]) for each in found))

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
        surroundings = surroundings_for(self.url)
        context = calling_context(
            self.pin,
            certificate=surroundings.certificate,
            key=surroundings.certificate_key,
        )
        host = self.url.address.host
        with secured(self._socket(), context, host=host, pin=self.pin) as line:
            vouched = f"pinned {self.pin}" if self.pin else "vouched for"
            return f"{line.version()}, the certificate is {vouched}"

    def _health(self) -> str:
        with self._asking() as asking:
            if asking.get("/health") != {"ok": True}:
                raise Refused(f"{self.url} is no coordinator of Atoll. Check the port.")
        return "a coordinator answers"

    def _token(self) -> str:
        with self._asking() as asking:
            info = parse_info(asking.call("GET", "/info").body)
        return f"run {info.run}, Atoll {info.version}, protocol {PROTOCOL}"

    def _clock(self) -> str:
        with self._asking() as asking:
            asking.get("/health")  # so that the answer comes over an open line
            before = time.time()
            theirs = float(asking.get("/status")["now_unix_s"])
            skew_s = theirs - (before + time.time()) / 2
        said = f"the coordinator's is {abs(skew_s):.1f} s "
        said += "ahead" if skew_s > 0 else "behind"
        if abs(skew_s) <= SKEW_S:
            return said
        return f"{said}; rounds do not mind, but people who compare logs will: use NTP"

    def _round_trip(self) -> str:
        with self._asking() as asking:
            asking.get("/health")
            times = [_timed(lambda: asking.get("/health")) for _ in range(ROUND_TRIPS)]
        self.round_trip_s = statistics.median(times)
        return f"{self.round_trip_s * 1e3:.1f} ms, the median of {ROUND_TRIPS}"

    def _upload(self) -> str:
        """Time a join request that is no table: it is read whole, and refused."""
        caller, headers = call_to(
            self.url, surroundings_for(self.url), role=Role.ISLAND
        )
        said = {**headers, PROTOCOL_HEADER: str(PROTOCOL)}
        with closing(caller):
            caller.call("GET", "/health", headers=headers)
            seconds = _timed(
                lambda: caller.call(
                    "POST",
                    "/islands/doctor",
                    headers={**said, "Content-Type": "application/json"},
                    body=b'"' + b"x" * UPLOAD_BYTES + b'"',
                )
            )
        # The head is answered before the body goes, and the body after it came.
        per_s = UPLOAD_BYTES / max(1e-4, seconds - 2 * self.round_trip_s)
        return f"about {shown_size(per_s)}/s, by one of {shown_size(UPLOAD_BYTES)}"

    def _asking(self) -> Asking:
        return Asking.of(self.url)


def doctor(
    run: Annotated[str | None, RUN] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="A directory that is to keep a run, served here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the connection from this machine to a run, step by step.

    Exits with 0 when every step is well, and otherwise with the code of the first
    that failed, which says what to do.
    """
    if run is None and directory is None:
        raise UsageError("Name a run, or give a directory with --dir.")
    steps = []
    for step in _all_steps(run, directory):
        steps.append(step)
        if not as_json:
            _show(step)
    if as_json:
        rows = [{"step": s.name, "ok": s.is_ok, "said": s.said} for s in steps]
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
        yield from _steps(run)


def _directory_steps(directory: Path) -> Iterator[Step]:
    """Yield what a directory is good for that is to keep a run."""
    looks: tuple[tuple[str, Callable[[Path], str]], ...] = (
        ("directory", _own),
        ("file system", _able),
        ("free space", _free),
    )
    for name, look in looks:
        try:
            yield Step(name, look(directory))
        except AtollError as exc:
            yield Step(name, str(exc), exc)
            return


def _own(directory: Path) -> str:
    private_directory(directory)
    return f"{directory} is this user's alone"


def _able(directory: Path) -> str:
    found = disk.require_able(directory)
    said = "locks, syncs and renames"
    if not found.has_tmpfile:
        said += "; it has no O_TMPFILE, so updates have a name for a moment"
    if not found.has_links:
        said += "; it has no hard links, so private files are made under a lock"
    return said


def _free(directory: Path) -> str:
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if free < RECORDS_BYTES:
        raise DiskFull(
            f"{free} bytes are free in {directory}, and {RECORDS_BYTES} are kept for "
            "the journal of even the smallest run. Free some space there."
        )
    return f"{shown_size(free)}, of which a run keeps a reserve for its journal"


def _steps(run: str) -> Iterator[Step]:
    """Yield the steps to a coordinator, or to a store."""
    place = _store_of(run)
    if place is None:
        yield from Examination(run).steps()
        return

    for name, said, error in StoreExamination(place.url).looks():
        yield Step(name, said, error)


def _store_of(run: str) -> StoreUrl | None:
    try:
        place = place_of(run)
    except AtollError:
        return None  # its first step says what is wrong with the name
    return place if isinstance(place, StoreUrl) else None


def _show(step: Step) -> None:
    colour = typer.colors.GREEN if step.is_ok else typer.colors.RED
    verdict = painted("ok    " if step.is_ok else "failed", fg=colour)
    typer.echo(f"{verdict}  {step.name:<11} {step.said}")


Looked = tuple[str, str, AtollError | None]
"""The name of a step, what it has shown, and what went wrong."""


class StoreExamination:
    """Looks at a store, each look on what the last one found."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._key = f"{PROBES}{secrets.token_hex(16)}"
        self._has_put_new = True
        self._is_put = False

    def looks(self) -> Iterator[Looked]:
        """Yield what each look shows, and end with the first that fails."""
        steps: tuple[tuple[str, Callable[[], str]], ...] = (
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
        for name, look in steps:
            try:
                yield name, look(), None
            except AtollError as exc:
                self._clean_up()
                yield name, str(exc), exc
                return

    def _clean_up(self) -> None:
        """Leave nothing behind, as far as that is allowed."""
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
            return "what was put first stays"
        return "a second object replaces the first: the run must name a store.decider"

    def _ranges(self) -> str:
        reader = WholeReads(self._store)
        reader.get(self._key, 2, 3)
        if reader.traits.has_ranges:
            return "a part can be read by itself"
        return "objects are read whole, which costs more bytes"

    def _delete(self) -> str:
        self._store.remove([self._key])
        return "allowed"

    def _run(self) -> str:
        timing = ThreadTiming()
        try:
            reader = BucketReader.open(WholeReads(self._store), timing, url=self._url)
            reader.members.read()
            reader.read_controls()
            states = States(reader, Outcomes(reader, None))
            for fragment in range(len(reader.view.layout)):
                states.begin(fragment)
        finally:
            timing.close()
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
