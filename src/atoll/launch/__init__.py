"""Owns how islands are started on the engine that people have, and found again there.

Does not know what a run decides, nor how hardware is scheduled.
Start reading at `base.Launcher`, then `spec`, then `engines.local`.

An engine is a module of `engines`, named by its technology: a file, or a package if it
is more than one. Its author writes:

1.  `open_launcher(options) -> Launcher`. It imports the SDK at the top of the module (a
    missing one is then reported with its extra by `registry`), reads its own
    `KEY=VALUE` options with `base.read_options` into a frozen dataclass. Programs and
    credentials are checked by the first method that needs them, and a plan needs none:
    `--dry-run` works on any machine. A missing one is a `UsageError` with a remedy.

2.  A final class with the six methods of `base.Launcher`; or `job_launcher.Jobs`, if
    every island is a separate job, for a `JobLauncher` that `open_launcher` returns.
    `plan` returns the full submission of a `LaunchOrder` as data, and `launch` submits
    exactly that: one function makes both. Refuse by name each field of a spec that the
    engine cannot fulfil, with `spec.refuse_fields` and `spec.refuse_stored_secrets`.
    `launch` calls `keep(order.handle(NAME, reference, options=...))` before it submits,
    with a reference by which everything can be found (`order.id` is enough where the
    engine finds jobs by name, tag or label), and again when the engine has responded.
    `poll`, `logs` and `cancel` need only the handle.

3.  The command of an island: `bootstrap.bootstrap_argv(spec, index_from="VARIABLE")`
    where the engine sets a variable to the stable index of a process, or `index=3`
    where every island is a separate submission. So an island is `NAME-INDEX` in every
    incarnation, has ATOLL_RUN, ATOLL_ISLAND and ATOLL_ISLAND_INDEX in its environment,
    and its command replaces the bootstrap process. An engine also sets
    `spec.environment`, and nothing else: no settings.

4.  Secrets. `order.values` has those whose values the launching process has read, by
    variable, with ATOLL_PASS among them if `traits.is_elsewhere`: they reach islands by
    the engine's own mechanism for secrets (a Secret object, a field `secrets=`, a
    private file that the variable ATOLL_PASS_FILE names), and are never part of an
    argv, `environment`, plan or handle. `spec.in_engine(spec.secrets)` has those that
    the engine stores, by its names.

5.  Ends. SIGTERM makes an island leave its run cleanly, within `base.GRACE_S`: every
    notice of the engine before a kill (a preemption, a time limit, a preStop hook) must
    become that signal. An island with exit code 0 is FINISHED; one that `cancel` ended
    is CANCELLED with any code; one that the engine has forgotten is LOST.

6.  A coordinator, if islands of the engine can reach one that runs there: then
    `traits.serving` describes how. An order that `is_coordinator` has ATOLL_CHARTER
    instead of a pass, and is not restarted on a host without its directory. An argument
    `ADDRESS_PLACEHOLDER` of its command becomes the address of its host; or, if the URL
    is known before it runs, its plan has the URL, and its handle has it as `run`.

7.  Tests: every claim of `atoll.testing.LAUNCHER_CLAIMS` against the real engine or a
    server that behaves like it; at least `PLAN_CLAIMS` where nothing can be run.
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
        # `api` loads the exchanges, which the author of an engine does not need.
        if name in __all__:
            from atoll.launch import api

            return getattr(api, name)
        raise AttributeError(f"module 'atoll.launch' has no attribute {name!r}")
