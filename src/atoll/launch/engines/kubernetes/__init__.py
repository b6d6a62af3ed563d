"""Islands as the pods of an Indexed Job, or each as a JobSet.

Start reading at `KubernetesLauncher`, then `manifest` and `cluster`; then
`SliceLauncher`.

Kubernetes keeps the state of a launch: in the Job, its pods and an annotation of it. So
any terminal with the same permission finds it, and only lines of logs are kept here.

Islands that are several pods each, as on slices of TPUs, are a JobSet per island.
Rule 1: the pods of an island start and end together: if one fails, JobSet restarts all
of them together. So the leaders of several restart nothing, and each exits after the
pause that is due. A leader that is alone works as that of an Indexed Job.
Rule 2: if one pod is cancelled, the whole island ends and is not restarted; if one is
evicted, the island is restarted.
Rule 3: every island has its own JobSet and Secret, `ID-INDEX`, so one can end alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from atoll.errors import UsageError
from atoll.launch import base, leader
from atoll.launch.engines.kubernetes.cluster import (
    CANCELLED,
    Cluster,
    Form,
    Missing,
    PodLog,
    cancelled,
    is_live,
    is_over,
    is_suspended,
    number_of,
    of_index,
    report,
    set_report,
    unfinished,
)
from atoll.launch.engines.kubernetes.manifest import (
    ENGINE,
    MESSAGE,
    NOT_STARTED,
    SPARE_S,
    KubernetesOptions,
    ended,
    labels_of,
    manifest,
    owned_by,
    pod,
    secret,
    service,
    serving_of,
    url,
)
from atoll.launch.leader import EXIT_CANCELLED, EXIT_GIVEN_UP


def open_launcher(options: Mapping[str, str]) -> base.Launcher:
    """Return the launcher of a cluster that this user has credentials for."""
    read = base.read_options(KubernetesOptions, options, engine=ENGINE)
    cluster = Cluster(read)
    if read.jobset:
        return SliceLauncher(read, options, cluster)
    if read.hosts != 1:
        raise UsageError(
            f"hosts={read.hosts} is for islands of several pods. Add jobset=true."
        )
    return KubernetesLauncher(read, options, cluster)


class KubernetesLauncher:
    """Submits Jobs, and asks the cluster for all that it knows."""

    def __init__(
        self, read: KubernetesOptions, options: Mapping[str, str], cluster: Cluster
    ) -> None:
        self._read, self._options, self._cluster = read, dict(options), cluster
        self._logs: dict[tuple[str, int], PodLog] = {}

    @property
    def traits(self) -> base.Traits:
        serving = serving_of(self._read, self._options)
        return base.Traits(serving=serving)

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        data = manifest(order, self._read)
        namespace = self._cluster.planned_namespace
        data["metadata"]["namespace"] = namespace
        if not order.is_coordinator:
            return base.LaunchPlan(data, yaml.safe_dump(data, sort_keys=False))
        forms = [data, service(order, self._read)]
        forms[1]["metadata"]["namespace"] = namespace
        # The islands follow, as one more document.
        text = yaml.safe_dump_all(forms, sort_keys=False) + "---\n"
        return base.LaunchPlan(forms, text, url(order, self._read, namespace))

    def launch(self, order: base.LaunchOrder, *, keep: base.Keep) -> base.Handle:
        plan = self.plan(order)
        form, *services = plan.data if order.is_coordinator else [plan.data]
        handle = order.handle(
            ENGINE,
            {"uid": None},
            options={**self._options, **self._cluster.named},
            begun_at_s=time.time(),
            run=plan.url,
        )
        if self._cluster.read(order.id) is not None:
            # Before a handle is kept: the caller would cancel the other launch by it.
            raise UsageError(
                f"{order.id!r} is launched in {self._cluster.namespace} already. "
                "Launch under another name."
            )
        keep(handle)
        owner = self._cluster.create(form)
        handle = replace(handle, reference={"uid": owner["metadata"]["uid"]})
        keep(handle)
        for service_form in services:
            self._cluster.create_service(service_form, owned_by(owner))
        # Its pods wait for it, and it has an owner from its first moment.
        self._cluster.create_secret(secret(order, owner))
        return handle

    def poll(self, handle: base.Handle) -> tuple[base.Report, ...]:
        job = self._cluster.read(handle.id)
        pods = self._cluster.pods(handle.id) if job is not None else []
        return tuple(report(handle, index, job, pods) for index in handle.indexes)

    def logs(self, handle: base.Handle, index: int, *, after: int = 0) -> list[str]:
        pods = self._incarnations(handle, index, self._cluster.pods(handle.id))
        log = self._logs.setdefault((handle.id, index), PodLog())
        return log.read([[pod] for pod in pods], self._cluster.lines)[after:]

    def cancel(
        self,
        handle: base.Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = base.GRACE_S,
    ) -> None:
        job = self._cluster.read(handle.id)
        if job is None or is_over(job):
            return
        if indexes is None and is_suspended(job):
            # A deadline begins with its admission, which may come or not.
            self._cluster.delete(handle.id, kind="Job")
            return
        pods = self._cluster.pods(handle.id)
        wanted = handle.indexes if indexes is None else indexes
        unfinished_indexes = unfinished(handle, wanted, job, pods)
        try:
            self._end(
                handle,
                sorted(unfinished_indexes | cancelled(job)),
                is_all=indexes is None,
            )
        except Missing:
            return
        if indexes is not None:
            # A pod that the cluster kills is replaced; one that leaves, or that its
            # leader ends, is not.
            grace_s = max(grace_s, base.GRACE_S + SPARE_S)
        cancelled_pods = (
            pod_form
            for index in unfinished_indexes
            for pod_form in self._incarnations(handle, index, pods)
        )
        for pod_form in cancelled_pods:
            if is_live(pod_form):
                name = pod_form["metadata"]["name"]
                self._cluster.delete_pod(name, grace_s=math.ceil(grace_s))

    def _end(
        self, handle: base.Handle, indexes: Sequence[int], *, is_all: bool
    ) -> None:
        """Record which islands are cancelled, before the first pod gets SIGTERM."""
        cancelled_indexes = ",".join(str(index) for index in indexes)
        change: dict[str, Any] = {
            "metadata": {"annotations": {CANCELLED: cancelled_indexes}}
        }
        if is_all:
            # The Job then ends the remaining pods, and is kept like any finished Job.
            change["spec"] = {"activeDeadlineSeconds": 1}
        else:
            # A pending pod is still started, and ends immediately.
            self._cluster.patch_secret(handle.id, {NOT_STARTED: cancelled_indexes})
        self._cluster.patch(handle.id, change)

    def _incarnations(
        self, handle: base.Handle, index: int, pods: Sequence[Form]
    ) -> list[Form]:
        return of_index(pods, index - handle.first)


KIND = "JobSet"
ISLAND = "atoll/index"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
"""The label of a pod with the incarnation of its JobSet."""

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
MAX_POD = 63
"""Characters of a pod's name: the JobSet's name and a suffix like `POD_SUFFIX`."""

POD_SUFFIX = "-slice-0-000-xxxxx"


class SliceLauncher:
    """Submits a JobSet per island."""

    def __init__(
        self, read: KubernetesOptions, options: Mapping[str, str], cluster: Cluster
    ) -> None:
        if read.hosts < 1:
            raise UsageError(f"hosts={read.hosts}: an island has 1 pod or more.")
        self._read, self._options, self._cluster = read, dict(options), cluster
        self._logs: dict[tuple[str, int], PodLog] = {}

    @property
    def traits(self) -> base.Traits:
        return base.Traits(serving=serving_of(self._read, self._options))

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        forms = [slice_manifest(order, index, self._read) for index in order.indexes]
        for form in forms:
            form["metadata"]["namespace"] = self._cluster.planned_namespace
        return base.LaunchPlan(forms, yaml.safe_dump_all(forms, sort_keys=False))

    def launch(self, order: base.LaunchOrder, *, keep: base.Keep) -> base.Handle:
        forms = self.plan(order).data
        for form in forms:
            name = form["metadata"]["name"]
            if self._cluster.read(name, kind=KIND) is not None:
                raise UsageError(
                    f"{name!r} is launched in {self._cluster.namespace} already. "
                    "Launch under another name."
                )
        handle = order.handle(
            ENGINE,
            {},
            options={**self._options, **self._cluster.named},
            begun_at_s=time.time(),
        )
        keep(handle)
        for form in forms:
            self._cluster.create_secret(secret(order, self._cluster.create(form)))
        return handle

    def poll(self, handle: base.Handle) -> tuple[base.Report, ...]:
        pods = self._cluster.pods(handle.id)
        return tuple(
            set_report(handle, index, self._jobset(handle, index), _own(pods, index))
            for index in handle.indexes
        )

    def logs(self, handle: base.Handle, index: int, *, after: int = 0) -> list[str]:
        incarnations = _incarnations(_own(self._cluster.pods(handle.id), index))
        new = PodLog(has_names=self._read.hosts > 1)
        log = self._logs.setdefault((handle.id, index), new)
        return log.read(incarnations, self._cluster.lines)[after:]

    def cancel(
        self,
        handle: base.Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = base.GRACE_S,
    ) -> None:
        pods = self._cluster.pods(handle.id)
        wanted = handle.indexes if indexes is None else indexes
        for island in self.poll(handle):
            if island.index in wanted and not island.state.is_over:
                self._end(handle, island, _own(pods, island.index), grace_s)

    def _end(
        self,
        handle: base.Handle,
        report: base.Report,
        pods: Sequence[Form],
        grace_s: float,
    ) -> None:
        name = f"{handle.id}-{report.index}"
        if report.state is not base.State.RUNNING:
            # It has not joined the run, and has no leader to end it.
            self._cluster.delete(name, kind=KIND)
            return
        change = {"metadata": {"annotations": {CANCELLED: str(report.index)}}}
        try:
            self._cluster.patch(name, change, kind=KIND)
        except Missing:
            return
        # A pod that the cluster kills would be restarted.
        grace_s = max(grace_s, base.GRACE_S + SPARE_S)
        for pod_form in pods:
            pod_name = pod_form["metadata"]["name"]
            self._cluster.delete_pod(pod_name, grace_s=math.ceil(grace_s))

    def _jobset(self, handle: base.Handle, index: int) -> dict[str, Any] | None:
        return self._cluster.read(f"{handle.id}-{index}", kind=KIND)


def slice_manifest(
    order: base.LaunchOrder, index: int, options: KubernetesOptions
) -> dict[str, Any]:
    """Return the JobSet of one island."""
    name = f"{order.id}-{index}"
    if len(name + POD_SUFFIX) > MAX_POD:
        raise UsageError(
            f"{name!r} is too long for the names of a JobSet's pods. Give a --name "
            f"that is {len(name + POD_SUFFIX) - MAX_POD} characters shorter."
        )
    labels, topology = labels_of(order, options), options.exclusive_topology
    annotations = {} if topology is None else {EXCLUSIVE: topology}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": KIND,
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {
            "ttlSecondsAfterFinished": options.keep_s,
            "failurePolicy": {
                "maxRestarts": order.spec.restarts.max_restarts,
                "rules": [
                    {
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": "slice",
                    "replicas": 1,
                    "template": _slice(order, index, options),
                }
            ],
        },
    }


def _slice(
    order: base.LaunchOrder, index: int, options: KubernetesOptions
) -> dict[str, Any]:
    """Return the template of the Job that has an island's pods."""
    evicted = {"type": "DisruptionTarget", "status": "True"}
    gone_on_purpose = (
        [EXIT_CANCELLED] if options.hosts > 1 else [EXIT_GIVEN_UP, EXIT_CANCELLED]
    )
    return {
        "spec": {
            "completionMode": "Indexed",
            "completions": options.hosts,
            "parallelism": options.hosts,
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Count", "onPodConditions": [evicted]},
                    {"action": "FailJob", "onExitCodes": ended(gone_on_purpose)},
                ]
            },
            "template": {
                "metadata": {"labels": {**labels_of(order), ISLAND: str(index)}},
                "spec": _pod(order, index, options),
            },
        }
    }


def _pod(
    order: base.LaunchOrder, index: int, options: KubernetesOptions
) -> dict[str, Any]:
    argv = leader.leader_argv(
        order.spec,
        index,
        message=MESSAGE,
        is_once=options.hosts > 1,
        python=options.python,
    )
    form = pod(order, options, argv=argv, holder=f"{order.id}-{index}")
    if options.hosts > 1:
        attempt = {"fieldPath": f"metadata.labels['{ATTEMPT}']"}
        variable = {"name": leader.NUM_BEFORE, "valueFrom": {"fieldRef": attempt}}
        form["containers"][0]["env"].append(variable)
    return form


def _own(pods: Sequence[Form], index: int) -> list[Form]:
    """Return the pods of one island, oldest first."""
    return [
        pod_form
        for pod_form in pods
        if pod_form["metadata"]["labels"].get(ISLAND) == str(index)
    ]


def _incarnations(pods: Sequence[Form]) -> list[list[Form]]:
    """Return an island's pods by incarnation, each list in order of index."""
    attempts: dict[int, list[Form]] = {}
    for pod_form in pods:
        label = str(pod_form["metadata"]["labels"].get(ATTEMPT, ""))
        attempts.setdefault(int(label) if label.isdecimal() else 0, []).append(pod_form)
    return [sorted(attempts[attempt], key=_number) for attempt in sorted(attempts)]


def _number(pod: Form) -> int:
    label = number_of(pod)
    return int(label) if label.isdecimal() else 0
