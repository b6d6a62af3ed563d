"""Owns contract suites, fixtures and network links for tests, also of users' projects.

Does not know any test framework, nor how faults are simulated: `simulate` does.
Start reading at `VectorView`, then `exchange_contract`, `virtual` and `link`.
"""

from typing import TYPE_CHECKING, Any

from atoll.island.numpy_model import VectorView, vector_model
from atoll.testing.dealer_contract import DEALER_CLAIMS
from atoll.testing.disk_contract import DISK_CLAIMS
from atoll.testing.exchange_contract import EXCHANGE_CLAIMS
from atoll.testing.launcher_contract import LAUNCHER_CLAIMS, PLAN_CLAIMS, LaunchStage
from atoll.testing.link import Link
from atoll.testing.namespaces import (
    Namespace,
    linked_namespaces,
    namespaces_unavailable,
)
from atoll.testing.store_contract import STORE_CLAIMS

if TYPE_CHECKING:
    from atoll.simulate import FaultPlan, as_test, random_plan, shrink
    from atoll.simulate.run import simulate
    from atoll.testing.virtual import VirtualIsland, VirtualRun, virtual_run

__all__ = [
    "DEALER_CLAIMS",
    "DISK_CLAIMS",
    "EXCHANGE_CLAIMS",
    "LAUNCHER_CLAIMS",
    "PLAN_CLAIMS",
    "STORE_CLAIMS",
    "FaultPlan",
    "LaunchStage",
    "Link",
    "Namespace",
    "VectorView",
    "VirtualIsland",
    "VirtualRun",
    "as_test",
    "linked_namespaces",
    "namespaces_unavailable",
    "random_plan",
    "shrink",
    "simulate",
    "vector_model",
    "virtual_run",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Virtual time needs greenlet; claims and vectors do not.
        if name in {"VirtualIsland", "VirtualRun", "virtual_run"}:
            from atoll.testing import virtual

            return getattr(virtual, name)
        if name == "simulate":
            from atoll.simulate.run import simulate

            return simulate
        if name in __all__:
            import atoll.simulate

            return getattr(atoll.simulate, name)
        raise AttributeError(f"module 'atoll.testing' has no attribute {name!r}")
