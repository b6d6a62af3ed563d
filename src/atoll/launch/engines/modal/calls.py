"""What one island is as a sandbox: the arguments of `modal.Sandbox.create`, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from atoll.errors import UsageError
from atoll.launch.base import Order
from atoll.launch.leading import leader_words
from atoll.launch.references import in_engine
from atoll.launch.spec import IslandSpec, Resources

ENGINE = "modal"
MAX_LIMIT_S = 24 * 3600.0
"""Of a sandbox. What a caller does not say is 300 s, which ends a training early."""

MIB = 2**20


@dataclass(frozen=True)
class ModalOptions:
    """What `--option` takes."""

    app: str = "atoll"
    """The app of the sandboxes; it is made if it is not there."""

    region: str | None = None
    cloud: str | None = None
    python: str = "3.12"
    """Which one has `--requirement` installed, if there is no `--image`."""


def sandbox_name(launch: str, index: int) -> str:
    """Return the name of an island's sandbox, which is the only one of its app."""
    return f"{launch}-{index}"


def sandbox_calls(order: Order, options: ModalOptions) -> list[dict[str, Any]]:
    """Return every island's words and arguments, with names where objects will be.

    Raises:
        UsageError: a sandbox cannot be what the spec asks for.
    """
    spec, resources = order.spec, order.spec.resources
    limit_s = _limit_s(resources)
    alike = {
        "app": options.app,
        "image": _image(spec, options),
        "env": dict(spec.environment),
        "secrets": _secrets(order),
        "timeout": int(limit_s),
        "gpu": _gpu(resources),
        "cpu": resources.cpus,
        "memory": _memory_mib(resources),
        "region": options.region,
        "cloud": options.cloud,
    }
    return [
        {
            "args": leader_words(spec, index, limit_s=limit_s),
            "name": sandbox_name(order.id, index),
            "tags": {"atoll-launch": order.id, "atoll-index": str(index)},
            **alike,
        }
        for index in order.indexes
    ]


def _limit_s(resources: Resources) -> float:
    limit_s = resources.time_limit_s or MAX_LIMIT_S
    if limit_s > MAX_LIMIT_S:
        raise UsageError(
            f"time_limit_s={limit_s:g} is more than the {MAX_LIMIT_S:g} s that a "
            "sandbox of Modal has. Ask for less, and launch again when they are over."
        )
    return max(1.0, limit_s)


def _image(spec: IslandSpec, options: ModalOptions) -> dict[str, Any]:
    if spec.image is not None:
        return {"registry": spec.image}
    if spec.requirements:
        return {"python": options.python, "pip": list(spec.requirements)}
    raise UsageError(
        "Modal has nothing to run an island in. Give --image with Atoll in it, or say "
        "how pip gets it: --requirement atoll."
    )


def _secrets(order: Order) -> dict[str, Any]:
    """Return which variables are given by value, and which secrets Modal keeps."""
    kept: dict[str, list[str]] = {}
    for variable, reference in in_engine(order.spec.secrets).items():
        named, _, key = reference.partition("/")
        if key not in ("", variable):
            raise UsageError(
                f"The secret {variable} is to be {key} of Modal's {named!r}, which "
                f"sets its variables under their own names. Give {key}=engine:{named}."
            )
        kept.setdefault(named, []).append(variable)
    return {"given": sorted(order.values), "kept": kept}


def _gpu(resources: Resources) -> str | None:
    if resources.accelerators == 0:
        return None
    if resources.accelerator is None:
        raise UsageError(
            f"accelerators={resources.accelerators} of which kind? Modal wants its "
            "name: --accelerator a100."
        )
    return f"{resources.accelerator}:{resources.accelerators}"


def _memory_mib(resources: Resources) -> int | None:
    asked = resources.memory_bytes
    return None if asked is None else math.ceil(asked / MIB)
