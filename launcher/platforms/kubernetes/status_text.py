"""The API's objects -> our types: job, pods, events -> JobStatus; nodes -> machines. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from elastic_trainer.record.failures import EXIT_BUDGET_USED_UP, EXIT_DO_NOT_RESTART, EXIT_SAVED
from launcher.platforms.base import (
    EXIT_TEXTS,
    NO_SUCH_JOB,
    JobState,
    JobStatus,
    Machine,
    PlatformEvent,
)
from launcher.platforms.kubernetes.documents import Object
from launcher.platforms.kubernetes.errors import POD_SECURITY
from launcher.platforms.kubernetes.pods import (
    DONE,
    PodFailure,
    Trouble,
    agent_status,
    annotation_of,
    bad_ends,
    condition,
    failures,
    has_ended,
    has_started,
    host_of,
    in_order,
    is_ending,
    is_lost,
    is_true,
    joined,
    label_of,
    listed,
    made_at,
    name_of,
    never_ran,
    phase_of,
    runs,
    text_of,
    time_of,
    told_ends,
    trouble_of,
    uid_of,
)
from launcher.render.kubernetes_names import QUEUE_LABEL

_NOT_MADE: Final = ("FailedCreate", "FailedCreatePod", "FailedCreateJob", "JobCreationFailed")
"""Reasons of events of a job whose pods are refused."""

_REFUSALS: Final = (
    (
        re.compile(r"exceeded quota"),
        (
            "the namespace's quota does not let its pods be made: ask for less, end other jobs, or "
            "ask an administrator (kubectl describe resourcequota)"
        ),
    ),
    (
        re.compile(r"violates PodSecurity"),
        f"the namespace's Pod Security does not allow its pods; {POD_SECURITY}",
    ),
    (
        re.compile(r"(?i:serviceaccount).*not found|not found.*(?i:serviceaccount)"),
        "its service account is missing; fix kubernetes.service_account",
    ),
    (
        re.compile(r"no PriorityClass"),
        "the priority class does not exist; fix kubernetes.priority_class",
    ),
)
"""Parts of such an event's message -> what they mean; the first that is there counts."""

_QUEUE_WORDS: Final = (
    (
        re.compile(r"maximum capacity|insufficient quota for"),
        (
            "it asks for more than its queue has in all, so it will never start: lower "
            "cluster.nodes, or use another kubernetes.queue"
        ),
    ),
    (
        re.compile(r"insufficient unused quota|quota|preempt"),
        "its queue's quota is in use; it starts when others end",
    ),
    (
        re.compile(r"LocalQueue .*(doesn't exist|does not exist|not found)|not exist"),
        "the queue does not exist; fix kubernetes.queue (kubectl get localqueues)",
    ),
    (re.compile(r"inactive|stopped", re.IGNORECASE), "its queue is stopped; ask an administrator"),
    (re.compile(r"topology", re.IGNORECASE), "its queue finds no room near enough together"),
)
"""Parts of Kueue's message -> what they mean; the first that is there counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiView:
    """The API's view of one job."""

    job: Object | None
    """None: it does not exist (any more)."""
    pods: Sequence[Object] = ()
    """The job's pods, ending ones too."""
    events: Sequence[Object] = ()
    """Any of its namespace."""
    workloads: Sequence[Object] = ()
    """Kueue's, of its namespace."""
    ready: Mapping[str, bool] = field(default_factory=dict)
    """Node -> whether it answers, where that was asked."""
    num_pods: int = 0
    """That it should have; 0: unknown."""

    @property
    def reached(self) -> list[str]:
        """Names of the pods whose agents run, by number, without those of lost nodes."""
        found = [pod for pod in in_order(self.pods) if runs(pod) and not is_lost(pod, self.ready)]
        return [name_of(pod) for pod in found]

    @property
    def left(self) -> list[Object]:
        """The rest of a deleted job: pods whose agents have started.

        A pod that replaces one meanwhile lacks its ConfigMaps, never starts, and goes too.
        """
        return [pod for pod in in_order(self.pods) if has_started(pod)]

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will run any more, though pods may still be ending."""
        if self.job is None or has_ended(self.job):
            return True
        return is_ending(self.job) and not self.left


def status_of(seen: ApiView, *, now_unix: float, stop_asked: bool = False) -> JobStatus:
    """Return the status of the job in `seen`."""
    job = seen.job
    if job is None:
        return _deleted(seen, now_unix, stop_asked=stop_asked)
    done = is_true(job, *DONE)
    failed = None if done else is_true(job, "Failed")
    there = seen.reached
    lost = [pod for pod in in_order(seen.pods) if is_lost(pod, seen.ready)]
    known: dict[str, Any] = {
        "submitted": made_at(job),
        "started": _started(seen),
        "nodes": tuple(there),
        "nodes_lost": tuple(name_of(pod) for pod in lost),
        "source": str(job.get("kind") or "Kubernetes"),
    }
    if done is not None:
        return JobStatus(state=JobState.DONE, code=0, ended=_since(done), **known)
    if failed is not None:
        return _failed(seen, failed, known)
    if is_ending(job):
        return _deleted(seen, now_unix, stop_asked=stop_asked, started=known["started"])
    troubles = _troubles(seen, now_unix)
    broke = [trouble.t_unix for trouble in troubles if trouble.t_unix is not None]
    known["broke"] = max(broke, default=None)
    over = seen.pods and all(phase_of(pod) in ("Succeeded", "Failed") for pod in seen.pods)
    if there or lost or (over and any(map(has_started, seen.pods))):
        return _running(seen, troubles, known, len(there))
    return _pending(seen, troubles, known)


def events_of(seen: ApiView) -> list[PlatformEvent]:
    """Return what the platform did with the job and its pods, in order of time."""
    names = {name_of(pod) for pod in seen.pods}
    if seen.job is not None:
        names.add(name_of(seen.job))
    found = []
    for event in seen.events:
        about = event.get("involvedObject") or {}
        name = str(about.get("name") or "")
        if name not in names and not any(name.startswith(f"{known}-") for known in names):
            continue
        moment = event.get("lastTimestamp") or event.get("eventTime")
        t_unix = time_of(moment) if moment else made_at(event)
        if t_unix is None:
            continue
        times = int(event.get("count") or 1)
        often = f" ({times} times)" if times > 1 else ""
        what = f"{about.get('kind', '')} {name}".strip()
        text = f"{what}: {event.get('reason', '')}: {text_of(event.get('message'))}{often}"
        found.append(PlatformEvent(t_unix=t_unix, text=text))
    return sorted(found, key=lambda event: event.t_unix)


def description_of(seen: ApiView) -> dict[str, str]:
    """Return the platform's record of the job, in its own names."""
    job = seen.job
    if job is None:
        return {}
    metadata = job.get("metadata") or {}
    conditions = [
        joined(str(one.get("type")), text_of(one.get("message")))
        for one in (job.get("status") or {}).get("conditions") or ()
        if str(one.get("status")).lower() == "true"
    ]
    phases = Counter("Terminating" if is_ending(pod) else phase_of(pod) for pod in seen.pods)
    shown = {
        "Kind": f"{job.get('kind')} ({job.get('apiVersion')})",
        "Name": name_of(job),
        "Namespace": str(metadata.get("namespace") or ""),
        "UID": uid_of(job),
        "Created": str(metadata.get("creationTimestamp") or ""),
        "Queue": label_of(job, QUEUE_LABEL),
        "Conditions": "; ".join(conditions),
        "Pods": ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items())),
    }
    for pod in in_order(seen.pods):
        phase = "Terminating" if is_ending(pod) else phase_of(pod)
        restarts = int(agent_status(pod).get("restartCount") or 0)
        again = f", restarted {restarts} times" if restarts else ""
        shown[f"Pod {name_of(pod)}"] = f"{phase} on {host_of(pod) or 'no node yet'}{again}"
    return {key: value for key, value in shown.items() if value}


def _deleted(
    seen: ApiView, now_unix: float, *, stop_asked: bool, started: float | None = None
) -> JobStatus:
    """Return the status of a job whose object is gone, or about to go."""
    if left := seen.left:
        what = "was deleted" if seen.job is None else "is ending"
        stuck = next(filter(None, (_trouble(seen, pod, now_unix) for pod in left)), None)
        leaving = stuck.words if stuck else f"{len(left)} of its pods save and end"
        return JobStatus(
            state=JobState.RUNNING,
            reason="Terminating",
            words=f"it {what}; {leaving}",
            started=started,
            nodes=tuple(map(name_of, left)),
            source="pods",
        )
    if seen.job is not None:  # not final: a finalizer may keep it until it is cancelled again
        return JobStatus(
            state=JobState.UNKNOWN,
            reason=NO_SUCH_JOB,
            words="it was deleted and nothing of it runs; Kubernetes is still removing its object. "
            "Should that stay, cancel it again",
        )
    if stop_asked:
        state, source = JobState.CANCELLED, "RUN/stop.json"
        words = "it was cancelled, and is gone"
        return JobStatus(state=state, reason=NO_SUCH_JOB, words=words, source=source)
    words = (
        "Kubernetes does not know it (any more): it was deleted, or its time after the end "
        "(kubernetes.ttl_s) is over"
    )
    return JobStatus(state=JobState.UNKNOWN, reason=NO_SUCH_JOB, words=words)


def _failed(seen: ApiView, failed: Mapping[str, Any], known: dict[str, Any]) -> JobStatus:
    ends = failures(seen.pods)
    code = job_code(ends)
    state = JobState.SAVED if code == EXIT_SAVED else JobState.FAILED
    said = joined(str(failed.get("reason") or ""), text_of(failed.get("message")))
    first = f"first failing pod: {_end_words(ends[0])}" if ends else ""
    words = "; ".join(filter(None, (EXIT_TEXTS.get(code or 0, ""), first)))
    return JobStatus(
        state=state, code=code, reason=said, words=words, ended=_since(failed), **known
    )


def job_code(ends: Sequence[PodFailure]) -> int | None:
    """Return the code of a job that failed, by how its pods ended, if known.

    93 and 94 end a job wherever they come from; 128 and more only have a pod tried again.
    """
    codes = [end.code for end in ends]
    for final in (EXIT_DO_NOT_RESTART, EXIT_BUDGET_USED_UP):
        if final in codes:
            return final
    return next((code for code in codes if code < 128), None)


def _running(
    seen: ApiView, troubles: Sequence[Trouble], known: dict[str, Any], running: int
) -> JobStatus:
    wanted = seen.num_pods or len(seen.pods)
    if not running and not troubles:
        words = "its pods have ended; Kubernetes has not noted the end of the job yet"
        return JobStatus(state=JobState.RUNNING, words=words, **known)
    if not troubles:
        few = f"{running} of {wanted} pods run" if running < wanted else ""
        return JobStatus(state=JobState.RUNNING, words=few, **known)
    first = troubles[0]
    same = [each.pod for each in troubles if each.reason == first.reason]
    more = f" (and {len(troubles) - len(same)} more pods)" if len(troubles) > len(same) else ""
    what = first.words
    if first.pod not in what:
        what = f"{'pod' if len(same) == 1 else 'pods'} {listed(same)}: {what}"
        what += (
            "; the job continues without it" if running and first.pod in known["nodes_lost"] else ""
        )
    return JobStatus(
        state=JobState.RUNNING,
        reason=first.reason,
        words=f"{running} of {wanted} pods run; {what}{more}",
        **known,
    )


def _pending(seen: ApiView, troubles: Sequence[Trouble], known: dict[str, Any]) -> JobStatus:
    assert seen.job is not None
    suspended = is_true(seen.job, "Suspended")
    queue = label_of(seen.job, QUEUE_LABEL)
    refused = _refused(seen)
    if not troubles and refused is None and (suspended is not None or _is_held(seen.job)):
        reason, words = _in_queue(seen, queue, suspended)
    elif troubles:
        first = troubles[0]
        many = f"{len(troubles)} of {seen.num_pods or len(seen.pods)} pods wait: "
        reason, words = first.reason, (many if len(troubles) > 1 else "") + first.words
    elif refused is not None:
        reason, words = refused
    elif seen.pods:
        reason, words = "ContainerCreating", "its pods are being started"
    else:
        reason, words = "", "its controller has not made its pods yet"
    known |= {"started": None, "failed_starts": _failed_starts(seen), "num_nodes": seen.num_pods}
    return JobStatus(state=JobState.PENDING, reason=reason, words=words, **known)


def _failed_starts(seen: ApiView) -> dict[str, str]:
    """Return name -> UID of the pods whose container never ran, where nothing bounds the tries."""
    if seen.job is None or seen.job["kind"] != "PyTorchJob":
        return {}
    return {name_of(pod): str(pod["metadata"].get("uid")) for pod in seen.pods if never_ran(pod)}


def _in_queue(seen: ApiView, queue: str, suspended: Object | None) -> tuple[str, str]:
    """Return why a suspended job waits: (the platform's words, ours)."""
    if not queue:
        said = text_of((suspended or {}).get("message"))
        return joined("Suspended", said), "it is suspended, and no queue will let it continue"
    assert seen.job is not None
    uid = uid_of(seen.job)
    for workload in seen.workloads:
        owners = (workload.get("metadata") or {}).get("ownerReferences") or ()
        if not any(uid and owner.get("uid") == uid for owner in owners):
            continue
        for kind in ("Evicted", "QuotaReserved", "Admitted"):
            found = condition(workload, kind)
            if found is None or bool(is_true(workload, kind)) != (kind == "Evicted"):
                continue
            message = text_of(found.get("message"))
            if kind == "Evicted" and str(found.get("reason")) == "Preempted":
                return joined("Preempted", message), (
                    f"a job of higher priority took its place; it waits in queue {queue} again"
                )
            reason = joined(str(found.get("reason") or kind), message)
            words = next((text for rule, text in _QUEUE_WORDS if rule.search(message)), "")
            return reason, words or f"it waits in queue {queue}"
    return "Suspended", f"it waits in queue {queue}; Kueue has not said why yet"


def _refused(seen: ApiView) -> tuple[str, str] | None:
    """Return why its pods cannot be made, if so: (the platform's words, ours)."""
    assert seen.job is not None
    name = name_of(seen.job)
    for event in reversed(seen.events):
        about = str((event.get("involvedObject") or {}).get("name") or "")
        if event.get("reason") in _NOT_MADE and f"{about}-".startswith(f"{name}-"):
            message = text_of(event.get("message"))
            words = next((text for rule, text in _REFUSALS if rule.search(message)), "")
            reason = joined(str(event.get("reason")), message)
            return reason, words or "its pods are refused"
    return None


def _troubles(seen: ApiView, now_unix: float) -> list[Trouble]:
    """Return what is wrong with pods of a job that is not over: first their failed starts."""
    assert seen.job is not None
    ended = bad_ends(seen.pods, told_ends(seen.events, seen.job), now_unix=now_unix)
    found = []
    for pod in in_order(seen.pods):
        end = ended.get(name_of(pod))
        if end is not None and seen.job["kind"] == "PyTorchJob" and not has_started(pod):
            endless = "its PyTorchJob starts it again without end: cancel the job"
            end = replace(end, words=f"{end.words}; {endless}")
        trouble = _trouble(seen, pod, now_unix) or end
        found += [] if trouble is None else [trouble]
    return sorted(found, key=lambda trouble: trouble.t_unix is None)


def _trouble(seen: ApiView, pod: Object, now_unix: float) -> Trouble | None:
    return trouble_of(
        pod,
        events=seen.events,
        ready=seen.ready,
        now_unix=now_unix,
        job_ends=seen.job is None or is_ending(seen.job),
    )


def _is_held(job: Mapping[str, Any]) -> bool:
    """Return whether its spec suspends it, though its controller may not have said so yet."""
    spec = job.get("spec") or {}
    return bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))


def _end_words(end: PodFailure) -> str:
    where = f" on {end.node}" if end.node else ""
    text = f"{end.pod}{where} ended with code {end.code}"
    return "; ".join(filter(None, (f"{text} ({end.said})" if end.said else text, end.meaning)))


def _started(seen: ApiView) -> float | None:
    """Return when the job itself started: its pods may all be younger.

    A JobSet and a TrainJob note no time: they start when they are made, or let go by a queue.
    """
    assert seen.job is not None
    noted = time_of((seen.job.get("status") or {}).get("startTime"))
    resumed = condition(seen.job, "Suspended", status="false") or {}
    return noted or _since(resumed) or made_at(seen.job)


def _since(found: Mapping[str, Any]) -> float | None:
    return time_of(found.get("lastTransitionTime"))


# -- Nodes as machines -----------------------------------------------------------------------------


RACK: Final = "topology.kubernetes.io/rack"
DRAIN_REASON: Final = "holdfast.dev/drain-reason"
"""Annotation of a node that `holdfast drain` has cordoned: why, by whom and when."""
_OWN_TAINTS: Final = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Taints that Kubernetes puts on nodes that are unwell, cordoned, or shut down."""
_ROLE: Final = "node-role.kubernetes.io/"
_INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
_EVERY_NODE_HAS: Final = ("cpu", "memory", "pods", "ephemeral-storage")
_WORDS_CHARS: Final = 200


def as_machines(nodes: Iterable[Object]) -> list[Machine]:
    """Return the machines of nodes of the API.

    A node is closed by a cordon, a condition that says it is unwell (Ready that is not True, any
    other that is True, as node-problem-detector sets them), a taint of Kubernetes itself, or
    another one that most nodes of its kind lack. A taint of most nodes is the site's way of sorting
    them.
    """
    there = [node for node in nodes if name_of(node)]
    kinds = Counter(map(_kind, there))
    common = Counter((_kind(node), key) for node in there for key in {*_taints(node)})
    found = []
    for node in there:
        kind, taints = _kind(node), _taints(node)
        own = [key for key in taints if key.startswith(_OWN_TAINTS)]
        odd = [key for key in taints if 2 * common[kind, key] <= kinds[kind]]
        odd = [key for key in odd if key not in own and not key.startswith(_ROLE)]
        said = [*_said(node), *(f"taint {key}" for key in (*own, *odd))]
        closed, rack = "; ".join(said), label_of(node, RACK)
        found.append(Machine(name=name_of(node), closed=closed, rack=rack))
    return found


def _kind(node: Object) -> tuple[Any, ...]:
    """Return what nodes for the same use have in common: type and devices."""
    capacity = (node.get("status") or {}).get("capacity") or {}
    devices = sorted(
        (str(name), str(number))
        for name, number in capacity.items()
        if name not in _EVERY_NODE_HAS and not name.startswith("hugepages-")
    )
    return label_of(node, _INSTANCE_TYPE), *devices


def _taints(node: Object) -> list[str]:
    """Return the taints that keep pods off, as kubectl writes them, without a cordon's."""
    found = []
    for taint in (node.get("spec") or {}).get("taints") or ():
        key, value, effect = (str(taint.get(name) or "") for name in ("key", "value", "effect"))
        if effect != "PreferNoSchedule" and not key.endswith("/unschedulable"):
            found.append(f"{key}{'=' * bool(value)}{value}{':' * bool(effect)}{effect}")
    return found


def _said(node: Object) -> Iterator[str]:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    if spec.get("unschedulable"):
        why = annotation_of(node, DRAIN_REASON)
        yield f"cordoned: {why}" if why else "cordoned"
    for one in status.get("conditions") or ():
        name, state = one.get("type"), one.get("status")
        if state != "True" if name == "Ready" else state == "True":
            words = [str(one.get(key) or "") for key in ("reason", "message")]
            why = " ".join(": ".join(filter(None, words)).split())[:_WORDS_CHARS]
            yield f"{name} is {state}: {why}" if why else f"{name} is {state}"
