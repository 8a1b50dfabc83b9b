"""The kinds of jobs that can be wrapped, and where their pods' templates are. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from launcher.render.kubernetes_names import API_VERSIONS, CONTAINERS, KINDS
from launcher.render.pod import Object
from launcher.spec.errors import UserError, Where
from launcher.spec.source import Path, read_documents
from launcher.wrap.manifest_commands import LAUNCHERS
from launcher.wrap.manifest_text import ManifestText

_WAYS: Final = {
    **dict.fromkeys(("PyTorchJob", "HyperPodPyTorchJob", "MPIJob"), "pytorchjob"),
    "JobSet": "jobset",
    "TrainJob": "trainjob",
}
"""Kind of a job that cannot be wrapped -> what a job file is rendered to in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """A kind of job that can be wrapped."""

    api_version: str
    kind: str
    target: str
    """What `holdfast batch` takes its pods for."""
    job_label: str
    """Label of pods with the job's name, set by its controller."""
    above: Path = ("spec",)
    """Where a JobSet is described."""
    container: str | None = None
    """Name of the agent's container that the operator asks for."""

    def describes(self, data: Object) -> bool:
        """Return whether a document is a job of this kind."""
        return (data.get("apiVersion"), data.get("kind")) == (self.api_version, self.kind)


PYTORCHJOB: Final = JobKind(
    api_version=API_VERSIONS["pytorchjob"],
    kind=KINDS["pytorchjob"],
    target="pytorchjob",
    job_label="training.kubeflow.org/job-name",
    container=CONTAINERS["pytorchjob"],
)
TRAINJOB: Final = JobKind(
    api_version=API_VERSIONS["trainjob"],
    kind=KINDS["trainjob"],
    target="trainjob",
    job_label="jobset.sigs.k8s.io/jobset-name",
    above=("spec", "template", "spec"),
    container=CONTAINERS["trainjob"],
)
_OF_TRAINER: Final = "trainer.kubeflow.org/trainjob-ancestor-step"
"""Label of the Job of a runtime whose pods train, with the value `trainer`."""
_KINDS: Final = (
    PYTORCHJOB,
    JobKind(
        api_version=API_VERSIONS["jobset"],
        kind=KINDS["jobset"],
        target="jobset",
        job_label="jobset.sigs.k8s.io/jobset-name",
    ),
    TRAINJOB,
    JobKind(
        api_version="batch/v1",
        kind="Job",
        target="jobset",
        job_label="batch.kubernetes.io/job-name",
    ),
)


def kind_of(text: str, file: str) -> JobKind:
    """Return the kind of the one job of a manifest.

    Raises:
        UserError: HF169, there is none that can be wrapped, or several.
    """
    documents = [each.data for each in read_documents(text, file)]
    jobs = [kind for kind in _KINDS for data in documents if kind.describes(data)]
    others = [kind for kind in jobs if kind.kind != "Job"]  # it may fetch the data
    if len(jobs) == 1 or len(others) == 1:
        return (others or jobs)[0]
    found = [f"{data.get('kind')} ({data.get('apiVersion')})" for data in documents]
    what = "several" if jobs else ", ".join(found)
    ways = {target for data in documents if (target := _WAYS.get(str(data.get("kind"))))}
    advice = "".join(
        f"; describe the training in a job file: holdfast render JOB.yaml --to {target}"
        for target in sorted(ways)
    )
    wanted = ", ".join(f"{each.kind} ({each.api_version})" for each in _KINDS)
    message = f"expected one {wanted}; found {what or 'no manifest'}{advice}"
    raise UserError("HF169", message, where=Where(file, 1))


def roles_of(job: ManifestText, kind: JobKind) -> tuple[list[Path], list[str]]:
    """Return the paths of what has the pods' templates, and what is to be known of others.

    Raises:
        UserError: HF169, there are none.
    """
    if kind is PYTORCHJOB:
        found = job.mapping("spec", "pytorchReplicaSpecs")
        if not found:
            job.refuse("it has no pytorchReplicaSpecs", ("spec",))
        return [("spec", "pytorchReplicaSpecs", role) for role in found], []
    if kind.kind == "Job":
        return [("spec",)], []
    rows = job.rows(*kind.above, "replicatedJobs")
    if not rows:
        job.refuse("it has no replicatedJobs", ("spec",))
    paths: list[Path] = [
        (*kind.above, "replicatedJobs", index, "template", "spec") for index in range(len(rows))
    ]
    if kind is TRAINJOB:
        labels = [(*path[:-1], "metadata", "labels", _OF_TRAINER) for path in paths]
        ours = [p for p, label in zip(paths, labels, strict=True) if job.get(*label) == "trainer"]
        if len(ours) != 1:
            job.refuse(f"expected one replicated job with the label {_OF_TRAINER}", kind.above)
        return ours, []
    ours = [path for path in paths if LAUNCHERS.search(json.dumps(job.get(*path, "template")))]
    if len(paths) == 1 or not ours:
        return paths[:1], []
    others = [str(job.get(*path[:3], "name")) for path in paths if path not in ours]
    return ours, [f"{name} starts no training and stays as it is" for name in others]
