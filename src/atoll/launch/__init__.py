"""Owns how islands are started on the engine that people have, and found again there.

Does not know what a run decides, nor how hardware is scheduled.
Start reading at `base.Launcher`, then `spec`, then `engines.local`.

An engine is a module of `engines`, named by its technology: a file, or a package if it
is more than one. Its author writes:

1.  `open_launcher(options) -> Launcher`. It imports the SDK at the top of the module (a
    missing one is then told with its extra by `registry`), reads its own `KEY=VALUE`
    words with `base.read_options` into a frozen dataclass, and checks that what the
    engine needs is here: a program, an endpoint, a credential (`UsageError`, with what
    to do).

2.  A final class with the six methods of `base.Launcher`.
    `plan` makes the whole submission out of an `Order`, as data, and `launch` submits
    just that: there is one function behind both. Refuse by name what the engine cannot
    do of a spec: a resource, an image, `requirements`, a restart policy.
    `launch` calls `keep(order.handle(NAME, reference, options=...))` before it submits,
    with a reference by which everything can be found (`order.id` will do where the
    engine can be asked by name, tag or label), and again when the engine has answered.
    `poll`, `logs` and `cancel` go by the handle alone.

3.  The command of an island: `bootstrap.bootstrap_words(spec, index_from="VARIABLE")`
    where the engine tells a process its stable index by a variable, or `index=3` where
    every island is submitted by itself. So an island is `NAME-INDEX` in all its lives,
    finds ATOLL_RUN, ATOLL_ISLAND and ATOLL_ISLAND_INDEX in its environment, and the
    command takes the bootstrap's place. Beside it an engine sets `spec.environment`,
    and nothing else: no settings.

4.  Secrets. `order.values` has those whose values this side knows, by variable, with
    ATOLL_PASS among them if `traits.is_elsewhere`: they go the engine's own way of
    secrets (a Secret object, a field `secrets=`, a private file that the variable
    ATOLL_PASS_FILE names), and never into words, `environment`, plan or handle.
    `spec.in_engine(spec.secrets)` has those that the engine keeps, by its names.

5.  Ends. SIGTERM makes an island leave its run cleanly, and needs up to `base.GRACE_S`:
    what the engine sends before it kills (a preemption, a time limit, a preStop hook)
    must become that signal. Exit code 0 is FINISHED; what is over by `cancel` is
    CANCELLED whatever its code; what the engine has forgotten is LOST.

6.  A coordinator, if one of an engine's own is reached by its islands: then
    `traits.serving` says how. An order that `is_coordinator` has ATOLL_CHARTER in place
    of a pass, and is not started again where its directory is not. `LISTEN_THERE` among
    its words becomes the address of its place; or, if that is known before it runs, its
    plan has the URL, and its handle has it as its `run`.

7.  Tests: every claim of `atoll.testing.LAUNCHER_CLAIMS` against the real engine or a
    server that behaves as it does; `PLAN_CLAIMS` at least, where nothing can be run.
"""

from typing import TYPE_CHECKING, Any

from atoll.launch.base import Handle, Report, State
from atoll.launch.spec import IslandSpec, Resources, Restarts

if TYPE_CHECKING:
    from atoll.launch.api import Launched, Result, launch, launch_spec

__all__ = [
    "Handle",
    "IslandSpec",
    "Launched",
    "Report",
    "Resources",
    "Restarts",
    "Result",
    "State",
    "launch",
    "launch_spec",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # What asks a run loads more than who writes an engine needs.
        if name in __all__:
            from atoll.launch import api

            return getattr(api, name)
        raise AttributeError(f"module 'atoll.launch' has no attribute {name!r}")
