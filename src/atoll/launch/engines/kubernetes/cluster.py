"""The calls to a cluster, by the official client, and the meaning of its responses.

Three parts: `Cluster` has the calls, `report` and `set_report` turn a Job and its pods
into reports of islands, and `PodLog` joins the logs of an island's pods into one, which
only grows. A cluster forgets: a log is deleted with its pod, and its older part when
the node rotates it. Readers count lines. So a launcher keeps the lines that it has
read.

Rule 1: starts are in their order, and the pods of one start are merged by the cluster's
time of each line; a line that is read later comes later, even with an earlier time.
Rule 2: where an island is several pods, every line names its pod.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

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
from atoll.launch.leader import EXIT_CANCELLED, EXIT_GIVEN_UP

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
ANSWER_S = 60.0
KINDS = {
    "Job": ("batch", "v1", "jobs"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
}
"""Group, version and path of the submitted objects."""

_loading: Any = config  # its functions are not annotated
MAX_MESSAGE = 300
"""Characters of a cluster's answer that are shown."""


class Missing(Exception):
    """The cluster has no such object."""


class Cluster:
    """One namespace of a cluster, as this user may use it.

    Credentials are read at the first call: a plan needs none.
    """

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options

    @cached_property
    def _access(self) -> tuple[client.ApiClient, str, str | None]:
        """Return a client of the cluster, and the namespace and context it is for.

        Raises:
            UsageError: there are no credentials, or the context is unknown.
        """
        file, context = self._options.kubeconfig, self._options.context
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
        return api, self._options.namespace or namespace, context

    @property
    def _custom(self) -> Any:
        # In any version of the client, these take and return plain JSON.
        return client.CustomObjectsApi(self._access[0])

    @property
    def _core(self) -> Any:
        return client.CoreV1Api(self._access[0])

    @property
    def namespace(self) -> str:
        return self._access[1]

    @property
    def planned_namespace(self) -> str:
        """The namespace; that of an option, or the default one, without credentials."""
        try:
            return self.namespace
        except UsageError:
            if self._options.kubeconfig or self._options.context:
                raise
            return self._options.namespace or "default"

    @property
    def named(self) -> dict[str, str]:
        """The options that select this cluster, independent of the current context."""
        named = {"namespace": self.namespace, "context": self._access[2]}
        return {key: value for key, value in named.items() if value is not None}

    def create(self, form: Mapping[str, Any]) -> dict[str, Any]:
        """Submit an object, and return it as stored by the cluster."""
        kind, name = form["kind"], form["metadata"]["name"]
        create = self._custom.create_namespaced_custom_object
        try:
            return dict(self._object(create, kind, name, form))
        except Missing as exc:
            raise UsageError(
                f"The cluster knows no {kind} in {self.namespace}. Install its "
                "controller, or launch without it."
            ) from exc

    def read(self, name: str, *, kind: str = "Job") -> dict[str, Any] | None:
        get = self._custom.get_namespaced_custom_object
        try:
            return dict(self._object(get, kind, name, name))
        except Missing:
            return None

    def patch(self, name: str, change: Mapping[str, Any], *, kind: str = "Job") -> None:
        patch = self._custom.patch_namespaced_custom_object
        self._object(patch, kind, name, name, change)

    def delete(self, name: str, *, kind: str) -> None:
        delete = self._custom.delete_namespaced_custom_object
        with suppress(Missing):
            self._object(delete, kind, name, name, propagation_policy="Background")

    def create_secret(self, form: Mapping[str, Any]) -> None:
        subject = f"the Secret {form['metadata']['name']}"
        self._call(subject, self._core.create_namespaced_secret, self.namespace, form)

    def create_service(self, form: Mapping[str, Any], owner: Mapping[str, Any]) -> None:
        """Create a Service that goes with its owner."""
        owned = {**form["metadata"], "ownerReferences": [dict(owner)]}
        create = self._core.create_namespaced_service
        subject, form = f"the Service {owned['name']}", {**form, "metadata": owned}
        self._call(subject, create, self.namespace, form)

    def patch_secret(self, name: str, texts: Mapping[str, str]) -> None:
        patch, change = self._core.patch_namespaced_secret, {"stringData": dict(texts)}
        self._call(f"the Secret {name}", patch, name, self.namespace, change)

    def pods(self, launch: str) -> list[dict[str, Any]]:
        """Return the pods of a launch, oldest first."""
        answer = self._bytes(
            f"the pods of {launch}",
            self._core.list_namespaced_pod,
            self.namespace,
            label_selector=f"{LAUNCH}={launch}",
        )
        pods: list[dict[str, Any]] = json.loads(answer)["items"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def delete_pod(self, name: str, *, grace_s: int) -> None:
        with suppress(Missing):
            self._bytes(
                f"the pod {name}",
                self._core.delete_namespaced_pod,
                name,
                self.namespace,
                grace_period_seconds=grace_s,
            )

    def lines(self, pod: Mapping[str, Any]) -> list[str]:
        """Return the log lines of a pod, without an incomplete last one.

        Each begins with the cluster's time. There are none before it runs.
        """
        name = pod["metadata"]["name"]
        try:
            log = self._bytes(
                f"the log of {name}",
                self._core.read_namespaced_pod_log,
                name,
                self.namespace,
                container=CONTAINER,
                timestamps=True,
            )
        except (Missing, UsageError):
            log = b""
        *complete, rest = log.decode(errors="replace").split("\n")
        return complete if is_live(pod) or not rest else [*complete, rest]

    def _object(
        self, method: Any, kind: str, name: str, *arguments: Any, **options: Any
    ) -> Any:
        """Call a method of custom objects, for one of `KINDS`."""
        group, version, plural = KINDS[kind]
        of_kind = (group, version, self.namespace, plural)
        return self._call(f"{kind} {name}", method, *of_kind, *arguments, **options)

    def _bytes(
        self, subject: str, method: Any, *arguments: Any, **options: Any
    ) -> bytes:
        """Call a method, and return its response as the cluster has sent it."""

        def read(**options: Any) -> bytes:
            return bytes(method(*arguments, **options, _preload_content=False).data)

        content: bytes = self._call(subject, read, **options)
        return content

    def _call(self, subject: str, method: Any, *arguments: Any, **options: Any) -> Any:
        """Call a method, and translate the error responses of the cluster.

        Raises:
            Missing: there is no such object.
            UsageError, Refused, Unreachable: as described in `base`.
        """
        try:
            return method(*arguments, **options, _request_timeout=ANSWER_S)
        except client.ApiException as exc:
            _raise(exc, self.namespace, subject)
        except urllib3.exceptions.HTTPError as exc:
            raise Unreachable(f"The cluster does not answer: {exc}.") from exc


def _chosen(file: str | None, context: str | None) -> tuple[str, str]:
    """Return the name of the context, and its namespace."""
    all_, active = _loading.list_kube_config_contexts(config_file=file)
    chosen = next((entry for entry in all_ if entry["name"] == context), active)
    return str(chosen["name"]), str(chosen["context"].get("namespace") or "default")


def _own_cluster(error: Exception) -> tuple[client.ApiClient, str]:
    configuration = client.Configuration()
    try:
        _loading.load_incluster_config(client_configuration=configuration)
        return client.ApiClient(configuration), OWN_NAMESPACE.read_text().strip()
    except (config.ConfigException, OSError):
        raise UsageError(
            f"There are no credentials of a cluster: {error} Log in to one so that "
            "kubectl works, or give kubeconfig=FILE."
        ) from error


def _raise(exc: client.ApiException, namespace: str, subject: str) -> NoReturn:
    status, message = exc.status or 0, _error_message(exc)
    if status == 404 and "namespaces" not in message:
        raise Missing(subject) from exc
    if status in (401, 403):
        raise Refused(
            f"The cluster refuses this user {subject} in {namespace}: {message}"
        ) from exc
    if status == 409:
        raise UsageError(
            f"{subject} is in {namespace} already. Launch under another name."
        ) from exc
    if status in (429, 0) or status >= 500:
        raise Unreachable(f"The cluster failed with {status}: {message}") from exc
    raise UsageError(f"The cluster does not take {subject}: {message}") from exc


def _error_message(exc: client.ApiException) -> str:
    try:
        return str(json.loads(exc.body or "")["message"])[:MAX_MESSAGE]
    except (ValueError, LookupError, TypeError):
        return str(exc.reason or exc)[:MAX_MESSAGE]


CANCELLED = "atoll/cancelled"
"""The Job's annotation of the islands that were ended: their indexes."""


INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
MAX_REASON = 200

Form = Mapping[str, Any]


def of_index(pods: Sequence[Form], number: int) -> list[Form]:
    """Return the pods of one index, one per incarnation, oldest first."""
    return [pod for pod in pods if number_of(pod) == str(number)]


def number_of(pod: Form) -> str:
    """Return the index that its Job has given to a pod."""
    return _annotations(pod).get(INDEX, "")


def cancelled(job: Form) -> set[int]:
    """Return the indexes of the cancelled islands."""
    text = _annotations(job).get(CANCELLED, "")
    return {int(part) for part in text.split(",") if part.isdecimal()}


def indexes(text: str | None) -> set[int]:
    """Return the numbers of a list such as `0-2,5`."""
    numbers: set[int] = set()
    for part in filter(None, (text or "").split(",")):
        low, _, high = part.partition("-")
        numbers |= set(range(int(low), int(high or low) + 1))
    return numbers


def report(
    handle: Handle, index: int, job: Form | None, pods: Sequence[Form]
) -> Report:
    """Return the report of an island that is an index of a Job."""
    name = handle.island(index)
    if job is None:
        reason = "the cluster no longer has its Job"
        return Report(index=index, name=name, state=State.LOST, reason=reason)
    incarnations = of_index(pods, index - handle.first)
    ended = [_message(pod) for pod in incarnations]
    is_ended = index in cancelled(job)
    state = _state(job, incarnations, index - handle.first, is_ended=is_ended)
    last = incarnations[-1] if incarnations else {}
    return Report(
        index=index,
        name=name,
        state=state,
        restarts=_failures(incarnations)
        + sum(message.get("restarts") or 0 for message in ended),
        exit_code=_last_exit_code(incarnations),
        reason="" if state is State.FINISHED else _reason(job, last)[:MAX_REASON],
        host=str(last.get("spec", {}).get("nodeName", "")),
    )


def is_live(pod: Form) -> bool:
    """Return whether a pod has not ended: it is pending, runs, or is terminating."""
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def is_over(job: Form) -> bool:
    """Return whether a Job is over."""
    return any(_condition(job, kind) is not None for kind in ("Complete", "Failed"))


def is_suspended(job: Form) -> bool:
    """Return whether a Job waits to be admitted, as by Kueue."""
    return bool(job.get("spec", {}).get("suspend"))


def _state(
    job: Form, incarnations: Sequence[Form], number: int, *, is_ended: bool
) -> State:
    status = job.get("status", {})
    phase = incarnations[-1]["status"].get("phase") if incarnations else None
    if phase == "Running":
        return State.RUNNING
    if is_ended:
        return State.CANCELLED
    if number in indexes(status.get("completedIndexes")) or phase == "Succeeded":
        return State.FINISHED
    is_given_up = phase == "Failed" and _code(incarnations[-1]) in (
        EXIT_GIVEN_UP,
        EXIT_CANCELLED,
    )
    has_failed = _condition(job, "Failed") is not None
    if has_failed or number in indexes(status.get("failedIndexes")):
        return State.FAILED
    # An island that leaves because its Job is suspended is resumed with the Job.
    if is_given_up and not (_is_disrupted(incarnations[-1]) or is_suspended(job)):
        return State.FAILED
    return (
        State.RESTARTING
        if len(incarnations) > 1 or phase == "Failed"
        else State.PENDING
    )


def _condition(form: Form, kind: str) -> Form | None:
    for condition in form.get("status", {}).get("conditions") or ():
        if condition["type"] == kind and condition["status"] == "True":
            return dict(condition)
    return None


def _is_disrupted(pod: Form) -> bool:
    return _condition(pod, "DisruptionTarget") is not None


def _failures(incarnations: Sequence[Form]) -> int:
    """Return how many pods came before the last, seen or counted by the Job."""
    counted = _annotations(incarnations[-1]).get(FAILURES, "0") if incarnations else "0"
    return max(len(incarnations) - 1, int(counted) if counted.isdecimal() else 0, 0)


def _last_exit_code(incarnations: Sequence[Form]) -> int | None:
    codes = (_exit_code(pod) for pod in reversed(incarnations))
    return next((code for code in codes if code is not None), None)


def _exit_code(pod: Form) -> int | None:
    code: int | None = _message(pod).get("exit_code", _code(pod))
    return code


def _code(pod: Form) -> int | None:
    code = _container(pod).get("terminated", {}).get("exitCode")
    return code if isinstance(code, int) else None


def _container(pod: Form) -> Form:
    """Return the state of the container that an island is in."""
    for container in pod.get("status", {}).get("containerStatuses") or ():
        if container.get("name") == CONTAINER:
            return dict(container.get("state") or {})
    return {}


def _message(pod: Form) -> dict[str, Any]:
    """Return a leader's termination message; an image may have written another."""
    try:
        message = json.loads(_container(pod).get("terminated", {}).get("message") or "")
        numbers = {key: message[key] for key in ("exit_code", "restarts")}
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    if not all(number is None or type(number) is int for number in numbers.values()):
        return {}
    return {**numbers, "why": str(message.get("why", ""))}


def _reason(job: Form, pod: Form) -> str:
    """Return the reason for an island's state, as the cluster words it."""
    if (condition := _condition(pod, "DisruptionTarget")) is not None:
        return _condition_text(condition)
    if reason := _message(pod).get("why") or pod.get("status", {}).get("reason"):
        return str(reason)
    state = _container(pod)
    waiting = state.get("waiting") or {}
    if waiting:
        return _condition_text(waiting)
    ended = state.get("terminated") or {}
    if ended.get("exitCode"):
        return f"{ended.get('reason') or 'exit code'} {ended['exitCode']}"
    for entry in pod.get("status", {}).get("conditions") or ():
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            return _condition_text(entry)
    if pod:
        return ""
    if (condition := _condition(job, "Suspended")) is not None:
        return _condition_text(condition)
    failed = _condition(job, "Failed")
    return str(failed.get("message", "")) if failed else ""


def _condition_text(form: Form) -> str:
    return f"{form.get('reason', '')}: {form.get('message', '')}".strip(": ")


def _annotations(form: Form) -> dict[str, str]:
    return dict(form["metadata"].get("annotations") or {})


def unfinished(
    handle: Handle, wanted: Collection[int], job: Form, pods: Sequence[Form]
) -> set[int]:
    """Return which of these islands are not over."""
    reports = (report(handle, index, job, pods) for index in wanted)
    return {island.index for island in reports if not island.state.is_over}


def set_report(
    handle: Handle, index: int, jobset: Form | None, pods: Sequence[Form]
) -> Report:
    """Return the report of an island that is a JobSet, with its pods oldest first."""
    name = handle.island(index)
    if jobset is None:
        reason = "the cluster no longer has its JobSet"
        return Report(index=index, name=name, state=State.LOST, reason=reason)
    restarts = int(jobset.get("status", {}).get("restarts") or 0)
    led = max((_message(pod).get("restarts") or 0 for pod in pods), default=0)
    state = _state_of_set(jobset, pods, restarts)
    # A pod that failed has the reason; the others ended because of it.
    failed_pod = next((pod for pod in pods if _code(pod)), pods[-1] if pods else {})
    nodes = {str(pod["spec"].get("nodeName", "")) for pod in pods} - {""}
    is_finished = state is State.FINISHED
    reason = "" if is_finished else _reason(jobset, failed_pod)[:MAX_REASON]
    return Report(
        index=index,
        name=name,
        state=state,
        restarts=restarts + led,
        exit_code=_exit_code(failed_pod),
        reason=reason,
        host=" ".join(sorted(nodes)),
    )


def _state_of_set(jobset: Form, pods: Sequence[Form], restarts: int) -> State:
    if any(pod["status"].get("phase") == "Running" for pod in pods):
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
        self,
        incarnations: Iterable[Sequence[Form]],
        lines_of: Callable[[Form], list[str]],
    ) -> list[str]:
        """Return all lines, with the new ones of its pods.

        `lines_of` returns the lines of a pod, each after its time.
        """
        for pods in incarnations:
            fresh = [self._fresh(pod, lines_of(pod)) for pod in pods]
            merged = heapq.merge(*fresh, key=lambda line: line[0])
            self._lines += [text for _, text in merged]
        return self._lines

    def _fresh(self, pod: Form, lines: Sequence[str]) -> list[Line]:
        """Return the lines of a pod that have not been read yet."""
        name = str(pod["metadata"]["name"])
        last, num_known = self._last.get(name, (FIRST, 0))
        stamped = [line for line in _stamped(lines) if line[0] >= last]
        num_at_last = sum(stamp == last for stamp, _ in stamped)
        fresh = stamped[min(num_known, num_at_last) :]
        if stamped:
            last = stamped[-1][0]
            self._last[name] = last, sum(stamp == last for stamp, _ in stamped)
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
            text = line  # not of the pod: the cluster sent it instead of a log
        # A progress bar returns to the beginning of its line.
        yield from ((last, part) for part in text.splitlines() or [""])


def _stamp(text: str) -> Stamp:
    """Return a time of RFC 3339, by its seconds and nanoseconds."""
    seconds, rest = text[:SECONDS], text[SECONDS:]
    zone = rest.lstrip(".0123456789")
    fraction = rest[: len(rest) - len(zone)].lstrip(".")
    instant = datetime.fromisoformat(seconds + zone)
    return instant.timestamp(), int(fraction.ljust(9, "0"))
