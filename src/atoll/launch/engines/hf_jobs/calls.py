"""What one island is as a job: the arguments of `HfApi.run_job`, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from huggingface_hub import JobHardware

from atoll.errors import UsageError
from atoll.launch.base import Order
from atoll.launch.leading import leader_words, with_requirements
from atoll.launch.references import in_engine
from atoll.launch.spec import IslandSpec, Resources

ENGINE = "hf_jobs"
LAUNCH, INDEX = "atoll-launch", "atoll-index"
"""Labels by which jobs are found."""

DEFAULT_LIMIT_S = 7 * 24 * 3600.0
"""The Hub's own is half an hour, which ends a training early."""

PREFIX = "HF_NETWORK_GROUP_PREFIX"
"""The variable that says in a job what begins the name of every alias."""

_INSIDE = re.compile(r"https://atoll-coordinator-[0-9a-f]{8}:\d+")
_FLAVOR = re.compile(r"(?P<kind>[a-z0-9-]+?)(-small|-medium|-large)?(x(?P<num>\d+))?")


@dataclass(frozen=True)
class HfJobsOptions:
    """What `--option` takes."""

    flavor: str | None = None
    """The hardware of one island: `l40sx1`, `a100x8`. Without: by `--accelerator`."""

    namespace: str | None = None
    """Who owns and pays for the jobs; without it, whose token it is."""

    endpoint: str | None = None
    """Of the Hub; without it, the one that `huggingface_hub` knows."""

    base_image: str = "python:3.12"
    """Where `--requirement` is installed if there is no `--image`."""

    attempts: int | None = None
    """How often the Hub starts a job, at most; without it once."""

    network_group: str | None = None
    """Jobs of one group reach each other: each island by its name as an alias."""

    coordinator_flavor: str = JobHardware.CPU_BASIC.value
    """The hardware of a coordinator that is a job of the group."""

    port: int = 4711
    """Of that coordinator."""

    def __post_init__(self) -> None:
        if self.attempts is not None and self.attempts < 1:
            raise UsageError(
                f"attempts={self.attempts}: a job is started 1 time or more."
            )


def job_calls(order: Order, options: HfJobsOptions) -> list[dict[str, Any]]:
    """Return the arguments of every island's `run_job`, but for the secrets' values.

    Raises:
        UsageError: a job cannot be what the spec asks for.
    """
    spec = order.spec
    _require_possible(spec)
    limit_s = spec.resources.time_limit_s or DEFAULT_LIMIT_S
    alike = {
        "image": spec.image or options.base_image,
        "env": dict(spec.environment),
        "flavor": flavor(spec.resources, options),
        "timeout": int(limit_s),
        "attempts": options.attempts,
        "namespace": options.namespace,
        "network_group": options.network_group,
    }
    prefix_from = PREFIX if is_of_group(spec.run) else None
    return [
        {
            **alike,
            "name": spec.island(index),
            "labels": {LAUNCH: order.id, INDEX: str(index)},
            "command": with_requirements(
                leader_words(spec, index, limit_s=limit_s, prefix_from=prefix_from),
                spec.requirements,
            ),
            "network_aliases": _aliases(order, index, options),
        }
        for index in order.indexes
    ]


def url(order: Order, options: HfJobsOptions) -> str:
    """Return where islands find a coordinator, but for what begins its name there.

    Raises:
        UsageError: jobs do not reach each other.
    """
    if options.network_group is None:
        raise UsageError(
            "Jobs of Hugging Face reach each other in a network group, and none is "
            "named for this coordinator. Give --option network_group=NAME."
        )
    return f"https://{order.id}:{options.port}"


def is_of_group(run: str) -> bool:
    """Return whether a run's coordinator is a job, known here by its alias."""
    return _INSIDE.fullmatch(run) is not None


def _aliases(order: Order, index: int, options: HfJobsOptions) -> list[str] | None:
    if options.network_group is None:
        return None
    # Several jobs may have one alias, and coordinators of two runs may not.
    return [order.id if order.is_coordinator else order.spec.island(index)]


def flavor(resources: Resources, options: HfJobsOptions) -> str:
    """Return the hardware of one island.

    Raises:
        UsageError: none is that, or it has been said in two ways.
    """
    if options.flavor is not None and resources.accelerators == 0:
        return options.flavor
    if options.flavor is not None:
        raise UsageError(
            f"flavor={options.flavor!r} and accelerators={resources.accelerators} both "
            "say what an island has. Leave one out."
        )
    if resources.accelerators == 0:
        return JobHardware.CPU_BASIC.value
    asked = (resources.accelerator, resources.accelerators)
    known = {each.value: _kind(each.value) for each in JobHardware}
    for name, has in known.items():
        if has == asked:
            return name
    raise UsageError(
        f"Hugging Face has no flavor with accelerator={asked[0]!r}, accelerators="
        f"{asked[1]}. There are {', '.join(known)}; or say --option flavor=NAME."
    )


def _kind(name: str) -> tuple[str, int] | None:
    """Return the accelerator of a flavor and how many it has, as its name says."""
    found = _FLAVOR.fullmatch(name)
    if found is None or name.startswith("cpu-"):
        return None
    return found["kind"], int(found["num"] or 1)


def _require_possible(spec: IslandSpec) -> None:
    if spec.image is None and not spec.requirements:
        raise UsageError(
            "hf_jobs has nothing to run an island in. Give --image with Atoll in it, "
            "or say how pip gets it: --requirement atoll."
        )
    resources = spec.resources
    for name in ("cpus", "memory_bytes"):
        if (value := getattr(resources, name)) is not None:
            raise UsageError(
                f"{name}={value:g} cannot be asked of hf_jobs, which has flavors. "
                "Choose one: --option flavor=NAME."
            )
    if kept := sorted(in_engine(spec.secrets)):
        raise UsageError(
            f"The secret {kept[0]} is to be kept by the engine, and hf_jobs keeps none "
            f"between jobs. Give {kept[0]}=env:NAME or {kept[0]}=file:PATH."
        )
