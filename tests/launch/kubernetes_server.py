"""An API server on the loopback address, for the part of Kubernetes that we use.

It keeps Jobs, pods and Secrets, takes only what the official schemas take, and runs
every pod as a process (`kubernetes_pods`) by the rules of its Job (`kubernetes_jobs`).
A hook before a pod's end would speak to process 1 of its container: here it is the
server that sends SIGTERM.
"""

from __future__ import annotations

import copy
import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

from tests.launch.host_names import HostNames
from tests.launch.kubernetes_jobs import Job, JobSet, validate
from tests.launch.kubernetes_pods import Form, Pod, now

LOOK_S = 0.05
TOKEN = "a-token-of-a-cluster"
JOBS, CORE = "/apis/batch/v1/namespaces/", "/api/v1/namespaces/"
QUEUE = "kueue.x-k8s.io/queue-name"
SETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/"


class Denied(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubernetesServer:
    """One namespace of a cluster, with one node: this machine."""

    def __init__(self, directory: Path, *, namespace: str = "reef") -> None:
        self.directory, self.namespace = directory, namespace
        self.jobs: dict[str, Job] = {}
        self.jobsets: dict[str, JobSet] = {}
        self.has_jobsets = True
        self.secrets: dict[str, Form] = {}
        self.services: dict[str, Form] = {}
        self._names = HostNames(directory / "names")
        self.requests: list[tuple[str, str]] = []
        self.submitted: list[Form] = []
        self.adds_proxies = False
        """Whether another container is put beside that of every pod, and before it."""

        self.failing: int | None = None
        """The status of every answer, if set."""

        self.lock = threading.RLock()
        self._end = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(LOOK_S,)),
            threading.Thread(target=self._control),
        ]

    def kubeconfig(self, *, token: str = TOKEN) -> Path:
        """Return a file that leads here."""
        url = f"http://127.0.0.1:{self._http.server_address[1]}"
        form = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [
                {
                    "name": "here",
                    "context": {
                        "cluster": "c",
                        "user": "u",
                        "namespace": self.namespace,
                    },
                }
            ],
        }
        file = self.directory / f"config-{uuid.uuid4().hex[:8]}"
        file.write_text(yaml.safe_dump(form))
        return file

    def close(self) -> None:
        """Be a cluster that does not answer, without having been served."""
        self._http.server_close()

    @contextmanager
    def serving(self) -> Iterator[KubernetesServer]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._end.set()
            self._http.shutdown()
            for thread in self._threads:
                thread.join()
            self._http.server_close()
            for pod in self.pods():
                pod.kill()

    def pods(self) -> list[Pod]:
        return [pod for each in self._led() for pod in each.pods]

    def _led(self) -> list[Job | JobSet]:
        return [*self.jobs.values(), *self.jobsets.values()]

    def evict(self, name: str) -> None:
        """Drain a pod from its node, as whoever maintains a cluster does."""
        with self.lock:
            (pod,) = (each for each in self.pods() if each.name == name)
            pod.form["status"]["conditions"] = [
                {
                    "type": "DisruptionTarget",
                    "status": "True",
                    "reason": "EvictionByEvictionAPI",
                    "message": "Eviction API: evicting",
                }
            ]
            pod.delete(30.0)

    def answer(self, method: str, path: str, query: Form, body: Form | None) -> Any:
        """Return what is answered to a request."""
        self.requests.append((method, path))
        if self.failing is not None:
            raise Denied(self.failing, "it was told to")
        group = next(each for each in (JOBS, SETS, CORE) if path.startswith(each))
        namespace, kind, *rest = path.removeprefix(group).split("/")
        if namespace != self.namespace:
            raise Denied(403, f'{kind} is forbidden in the namespace "{namespace}"')
        name = rest[0] if rest else None
        if body is not None and method == "POST":
            validate(body)
            self.submitted.append(copy.deepcopy(body))
            if QUEUE in body["metadata"]["labels"]:
                body["spec"]["suspend"] = True  # as Kueue does, until it admits it
        if (group, kind) == (JOBS, "jobs"):
            return self._job(method, name, body)
        if group == SETS:
            return self._jobset(method, name, body)
        if kind == "secrets":
            return self._secret(method, name, body)
        if kind == "services":
            return self._service(body)
        return self._pod(method, rest, query)

    def _service(self, body: Form | None) -> Form:
        """Make a Service, which leads to pods of the Job with its labels."""
        assert body is not None
        name, selector = body["metadata"]["name"], body["spec"]["selector"]
        templates = [each.form["spec"]["template"] for each in self.jobs.values()]
        labels = [each["metadata"]["labels"] for each in templates]
        if any(selector.items() <= each.items() for each in labels):
            self._names.add(f"{name}.{self.namespace}.svc")
        self.services[name] = body
        return body

    def _job(self, method: str, name: str | None, body: Form | None) -> Form:
        if method == "POST":
            assert body is not None
            name = body["metadata"]["name"]
            if name in self.jobs:
                raise Denied(409, f'jobs.batch "{name}" already exists')
            body["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            self.jobs[name] = Job(body, self._new_pod)
            return body
        if name not in self.jobs:
            raise Denied(404, f'jobs.batch "{name}" not found')
        form = self.jobs[name].form
        if method == "PATCH":
            assert body is not None
            if body.get("spec", {}).keys() - {"activeDeadlineSeconds", "suspend"}:
                raise Denied(422, "field is immutable")
            _merge(form, body)
        elif method == "DELETE":
            for pod in self.jobs.pop(name).pods:
                pod.kill()
        return form

    def _jobset(self, method: str, name: str | None, body: Form | None) -> Form:
        if not self.has_jobsets:
            raise Denied(404, "the server could not find the requested resource")
        if method == "POST":
            assert body is not None
            body["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            self.jobsets[body["metadata"]["name"]] = JobSet(body, self._new_pod)
            return body
        if name is None or name not in self.jobsets:
            raise Denied(404, f'jobsets "{name}" not found')
        found = self.jobsets[name]
        if method == "PATCH":
            assert body is not None
            _merge(found.form, body)
        elif method == "DELETE":
            for pod in self.jobsets.pop(name).pods:
                pod.kill()
        return found.form

    def _secret(self, method: str, name: str | None, body: Form | None) -> Form:
        assert body is not None
        if method == "POST":
            self.secrets[body["metadata"]["name"]] = body
            return body
        if name is None or name not in self.secrets:
            raise Denied(404, f'secrets "{name}" not found')
        _merge(self.secrets[name], body)
        return self.secrets[name]

    def _pod(self, method: str, rest: list[str], query: Form) -> Any:
        if not rest:
            key, _, value = query["labelSelector"][0].partition("=")
            found = [each.form for each in self.pods()]
            return {
                "kind": "PodList",
                "apiVersion": "v1",
                "items": [it for it in found if it["metadata"]["labels"][key] == value],
            }
        pod = next((each for each in self.pods() if each.name == rest[0]), None)
        if pod is None:
            raise Denied(404, f'pods "{rest[0]}" not found')
        if method == "DELETE":
            pod.delete(float(query["gracePeriodSeconds"][0]))
            return pod.form
        if pod.has_proxy and "container" not in query:
            raise Denied(400, "a container name must be specified: a-proxy, island")
        has_times = query.get("timestamps", [""])[0].lower() == "true"
        if (said := pod.told_log(has_times=has_times)) is None:
            raise Denied(400, 'container "island" is waiting to start')
        return said

    def _new_pod(self, form: Form) -> Pod:
        directory = self.directory / form["metadata"]["name"]
        directory.mkdir()
        pod = Pod(form, directory, self._names.around)
        pod.has_proxy = self.adds_proxies
        return pod

    def _control(self) -> None:
        while not self._end.wait(LOOK_S):
            with self.lock:
                secrets = {
                    name: each["stringData"] for name, each in self.secrets.items()
                }
                for each in self._led():
                    each.look()
                    for pod in each.pods:
                        pod.look(secrets)


def _merge(form: Form, change: Form) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(form.get(key), dict):
            _merge(form[key], value)
        else:
            form[key] = value


def _handler(server: KubernetesServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 20.0

        def _serve(self) -> None:
            asked = urlsplit(self.path)
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            try:
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    raise Denied(401, "Unauthorized")
                with server.lock:
                    said = server.answer(
                        self.command, asked.path, parse_qs(asked.query), body
                    )
                    data = (
                        said if isinstance(said, bytes) else json.dumps(said).encode()
                    )
                self._send(201 if self.command == "POST" else 200, data)
            except Denied as exc:
                self._deny(exc.status, str(exc))
            except kubernetes_validate.ValidationError as exc:
                self._deny(422, str(exc))

        def _deny(self, status: int, message: str) -> None:
            told = {"kind": "Status", "message": message, "code": status}
            self._send(status, json.dumps(told).encode())

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            kind = "application/json" if data[:1] in b"{[" else "text/plain"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            return

    return Handler


def until(server: KubernetesServer, is_so: Any, *, wait_s: float = 60.0) -> None:
    """Return once something is so at the server."""
    end_s = time.monotonic() + wait_s
    while True:
        with server.lock:
            if is_so():
                return
        assert time.monotonic() < end_s, "it never came"
        time.sleep(LOOK_S)
