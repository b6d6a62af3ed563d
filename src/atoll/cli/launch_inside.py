"""A run file that is served where its islands are, and no file of this user's is.

The coordinator is given a charter, which is made here: so its islands' pass is known
although nobody here may reach it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from atoll.cli.launch_coordinator import facts_of
from atoll.cli.launch_run import (
    LINGER_S,
    UNSEEN_LINGER_S,
    RunAt,
    Serve,
    require_going,
    served_settings,
    set_words,
    until_end,
)
from atoll.cli.names import Names
from atoll.errors import UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.launch.api import Launched, end_after
from atoll.launch.base import Plan
from atoll.launch.credentials import Charter, make_charter
from atoll.launch.launches import Book, Record
from atoll.launch.spec import IslandSpec
from atoll.security import Credentials

LISTEN_HERE = "127.0.0.1"
"""What `--listen` is without."""

STARTS_S = 900.0
"""How long one may take that an engine calls running: images are fetched, and pip may
have much to install."""

LOOK_S = 1.0


def plan_inside(run_file: Path, n: int, serve: Serve) -> Plan:
    """Return what would be submitted for the coordinator.

    Raises:
        SettingsError: the file is wrong, or is for a store.
        UsageError: the engine cannot serve it so.
    """
    assert serve.inside is not None
    return serve.inside.plan(_spec(run_file, n, serve))


def run_inside(run: str, n: int, serve: Serve) -> RunAt:
    """Return where the run of a file is, which is served from now on.

    Raises:
        RemoteError: its coordinator did not start.
        Unreachable: it runs where this machine should reach it, and does not.
    """
    assert serve.inside is not None
    run_file, book = Path(run), Book()
    spec = _spec(run_file, n, serve)
    charter = make_charter(spec.run, run_file.read_text())
    launched = serve.inside.launch(spec, charter, book)
    try:
        facts = facts_of(launched, starts_s=STARTS_S, look_s=LOOK_S)
        is_in_sight = serve.inside.serving.is_in_sight
        url = str(facts["url"]) if is_in_sight else launched.handle.run
        handle = replace(launched.handle, run=url)
        book.keep(Record(handle, spec))
        _remember(url, charter, (str(facts["run"]), str(facts["name"])))
        if is_in_sight:
            require_going(url)
        return RunAt(url, Launched(handle, launched.launcher), is_in_sight)
    except BaseException as exc:
        end_after(exc, launched)
        raise


def _spec(run_file: Path, n: int, serve: Serve) -> IslandSpec:
    assert serve.inside is not None
    if serve.host != LISTEN_HERE:
        raise UsageError(
            f"--listen {serve.host} is for a run that is served here, and on "
            f"{serve.engine} a coordinator has its place's own address. Leave it out."
        )
    if serve.directory is not None and not serve.directory.is_absolute():
        raise UsageError(
            f"--dir {serve.directory} is where the coordinator of {serve.engine} runs, "
            "where nothing is beside it. Give its path from '/' on."
        )
    settings = served_settings(run_file, serve.assignments)
    linger_s = LINGER_S if serve.inside.serving.is_in_sight else UNSEEN_LINGER_S
    return serve.inside.spec(
        settings.run.name,
        [*until_end(linger_s), *set_words(run_file, n, serve.assignments)],
        directory=None if serve.directory is None else str(serve.directory),
        image=serve.image,
        requirements=serve.requirements,
    )


def _remember(url: str, charter: Charter, names: tuple[str, ...]) -> None:
    """Let this user's commands find the run, and reach it from where that can be."""
    around = surroundings_from_environment()
    known = Credentials(around.credentials)
    known.remember(url, pin=charter.pin, tokens=charter.tokens)
    for name in names:
        Names(around).remember(name, url)
