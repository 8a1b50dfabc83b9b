"""Kubernetes' nodes as machines: what it says against each. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from launcher.backends.base import Machine
from launcher.backends.kubernetes.documents import Object

RACK: Final = "topology.kubernetes.io/rack"
REASON: Final = "holdfast.dev/drain-reason"
"""Annotation of a node that `holdfast drain` has cordoned: why, and by whom."""
_OWN: Final = "node.kubernetes.io/"
"""Taints that Kubernetes puts on nodes that are unwell, or cordoned."""


def of_nodes(nodes: Iterable[Object]) -> list[Machine]:
    """Return the machines that nodes of the API are.

    A node is closed by a cordon, a taint of Kubernetes' own, or a condition that says it is unwell:
    Ready that is not True, any other that is True, as node-problem-detector sets them. Other taints
    are the site's way of sorting its nodes.
    """
    found = []
    for node in nodes:
        meta: dict[str, Any] = node.get("metadata") or {}
        labels = meta.get("labels") or {}
        found.append(
            Machine(
                name=str(meta.get("name", "")),
                closed="; ".join(_said(node, meta)),
                rack=str(labels.get(RACK, "")),
            )
        )
    return [machine for machine in found if machine.name]


def _said(node: Object, meta: dict[str, Any]) -> Iterable[str]:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    if spec.get("unschedulable"):
        why = (meta.get("annotations") or {}).get(REASON)
        yield f"cordoned: {why}" if why else "cordoned"
    for condition in status.get("conditions") or ():
        name, state = condition.get("type"), condition.get("status")
        if state != "True" if name == "Ready" else state == "True":
            why = condition.get("reason") or condition.get("message") or ""
            yield f"{name} is {state}: {why}"
    for taint in spec.get("taints") or ():
        key = str(taint.get("key", ""))
        if key.startswith(_OWN) and not key.endswith("/unschedulable"):
            yield f"taint {key}"
