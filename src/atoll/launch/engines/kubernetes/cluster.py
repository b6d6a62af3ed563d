"""The calls to a cluster, by the official client, and the meaning of its responses.

Three parts: `Cluster` has the calls, `report` and `set_report` turn a Job and its pods
into reports of islands, and `PodLog` joins the logs of an island's pods into one, which
only grows. A cluster forgets: a log is deleted with its pod, and its older part when
the node rotates it. Readers count lines. So a launcher keeps the lines that it has
read.

Rule 1: starts are in their order, and the pods of one start are merged by the cluster's
time of each line; a line that is read later comes later, whatever its time.
Rule 2: where an island is several pods, every line names its pod.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.base import Handle, Report, State
from atoll.launch.engines.kubernetes.manifest import (
    CONTAINER,
    LAUNCH,
    KubernetesOptions,
)
from atoll.launch.job_leader import EXIT_CANCELLED
from atoll.launch.leader import EXIT_GIVEN_UP

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
ANSWER_S = 60.0
KINDS = {
    "Job": ("batch", "v1", "jobs"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
}
"""Group, version and path of what is submitted."""

_loading: Any = config  # its functions are not annotated
MAX_TOLD = 300
"""Characters of a cluster's answer that are shown."""


class Missing(Exception):
    """The cluster has no such object."""


class Cluster:
    """One namespace of a cluster, as this user may use it."""

    def __init__(
        self, api: client.ApiClient, namespace: str, context: str | None
    ) -> None:
        self.namespace, self._context = namespace, context
        # Of any version of the client, these give and take JSON as it is.
        self._custom: Any = client.CustomObjectsApi(api)
        self._core: Any = client.CoreV1Api(api)

    @property
    def named(self) -> dict[str, str]:
        """The options that find it again, whatever is the current context then."""
        named = {"namespace": self.namespace, "context": self._context}
        return {key: value for key, value in named.items() if value is not None}

    def create(self, form: Mapping[str, Any]) -> dict[str, Any]:
        """Submit, and return what the cluster has made of it."""
        try:
            return self._create(form)
        except Missing as exc:
            raise UsageError(
                f"The cluster knows no {form['kind']} in {self.namespace}. Install "
                "what brings it, or launch without."
            ) from exc

    def _create(self, form: Mapping[str, Any]) -> dict[str, Any]:
        with _answers(self.namespace, f"{form['kind']} {form['metadata']['name']}"):
            group, version, plural = KINDS[form["kind"]]
            made: dict[str, Any] = self._custom.create_namespaced_custom_object(
                group,
                version,
                self.namespace,
                plural,
                form,
                _request_timeout=ANSWER_S,
            )
            return made

    def read(self, name: str, *, kind: str = "Job") -> dict[str, Any] | None:
        try:
            with _answers(self.namespace, f"{kind} {name}"):
                found: dict[str, Any] = self._custom.get_namespaced_custom_object(
                    *KINDS[kind][:2],
                    self.namespace,
                    KINDS[kind][2],
                    name,
                    _request_timeout=ANSWER_S,
                )
                return found
        except Missing:
            return None

    def patch(self, name: str, change: Mapping[str, Any], *, kind: str = "Job") -> None:
        group, version, plural = KINDS[kind]
        with _answers(self.namespace, f"{kind} {name}"):
            self._custom.patch_namespaced_custom_object(
                group,
                version,
                self.namespace,
                plural,
                name,
                change,
                _request_timeout=ANSWER_S,
            )

    def delete(self, name: str, *, kind: str) -> None:
        group, version, plural = KINDS[kind]
        try:
            with _answers(self.namespace, f"{kind} {name}"):
                self._custom.delete_namespaced_custom_object(
                    group,
                    version,
                    self.namespace,
                    plural,
                    name,
                    propagation_policy="Background",
                    _request_timeout=ANSWER_S,
                )
        except Missing:
            return

    def create_secret(self, form: Mapping[str, Any]) -> None:
        with _answers(self.namespace, f"the Secret {form['metadata']['name']}"):
            self._core.create_namespaced_secret(
                self.namespace, form, _request_timeout=ANSWER_S
            )

    def create_service(self, form: Mapping[str, Any], owner: Mapping[str, Any]) -> None:
        """Create a Service that goes with its owner."""
        owned = {**form["metadata"], "ownerReferences": [dict(owner)]}
        with _answers(self.namespace, f"the Service {owned['name']}"):
            self._core.create_namespaced_service(
                self.namespace,
                {**form, "metadata": owned},
                _request_timeout=ANSWER_S,
            )

    def patch_secret(self, name: str, texts: Mapping[str, str]) -> None:
        with _answers(self.namespace, f"the Secret {name}"):
            self._core.patch_namespaced_secret(
                name,
                self.namespace,
                {"stringData": dict(texts)},
                _request_timeout=ANSWER_S,
            )

    def pods(self, launch: str) -> list[dict[str, Any]]:
        """Return the pods of a launch, oldest first."""
        with _answers(self.namespace, f"the pods of {launch}"):
            answer = self._core.list_namespaced_pod(
                self.namespace,
                label_selector=f"{LAUNCH}={launch}",
                _preload_content=False,
                _request_timeout=ANSWER_S,
            )
            found = json.loads(answer.data)["items"]
        return sorted(found, key=lambda each: each["metadata"]["creationTimestamp"])

    def delete_pod(self, name: str, *, grace_s: int) -> None:
        try:
            with _answers(self.namespace, f"the pod {name}"):
                self._core.delete_namespaced_pod(
                    name,
                    self.namespace,
                    grace_period_seconds=grace_s,
                    _preload_content=False,
                    _request_timeout=ANSWER_S,
                )
        except Missing:
            return

    def lines(self, pod: Mapping[str, Any]) -> list[str]:
        """Return the lines that a pod has said, without one that is still being.

        Each begins with the cluster's time of it.
        """
        *whole, rest = self._log(pod["metadata"]["name"]).split("\n")
        return whole if is_live(pod) or not rest else [*whole, rest]

    def _log(self, pod: str) -> str:
        """Return what a pod has said, which is nothing before it runs."""
        try:
            with _answers(self.namespace, f"the log of {pod}"):
                answer = self._core.read_namespaced_pod_log(
                    pod,
                    self.namespace,
                    container=CONTAINER,
                    timestamps=True,
                    _preload_content=False,
                    _request_timeout=ANSWER_S,
                )
                return bytes(answer.data).decode(errors="replace")
        except (Missing, UsageError):
            return ""


def open_cluster(options: KubernetesOptions) -> Cluster:
    """Return the cluster of a kubeconfig, or the one that this process is in.

    Raises:
        UsageError: neither is here, or the context is not known.
    """
    file, context = options.kubeconfig, options.context
    try:
        api = _loading.new_client_from_config(config_file=file, context=context)
        context, namespace = _chosen(file, context)
    except (config.ConfigException, OSError, yaml.YAMLError) as exc:
        if file is not None or context is not None:
            raise UsageError(
                f"The kubeconfig does not lead to a cluster: {exc}. Give another "
                "kubeconfig=FILE or context=NAME."
            ) from exc
        api, namespace = _own_cluster(exc)
    return Cluster(api, options.namespace or namespace, context)


def _chosen(file: str | None, context: str | None) -> tuple[str, str]:
    """Return the name of the context, and its namespace."""
    all_, active = _loading.list_kube_config_contexts(config_file=file)
    chosen = next((each for each in all_ if each["name"] == context), active)
    return str(chosen["name"]), str(chosen["context"].get("namespace") or "default")


def _own_cluster(error: Exception) -> tuple[client.ApiClient, str]:
    known = client.Configuration()
    try:
        _loading.load_incluster_config(client_configuration=known)
        return client.ApiClient(known), OWN_NAMESPACE.read_text().strip()
    except (config.ConfigException, OSError):
        raise UsageError(
            f"No credentials of a cluster are here: {error} Log in to one so that "
            "kubectl works, or give kubeconfig=FILE."
        ) from error


@contextmanager
def _answers(namespace: str, what: str) -> Iterator[None]:
    """Tell in our words what a cluster answers.

    Raises:
        Missing: there is no such object.
        UsageError, Refused, Unreachable: as `base` has them.
    """
    try:
        yield
    except client.ApiException as exc:
        _raise(exc, namespace, what)
    except urllib3.exceptions.HTTPError as exc:
        raise Unreachable(f"The cluster does not answer: {exc}.") from exc


def _raise(exc: client.ApiException, namespace: str, what: str) -> None:
    status, said = exc.status or 0, _said(exc)
    if status == 404 and "namespaces" not in said:
        raise Missing(what) from exc
    if status in (401, 403):
        raise Refused(
            f"The cluster does not let this user have {what} in {namespace}: {said}"
        ) from exc
    if status == 409:
        raise UsageError(
            f"{what} is in {namespace} already. Launch under another name."
        ) from exc
    if status in (429, 0) or status >= 500:
        raise Unreachable(f"The cluster failed with {status}: {said}") from exc
    raise UsageError(f"The cluster does not take {what}: {said}") from exc


def _said(exc: client.ApiException) -> str:
    try:
        return str(json.loads(exc.body or "")["message"])[:MAX_TOLD]
    except (ValueError, LookupError, TypeError):
        return str(exc.reason or exc)[:MAX_TOLD]


CANCELLED = "atoll/cancelled"
"""The Job's annotation of the islands that were ended: their indexes."""


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
        return Report(index=index, name=name, state=State.LOST, reason=why)
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
        reason="" if state is State.FINISHED else _why(job, last)[:MAX_WHY],
        host=str(last.get("spec", {}).get("nodeName", "")),
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
    is_given_up = phase == "Failed" and _code(lives[-1]) in (
        EXIT_GIVEN_UP,
        EXIT_CANCELLED,
    )
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
        return Report(index=index, name=name, state=State.LOST, reason=why)
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
        reason="" if state is State.FINISHED else _why(jobset, told)[:MAX_WHY],
        host=" ".join(sorted(nodes)),
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


Stamp = tuple[float, int]
Line = tuple[Stamp, str]

FIRST: Stamp = (0.0, 0)
SECONDS = len("2026-11-17T06:00:00")


class PodLog:
    """The lines of one island."""

    def __init__(self, *, has_names: bool = False) -> None:
        self._has_names = has_names
        self._lines: list[str] = []
        self._last: dict[str, tuple[Stamp, int]] = {}

    def read(
        self, lives: Iterable[Sequence[Form]], said: Callable[[Form], list[str]]
    ) -> list[str]:
        """Return all lines, with those that its pods have said since.

        `said` returns the lines of a pod that there are, each behind its time.
        """
        for pods in lives:
            fresh = [self._fresh(pod, said(pod)) for pod in pods]
            merged = heapq.merge(*fresh, key=lambda line: line[0])
            self._lines += [text for _, text in merged]
        return self._lines

    def _fresh(self, pod: Form, lines: Sequence[str]) -> list[Line]:
        """Return what is not known of a pod's log yet."""
        name = str(pod["metadata"]["name"])
        last, num_known = self._last.get(name, (FIRST, 0))
        found = [each for each in _stamped(lines) if each[0] >= last]
        known = sum(stamp == last for stamp, _ in found)
        fresh = found[min(num_known, known) :]
        if found:
            last = found[-1][0]
            self._last[name] = last, sum(stamp == last for stamp, _ in found)
        prefix = f"pod {number_of(pod)}: " if self._has_names else ""
        return [(stamp, prefix + text) for stamp, text in fresh]


def _stamped(lines: Sequence[str]) -> Iterator[Line]:
    """Return lines by their time, which never goes back within a pod."""
    last = FIRST
    for line in lines:
        stamp, _, text = line.partition(" ")
        try:
            last = max(last, _stamp(stamp))
        except ValueError:
            text = line  # no pod has said it: the cluster does, in place of a log
        # A bar of progress goes back to the beginning of its line.
        yield from ((last, part) for part in text.splitlines() or [""])


def _stamp(text: str) -> Stamp:
    """Return a time of RFC 3339, by its seconds and nanoseconds."""
    seconds, rest = text[:SECONDS], text[SECONDS:]
    zone = rest.lstrip(".0123456789")
    fraction = rest[: len(rest) - len(zone)].lstrip(".")
    at = datetime.fromisoformat(seconds + zone)
    return at.timestamp(), int(fraction.ljust(9, "0"))
