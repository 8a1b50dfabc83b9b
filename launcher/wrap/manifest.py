"""A PyTorchJob whose pods run torchrun -> one whose job survives lost nodes. Pure.

A manifest is changed in its text, as a batch script is: comments, order and all other lines stay.
What the job is, its pods work out when they run (`holdfast batch`): only then the kubelet, the
operator and the pods' shell have filled in torchrun's arguments.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, NoReturn

from launcher.render.kubernetes_names import (
    API_VERSIONS,
    CLAIM_VOLUME,
    CONTAINERS,
    KINDS,
    SHM_VOLUME,
    WITHOUT_MESH,
)
from launcher.render.kubernetes_yaml import to_yaml
from launcher.render.pod import OF_POD, SHM, Object, from_field, label_path
from launcher.spec.errors import UserError, Where
from launcher.spec.secret_forms import leaks
from launcher.spec.source import Path, SpecSource, describe, read_documents
from launcher.wrap.launches import AFTER_KILL_S, TORCHRUN, find_torchrun
from launcher.wrap.shell_text import OUTPUT, CommandText, hidden, output_at, try_out
from launcher.wrap.sruns import cannot_wrap

GRACE_S: Final = 120
"""Least terminationGracePeriodSeconds: the default is 30, all of which torchrun takes. A
--shutdown-timeout above 60 s needs more."""
_END_S: Final = 30
"""Part of the grace from the agent's end, or its death, to the pod's."""
_TARGET: Final = "pytorchjob"
_WAYS: Final = {
    **dict.fromkeys(("PyTorchJob", "HyperPodPyTorchJob", "MPIJob"), "pytorchjob"),
    "JobSet": "jobset",
    "TrainJob": "trainjob",
}
"""Kind of a job that cannot be wrapped -> what a job file is rendered to in its place."""
_JOB_LABEL: Final = "training.kubeflow.org/job-name"
"""Label of pods, set by the operator."""
_SHARED: Final = ("persistentVolumeClaim", "nfs", "csi", "cephfs")
"""Volumes that several nodes may mount."""
_OF_A_POD: Final = (
    *("emptyDir", "ephemeral", "configMap", "secret", "downwardAPI", "projected", "image"),
    *("awsElasticBlockStore", "azureDisk", "gcePersistentDisk"),
)
"""Volumes that end with their pod, or that only one node mounts."""
CLAIM_MOUNT: Final = "/holdfast"
"""Where `--claim` mounts a claim."""
RESTARTS_PER_NODE: Final = 20
"""Least backoffLimit for each pod, as of a rendered job (`restart_limit`)."""
_SHELLS: Final = ("sh", "bash", "dash", "ash", "zsh")
_LAUNCHER: Final = re.compile(
    r"(?<![^\s;&|()])(?:\S*/)?"
    r"(?:torchrun|python[\d.]*\s+(?:-\S+\s+)*?-m\s*torch\.distributed\.(?:run|launch))(?!\S)"
)
_BEFORE: Final = re.compile(r"\s*(exec\s+)?(\w+=\S*\s+)*")
_END: Final = re.compile(r"[;\n)]|&&|\|\||(?<![<>&|])&(?![>&])")


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

    Other documents than its one PyTorchJob stay. `file` is its name, for messages; `runs` the
    folder of run directories, on a volume that all pods share, by default `runs` on the only one.
    `claim` is a claim that is mounted for it, at CLAIM_MOUNT.

    Raises:
        UserError: HF169, what keeps it from that; HF003 and HF007, it cannot be read.
    """
    job = _Manifest(text, file)
    head = job.mapping("metadata")
    name = head.get("name") or f"{head.get('generateName', '')}…"
    roles = job.mapping("spec", "pytorchReplicaSpecs")
    if not roles:
        job.refuse("it has no pytorchReplicaSpecs", ("spec",))
    places = [("spec", "pytorchReplicaSpecs", role) for role in roles]
    sidecars = dict.fromkeys(name for place in places for name in _move_sidecars(job, place))
    pods = [_Pods(job, place) for place in places]
    if claim is not None:
        for pod in pods:
            pod.mount(claim)
        runs = runs or f"{CLAIM_MOUNT}/runs"
    folders = {pod.runs(runs) for pod in pods}
    if len(folders) > 1:
        job.refuse(
            f"its pods share no volume at one place ({', '.join(sorted(folders))}); "
            "name a folder that all of them have: --runs DIR"
        )
    (folder,) = folders
    images = dict.fromkeys(str(job.get(*pod.container, "image")) for pod in pods)
    secrets = tuple(leak.secret for leak in leaks(job.source.data))
    if job.get("spec", "runPolicy", "cleanPodPolicy") != "All":
        job.put(("spec", "runPolicy", "cleanPodPolicy"), "Running")
    notes = [*_let_restart(job, places), *(note for pod in pods for note in pod.told(folder))]
    shutdown_s = max([pod.wrap_command() or 0.0 for pod in pods])
    for pod in pods:
        pod.wrap(folder, shutdown_s)
    return Wrapped(
        text=job.text,
        run_dir=f"{folder}/{name}",
        images=tuple(images),
        sidecars=tuple(sidecars),
        secrets=secrets,
        notes=tuple(dict.fromkeys(notes)),
    )


def _let_restart(job: _Manifest, roles: Sequence[Path]) -> Iterator[str]:
    """Have the operator replace pods for as long as agents want; say what does so no more."""
    path: Path = ("spec", "runPolicy", "backoffLimit")
    limit = job.get(*path)
    counts = [job.get(*role, "replicas") for role in roles]
    num_pods = sum(count if isinstance(count, int) else 1 for count in counts)
    least = RESTARTS_PER_NODE * num_pods
    if isinstance(limit, int) and limit < least:
        # common/job.go: a failed pod beside a retry of the job above the limit ends the job.
        job.put(path, least)
        yield (
            f"backoffLimit: {limit} is {least} now: a pod that is killed would have ended the job; "
            "the agents' restart budget ends it, and nothing where no agent can start"
        )
    for before in dict.fromkeys(str(job.get(*role, "restartPolicy")) for role in roles):
        if before in ("Never", "OnFailure", "Always"):
            yield f"restartPolicy: {before} is ExitCode now: the agent's code says what follows"
    if job.get("spec", "elasticPolicy", "metrics"):
        yield (
            "elasticPolicy.metrics stays: its autoscaler changes the number of pods of a running "
            "job, each time at the price of a restart; take it out"
        )


def _move_sidecars(job: _Manifest, role: Path) -> list[str]:
    """Make all containers but the agent's into sidecars; return their names.

    In `containers` one that still runs keeps its pod from ending, and so from being replaced.
    """
    here = (*role, "template", "spec", "containers")
    rows = list(enumerate(job.rows(*here)))
    others = [(index, row) for index, row in rows if row.get("name") != CONTAINERS[_TARGET]]
    if len(rows) - len(others) != 1:
        return []  # `_Pods` says what is wrong with it
    for index, row in others:
        if TORCHRUN.search(json.dumps([row.get("command"), row.get("args")])):
            job.refuse(f"it runs torchrun, as only {CONTAINERS[_TARGET]} may", (*here, index))
    for index, _ in reversed(others):
        job.remove((*here, index))
    job.extend(
        (*here[:-1], "initContainers"), [{**row, "restartPolicy": "Always"} for _, row in others]
    )
    return [str(row.get("name")) for _, row in others]


class _Pods:
    """The pods of the role at path `role` of a manifest.

    Raises:
        UserError: HF169, none of their containers is the operator's, or it is wrapped already.
    """

    def __init__(self, job: _Manifest, role: Path) -> None:
        self._job, self._role, self._spec = job, role, (*role, "template", "spec")
        rows, named = job.rows(*self._spec, "containers"), CONTAINERS[_TARGET]
        if not rows:
            job.refuse("its pods have no containers", role)
        ours = [index for index, row in enumerate(rows) if row.get("name") == named]
        if len(ours) != 1:
            job.refuse(f"expected one container called {named}, which the operator asks for", role)
        self.container: Path = (*self._spec, "containers", ours[0])
        if self._is_wrapped():
            job.refuse("it is wrapped already", self.container)

    def _words(self, container: Path) -> list[tuple[Path, str]]:
        """Return the words of a container's command, and where they are written."""
        found = []
        for field in ("command", "args"):
            words = self._job.get(*container, field) or []
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                self._job.refuse(f"{field}: expected a list of texts", container)
            found += [((*container, field, index), word) for index, word in enumerate(words)]
        return found

    def _is_wrapped(self) -> bool:
        return "holdfast batch -- " in " ".join(word for _, word in self._words(self.container))

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
        """Yield what is to be known of the volume that `folder` is on."""
        mounts = self._mounts()
        around = [mount for mount in mounts if PurePosixPath(folder).is_relative_to(mount)]
        volume = self._volume(mounts[max(around, key=len)])
        name = _claim_of(volume)
        if name and self._job.claim_modes(name) is None:
            yield f"the claim {name} must have ReadWriteMany: kubectl get pvc {name}"
        if "hostPath" in volume:
            yield f"{folder} must be a file system that all nodes share, or the run is lost"

    def wrap(self, runs: str, shutdown_s: float) -> None:
        """Change all but the command.

        `shutdown_s` is the largest --shutdown-timeout of any role: an alias may share containers.

        Raises:
            UserError: HF169, what keeps it from that.
        """
        job, spec, container = self._job, self._spec, self.container
        job.put((*self._role, "restartPolicy"), "ExitCode")
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
        job.extend((*container, "env"), list(self._variables(runs, grace_s - _END_S)))
        mounts = job.rows(*container, "volumeMounts")
        if job.get(*spec, "hostIPC") or any(one.get("mountPath") == SHM for one in mounts):
            return
        job.extend((*container, "volumeMounts"), [{"name": SHM_VOLUME, "mountPath": SHM}])
        volume = {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}}
        if volume not in job.rows(*spec, "volumes"):
            job.extend((*spec, "volumes"), [volume])

    def _variables(self, runs: str, shutdown_s: int) -> Iterator[Object]:
        """Yield the variables of the agent's container that are not there yet."""
        job, container = self._job, self.container
        limits = job.mapping(*container, "resources", "limits")
        gpus = [str(count) for name, count in limits.items() if name.endswith("/gpu")]
        wanted = [
            *(from_field(name, path) for name, path in OF_POD),
            from_field("HOLDFAST_JOB", label_path(_JOB_LABEL)),
            {"name": "HOLDFAST_ATTEMPT", "value": "0"},
            {"name": "HOLDFAST_KIND", "value": _TARGET},
            {"name": "HOLDFAST_RUNS", "value": runs.replace("$", "$$")},
            {"name": "HOLDFAST_SHUTDOWN_S", "value": str(shutdown_s)},
            *({"name": "HOLDFAST_GPUS", "value": count} for count in gpus[:1]),
        ]
        rows = job.rows(*container, "env")
        there = {str(row.get("name")): (index, row) for index, row in enumerate(rows)}
        for row in wanted:
            index, before = there.get(row["name"], (0, None))
            if before is None:
                yield row
            elif _source(before) != _source(row):
                job.refuse(
                    f"the variable {row['name']} must be {_source(row)}; call yours otherwise",
                    (*container, "env", index),
                )

    def wrap_command(self) -> float | None:
        """Put holdfast before the torchrun of the container; return its --shutdown-timeout.

        None: it has none that the text says, or is wrapped already, as by an alias of one before.

        Raises:
            UserError: HF169, there is no torchrun, or holdfast cannot be put before it.
        """
        if self._is_wrapped():
            return None
        job, words = self._job, self._words(self.container)
        texts = [word for _, word in words]
        for index, (path, word) in enumerate(words):
            is_script = index > 1 and re.fullmatch(r"-[a-z]*c[a-z]*", texts[index - 1])
            if is_script and any(PurePosixPath(each).name in _SHELLS for each in texts[:index]):
                if not TORCHRUN.search(word):
                    break
                return self._wrap_script(path, word).shutdown_timeout_s
        if (found := find_torchrun(texts)) is None:
            job.refuse(
                "its command runs no torchrun; write torchrun into the manifest, or `exec holdfast "
                "batch -- torchrun …` into the script that it runs",
                self.container,
            )
        path, word = words[found[0]]
        seen = self._try_out(shlex.join(texts[found[0] :]), path)
        job.insert(path, [f"{_folder(word)}holdfast", "batch", "--"])
        return seen.shutdown_timeout_s

    def _try_out(self, command: str, path: Path, row: int | None = None) -> CommandText:
        try:
            return try_out(command)
        except UserError as error:
            where = self._job.place(path, row)
            raise UserError(error.code, error.message, where=where) from error

    def _wrap_script(self, path: Path, script: str) -> CommandText:
        """Put holdfast before the torchrun of a shell script."""

        def refuse(message: str, at: int) -> NoReturn:
            self._job.refuse(message, path, script.count("\n", 0, at))

        bare = hidden(script)
        found = list(_LAUNCHER.finditer(bare))
        if len(found) != 1:
            what = "several commands run torchrun" if found else "torchrun is within quotes"
            at = found[1].start() if found else script.index("torch")
            refuse(f"{what}; expected one command, torchrun [OPTIONS] SCRIPT …", at)
        begin, after = found[0].span()
        head = re.split(r"[;&|\n(]", bare[:begin])[-1]
        before = _BEFORE.fullmatch(head)
        if before is None or re.search(r"(?<!\|)\|\s*\Z", bare[: begin - len(head)]):
            stands = script[begin - len(head) : begin].strip() or "|"
            refuse(f"`{stands}` stands before torchrun; begin the command with torchrun", begin)
        end = _END.search(bare, after)
        last = len(bare) if end is None else end.start()
        # The workers' output goes to the run's logs, so a file or a `tee` of it would stay empty.
        kept = after + output_at(bare[after:last])
        if not OUTPUT.fullmatch(bare, kept, last):
            refuse("words follow a redirection; write it last", kept)
        rest = re.sub(r"(?<!\S)#[^\n]*", "", bare[last:])
        if rest.strip("; \t\n"):
            at = last + len(bare[last:]) - len(bare[last:].lstrip())
            refuse("what follows torchrun would not run: end the script with it", at)
        holdfast = f"{_folder(script[begin:after].split(maxsplit=1)[0])}holdfast batch -- "
        if before[1] is None:  # else the shell, not the agent, would hear of signals
            holdfast = f"exec {holdfast}"
        seen = self._try_out(script[begin:kept], path, script.count("\n", 0, begin))
        self._job.rewrite(path, begin, holdfast, (kept, last))
        return seen


class _Manifest:
    """A YAML text with one PyTorchJob; after each change it is read again.

    Raises:
        UserError: HF169, it has none, or several; else as `read_documents`.
    """

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self._claims: dict[str, list[object]] = {}
        self.source = self._read()

    def _read(self) -> SpecSource:
        documents = read_documents(self.text, self.file)
        wanted = (API_VERSIONS[_TARGET], KINDS[_TARGET])
        kinds = [(each.data.get("apiVersion"), each.data.get("kind")) for each in documents]
        if kinds.count(wanted) != 1:
            found = ", ".join(f"{kind} ({api})" for api, kind in kinds) or "no manifest"
            what = "several" if wanted in kinds else found
            ways = {target for _, kind in kinds if (target := _WAYS.get(str(kind)))}
            advice = "".join(
                f"; describe the training in a job file: holdfast render JOB.yaml --to {target}"
                for target in sorted(ways)
            )
            message = f"expected one PyTorchJob of {wanted[0]}, found {what}"
            cannot_wrap(f"{message}{advice}", Where(self.file, 1))
        source = documents[kinds.index(wanted)]
        self._claims = {}
        for each in documents:
            match each.data:
                case {
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": str(name)},
                    "spec": {"accessModes": [*modes]},
                }:
                    self._claims[name] = modes
        if source.problems:
            raise UserError.many(source.problems)
        return source

    def claim_modes(self, name: str) -> list[object] | None:
        """Return the access modes of a claim of the same text; None: it is not there."""
        return self._claims.get(name)

    def refuse(self, message: str, path: Path = (), row: int | None = None) -> NoReturn:
        """Refuse the manifest for what is at `place(path, row)`."""
        cannot_wrap(message, self.place(path, row) if path else Where(self.file))

    def place(self, path: Path, row: int | None = None) -> Where:
        """Return where the value at `path` is; `row`: of the text there, from 0."""
        where, span = self.source.where(path), self.source.spans.get(path)
        if row is not None and span and where.line and self.text[span.start] == "|":
            return Where(where.file, where.line + 1 + row, where.key)
        return where

    def get(self, *path: str | int) -> Any:
        """Return the value at `path`, if there is one."""
        here: Any = self.source.data
        for part in path:
            if isinstance(here, dict) and isinstance(part, str):
                here = here.get(part)
            elif isinstance(here, list) and isinstance(part, int) and part < len(here):
                here = here[part]
            else:
                return None
        return here

    def mapping(self, *path: str | int) -> Object:
        """Return the mapping at `path`; empty where there is none."""
        found = self.get(*path)
        if found is not None and not isinstance(found, dict):
            self.refuse(f"expected a mapping, found {describe(found)}", path)
        return found or {}

    def rows(self, *path: str | int) -> list[Object]:
        """Return the list of mappings at `path`; empty where there is none."""
        found = self.get(*path)
        is_list = isinstance(found, list) and all(isinstance(row, dict) for row in found)
        if found is not None and not is_list:
            self.refuse("expected a list of mappings", path)
        return found or []

    def put(self, path: Path, value: Any) -> None:
        """Write the value at `path`, over what is there or to the end of what is around it."""
        if self.get(*path) == value:
            return
        end = max(end for end in range(len(path) + 1) if path[:end] in self.source.spans)
        for key in reversed(path[end:]):
            value = {key: value}
        if end == len(path) or self.get(*path[:end]) is None:
            self._overwrite(path[:end], value)
        else:
            self._append(path[:end], value)
        self._check(path)

    def extend(self, path: Path, rows: list[Any]) -> None:
        """Add rows to the end of the list at `path`, which may not be there."""
        before = self.get(*path)
        if not rows:
            return
        if before:
            self._append(path, rows)
        else:
            self.put(path, rows)
        self._check((*path, len(before or []) + len(rows) - 1))

    def remove(self, path: Path) -> None:
        """Take an item out of a list that has others."""
        around, index = path[:-1], int(path[-1])
        wanted = self.get(*around)[:index] + self.get(*around)[index + 1 :]
        span = self.source.spans[path]
        start, end = span.start, span.end
        if self.source.spans[around].style != "flow":
            start = self.text.rfind("\n", 0, self._dash(start)[0]) + 1
            end = self.text.find("\n", len(self.text[:end].rstrip())) + 1 or len(self.text)
        elif index:
            start = self.source.spans[(*around, index - 1)].end
        else:
            end = self.source.spans[(*around, 1)].start
        self._splice(start, end, "")
        if self.get(*around) != wanted:
            self.refuse("it cannot be changed here; write out what is around it", around)

    def insert(self, path: Path, words: list[str]) -> None:
        """Write words before the one at `path`, an item of a list."""
        start = self.source.spans[path].start
        if self.source.spans[path[:-1]].style == "flow":
            new = "".join(f"{json.dumps(word)}, " for word in words)
        else:
            start, column = self._dash(start)
            new = "".join(f"{line}\n{' ' * column}" for line in _lines(words))
        self._splice(start, start, new)
        if self.get(*path) != words[0]:
            self.refuse("it cannot be changed here; write its command as a plain list", path)

    def rewrite(self, path: Path, at: int, new: str, dropped: tuple[int, int]) -> None:
        """Put `new` into the text at `path` before its character `at`, and drop a part of it.

        The text keeps its style where that can be done.
        """
        old = str(self.get(*path))
        gone = old[dropped[0] : dropped[1]]
        wanted = old[:at] + new + old[at : dropped[0]] + old[dropped[1] :]
        span, before = self.source.spans[path], self.text
        raw, token = before[span.start : span.end], old[at : dropped[0]].split(maxsplit=1)[0]
        if raw[0] == "|":
            rows = [row for row in raw.split("\n")[1:] if row.strip()]
            indent = min(len(row) - len(row.lstrip()) for row in rows)
            gone = gone.replace("\n", "\n" + " " * indent)
        start = -1
        for _ in range(old.count(token, 0, at) + 1):
            start = raw.find(token, start + 1)
        cut = raw.find(gone, start)
        with contextlib.suppress(UserError):  # it is not YAML any more
            kept = raw[start:cut] + raw[cut + len(gone) :]
            self._splice(span.start, span.end, raw[:start] + new + kept)
        if self.get(*path) != wanted:
            self._reset(before)
            self._overwrite(path, wanted)
        if self.get(*path) != wanted:
            self.refuse("it cannot be changed here; write the script as a block (|)", path)

    def _overwrite(self, path: Path, value: Any) -> None:
        span = self.source.spans[path]
        shown = json.dumps(value, ensure_ascii=False)
        if isinstance(value, str | int) and len(plain := _lines({"x": value})) == 1:
            shown = plain[0].removeprefix("x: ")
        before = " " if self.text[: span.start].endswith(":") else ""
        # The last end of line of a block is part of it.
        after = "\n" if self.text[span.start : span.end].endswith("\n") else ""
        self._splice(span.start, span.end, before + shown + after)

    def _append(self, path: Path, value: Any) -> None:
        """Write the rows of a list, or the entries of a mapping, behind those at `path`."""
        span = self.source.spans[path]
        if span.style == "flow":
            shown = json.dumps(value, ensure_ascii=False)[1:-1]
            end = len(self.text[: span.end - 1].rstrip())
            comma = "" if self.text[end - 1] in "[{," else ","
            self._splice(end, end, f"{comma} {shown}" if comma else shown)
            return
        if isinstance(value, list):
            _, column = self._dash(self.source.spans[(*path, 0)].start)
        else:
            column = span.column
            if self.text[span.start] in "&!":  # of the anchor, not of what it names
                first = self.source.lines[(*path, next(iter(self.get(*path))))]
                line = self.text.splitlines()[first - 1]
                column = len(line) - len(line.lstrip())
        end = self.text.find("\n", len(self.text[: span.end].rstrip()))
        end = len(self.text) if end < 0 else end
        before = self.get(*path)
        self._splice(end, end, "".join(f"\n{' ' * column}{line}" for line in _lines(value)))
        after = self.get(*path)
        if isinstance(before, list):
            is_kept = after[: len(before)] == before
        else:
            is_kept = {name: after.get(name) for name in before} == before
        if not is_kept:  # as a block (|+) that ends in empty lines
            message = "nothing can be written behind its last value; write that another way"
            self.refuse(message, path)

    def _dash(self, start: int) -> tuple[int, int]:
        """Return where the - of an item of a list is, and its column."""
        dash = self.text.rindex("-", 0, start)
        return dash, dash - self.text.rfind("\n", 0, dash) - 1

    def _check(self, path: Path) -> None:
        if self.get(*path) is None:
            self.refuse("it cannot be written here; write out what is around it", path[:-1])

    def _splice(self, start: int, end: int, new: str) -> None:
        self._reset(self.text[:start] + new + self.text[end:])

    def _reset(self, text: str) -> None:
        self.text = text
        self.source = self._read()


def _lines(value: Any) -> list[str]:
    """Return a list or a mapping as lines of YAML."""
    text = to_yaml([value]).removeprefix("---\n")
    return text.rstrip("\n").split("\n")


def _folder(word: str) -> str:
    """Return the folder of a program, with its slash, where it is named: holdfast is beside it."""
    return word[: word.rfind("/") + 1]


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
