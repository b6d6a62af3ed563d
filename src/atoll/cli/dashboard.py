"""`atoll dashboard RUN`: show a run in the browser."""

from __future__ import annotations

import contextlib
import getpass
import html
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.run_names import RUN, open_named
from atoll.cli.terminal import stop_signal
from atoll.dashboard import DashboardServer, RunFeed, Sessions
from atoll.errors import AtollError
from atoll.island.environment import credentials_from_environment
from atoll.run_client import RunClient
from atoll.run_client.coordinator import CoordinatorClient, CoordinatorRunClient
from atoll.run_client.directory import DirectoryRunClient
from atoll.runtime import SystemClock
from atoll.security import Role, Secret
from atoll.security.private_files import (
    private_directory,
    remove_private,
    replace_private,
)

PORT = 4780
REDIRECT_S = 60.0
"""A browser has read the file of the link by then."""

LINES_S = 0.5


def dashboard(
    run: Annotated[str, RUN],
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)
    ] = PORT,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the link only.")
    ] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Offer no controls.")
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Pause between two looks at the run.", min=1.0
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name of this server behind a proxy; repeatable."
        ),
    ] = None,
) -> None:
    """Show a run in the browser, and control it there.

    Serves one page on this machine's loopback interface, until Ctrl-C. The run may be
    at a coordinator, in a store, or ended: then give its directory. A link opens one
    browser, once, within ten minutes; Enter prints another one.
    """
    # One after the other: a directory is locked by the client that reads it.
    with closing(open_named(run)) as client:
        may_control = not read_only and is_operator(client)
    feed, sessions = RunFeed(partial(open_named, run), poll_s=every), Sessions()
    with closing(feed):
        feed.start()
        server = DashboardServer(
            feed, sessions, port=port, may_control=may_control, names=host or ()
        )
        with closing(server), stop_signal() as stop:
            server.start()
            _print_head(feed, server, may_control=may_control)
            _serve(server, sessions, stop, is_opening=not no_open)


def is_operator(client: RunClient) -> bool:
    """Return whether this user may control the run of a client."""
    if isinstance(client, DirectoryRunClient):
        return False
    if isinstance(client, CoordinatorRunClient):
        try:
            CoordinatorClient.of(client.url, role=Role.OPERATOR).close()
        except AtollError:
            return False
    return True  # users with write access to a store are operators


def _print_head(feed: RunFeed, server: DashboardServer, *, may_control: bool) -> None:
    status = feed.status
    last = "" if status["last_round"] is None else f" of {status['last_round']}"
    state = f"{status['state']}, round {status['round']}{last}"
    typer.echo(f"run   {status['run']}, {state}")
    typer.echo(f"may   {'look and control' if may_control else 'look'}")
    if os.environ.get("SSH_CONNECTION"):
        target = f"{getpass.getuser()}@{socket.gethostname()}"
        typer.echo(f"ssh   ssh -L {server.port}:127.0.0.1:{server.port} {target}")


def _serve(
    server: DashboardServer,
    sessions: Sessions,
    stop: threading.Event,
    *,
    is_opening: bool,
) -> None:
    """Print links until the signal: one now, and one for each Enter."""
    clock = SystemClock()
    code = sessions.make_code(now_s=clock.now_s())
    typer.echo(f"page  {link(server, code)}")
    typer.echo("      Good once, for 10 minutes; Enter prints another. Ctrl-C ends.")
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        if is_opening and _has_display():
            opened = sessions.make_code(now_s=clock.now_s())
            stack.enter_context(redirect_file(link(server, opened)))
        for _ in _lines(stop):
            code = sessions.make_code(now_s=clock.now_s())
            typer.echo(f"page  {link(server, code)}")


def link(server: DashboardServer, code: Secret) -> str:
    """Return the link of a code; a browser sends no part of it after `#`."""
    return f"{server.url}#c={code.reveal()}"


def _has_display() -> bool:
    if os.environ.get("SSH_CONNECTION"):
        return False
    has_window = any(os.environ.get(key) for key in ("DISPLAY", "WAYLAND_DISPLAY"))
    return sys.platform == "darwin" or has_window


@contextmanager
def redirect_file(url: str) -> Iterator[Path]:
    """Open a browser by a private file, so that no list of processes shows the link.

    The file is removed after a minute, and at the end.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parent = Path(runtime) if runtime else credentials_from_environment().credentials
    directory = private_directory(
        parent / "atoll" if runtime else parent.parent / "dashboard"
    )
    path = directory / f"dashboard-{os.getpid()}.html"
    shown = html.escape(url, quote=True)
    refresh = f'<meta http-equiv="refresh" content="0;url={shown}">'
    replace_private(path, f"<!doctype html>{refresh}<title>Atoll</title>".encode())
    timer = threading.Timer(REDIRECT_S, remove_private, [path])
    timer.daemon = True
    timer.start()
    try:
        webbrowser.open(path.as_uri())
        yield path
    finally:
        timer.cancel()
        remove_private(path)


def _lines(stop: threading.Event) -> Iterator[None]:
    """Yield for each line of standard input, until `stop` is set."""
    entered = threading.Semaphore(0)

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            for _ in sys.stdin:
                entered.release()

    if sys.stdin is not None and sys.stdin.isatty():
        threading.Thread(target=read, name="atoll-enter", daemon=True).start()
    while not stop.is_set():
        if entered.acquire(timeout=LINES_S):
            yield
