"""The PyTorchJob operator, as training-operator 1.9 does it, traps and all.

- Pods are `<job>-worker-<i>`; a pod that exists in whatever state is never replaced, so one on a
  dead node stays until somebody deletes it by force.
- `ExitCode`: 1-127 fails the job, 128 and above deletes the pod and makes it anew.
- `backoffLimit` is compared with the sum of the restarts of all running pods.
- An elastic job without a master has succeeded as soon as any worker has.
"""

from __future__ import annotations

import copy
from typing import Any

from api_resources import PODS, PYTORCHJOBS, SERVICES, Object, now, seconds_since
from api_store import Store
from ctl_base import (
    create_pod,
    delete,
    each,
    is_leaving,
    is_true,
    owned,
    phase,
    pod_from,
    put_condition,
    reference,
    say,
    store_status,
)

_PREFIX = "training.kubeflow.org"
_PORT = 23456
_BY = "pytorchjob-controller"


class PyTorchJobs:
    """The operator."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def sync(self) -> None:
        """Look at all jobs once."""
        jobs = [job for job in self._store.list(PYTORCHJOBS) if not is_leaving(job)]
        each(jobs, self._sync_job)

    def _sync_job(self, job: Object) -> None:
        status = copy.deepcopy(job.get("status") or {})
        policy = job["spec"].get("runPolicy") or {}
        pods = owned(self._store, PODS, job)
        name = job["metadata"]["name"]
        put_condition(status, "Created", "PyTorchJobCreated", f"PyTorchJob {name} is created.")
        if is_true(job, "Succeeded") or is_true(job, "Failed"):
            self._clean_up(job, status, policy, pods)
        elif policy.get("suspend"):
            self._suspend(job, status, pods)
        else:
            if is_true(job, "Suspended"):
                text = f"PyTorchJob {name} is resumed."
                put_condition(status, "Suspended", "PyTorchJobResumed", text, value=False)
                status["startTime"] = now()
            status.setdefault("startTime", now())
            self._reconcile(job, status, policy, pods)
        store_status(self._store, PYTORCHJOBS, job, status)

    def _clean_up(self, job: Object, status: Object, policy: Object, pods: list[Object]) -> None:
        which = policy.get("cleanPodPolicy") or "None"
        for pod in pods:
            if which == "All" or (which == "Running" and phase(pod) in {"Running", "Pending"}):
                delete(self._store, PODS, pod)
        if is_true(job, "Succeeded"):
            for row in (status.get("replicaStatuses") or {}).values():
                row["succeeded"] = row.get("succeeded", 0) + row.pop("active", 0)
        ttl_s = policy.get("ttlSecondsAfterFinished")
        if ttl_s is not None and seconds_since(status["completionTime"]) > ttl_s:
            delete(self._store, PYTORCHJOBS, job)

    def _suspend(self, job: Object, status: Object, pods: list[Object]) -> None:
        for pod in pods:
            delete(self._store, PODS, pod)
        for row in (status.get("replicaStatuses") or {}).values():
            row.pop("active", None)
        text = f"PyTorchJob {job['metadata']['name']} is suspended."
        if is_true(job, "Running"):
            put_condition(status, "Running", "PyTorchJobSuspended", text, value=False)
        put_condition(status, "Suspended", "PyTorchJobSuspended", text)

    def _reconcile(self, job: Object, status: Object, policy: Object, pods: list[Object]) -> None:
        name = job["metadata"]["name"]
        deadline_s = policy.get("activeDeadlineSeconds")
        text = ""
        if _past_backoff(job, policy, pods):
            text = f"Job {name} has failed because it has reached the specified backoff limit"
        elif deadline_s is not None and seconds_since(status["startTime"]) >= deadline_s:
            text = f"Job {name} has failed because it was active longer than specified deadline"
        if text:
            status.setdefault("completionTime", now())
            self._end(job, status, "Failed", text)
            return
        rows = {}
        for kind, replica in job["spec"]["pytorchReplicaSpecs"].items():
            rows[kind] = self._replicas(job, status, kind, replica, pods)
        status["replicaStatuses"] = rows
        for kind, replica in job["spec"]["pytorchReplicaSpecs"].items():
            self._judge(job, status, kind, replica)

    def _replicas(
        self, job: Object, status: Object, kind: str, replica: Object, pods: list[Object]
    ) -> Object:
        """Make what is missing, remake what may be; return the counts."""
        wanted = replica.get("replicas", 1)
        mine = {
            int(pod["metadata"]["labels"][f"{_PREFIX}/replica-index"]): pod
            for pod in pods
            if pod["metadata"]["labels"][f"{_PREFIX}/replica-type"] == kind.lower()
        }
        row = {"active": 0, "succeeded": 0, "failed": 0}
        for index in range(wanted):
            self._service(job, kind, index)
            pod = mine.pop(index, None)
            if pod is None:
                self._create(job, kind, replica, index)
                continue
            if phase(pod) == "Failed":
                self._after_failure(job, status, kind, replica, pod)
            key = {"Succeeded": "succeeded", "Failed": "failed"}.get(phase(pod))
            if phase(pod) == "Running":
                key = "failed" if is_leaving(pod) else "active"
            if key is not None:
                row[key] += 1
        for pod in mine.values():  # beyond the replicas
            delete(self._store, PODS, pod)
        selector = f"{_PREFIX}/job-name={job['metadata']['name']}"
        counts: Object = {key: value for key, value in row.items() if value}
        return {**counts, "selector": f"{selector},{_PREFIX}/replica-type={kind.lower()}"}

    def _after_failure(
        self, job: Object, status: Object, kind: str, replica: Object, pod: Object
    ) -> None:
        name, policy = job["metadata"]["name"], replica.get("restartPolicy", "Never")
        code = _exit_code(pod)
        if policy in {"OnFailure", "Always"} or (policy == "ExitCode" and code >= 128):
            delete(self._store, PODS, pod)
            text = f"job {name} is restarting because {kind} replica(s) failed."
            say(self._store, job, "PyTorchJobRestarting", text, by=_BY, level="Warning")
            _set(status, "Restarting", "PyTorchJobRestarting", text)
        elif policy == "ExitCode":
            text = f'job "{name}" is failing because "{kind}" replica(s) failed.'
            status.setdefault("completionTime", now())
            self._end(job, status, "Failed", text)

    def _judge(self, job: Object, status: Object, kind: str, replica: Object) -> None:
        """Set the conditions that follow from the counts."""
        if any(c["type"] == "Failed" and c["status"] == "True" for c in status["conditions"]):
            return
        name, row = job["metadata"]["name"], status["replicaStatuses"][kind]
        wanted = replica.get("replicas", 1)
        succeeded, active = row.get("succeeded", 0), row.get("active", 0)
        failed = row.get("failed", 0)
        has_master = "Master" in job["spec"]["pytorchReplicaSpecs"]
        elastic = job["spec"].get("elasticPolicy") is not None
        if kind == "Master" or not has_master:
            any_worker = elastic and kind == "Worker" and succeeded > 0
            if succeeded == wanted or any_worker:
                status.setdefault("completionTime", now())
                text = f"PyTorchJob {name} is successfully completed."
                self._end(job, status, "Succeeded", text)
                return
            if active > 0:
                _set(status, "Running", "PyTorchJobRunning", f"PyTorchJob {name} is running.")
        if failed > 0 and wanted > succeeded + active:
            if replica.get("restartPolicy", "Never") != "Never":
                text = f"PyTorchJob {name} is restarting because {failed} {kind} replica(s) failed."
                _set(status, "Restarting", "PyTorchJobRestarting", text)
            else:
                text = f"PyTorchJob {name} is failed because {failed} {kind} replica(s) failed."
                status.setdefault("completionTime", now())
                self._end(job, status, "Failed", text)

    def _end(self, job: Object, status: Object, kind: str, text: str) -> None:
        if _set(status, kind, f"PyTorchJob{kind}", text):
            level = "Normal" if kind == "Succeeded" else "Warning"
            say(self._store, job, f"PyTorchJob{kind}", text, by=_BY, level=level)

    # Pods and services

    def _create(self, job: Object, kind: str, replica: Object, index: int) -> None:
        name = f"{job['metadata']['name']}-{kind.lower()}-{index}"
        pod = pod_from(replica["template"], job, name)
        pod["metadata"]["labels"] |= _labels(job, kind, index)
        policy = replica.get("restartPolicy", "Never")
        pod["spec"]["restartPolicy"] = "Never" if policy == "ExitCode" else policy
        for container in pod["spec"]["containers"]:
            container["env"] = [*(container.get("env") or ()), *_environment(job, kind, index)]
        create_pod(self._store, pod, of=job, by=_BY, reason="SuccessfulCreatePod")

    def _service(self, job: Object, kind: str, index: int) -> None:
        name = f"{job['metadata']['name']}-{kind.lower()}-{index}"
        space = job["metadata"]["namespace"]
        if self._store.find(SERVICES, space, name) is None:
            labels = _labels(job, kind, index)
            meta = {"name": name, "namespace": space, "labels": labels}
            meta["ownerReferences"] = [reference(job)]
            spec = {"clusterIP": "None", "selector": labels, "ports": [{"port": _PORT}]}
            self._store.create(SERVICES, {"metadata": meta, "spec": spec})


def _labels(job: Object, kind: str, index: int) -> dict[str, str]:
    labels = {
        f"{_PREFIX}/job-name": job["metadata"]["name"],
        f"{_PREFIX}/operator-name": "pytorchjob-controller",
        f"{_PREFIX}/replica-type": kind.lower(),
        f"{_PREFIX}/replica-index": str(index),
    }
    if kind == "Master":
        labels[f"{_PREFIX}/job-role"] = "master"
    return labels


def _environment(job: Object, kind: str, index: int) -> list[Object]:
    """Return what the operator appends to every container's environment."""
    spec, name = job["spec"], job["metadata"]["name"]
    replicas = spec["pytorchReplicaSpecs"]
    total = sum(replica.get("replicas", 1) for replica in replicas.values())
    elastic = spec.get("elasticPolicy")
    env: dict[str, Any] = {"PYTHONUNBUFFERED": "1"}
    env["PET_NPROC_PER_NODE"] = spec.get("nprocPerNode", "auto")
    env["PET_NNODES"] = total
    if "Master" in replicas:
        rank = 0 if kind == "Master" else index + 1
        address = f"{name}-master-0"
        env |= {"MASTER_PORT": _PORT, "PET_MASTER_PORT": _PORT, "MASTER_ADDR": address}
        env |= {"PET_MASTER_ADDR": address, "WORLD_SIZE": total, "RANK": rank}
        env["PET_NODE_RANK"] = rank
    if elastic is not None:
        workers = replicas.get("Worker", {}).get("replicas", 1)
        low, high = elastic.get("minReplicas", workers), elastic.get("maxReplicas", workers)
        env["PET_NNODES"] = f"{low}:{high}"
        env["PET_RDZV_ENDPOINT"] = f"{name}-worker-0:{_PORT}"
        env["PET_RDZV_BACKEND"] = elastic.get("rdzvBackend", "c10d")
        for key, target in (("rdzvId", "PET_RDZV_ID"), ("maxRestarts", "PET_MAX_RESTARTS")):
            if key in elastic:
                env[target] = elastic[key]
    return [{"name": key, "value": str(value)} for key, value in env.items()]


def _past_backoff(job: Object, policy: Object, pods: list[Object]) -> bool:
    limit = policy.get("backoffLimit")
    kinds = job["spec"]["pytorchReplicaSpecs"].values()
    if limit is None or all(r.get("restartPolicy") not in {"OnFailure", "Always"} for r in kinds):
        return False
    restarts = sum(
        row["restartCount"]
        for pod in pods
        if phase(pod) == "Running"
        for row in pod["status"].get("containerStatuses", ())
    )
    return bool(restarts > 0 if limit == 0 else restarts >= limit)


def _exit_code(pod: Object) -> int:
    for row in pod["status"].get("containerStatuses") or ():
        if row["name"] == "pytorch" and "terminated" in row["state"]:
            return int(row["state"]["terminated"]["exitCode"])
    return 0xBEEF  # as the operator has it: a pod without an exit code may be tried again


def _set(status: Object, kind: str, reason: str, text: str) -> bool:
    """Set a condition; Running and Restarting replace each other, an end makes both false."""
    other = {"Running": "Restarting", "Restarting": "Running"}.get(kind)
    rows = status.setdefault("conditions", [])
    if other is not None:
        status["conditions"] = rows = [row for row in rows if row["type"] != other]
    else:
        for row in rows:
            if row["type"] in {"Running", "Restarting"}:
                row["status"] = "False"
    return put_condition(status, kind, reason, text)
