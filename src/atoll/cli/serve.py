"""`atoll serve RUN.toml`: the coordinator of a run, until somebody stops it.

A coordinator as `atoll serve` runs it: found again by this user's commands.

What `atoll serve --init FILE` does before a run is served, and after a crash.
"""

from __future__ import annotations

import json
import logging
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.bundle import Bundle, defined_by
from atoll.cli.coordinator_client import Asking
from atoll.cli.run_file import Assignments, settings_of
from atoll.cli.run_names import Names, note_served, served
from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.coordinator.directory import open_service, store_bundle
from atoll.coordinator.initial_weights import (
    INIT_FILE,
    WeightsFile,
    discard,
    find_init_file,
    store_init_file,
)
from atoll.coordinator.move import JOURNAL
from atoll.coordinator.service import Service
from atoll.disk import SystemDisk
from atoll.errors import CorruptError, NoSuchFile, SettingsError, UsageError
from atoll.exchange.api import parse_info
from atoll.http.listener import raise_soft_limit
from atoll.island.environment import surroundings_from_environment
from atoll.security import Credentials, Role, parse_run_url, token_file
from atoll.security.private_files import private_directory
from atoll.settings import RunSettings

if TYPE_CHECKING:  # an extra
    from atoll.telemetry.tensorboard import TensorBoardWriter

OPERATOR = "operator"
"""Names the certificate of whoever serves the run."""

LOOK_S = 0.5
"""How soon an end is noticed."""

UntilEnd = Annotated[bool, typer.Option("--until-end", help="Exit when all is over.")]
Linger = Annotated[
    float,
    typer.Option(
        "--linger", metavar="SECONDS", min=0, help="Before it exits for that."
    ),
]


def serve(
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.toml",
            help="A run file; none for the run that DIR holds.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Keeps the run; ./NAME.atoll without."),
    ] = None,
    host: Annotated[
        str, typer.Option("--listen", metavar="HOST", help="0.0.0.0 is everywhere.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The last one, or any free one, without."),
    ] = None,
    assignments: Assignments = None,
    init: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="First weights, as safetensors."),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Defines the model: configuration, code, tokenizer."
        ),
    ] = None,
    no_tls: Annotated[
        bool, typer.Option("--no-tls", help="Plain HTTP, on this machine only.")
    ] = False,
    island_certificates: Annotated[
        Path | None,
        typer.Option(
            metavar="CA.pem", help="Let in only who has a certificate from this."
        ),
    ] = None,
    has_tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write curves into DIR/tensorboard.")
    ] = False,
    until_end: UntilEnd = False,
    linger_s: Linger = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, in one line.")
    ] = False,
) -> None:
    """Serve a run: a new one, or the one that the directory holds.

    Prints where it listens, its certificate's fingerprint, and where the tokens are,
    and remembers them for this user. A run that has ended is served on, for status
    and export; with --until-end the command exits when every island has gone too, and
    --linger lets whoever looks see that.

    Exits with 0 on SIGTERM and SIGINT, after a clean close.
    """
    logging.basicConfig(level=logging.WARNING, format="atoll: %(message)s")
    settings = _settings(run_file, assignments) if run_file else None
    place = _place(settings, directory, assignments)
    listening = ListenOptions(
        host=host,
        port=_port(place, port),
        has_tls=not no_tls,
        island_certificates=island_certificates,
    )
    settings = _with_bundle(place, settings, bundle)
    run = serving(
        place, settings, listening, init=init, has_tensorboard=has_tensorboard
    )
    with _stopping() as stop, run as it:
        _tell(it, settings, as_json=as_json)
        _wait(it.coordinator, stop, until_end=until_end, linger_s=linger_s)


def _settings(run_file: Path, assignments: Sequence[str] | None) -> RunSettings:
    settings = settings_of(run_file, assignments)
    if settings.store.decider is not None:
        raise SettingsError(
            f"store.decider={settings.store.decider!r} has no meaning with a "
            "coordinator, which decides itself. Remove it, or make the run in a store: "
            "`atoll init URL RUN.toml`."
        )
    return settings


def _with_bundle(
    place: Path, settings: RunSettings | None, directory: Path | None
) -> RunSettings | None:
    """Return settings that name the bundle, which is durable before its run is."""
    if directory is None:
        return settings
    if settings is None:
        raise UsageError(
            "--bundle defines the model of a run that begins, or is to have its bundle "
            "back: give its run file, too."
        )
    bundle = Bundle.of_directory(directory)
    settings = defined_by(bundle, settings)
    store_bundle(place, bundle)
    return settings


def _place(
    settings: RunSettings | None,
    directory: Path | None,
    assignments: Sequence[str] | None,
) -> Path:
    """Return the run's directory; without a run file it has to be given."""
    if settings is not None:
        return (directory or Path(f"{settings.run.name}.atoll")).absolute()
    if directory is None or assignments:
        raise UsageError(
            "Give a run file to begin a run, or --dir alone to serve the one that a "
            "directory holds."
        )
    return directory.absolute()


def _port(directory: Path, asked: int | None) -> int:
    """Return the port asked for, or that of last time: islands still call there."""
    if asked is not None:
        return asked
    last = served(directory)
    return parse_run_url(last.url).address.port if last else 0


def _tell(serving: Serving, settings: RunSettings | None, *, as_json: bool) -> None:
    """Say where the run is, what was wrong with its journal, and what differs."""
    serving.tell(as_json=as_json)
    for line in serving.coordinator.status()["damage"]:
        _say(f"Damage: {line}")
    if serving.is_within_reach and settings is not None:
        _tell_differences(serving, settings)


def _tell_differences(serving: Serving, settings: RunSettings) -> None:
    """Say which values of the run file are not in force: a run keeps its own."""
    with Asking.of(serving.url) as asking:
        in_force = parse_info(asking.call("GET", "/info").body).settings
    ours, theirs = _flat(settings), _flat(in_force)
    for key in sorted(ours.keys() | theirs.keys()):
        mine, its = ours.get(key), theirs.get(key)
        if mine != its and key != "run.bundle":  # a run file need not name it
            _say(
                f"{key}={_toml(its)} is in force, and the run file has {_toml(mine)}. "
                f"Change it with: atoll control {serving.coordinator.run} set "
                f"{key}={_toml(mine)}"
            )


def _flat(settings: RunSettings) -> dict[str, Any]:
    tables = settings.to_dict().items()
    return {f"{name}.{key}": each[key] for name, each in tables for key in each}


def _toml(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Give what is set by the first SIGTERM or SIGINT; a second one is the usual."""
    stop = threading.Event()
    usual = {number: signal.getsignal(number) for number in _SIGNALS}

    def note(number: int, frame: object) -> None:
        stop.set()
        for each, before in usual.items():
            signal.signal(each, before)

    for number in _SIGNALS:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, before in usual.items():
            signal.signal(number, before)


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _wait(
    coordinator: Coordinator,
    stop: threading.Event,
    *,
    until_end: bool,
    linger_s: float,
) -> None:
    while not stop.wait(LOOK_S):
        if until_end and _is_over(coordinator):
            stop.wait(linger_s)
            return


def _is_over(coordinator: Coordinator) -> bool:
    status = coordinator.status()
    is_anyone_here = any(each["state"] == "live" for each in status["islands"])
    return status["state"] == "ended" and not is_anyone_here


LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""How this machine reaches what listens on every interface."""


@dataclass(frozen=True)
class Serving:
    """A coordinator that listens, and the address by which this machine reaches it."""

    coordinator: Coordinator
    url: str
    is_within_reach: bool
    """Whether this user's commands can call it: they may have no certificate."""

    def tell(self, *, as_json: bool) -> None:
        """Print where the run is, and how others get there."""
        facts = self._facts()
        if as_json:
            typer.echo(json.dumps(facts))
            return
        tokens = facts.pop("tokens")
        name = shlex.quote(facts.pop("name"))
        facts.update({f"{role} token": path for role, path in tokens.items()})
        facts.update({"look": f"atoll status {name}"})
        if facts["pin"]:
            facts["invite"] = f"atoll invite {name}"
        for key, value in facts.items():
            typer.echo(f"{key:<14} {value or 'none: plain HTTP, on this machine only'}")

    def _facts(self) -> dict[str, Any]:
        directory = self.coordinator.directory
        return {
            "run": self.coordinator.run,
            "name": self.coordinator.status()["name"],
            "directory": str(directory),
            "url": self.url,
            "pin": self.coordinator.pin,
            "tokens": {role.value: str(token_file(directory, role)) for role in Role},
        }


@contextmanager
def serving(
    directory: Path,
    settings: RunSettings | None,
    listening: ListenOptions,
    *,
    init: Path | None,
    has_tensorboard: bool,
) -> Iterator[Serving]:
    """Serve a run while the block lasts."""
    raise_soft_limit()
    private_directory(directory)
    with ExitStack() as undo:
        curves = _curves(directory) if has_tensorboard else None
        if curves:
            undo.callback(curves.close)
        settle(directory, settings, init)
        coordinator = Coordinator(directory, settings, listening=listening)
        undo.callback(coordinator.close)
        if curves:
            coordinator.events.subscribe(curves, name="tensorboard")
        url = _local_url(coordinator.url)
        coordinator.start()
        own = _operator_certificate(directory, listening.island_certificates)
        _remember(coordinator, url, own)
        note_served(directory, url, is_open=True)
        undo.callback(note_served, directory, url, is_open=False)
        is_within_reach = own is not None or listening.island_certificates is None
        yield Serving(coordinator, url, is_within_reach)


def _local_url(url: str) -> str:
    said = parse_run_url(url)
    host = LOOPBACK.get(said.address.host, said.address.host)
    host = f"[{host}]" if ":" in host else host
    return str(parse_run_url(f"{said.scheme}://{host}:{said.address.port}"))


def _remember(coordinator: Coordinator, url: str, certificate: Path | None) -> None:
    """Let this user's commands find the run by its URL and by its names."""
    surroundings = surroundings_from_environment()
    tokens = {role: token_file(coordinator.directory, role) for role in Role}
    known = Credentials(surroundings.credentials)
    known.remember(url, pin=coordinator.pin, tokens=tokens, certificate=certificate)
    for name in (coordinator.run, coordinator.status()["name"]):
        Names(surroundings).remember(name, url)


def _operator_certificate(directory: Path, authority: Path | None) -> Path | None:
    """Return a certificate for the commands of whoever serves a run.

    None if no certificates are asked for, if others sign them, or if the authority's
    key is kept elsewhere and there is none yet.
    """
    from atoll.security.certificates import AUTHORITY, issue_island_certificate

    if authority is None or authority.absolute() != (directory / AUTHORITY).absolute():
        return None
    path = directory / f"{OPERATOR}.pem"
    if path.exists():
        return path
    try:
        now_s = time.time()
        return issue_island_certificate(
            directory, OPERATOR, into=directory, unix_s=now_s
        )
    except NoSuchFile:
        return None


def _curves(directory: Path) -> TensorBoardWriter:
    from atoll.telemetry.tensorboard import TensorBoardWriter

    return TensorBoardWriter(directory / "tensorboard")


def settle(directory: Path, settings: RunSettings | None, init: Path | None) -> None:
    """Found a run with a file that says its model's order; else let the file wait.

    Without `init` this is about a file that was given before, and waits still. A run
    that has weights keeps them.

    Raises:
        UsageError: the file cannot be read, or no run can be founded on it.
        CorruptError: it is no safetensors file.
    """
    root = directory / JOURNAL
    if init is not None:
        WeightsFile(init)  # judged before anything is made
    elif find_init_file(root) is None:
        return
    is_kept = init is None or _is_kept_for_new_run(root, init)
    disk, service = open_service(directory, settings, now_s=0.0)
    try:
        if service.state.model is not None:
            discard(root)
            _tell_unused(directory, init)
            return
        if init is not None and not is_kept:
            store_init_file(disk, init)
        _found_or_wait(service, root, called=str(init or INIT_FILE))
    finally:
        disk.close()


def _is_kept_for_new_run(root: Path, init: Path) -> bool:
    """Make the copy durable before there is a run: it is never without its file."""
    disk = SystemDisk(root)
    try:
        if disk.names("log/"):
            return False
        store_init_file(disk, init)
        return True
    finally:
        disk.close()


def _found_or_wait(service: Service, root: Path, *, called: str) -> None:
    path = find_init_file(root)
    assert path is not None
    try:
        file = WeightsFile(path, called=called)
        model = file.model()
        if model is None:
            _tell_waiting(called, path)
            return
        state = service.state
        states = file.states(model, state.settings, run=state.run)
        constants = file.constants(model, state.settings)
    except (UsageError, CorruptError):
        discard(root)  # it would be in the way of every start from now on
        raise
    for constant, parts in constants.items():
        service.journal.constants.store(constant, parts)
    service.journal.found(model, states)
    discard(root)


def _tell_unused(directory: Path, init: Path | None) -> None:
    if init is not None:
        _say(f"{directory} has its weights; {init} is not looked at.")


def _tell_waiting(called: str, path: Path) -> None:
    _say(
        f"The run waits for its first island, and is founded with {called} then. "
        f"A copy is kept as {path} until that; remove it to let the island bring its "
        "own weights."
    )


def _say(text: str) -> None:
    typer.echo(f"atoll: {text}", err=True)
