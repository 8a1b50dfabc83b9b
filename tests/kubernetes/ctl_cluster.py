"""What every cluster has: scheduler, node lifecycle, garbage collection, claims, namespaces."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction

from api_faults import pod_requests, quantity
from api_resources import (
    CLAIMS,
    NAMESPACES,
    NODES,
    PODS,
    QUOTAS,
    Object,
    now,
    seconds_since,
)
from api_select import expressions_match
from api_store import Store, owners
from ctl_base import delete, is_leaving, is_over, say, store_status
from pod_kubelet import Kubelets
from pod_status import condition, set_condition

_UNREACHABLE = "node.kubernetes.io/unreachable"
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
EVICT_AFTER_S = 1.0
"""A real cluster waits 40 s for a node and 300 s before it evicts its pods."""


class Cluster:
    """The controllers that know nodes and pods only."""

    def __init__(self, store: Store, kubelets: Kubelets) -> None:
        self._store, self._kubelets = store, kubelets

    # Scheduling

    def schedule(self) -> None:
        """Bind each pod to the emptiest node that fits; say why none does."""
        store = self._store
        nodes = store.list(NODES)
        for pod in store.list(PODS):
            if "nodeName" in pod["spec"] or is_leaving(pod) or pod["spec"].get("schedulingGates"):
                continue
            pods = store.list(PODS)
            if missing := self._missing_claim(pod):
                self._leave_pending(pod, missing)
                continue
            reasons = {n["metadata"]["name"]: _why_not(pod, n, pods) for n in nodes}
            fits = [name for name, reason in reasons.items() if reason is None]
            if not fits:
                counts = Counter(filter(None, reasons.values()))
                text = ", ".join(f"{n} {reason}" for reason, n in sorted(counts.items()))
                self._leave_pending(pod, f"0/{len(nodes)} nodes are available: {text}.")
                continue
            load = Counter(p["spec"].get("nodeName") for p in pods if not is_over(p))
            self._bind(pod, min(fits, key=lambda name: (load[name], name)))

    def _missing_claim(self, pod: Object) -> str | None:
        space = pod["metadata"]["namespace"]
        for volume in pod["spec"].get("volumes") or ():
            name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if name and self._store.find(CLAIMS, space, name) is None:
                return f'persistentvolumeclaim "{name}" not found'
        return None

    def _bind(self, pod: Object, node: str) -> None:
        meta = pod["metadata"]

        def edit(obj: Object) -> None:
            obj["spec"]["nodeName"] = node
            set_condition(obj["status"], condition("PodScheduled", value=True))

        if self._store.change(PODS, meta["namespace"], meta["name"], edit) is not None:
            text = f"Successfully assigned {meta['namespace']}/{meta['name']} to {node}"
            say(self._store, pod, "Scheduled", text, by="default-scheduler")

    def _leave_pending(self, pod: Object, text: str) -> None:
        meta, changed = pod["metadata"], []

        def edit(obj: Object) -> None:
            row = condition("PodScheduled", value=False, reason="Unschedulable", message=text)
            before = list(obj["status"].get("conditions", ()))
            set_condition(obj["status"], row)
            changed.append(obj["status"]["conditions"] != before)

        self._store.change(PODS, meta["namespace"], meta["name"], edit)
        if changed == [True]:
            by, level = "default-scheduler", "Warning"
            say(self._store, pod, "FailedScheduling", text, by=by, level=level)

    # Nodes

    def watch_nodes(self) -> None:
        """Mark lost nodes, evict their pods; collect the pods of nodes that are no more."""
        for node in self._store.list(NODES):
            name = node["metadata"]["name"]
            lost = self._kubelets.is_lost(name)
            self._store.change(NODES, "", name, lambda obj, lost=lost: _mark_node(obj, lost=lost))
        nodes = {node["metadata"]["name"]: node for node in self._store.list(NODES)}
        for pod in self._store.list(PODS):
            name = pod["spec"].get("nodeName")
            if name is None:
                continue
            node = nodes.get(name)
            taints = {t["key"]: t for t in (node or {}).get("spec", {}).get("taints") or ()}
            if node is None or (_OUT_OF_SERVICE in taints and is_leaving(pod)):
                self._collect(pod)
            elif _UNREACHABLE in taints and not is_over(pod):
                self._evict(pod, taints[_UNREACHABLE])

    def _evict(self, pod: Object, taint: Object) -> None:
        meta = pod["metadata"]
        self._store.change(PODS, meta["namespace"], meta["name"], _not_ready)
        if is_leaving(pod) or seconds_since(taint["timeAdded"]) < EVICT_AFTER_S:
            return
        for toleration in pod["spec"].get("tolerations") or ():
            if _tolerates(toleration, taint) and toleration.get("tolerationSeconds") is None:
                return
        text = "Taint manager: deleting due to NoExecute taint"
        self._target(pod, "DeletionByTaintManager", text)
        delete(self._store, PODS, pod)

    def _collect(self, pod: Object) -> None:
        """Do what the pod garbage collector does: the pod has failed, and goes by force."""
        self._target(pod, "DeletionByPodGC", "PodGC: node no longer exists or is out of service")
        meta = pod["metadata"]

        def fail(obj: Object) -> None:
            if not is_over(obj):
                obj["status"]["phase"] = "Failed"

        self._store.change(PODS, meta["namespace"], meta["name"], fail)
        delete(self._store, PODS, pod, grace_s=0)

    def _target(self, pod: Object, reason: str, text: str) -> None:
        meta = pod["metadata"]
        row = condition("DisruptionTarget", value=True, reason=reason, message=text)
        self._store.change(
            PODS, meta["namespace"], meta["name"], lambda obj: set_condition(obj["status"], row)
        )

    # Garbage, claims, namespaces, quota

    def collect_garbage(self) -> None:
        """Delete what has lost all of its owners; end deletions in the foreground."""
        everything = self._store.everything()
        alive = self._store.uids()  # after it: an owner may have come in between
        for resource, obj in everything:
            meta = obj["metadata"]
            uids = list(owners(obj))
            if uids and not any(uid in alive for uid in uids):
                delete(self._store, resource, obj)
            if "foregroundDeletion" in meta.get("finalizers", ()):
                children = self._store.dependents(meta["uid"])
                for kind, child in children:
                    delete(self._store, kind, child)
                if not children:

                    def let_go(o: Object) -> None:
                        o["metadata"]["finalizers"].remove("foregroundDeletion")

                    self._store.change(resource, meta.get("namespace", ""), meta["name"], let_go)

    def bind_claims(self) -> None:
        """Give each claim a volume."""
        for claim in self._store.list(CLAIMS):
            spec = claim["spec"]
            status = {
                "phase": "Bound",
                "accessModes": spec.get("accessModes", []),
                "capacity": (spec.get("resources") or {}).get("requests", {}),
            }
            store_status(self._store, CLAIMS, claim, status)

    def end_namespaces(self) -> None:
        """Empty the namespaces that are to be deleted, then let them go."""
        for space in self._store.list(NAMESPACES):
            if not is_leaving(space):
                continue
            name = space["metadata"]["name"]
            inside = [
                (kind, obj)
                for kind, obj in self._store.everything()
                if obj["metadata"].get("namespace") == name
            ]
            for kind, obj in inside:
                delete(self._store, kind, obj)

            def edit(obj: Object, *, empty: bool = not inside) -> None:
                obj["status"] = {"phase": "Terminating"}
                if empty:
                    obj["metadata"]["finalizers"] = []

            self._store.change(NAMESPACES, "", name, edit)

    def count_quotas(self) -> None:
        """Write what is allowed into the status of each quota."""
        for quota in self._store.list(QUOTAS):
            hard = quota["spec"].get("hard", {})
            old = quota.get("status") or {}
            store_status(self._store, QUOTAS, quota, {**old, "hard": hard})


def _why_not(pod: Object, node: Object, pods: list[Object]) -> str | None:
    """Return why a node does not take a pod, as the scheduler says it."""
    spec, name = pod["spec"], node["metadata"]["name"]
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    if taint := _untolerated(spec, node):
        return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    if not _wants(spec, node):
        return "node(s) didn't match Pod's node affinity/selector"
    there = [p for p in pods if p["spec"].get("nodeName") == name and not is_over(p)]
    if _repelled(pod, there):
        return "node(s) didn't match pod anti-affinity rules"
    return _no_room(pod, node, there)


def _untolerated(spec: Object, node: Object) -> Object | None:
    tolerations = spec.get("tolerations") or ()
    for taint in node["spec"].get("taints") or ():
        hard = taint["effect"] in {"NoSchedule", "NoExecute"}
        if hard and not any(_tolerates(toleration, taint) for toleration in tolerations):
            return dict(taint)
    return None


def _no_room(pod: Object, node: Object, there: list[Object]) -> str | None:
    used: dict[str, Fraction] = defaultdict(Fraction)
    for other in there:
        for key, value in pod_requests(other).items():
            used[key] += value
    room = node["status"]["allocatable"]
    for key, value in sorted(pod_requests(pod).items()):
        if used[key] + value > quantity(room.get(key, 0)):
            return f"Insufficient {key}"
    return "Too many pods" if len(there) >= quantity(room.get("pods", 110)) else None


def _wants(spec: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get(
        "nodeSelectorTerms"
    )
    return not terms or any(expressions_match(term, labels) for term in terms)


def _repelled(pod: Object, there: list[Object]) -> bool:
    """Return whether anti-affinity by host name keeps the pod from the pods there."""
    rules = (pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}
    for term in rules.get("requiredDuringSchedulingIgnoredDuringExecution") or ():
        if term["topologyKey"] != "kubernetes.io/hostname":
            continue
        selector = term.get("labelSelector") or {}
        if any(expressions_match(selector, p["metadata"].get("labels") or {}) for p in there):
            return True
    return False


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in {None, "", taint["effect"]}:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in {None, "", taint["key"]}
    same = toleration.get("key") == taint["key"]
    return same and toleration.get("value", "") == taint.get("value", "")


def _mark_node(obj: Object, *, lost: bool) -> None:
    """Write into a node whether its kubelet is heard."""
    row = (
        condition("Ready", "Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status.")
        if lost
        else condition("Ready", "True", "KubeletReady", "kubelet is posting ready status")
    )
    set_condition(obj["status"], row)
    taints = obj["spec"].get("taints") or []
    there = any(t["key"] == _UNREACHABLE for t in taints)
    if lost and not there:
        for effect in ("NoSchedule", "NoExecute"):
            taints.append({"key": _UNREACHABLE, "effect": effect, "timeAdded": now()})
        obj["spec"]["taints"] = taints
    elif there and not lost:
        obj["spec"]["taints"] = [t for t in taints if t["key"] != _UNREACHABLE]


def _not_ready(obj: Object) -> None:
    if obj["status"].get("phase") == "Running":
        set_condition(obj["status"], condition("Ready", "False", "NodeNotReady"))
