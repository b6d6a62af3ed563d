"""Orders of islands: a launch's id, the secrets that go with it, and their pass."""

from __future__ import annotations

import os
import re
import secrets

from atoll.island.environment import surroundings_from_environment
from atoll.island.reach import is_coordinator
from atoll.launch.base import Launcher, Order
from atoll.launch.book import Book
from atoll.launch.looking import look_at
from atoll.launch.passes import PASS, SEED_BYTES, Pass
from atoll.launch.references import resolve
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec
from atoll.security import Credentials, Role, Secret, read_token


def make_order(
    launcher: Launcher, n: int, spec: IslandSpec, *, first: int = 0
) -> Order:
    """Return an order, with the secrets that its islands need.

    Raises:
        UsageError: a secret is not where it is said to be.
        Unreachable, Refused: the run was asked for its id, for a pass.
    """
    values = resolve(spec.secrets, environment=os.environ)
    if launcher.traits.is_elsewhere:
        values[PASS] = make_pass(spec.run).to_secret()
    return Order(id=new_id(spec), spec=spec, num_islands=n, first=first, values=values)


def make_pass(run: str) -> Pass:
    """Return what lets islands in from where nothing is known of this user."""
    name = look_at(run).run if is_in_sight(run) else None
    seed = Secret(secrets.token_hex(SEED_BYTES))
    if not is_coordinator(run):
        return Pass(run=name, seed=seed)
    around = surroundings_from_environment()
    known = Credentials(around.credentials).find(run)
    token = known.token(Role.ISLAND) if known else None
    if token is None and around.token_file is not None:
        token = read_token(around.token_file, is_given=True)
    pin = known.pin if known else None
    return Pass(run=name, seed=seed, url=run, pin=pin, token=token)


def is_in_sight(run: str, book: Book | None = None) -> bool:
    """Return whether a run can be asked from here.

    It cannot if its coordinator was launched where only its islands reach it.
    """
    handles = [it.handle for it in (book or Book()).of_run(run) if it.is_coordinator]
    served = [open_launcher(it.engine, it.options).traits.serving for it in handles]
    return all(it is None or it.is_in_sight for it in served)


def new_id(spec: IslandSpec, *, is_plan: bool = False) -> str:
    """Return an id that engines take for a name; that of a plan is always the same."""
    stem = re.sub("[^a-z0-9]+", "-", spec.name.lower()).strip("-")[:36]
    return f"atoll-{stem}-{'0' * 8 if is_plan else secrets.token_hex(4)}"
