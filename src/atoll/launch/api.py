"""Launches islands, and follows them: the Python interface behind `atoll launch`.

From a spec to an order (a launch's id, its secrets, and the islands' pass), from an
order to a submission, from a submission to reports, and from reports to lines for
people. A coordinator can be launched the same way, on the engine of its islands.

An engine that does not respond is asked again for a bounded time.
Rule 1: a silence is reported once, and is over with the next response.
Rule 2: only `Unreachable` is retried: a refusal or a wrong request is raised at once.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.clock import Clock, SystemClock
from atoll.errors import AtollError, RemoteError, Unreachable, UsageError
from atoll.island.connection import is_coordinator
from atoll.island.environment import surroundings_from_environment
from atoll.launch.base import (
    GRACE_S,
    Handle,
    Launcher,
    Order,
    Plan,
    Report,
    Serving,
    State,
)
from atoll.launch.code import pack_code, ship_code
from atoll.launch.credentials import CHARTER, PASS, RUN_FILE, SEED_BYTES, Charter, Pass
from atoll.launch.launches import COORDINATOR, Book, Record
from atoll.launch.registry import open_launcher
from atoll.launch.run_status import Looks, look_at
from atoll.launch.spec import IslandSpec, in_engine, resolve
from atoll.security import Credentials, Role, Secret, read_token

SILENT_S = 600.0
"""How long an engine may not answer before it is given up to follow its islands."""


class Patience:
    """With one engine, about one thing that it is asked again and again."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._silent_since_s: float | None = None

    def answered(self) -> None:
        """Take note of an answer."""
        self._silent_since_s = None

    def bear(self, error: Unreachable) -> list[str]:
        """Return the line that is said of a silence: none if it was said before.

        Raises:
            Unreachable: it has lasted so long that nobody can tell what runs.
        """
        now_s = self._clock.now_s()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
            return [f"atoll: {error} It is asked again."]
        if now_s - self._silent_since_s > SILENT_S:
            raise error
        return []


LAST_LINES = 12
MAX_NAMES = 8
BAD = (State.FAILED, State.LOST)


def failures(
    reports: Sequence[Report], last_lines: Callable[[Report], Sequence[str]]
) -> Iterator[str]:
    """Yield which islands failed, by cause, with the last words of each.

    Islands that ended with the same words are told once.
    """
    by_cause: dict[tuple[State, str], list[Report]] = defaultdict(list)
    for each in reports:
        if each.state in BAD:
            by_cause[each.state, each.reason].append(each)
    for (state, why), those in by_cause.items():
        yield f"{_counted(those)} {state.value}: {why or 'nobody says why'}"
        told: dict[tuple[str, ...], str] = {}
        for each in those:
            said = tuple(last_lines(each)[-LAST_LINES:])
            if said in told:
                yield f"  {each.name}: as {told[said]}"
                continue
            told[said] = each.name
            yield f"  {each.name} said{':' if said else ' nothing'}"
            yield from (f"    {line}" for line in said)


def rows(
    reports: Sequence[Report], metrics: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, ...]]:
    """Return a table of islands, its head first: the same width in every row."""
    head = ("island", "state", "restarts", "round", "loss", "tokens", "place", "why")
    return [head, *(_row(each, metrics.get(each.name, {})) for each in reports)]


def _row(report: Report, said: Mapping[str, Any]) -> tuple[str, ...]:
    loss = said.get("loss")
    return (
        report.name,
        report.state.value,
        str(report.restarts),
        _or_dash(said.get("round")),
        "-" if loss is None else f"{loss:.4g}",
        _or_dash(said.get("tokens")),
        report.host or "-",
        report.reason or "-",
    )


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _counted(those: Sequence[Report]) -> str:
    names = ", ".join(each.name for each in those[:MAX_NAMES])
    more = f" and {len(those) - MAX_NAMES} more" if len(those) > MAX_NAMES else ""
    return f"{names}{more}"


LOOK_S = 0.5

log = logging.getLogger("atoll")


@dataclass(frozen=True)
class Result:
    """What became of one island."""

    report: Report
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The last that it told its run: loss, round, tokens and bytes."""

    last_lines: Sequence[str] = ()


class Launched:
    """Islands that were launched, here or elsewhere, now or before."""

    def __init__(self, handle: Handle, launcher: Launcher | None = None) -> None:
        self.handle = handle
        self._launcher = launcher or open_launcher(handle.engine, handle.options)

    @property
    def launcher(self) -> Launcher:
        return self._launcher

    def poll(self) -> tuple[Report, ...]:
        """Return what the engine says of every island now."""
        return self._launcher.poll(self.handle)

    def wait(self, timeout_s: float | None = None) -> tuple[Result, ...]:
        """Return what became of the islands, once all of them are over.

        An engine that does not answer is asked again for some minutes.

        Raises:
            TimeoutError: some are not, after so long. They go on.
            Unreachable: the engine has not answered for too long.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        looks, patience = Looks(self.handle.run), Patience()
        left = [self.handle.island(index) for index in self.handle.indexes]
        while True:
            # Metrics are asked for while islands run: a coordinator ends with them.
            looks.look()
            try:
                reports = self.poll()
                left = [each.name for each in reports if not each.state.is_over]
                if not left:
                    look = looks.look(at_once=True)
                    return self.results(reports, look.islands if look else {})
                patience.answered()
            except Unreachable as exc:
                for line in patience.bear(exc):
                    log.warning("%s", line)
            if until_s is not None and time.monotonic() > until_s:
                raise TimeoutError(
                    f"{', '.join(left[:8])} run on after {timeout_s:g} s. Wait longer, "
                    "or cancel."
                )
            time.sleep(LOOK_S)

    def results(
        self, reports: Sequence[Report], metrics: Mapping[str, Any]
    ) -> tuple[Result, ...]:
        """Return what is known of islands, with the last lines of their logs."""
        return tuple(
            Result(
                each,
                metrics.get(each.name, {}),
                self._launcher.logs(self.handle, each.index)[-LAST_LINES:],
            )
            for each in reports
        )

    def logs(self) -> dict[str, list[str]]:
        """Return what each island has said, by its name."""
        return {
            self.handle.island(index): self._launcher.logs(self.handle, index)
            for index in self.handle.indexes
        }

    def cancel(
        self, indexes: Collection[int] | None = None, *, grace_s: float = GRACE_S
    ) -> None:
        """Tell islands to leave and end. Safe to repeat."""
        self._launcher.cancel(self.handle, indexes=indexes, grace_s=grace_s)


def launch(
    engine: str,
    n: int,
    run: str,
    command: Sequence[str],
    *,
    name: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Launched:
    """Start `n` islands of a run on an engine, and return what follows them.

    They run on when this process ends; `atoll ps`, `logs` and `cancel` find them.

    Args:
        engine: `local`, `slurm`, `ray`, ...
        n: How many islands.
        run: The URL of a coordinator or of a store.
        command: A script, `-m` and a module, `module:function` or a program; and its
            arguments.
        name: Island 3 is `name-3`; the engine's name without.
        options: The engine's own words.

    Raises:
        UsageError: the engine, an option or the command is wrong, or islands of that
            name are launched already.
        Refused, Unreachable: the engine or the run does not let this user.
    """
    if isinstance(command, str):
        raise UsageError(
            f"command={command[:80]!r} is one text. Give its words: command.split()."
        )
    usual = engine.replace("_", "-")
    spec = IslandSpec(command=tuple(command), run=run, name=name or usual)
    return launch_spec(engine, n, spec, options=options)


def launch_spec(
    engine: str,
    n: int,
    spec: IslandSpec,
    *,
    first: int = 0,
    options: Mapping[str, str] | None = None,
    ship: Path | None = None,
    book: Book | None = None,
) -> Launched:
    """Start islands of a spec that says more than a command.

    `ship` is a directory whose code is kept with the run, and fetched by the islands.
    An error, and an interruption, leave nothing running; or if that cannot be had, a
    launch in the book, which is named then.
    """
    launcher, book = open_launcher(engine, options), book or Book()
    _forget_old(book)
    with book.holding(spec.run, spec.name):
        _require_free(spec, first, n, book)
        if ship is not None:
            code = pack_code(ship)
            ship_code(spec.run, code)
            spec = replace(spec, code=code.digest)
        order = make_order(launcher, n, spec, first=first)
        return submit(launcher, order, book)


def submit(launcher: Launcher, order: Order, book: Book) -> Launched:
    """Submit an order, and write down what finds it; or leave nothing, as above."""
    kept: list[Handle] = []

    def keep(handle: Handle) -> None:
        book.keep(Record(handle, order.spec))
        kept.append(handle)

    try:
        return Launched(launcher.launch(order, keep=keep), launcher)
    except BaseException as exc:
        if kept:
            _undo(launcher, kept[-1], book, exc)
        raise


def plan_spec(
    engine: str,
    n: int,
    spec: IslandSpec,
    *,
    options: Mapping[str, str] | None = None,
    ship: Path | None = None,
) -> Plan:
    """Return what `launch_spec` would submit; neither run nor engine is asked."""
    launcher = open_launcher(engine, options)
    if ship is not None:
        spec = replace(spec, code=pack_code(ship).digest)
    # A plan names what will be given by value, as `make_order` does, and has no value.
    given = [each for each in spec.secrets if each not in in_engine(spec.secrets)]
    given += [PASS] if launcher.traits.is_elsewhere else []
    order = Order(
        id=new_id(spec, is_plan=True),
        spec=spec,
        num_islands=n,
        values=dict.fromkeys(given, Secret("to be read at the launch")),
    )
    return launcher.plan(order)


def _require_free(spec: IslandSpec, first: int, n: int, book: Book) -> None:
    """Return if no island of these names is launched; forget those that are over."""
    wanted = set(range(first, first + n))
    for each in book.of_run(spec.run):
        if each.handle.name != spec.name or not wanted & set(each.handle.indexes):
            continue
        live = [it for it in Launched(each.handle).poll() if not it.state.is_over]
        taken = [it.name for it in live if it.index in wanted]
        if taken:
            raise UsageError(
                f"{', '.join(taken[:8])} of {spec.run} are launched already. Give "
                f"another --name, or end them: atoll cancel {spec.run}"
            )
        if not live:
            book.forget(each.handle.id)


def _forget_old(book: Book) -> None:
    """Forget the oldest launches if there are many; what runs, or may, stays."""
    silent: set[str] = set()
    for each in book.surplus():
        if each.handle.engine in silent:
            continue
        try:
            reports = Launched(each.handle).poll()
        except AtollError:
            silent.add(each.handle.engine)  # nobody can tell, and each costs its time
            continue
        if all(it.state.is_over for it in reports):
            book.forget(each.handle.id)


def _undo(launcher: Launcher, handle: Handle, book: Book, error: BaseException) -> None:
    """End what a launch that failed may have started, and forget it."""
    end_after(error, Launched(handle, launcher))
    book.forget(handle.id)


def end_after(error: BaseException, launched: Launched) -> None:
    """End what was launched, since something failed without which it is for nothing.

    Raises:
        RemoteError: it cannot be ended now. It names what does, and the error before.
    """
    try:
        launched.cancel()
    except AtollError as exc:
        launch = launched.handle.id
        raise RemoteError(
            f"The launch {launch} failed ({error}), and what it has started could "
            f"not be ended ({exc}). End it: atoll cancel {launch}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Inside:
    """How an engine runs a coordinator."""

    engine: str
    launcher: Launcher
    serving: Serving

    def spec(
        self,
        run: str,
        more: Sequence[str],
        *,
        directory: str | None = None,
        image: str | None = None,
        requirements: Sequence[str] = (),
    ) -> IslandSpec:
        """Return what is launched: `atoll serve` with `more` words, in its directory.

        It has the image of the islands, and none of their resources.
        """
        serving = self.serving
        words = ["-m", "atoll.cli", "serve", RUN_FILE, "--dir", "."]
        words += ["--listen", serving.host]
        words += [] if serving.port is None else ["--port", str(serving.port)]
        return IslandSpec(
            command=(*words, *more),
            run=run,
            name=COORDINATOR,
            directory=directory,
            image=image,
            requirements=tuple(requirements),
        )

    def plan(self, spec: IslandSpec) -> Plan:
        """Return what would be submitted, and where islands would reach it."""
        told = {CHARTER: Secret("to be made at the launch")}
        return self.launcher.plan(_order(new_id(spec, is_plan=True), spec, told))

    def launch(self, spec: IslandSpec, charter: Charter, book: Book) -> Launched:
        """Launch a coordinator; errors as `launch_spec`."""
        order = _order(new_id(spec), spec, {CHARTER: charter.to_secret()})
        return submit(self.launcher, order, book)


def inside_of(engine: str, options: dict[str, str]) -> Inside:
    """Return how an engine whose islands are elsewhere runs their coordinator.

    Raises:
        UsageError: it does not, or an option is wrong.
    """
    serving = open_launcher(engine, options).traits.serving
    if serving is None:
        raise UsageError(
            f"--coordinator island0 has islands reach one of their own, and {engine} "
            "gives them no address for that. Serve the run here, at an address that "
            "the islands reach: --listen; or use a run in a store."
        )
    launcher = open_launcher(engine, serving.options)
    return Inside(engine=engine, launcher=launcher, serving=serving)


def _order(launch: str, spec: IslandSpec, values: dict[str, Secret]) -> Order:
    return Order(
        id=launch, spec=spec, num_islands=1, values=values, is_coordinator=True
    )


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
