"""The Job controller: indexed jobs, back-off, pod failure policies, suspension.

Each pod carries a finalizer until it is counted. With a pod failure policy a pod is replaced only
once it has failed: one that is Terminating on a dead node is not, not even when it is deleted by
force; the node must come back, go, or be marked out of service.
"""

from __future__ import annotations

import copy
import time
from typing import NamedTuple

from api_resources import JOBS, PODS, Object, now, seconds_since
from api_store import Store, suffix
from ctl_base import (
    create_pod,
    delete,
    each,
    is_leaving,
    is_over,
    is_true,
    owned,
    phase,
    pod_from,
    put_condition,
    say,
    store_status,
)
from pod_status import has_condition

_TRACKING = "batch.kubernetes.io/job-tracking"
_INDEX = "batch.kubernetes.io/job-completion-index"
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0
"""A real controller begins with ten seconds."""
_REFUSED_S = 1.0
"""Before a pod is made again that a quota has refused."""
_BY = "job-controller"


class Verdict(NamedTuple):
    """What a failed pod means."""

    action: str
    """FailJob, Ignore, Count."""
    message: str = ""


class Jobs:
    """The controller."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._due: dict[tuple[str, int], tuple[int, float]] = {}
        """Job and index -> failures and when the next pod may come."""

    def sync(self) -> None:
        """Look at all jobs once, and let the pods of those that are gone go."""
        jobs = self._store.list(JOBS)
        each(jobs, self._sync_job)
        alive = {job["metadata"]["uid"] for job in jobs if not is_leaving(job)}
        for pod in self._store.list(PODS):
            refs = pod["metadata"].get("ownerReferences") or ()
            if any(ref["kind"] == "Job" and ref["uid"] not in alive for ref in refs):
                self._release(pod)

    def _sync_job(self, job: Object) -> None:
        if is_leaving(job):
            return
        status = copy.deepcopy(job.get("status") or {})
        pods = owned(self._store, PODS, job)
        self._count(job, status, pods)
        if is_true(job, "Complete") or is_true(job, "Failed"):
            ttl_s = job["spec"].get("ttlSecondsAfterFinished")
            if ttl_s is not None and seconds_since(_finished_at(job)) > ttl_s:
                delete(self._store, JOBS, job)
            return
        if job["spec"].get("suspend"):
            self._suspend(status, pods)
        else:
            if is_true(job, "Suspended"):
                put_condition(status, "Suspended", "JobResumed", "Job resumed", value=False)
                status.pop("startTime", None)
            status.setdefault("startTime", now())
            self._go_on(job, status, pods)
        self._tally(job, status)
        store_status(self._store, JOBS, job, status)

    def _count(self, job: Object, status: Object, pods: list[Object]) -> None:
        """Count the pods that have ended since, and let them go."""
        done = indexes(status.get("completedIndexes", ""))
        for pod in pods:
            if _TRACKING not in pod["metadata"].get("finalizers", ()):
                continue
            if not is_over(pod) and not (is_leaving(pod) and not _waits_for_failure(job)):
                continue
            index = _index_of(pod)
            if phase(pod) == "Succeeded":
                done.add(index)
                status["succeeded"] = status.get("succeeded", 0) + 1
            else:
                self._count_failure(job, status, pod, index)
            self._release(pod)
        if _is_indexed(job):
            status["completedIndexes"] = as_ranges(done)

    def _count_failure(self, job: Object, status: Object, pod: Object, index: int) -> None:
        verdict = judge(job, pod)
        if verdict.action == "FailJob":
            self._fail(job, status, "PodFailurePolicy", verdict.message)
        if verdict.action != "Ignore":
            status["failed"] = status.get("failed", 0) + 1
        key = (job["metadata"]["uid"], index)
        failures = self._due.get(key, (0, 0.0))[0] + 1
        wait_s = min(_BACKOFF_S * 2**failures, _MAX_BACKOFF_S)
        self._due[key] = (failures, time.monotonic() + wait_s)

    def _release(self, pod: Object) -> None:
        meta = pod["metadata"]

        def edit(obj: Object) -> None:
            left = [f for f in obj["metadata"].get("finalizers", ()) if f != _TRACKING]
            obj["metadata"]["finalizers"] = left

        if _TRACKING in meta.get("finalizers", ()):
            self._store.change(PODS, meta["namespace"], meta["name"], edit)

    def _suspend(self, status: Object, pods: list[Object]) -> None:
        for pod in pods:
            if not is_over(pod):
                delete(self._store, PODS, pod)
        status.pop("startTime", None)
        put_condition(status, "Suspended", "JobSuspended", "Job suspended")

    def _go_on(self, job: Object, status: Object, pods: list[Object]) -> None:
        spec = job["spec"]
        deadline_s = spec.get("activeDeadlineSeconds")
        if status.get("failed", 0) > spec.get("backoffLimit", 6):
            text = "Job has reached the specified backoff limit"
            self._fail(job, status, "BackoffLimitExceeded", text)
        elif deadline_s is not None and seconds_since(status["startTime"]) >= deadline_s:
            text = "Job was active longer than specified deadline"
            self._fail(job, status, "DeadlineExceeded", text)
        elif status.get("succeeded", 0) >= _completions(spec):
            text = "Reached expected number of succeeded pods"
            put_condition(status, "SuccessCriteriaMet", "CompletionsReached", text)
        ending = next(
            (
                row
                for row in status.get("conditions", ())
                if row["type"] in {"FailureTarget", "SuccessCriteriaMet"}
            ),
            None,
        )
        if ending is None:
            self._make_missing(job, status, pods)
            return
        left = [pod for pod in owned(self._store, PODS, job) if not is_over(pod)]
        for pod in left:
            delete(self._store, PODS, pod)
        if left:
            return
        kind = "Failed" if ending["type"] == "FailureTarget" else "Complete"
        if put_condition(status, kind, ending["reason"], ending["message"]):
            if kind == "Complete":
                status["completionTime"] = now()
            reason = "Completed" if kind == "Complete" else ending["reason"]
            level = "Normal" if kind == "Complete" else "Warning"
            say(self._store, job, reason, ending["message"], by=_BY, level=level)

    def _fail(self, job: Object, status: Object, reason: str, text: str) -> None:
        if not any(row["type"] == "FailureTarget" for row in status.get("conditions", ())):
            put_condition(status, "FailureTarget", reason, text)

    def _make_missing(self, job: Object, status: Object, pods: list[Object]) -> None:
        spec = job["spec"]
        waits = _waits_for_failure(job)
        active = [p for p in pods if not is_over(p) and (waits or not is_leaving(p))]
        room = spec.get("parallelism", 1) - len(active)
        if _is_indexed(job):
            done, taken = indexes(status["completedIndexes"]), {_index_of(pod) for pod in active}
            missing = [i for i in range(spec["completions"]) if i not in done | taken]
        else:
            left = _completions(spec) - status.get("succeeded", 0) - len(active)
            missing = [-1] * left
        for index in missing[: max(room, 0)]:
            due_s = self._due.get((job["metadata"]["uid"], index), (0, 0.0))[1]
            if time.monotonic() >= due_s:
                self._create(job, index)

    def _create(self, job: Object, index: int) -> None:
        meta = job["metadata"]
        start = meta["name"] if index < 0 else f"{meta['name']}-{index}"
        pod = pod_from(job["spec"]["template"], job, f"{start[:57]}-{suffix()}")
        labels = {
            "batch.kubernetes.io/job-name": meta["name"],
            "batch.kubernetes.io/controller-uid": meta["uid"],
            "job-name": meta["name"],
            "controller-uid": meta["uid"],
        }
        pod["metadata"]["finalizers"] = [_TRACKING]
        if index >= 0:
            labels[_INDEX] = str(index)
            pod["metadata"]["annotations"][_INDEX] = str(index)
            pod["spec"].setdefault("hostname", start)
            entry = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
            kinds = ("containers", "initContainers")
            for container in [c for kind in kinds for c in pod["spec"].get(kind) or ()]:
                container["env"] = [*(container.get("env") or ()), entry]
        pod["metadata"]["labels"] |= labels
        if not create_pod(self._store, pod, of=job, by=_BY, reason="SuccessfulCreate"):
            key = (meta["uid"], index)
            self._due[key] = (self._due.get(key, (0, 0.0))[0], time.monotonic() + _REFUSED_S)

    def _tally(self, job: Object, status: Object) -> None:
        pods = [pod for pod in owned(self._store, PODS, job) if not is_over(pod)]
        status["active"] = sum(1 for pod in pods if not is_leaving(pod))
        status["terminating"] = sum(1 for pod in pods if is_leaving(pod))
        status["ready"] = sum(1 for pod in pods if has_condition(pod, "Ready"))


def judge(job: Object, pod: Object) -> Verdict:
    """Return what the pod failure policy says of a failed pod."""
    meta = pod["metadata"]
    for i, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules") or ()):
        who = f"pod {meta['namespace']}/{meta['name']}"
        end = f"matching {rule['action']} rule at index {i}"
        if codes := rule.get("onExitCodes"):
            for row in pod["status"].get("containerStatuses") or ():
                code = row["state"].get("terminated", {}).get("exitCode", 0)
                if codes.get("containerName") not in {None, row["name"]} or code == 0:
                    continue
                if (code in codes["values"]) == (codes["operator"] == "In"):
                    text = f"Container {row['name']} for {who} failed with exit code {code} {end}"
                    return Verdict(rule["action"], text)
        for pattern in rule.get("onPodConditions") or ():
            wanted = (pattern["type"], pattern.get("status", "True"))
            rows = pod["status"].get("conditions") or ()
            if wanted in {(row["type"], row["status"]) for row in rows}:
                text = f"{who.capitalize()} has condition {pattern['type']} {end}"
                return Verdict(rule["action"], text)
    return Verdict("Count")


def indexes(text: str) -> set[int]:
    """Return the numbers of a text as 0,2-4."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def as_ranges(numbers: set[int]) -> str:
    """Return numbers as 0,2-4."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _is_indexed(job: Object) -> bool:
    return bool(job["spec"].get("completionMode") == "Indexed")


def _index_of(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get(_INDEX, -1))


def _completions(spec: Object) -> int:
    return int(spec.get("completions") or spec.get("parallelism") or 1)


def _waits_for_failure(job: Object) -> bool:
    """Return whether a pod is replaced only once it has failed."""
    default = "Failed" if job["spec"].get("podFailurePolicy") else "TerminatingOrFailed"
    return bool(job["spec"].get("podReplacementPolicy", default) == "Failed")


def _finished_at(job: Object) -> str:
    rows = job["status"]["conditions"]
    return str(next(r for r in rows if r["type"] in {"Complete", "Failed"})["lastTransitionTime"])
