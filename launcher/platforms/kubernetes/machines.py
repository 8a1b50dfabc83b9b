"""Kubernetes' nodes as machines: what it says against each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from launcher.platforms.base import Machine
from launcher.platforms.kubernetes.documents import Object

RACK: Final = "topology.kubernetes.io/rack"
REASON: Final = "holdfast.dev/drain-reason"
"""Annotation of a node that `holdfast drain` has cordoned: why, by whom and when."""
_OWN: Final = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Taints that Kubernetes puts on nodes that are unwell, cordoned, or shut down."""
_ROLE: Final = "node-role.kubernetes.io/"
_TYPE: Final = "node.kubernetes.io/instance-type"
_EVERY_NODE_HAS: Final = ("cpu", "memory", "pods", "ephemeral-storage")
_WORDS_CHARS: Final = 200

_Kind = tuple[Any, ...]


def of_nodes(nodes: Iterable[Object]) -> list[Machine]:
    """Return the machines that nodes of the API are.

    A node is closed by a cordon, a condition that says it is unwell (Ready that is not True, any
    other that is True, as node-problem-detector sets them), a taint of Kubernetes' own, or another
    one that most nodes of its kind do not have. What most have is the site's way of sorting nodes.
    """
    there = [node for node in nodes if (node.get("metadata") or {}).get("name")]
    kinds = Counter(map(_kind, there))
    common = Counter((_kind(node), key) for node in there for key in {*_taints(node)})
    found = []
    for node in there:
        kind, meta = _kind(node), node["metadata"]
        odd = [key for key in _taints(node) if 2 * common[kind, key] <= kinds[kind]]
        said = [*_said(node), *(f"taint {key}" for key in _taints(node) if _is_own(key))]
        said += [f"taint {key}" for key in odd if not _is_own(key) and not key.startswith(_ROLE)]
        rack = str((meta.get("labels") or {}).get(RACK, ""))
        found.append(Machine(name=str(meta["name"]), closed="; ".join(said), rack=rack))
    return found


def _kind(node: Object) -> _Kind:
    """Return what nodes that are used for the same have in common: type and devices."""
    capacity = (node.get("status") or {}).get("capacity") or {}
    devices = sorted(
        (str(name), str(number))
        for name, number in capacity.items()
        if name not in _EVERY_NODE_HAS and not name.startswith("hugepages-")
    )
    return (node["metadata"].get("labels") or {}).get(_TYPE, ""), *devices


def _taints(node: Object) -> list[str]:
    """Return the taints that keep pods off, as kubectl writes them; a cordon is not among them."""
    found = []
    for taint in (node.get("spec") or {}).get("taints") or ():
        key, value, effect = (str(taint.get(name) or "") for name in ("key", "value", "effect"))
        if effect != "PreferNoSchedule" and not key.endswith("/unschedulable"):
            found.append(f"{key}{'=' * bool(value)}{value}{':' * bool(effect)}{effect}")
    return found


def _is_own(taint: str) -> bool:
    return taint.startswith(_OWN)


def _said(node: Object) -> Iterator[str]:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    if spec.get("unschedulable"):
        why = (node["metadata"].get("annotations") or {}).get(REASON)
        yield f"cordoned: {why}" if why else "cordoned"
    for condition in status.get("conditions") or ():
        name, state = condition.get("type"), condition.get("status")
        if state != "True" if name == "Ready" else state == "True":
            words = [str(condition.get(key) or "") for key in ("reason", "message")]
            why = " ".join(": ".join(filter(None, words)).split())[:_WORDS_CHARS]
            yield f"{name} is {state}: {why}" if why else f"{name} is {state}"
