"""Owns the command line. Does not know how anything is done: each verb calls down.

Start reading at `VERBS`, then the file of a verb.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from atoll import __version__
from atoll.cli.cancel import cancel
from atoll.cli.certify import certify
from atoll.cli.control import control
from atoll.cli.demo import demo
from atoll.cli.doctor import doctor
from atoll.cli.events import events
from atoll.cli.export import export
from atoll.cli.init import init
from atoll.cli.inspect import inspect
from atoll.cli.invite import invite
from atoll.cli.join import join
from atoll.cli.launch import launch
from atoll.cli.logs import logs
from atoll.cli.move import move
from atoll.cli.ps import ps
from atoll.cli.scale import scale
from atoll.cli.serve import serve
from atoll.cli.simulate import simulate
from atoll.cli.status import status
from atoll.errors import AtollError, UsageError, exit_code

__all__ = ["VERBS", "app", "main"]

VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "serve": serve,
    "init": init,
    "invite": invite,
    "certify": certify,
    "join": join,
    "launch": launch,
    "ps": ps,
    "logs": logs,
    "cancel": cancel,
    "scale": scale,
    "status": status,
    "control": control,
    "move": move,
    "events": events,
    "export": export,
    "doctor": doctor,
    "inspect": inspect,
    "simulate": simulate,
}

app = typer.Typer(
    name="atoll",
    help="Train one model on machines that talk rarely.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    # A fixed width keeps `--help` the same text on every terminal.
    context_settings={"terminal_width": 80, "help_option_names": ["-h", "--help"]},
)
for _name, _verb in VERBS.items():
    app.command(_name)(_verb)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, else the code of whose fault it was.

    Whoever is read by `head` and no further ends with 1, and without a word.
    """
    try:
        try:
            app(arguments, prog_name="atoll")
        except AtollError as exc:
            cause = exc.__cause__
            # A usage error by the output; by a network, it would be a remote one.
            if isinstance(exc, UsageError) and isinstance(cause, BrokenPipeError):
                raise cause from None
            typer.echo(f"atoll: {exc}", err=True)
            sys.exit(exit_code(exc))
    except BrokenPipeError:
        # What is left in the buffer would be written, and complain, at the very end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"atoll {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass
