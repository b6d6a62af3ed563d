"""Islands as the pods of an Indexed Job, or each as a JobSet.

Start reading at `KubernetesLauncher`, then `manifest`, `pods`, `cluster`, `logs` and
`jobsets`.

Kubernetes keeps what became of a launch: in the Job, its pods and an annotation of it.
So any terminal with the same permission finds it, and nothing but lines of logs is kept
here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from atoll.errors import UsageError
from atoll.launch.base import GRACE_S, Keep, Launcher, Order, Plan, Traits
from atoll.launch.engines.kubernetes.cluster import Cluster, Missing, open_cluster
from atoll.launch.engines.kubernetes.jobsets import SliceLauncher
from atoll.launch.engines.kubernetes.logs import Log
from atoll.launch.engines.kubernetes.manifest import (
    ENGINE,
    NOT_STARTED,
    SPARE_S,
    KubernetesOptions,
    manifest,
    owned_by,
    secret,
)
from atoll.launch.engines.kubernetes.pods import (
    CANCELLED,
    Form,
    cancelled,
    is_live,
    is_over,
    is_suspended,
    of_index,
    report,
    unfinished,
)
from atoll.launch.engines.kubernetes.services import service, serving_of, url
from atoll.launch.handle import Handle
from atoll.launch.options import read_options
from atoll.launch.states import Report


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
        self._logs: dict[tuple[str, int], Log] = {}

    @property
    def traits(self) -> Traits:
        serving = serving_of(self._read, self._options)
        return Traits(serving=serving)

    def plan(self, order: Order) -> Plan:
        data = manifest(order, self._read)
        data["metadata"]["namespace"] = self._cluster.namespace
        if not order.is_coordinator:
            return Plan(data, yaml.safe_dump(data, sort_keys=False))
        forms = [data, service(order, self._read)]
        forms[1]["metadata"]["namespace"] = self._cluster.namespace
        # Its islands come behind it, as one more document.
        text = yaml.safe_dump_all(forms, sort_keys=False) + "---\n"
        return Plan(forms, text, url(order, self._read, self._cluster.namespace))

    def launch(self, order: Order, *, keep: Keep) -> Handle:
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
        log = self._logs.setdefault((handle.id, index), Log())
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
        for pod in (
            each for index in going for each in self._lives(handle, index, pods)
        ):
            if is_live(pod):
                name = pod["metadata"]["name"]
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
