"""What pods, their events and nodes say: what keeps one from running, how one failed. Pure.

Objects are the API's, as plain JSON types; any field may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from elastic_trainer.storage.typed import unix_time
from launcher.platforms.kubernetes.documents import AGENTS, Object

STUCK_S: Final = 30.0
"""A pod that exists this long after its time to end has lost its node."""
_TRACKED: Final = "batch.kubernetes.io/job-tracking"
"""The finalizer by which a Job holds its pods until it has counted them."""
DONE: Final = ("Succeeded", "Completed", "Complete")
"""Conditions of a finished job: PyTorchJob, JobSet, TrainJob."""
_MOST_CHARS: Final = 400
"""Length of the platform's messages, which are cut."""

_WAITING: Final[dict[str, str]] = {
    "ImagePullBackOff": "its image cannot be pulled; fix kubernetes.image, or name a secret for "
    "the registry in kubernetes.image_pull_secrets",
    "ErrImagePull": "its image cannot be pulled; fix kubernetes.image, or name a secret for the "
    "registry in kubernetes.image_pull_secrets",
    "ErrImageNeverPull": "its image is not on the node and must not be pulled; fix "
    "kubernetes.image_pull_policy",
    "InvalidImageName": "its image has no valid name; fix kubernetes.image",
    "CreateContainerConfigError": "its container cannot be set up: a Secret or ConfigMap that it "
    "names is missing; or its image would run as root: name a user of it in "
    "kubernetes.security.run_as_user (0, if it must be root)",
    "CreateContainerError": "its container cannot be made",
    "RunContainerError": "its container cannot be started",
    "CrashLoopBackOff": "its container ends again and again, and is started later each time",
}
"""Reasons of a waiting container -> what they mean."""
_PASSES: Final = ("ErrImagePull", "CrashLoopBackOff")
"""Reasons that may pass."""

OUTLIVED_S: Final = 600.0
"""A pod that has run for this long is no longer in trouble; as `launcher/node/pod.py:LIVED_S`,
where the count of failures starts over."""
_PLAIN: Final = ("", "Error", "Completed")
"""Reasons of an end that say no more than its code."""
_OUR_CODES: Final = (91, 92, 93, 94, 143)
"""Codes of agents, and of pods that ask to be made again: not failed starts by themselves."""
NEVER_RAN: Final = ("StartError", "ContainerCannotRun", "RunContainerError")
"""Reasons of an end before the container's first instruction (containerd, cri-o, dockershim)."""
_CANNOT_START: Final = (
    "its container cannot be started: fix what the message names (kubernetes.python, a volume over "
    "files of the image, the node's container runtime)"
)
_ENDED: Final[dict[str | int, str]] = {
    "OOMKilled": "it ran out of memory; raise kubernetes.memory, which /dev/shm (kubernetes.shm) "
    "counts towards",
    **dict.fromkeys(NEVER_RAN, _CANNOT_START),
    "Evicted": "its node evicted it, for want of memory or disk there; ask for what it needs "
    "(kubernetes.memory), and write to a volume",
    "Preempting": "a pod of higher priority took its place",
    "DeadlineExceeded": "its time is over (activeDeadlineSeconds)",
    **dict.fromkeys(
        ("Terminated", "NodeShutdown", "Shutdown"), "its node was shut down, or is about to be"
    ),
    **dict.fromkeys(
        ("UnexpectedAdmissionError", "OutOfcpu", "OutOfmemory", "OutOfpods", "NodeAffinity"),
        "its node refused it: what it needs is not free there, or not healthy",
    ),
    1: "Python ended before the agent began: the image needs the same holdfast as this machine",
    2: "its program cannot be run: fix kubernetes.python or kubernetes.image",
    126: "its program cannot be run: fix kubernetes.python or kubernetes.image",
    127: "its program is not in the image, or a volume hides it: fix kubernetes.python, "
    "kubernetes.image or kubernetes.volumes",
    128: _CANNOT_START,
    137: "it was killed from outside (SIGKILL): for want of memory on its node, by its runtime, or "
    "at the end of its grace period",
    144: "it cannot read job.json or write to the claim: see its output (holdfast logs)",
}
"""Reason of an end, or its exit code -> what it means."""
_TOLD_END: Final = re.compile(
    r"Error pod (\S+) container (\S+) exitCode: (\d+) terminated message: ?(.*)", re.DOTALL
)
"""The training operator's event about an end, whose pod it then replaces under the same name."""

_UNSCHEDULABLE: Final = (
    (
        re.compile(r"Insufficient ([\w./-]*\w)"),
        "no node has enough free {0}; it starts when others end, or never if no node has as much",
    ),
    (
        re.compile(r"untolerated taint \{([^}:]+)"),
        "nodes are kept for others by the taint {0}; see kubernetes.tolerations",
    ),
    (
        re.compile(r'persistentvolumeclaim "([^"]+)" not found'),
        "claim {0} does not exist; create it, or fix kubernetes.claim",
    ),
    (
        re.compile(r"unbound immediate PersistentVolumeClaims"),
        "its claim has no volume yet; see kubectl get pvc",
    ),
    (
        re.compile(r"node affinity|node selector"),
        "no node is what it asks for; see kubernetes.node_selector, topology and exclude",
    ),
    (re.compile(r"unschedulable"), "nodes are cordoned"),
)
"""Parts of the scheduler's message -> what they mean; the first that is there counts."""

_NOT_MOUNTED: Final = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What keeps one pod from doing its part."""

    pod: str
    reason: str
    """The platform's own words."""
    words: str
    """What it means, with a fix."""
    is_final: bool = False
    """It will not start however long one waits."""
    t_unix: float | None = None
    """When its container was ended, or found unable to start; None: it has to wait, or is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFailure:
    """How the agent of one pod ended by an error."""

    pod: str
    node: str
    code: int
    """Exit code; 128 and more: a signal, or a pod that may be tried again."""
    reason: str
    """The platform's word, as OOMKilled."""
    message: str
    t_unix: float
    container: str = ""
    """Which of its containers; empty: the agent's, or the pod as a whole."""

    @property
    def said(self) -> str:
        """The platform's reason and message; a pod killed for memory has only its log as one."""
        return joined(self.reason, "" if self.reason == "OOMKilled" else self.message)

    @property
    def meaning(self) -> str:
        """What it means, with a fix; empty: its own output says it."""
        known = _ENDED.get(self.reason) or _ENDED.get(self.code, "")
        if not self.container:
            return known
        # Exit codes of other programs mean what they say themselves.
        known = known if self.reason in _ENDED else "see its output (kubectl logs -c)"
        return f"container {self.container}: {known}"


def text_of(value: Any) -> str:
    """Return a text of the platform on one line, cut at _MOST_CHARS."""
    flat = " ".join(str(value or "").split())
    return flat if len(flat) <= _MOST_CHARS else flat[: _MOST_CHARS - 1] + "…"


def time_of(value: Any) -> float | None:
    """Return a time of the API (RFC 3339) in Unix seconds, or None."""
    try:
        found = datetime.fromisoformat(str(value))
        return unix_time(found.timestamp()) if found.tzinfo is not None else None
    except ValueError:
        return None


def name_of(thing: Mapping[str, Any]) -> str:
    """Return the name of an object."""
    return str((thing.get("metadata") or {}).get("name") or "")


def uid_of(thing: Mapping[str, Any]) -> str:
    """Return the UID of an object; empty: it has none."""
    return str((thing.get("metadata") or {}).get("uid") or "")


def made_at(thing: Mapping[str, Any]) -> float | None:
    """Return when an object was made, in Unix seconds, if it says so."""
    return time_of((thing.get("metadata") or {}).get("creationTimestamp"))


def label_of(thing: Mapping[str, Any], key: str) -> str:
    """Return a label of an object, or an empty text."""
    return str(((thing.get("metadata") or {}).get("labels") or {}).get(key) or "")


def annotation_of(thing: Mapping[str, Any], key: str) -> str:
    """Return an annotation of an object, or an empty text."""
    return str(((thing.get("metadata") or {}).get("annotations") or {}).get(key) or "")


def joined(reason: str, message: str) -> str:
    """Return the platform's reason and message as one text."""
    return f"{reason}: {message}" if reason and message else reason or message


def condition(thing: Mapping[str, Any], kind: str, *, status: str = "") -> Object | None:
    """Return the condition `kind` of an object, if it has one and its status is `status`."""
    for found in (thing.get("status") or {}).get("conditions") or ():
        if isinstance(found, dict) and found.get("type") == kind:
            return found if status in ("", str(found.get("status")).lower()) else None
    return None


def is_true(thing: Mapping[str, Any], *kinds: str) -> Object | None:
    """Return the first condition of `kinds` that holds, if any."""
    return next(filter(None, (condition(thing, kind, status="true") for kind in kinds)), None)


def has_ended(job: Mapping[str, Any]) -> bool:
    """Return whether a job has ended, well or not."""
    return is_true(job, *DONE, "Failed") is not None


def agent_status(pod: Mapping[str, Any]) -> Object:
    """Return the status of the agent's container; empty: it has none yet."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    found = [one for one in statuses if isinstance(one, dict)]
    named = [one for one in found if one.get("name") in AGENTS]
    return (named or found or [{}])[0]


def _statuses(pod: Mapping[str, Any]) -> list[tuple[str, Object]]:
    """Return (name, status) of all containers: the agent's, with no name, init ones, others."""
    status, agents = pod.get("status") or {}, agent_status(pod)
    every = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    others = [one for one in every if isinstance(one, dict) and one is not agents]
    return [("", agents), *((str(one.get("name") or ""), one) for one in others)]


def phase_of(pod: Mapping[str, Any]) -> str:
    """Return its phase: Pending, Running, Succeeded, Failed, Unknown."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def is_ending(pod: Mapping[str, Any]) -> bool:
    """Return whether it was deleted and still exists."""
    return bool((pod.get("metadata") or {}).get("deletionTimestamp"))


def runs(pod: Mapping[str, Any]) -> bool:
    """Return whether its agent runs now, as far as the platform knows."""
    return is_alive(pod) and not is_ending(pod)


def is_alive(pod: Mapping[str, Any]) -> bool:
    """Return whether a command can run in it: its agent runs, though it may be ending."""
    state = agent_status(pod).get("state") or {}
    return phase_of(pod) == "Running" and ("running" in state or not state)


def has_started(pod: Mapping[str, Any]) -> bool:
    """Return whether its agent runs or has run: only then may it have something to save."""
    states = _states(pod)
    if never_ran(pod):
        return False
    return phase_of(pod) != "Pending" or "running" in states or "terminated" in states


def never_ran(pod: Mapping[str, Any]) -> bool:
    """Return whether its container could not be started."""
    states = _states(pod)
    ended = states.get("terminated") or {}
    return ended.get("reason") in NEVER_RAN and "running" not in states


def _states(pod: Mapping[str, Any]) -> Object:
    """Return the agent's last and present state by their names: waiting, running, terminated."""
    status = agent_status(pod)
    return {**(status.get("lastState") or {}), **(status.get("state") or {})}


def is_lost(pod: Mapping[str, Any], ready: Mapping[str, bool]) -> bool:
    """Return whether the node of a pod that should run does not answer, so it counts for nothing.

    Without the right to see nodes the pod says it: its containers are ready and it is not, which
    only the control plane sets (MarkPodsNotReady). `ready`: whether a node answers, where asked.
    """
    if not is_alive(pod):
        return False
    gates = (pod.get("spec") or {}).get("readinessGates")
    unready = condition(pod, "Ready") and not is_true(pod, "Ready")
    silent = unready and is_true(pod, "ContainersReady") and not gates
    return ready.get(host_of(pod)) is False or bool(silent)


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names for people: the first few, and how many more."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def host_of(pod: Mapping[str, Any]) -> str:
    """Return the name of its node, if it has one yet."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def in_order(pods: Iterable[Object]) -> list[Object]:
    """Return pods by name, numbers by their value."""

    def key(pod: Object) -> list[tuple[bool, int, str]]:
        parts = re.split(r"(\d+)", name_of(pod))
        return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]

    return sorted(pods, key=key)


def trouble_of(
    pod: Object,
    *,
    events: Sequence[Object] = (),
    ready: Mapping[str, bool] | None = None,
    now_unix: float,
    job_ends: bool = False,
) -> Trouble | None:
    """Return what keeps `pod` from running, if anything is known.

    `events` are any of the namespace; `ready` says whether a node answers, where that was asked;
    `job_ends`: its whole job has been deleted.
    """
    stuck = _stuck(pod, ready or {}, now_unix, job_ends=job_ends)
    if stuck is not None:
        return stuck
    if is_ending(pod):  # evicted from a node that has been silent for long
        return _lost(pod, ready or {})
    if phase_of(pod) in ("Succeeded", "Failed"):
        return None
    for other, status in _statuses(pod):
        waiting = (status.get("state") or {}).get("waiting") or {}
        reason, message = str(waiting.get("reason") or ""), text_of(waiting.get("message"))
        if reason in _WAITING:
            where = f"container {other}: " if other else ""
            return Trouble(
                pod=name_of(pod),
                reason=joined(reason, message),
                words=where + _WAITING[reason] + _last_end(status),
                is_final=reason not in _PASSES,
                t_unix=now_unix,
            )
    unscheduled = condition(pod, "PodScheduled", status="false")
    if unscheduled is not None:
        return _unscheduled(name_of(pod), unscheduled)
    return _started_badly(pod, events, ready or {})


def failures(pods: Iterable[Object]) -> list[PodFailure]:
    """Return how pods ended by an error, the earliest first; only a pod's last end."""
    found = [failure for pod in pods if (failure := _failure_of(pod)) is not None]
    return sorted(found, key=lambda failure: (failure.t_unix, failure.pod))


def _failure_of(pod: Object) -> PodFailure | None:
    """Return how a pod ended by an error: its agent, else another container, else as a whole."""
    whole, has_failed = pod.get("status") or {}, phase_of(pod) == "Failed"
    ends = [(name, _ended_of(status)) for name, status in _statuses(pod)]
    other, ended = next((end for end in ends if "exitCode" in end[1] or not has_failed), ends[-1])
    if ended.get("exitCode") not in (0, None):
        code, reason = int(ended["exitCode"]), str(ended.get("reason") or "")
        message, when = ended.get("message"), ended.get("finishedAt")
    elif has_failed and not ended:
        # Evicted, or killed by its node: no container could say anything.
        code, reason, other = 1, str(whole.get("reason") or "PodFailed"), ""
        message, when = whole.get("message"), whole.get("startTime")
    else:
        return None
    return PodFailure(
        pod=name_of(pod),
        node=host_of(pod),
        code=code,
        reason=str(whole.get("reason") or "") if reason in _PLAIN else reason,
        message=text_of(message or whole.get("message")),
        t_unix=time_of(when) or float("inf"),
        container=other,
    )


def _ended_of(status: Mapping[str, Any]) -> Object:
    """Return the last end of a container, if any."""
    ends = [(status.get(key) or {}).get("terminated") for key in ("state", "lastState")]
    return next((ended for ended in ends if isinstance(ended, dict)), {})


def told_ends(events: Iterable[Object], job: Object) -> list[PodFailure]:
    """Return how containers of replaced pods ended, as the training operator told.

    Events from before `job`, a PyTorchJob, was made are of a former one.
    """
    found, since = [], made_at(job) or 0.0
    for event in events:
        match = _TOLD_END.match(str(event.get("message") or ""))
        about = event.get("involvedObject") or {}
        t_unix = time_of(event.get("lastTimestamp") or event.get("eventTime"))
        if match is None or about.get("name") != name_of(job) or t_unix is None or t_unix < since:
            continue
        pod, container, code, message = match.groups()
        reason = str(event.get("reason") or "")
        found.append(
            PodFailure(
                pod=pod,
                node="",
                code=int(code),
                reason="" if reason in _PLAIN else reason,
                message=text_of(message),
                t_unix=t_unix,
                container="" if container in AGENTS else container,
            )
        )
    return found


def bad_ends(
    pods: Sequence[Object], told: Iterable[PodFailure], *, now_unix: float
) -> dict[str, Trouble]:
    """Return pods -> how their containers were ended, or could not start, not long ago.

    Of each place in the job the newest pod counts, and the newest end, its own or a predecessor's.
    Pods that ask to be made again (143), as after a drain, are not in trouble. `told` has ends of
    former pods.
    """
    places: dict[str, list[Object]] = {}
    for pod in sorted(pods, key=lambda pod: made_at(pod) or 0.0):
        places.setdefault(_place(pod), []).append(pod)
    gone: dict[str, list[PodFailure]] = {}
    for end in told:
        gone.setdefault(end.pod, []).append(end)
    found = {}
    for place, there in places.items():
        own = failures(there)
        every = (*own, *gone.get(place, ()))
        ends = [end for end in every if end.reason or end.code not in _OUR_CODES]
        began = ((agent_status(there[-1]).get("state") or {}).get("running") or {}).get("startedAt")
        since = time_of(began)
        if not ends or (since is not None and now_unix - since >= OUTLIVED_S):
            continue
        last = max(ends, key=lambda end: end.t_unix)
        again = f" ({len(own)} times in all)" if len(own) > 1 else ""
        code = f"ended with code {last.code}{again}"
        found[name_of(there[-1])] = Trouble(
            pod=name_of(there[-1]),
            reason=last.said or code,
            words=f"{last.meaning or 'see its output (holdfast logs)'}; {code}",
            t_unix=min(last.t_unix, now_unix),
        )
    return found


def _place(pod: Mapping[str, Any]) -> str:
    """Return what a pod and its replacements share: the index of its Job, else its name."""
    index = label_of(pod, "batch.kubernetes.io/job-completion-index")
    return f"{label_of(pod, 'batch.kubernetes.io/job-name')} {index}" if index else name_of(pod)


def stuck_s(pod: Mapping[str, Any], now_unix: float) -> float | None:
    """Return for how long a pod should have been gone; None: it is not stuck."""
    # The grace period is in that time already.
    over = time_of((pod.get("metadata") or {}).get("deletionTimestamp"))
    return None if over is None or now_unix - over < STUCK_S else now_unix - over


def _stuck(
    pod: Object, ready: Mapping[str, bool], now_unix: float, *, job_ends: bool
) -> Trouble | None:
    """Return the trouble of a pod that stays Terminating for ever."""
    metadata = pod.get("metadata") or {}
    late_s = stuck_s(pod, now_unix)
    if late_s is None:
        return None
    name, node, namespace = name_of(pod), host_of(pod), str(metadata.get("namespace") or "default")
    # Kubernetes says so only where it was asked about nodes, which takes another right.
    silent = "is NotReady" if ready.get(node) is False else "does not say that it has ended"
    minutes = max(1, int(late_s / 60))
    so = "The job continues without it; no new pod takes its place while this one is there"
    if job_ends:
        so = "The job stays while this pod is there"
    taint = f"kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    force = f"kubectl delete pod {name} --namespace {namespace} --grace-period=0 --force"
    # A Job with a failure policy replaces only what has failed, and its finalizer outlives force.
    if _TRACKED in (metadata.get("finalizers") or ()):
        way = f"{taint} (deleting the pod by force is not enough: the Job waits for it to fail)"
    else:
        way = f"{force} (needs the verb delete on pods, as the Role holdfast-submitter grants), or "
        way += taint
    return Trouble(
        pod=name,
        reason=f"pod {name} is Terminating, node {node} {silent}",
        words=f"pod {name} should have ended {minutes} min ago, but its node {node} {silent}. "
        f"{so}. Where the node is surely off: {way}",
    )


def _started_badly(
    pod: Object, events: Sequence[Object], ready: Mapping[str, bool]
) -> Trouble | None:
    name = name_of(pod)
    for event in events if phase_of(pod) == "Pending" else ():
        about = event.get("involvedObject") or {}
        if about.get("uid") not in (None, uid_of(pod)):
            continue  # a former pod's of the same name, which went while it was being mounted
        if about.get("name") == name and event.get("reason") in _NOT_MOUNTED:
            return Trouble(
                pod=name,
                reason=joined(str(event["reason"]), text_of(event.get("message"))),
                words="its volumes cannot be mounted; fix kubernetes.claim or volumes, or see "
                f"kubectl describe pod {name}",
            )
    return _lost(pod, ready)


def _lost(pod: Object, ready: Mapping[str, bool]) -> Trouble | None:
    if not is_lost(pod, ready):
        return None
    node = host_of(pod)
    return Trouble(
        pod=name_of(pod),
        reason=f"node {node} is NotReady",
        words=f"node {node} does not answer",
    )


def _unscheduled(name: str, scheduled: Mapping[str, Any]) -> Trouble:
    reason, message = str(scheduled.get("reason") or ""), text_of(scheduled.get("message"))
    words = "no node takes it"
    if reason == "SchedulingGated":
        words = "it is held by a scheduling gate until its queue has placed it"
    for pattern, meaning in _UNSCHEDULABLE:
        match = pattern.search(message)
        if match is not None:
            words = meaning.format(*match.groups())
            break
    reason = joined(reason, message)
    return Trouble(pod=name, reason=reason, words=words, is_final="persistentvolumeclaim" in reason)


def _last_end(status: Mapping[str, Any]) -> str:
    """Return how a container ended last, to be added to a sentence, if it has."""
    ended = (status.get("lastState") or {}).get("terminated") or {}
    if "exitCode" not in ended:
        return ""
    reason = str(ended.get("reason") or "")
    said = "" if reason in _PLAIN else f", {joined(reason, text_of(ended.get('message')))}"
    return f"; last with code {ended['exitCode']}{said}"
