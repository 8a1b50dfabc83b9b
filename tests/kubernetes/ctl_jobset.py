"""JobSet 0.8 and Trainer 2: sets of jobs with a failure policy; TrainJobs made of a runtime."""

from __future__ import annotations

import copy
import re
from typing import Any

from api_resources import (
    CLUSTER_RUNTIMES,
    JOBS,
    JOBSETS,
    RUNTIMES,
    SERVICES,
    TRAINJOBS,
    Object,
    now,
    seconds_since,
)
from api_store import Store
from ctl_base import (
    delete,
    each,
    is_leaving,
    is_true,
    owned,
    put_condition,
    reference,
    say,
    store_status,
)

_PREFIX = "jobset.sigs.k8s.io"
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


class JobSets:
    """The JobSet controller."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def sync(self) -> None:
        """Look at all sets once."""
        sets = [jobset for jobset in self._store.list(JOBSETS) if not is_leaving(jobset)]
        each(sets, self._sync_set)

    def _sync_set(self, jobset: Object) -> None:
        spec = jobset["spec"]
        status = copy.deepcopy(jobset.get("status") or {"restarts": 0})
        jobs = owned(self._store, JOBS, jobset)
        if status.get("terminalState"):
            for job in jobs:
                if not is_true(job, "Complete") and not is_true(job, "Failed"):
                    delete(self._store, JOBS, job)
            ttl_s = spec.get("ttlSecondsAfterFinished")
            if ttl_s is not None and seconds_since(_ended_at(status)) > ttl_s:
                delete(self._store, JOBSETS, jobset)
            return
        attempt = str(status.get("restarts", 0))
        for job in jobs:
            if job["metadata"]["labels"][f"{_PREFIX}/restart-attempt"] != attempt:
                delete(self._store, JOBS, job, propagation="Foreground")
        current = [
            job
            for job in jobs
            if job["metadata"]["labels"][f"{_PREFIX}/restart-attempt"] == attempt
        ]
        status["replicatedJobsStatus"] = [
            _counts(row, current) for row in spec.get("replicatedJobs") or ()
        ]
        failed = [job for job in current if is_true(job, "Failed")]
        if failed:
            self._after_failure(jobset, status, failed[0])
        elif current and all(is_true(job, "Complete") for job in current):
            self._end(jobset, status, "Completed", "AllJobsCompleted", "jobset completed")
        else:
            self._service(jobset)
            self._make_jobs(jobset, attempt, jobs)
            suspended = bool(spec.get("suspend"))
            if suspended or is_true(jobset, "Suspended"):
                reason = "SuspendedJobs" if suspended else "ResumeJobs"
                text = "jobset is suspended" if suspended else "jobset is resumed"
                put_condition(status, "Suspended", reason, text, value=suspended)
        store_status(self._store, JOBSETS, jobset, status)

    def _after_failure(self, jobset: Object, status: Object, job: Object) -> None:
        policy = jobset["spec"].get("failurePolicy")
        row = next(r for r in job["status"]["conditions"] if r["type"] == "Failed")
        why = "jobset failed due to one or more job failures (first failed job: "
        why += f"{job['metadata']['name']})"
        if policy is None:
            self._end(jobset, status, "Failed", "FailedJobs", why)
            return
        action, rule = _action(policy, job, row)
        if action == "FailJobSet":
            reason = "FailJobSetFailurePolicyAction"
            text = f"applying FailJobSet failure policy action for rule {rule}: {why}"
            self._end(jobset, status, "Failed", reason, text)
            return
        free = action == "RestartJobSetAndIgnoreMaxRestarts"
        counted = status.get("restartsCountTowardsMax", 0)
        if not free and counted >= policy.get("maxRestarts", 0):
            text = "jobset failed due to reaching max number of restarts"
            self._end(jobset, status, "Failed", "ReachedMaxRestarts", text)
            return
        status["restarts"] = status.get("restarts", 0) + 1
        if not free:
            status["restartsCountTowardsMax"] = counted + 1
        text = f"restarting jobset, attempt {status['restarts']}"
        say(self._store, jobset, "Restarting", text, by="jobset", level="Warning")

    def _end(self, jobset: Object, status: Object, kind: str, reason: str, text: str) -> None:
        put_condition(status, kind, reason, text)
        status["terminalState"] = kind
        level = "Normal" if kind == "Completed" else "Warning"
        say(self._store, jobset, reason, text, by="jobset", level=level)

    def _make_jobs(self, jobset: Object, attempt: str, jobs: list[Object]) -> None:
        there = {job["metadata"]["name"]: job for job in jobs}
        suspended = bool(jobset["spec"].get("suspend"))
        for row in jobset["spec"].get("replicatedJobs") or ():
            for index in range(row.get("replicas", 1)):
                name = f"{jobset['metadata']['name']}-{row['name']}-{index}"
                job = there.get(name)
                if job is None:
                    self._store.create(JOBS, _job(jobset, row, index, attempt))
                elif bool(job["spec"].get("suspend")) != suspended:
                    space = jobset["metadata"]["namespace"]
                    self._store.change(
                        JOBS, space, name, lambda obj: obj["spec"].update(suspend=suspended)
                    )

    def _service(self, jobset: Object) -> None:
        space = jobset["metadata"]["namespace"]
        name = _subdomain(jobset)
        if self._store.find(SERVICES, space, name) is None:
            meta = {"name": name, "namespace": space, "ownerReferences": [reference(jobset)]}
            selector = {f"{_PREFIX}/jobset-name": jobset["metadata"]["name"]}
            spec = {"clusterIP": "None", "selector": selector}
            self._store.create(SERVICES, {"metadata": meta, "spec": spec})


class TrainJobs:
    """The Trainer's controller: each job becomes a JobSet of the same name."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def sync(self) -> None:
        """Look at all jobs once."""
        jobs = [job for job in self._store.list(TRAINJOBS) if not is_leaving(job)]
        each(jobs, self._sync_job)

    def _sync_job(self, job: Object) -> None:
        meta, spec = job["metadata"], job["spec"]
        status = copy.deepcopy(job.get("status") or {})
        jobset = self._store.find(JOBSETS, meta["namespace"], meta["name"])
        ended = is_true(job, "Complete") or is_true(job, "Failed")
        if jobset is None and not ended:
            runtime = find_runtime(self._store, job)
            if runtime is None:
                text = f"runtime {spec['runtimeRef']['name']} does not exist"
                put_condition(status, "Failed", "TrainingRuntimeNotSupported", text)
            else:
                self._store.create(JOBSETS, _jobset(job, runtime))
        elif jobset is not None and not ended:
            suspended = bool(spec.get("suspend"))
            if bool(jobset["spec"].get("suspend")) != suspended:
                self._store.change(
                    JOBSETS,
                    meta["namespace"],
                    meta["name"],
                    lambda obj: obj["spec"].update(suspend=suspended),
                )
            _copy_conditions(jobset, status)
            if suspended or is_true(job, "Suspended"):
                reason = "Suspended" if suspended else "Resumed"
                text = f"TrainJob is {reason.lower()}"
                put_condition(status, "Suspended", reason, text, value=suspended)
        store_status(self._store, TRAINJOBS, job, status)


def find_runtime(store: Store, job: Object) -> Object | None:
    """Return the runtime a TrainJob names."""
    ref = job["spec"]["runtimeRef"]
    if ref.get("kind", "ClusterTrainingRuntime") == "TrainingRuntime":
        return store.find(RUNTIMES, job["metadata"]["namespace"], ref["name"])
    return store.find(CLUSTER_RUNTIMES, "", ref["name"])


def _job(jobset: Object, row: Object, index: int, attempt: str) -> Object:
    """Return one job of a set."""
    meta, template = jobset["metadata"], copy.deepcopy(row["template"])
    marks = {
        f"{_PREFIX}/jobset-name": meta["name"],
        f"{_PREFIX}/replicatedjob-name": row["name"],
        f"{_PREFIX}/replicatedjob-replicas": str(row.get("replicas", 1)),
        f"{_PREFIX}/job-index": str(index),
        f"{_PREFIX}/restart-attempt": attempt,
    }
    inner = template.get("metadata") or {}
    spec = template["spec"]
    pod = spec["template"]
    pod_meta = pod.setdefault("metadata", {})
    pod_meta["labels"] = {**(pod_meta.get("labels") or {}), **marks}
    pod_meta["annotations"] = {**(pod_meta.get("annotations") or {}), **marks}
    if (jobset["spec"].get("network") or {}).get("enableDNSHostnames", True):
        pod["spec"]["subdomain"] = _subdomain(jobset)
    spec["suspend"] = bool(jobset["spec"].get("suspend"))
    return {
        "metadata": {
            "name": f"{meta['name']}-{row['name']}-{index}",
            "namespace": meta["namespace"],
            "labels": {**(inner.get("labels") or {}), **marks},
            "annotations": {**(inner.get("annotations") or {}), **marks},
            "ownerReferences": [reference(jobset)],
        },
        "spec": spec,
    }


def _jobset(job: Object, runtime: Object) -> Object:
    """Return the JobSet of a TrainJob: the runtime's template with the job's values."""
    meta, spec = job["metadata"], job["spec"]
    template = copy.deepcopy(runtime["spec"]["template"])
    trainer = spec.get("trainer") or {}
    policy = runtime["spec"].get("mlPolicy") or {}
    num_nodes = trainer.get("numNodes", policy.get("numNodes", 1))
    inner = template.get("metadata") or {}
    for row in template["spec"].get("replicatedJobs") or ():
        labels = (row["template"].get("metadata") or {}).get("labels") or {}
        if labels.get(_STEP) != "trainer":
            continue
        jobs = row["template"]["spec"]
        jobs["parallelism"] = jobs["completions"] = num_nodes
        for container in jobs["template"]["spec"]["containers"]:
            if container["name"] == "node":
                _override(container, trainer)
    template["spec"]["suspend"] = bool(spec.get("suspend"))
    for row in template["spec"].get("replicatedJobs") or ():
        _fill_in(row)
    return {
        "metadata": {
            "name": meta["name"],
            "namespace": meta["namespace"],
            "labels": {**(inner.get("labels") or {}), **(spec.get("labels") or {})},
            "annotations": {**(inner.get("annotations") or {}), **(spec.get("annotations") or {})},
            "ownerReferences": [reference(job)],
        },
        "spec": template["spec"],
    }


def _override(container: Object, trainer: Object) -> None:
    for key in ("image", "command", "args"):
        if trainer.get(key):
            container[key] = trainer[key]
    if trainer.get("resourcesPerNode"):
        container["resources"] = trainer["resourcesPerNode"]
    env = {entry["name"]: entry for entry in container.get("env") or ()}
    env |= {entry["name"]: entry for entry in trainer.get("env") or ()}
    container["env"] = list(env.values())


def _fill_in(row: Object) -> None:
    """Set what JobSet's webhook sets."""
    spec: Any = row["template"]["spec"]
    spec.setdefault("completionMode", "Indexed")
    spec.setdefault("completions", spec.get("parallelism", 1))
    spec["template"]["spec"].setdefault("restartPolicy", "OnFailure")


def _copy_conditions(jobset: Object, status: Object) -> None:
    for row in (jobset.get("status") or {}).get("conditions") or ():
        kind = {"Completed": "Complete", "Failed": "Failed"}.get(row["type"])
        if kind is not None and row["status"] == "True":
            put_condition(status, kind, row["reason"], row["message"])
    rows = (jobset.get("status") or {}).get("replicatedJobsStatus") or ()
    status["jobsStatus"] = [dict(row) for row in rows]


def _action(policy: Object, job: Object, row: Object) -> tuple[str, str]:
    """Return the action of the first rule that fits, and its name."""
    labels = job["metadata"]["labels"]
    for i, rule in enumerate(policy.get("rules") or ()):
        reasons, targets = rule.get("onJobFailureReasons"), rule.get("targetReplicatedJobs")
        patterns = rule.get("onJobFailureMessagePatterns")
        if reasons and row["reason"] not in reasons:
            continue
        if targets and labels[f"{_PREFIX}/replicatedjob-name"] not in targets:
            continue
        if patterns and not any(re.search(p, row["message"]) for p in patterns):
            continue
        return rule["action"], rule.get("name", f"failurePolicyRule{i}")
    return "RestartJobSet", ""


def _counts(row: Object, jobs: list[Object]) -> Object:
    counts = {"ready": 0, "succeeded": 0, "failed": 0, "active": 0, "suspended": 0}
    for job in jobs:
        if job["metadata"]["labels"][f"{_PREFIX}/replicatedjob-name"] != row["name"]:
            continue
        status = job.get("status") or {}
        wanted = job["spec"].get("parallelism", 1)
        counts["succeeded"] += is_true(job, "Complete")
        counts["failed"] += is_true(job, "Failed")
        counts["suspended"] += bool(job["spec"].get("suspend"))
        counts["active"] += status.get("active", 0) > 0
        counts["ready"] += status.get("ready", 0) + status.get("succeeded", 0) >= wanted
    return {"name": row["name"], **counts}


def _subdomain(jobset: Object) -> str:
    network = jobset["spec"].get("network") or {}
    return str(network.get("subdomain") or jobset["metadata"]["name"])


def _ended_at(status: Object) -> str:
    kind = status["terminalState"]
    return str(
        next(r for r in status["conditions"] if r["type"] == kind).get("lastTransitionTime", now())
    )
