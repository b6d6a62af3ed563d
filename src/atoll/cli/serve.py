"""`atoll serve RUN.toml`: serve the coordinator of a run until a signal stops it.

`serve_run` remembers address and tokens for this user's commands; `apply_init_file`
handles `--init FILE`, also after a crash.
"""

from __future__ import annotations

import json
import logging
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.bundle import Bundle, defined_by
from atoll.cli.run_file import Assignments, settings_of
from atoll.cli.terminal import stop_signal
from atoll.coordinator import initial_weights
from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.coordinator.directory import open_service, store_bundle
from atoll.coordinator.move import JOURNAL
from atoll.coordinator.service import Service
from atoll.disk import SystemDisk
from atoll.errors import AtollError, CorruptError, NoSuchFile, SettingsError, UsageError
from atoll.http.listener import raise_soft_limit
from atoll.island.environment import credentials_from_environment
from atoll.run_client import open_run
from atoll.run_client.location import RunNames, read_address, write_address
from atoll.security import Credentials, Role, parse_run_url, token_file
from atoll.security.private_files import private_directory
from atoll.settings import RunSettings

if TYPE_CHECKING:  # an extra
    from atoll.telemetry.tensorboard import TensorBoardWriter

OPERATOR_CERTIFICATE = "operator"
"""Name of the certificate for the commands of the user that serves the run."""

POLL_S = 0.5
"""Between two checks whether the run has ended."""

Host = Annotated[
    str,
    typer.Option(
        "--listen", metavar="HOST", help="Address to listen on; 0.0.0.0 is all."
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port to listen on. Default: that of the last start, or a free one.",
    ),
]
UntilEnd = Annotated[
    bool,
    typer.Option("--until-end", help="Exit once the run ended and all islands left."),
]
Linger = Annotated[
    float,
    typer.Option(
        "--linger",
        metavar="SECONDS",
        min=0,
        help="With --until-end, keep serving this long after the end.",
    ),
]


def serve(
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.toml",
            help="Run file of a new run. Default: serve the run in --dir.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory of the run. Default: ./NAME.atoll."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    assignments: Assignments = None,
    init: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="First weights, a safetensors file."),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Definition of the model: configuration, code, tokenizer.",
        ),
    ] = None,
    no_tls: Annotated[
        bool, typer.Option("--no-tls", help="Use plain HTTP, on this machine only.")
    ] = False,
    island_certificates: Annotated[
        Path | None,
        typer.Option(
            metavar="CA.pem", help="Require client certificates of this authority."
        ),
    ] = None,
    has_tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write curves to DIR/tensorboard.")
    ] = False,
    until_end: UntilEnd = False,
    linger_s: Linger = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, on one line.")
    ] = False,
) -> None:
    """Serve a new run, or the run of a directory.

    Prints its address, the fingerprint of its certificate and the paths of its tokens,
    and remembers them for this user. A run that has ended is still served, for status
    and export; with --until-end the command exits once every island has left, after
    --linger seconds in which others can see the end, and writes report.html into the
    run's directory.

    Exits with 0 on SIGTERM and SIGINT, after a clean close.
    """
    logging.basicConfig(level=logging.WARNING, format="atoll: %(message)s")
    settings = _settings(run_file, assignments) if run_file else None
    path = _run_directory(settings, directory, assignments)
    listen_options = ListenOptions(
        host=host,
        port=_port(path, port),
        has_tls=not no_tls,
        island_certificates=island_certificates,
    )
    settings = _with_bundle(path, settings, bundle)
    run = serve_run(
        path, settings, listen_options, init=init, has_tensorboard=has_tensorboard
    )
    with stop_signal() as stop, run as served:
        _print_start(served, settings, as_json=as_json)
        _wait(served.coordinator, stop, until_end=until_end, linger_s=linger_s)
        has_ended = until_end and _is_over(served.coordinator)
    if has_ended:
        _write_report(path)


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
    path: Path, settings: RunSettings | None, directory: Path | None
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
    store_bundle(path, bundle)
    return settings


def _run_directory(
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


def _port(directory: Path, requested: int | None) -> int:
    """Return the requested port, or the last one: islands still call that."""
    if requested is not None:
        return requested
    last = read_address(directory)
    return parse_run_url(last.url).address.port if last else 0


def _print_start(
    served: ServedRun, settings: RunSettings | None, *, as_json: bool
) -> None:
    """Print the run's address, damage of its journal, and settings that differ."""
    served.print_facts(as_json=as_json)
    for line in served.coordinator.status()["damage"]:
        _print_note(f"Damage: {line}")
    if served.is_within_reach and settings is not None:
        _print_differences(served, settings)


def _print_differences(served: ServedRun, settings: RunSettings) -> None:
    """Print which values of the run file are not in force: a run keeps its own."""
    with closing(open_run(served.url)) as client:
        in_force = client.settings()
    wanted, current = _flat(settings), _flat(in_force)
    for key in sorted(wanted.keys() | current.keys()):
        # A run file need not name the bundle of its run.
        if wanted.get(key) != current.get(key) and key != "run.bundle":
            value = _toml(wanted.get(key))
            _print_note(
                f"{key}={_toml(current.get(key))} is in force, and the run file has "
                f"{value}. Change it with: atoll control {served.coordinator.run} set "
                f"{key}={value}"
            )


def _flat(settings: RunSettings) -> dict[str, Any]:
    tables = settings.to_dict().items()
    return {f"{name}.{key}": values[key] for name, values in tables for key in values}


def _toml(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _write_report(directory: Path) -> None:
    """Write the report of a run that has ended into its directory."""
    from atoll.cli.report import report_of_directory

    try:
        file = report_of_directory(directory)
    except AtollError as exc:  # the run has ended well without it
        _print_note(f"No report was written: {exc}")
    else:
        _print_note(f"The report of the run is {file}")


def _wait(
    coordinator: Coordinator,
    stop: threading.Event,
    *,
    until_end: bool,
    linger_s: float,
) -> None:
    while not stop.wait(POLL_S):
        if until_end and _is_over(coordinator):
            stop.wait(linger_s)
            return


def _is_over(coordinator: Coordinator) -> bool:
    status = coordinator.status()
    has_live_island = any(island["state"] == "live" for island in status["islands"])
    return status["state"] == "ended" and not has_live_island


LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The address by which this machine reaches a server on all interfaces."""


@dataclass(frozen=True)
class ServedRun:
    """A coordinator that listens, and its address on this machine."""

    coordinator: Coordinator
    url: str
    is_within_reach: bool
    """Whether this user's commands can connect: they may lack a certificate."""

    def print_facts(self, *, as_json: bool) -> None:
        """Print the run's address, and the commands to watch it and to invite."""
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
def serve_run(
    directory: Path,
    settings: RunSettings | None,
    listen_options: ListenOptions,
    *,
    init: Path | None,
    has_tensorboard: bool,
) -> Iterator[ServedRun]:
    """Serve a run for the duration of the block."""
    raise_soft_limit()
    private_directory(directory)
    with ExitStack() as cleanup:
        curves = _curves(directory) if has_tensorboard else None
        if curves:
            cleanup.callback(curves.close)
        apply_init_file(directory, settings, init)
        coordinator = Coordinator(directory, settings, listening=listen_options)
        cleanup.callback(coordinator.close)
        if curves:
            coordinator.events.subscribe(curves, name="tensorboard")
        url = _local_url(coordinator.url)
        coordinator.start()
        certificate = _operator_certificate(
            directory, listen_options.island_certificates
        )
        _remember(coordinator, url, certificate)
        write_address(directory, url, is_open=True)
        cleanup.callback(write_address, directory, url, is_open=False)
        is_within_reach = (
            certificate is not None or listen_options.island_certificates is None
        )
        yield ServedRun(coordinator, url, is_within_reach)


def _local_url(url: str) -> str:
    parsed = parse_run_url(url)
    host = LOOPBACK.get(parsed.address.host, parsed.address.host)
    host = f"[{host}]" if ":" in host else host
    return str(parse_run_url(f"{parsed.scheme}://{host}:{parsed.address.port}"))


def _remember(coordinator: Coordinator, url: str, certificate: Path | None) -> None:
    """Let this user's commands find the run by its URL and by its names."""
    paths = credentials_from_environment()
    tokens = {role: token_file(coordinator.directory, role) for role in Role}
    credentials = Credentials(paths.credentials)
    credentials.remember(
        url, pin=coordinator.pin, tokens=tokens, certificate=certificate
    )
    for name in (coordinator.run, coordinator.status()["name"]):
        RunNames(paths).remember(name, url)


def _operator_certificate(directory: Path, authority: Path | None) -> Path | None:
    """Return a certificate for the commands of the user that serves the run.

    None if the run requires no certificates, if another authority signs them, or if the
    authority's key is elsewhere and no certificate exists yet.
    """
    from atoll.security.certificates import AUTHORITY, issue_island_certificate

    if authority is None or authority.absolute() != (directory / AUTHORITY).absolute():
        return None
    path = directory / f"{OPERATOR_CERTIFICATE}.pem"
    if path.exists():
        return path
    try:
        now_s = time.time()
        return issue_island_certificate(
            directory, OPERATOR_CERTIFICATE, into=directory, unix_s=now_s
        )
    except NoSuchFile:
        return None


def _curves(directory: Path) -> TensorBoardWriter:
    from atoll.telemetry.tensorboard import TensorBoardWriter

    return TensorBoardWriter(directory / "tensorboard")


def apply_init_file(
    directory: Path, settings: RunSettings | None, init: Path | None
) -> None:
    """Found the run with its `--init` file, or keep the file for the first island.

    The file founds a run if it has the order of the model's tensors. Without `init`
    this handles the file of an earlier start. A run that has weights keeps them.

    Raises:
        UsageError: the file cannot be read, or does not fit the run.
        CorruptError: it is no safetensors file.
    """
    root = directory / JOURNAL
    if init is not None:
        initial_weights.WeightsFile(init)  # raises before anything is written
    elif initial_weights.find_init_file(root) is None:
        return
    is_kept = init is None or _is_kept_for_new_run(root, init)
    disk, service = open_service(directory, settings, now_s=0.0)
    try:
        if service.state.model is not None:
            initial_weights.discard(root)
            _note_unused(directory, init)
            return
        if init is not None and not is_kept:
            initial_weights.store_init_file(disk, init)
        _found_or_wait(service, root, called=str(init or initial_weights.INIT_FILE))
    finally:
        disk.close()


def _is_kept_for_new_run(root: Path, init: Path) -> bool:
    """Store a copy before the run is created, so that a crash cannot lose it."""
    disk = SystemDisk(root)
    try:
        if disk.names("log/"):
            return False
        initial_weights.store_init_file(disk, init)
        return True
    finally:
        disk.close()


def _found_or_wait(service: Service, root: Path, *, called: str) -> None:
    path = initial_weights.find_init_file(root)
    assert path is not None
    try:
        file = initial_weights.WeightsFile(path, called=called)
        model = file.model()
        if model is None:
            _note_waiting(called, path)
            return
        state = service.state
        states = file.states(model, state.settings, run=state.run)
        constants = file.constants(model, state.settings)
    except (UsageError, CorruptError):
        initial_weights.discard(root)  # or every later start would fail
        raise
    for constant, parts in constants.items():
        service.journal.constants.store(constant, parts)
    service.journal.found(model, states)
    initial_weights.discard(root)


def _note_unused(directory: Path, init: Path | None) -> None:
    if init is not None:
        _print_note(f"{directory} has its weights; {init} is not used.")


def _note_waiting(called: str, path: Path) -> None:
    _print_note(
        f"The run waits for its first island, and is then founded with {called}. "
        f"A copy is kept as {path} until then; remove it to let the island bring its "
        "own weights."
    )


def _print_note(text: str) -> None:
    typer.echo(f"atoll: {text}", err=True)
