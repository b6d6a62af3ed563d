"""Islands as the pods of an Indexed Job, or each as a JobSet.

Start reading at `KubernetesLauncher`, then `manifest` and `cluster`; then
`SliceLauncher`.

Kubernetes keeps the state of a launch: in the Job, its pods and an annotation of it. So
any terminal with the same permission finds it, and only lines of logs are kept here.

Islands that are several pods each, as on slices of TPUs, are a JobSet per island.
Rule 1: the pods of an island start and end together: if one fails, JobSet restarts all
of them at once. So the leaders of several restart nothing, and each exits after the
pause that is due. A leader that is alone works as that of an Indexed Job.
Rule 2: one pod that was asked to end ends the whole island, and it is not restarted; an
evicted one is.
Rule 3: every island has its own JobSet and Secret, `ID-INDEX`, so one can end alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from atoll.errors import UsageError
from atoll.launch import leader
from atoll.launch.base import (
    GRACE_S,
    Handle,
    Keep,
    Launcher,
    LaunchOrder,
    LaunchPlan,
    Report,
    State,
    Traits,
    read_options,
)
from atoll.launch.bootstrap import bootstrap_argv
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
    open_cluster,
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
from atoll.launch.job_leader import EXIT_CANCELLED
from atoll.launch.leader import EXIT_GIVEN_UP


def open_launcher(options: Mapping[str, str]) -> Launcher:
    """Return the launcher of a cluster that this user has credentials for."""
    read = read_options(KubernetesOptions, options, engine=ENGINE)
    cluster = open_cluster(read)
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
    def traits(self) -> Traits:
        serving = serving_of(self._read, self._options)
        return Traits(serving=serving)

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        data = manifest(order, self._read)
        data["metadata"]["namespace"] = self._cluster.namespace
        if not order.is_coordinator:
            return LaunchPlan(data, yaml.safe_dump(data, sort_keys=False))
        forms = [data, service(order, self._read)]
        forms[1]["metadata"]["namespace"] = self._cluster.namespace
        # Its islands come behind it, as one more document.
        text = yaml.safe_dump_all(forms, sort_keys=False) + "---\n"
        return LaunchPlan(forms, text, url(order, self._read, self._cluster.namespace))

    def launch(self, order: LaunchOrder, *, keep: Keep) -> Handle:
        plan = self.plan(order)
        form, *more = plan.data if order.is_coordinator else [plan.data]
        handle = order.handle(
            ENGINE,
            {"uid": None},
            options={**self._options, **self._cluster.named},
            begun_at_s=time.time(),
            run=plan.url,
        )
        if self._cluster.read(order.id) is not None:
            # Before anything is kept: whoever is refused would cancel by it.
            raise UsageError(
                f"{order.id!r} is launched in {self._cluster.namespace} already. "
                "Launch under another name."
            )
        keep(handle)
        owner = self._cluster.create(form)
        handle = replace(handle, reference={"uid": owner["metadata"]["uid"]})
        keep(handle)
        for each in more:
            self._cluster.create_service(each, owned_by(owner))
        # Its pods wait for it, and it has an owner from its first moment.
        self._cluster.create_secret(secret(order, owner))
        return handle

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        found = self._cluster.read(handle.id)
        pods = self._cluster.pods(handle.id) if found is not None else []
        return tuple(report(handle, index, found, pods) for index in handle.indexes)

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        lives = self._lives(handle, index, self._cluster.pods(handle.id))
        log = self._logs.setdefault((handle.id, index), PodLog())
        return log.read([[each] for each in lives], self._cluster.lines)[after:]

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        found = self._cluster.read(handle.id)
        if found is None or is_over(found):
            return
        if indexes is None and is_suspended(found):
            # A deadline begins with its admission, which may come or not.
            self._cluster.delete(handle.id, kind="Job")
            return
        pods = self._cluster.pods(handle.id)
        wanted = handle.indexes if indexes is None else indexes
        going = unfinished(handle, wanted, found, pods)
        try:
            self._end(handle, sorted(going | cancelled(found)), is_all=indexes is None)
        except Missing:
            return
        if indexes is not None:
            # Who is killed by the cluster is replaced; who leaves, or is ended by its
            # leader, is not.
            grace_s = max(grace_s, GRACE_S + SPARE_S)
        ending = (each for index in going for each in self._lives(handle, index, pods))
        for each in ending:
            if is_live(each):
                name = each["metadata"]["name"]
                self._cluster.delete_pod(name, grace_s=math.ceil(grace_s))

    def _end(self, handle: Handle, indexes: Sequence[int], *, is_all: bool) -> None:
        """Write down who is to go, before the first pod is told."""
        known = ",".join(str(each) for each in indexes)
        change: dict[str, Any] = {"metadata": {"annotations": {CANCELLED: known}}}
        if is_all:
            # The Job then ends what is left, and is kept as any that is over.
            change["spec"] = {"activeDeadlineSeconds": 1}
        else:
            # Who has no place yet is started all the same, and ends at once.
            self._cluster.patch_secret(handle.id, {NOT_STARTED: known})
        self._cluster.patch(handle.id, change)

    def _lives(self, handle: Handle, index: int, pods: Sequence[Form]) -> list[Form]:
        return of_index(pods, index - handle.first)


KIND = "JobSet"
ISLAND = "atoll/index"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
"""The label of a pod that says which life of its JobSet it is of."""

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
MAX_POD = 63
"""Characters of a pod's name, which is the JobSet's and this behind it."""

BEHIND = "-slice-0-000-xxxxx"


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
    def traits(self) -> Traits:
        return Traits(serving=serving_of(self._read, self._options))

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        forms = [slice_manifest(order, index, self._read) for index in order.indexes]
        for form in forms:
            form["metadata"]["namespace"] = self._cluster.namespace
        return LaunchPlan(forms, yaml.safe_dump_all(forms, sort_keys=False))

    def launch(self, order: LaunchOrder, *, keep: Keep) -> Handle:
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

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        pods = self._cluster.pods(handle.id)
        return tuple(
            set_report(handle, index, self._found(handle, index), _own(pods, index))
            for index in handle.indexes
        )

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        lives = _lives(_own(self._cluster.pods(handle.id), index))
        new = PodLog(has_names=self._read.hosts > 1)
        log = self._logs.setdefault((handle.id, index), new)
        return log.read(lives, self._cluster.lines)[after:]

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        pods = self._cluster.pods(handle.id)
        wanted = handle.indexes if indexes is None else indexes
        for each in self.poll(handle):
            if each.index in wanted and not each.state.is_over:
                self._end(handle, each, _own(pods, each.index), grace_s)

    def _end(
        self, handle: Handle, report: Report, pods: Sequence[Form], grace_s: float
    ) -> None:
        name = f"{handle.id}-{report.index}"
        if report.state is not State.RUNNING:
            # It has nothing to leave, and no leader that could end it on purpose.
            self._cluster.delete(name, kind=KIND)
            return
        change = {"metadata": {"annotations": {CANCELLED: str(report.index)}}}
        try:
            self._cluster.patch(name, change, kind=KIND)
        except Missing:
            return
        # Who is killed by the cluster would be started again.
        grace_s = max(grace_s, GRACE_S + SPARE_S)
        for each in pods:
            named = each["metadata"]["name"]
            self._cluster.delete_pod(named, grace_s=math.ceil(grace_s))

    def _found(self, handle: Handle, index: int) -> dict[str, Any] | None:
        return self._cluster.read(f"{handle.id}-{index}", kind=KIND)


def slice_manifest(
    order: LaunchOrder, index: int, options: KubernetesOptions
) -> dict[str, Any]:
    """Return the JobSet of one island."""
    name = f"{order.id}-{index}"
    if len(name + BEHIND) > MAX_POD:
        raise UsageError(
            f"{name!r} is too long for the names of a JobSet's pods. Give a --name "
            f"that is {len(name + BEHIND) - MAX_POD} characters shorter."
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
    order: LaunchOrder, index: int, options: KubernetesOptions
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


def _pod(order: LaunchOrder, index: int, options: KubernetesOptions) -> dict[str, Any]:
    words, holder = _words(order, index, options), f"{order.id}-{index}"
    form = pod(order, options, words=words, holder=holder)
    if options.hosts > 1:
        lives = {"fieldPath": f"metadata.labels['{ATTEMPT}']"}
        told = {"name": leader.NUM_BEFORE, "valueFrom": {"fieldRef": lives}}
        form["containers"][0]["env"].append(told)
    return form


def _words(order: LaunchOrder, index: int, options: KubernetesOptions) -> list[str]:
    spec, python = order.spec, options.python
    words = [python, "-m", leader.MODULE, "--name", spec.name, "--index", str(index)]
    words += ["--restarts", json.dumps(spec.restarts.to_dict()), "--message", MESSAGE]
    words += ["--once"] if options.hosts > 1 else []
    return [*words, "--", *bootstrap_argv(spec, index=index, python=python)]


def _own(pods: Sequence[Form], index: int) -> list[Form]:
    """Return the pods of one island, oldest first."""
    return [
        each for each in pods if each["metadata"]["labels"].get(ISLAND) == str(index)
    ]


def _lives(pods: Sequence[Form]) -> list[list[Form]]:
    """Return an island's pods by its lives; those of a life are in order of index."""
    attempts: dict[int, list[Form]] = {}
    for each in pods:
        said = str(each["metadata"]["labels"].get(ATTEMPT, ""))
        attempts.setdefault(int(said) if said.isdecimal() else 0, []).append(each)
    return [sorted(attempts[it], key=_number) for it in sorted(attempts)]


def _number(pod: Form) -> int:
    said = number_of(pod)
    return int(said) if said.isdecimal() else 0
