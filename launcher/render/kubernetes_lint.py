"""Manifests -> Problems: what an API server takes, and a training job then suffers from. Pure.

`holdfast check FILE` runs it on manifests; every renderer's output passes it. Rules of one kind
are in kubernetes_lint_pytorch.py and kubernetes_lint_jobset.py, those of pods here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from launcher.errors import Problem, Where
from launcher.jobspec.env import SECRET_NAME
from launcher.jobspec.source import dotted
from launcher.render.kubernetes_documents import (
    JOB_KINDS,
    Document,
    Found,
    Path,
    PodSpec,
    as_list,
    at,
    number,
    pods_of,
)
from launcher.render.kubernetes_lint_jobset import jobset_rules, trainjob_rules
from launcher.render.kubernetes_lint_pytorch import pytorchjob_rules

Lines = Mapping[tuple[int, Path], int]
"""(document, path) -> line, from 1."""

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RDMA = re.compile(r"rdma/|hca|efa$|roce", re.IGNORECASE)
_SUFFIX: Final = {"PyTorchJob": len("-worker-9999"), "TrainJob": len("-node-0-9999-abcde")}
"""What controllers add to a job's name."""
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), 1)
}
DEFAULT_GRACE_S: Final = 30
_SHM: Final = "/dev/shm"  # noqa: S108  of the pods


def is_manifest(documents: Sequence[Any]) -> bool:
    """Return whether these are Kubernetes objects, rather than a job file."""
    return bool(documents) and all(
        isinstance(each, dict) and "apiVersion" in each and "kind" in each for each in documents
    )


def lint(documents: Sequence[Any], file: str = "", lines: Lines | None = None) -> list[Problem]:
    """Return every mistake of `documents`; those with HF15x are warnings.

    Args:
        documents: parsed YAML.
        file: its name, for messages.
        lines: where values were written; without it messages have no lines.
    """
    problems = []
    parsed = [Document(index, each) for index, each in enumerate(documents) if not _lacks(each)]
    for index, each in enumerate(documents):
        if lacks := _lacks(each):
            message = f"a document without {', '.join(lacks)} is no object: write what it is"
            problems.append(_problem(Found("HF730", (), message), index, "", file, lines))
    for document in parsed:
        for found in _rules(document, parsed):
            name = f"{document.kind}/{document.name}"
            problems.append(_problem(found, document.index, name, file, lines))
    return problems


def _lacks(document: Any) -> list[str]:
    """Return the keys that make an object and that are missing."""
    keys = (("apiVersion",), ("kind",), ("metadata", "name"))
    return [".".join(key) for key in keys if not at(document, key)]


def _problem(found: Found, index: int, name: str, file: str, lines: Lines | None) -> Problem:
    line = None
    for end in range(len(found.path), -1, -1):
        line = (lines or {}).get((index, found.path[:end]))
        if line is not None:
            break
    place = f"{name} {dotted(found.path)}".strip()
    return Problem(found.code, Where(file, line, place), found.message)


def _rules(document: Document, others: Sequence[Document]) -> Iterator[Found]:
    kind = document.kind
    if kind == "PyTorchJob":
        yield from pytorchjob_rules(document)
    elif kind == "TrainJob":
        yield from trainjob_rules(document)
    elif kind in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
        yield from jobset_rules(document)
    elif kind == "PodDisruptionBudget":
        yield from _budget(document)
    elif kind == "ConfigMap":
        yield from _config_map(document)
    if kind in JOB_KINDS:
        yield from _name(document)
        for pod in pods_of(document):
            yield from _shared_memory(pod)
            yield from _rdma(pod)
            yield from _secrets(pod)
            yield from _grace(pod)
            yield from _claims(pod, others)


def _name(document: Document) -> Iterator[Found]:
    longest = 63 - _SUFFIX.get(document.kind, 0)
    if not _DNS_1035.fullmatch(document.name):
        message = (
            f"{document.name} is no name of a job: use lower-case letters, digits and -, a letter "
            "first"
        )
        yield Found("HF745", ("metadata", "name"), message)
    elif len(document.name) > longest:
        message = (
            f"{len(document.name)} characters are too many, for the names of its pods are longer: "
            f"use at most {longest}"
        )
        yield Found("HF745", ("metadata", "name"), message)


def _shared_memory(pod: PodSpec) -> Iterator[Found]:
    """Yield a pod whose workers have the runtime's 64 MiB, or memory without an end."""
    mounts = as_list(pod.main.get("volumeMounts"))
    at_shm = [each for each in mounts if at(each, ("mountPath",)) == _SHM]
    names = [at(each, ("name",)) for each in at_shm]
    volumes = as_list(pod.data.get("volumes"))
    if not names:
        if pod.data.get("hostIPC") is not True:
            message = (
                "there is no volume at /dev/shm: workers have 64 MiB; mount an emptyDir with "
                "medium: Memory and a sizeLimit there"
            )
            yield Found("HF746", (*pod.main_path, "volumeMounts"), message)
        return
    for index, volume in enumerate(volumes):
        if at(volume, ("name",)) != names[0]:
            continue
        path: Path = (*pod.path, "volumes", index)
        empty = at(volume, ("emptyDir",))
        if not isinstance(empty, dict) or empty.get("medium") != "Memory":
            message = (
                "what is mounted at /dev/shm is no memory: make it an emptyDir with medium: Memory "
                "and a sizeLimit"
            )
            yield Found("HF746", path, message)
            continue
        size = _bytes(empty.get("sizeLimit"))
        limit = _bytes(at(pod.main, ("resources", "limits", "memory")))
        if size is None:
            message = "memory without a sizeLimit may take the node's: give one"
            yield Found("HF746", (*path, "emptyDir"), message)
        elif limit is not None and size >= limit:
            message = (
                f"{empty['sizeLimit']} count towards the container's memory limit, which is no "
                "more: the pod would be killed; raise the limit"
            )
            yield Found("HF746", (*path, "emptyDir", "sizeLimit"), message)


def _rdma(pod: PodSpec) -> Iterator[Found]:
    limits = at(pod.main, ("resources", "limits"), {})
    named = [name for name in limits if _RDMA.search(str(name))] if isinstance(limits, dict) else []
    context = at(pod.main, ("securityContext",), {})
    added = as_list(at(context, ("capabilities", "add")))
    if named and "IPC_LOCK" not in added and at(context, ("privileged",)) is not True:
        message = f"{named[0]} needs memory that is locked: add the capability IPC_LOCK"
        yield Found("HF713", (*pod.main_path, "securityContext"), message)


def _secrets(pod: PodSpec) -> Iterator[Found]:
    for index, row in enumerate(as_list(pod.main.get("env"))):
        name, value = at(row, ("name",), ""), at(row, ("value",))
        if value and SECRET_NAME.search(str(name)):
            message = f"{name} is in the open here; use valueFrom.secretKeyRef"
            yield Found("HF716", (*pod.main_path, "env", index), message)


def _grace(pod: PodSpec) -> Iterator[Found]:
    """Yield a pod that is killed too early: the preStop hook's time counts too."""
    grace = number(pod.data.get("terminationGracePeriodSeconds"))
    path = (*pod.path, "terminationGracePeriodSeconds")
    variables = pod.variables()
    shutdown = _seconds(variables.get("HOLDFAST_SHUTDOWN_S"))
    wait = _seconds(variables.get("HOLDFAST_SAVE_WAIT_S"))
    if grace is None or grace <= DEFAULT_GRACE_S:
        shown = f"{DEFAULT_GRACE_S} seconds, the default," if grace is None else f"{grace} seconds"
        message = f"{shown} are too few to save in; give what a save takes, and more"
        yield Found("HF747", path, message)
    elif shutdown is not None and grace < shutdown + (wait or 0):
        needs = shutdown + (wait or 0)
        message = (
            f"{grace} s are fewer than preStop's {wait or 0} s and the {shutdown} s of the "
            f"shut-down: the pod is killed before it has saved; use {needs} or more"
        )
        yield Found("HF747", path, message)


def _claims(pod: PodSpec, others: Sequence[Document]) -> Iterator[Found]:
    """Yield a claim of the same file that only one node can mount."""
    claims = {each.name: each for each in others if each.kind == "PersistentVolumeClaim"}
    for index, volume in enumerate(as_list(pod.data.get("volumes"))):
        name = at(volume, ("persistentVolumeClaim", "claimName"))
        claim = claims.get(str(name))
        if claim is None:
            continue
        modes = as_list(claim.get("spec", "accessModes"))
        if not {"ReadWriteMany", "ReadOnlyMany"} & {str(mode) for mode in modes}:
            shown = ", ".join(map(str, modes)) or "none"
            message = (
                f"claim {name} has access mode {shown}, so one node alone can mount it: use "
                "ReadWriteMany"
            )
            yield Found("HF749", (*pod.path, "volumes", index), message)


def _budget(document: Document) -> Iterator[Found]:
    spec = document.mapping("spec")
    if "maxUnavailable" in spec or isinstance(spec.get("minAvailable"), str):
        key = "maxUnavailable" if "maxUnavailable" in spec else "minAvailable"
        message = (
            "for pods of a Job or an operator only a whole minAvailable is understood; with "
            "anything else no pod may be drained at all: use minAvailable with all pods but one"
        )
        yield Found("HF712", ("spec", key), message)


def _config_map(document: Document) -> Iterator[Found]:
    size = sum(len(str(text).encode()) for text in document.mapping("data").values())
    if size > 1 << 20:
        message = (
            f"{size:,} bytes are more than the 1 MiB of a ConfigMap: put large files on a volume"
        )
        yield Found("HF726", ("data",), message)


def _bytes(value: Any) -> int | None:
    match = re.fullmatch(r"([0-9]+)(\.[0-9]+)?([KMGT]i|[kMGT])?", str(value))
    return (
        None if match is None else int(float(match[1] + (match[2] or "")) * _UNITS[match[3] or ""])
    )


def _seconds(value: Any) -> int | None:
    return int(value) if isinstance(value, str) and value.isdigit() else None
