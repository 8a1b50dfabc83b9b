"""A little of Kueue: a suspended job with a queue's label is let go, or waits in its Workload."""

from __future__ import annotations

import copy

from api_resources import (
    JOBSETS,
    LOCAL_QUEUES,
    PYTORCHJOBS,
    TRAINJOBS,
    WORKLOADS,
    Object,
    Resource,
)
from api_store import Store
from ctl_base import each, is_leaving, is_true, put_condition, reference, store_status

_LABEL = "kueue.x-k8s.io/queue-name"
_KINDS = (PYTORCHJOBS, JOBSETS, TRAINJOBS)


class Queues:
    """The queue controller; a LocalQueue whose stopPolicy is Hold lets nobody go."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def sync(self) -> None:
        """Look at all jobs with a queue once."""
        for resource in _KINDS:
            for job in self._store.list(resource):
                meta = job["metadata"]
                if meta.get("ownerReferences") or is_leaving(job):
                    continue
                queue = (meta.get("labels") or {}).get(_LABEL)
                if queue and not any(is_true(job, k) for k in ("Failed", "Succeeded", "Completed")):
                    each([job], lambda one, r=resource, q=queue: self._sync_job(r, one, q))

    def _sync_job(self, resource: Resource, job: Object, name: str) -> None:
        meta = job["metadata"]
        space = meta["namespace"]
        queue = self._store.find(LOCAL_QUEUES, space, name)
        workload = f"{resource.kind.lower()}-{meta['name']}"[:63]
        if self._store.find(WORKLOADS, space, workload) is None:
            inner = {"name": workload, "namespace": space, "ownerReferences": [reference(job)]}
            spec = {"queueName": name, "active": True}
            self._store.create(WORKLOADS, {"metadata": inner, "spec": spec})
        found = self._store.get(WORKLOADS, space, workload)
        status = copy.deepcopy(found.get("status") or {})
        if queue is None:
            reason, text = "Inadmissible", f"LocalQueue {name} doesn't exist"
        elif queue["spec"].get("stopPolicy", "None") != "None":
            reason, text = "Inadmissible", f"LocalQueue {name} is inactive"
        else:
            put_condition(status, "QuotaReserved", "QuotaReserved", "Quota reserved")
            put_condition(status, "Admitted", "Admitted", "The workload is admitted")
            store_status(self._store, WORKLOADS, found, status)
            if not is_true(found, "Admitted"):
                self._store.change(resource, space, meta["name"], _let_go)
            return
        if not is_true(found, "Admitted"):
            put_condition(status, "QuotaReserved", reason, text, value=False)
            store_status(self._store, WORKLOADS, found, status)


def _let_go(job: Object) -> None:
    holder = job["spec"]["runPolicy"] if job["kind"] == "PyTorchJob" else job["spec"]
    holder["suspend"] = False
