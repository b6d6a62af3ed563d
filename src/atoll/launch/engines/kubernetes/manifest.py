"""The objects that are submitted: an Indexed Job, its Secret and its Service.

Rule 1: the Job replaces a pod that was lost. A command that failed is restarted by the
leader in its pod, which has the restart policy and keeps one log.
Rule 2: a pod that was evicted or preempted costs no restart; one that its leader ended
on purpose is not replaced.
Rule 3: the Secret belongs to the Job, and is deleted with it.
Rule 4: a Service, by which islands reach a coordinator, has its name and its address
before the first pod exists, and keeps both: an early connection is refused and
retried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from atoll.errors import UsageError
from atoll.launch import leader
from atoll.launch.base import GRACE_S, CoordinatorPlacement, LaunchOrder
from atoll.launch.leader import EXIT_CANCELLED
from atoll.launch.spec import IslandSpec, Resources, in_engine

ENGINE = "kubernetes"
CONTAINER = "island"
"""The name of a pod's container; a cluster may add others beside it."""
INDEX = "JOB_COMPLETION_INDEX"
LAUNCH = "app.kubernetes.io/instance"
QUEUE = "kueue.x-k8s.io/queue-name"
MESSAGE = "/dev/termination-log"
NOT_STARTED = "atoll-cancelled"
"""The key of the Secret with the islands that are not to be started again."""

SPARE_S = 5
"""Between the end of an island's grace and the cluster's own."""

# SIGTERM, even if an image's STOPSIGNAL names another signal, and only once: the
# cluster's own comes after the hook, when the first process has ended.
DRAIN = "kill -TERM 1; while kill -0 1 2>/dev/null; do sleep 0.2; done"


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The options of `--option`."""

    kubeconfig: str | None = None
    """A file. Default: kubectl's, or within a cluster the service account."""

    context: str | None = None
    """A context of the kubeconfig. Default: the current one."""

    namespace: str | None = None
    """The namespace of the islands. Default: the context's."""

    python: str = "python"
    """The Python in the image."""

    service_account: str | None = None
    pull_secret: str | None = None
    """The Secret that fetches the image."""

    priority_class: str | None = None
    volumes: str = ""
    """Claims of persistent volumes and mount paths: `data:/data,cache:/cache`."""

    node_selector: str = ""
    """Labels of nodes: `pool=spot,zone=a`."""

    accelerator_resource: str = "nvidia.com/gpu"
    """The resource that counts accelerators."""

    accelerator_label: str = "nvidia.com/gpu.product"
    """The label of nodes with the model of their accelerator."""

    jobset: bool = False
    """Whether every island is a JobSet of several pods, as on a slice of TPUs."""

    hosts: int = 1
    """Pods of one island, if it is a JobSet."""

    exclusive_topology: str | None = None
    """The label of nodes that a JobSet shares with no other, such as a slice's."""

    queue: str | None = None
    """The queue of Kueue that admits it."""

    keep_s: int = 24 * 3600
    """How long the cluster keeps the objects of a launch after its end."""

    port: int = 4711
    """The port of a coordinator that runs in the cluster."""


def manifest(order: LaunchOrder, options: KubernetesOptions) -> dict[str, Any]:
    """Return the Job of a launch.

    Raises:
        UsageError: a cluster cannot fulfil a field of the spec, which is named.
    """
    gone_on_purpose = [leader.EXIT_GIVEN_UP, EXIT_CANCELLED]
    # A second pod of a coordinator would found the run again, without its directory.
    argv = leader.leader_argv(
        order.spec,
        index_from=INDEX,
        first=order.first,
        message=MESSAGE,
        python=options.python,
    )
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
            # Only after the earlier pod has left: two would fence each other out.
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
                "spec": pod(order, options, argv=argv),
            },
        },
    }


def _is_on_volume(order: LaunchOrder, options: KubernetesOptions) -> bool:
    """Return whether a coordinator's directory outlives its pod."""
    directory = order.spec.directory
    return directory is not None and any(
        PurePosixPath(directory).is_relative_to(path)
        for path in _claims(options).values()
    )


def labels_of(
    order: LaunchOrder, options: KubernetesOptions | None = None
) -> dict[str, str]:
    """Return the labels of a launch; with options, also that of its queue."""
    labels = {LAUNCH: order.id, "app.kubernetes.io/managed-by": "atoll"}
    if options is not None and options.queue is not None:
        labels[QUEUE] = options.queue
    return labels


def ended(codes: Sequence[int]) -> dict[str, Any]:
    """Return the condition of a rule for islands that ended with these codes."""
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def secret(order: LaunchOrder, owner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Secret, which is deleted with its owner. It has values: not shown."""
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
    """Return the reference with which an object is deleted with its owner."""
    metadata = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
    }


def pod(
    order: LaunchOrder,
    options: KubernetesOptions,
    *,
    argv: Sequence[str],
    holder: str | None = None,
) -> dict[str, Any]:
    """Return the pod of an island; `holder` is the Secret of its values."""
    spec = order.spec
    claims = _claims(options)
    form: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(GRACE_S) + SPARE_S,
        # An island does not use the cluster's API.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [
            {
                **_container(spec, options, claims),
                # $(NAME) would be replaced by the cluster; $$ is a dollar.
                "command": [argument.replace("$(", "$$(") for argument in argv],
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
    selector = _pairs(options.node_selector, "=", usage="node_selector=LABEL=VALUE")
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
            "Give --image, with Python, Atoll and the command's requirements in it."
        )
    if spec.image is None:
        raise UsageError(
            "Kubernetes runs islands in an image, and none is given. Give --image, "
            "with Python, Atoll and the command's requirements in it."
        )
    return spec.image


def _environment(order: LaunchOrder, holder: str) -> list[dict[str, Any]]:
    spec = order.spec
    plain = [
        {"name": name, "value": value.replace("$(", "$$(")}
        for name, value in spec.environment.items()
    ]
    sources = {name: (holder, name) for name in order.values}
    for name, named in in_engine(spec.secrets).items():
        secret_name, _, key = named.partition("/")
        sources[name] = (secret_name, key or name)
    variables = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name, "key": key}}}
        for name, (secret_name, key) in sources.items()
    ]
    ended = {"name": holder, "key": NOT_STARTED}
    return [
        *plain,
        *variables,
        {"name": leader.CANCELLED, "valueFrom": {"secretKeyRef": ended}},
    ]


def _resources(needs: Resources, options: KubernetesOptions) -> dict[str, Any]:
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if needs.cpus is not None:
        requests["cpu"] = f"{math.ceil(needs.cpus * 1000)}m"
    if needs.memory_bytes is not None:
        requests["memory"] = limits["memory"] = str(needs.memory_bytes)
    if needs.accelerators:
        limits[options.accelerator_resource] = str(needs.accelerators)
    return {"requests": requests, "limits": limits}


def _claims(options: KubernetesOptions) -> dict[str, str]:
    return _pairs(options.volumes, ":", usage="volumes=CLAIM:/PATH")


def _pairs(text: str, sign: str, *, usage: str) -> dict[str, str]:
    """Return the pairs of an option."""
    pairs = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition(sign)
        if not key or not value:
            raise UsageError(f"{pair!r} is not in the form {usage} of {ENGINE}.")
        pairs[key] = value
    return pairs


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
    """Return the URL at which every pod of the cluster reaches a coordinator."""
    return f"https://{order.id}.{namespace}.svc:{options.port}"


def serving_of(
    read: KubernetesOptions, options: Mapping[str, str]
) -> CoordinatorPlacement:
    """Return how a coordinator runs in a cluster: as a Job, also with JobSets.

    The launching process is assumed to be outside, where a Service has no name.
    """
    job_options = {
        key: value for key, value in options.items() if key not in _OF_SLICES
    }
    return CoordinatorPlacement(is_reachable=False, port=read.port, options=job_options)


_OF_SLICES = ("jobset", "hosts", "exclusive_topology")
