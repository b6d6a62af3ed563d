"""Launches islands, and gives what follows them: the Python face of `atoll launch`."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.errors import AtollError, RemoteError, Unreachable, UsageError
from atoll.launch.base import GRACE_S, Launcher, Order, Plan
from atoll.launch.book import Book, Record
from atoll.launch.code import pack_code, ship_code
from atoll.launch.handle import Handle
from atoll.launch.looking import Looks
from atoll.launch.orders import make_order, new_id
from atoll.launch.passes import PASS
from atoll.launch.patience import Patience
from atoll.launch.references import in_engine
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec
from atoll.launch.states import Report
from atoll.launch.summary import LAST_LINES
from atoll.security import Secret

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
