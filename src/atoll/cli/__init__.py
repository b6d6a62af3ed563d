"""Owns the command line. Does not know how anything is done: each verb calls down.

Start reading at `VERBS`, then the file of a verb.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from atoll import __version__
from atoll.errors import AtollError, UsageError, exit_code

__all__ = ["VERBS", "load_command", "main"]

PANELS = {
    "Start": {
        "demo": "Train a small language model on four islands.",
        "serve": "Serve a new run, or the run of a directory.",
        "plan": "Plan a run for a link: which settings keep devices busy.",
        "init": "Make a run in a store, without a coordinator.",
        "join": "Run a command as an island of a run.",
        "invite": "Print a command for another machine to join a run; for operators.",
    },
    "Launch": {
        "launch": "Start islands of a run on an engine, and follow the run to its end.",
        "ps": "List launched islands: their states, restarts and last metrics.",
        "logs": "Print the output of launched islands, restarts included.",
        "scale": "Scale a launch to N islands.",
        "cancel": "End launched islands; each leaves its run cleanly if it can.",
    },
    "Watch": {
        "ls": "List the runs that this user serves, has joined or has launched.",
        "dashboard": "Show a run in the browser, and control it there.",
        "status": "Print a run's progress, its islands, and why it waits.",
        "events": "Print the last 1,000 events of a run, or all since a time.",
        "telemetry": "Print a Grafana dashboard, alert rules, or a scrape config.",
        "report": "Write one page about a run: loss, who counted, and time.",
        "track": "Write the curves of a run into an experiment tracker.",
        "doctor": "Check the connection from this machine to a run, step by step.",
    },
    "Control": {
        "control": "Control a run: pause, resume, save, stop, drain, evict, set.",
        "move": "Move a run from its coordinator into a store, or back.",
        "certify": "Make a certificate for a machine of a run.",
    },
    "Weights and tools": {
        "export": "Write agreed weights into a safetensors file.",
        "inspect": "Print the header of a frame, and verify its body piece by piece.",
        "simulate": "Simulate islands and a coordinator in virtual time.",
    },
}
"""Every verb with its summary, by the panel of `atoll --help` that lists it.

The summary equals the first line of the verb's docstring, so that `atoll --help` need
not import the verbs.
"""

VERBS = {verb: text for panel in PANELS.values() for verb, text in panel.items()}

MODULES = dict.fromkeys(("ps", "logs", "scale", "cancel"), "launches")
"""Verbs that share a module; the module of any other verb has the verb's name."""

EXAMPLES = (
    "atoll demo --quick",
    "atoll serve run.toml",
    "atoll join https://HOST:PORT -- python train.py",
    "atoll launch --on slurm -n 8 run.toml -- train.py",
    "atoll status NAME --watch",
)


VERB_EXAMPLES = {
    "serve": (
        "atoll serve run.toml",
        "atoll serve run.toml --listen 0.0.0.0 --port 4711",
        "atoll serve --dir lagoon.atoll",
    ),
    "plan": (
        "atoll plan --params 1B --link 100Mbit --delay 40ms --step 1s",
        "atoll plan run.toml --params 1B --link 1Gbit --delay 20ms --step 1s",
        "atoll plan lagoon --link 100Mbit --delay 40ms",
    ),
    "init": ("atoll init s3://reef/lagoon run.toml",),
    "join": (
        "atoll join lagoon --island tokyo-1 -- train.py --lr 3e-4",
        "atoll join s3://reef/lagoon -- python -m trainer",
    ),
    "invite": ("atoll invite lagoon", "atoll invite lagoon --address HOST:4711"),
    "launch": (
        "atoll launch -n 4 run.toml -- train.py",
        "atoll launch --on slurm -n 8 --accelerators 8 run.toml -- train.py",
        "atoll launch --on kubernetes -n 4 --image IMAGE RUN -- train.py",
        "atoll launch --on ray -n 4 --dry-run run.toml -- train.py",
    ),
    "logs": ("atoll logs lagoon --follow", "atoll logs lagoon tokyo-1 --last 50"),
    "scale": ("atoll scale lagoon 8",),
    "cancel": ("atoll cancel lagoon", "atoll cancel lagoon local-2"),
    "dashboard": (
        "atoll dashboard lagoon",
        "atoll dashboard s3://reef/lagoon --read-only --no-open",
    ),
    "status": (
        "atoll status lagoon --watch",
        "atoll status lagoon --settings",
        "atoll status s3://reef/lagoon --json",
    ),
    "events": ("atoll events lagoon --since 2h", "atoll events lagoon --follow"),
    "telemetry": (
        "atoll telemetry grafana",
        "atoll telemetry scrape lagoon",
    ),
    "report": (
        "atoll report lagoon -o lagoon.html",
        "atoll report lagoon.atoll --csv tables --baseline curve.csv",
    ),
    "track": (
        "atoll track lagoon --to wandb:reef",
        "atoll track lagoon.atoll --to mlflow:reef --once",
    ),
    "control": (
        "atoll control lagoon pause",
        "atoll control lagoon set run.end_rounds=300 outer.lr=0.5",
        "atoll control lagoon evict tokyo-1",
    ),
    "move": ("atoll move lagoon s3://reef/lagoon",),
    "export": (
        "atoll export lagoon weights.safetensors",
        "atoll export lagoon before.safetensors --round 40",
    ),
    "simulate": (
        "atoll simulate --islands 8 --rounds 50 --seed 7",
        "atoll simulate run.toml --faults storm.toml --quiet",
    ),
}
"""Examples at the end of a verb's `--help`."""


class VerbGroup(TyperGroup):
    """The group of verbs. Imports the module of a verb when the verb is called.

    The help of the group and the shell's completion of a verb use the summaries.
    """

    def resolve_command(
        self, ctx: Any, args: list[str]
    ) -> tuple[str | None, Any, list[str]]:
        """Return the called verb, its command, and the arguments after the verb."""
        verb, command, rest = super().resolve_command(ctx, args)
        return verb, command if verb is None else load_command(verb), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs by panel, and examples below them."""
        for panel, verbs in PANELS.items():
            with formatter.section(panel):
                # Names of one width align the summaries of all panels.
                width = max(map(len, VERBS))
                formatter.write_dl([(v.ljust(width), verbs[v]) for v in verbs])
        with formatter.section("Examples"):
            formatter.write_dl([(example, "") for example in EXAMPLES])


app = typer.Typer(
    name="atoll",
    cls=VerbGroup,
    help="Train one model on machines that talk rarely.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    # A fixed width keeps `--help` the same text on every terminal.
    context_settings={"terminal_width": 80, "help_option_names": ["-h", "--help"]},
)
for _verb, _summary in VERBS.items():
    app.command(_verb, help=_summary)(lambda: None)


def load_command(verb: str) -> Any:
    """Import the module of a verb, and return the command with all its parameters."""
    module = import_module(f"atoll.cli.{MODULES.get(verb, verb)}")
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(verb, epilog=_epilog(verb))(getattr(module, verb))
    return typer.main.get_command(single)


def _epilog(verb: str) -> str | None:
    """Return the examples of a verb; the mark keeps their lines apart."""
    lines = VERB_EXAMPLES.get(verb)
    if lines is None:
        return None
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, else the code of whose fault it was.

    A command that writes to a closed pipe, as before `head`, exits with 1 silently.
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
        # At exit Python flushes the buffer, which would fail again and print that.
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
