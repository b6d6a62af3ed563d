"""`atoll serve RUN.toml`: the coordinator of a run, until somebody stops it."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.asking import Asking
from atoll.cli.names import served
from atoll.cli.run_file import Assignments, settings_of
from atoll.errors import SettingsError, UsageError
from atoll.exchange.api import parse_info
from atoll.security import parse_run_url
from atoll.settings import RunSettings

if TYPE_CHECKING:  # loading certificates and numba takes its time
    from atoll.cli.serving import Serving
    from atoll.coordinator.app import Coordinator

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
    from atoll.cli.serving import serving
    from atoll.coordinator.app import ListenOptions

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
    from atoll.bundle import Bundle, defined_by
    from atoll.coordinator.directory import store_bundle

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


def _say(text: str) -> None:
    typer.echo(f"atoll: {text}", err=True)
