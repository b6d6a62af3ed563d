"""What one island is as a managed job: a task of SkyPilot, as its YAML has it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import Any

from atoll.errors import UsageError
from atoll.launch.base import Order
from atoll.launch.leading import TOLD_TO_GO, leader_words
from atoll.launch.references import in_engine
from atoll.launch.spec import IslandSpec, Resources

ENGINE = "skypilot"
DOCKER = "docker:"
KEPT = "secrets:"
"""Before the name of a secret that SkyPilot keeps itself."""

GIB = 2**30


@dataclass(frozen=True)
class SkyPilotOptions:
    """What `--option` takes."""

    infra: str | None = None
    """Where islands run, in SkyPilot's words: `aws`, `gcp/us-east1`, `k8s/context`."""

    use_spot: bool = False
    """Whether they take machines that may be preempted."""


def job_name(launch: str, index: int) -> str:
    """Return the name of an island's managed job."""
    return f"{launch}-{index}"


def tasks(order: Order, options: SkyPilotOptions) -> list[dict[str, Any]]:
    """Return every island's task. Values of secrets are null, and given at launch.

    Raises:
        UsageError: a managed job cannot be what the spec asks for.
    """
    spec = order.spec
    resources, setup = _resources(spec, options), _setup(spec)
    return [
        {
            "name": job_name(order.id, index),
            "resources": resources,
            "envs": dict(spec.environment),
            "secrets": _secrets(order),
            **setup,
            "run": _run(spec, index),
        }
        for index in order.indexes
    ]


def _run(spec: IslandSpec, index: int) -> str:
    # The leader takes the shell's place, so that it hears what the shell would.
    return f"exec {shlex.join(leader_words(spec, index, limit_s=math.inf))}"


def _setup(spec: IslandSpec) -> dict[str, str]:
    if spec.image is None and not spec.requirements:
        raise UsageError(
            "SkyPilot has nothing to run an island in. Give --image with Atoll in it, "
            "or say how pip gets it: --requirement atoll."
        )
    if not spec.requirements:
        return {}
    return {"setup": f"python -m pip install --quiet {shlex.join(spec.requirements)}"}


def _resources(spec: IslandSpec, options: SkyPilotOptions) -> dict[str, Any]:
    asked = spec.resources
    if asked.time_limit_s is not None:
        raise UsageError(
            f"time_limit_s={asked.time_limit_s:g} is given, and SkyPilot ends nothing "
            "by time. Leave it out, and use `atoll cancel`."
        )
    said = {
        "infra": options.infra,
        "use_spot": options.use_spot,
        "cpus": None if asked.cpus is None else f"{asked.cpus:g}+",
        "memory": _memory(asked),
        "accelerators": _accelerators(asked),
        "image_id": None if spec.image is None else _image_id(spec.image),
        # A failed command is the leader's to start again; a leader that was told to go
        # and not by a cancel was on a machine that goes away.
        "job_recovery": {
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": [int(TOLD_TO_GO)],
        },
    }
    return {key: each for key, each in said.items() if each is not None}


def _image_id(image: str) -> str:
    return image if image.startswith(DOCKER) else f"{DOCKER}{image}"


def _memory(asked: Resources) -> str | None:
    if asked.memory_bytes is None:
        return None
    return f"{math.ceil(asked.memory_bytes / GIB * 100) / 100:g}+"


def _accelerators(asked: Resources) -> dict[str, int] | None:
    if asked.accelerators == 0:
        return None
    if asked.accelerator is None:
        raise UsageError(
            f"accelerators={asked.accelerators} of which kind? SkyPilot wants its "
            "name: --accelerator A100."
        )
    return {asked.accelerator: asked.accelerators}


def _secrets(order: Order) -> dict[str, None]:
    """Return the secrets by name: those given at launch, and those SkyPilot keeps."""
    of_engine, kept = in_engine(order.spec.secrets), []
    for variable, named in of_engine.items():
        if named.rpartition(".")[2] != variable:
            raise UsageError(
                f"The secret {variable} is to be SkyPilot's {named!r}, which sets its "
                f"variables under their own names. Give {variable}=engine:{variable}."
            )
        kept.append(f"{KEPT}{named}")
    # A plan that is only looked at has no values yet, and names them all the same.
    given = (order.spec.secrets.keys() - of_engine.keys()) | order.values.keys()
    return dict.fromkeys([*sorted(given), *kept])
