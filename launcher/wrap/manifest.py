"""A job of Kubernetes whose pods run torchrun -> one that survives lost nodes. Pure.

A manifest is changed in its text, as a batch script is: comments, order and all other lines stay.
The command of a container stays too: `holdfast batch` runs it (launcher/node/container.py), and
what it starts is known when it is run, for only then the kubelet, the operator and the pods' shell
have filled in torchrun's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.render.kubernetes_facts import RESTARTS_PER_NODE
from launcher.spec.secret_forms import leaks
from launcher.spec.source import Path
from launcher.wrap.manifest_kinds import (
    PYTORCHJOB,
    TRAINJOB,
    JobKind,
    kind_of,
    roles_of,
)
from launcher.wrap.manifest_pods import CLAIM_MOUNT, Pods, TrainJob
from launcher.wrap.manifest_text import ManifestText


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """A wrapped manifest."""

    text: str
    run_dir: str
    """Its path in the pods."""
    images: tuple[str, ...]
    """Those that must contain holdfast."""
    sidecars: tuple[str, ...]
    """Containers that are initContainers now."""
    secrets: tuple[str, ...]
    """Texts of the manifest that must not be shown."""
    notes: tuple[str, ...]
    """What of the manifest does something else now, or may, a line each."""


def is_manifest(text: str) -> bool:
    """Return whether a text is a manifest of Kubernetes rather than a script."""
    found = re.search(r"^[\s{]*[\"']?apiVersion[\"']?\s*:", text, re.MULTILINE)
    return not text.startswith("#!") and found is not None


def wrap_manifest(
    text: str, file: str, *, runs: str | None = None, claim: str | None = None
) -> Wrapped:
    """Return the manifest `text` with what lets its job survive lost nodes.

    Other documents than its one job stay. `file` is its name, for messages; `runs` the folder of
    run directories, on a volume that all pods share, by default `runs` on the only one. `claim` is
    a claim that is mounted for it, at CLAIM_MOUNT.

    Raises:
        UserError: HF169, all that keeps it from that; HF163, a secret in a command, which would be
            kept in job.json; HF003 and HF007, it cannot be read.
    """
    kind = kind_of(text, file)
    job = ManifestText(text, file, kind.describes)
    head = job.mapping("metadata")
    trainer = None
    if kind is TRAINJOB:
        trainer = TrainJob.of(job)
        job = trainer.with_own_runtime(job)
    name = head.get("name") or f"{head.get('generateName', '')}…"
    roles, notes = roles_of(job, kind)
    pods = []
    for role in roles:
        with job.checked():
            pods.append(Pods(job, kind, role, trainer))
    num_pods = sum(pod.num_pods for pod in pods)
    folders = set()
    for pod in pods:
        with job.checked():
            pod.check_command(num_pods)
        with job.checked():
            pod.check_variables()
    for pod in pods:
        with job.checked():
            if claim is not None:
                pod.mount(claim)
            folders.add(pod.runs(runs or (f"{CLAIM_MOUNT}/runs" if claim else None)))
    if len(folders) > 1:
        with job.checked():
            job.refuse(
                f"its pods share no volume at one place ({', '.join(sorted(folders))}); "
                "name a folder that all of them have: --runs DIR"
            )
    job.settle()
    (folder,) = folders
    images = dict.fromkeys(pod.image for pod in pods)
    secrets = tuple(leak.secret for leak in leaks(job.source.data))
    notes += [note for pod in pods for note in pod.told(folder)]
    shutdown_s = max(pod.shutdown_s() for pod in pods)
    notes += _let_restart(job, kind, pods)
    sidecars = dict.fromkeys(name for pod in pods for name in pod.move_sidecars())
    for pod in pods:
        pod.wrap_command()
    for pod in pods:
        pod.wrap(folder, shutdown_s, num_pods)
    return Wrapped(
        text=job.text,
        run_dir=f"{folder}/{name}",
        images=tuple(images),
        sidecars=tuple(sidecars),
        secrets=secrets,
        notes=tuple(dict.fromkeys(notes)),
    )


def _let_restart(job: ManifestText, kind: JobKind, pods: list[Pods]) -> Iterator[str]:
    """Have the controller replace pods for as long as agents want; say what does so no more."""
    if kind is PYTORCHJOB:
        yield from _let_operator_restart(job, pods)
        return
    if kind.kind != "Job":
        policy = job.mapping(*kind.above, "failurePolicy")
        if policy.get("maxRestarts") or policy.get("rules"):
            yield "failurePolicy restarts no more: agents restart the training, not all pods"
        job.put((*kind.above, "failurePolicy"), {"maxRestarts": 0})
    for pod in pods:
        yield from pod.let_job_restart()


def _let_operator_restart(job: ManifestText, pods: list[Pods]) -> Iterator[str]:
    """See `_let_restart`; of a PyTorchJob."""
    if job.get("spec", "runPolicy", "cleanPodPolicy") != "All":
        job.put(("spec", "runPolicy", "cleanPodPolicy"), "Running")
    path: Path = ("spec", "runPolicy", "backoffLimit")
    limit, least = job.get(*path), RESTARTS_PER_NODE * sum(pod.num_pods for pod in pods)
    if isinstance(limit, int) and limit < least:
        # common/job.go: a failed pod beside a retry of the job above the limit ends the job.
        job.put(path, least)
        yield (
            f"backoffLimit: {limit} is {least} now: a pod that is killed would have ended the job; "
            "the agents' restart budget ends it, and nothing where no agent can start"
        )
    for before in dict.fromkeys(pod.restart_policy for pod in pods):
        if before in ("Never", "OnFailure", "Always"):
            yield f"restartPolicy: {before} is ExitCode now: the agent's code says what follows"
    for pod in pods:
        pod.put_restart_policy("ExitCode")
    if job.get("spec", "elasticPolicy", "metrics"):
        yield (
            "elasticPolicy.metrics stays: its autoscaler changes the number of pods of a running "
            "job, each time at the price of a restart; take it out"
        )
