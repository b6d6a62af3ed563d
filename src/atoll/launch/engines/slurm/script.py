"""What is submitted: one batch script, whose tasks differ in their number alone."""

from __future__ import annotations

import json
import math
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.errors import UsageError
from atoll.launch.base import GRACE_S, Order
from atoll.launch.bootstrap import bootstrap_words
from atoll.launch.references import in_engine
from atoll.launch.spec import IslandSpec, Resources

ENGINE = "slurm"
LEADER = "atoll.launch.engines.slurm.leader"
INDEX = "SLURM_ARRAY_TASK_ID"
BEFORE_LIMIT_S = 2 * GRACE_S
"""How long before its time limit an island is told to leave: Slurm may be this late."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What `--option` takes."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    directory: str | None = None
    """Where logs and states of launches are, seen from every node; among the user's own
    files without."""

    python: str | None = None
    """On the nodes; the one that launches without."""

    most_at_a_time: int | None = None
    """How many islands Slurm may run at the same time."""


def batch_script(order: Order, options: SlurmOptions, place: Path) -> str:
    """Return the script of an array job.

    Raises:
        UsageError: Slurm cannot do what the spec asks for.
    """
    spec = order.spec
    _require_possible(spec)
    python = options.python or sys.executable
    words = bootstrap_words(spec, index_from=INDEX, first=order.first, python=python)
    leader = [python, "-m", LEADER, "--place", str(place), "--name", spec.name]
    leader += ["--first", str(order.first)] if order.first else []
    leader += ["--restarts", json.dumps(asdict(spec.restarts))]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {each}" for each in _directives(order, options, place)]
    lines += [
        f"export {name}={shlex.quote(value)}"
        for name, value in sorted(spec.environment.items())
    ]
    # Exec: what Slurm tells the batch script is told to the leader.
    lines.append("exec " + shlex.join([*leader, "--", *words]))
    return "\n".join(lines) + "\n"


def _directives(order: Order, options: SlurmOptions, place: Path) -> list[str]:
    most = f"%{options.most_at_a_time}" if options.most_at_a_time else ""
    said = [
        f"--job-name={order.id}",
        f"--array=0-{order.num_islands - 1}{most}",
        "--nodes=1",
        "--ntasks=1",
        f"--output={place}/%a-slurm.log",
        "--open-mode=append",
        "--requeue" if order.spec.restarts.most else "--no-requeue",
        *_resources(order.spec.resources),
    ]
    for name in ("partition", "account", "qos", "constraint"):
        if (value := getattr(options, name)) is not None:
            said.append(f"--{name}={value}")
    if order.spec.directory:
        said.append(f"--chdir={order.spec.directory}")
    for each in said:
        if "\n" in each or '"' in each or " " in each:
            raise UsageError(f"{each!r} cannot be written into a batch script.")
    return said


def _resources(needs: Resources) -> list[str]:
    said = []
    if needs.cpus is not None:
        said.append(f"--cpus-per-task={math.ceil(needs.cpus)}")
    if needs.memory_bytes is not None:
        said.append(f"--mem={math.ceil(needs.memory_bytes / 2**20)}M")
    if needs.accelerators:
        kind = f"{needs.accelerator}:" if needs.accelerator else ""
        said.append(f"--gres=gpu:{kind}{needs.accelerators}")
    if needs.time_limit_s is not None:
        said.append(f"--time={math.ceil(needs.time_limit_s / 60)}")
        said.append(f"--signal=B:USR1@{BEFORE_LIMIT_S:.0f}")
    return said


def _require_possible(spec: IslandSpec) -> None:
    for name in ("image", "requirements"):
        if getattr(spec, name):
            raise UsageError(
                f"{name}={getattr(spec, name)!r} is nothing that Slurm brings to its "
                "nodes. Install there what islands need, and name its Python with "
                "--option python=PATH."
            )
    if kept := in_engine(spec.secrets):
        name = next(iter(kept))
        raise UsageError(
            f"The secret {name} is to come from the engine, and Slurm keeps none. Give "
            f"{name}=env:NAME or {name}=file:PATH."
        )
    limit_s = spec.resources.time_limit_s
    if limit_s is not None and limit_s <= BEFORE_LIMIT_S:
        raise UsageError(
            f"time_limit_s={limit_s:g} leaves no time to train: islands are told to "
            f"leave {BEFORE_LIMIT_S:g} s before. Give more."
        )
