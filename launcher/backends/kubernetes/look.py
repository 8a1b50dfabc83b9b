"""Asks the API about jobs: a list of each kind of object for a namespace, whatever their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from launcher.backends.kubernetes.api import KubernetesApi
from launcher.backends.kubernetes.documents import (
    EVENT,
    MANAGED_BY,
    NODE,
    POD,
    RESOURCES,
    WORKLOADS,
    Bundle,
    Object,
    Resource,
)
from launcher.backends.kubernetes.pods import (
    has_ended,
    host_of,
    is_ending,
    is_true,
    name_of,
    runs,
    trouble_of,
)
from launcher.backends.kubernetes.words import Seen
from launcher.errors import PlatformError, UserError
from launcher.render.kubernetes_names import MANAGED_LABEL, QUEUE_LABEL, RUN_LABEL

_MOST_NAMES: Final = 40
"""Jobs that a selector names one by one; of more, all of ours are listed."""
_MOST_NODES: Final = 16
"""Nodes that are asked about one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Looks at jobs of one namespace.

    Args:
        api: the cluster.
        namespace: where.
        now_unix: the time.
    """

    api: KubernetesApi
    namespace: str
    now_unix: float

    def at(self, bundles: Mapping[str, Bundle], *, details: bool = False) -> dict[str, Seen]:
        """Return what there is of jobs, by name.

        Args:
            bundles: name of the job -> what was submitted.
            details: also events of jobs that are well.

        Raises:
            UserError, PlatformError: the cluster cannot be asked.
        """
        labels = _selector(list(bundles))
        jobs: dict[tuple[str, str], Object] = {}
        for kind in sorted({bundle.kind for bundle in bundles.values()}):
            found, _ = self.api.list_all(RESOURCES[kind], self.namespace, labels=labels)
            # Objects in lists do not say what they are.
            resource = RESOURCES[kind]
            jobs |= {(kind, name_of(one)): {"apiVersion": resource.api, "kind": kind} | one
                     for one in found}  # fmt: skip
        pods, _ = self.api.list_all(POD, self.namespace, labels=labels)
        by_run: dict[str, list[Object]] = {}
        for pod in pods:
            run = str(((pod.get("metadata") or {}).get("labels") or {}).get(RUN_LABEL) or "")
            by_run.setdefault(run, []).append(pod)
        seen = {
            name: Seen(
                job=jobs.get((bundle.kind, name)),
                pods=tuple(by_run.get(name, ())),
                num_pods=bundle.num_pods,
            )
            for name, bundle in bundles.items()
        }
        return self._explained(seen, details=details)

    def _explained(self, seen: dict[str, Seen], *, details: bool) -> dict[str, Seen]:
        """Add what says why jobs do not run; a user without the right to it does without."""
        unwell = [name for name, one in seen.items() if self._is_unwell(one)]
        events = self._optional(EVENT) if details or unwell else ()
        queued = any(self._queue(seen[name]) for name in unwell)
        workloads = self._optional(*WORKLOADS) if queued else ()
        hosts = {
            host_of(pod)
            for name in unwell
            for pod in seen[name].pods
            if host_of(pod) and (is_ending(pod) or not is_true(pod, "Ready"))
        }
        ready = {host: self._answers(host) for host in sorted(hosts)[:_MOST_NODES]}
        known = {host: answers for host, answers in ready.items() if answers is not None}
        return {
            name: replace(one, events=events, workloads=workloads, ready=known)
            if details or name in unwell
            else one
            for name, one in seen.items()
        }

    def _is_unwell(self, seen: Seen) -> bool:
        """Whether more has to be asked about it."""
        if seen.job is None or has_ended(seen.job):
            return False
        count = sum(runs(pod) for pod in seen.pods)
        if count < (seen.num_pods or 1):
            return True
        return any(
            trouble_of(pod, now_unix=self.now_unix) is not None or not is_true(pod, "Ready")
            for pod in seen.pods
        )

    def _queue(self, seen: Seen) -> str:
        labels = ((seen.job or {}).get("metadata") or {}).get("labels") or {}
        return str(labels.get(QUEUE_LABEL) or "")

    def _optional(self, *versions: Resource) -> Sequence[Object]:
        """Return all objects of a kind, by the first of its versions that can be read; or none.

        It may not be installed, or the user may not read it.
        """
        for resource in versions:
            try:
                found, _ = self.api.list_all(resource, self.namespace)
            except (UserError, PlatformError):
                continue
            return tuple(found)
        return ()

    def _answers(self, host: str) -> bool | None:
        """Return whether a node answers; None: it is not known (a right of its own)."""
        try:
            node = self.api.get(NODE, "", host)
        except (UserError, PlatformError):
            return None
        return False if node is None else is_true(node, "Ready") is not None


def _selector(names: Sequence[str]) -> str:
    mine = f"{MANAGED_LABEL}={MANAGED_BY}"
    if len(names) > _MOST_NAMES:
        return mine
    return f"{mine},{RUN_LABEL} in ({','.join(sorted(names))})"
