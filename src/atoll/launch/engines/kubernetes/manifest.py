"""The objects that are submitted: an Indexed Job, its Secret and its Service.

Rule 1: the Job replaces a pod that was lost. A command that failed is restarted by the
leader in its pod, which has the restart policy and keeps one log.
Rule 2: a pod that was evicted or preempted costs no restart; one that its leader ended
on purpose is not replaced.
Rule 3: the Secret belongs to the Job, and is deleted with it.
Rule 4: a Service, by which islands reach a coordinator, has its name and its address
before the first pod is there, and keeps both: an early connection is refused and
retried.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from atoll.errors import UsageError
from atoll.launch import leader
from atoll.launch.base import GRACE_S, CoordinatorPlacement, LaunchOrder
from atoll.launch.bootstrap import bootstrap_argv
from atoll.launch.job_leader import EXIT_CANCELLED
from atoll.launch.spec import IslandSpec, Resources, in_engine

ENGINE = "kubernetes"
CONTAINER = "island"
"""The name of a pod's container; a cluster may add others beside it."""
INDEX = "JOB_COMPLETION_INDEX"
LAUNCH = "app.kubernetes.io/instance"
QUEUE = "kueue.x-k8s.io/queue-name"
MESSAGE = "/dev/termination-log"
NOT_STARTED = "atoll-cancelled"
"""The key of the Secret that says which islands are not to be started any more."""

SPARE_S = 5
"""Between the end of an island's grace and the cluster's own."""

# SIGTERM, whatever signal an image's STOPSIGNAL names, and only one of them: the
# cluster's own comes after the hook, when the first process is gone.
DRAIN = "kill -TERM 1; while kill -0 1 2>/dev/null; do sleep 0.2; done"


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """What `--option` takes."""

    kubeconfig: str | None = None
    """A file; the usual places without, and within a cluster its own account."""

    context: str | None = None
    """Of the kubeconfig; the current one without."""

    namespace: str | None = None
    """Where islands run; the context's without."""

    python: str = "python"
    """In the image."""

    service_account: str | None = None
    pull_secret: str | None = None
    """The Secret that fetches the image."""

    priority_class: str | None = None
    volumes: str = ""
    """Claims of persistent volumes and where they are: `data:/data,cache:/cache`."""

    node_selector: str = ""
    """Labels of nodes: `pool=spot,zone=a`."""

    accelerator_resource: str = "nvidia.com/gpu"
    """What counts accelerators."""

    accelerator_label: str = "nvidia.com/gpu.product"
    """The label of nodes that says which accelerator they have."""

    jobset: bool = False
    """Whether every island is a JobSet of several pods, as on a slice of TPUs."""

    hosts: int = 1
    """Pods of one island, if it is a JobSet."""

    exclusive_topology: str | None = None
    """The label of machines that a JobSet shares with no other, as of a slice."""

    queue: str | None = None
    """The queue of Kueue that admits it."""

    keep_s: int = 24 * 3600
    """How long what became of a launch is kept in the cluster after its end."""

    port: int = 4711
    """Of a coordinator that runs in the cluster."""


def manifest(order: LaunchOrder, options: KubernetesOptions) -> dict[str, Any]:
    """Return the Job of a launch.

    Raises:
        UsageError: a cluster cannot do what the spec asks for, by name.
    """
    gone_on_purpose = [leader.EXIT_GIVEN_UP, EXIT_CANCELLED]
    # Another pod of a coordinator would begin its run anew, unless it finds it.
    is_replaced = not order.is_coordinator or _is_on_volume(order, options)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": order.id, "labels": labels_of(order, options)},
        "spec": {
            "completionMode": "Indexed",
            "completions": order.num_islands,
            "parallelism": order.num_islands,
            "backoffLimitPerIndex": order.spec.restarts.max_restarts
            if is_replaced
            else 0,
            "maxFailedIndexes": order.num_islands,
            # Not before the life before it has left: two of one name would quarrel.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore" if is_replaced else "FailIndex",
                        "onPodConditions": [
                            {"type": "DisruptionTarget", "status": "True"}
                        ],
                    },
                    {"action": "FailIndex", "onExitCodes": ended(gone_on_purpose)},
                ]
            },
            "ttlSecondsAfterFinished": options.keep_s,
            "template": {
                "metadata": {"labels": labels_of(order)},
                "spec": pod(order, options, words=_words(order, options)),
            },
        },
    }


def _is_on_volume(order: LaunchOrder, options: KubernetesOptions) -> bool:
    """Return whether what a coordinator keeps outlives its pod."""
    kept = order.spec.directory
    return kept is not None and any(
        PurePosixPath(kept).is_relative_to(path) for path in _claims(options).values()
    )


def labels_of(
    order: LaunchOrder, options: KubernetesOptions | None = None
) -> dict[str, str]:
    """Return by which labels a launch is found; with options, admitted as well."""
    labels = {LAUNCH: order.id, "app.kubernetes.io/managed-by": "atoll"}
    if options is not None and options.queue is not None:
        labels[QUEUE] = options.queue
    return labels


def ended(codes: Sequence[int]) -> dict[str, Any]:
    """Return what a rule says of an island that ended with one of these codes."""
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def secret(order: LaunchOrder, owner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Secret that goes with its owner. It holds values: never shown."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": owner["metadata"]["name"],
            "labels": {LAUNCH: order.id},
            "ownerReferences": [owned_by(owner)],
        },
        "type": "Opaque",
        "stringData": {
            NOT_STARTED: "",
            **{name: value.reveal() for name, value in order.values.items()},
        },
    }


def owned_by(owner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reference by which something goes with its owner."""
    known = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": known["name"],
        "uid": known["uid"],
    }


def pod(
    order: LaunchOrder,
    options: KubernetesOptions,
    *,
    words: Sequence[str],
    holder: str | None = None,
) -> dict[str, Any]:
    """Return what an island runs in; `holder` is the Secret of its values."""
    spec = order.spec
    claims = _claims(options)
    form: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(GRACE_S) + SPARE_S,
        # An island asks nothing of the cluster.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [
            {
                **_container(spec, options, claims),
                # $(NAME) would be replaced by the cluster; $$ is a dollar.
                "command": [each.replace("$(", "$$(") for each in words],
                "env": _environment(order, holder or order.id),
            }
        ],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *(
                {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}}
                for i, claim in enumerate(claims)
            ),
        ],
    }
    if (limit_s := spec.resources.time_limit_s) is not None:
        form["activeDeadlineSeconds"] = math.ceil(limit_s)
    selector = _pairs(options.node_selector, "=", what="node_selector=LABEL=VALUE")
    if spec.resources.accelerator is not None:
        selector[options.accelerator_label] = spec.resources.accelerator
    if selector:
        form["nodeSelector"] = selector
    if options.service_account is not None:
        form["serviceAccountName"] = options.service_account
    if options.pull_secret is not None:
        form["imagePullSecrets"] = [{"name": options.pull_secret}]
    if options.priority_class is not None:
        form["priorityClassName"] = options.priority_class
    return form


def _container(
    spec: IslandSpec, options: KubernetesOptions, claims: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": _image(spec),
        "resources": _resources(spec.resources, options),
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", DRAIN]}}},
        "terminationMessagePath": MESSAGE,
        "volumeMounts": [
            # torch's loaders share batches there, and a container has 64 MiB.
            {"name": "shm", "mountPath": "/dev/shm"},
            *(
                {"name": f"claim-{i}", "mountPath": path}
                for i, path in enumerate(claims.values())
            ),
        ],
    }


def _image(spec: IslandSpec) -> str:
    if spec.requirements:
        raise UsageError(
            f"requirements={spec.requirements} are not installed in a cluster's pods. "
            "Give --image, with Python, Atoll and what the command needs in it."
        )
    if spec.image is None:
        raise UsageError(
            "Kubernetes runs islands in an image, and none is given. Give --image, "
            "with Python, Atoll and what the command needs in it."
        )
    return spec.image


def _words(order: LaunchOrder, options: KubernetesOptions) -> list[str]:
    spec, python = order.spec, options.python
    words = [python, "-m", leader.MODULE, "--name", spec.name, "--index-from", INDEX]
    words += ["--first", str(order.first)] if order.first else []
    words += ["--restarts", json.dumps(spec.restarts.to_dict()), "--message", MESSAGE]
    boot = bootstrap_argv(spec, index_from=INDEX, first=order.first, python=python)
    return [*words, "--", *boot]


def _environment(order: LaunchOrder, holder: str) -> list[dict[str, Any]]:
    spec = order.spec
    plain = [
        {"name": name, "value": value.replace("$(", "$$(")}
        for name, value in spec.environment.items()
    ]
    places = {name: (holder, name) for name in order.values}
    for name, named in in_engine(spec.secrets).items():
        theirs, _, key = named.partition("/")
        places[name] = (theirs, key or name)
    told = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": place, "key": key}}}
        for name, (place, key) in places.items()
    ]
    ended = {"name": holder, "key": NOT_STARTED}
    return [
        *plain,
        *told,
        {"name": leader.CANCELLED, "valueFrom": {"secretKeyRef": ended}},
    ]


def _resources(asked: Resources, options: KubernetesOptions) -> dict[str, Any]:
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if asked.cpus is not None:
        requests["cpu"] = f"{math.ceil(asked.cpus * 1000)}m"
    if asked.memory_bytes is not None:
        requests["memory"] = limits["memory"] = str(asked.memory_bytes)
    if asked.accelerators:
        limits[options.accelerator_resource] = str(asked.accelerators)
    return {"requests": requests, "limits": limits}


def _claims(options: KubernetesOptions) -> dict[str, str]:
    return _pairs(options.volumes, ":", what="volumes=CLAIM:/PATH")


def _pairs(text: str, sign: str, *, what: str) -> dict[str, str]:
    """Return pairs that an option lists."""
    found = {}
    for each in filter(None, text.split(",")):
        key, _, value = each.partition(sign)
        if not key or not value:
            raise UsageError(f"{each!r} is not how {ENGINE} is given {what}.")
        found[key] = value
    return found


def service(order: LaunchOrder, options: KubernetesOptions) -> dict[str, Any]:
    """Return the Service of a coordinator."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": order.id, "labels": labels_of(order)},
        "spec": {
            "selector": {LAUNCH: order.id},
            "ports": [
                {
                    "name": "https",
                    "port": options.port,
                    "targetPort": options.port,
                    "protocol": "TCP",
                }
            ],
        },
    }


def url(order: LaunchOrder, options: KubernetesOptions, namespace: str) -> str:
    """Return where every pod of the cluster finds a coordinator."""
    return f"https://{order.id}.{namespace}.svc:{options.port}"


def serving_of(
    read: KubernetesOptions, options: Mapping[str, str]
) -> CoordinatorPlacement:
    """Return how a coordinator runs in a cluster: as a Job, whatever its islands are.

    Who launches is taken to be outside, from where a Service has no name.
    """
    kept = {key: each for key, each in options.items() if key not in _OF_SLICES}
    return CoordinatorPlacement(is_in_sight=False, port=read.port, options=kept)


_OF_SLICES = ("jobset", "hosts", "exclusive_topology")
