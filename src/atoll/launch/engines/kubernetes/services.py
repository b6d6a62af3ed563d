"""How islands reach a coordinator in their cluster: a Service of its Job.

A Service has its name and its address before the first pod is there, and keeps both
whatever becomes of it: who calls too early is refused, and calls again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.launch.base import Order, Serving
from atoll.launch.engines.kubernetes.manifest import (
    LAUNCH,
    KubernetesOptions,
    labels_of,
)


def service(order: Order, options: KubernetesOptions) -> dict[str, Any]:
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


def url(order: Order, options: KubernetesOptions, namespace: str) -> str:
    """Return where every pod of the cluster finds a coordinator."""
    return f"https://{order.id}.{namespace}.svc:{options.port}"


def serving_of(read: KubernetesOptions, options: Mapping[str, str]) -> Serving:
    """Return how a coordinator runs in a cluster: as a Job, whatever its islands are.

    Who launches is taken to be outside, from where a Service has no name.
    """
    kept = {key: each for key, each in options.items() if key not in _OF_SLICES}
    return Serving(is_in_sight=False, port=read.port, options=kept)


_OF_SLICES = ("jobset", "hosts", "exclusive_topology")
