"""Manifests as rules look at them: one document, its pods, where each value was written. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

Path = tuple[str | int, ...]
JOB_KINDS: Final = ("PyTorchJob", "JobSet", "TrainJob", "TrainingRuntime", "ClusterTrainingRuntime")
_TORCHRUN = re.compile(r"\b(torchrun|torch\.distributed\.(run|launch)|python -m torch)\b")
_OURS = re.compile(r"launcher\.node\b")


@dataclass(frozen=True, slots=True)
class Found:
    """One mistake: its code, the value's path in the document, and a message."""

    code: str
    path: Path
    message: str


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file of manifests."""

    index: int
    data: dict[str, Any]

    @property
    def kind(self) -> str:
        """Its kind, or nothing."""
        return str(self.data.get("kind", ""))

    @property
    def name(self) -> str:
        """Its name, or nothing."""
        return str(self.get("metadata", "name", default=""))

    def get(self, *path: str | int, default: Any = None) -> Any:
        """Return what is at `path`, or `default`, whatever is on the way."""
        return at(self.data, path, default)

    def mapping(self, *path: str | int) -> dict[str, Any]:
        """Return the mapping at `path`, empty where there is none."""
        found = self.get(*path)
        return found if isinstance(found, dict) else {}

    def has_queue(self) -> bool:
        """Whether Kueue looks after it."""
        return "kueue.x-k8s.io/queue-name" in self.mapping("metadata", "labels")


@dataclass(frozen=True, slots=True)
class PodSpec:
    """The template of a job's pods."""

    document: Document
    path: Path
    """Of the template's spec."""
    container: int
    """Which of the containers does the training."""

    @property
    def data(self) -> dict[str, Any]:
        """The pod's spec."""
        return self.document.mapping(*self.path)

    @property
    def main(self) -> dict[str, Any]:
        """The container that does the training."""
        return self.document.mapping(*self.main_path)

    @property
    def main_path(self) -> Path:
        """Where that is."""
        return (*self.path, "containers", self.container)

    def command(self) -> str:
        """Return command and arguments as one line."""
        words = [*as_list(self.main.get("command")), *as_list(self.main.get("args"))]
        return " ".join(str(word) for word in words)

    def is_ours(self) -> bool:
        """Whether the agent is what runs there: it maps exit codes, and meets over the board."""
        return bool(_OURS.search(self.command()))

    def is_torchrun(self) -> bool:
        """Whether torchrun is, which ends with 1 whatever happened."""
        return bool(_TORCHRUN.search(self.command()))

    def variables(self) -> dict[str, Any]:
        """Return the literal environment variables."""
        rows = [row for row in as_list(self.main.get("env")) if isinstance(row, dict)]
        return {str(row.get("name")): row.get("value") for row in rows}


def at(data: Any, path: Sequence[str | int], default: Any = None) -> Any:
    """Return what lies at `path` in plain data, or `default`."""
    for part in path:
        there = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if not there and not (isinstance(data, dict) and part in data):
            return default
        data = data[part]
    return default if data is None else data


def as_list(value: Any) -> list[Any]:
    """Return a list, empty where it is none."""
    return value if isinstance(value, list) else []


def number(value: Any) -> int | None:
    """Return a whole number, None for all else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def pods_of(document: Document) -> Iterator[PodSpec]:
    """Yield the pod templates of a job or a runtime."""
    if document.kind == "PyTorchJob":
        for role in document.mapping("spec", "pytorchReplicaSpecs"):
            where: Path = ("spec", "pytorchReplicaSpecs", role, "template", "spec")
            yield PodSpec(document, where, _main(document, where, "pytorch"))
        return
    for path, job in replicated_jobs(document):
        where = (*path, "template", "spec", "template", "spec")
        name = "node" if "Runtime" in document.kind else "pytorch"
        if _is_initializer(job):
            continue
        yield PodSpec(document, where, _main(document, where, name))


def replicated_jobs(document: Document) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield path and contents of a JobSet's replicated jobs, in whatever document it is."""
    path: Path = ("spec",) if document.kind == "JobSet" else ("spec", "template", "spec")
    if document.kind not in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
        return
    for index, job in enumerate(as_list(document.get(*path, "replicatedJobs"))):
        if isinstance(job, dict):
            yield (*path, "replicatedJobs", index), job


def jobset_path(document: Document) -> Path:
    """Return where the spec of a JobSet is in a JobSet or a runtime."""
    return ("spec",) if document.kind == "JobSet" else ("spec", "template", "spec")


def _is_initializer(job: dict[str, Any]) -> bool:
    step = at(
        job, ("template", "metadata", "labels", "trainer.kubeflow.org/trainjob-ancestor-step")
    )
    return step in ("dataset-initializer", "model-initializer")


def _main(document: Document, path: Path, name: str) -> int:
    containers = as_list(document.get(*path, "containers"))
    named = [i for i, each in enumerate(containers) if at(each, ("name",)) == name]
    return named[0] if named else 0
