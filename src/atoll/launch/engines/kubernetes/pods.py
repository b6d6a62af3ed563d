"""What a Job and its pods say of an island: values in, a report out."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from atoll.launch.handle import Handle
from atoll.launch.leader import GIVEN_UP
from atoll.launch.leading import TOLD_TO_GO
from atoll.launch.states import Report, State

CANCELLED = "atoll/cancelled"
"""The Job's annotation of the islands that were ended: their indexes."""

CONTAINER = "island"
"""The name of a pod's container; a cluster may add others beside it."""

INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
MAX_WHY = 200

Form = Mapping[str, Any]


def of_index(pods: Sequence[Form], number: int) -> list[Form]:
    """Return the pods of one index, its lives, oldest first."""
    return [each for each in pods if number_of(each) == str(number)]


def number_of(pod: Form) -> str:
    """Return the index that its Job has given to a pod."""
    return _annotations(pod).get(INDEX, "")


def cancelled(job: Form) -> set[int]:
    """Return the indexes of the islands that somebody has ended."""
    said = _annotations(job).get(CANCELLED, "")
    return {int(each) for each in said.split(",") if each.isdecimal()}


def indexes(text: str | None) -> set[int]:
    """Return the numbers of a list such as `0-2,5`."""
    found: set[int] = set()
    for each in filter(None, (text or "").split(",")):
        low, _, high = each.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def report(
    handle: Handle, index: int, job: Form | None, pods: Sequence[Form]
) -> Report:
    """Return what is true of an island."""
    name = handle.island(index)
    if job is None:
        why = "the cluster has no such Job any more"
        return Report(index=index, name=name, state=State.LOST, why=why)
    lives = of_index(pods, index - handle.first)
    ended = [_message(each) for each in lives]
    is_ended = index in cancelled(job)
    state = _state(job, lives, index - handle.first, is_ended=is_ended)
    last = lives[-1] if lives else {}
    return Report(
        index=index,
        name=name,
        state=state,
        restarts=_failures(lives) + sum(each.get("restarts") or 0 for each in ended),
        exit_code=_last_exit_code(lives),
        why="" if state is State.FINISHED else _why(job, last)[:MAX_WHY],
        place=str(last.get("spec", {}).get("nodeName", "")),
    )


def is_live(pod: Form) -> bool:
    """Return whether a pod has not ended: it waits, runs, or is about to leave."""
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def is_over(job: Form) -> bool:
    """Return whether nothing becomes of a Job any more."""
    return any(_condition(job, kind) is not None for kind in ("Complete", "Failed"))


def is_suspended(job: Form) -> bool:
    """Return whether a Job waits to be admitted, as by Kueue."""
    return bool(job.get("spec", {}).get("suspend"))


def _state(job: Form, lives: Sequence[Form], number: int, *, is_ended: bool) -> State:
    status = job.get("status", {})
    phase = lives[-1]["status"].get("phase") if lives else None
    if phase == "Running":
        return State.RUNNING
    if is_ended:
        return State.CANCELLED
    if number in indexes(status.get("completedIndexes")) or phase == "Succeeded":
        return State.FINISHED
    is_given_up = phase == "Failed" and _code(lives[-1]) in (GIVEN_UP, TOLD_TO_GO)
    has_failed = _condition(job, "Failed") is not None
    if has_failed or number in indexes(status.get("failedIndexes")):
        return State.FAILED
    # Who leaves because its Job is suspended comes back with it.
    if is_given_up and not (_is_disrupted(lives[-1]) or is_suspended(job)):
        return State.FAILED
    return State.RESTARTING if len(lives) > 1 or phase == "Failed" else State.PENDING


def _condition(form: Form, kind: str) -> Form | None:
    for each in form.get("status", {}).get("conditions") or ():
        if each["type"] == kind and each["status"] == "True":
            return dict(each)
    return None


def _is_disrupted(pod: Form) -> bool:
    return _condition(pod, "DisruptionTarget") is not None


def _failures(lives: Sequence[Form]) -> int:
    """Return how many pods came before the last, seen or counted by the Job."""
    counted = _annotations(lives[-1]).get(FAILURES, "0") if lives else "0"
    return max(len(lives) - 1, int(counted) if counted.isdecimal() else 0, 0)


def _last_exit_code(lives: Sequence[Form]) -> int | None:
    codes = (_exit_code(each) for each in reversed(lives))
    return next((each for each in codes if each is not None), None)


def _exit_code(pod: Form) -> int | None:
    code: int | None = _message(pod).get("exit_code", _code(pod))
    return code


def _code(pod: Form) -> int | None:
    code = _container(pod).get("terminated", {}).get("exitCode")
    return code if isinstance(code, int) else None


def _container(pod: Form) -> Form:
    """Return the state of the container that an island is in."""
    for each in pod.get("status", {}).get("containerStatuses") or ():
        if each.get("name") == CONTAINER:
            return dict(each.get("state") or {})
    return {}


def _message(pod: Form) -> dict[str, Any]:
    """Return what a leader has left; an image may have written anything there."""
    try:
        said = json.loads(_container(pod).get("terminated", {}).get("message") or "")
        numbers = {key: said[key] for key in ("exit_code", "restarts")}
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    if not all(each is None or type(each) is int for each in numbers.values()):
        return {}
    return {**numbers, "why": str(said.get("why", ""))}


def _why(job: Form, pod: Form) -> str:
    """Return why an island is as it is, in the cluster's own words."""
    if (told := _condition(pod, "DisruptionTarget")) is not None:
        return f"{told.get('reason', '')}: {told.get('message', '')}".strip(": ")
    if why := _message(pod).get("why") or pod.get("status", {}).get("reason"):
        return str(why)
    state = _container(pod)
    waiting = state.get("waiting") or {}
    if waiting:
        return f"{waiting.get('reason', '')}: {waiting.get('message', '')}".strip(": ")
    ended = state.get("terminated") or {}
    if ended.get("exitCode"):
        return f"{ended.get('reason') or 'exit code'} {ended['exitCode']}"
    for each in pod.get("status", {}).get("conditions") or ():
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return f"{each.get('reason', '')}: {each.get('message', '')}".strip(": ")
    if pod:
        return ""
    if (told := _condition(job, "Suspended")) is not None:
        return f"{told.get('reason', '')}: {told.get('message', '')}".strip(": ")
    failed = _condition(job, "Failed")
    return str(failed.get("message", "")) if failed else ""


def _annotations(form: Form) -> dict[str, str]:
    return dict(form["metadata"].get("annotations") or {})


def unfinished(
    handle: Handle, wanted: Collection[int], job: Form, pods: Sequence[Form]
) -> set[int]:
    """Return which of these islands are not over."""
    reports = (report(handle, index, job, pods) for index in wanted)
    return {each.index for each in reports if not each.state.is_over}


def set_report(
    handle: Handle, index: int, jobset: Form | None, pods: Sequence[Form]
) -> Report:
    """Return what is true of an island that is a JobSet, oldest pod first."""
    name = handle.island(index)
    if jobset is None:
        why = "the cluster has no such JobSet any more"
        return Report(index=index, name=name, state=State.LOST, why=why)
    restarts = int(jobset.get("status", {}).get("restarts") or 0)
    led = max((_message(each).get("restarts") or 0 for each in pods), default=0)
    state = _state_of_set(jobset, pods, restarts)
    # A pod that failed says more than those that went because of it.
    told = next((each for each in pods if _code(each)), pods[-1] if pods else {})
    nodes = {str(each["spec"].get("nodeName", "")) for each in pods} - {""}
    return Report(
        index=index,
        name=name,
        state=state,
        restarts=restarts + led,
        exit_code=_exit_code(told),
        why="" if state is State.FINISHED else _why(jobset, told)[:MAX_WHY],
        place=" ".join(sorted(nodes)),
    )


def _state_of_set(jobset: Form, pods: Sequence[Form], restarts: int) -> State:
    if any(each["status"].get("phase") == "Running" for each in pods):
        return State.RUNNING
    if cancelled(jobset):
        return State.CANCELLED
    if _condition(jobset, "Completed") is not None:
        return State.FINISHED
    if _condition(jobset, "Failed") is not None:
        return State.FAILED
    return State.RESTARTING if restarts or any(map(_code, pods)) else State.PENDING
