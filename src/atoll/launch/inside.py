"""A coordinator that runs where an engine's islands are, and no file of ours is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.launch.base import Launcher, Order, Plan, Serving
from atoll.launch.book import COORDINATOR, Book
from atoll.launch.charter import CHARTER, RUN_FILE, Charter
from atoll.launch.launching import Launched, submit
from atoll.launch.orders import new_id
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec
from atoll.security import Secret


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
