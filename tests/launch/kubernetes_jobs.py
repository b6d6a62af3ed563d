"""What a controller of Jobs does: a pod for each index, and how each one ended."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import kubernetes_validate

from tests.launch.kubernetes_pods import Form, Pod, now

INDEX = "batch.kubernetes.io/job-completion-index"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
FAILURES = "batch.kubernetes.io/job-index-failure-count"


class Job:
    """An Indexed Job: it goes by its manifest, and by nothing that we know."""

    def __init__(self, form: Form, make_pod: Callable[[Form], Pod]) -> None:
        self.form = form
        self._make_pod = make_pod
        self._numbers = itertools.count()
        self.pods: list[Pod] = []
        self._counted: set[str] = set()
        self._done: set[int] = set()
        self._failed: set[int] = set()
        self._failures: dict[int, int] = {}
        self._begun_at_s = time.monotonic()
        form["status"] = {"startTime": now()}

    @property
    def is_over(self) -> bool:
        kinds = {each["type"] for each in self.form["status"].get("conditions", ())}
        return bool(kinds & {"Complete", "Failed"})

    def look(self) -> None:
        """Do what is due."""
        if self.form["spec"].get("suspend") and not self.is_over:
            self._suspend()
            return
        for pod in self.pods:
            if pod.is_terminal and pod.name not in self._counted:
                self._counted.add(pod.name)
                self._count(pod)
        # Who was deleted is seen no more once it is counted.
        self.pods = [
            each
            for each in self.pods
            if not (each.is_terminal and "deletionTimestamp" in each.form["metadata"])
        ]
        if self.is_over:
            return
        if self._is_past_deadline():
            self._end_all()
            return
        missing = self._indexes() - self._done - self._failed - self._active()
        for index in sorted(missing):
            self.pods.append(self._new_pod(index))
        if self._indexes() <= self._done | self._failed:
            self._conclude("Failed" if self._failed else "Complete", "FailedIndexes")

    def _suspend(self) -> None:
        """Have no pods, and no clock; who goes because of it is not counted."""
        for pod in self.pods:
            self._counted.add(pod.name)
            pod.delete(pod.form["spec"]["terminationGracePeriodSeconds"])
        self.pods = [each for each in self.pods if not each.is_terminal]
        self._begun_at_s = time.monotonic()
        told = {"type": "Suspended", "status": "True", "reason": "JobSuspended"}
        told["message"] = "Job suspended"
        self.form["status"]["conditions"] = [told]

    def _count(self, pod: Pod) -> None:
        index = int(pod.form["metadata"]["annotations"][INDEX])
        if pod.form["status"]["phase"] == "Succeeded":
            self._done.add(index)
        elif (action := self._action(pod)) == "FailIndex":
            self._failed.add(index)
        elif action == "FailJob":
            self._conclude("Failed", "PodFailurePolicy")
        elif action != "Ignore":
            self._failures[index] = self._failures.get(index, 0) + 1
            self._limit(index)
        status = self.form["status"]
        status["completedIndexes"] = _listed(sorted(self._done))
        status["failedIndexes"] = _listed(sorted(self._failed))

    def _limit(self, index: int) -> None:
        spec = self.form["spec"]
        if "backoffLimitPerIndex" not in spec:
            if sum(self._failures.values()) > spec["backoffLimit"]:
                self._conclude("Failed", "BackoffLimitExceeded")
        elif self._failures[index] > spec["backoffLimitPerIndex"]:
            self._failed.add(index)

    def _action(self, pod: Pod) -> str:
        """Return what the first rule that fits says; rules do not see what is gone."""
        conditions = pod.form["status"].get("conditions", [])
        for rule in self.form["spec"]["podFailurePolicy"]["rules"]:
            kinds = {each["type"] for each in rule.get("onPodConditions", ())}
            codes = rule.get("onExitCodes", {})
            if kinds & {each["type"] for each in conditions}:
                return str(rule["action"])
            # Without a name, a rule is about every container; a proxy ends by SIGTERM.
            is_of_all = codes and "containerName" not in codes
            seen = {pod.exit_code, 143 if pod.has_proxy and is_of_all else None}
            if seen & set(codes.get("values", ())):
                return str(rule["action"])
        return "Count"

    def _is_past_deadline(self) -> bool:
        limit_s = self.form["spec"].get("activeDeadlineSeconds")
        return limit_s is not None and time.monotonic() - self._begun_at_s >= limit_s

    def _end_all(self) -> None:
        active = [each for each in self.pods if not each.is_terminal]
        for pod in active:
            if "deletionTimestamp" not in pod.form["metadata"]:
                pod.delete(pod.form["spec"]["terminationGracePeriodSeconds"])
        if not active:
            self._conclude("Failed", "DeadlineExceeded")

    def _conclude(self, kind: str, reason: str) -> None:
        if self.is_over:
            return
        ended: Form = {"type": kind, "status": "True", "lastTransitionTime": now()}
        if kind == "Failed":
            ended |= {"reason": reason, "message": f"Job has failed: {reason}"}
        self.form["status"]["conditions"] = [ended]

    def _indexes(self) -> set[int]:
        return set(range(self.form["spec"]["completions"]))

    def _active(self) -> set[int]:
        return {
            int(each.form["metadata"]["annotations"][INDEX])
            for each in self.pods
            if not each.is_terminal
        }

    def _new_pod(self, index: int) -> Pod:
        template: dict[str, Any] = self.form["spec"]["template"]
        spec = dict(template["spec"])
        container = dict(spec["containers"][0])
        told = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
        container["env"] = [*container["env"], told]
        spec["containers"] = [container]
        annotations = {
            INDEX: str(index),
            FAILURES: str(self._failures.get(index, 0)),
        }
        name = f"{self.form['metadata']['name']}-{index}-{next(self._numbers):05}"
        return self._make_pod(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "labels": dict(template["metadata"]["labels"]),
                    "annotations": annotations,
                    "creationTimestamp": now(),
                },
                "spec": spec,
            }
        )


class JobSet:
    """A JobSet of one Job: if that fails, all of it begins anew."""

    def __init__(self, form: Form, make_pod: Callable[[Form], Pod]) -> None:
        self.form, self._make_pod = form, make_pod
        form["status"] = {"restarts": 0}
        self._job = self._new_job()

    @property
    def pods(self) -> list[Pod]:
        return self._job.pods

    def look(self) -> None:
        """Do what is due."""
        if self.form["spec"].get("suspend"):
            told = {"type": "Suspended", "status": "True", "reason": "SuspendedJobs"}
            told["message"] = "jobset is suspended"
            self.form["status"]["conditions"] = [told]
            self._job.form["spec"]["suspend"] = True
        self._job.look()
        if not self._job.is_over or "conditions" in self.form["status"]:
            return
        (ended,) = self._job.form["status"]["conditions"]
        if ended["type"] == "Complete":
            self._conclude("Completed")
        elif self._is_for_good(ended["reason"]):
            self._conclude("Failed")
        elif not self._end_pods():
            self.form["status"]["restarts"] += 1
            self._job = self._new_job()

    def _is_for_good(self, reason: str) -> bool:
        policy = self.form["spec"]["failurePolicy"]
        told = [each["onJobFailureReasons"] for each in policy["rules"]]
        has_rule = any(reason in each for each in told)
        return has_rule or self.form["status"]["restarts"] >= policy["maxRestarts"]

    def _end_pods(self) -> bool:
        """Return whether there are pods still."""
        for pod in self.pods:
            pod.delete(pod.form["spec"]["terminationGracePeriodSeconds"])
        return bool(self.pods)

    def _conclude(self, kind: str) -> None:
        for pod in self.pods:
            if not pod.is_terminal:
                pod.delete(pod.form["spec"]["terminationGracePeriodSeconds"])
        self.form["status"]["conditions"] = [{"type": kind, "status": "True"}]

    def _new_job(self) -> Job:
        (part,) = self.form["spec"]["replicatedJobs"]
        again = self.form["status"]["restarts"]
        name = f"{self.form['metadata']['name']}-{part['name']}-{again}"
        form = {
            "metadata": {"name": name},
            "spec": copy.deepcopy(part["template"]["spec"]),
        }
        form["spec"]["template"]["metadata"]["labels"][ATTEMPT] = str(again)
        return Job(form, self._make_pod)


def validate(form: Form) -> None:
    """Raise if an official schema does not take a form, strictly.

    There is none for a JobSet, which is an extension; but for the Job within it.
    """
    if form["kind"] != "JobSet":
        kubernetes_validate.validate(form, "1.37", strict=True)
        return
    for part in form["spec"]["replicatedJobs"]:
        meta = {"name": form["metadata"]["name"]}
        within = {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta}
        whole = {**within, **part["template"]}
        kubernetes_validate.validate(whole, "1.37", strict=True)


def _listed(indexes: Sequence[int]) -> str:
    """Return numbers as a Job's status writes them: `0-2,5`."""
    runs: list[list[int]] = []
    for index in indexes:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(
        str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in runs
    )
