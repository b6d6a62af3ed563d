"""Owns virtual time: processes, networks, disks and clocks that fail as planned.

Does not know what the processes compute, nor what must hold of it.
Start reading at `scheduler.Scheduler`, then `world.World` and `plan.FaultPlan`.
"""

from atoll.simulate.apply import Armed, apply
from atoll.simulate.clock import SimClock
from atoll.simulate.disk import SimDisk
from atoll.simulate.life import ProcessDead, ProcessFailed
from atoll.simulate.links import Latency, Weather
from atoll.simulate.network import Network, Reply
from atoll.simulate.plan import FaultPlan
from atoll.simulate.process import Process
from atoll.simulate.promise import Promise
from atoll.simulate.run import Simulated, simulate
from atoll.simulate.scheduler import Scheduler
from atoll.simulate.shrink import as_python, as_test, shrink
from atoll.simulate.storms import random_plan
from atoll.simulate.trace import Happening, timeline
from atoll.simulate.world import World

__all__ = [
    "Armed",
    "FaultPlan",
    "Happening",
    "Latency",
    "Network",
    "Process",
    "ProcessDead",
    "ProcessFailed",
    "Promise",
    "Reply",
    "Scheduler",
    "SimClock",
    "SimDisk",
    "Simulated",
    "Weather",
    "World",
    "apply",
    "as_python",
    "as_test",
    "random_plan",
    "shrink",
    "simulate",
    "timeline",
]
