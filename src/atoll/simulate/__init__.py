"""Owns virtual time: processes, networks, disks and clocks that fail as planned.

Does not know the programs that the processes run, except in `run`, `islands`, `hosts`
and `invariants`, which run Atoll itself and check it.
Start reading at `scheduler.Scheduler`, then `world.SimWorld` and `plan.FaultPlan`.
"""

from atoll.simulate.network import Latency, LinkConditions, Network, ReplyFunction
from atoll.simulate.plan import FaultPlan
from atoll.simulate.process import SimClock, SimProcess
from atoll.simulate.run import Simulated, simulate
from atoll.simulate.scheduler import (
    GreenletFuture,
    ProcessDead,
    ProcessFailed,
    Scheduler,
    TraceEvent,
    timeline,
)
from atoll.simulate.storms import as_python, as_test, random_plan, shrink
from atoll.simulate.world import Armed, SimDisk, SimWorld, apply

__all__ = [
    "Armed",
    "FaultPlan",
    "GreenletFuture",
    "Latency",
    "LinkConditions",
    "Network",
    "ProcessDead",
    "ProcessFailed",
    "ReplyFunction",
    "Scheduler",
    "SimClock",
    "SimDisk",
    "SimProcess",
    "SimWorld",
    "Simulated",
    "TraceEvent",
    "apply",
    "as_python",
    "as_test",
    "random_plan",
    "shrink",
    "simulate",
    "timeline",
]
