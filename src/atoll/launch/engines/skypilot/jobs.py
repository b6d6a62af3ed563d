"""Managed jobs of SkyPilot: every call of its SDK is here, and its errors become ours.

Most calls return the id of a request, whose answer `sky.get` waits for. The server goes
on with it though nobody waits any more.
"""

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sky
from sky import exceptions as faults

from atoll.errors import Refused, Unreachable, UsageError
from atoll.security import Secret

FIELDS = ("job_id", "job_name", "status", "recovery_count", "failure_reason", "infra")

_MAY_NOT = (
    faults.ApiServerAuthenticationError,
    faults.CloudUserIdentityError,
    faults.InvalidCloudCredentials,
    faults.NoCloudAccessError,
    faults.PermissionDeniedError,
    faults.UserRequestRejectedByPolicy,
)
_WRONG = (
    ValueError,
    faults.APINotSupportedError,
    faults.APIVersionMismatchError,
    faults.InvalidClusterNameError,
    faults.NotSupportedError,
    faults.ProvisionPrechecksError,
    faults.ResourcesMismatchError,
    faults.ResourcesUnavailableError,
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SAID = re.compile(r"\([^()]*\bpid=\d+[^()]*\) ?(.*)")
"""A line of the island; what is without such a beginning is SkyPilot's own."""


def ask(task: Mapping[str, Any], values: Mapping[str, Secret]) -> str:
    """Ask for a managed job, and return the id of that request."""
    name = str(task["name"])
    with told(f"start {name}"):
        given = [(key, each.reveal()) for key, each in values.items()]
        # The parser takes things out of what it is given.
        parsed = sky.Task.from_yaml_config(
            copy.deepcopy(dict(task)), secrets_overrides=given
        )
        return str(sky.jobs.launch(parsed, name=name))


def await_start(name: str, request: str) -> None:
    """Return when SkyPilot has a managed job that was asked for."""
    with told(f"start {name}"):
        sky.get(request)


def withdraw(requests: Sequence[str]) -> None:
    """Have requests left undone; nothing happens to those that were answered."""
    with told("withdraw what was asked for"):
        sky.get(sky.api_cancel(list(requests), silent=True))


def find(launch: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the records of a launch's managed jobs that SkyPilot has, by name."""
    wanted = set(names)
    with told(f"find {launch}"):
        found = _queue(launch)
    known = sorted(found, key=lambda record: int(record.job_id))
    return {each.job_name: each for each in known if each.job_name in wanted}


def _queue(name: str) -> list[Any]:
    try:
        # A controller that has fallen asleep knows what has ended: it is woken.
        request = sky.jobs.queue_v2(refresh=True, name_match=name, fields=FIELDS)
        records, *_ = sky.get(request)
    except faults.ClusterNotUpError:
        return []  # there is no controller, and never was a managed job
    return list(records)


def lines(job_id: int, *, is_live: bool) -> list[str]:
    """Return the lines an island has said, without what SkyPilot says itself.

    Of one that is live, a line that is still being said is left out.
    """
    said = io.StringIO()
    with told("read a log"):
        sky.jobs.tail_logs(job_id=job_id, follow=False, output_stream=said)
    texts = said.getvalue().split("\n")
    if is_live:
        del texts[-1]
    plain = (_COLOUR.sub("", each).rstrip("\r") for each in texts)
    return [found[1] for found in map(_SAID.fullmatch, plain) if found is not None]


def cancel(job_ids: Sequence[int], *, grace_s: float) -> None:
    """Have managed jobs told to go, and ended."""
    with told("cancel"):
        request = sky.jobs.cancel(
            job_ids=list(job_ids), graceful=True, graceful_timeout=math.ceil(grace_s)
        )
        sky.get(request)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Let errors of the SDK become ours."""
    try:
        yield
    except _MAY_NOT as exc:
        raise Refused(
            f"SkyPilot does not let you {what}: {exc}. Run `sky check`, or `sky api "
            "login` if its server is elsewhere."
        ) from exc
    except _WRONG as exc:
        raise UsageError(f"SkyPilot cannot {what}: {exc}.") from exc
    except Exception as exc:  # its errors have no common class
        raise Unreachable(f"SkyPilot did not answer to {what}: {exc}.") from exc
