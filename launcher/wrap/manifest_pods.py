"""The pods of a job that is wrapped: their containers, volumes and variables. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from launcher.render.kinds import indexed_job
from launcher.render.kubernetes_facts import RESTARTS_PER_NODE
from launcher.render.kubernetes_names import CLAIM_VOLUME, SHM_VOLUME, WITHOUT_MESH
from launcher.render.pod import OF_POD, SHM, Object, from_field, label_path
from launcher.spec.source import Path, read_documents
from launcher.wrap.launches import AFTER_KILL_S
from launcher.wrap.manifest_commands import LAUNCHERS, check_command, words_of, wrap_command
from launcher.wrap.manifest_kinds import PYTORCHJOB, TRAINJOB, JobKind
from launcher.wrap.manifest_text import ManifestText
from launcher.wrap.tasks import runs_python
from launcher.wrap.wrapped import shutdown_timeouts

GRACE_S: Final = 120
"""Least terminationGracePeriodSeconds: the default is 30, all of which torchrun takes. A
--shutdown-timeout above 60 s needs more."""
_END_S: Final = 30
"""Part of the grace from the agent's end, or its death, to the pod's."""
_SHARED: Final = ("persistentVolumeClaim", "nfs", "csi", "cephfs")
"""Volumes that several nodes may mount."""
_OF_A_POD: Final = (
    *("emptyDir", "ephemeral", "configMap", "secret", "downwardAPI", "projected", "image"),
    *("awsElasticBlockStore", "azureDisk", "gcePersistentDisk"),
)
"""Volumes that end with their pod, or that only one node mounts."""
CLAIM_MOUNT: Final = "/holdfast"
"""Where `--claim` mounts a claim."""
_RUNTIMES: Final = ("ClusterTrainingRuntime", "TrainingRuntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """What a TrainJob says of the pods of its runtime."""

    runtime: str
    """Its name."""
    own_runtime: str
    """Name of the one that takes its place: others use the runtime too."""
    namespace: str | None
    image: str | None
    gpus: str | None
    num_nodes: int | None
    command: str
    """Its words; empty: the runtime has the command."""

    @classmethod
    def of(cls, job: ManifestText) -> TrainJob:
        """Read it.

        Raises:
            UserError: HF169, its runtime is not in the file before it, or its command cannot be
                wrapped; HF163.
        """
        reference = job.mapping("spec", "runtimeRef")
        runtime, kind = str(reference.get("name")), reference.get("kind") or _RUNTIMES[0]
        rows = read_documents(job.text, job.file)
        kinds = [(each.data.get("kind"), _name_of(each.data)) for each in rows]
        here = next(i for i, (kind, _) in enumerate(kinds) if kind == TRAINJOB.kind)
        if (kind, runtime) not in kinds[:here]:
            job.refuse(
                f"its pods are its runtime's, which this file must have before it: "
                f"(kubectl get {str(kind).lower()} {runtime} -o yaml; echo ---; cat {job.file}) "
                "> BOTH.yaml, and wrap that",
                ("spec", "runtimeRef"),
            )
        path: Path = ("spec", "trainer")
        limits = job.mapping(*path, "resourcesPerNode", "limits")
        words = words_of(job, path)
        if words:
            check_command(job, path)
        head = job.mapping("metadata")
        name = str(head.get("name") or head.get("generateName", "")).strip("-")
        nodes = job.get(*path, "numNodes")
        return cls(
            runtime=runtime,
            own_runtime=f"{runtime}-{name}",
            namespace=head.get("namespace"),
            image=job.get(*path, "image"),
            gpus=_gpus_in(limits),
            num_nodes=nodes if isinstance(nodes, int) else None,
            command=" ".join(word for _, word in words),
        )

    def with_own_runtime(self, job: ManifestText) -> ManifestText:
        """Have the TrainJob use a runtime of its own; return the text with that as the document."""
        if self.command:
            wrap_command(job, ("spec", "trainer"))
        kind, group = _RUNTIMES[1], "trainer.kubeflow.org"
        reference = {"apiGroup": group, "kind": kind, "name": self.own_runtime}
        job.put(("spec", "runtimeRef"), reference)
        names = (self.runtime, self.own_runtime)
        runtime = ManifestText(
            job.text,
            job.file,
            lambda data: data.get("kind") in _RUNTIMES and _name_of(data) in names,
        )
        labels = runtime.get("metadata", "labels")
        head = {
            "name": self.own_runtime,
            **({"namespace": self.namespace} if self.namespace else {}),
            **({"labels": labels} if labels else {}),
        }
        runtime.put(("metadata",), head)  # of one that was got, also its uid and its like
        runtime.put(("kind",), kind)
        return runtime


def _name_of(data: Object) -> object:
    match data:
        case {"metadata": {"name": name}}:
            return name
    return None


def _gpus_in(limits: Object) -> str | None:
    return next((str(count) for name, count in limits.items() if name.endswith("/gpu")), None)


class Pods:
    """The pods of the role at path `role` of a manifest.

    Raises:
        UserError: HF169, none of their containers trains, or it is wrapped already.
    """

    def __init__(
        self, job: ManifestText, kind: JobKind, role: Path, trainer: TrainJob | None
    ) -> None:
        self._job, self._kind, self._role, self._trainer = job, kind, role, trainer
        self._spec = (*role, "template", "spec")
        self.container = self._find()
        ours = trainer.command if trainer is not None else ""
        self._command = ours or self._text(self.container)

    @property
    def image(self) -> str:
        """Of the agent's container."""
        own = None if self._trainer is None else self._trainer.image
        return own or str(self._job.get(*self.container, "image"))

    def _find(self) -> Path:
        """Return the agent's container."""
        job, named = self._job, self._kind.container
        rows = job.rows(*self._spec, "containers")
        here: list[Path] = [(*self._spec, "containers", index) for index in range(len(rows))]
        if not rows:
            job.refuse("its pods have no containers", self._role)
        if named is not None:
            ours = [path for path in here if job.get(*path, "name") == named]
            others = [path for path in here if path not in ours and self._starts(path)]
            if len(ours) != 1:
                job.refuse(
                    f"expected one container called {named}, which the operator asks for",
                    self._role,
                )
            if others:
                job.refuse(f"it starts a training, as only {named} may", others[0])
            return ours[0]
        ours = here if len(here) == 1 else [path for path in here if self._starts(path)]
        if len(ours) != 1:
            what = "several" if ours else "none"
            job.refuse(
                f"expected one of its containers to start a training, found {what}", self._role
            )
        return ours[0]

    def _starts(self, container: Path) -> bool:
        return LAUNCHERS.search(self._text(container)) is not None

    def _text(self, container: Path) -> str:
        return " ".join(word for _, word in words_of(self._job, container))

    @property
    def num_pods(self) -> int:
        """How many there are of this role."""
        job, role = self._job, self._role
        if self._kind is PYTORCHJOB:
            return _number(job.get(*role, "replicas"))
        if self._trainer is not None:
            of_runtime = job.get("spec", "mlPolicy", "numNodes")
            return self._trainer.num_nodes or _number(of_runtime)
        jobs = _number(job.get(*role[:3], "replicas")) if self._kind.kind == "JobSet" else 1
        return jobs * _number(job.get(*role, "parallelism"))

    @property
    def restart_policy(self) -> str:
        """That of the role of a PyTorchJob."""
        return str(self._job.get(*self._role, "restartPolicy"))

    def put_restart_policy(self, value: str) -> None:
        """Write that of the role of a PyTorchJob."""
        self._job.put((*self._role, "restartPolicy"), value)

    def let_job_restart(self) -> Iterator[str]:
        """Have the Job of this role replace pods for as long as agents want; see `_let_restart`."""
        job, role = self._job, self._role
        name = str(job.get(*self.container, "name"))
        pods = self.num_pods if self._trainer else _number(job.get(*role, "parallelism"))
        wanted = indexed_job(name, limit=RESTARTS_PER_NODE * pods, num_pods=pods)
        if job.get(*role, "completions") is None and self._trainer is None:
            wanted["completions"] = pods
        if job.get(*role, "podReplacementPolicy") is not None:
            wanted["podReplacementPolicy"] = "Failed"
        for field, value in wanted.items():
            before = job.get(*role, field)
            if before not in (None, value):
                shown = f"{before} is {value}" if isinstance(value, str | int) else "is Holdfast's"
                yield f"{field}: {shown} now: a pod that is lost would have ended the job"
            job.put((*role, field), value)
        before = job.get(*self._spec, "restartPolicy")
        if before not in (None, "Never"):
            yield f"restartPolicy: {before} is Never now: the Job makes a new pod"
        job.put((*self._spec, "restartPolicy"), "Never")

    def check_command(self, num_pods: int) -> None:
        """See manifest_commands; `num_pods` are those of the job."""
        if self._trainer is None or not self._trainer.command:
            ranks = self._kind is PYTORCHJOB and num_pods > 1
            check_command(self._job, self.container, num_pods, ranks=ranks)

    def shutdown_s(self) -> float:
        """Return the largest --shutdown-timeout that the command's text says; 0: none."""
        return max(shutdown_timeouts(self._command), default=0.0)

    def move_sidecars(self) -> list[str]:
        """Make all containers but the agent's into sidecars; return their names.

        In `containers` one that still runs keeps its pod from ending, and so from being replaced.
        """
        job, here = self._job, (*self._spec, "containers")
        own = job.get(*self.container, "name")
        others = [
            (index, row) for index, row in enumerate(job.rows(*here)) if row.get("name") != own
        ]
        for index, _ in reversed(others):
            job.remove((*here, index))
        job.extend(
            (*self._spec, "initContainers"),
            [{**row, "restartPolicy": "Always"} for _, row in others],
        )
        self.container = (*here, 0)
        return [str(row.get("name")) for _, row in others]

    def mount(self, claim: str) -> None:
        """Mount a claim for the run directories.

        Raises:
            UserError: HF169, its name or its place is taken.
        """
        volume = {"name": CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": claim}}
        before = [self._volume({"name": CLAIM_VOLUME}), self._mounts().get(CLAIM_MOUNT, {})]
        if before[0] == volume and before[1].get("name") == CLAIM_VOLUME:
            return  # an alias of containers that have it
        if any(before):
            taken = f"the volume {CLAIM_VOLUME} or a mount at {CLAIM_MOUNT}"
            self._job.refuse(f"it has {taken} already: name its folder, --runs DIR", self.container)
        self._job.extend((*self._spec, "volumes"), [volume])
        mount = {"name": CLAIM_VOLUME, "mountPath": CLAIM_MOUNT}
        self._job.extend((*self.container, "volumeMounts"), [mount])

    def _mounts(self) -> dict[str, Object]:
        """Return the mounts that may be written, by their paths."""
        rows = self._job.rows(*self.container, "volumeMounts")
        return {
            str(mount["mountPath"]).rstrip("/"): mount
            for mount in rows
            if mount.get("mountPath") and not mount.get("readOnly")
        }

    def _volume(self, mount: Object) -> Object:
        volumes = self._job.rows(*self._spec, "volumes")
        return next((row for row in volumes if row.get("name") == mount.get("name")), {})

    def runs(self, wanted: str | None) -> str:
        """Return the folder of run directories.

        Raises:
            UserError: HF169, it is on no volume that all pods share and that outlives them, or on
                one of several.
        """
        job, mounts = self._job, self._mounts()
        if wanted is not None:
            path = PurePosixPath(wanted)
            around = [mount for mount in mounts if path.is_relative_to(mount)]
            if ".." in path.parts or not around:
                there = f"; those are on {', '.join(mounts)}" if mounts else ""
                job.refuse(f"--runs {wanted} is on none of its volumes{there}", self.container)
            self._check_lasting(mounts[max(around, key=len)])
            return str(path)
        found = [
            path
            for path, mount in mounts.items()
            if any(kind in self._volume(mount) for kind in _SHARED)
        ]
        if len(found) != 1:
            several, advice = f"it mounts several: {', '.join(found)}", "name one: --runs DIR"
            if not found:
                several = "it mounts none"
                advice = "have a claim with ReadWriteMany mounted: --claim NAME"
            job.refuse(
                "the run needs a folder on a volume that all pods share and may write; "
                f"{several}; {advice}",
                self.container,
            )
        self._check_lasting(mounts[found[0]])
        return f"{found[0]}/runs"

    def _check_lasting(self, mount: Object) -> None:
        """Refuse a volume that ends with its pod, or that each pod has for itself."""
        volume, advice = (
            self._volume(mount),
            "have a claim with ReadWriteMany mounted: --claim NAME",
        )
        kind = next((kind for kind in _OF_A_POD if kind in volume), None)
        if kind is not None or not volume:
            what = f"a volume of each pod ({kind})" if kind else "no volume of the manifest"
            self._job.refuse(f"{mount.get('mountPath')} is {what}: {advice}", self.container)
        if mount.get("subPathExpr"):
            what = f"{mount.get('mountPath')} is another folder in each pod (subPathExpr)"
            self._job.refuse(f"{what}: {advice}", self.container)
        name = _claim_of(volume)
        modes = self._job.claim_modes(name) if name else None
        if modes is not None and "ReadWriteMany" not in modes:
            what = f"the claim {name} ({', '.join(map(str, modes))}) is one node's"
            self._job.refuse(f"{what}: it must have ReadWriteMany", self.container)

    def told(self, folder: str) -> Iterator[str]:
        """Yield what is to be known of the command, and of the volume that `folder` is on."""
        if not LAUNCHERS.search(self._command) and runs_python(self._command.split()):
            yield (
                "each pod's process is a worker of one training: agents give RANK and WORLD_SIZE, "
                "rank 0 may be in any pod, and a lost pod restarts all from their checkpoint"
            )
        elif not LAUNCHERS.search(self._command):
            yield (
                "its command runs a script of the image: agents run where that starts torchrun, "
                "accelerate or deepspeed, and else none do"
            )
        mounts = self._mounts()
        around = [mount for mount in mounts if PurePosixPath(folder).is_relative_to(mount)]
        volume = self._volume(mounts[max(around, key=len)])
        name = _claim_of(volume)
        if name and self._job.claim_modes(name) is None:
            yield f"the claim {name} must have ReadWriteMany: kubectl get pvc {name}"
        if "hostPath" in volume:
            yield f"{folder} must be a file system that all nodes share, or the run is lost"

    def wrap_command(self) -> None:
        """See manifest_commands; an alias of one that has been wrapped stays."""
        ours = self._trainer is not None and self._trainer.command
        if not ours and "holdfast batch -- " not in self._text(self.container):
            wrap_command(self._job, self.container)

    def wrap(self, runs: str, shutdown_s: float, num_pods: int) -> None:
        """Change all but the command.

        `shutdown_s` is the largest --shutdown-timeout of any role: an alias may share containers.
        `num_pods` are those of the job.

        Raises:
            UserError: HF169, what keeps it from that.
        """
        job, spec, container = self._job, self._spec, self.container
        grace = job.get(*spec, "terminationGracePeriodSeconds")
        least_s = max(GRACE_S, math.ceil(shutdown_s + AFTER_KILL_S) + _END_S)
        grace_s = max(least_s, grace if isinstance(grace, int) else 0)
        job.put((*spec, "terminationGracePeriodSeconds"), grace_s)
        head: Path = (*spec[:-1], "metadata")
        said = [job.mapping(*head, field) for field in WITHOUT_MESH]
        for field, values in WITHOUT_MESH.items():
            for name, value in values.items():
                if not any(name in each for each in said):  # the user's own stays
                    job.put((*head, field, name), value)
        job.extend((*container, "env"), list(self._variables(runs, grace_s - _END_S, num_pods)))
        mounts = job.rows(*container, "volumeMounts")
        if job.get(*spec, "hostIPC") or any(one.get("mountPath") == SHM for one in mounts):
            return
        job.extend((*container, "volumeMounts"), [{"name": SHM_VOLUME, "mountPath": SHM}])
        volume = {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}}
        if volume not in job.rows(*spec, "volumes"):
            job.extend((*spec, "volumes"), [volume])

    def _of_pod(self) -> list[Object]:
        """Return the variables that say who a pod is."""
        return [
            *(from_field(name, path) for name, path in OF_POD),
            from_field("HOLDFAST_JOB", label_path(self._kind.job_label)),
            {"name": "HOLDFAST_ATTEMPT", "value": "0"},
            {"name": "HOLDFAST_KIND", "value": self._kind.target},
        ]

    def check_variables(self) -> None:
        """Refuse variables of the user by names that say who a pod is, with other values.

        Raises:
            UserError: HF169.
        """
        wanted = {row["name"]: row for row in self._of_pod()}
        for index, row in enumerate(self._job.rows(*self.container, "env")):
            ours = wanted.get(str(row.get("name")), row)
            if _source(ours) != _source(row):
                self._job.refuse(
                    f"the variable {row['name']} must be {_source(ours)}; call yours otherwise",
                    (*self.container, "env", index),
                )

    def _variables(self, runs: str, shutdown_s: int, num_pods: int) -> Iterator[Object]:
        """Yield the variables of the agent's container that are not there yet."""
        own = None if self._trainer is None else self._trainer.gpus
        gpus = own or _gpus_in(self._job.mapping(*self.container, "resources", "limits"))
        there = {str(row.get("name")) for row in self._job.rows(*self.container, "env")}
        for row in (
            *self._of_pod(),
            {"name": "HOLDFAST_PODS", "value": str(num_pods)},
            {"name": "HOLDFAST_RUNS", "value": runs.replace("$", "$$")},
            {"name": "HOLDFAST_SHUTDOWN_S", "value": str(shutdown_s)},
            *([{"name": "HOLDFAST_GPUS", "value": gpus}] if gpus else ()),
        ):
            if row["name"] not in there:
                yield row


def _number(value: object) -> int:
    """Return how many; 1: the manifest does not say."""
    return value if isinstance(value, int) and value > 0 else 1


def _claim_of(volume: Object) -> str | None:
    """Return the name of a volume's claim, if it is one."""
    match volume:
        case {"persistentVolumeClaim": {"claimName": str(name)}}:
            return name
    return None


def _source(row: Object) -> str:
    """Return where a variable's value is from."""
    match row:
        case {"value": value} | {"valueFrom": {"fieldRef": {"fieldPath": value}}}:
            return str(value)
    return ""
