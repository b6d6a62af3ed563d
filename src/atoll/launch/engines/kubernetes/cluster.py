"""The calls to a cluster, by the official client, and what its answers mean."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.engines.kubernetes.manifest import LAUNCH, KubernetesOptions
from atoll.launch.engines.kubernetes.pods import CONTAINER, is_live

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
