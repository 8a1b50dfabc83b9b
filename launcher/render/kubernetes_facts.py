"""What a job on Kubernetes comes to, and what keeps it from being rendered. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final

from elastic_trainer.board.address import KUBERNETES, parse_address
from elastic_trainer.plan.config import NO_DOMAIN
from launcher.plan.clock import PodClock, pod_clock
from launcher.plan.planning import Plan
from launcher.render.kubernetes_names import (
    OPERATORS,
    RUN_DIR_ANNOTATION,
    RUN_ID_ANNOTATION,
    RUN_LABEL,
    board_name,
    job_name,
    labels_of,
    ledger_url,
    pod_run_dir,
)
from launcher.render.local import named_ledger, resolve
from launcher.spec.errors import Problem, UserError
from launcher.spec.kubernetes import Kubernetes, quantity_bytes
from launcher.spec.spec import JobSpec
from launcher.spec.values import is_levels

_GIB: Final = 2**30
_SHM_SPARE_GIB: Final = 8
"""For segments of NCCL and data loaders."""
_SHM_UNKNOWN_GIB: Final = 64
"""For a script on nodes whose memory is not known."""
TMP: Final = "/tmp"  # noqa: S108  the pod's own
RESTARTS_PER_NODE: Final = 20
"""Failures of a pod in a job's life that nobody asked for, as a kernel's kill. A Job waits up to 6
min before each replacement: a pod that never runs has failed so often after 1.6 h."""
_FILE_SUFFIXES: Final = (".sif", ".sqsh", ".img")


@dataclass(frozen=True, kw_only=True)
class PodJob:
    """One job as its pods need it; everything is checked."""

    spec: JobSpec
    plan: Plan
    kind: str
    """pytorchjob, jobset or trainjob."""
    name: str
    run_id: str
    run_dir: str
    """As the pods see it."""
    base_dir: str | Path
    image: str
    python: str
    venv: str | None
    clock: PodClock
    shm: str
    """Size of /dev/shm."""
    fleet: str | None
    """Where the fleet's ledger is; None: in the folder beside the run directory."""

    @property
    def num_pods(self) -> int:
        """Nodes that train, and spares."""
        return self.plan.ladder.max_nodes + self.spec.cluster.spares

    @property
    def registers(self) -> tuple[str, ...]:
        """Names of the ConfigMaps of its namespace that its agents write; this takes a token.

        Without a board there, pods write a ledger only where the job file asks for it; else they
        get no token, and the launcher writes it.
        """
        wish, named = self.spec.kubernetes, self.spec.cluster.fleet or ""
        own_board = wish.board == "kubernetes"
        found = [board_name(self.name)] if own_board else []
        ledger = self.fleet or ""
        if ledger.startswith(KUBERNETES) and (own_board or named.startswith(KUBERNETES)):
            namespace, name = parse_address(ledger)
            found += [name] if namespace == wish.namespace else []
        return tuple(found)

    @property
    def restart_limit(self) -> int:
        """Pods that the controller may replace at its own charge."""
        return self.spec.kubernetes.restart_limit or RESTARTS_PER_NODE * self.num_pods

    @cached_property
    def labels(self) -> dict[str, str]:
        """Of every object and pod."""
        return {**self.spec.kubernetes.labels, **labels_of(self.name)}

    @cached_property
    def child_labels(self) -> dict[str, str]:
        """Of what controllers make for the job between it and its pods."""
        return {**self.spec.kubernetes.labels, RUN_LABEL: self.name}

    @cached_property
    def annotations(self) -> dict[str, str]:
        """Of the job."""
        own = {RUN_ID_ANNOTATION: self.run_id, RUN_DIR_ANNOTATION: self.run_dir}
        return {**self.spec.kubernetes.annotations, **own}


def pod_job(
    spec: JobSpec,
    plan: Plan,
    *,
    kind: str,
    run_id: str,
    run_dir: str | Path,
    base_dir: str | Path,
) -> PodJob:
    """Return what renderers need, the gaps of the job file filled in; see `render_kubernetes`.

    Raises:
        UserError: HF160, HF720 to HF725: everything that is missing or cannot work; HF166 a path
            that no manifest can carry.
    """
    _check_text(run_dir, "run directory")
    _check_text(base_dir, "the job file's folder")
    wish, image = spec.kubernetes, pod_image(spec)
    python, venv = _interpreter(spec, base_dir)
    problems = [
        *_missing(spec, image),
        *_off_volumes(spec, base_dir=base_dir),
        *_hidden(spec, python),
        *_secrets(spec),
        *_unfit(spec, kind),
    ]
    shm = wish.shm or _shm(spec, plan)
    problems += _tight(spec, shm)
    try:
        clock = pod_clock(spec, plan.ladder)
    except UserError as error:
        raise UserError.many([*problems, *error.problems]) from error
    if problems:
        raise UserError.many(problems)
    assert image is not None, "a missing one is a problem"
    inside = pod_run_dir(mount=wish.mount, run_id=run_id, run_dir=str(run_dir))
    fleet = named_ledger(spec, base_dir)
    if fleet is None and inside != str(run_dir):
        fleet = ledger_url(wish.namespace)
    return PodJob(
        spec=spec,
        plan=plan,
        kind=kind,
        name=job_name(run_id),
        run_id=run_id,
        run_dir=inside,
        base_dir=base_dir,
        image=image,
        python=python,
        venv=venv,
        clock=clock,
        shm=shm,
        fleet=fleet,
    )


def _interpreter(spec: JobSpec, base_dir: str | Path) -> tuple[str, str | None]:
    """Return the pods' Python, and the environment that it belongs to."""
    if spec.kubernetes.python is not None:
        return spec.kubernetes.python, None
    if spec.env.venv is None:
        return "python3", None
    venv = resolve(spec.env.venv, base_dir)
    return f"{venv}/bin/python", venv


def _check_text(path: str | Path, what: str) -> None:
    if bad := re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", str(path)):
        message = f"{what} {str(path)!r} has {bad[0]!r} in it, which no manifest can carry"
        raise UserError("HF166", f"{message}; use another place")


def pod_image(spec: JobSpec) -> str | None:
    """Return the image; env.image too, where that is not a file of Slurm's container runtimes."""
    if spec.kubernetes.image is not None or spec.env.image is None:
        return spec.kubernetes.image
    image = spec.env.image
    is_file = image.startswith(("/", ".", "~")) or image.endswith(_FILE_SUFFIXES)
    return None if is_file or "://" in image or " " in image else image


def _missing(spec: JobSpec, image: str | None) -> Iterator[Problem]:
    if image is None:
        message = "pods need an image with holdfast and torch: name one, as registry/holdfast:1.0"
        if spec.env.image is not None:
            message += f" (env.image {spec.env.image} is none that a registry has)"
        yield spec.problem("HF720", "kubernetes.image", message)
    if spec.kubernetes.claim is None:
        yield spec.problem(
            "HF721",
            "kubernetes.claim",
            "nothing says where checkpoints and the record of the run are kept: name a "
            "PersistentVolumeClaim with access mode ReadWriteMany in namespace "
            f"{spec.kubernetes.namespace} (manifests/examples/claim.yaml is one)",
        )


def _off_volumes(spec: JobSpec, *, base_dir: str | Path) -> Iterator[Problem]:
    wish = spec.kubernetes
    kept = [wish.mount, *(volume.mount for volume in wish.volumes.values())]
    paths: list[tuple[str, str, bool]] = []
    if spec.command is None:
        paths += [(key, path, False) for key, path in spec.data_paths.items()]
    if spec.checkpoint.dir is not None:
        paths.append(("checkpoint.dir", spec.checkpoint.dir, True))
    if spec.env.venv is not None and wish.python is None:
        paths.append(("env.venv", spec.env.venv, False))
    for key, written, must_last in paths:
        path = PurePosixPath(resolve(written, base_dir))
        places = kept if must_last else [*kept, *wish.image_paths]
        if any(path.is_relative_to(place) for place in places):
            continue
        lost = "what is written there goes with its pod" if must_last else "pods do not have it"
        said = str(path)
        if not written.startswith("/"):
            said = f"{written} ({path}, by the job file's folder)"
        message = (
            f"{said} is on none of the pods' volumes: {lost}; use an absolute path under "
            f"{' or '.join(kept)}, or mount what it is on in kubernetes.volumes"
        )
        if not must_last:
            message += ", or name its folder in kubernetes.image_paths if the image brings it"
        yield spec.problem("HF722", key, message)


def own_tmp(wish: Kubernetes) -> bool:
    """Return whether /tmp is an empty folder of ours: of a read-only root, and no volume's."""
    taken = any(volume.mount == TMP for volume in wish.volumes.values())
    return wish.security.read_only_root and not taken


def _hidden(spec: JobSpec, python: str) -> Iterator[Problem]:
    """Yield the problem that /tmp hides an environment of the image."""
    kept = [volume.mount for volume in spec.kubernetes.volumes.values()]
    path = PurePosixPath(python)
    if not own_tmp(spec.kubernetes) or not path.is_relative_to(TMP):
        return
    if not any(path.is_relative_to(place) for place in kept):
        yield spec.problem(
            "HF722",
            "env.venv" if spec.kubernetes.python is None else "kubernetes.python",
            f"{python} is hidden: with a read-only root {TMP} is an empty folder; put the "
            "environment elsewhere in the image, or set kubernetes.security.read_only_root: false",
        )


def _secrets(spec: JobSpec) -> Iterator[Problem]:
    for name, secret in spec.env.secrets.items():
        if secret.kubernetes is None:
            command = f"kubectl create secret generic NAME --from-literal={name}=..."
            message = (
                "pods cannot read the launcher's files and environment: add kubernetes: NAME/KEY "
                f"of a Secret in namespace {spec.kubernetes.namespace} ({command})"
            )
            yield spec.problem("HF723", f"env.secrets.{name}", message)


def _unfit(spec: JobSpec, kind: str) -> Iterator[Problem]:
    if spec.kubernetes.gang and kind == "jobset":
        message = (
            "a JobSet has no gang scheduling of its own: use kubernetes.queue (Kueue starts all "
            "pods or none), or render to pytorchjob or trainjob"
        )
        yield spec.problem("HF724", "kubernetes.gang", message)
    domain = spec.elastic.failure_domain
    if domain is not None and is_levels(domain):
        message = (
            f"{domain} counts levels of Slurm's topology, which pods do not have: name the label "
            "of nodes that says which fail together, as topology.kubernetes.io/zone, or "
            f"{NO_DOMAIN}"
        )
        yield spec.problem("HF727", "elastic.failure_domain", message)
    try:
        if (spec.cluster.fleet or "").startswith(KUBERNETES):
            _, name = parse_address(str(spec.cluster.fleet))
            if name.endswith(f"-{OPERATORS}"):
                message = f"pods may not write {name}: it is for the operators of a ledger"
                yield spec.problem("HF690", "cluster.fleet", message)
    except ValueError as error:
        yield spec.problem("HF690", "cluster.fleet", str(error))


def _shm(spec: JobSpec, plan: Plan) -> str:
    """Return the size of /dev/shm that snapshots need, with room for NCCL and data loaders.

    The state of a script is not known: it gets half of the pod's memory.
    """
    memory = spec.kubernetes.memory
    if spec.command is not None:
        size = _SHM_UNKNOWN_GIB if memory is None else max(1, quantity_bytes(memory) // 2 // _GIB)
        return f"{size}Gi"
    snapshots = plan.snapshots.node_bytes if plan.snapshots.every_steps else 0
    return f"{math.ceil(snapshots / _GIB) + _SHM_SPARE_GIB}Gi"


def _tight(spec: JobSpec, shm: str) -> Iterator[Problem]:
    memory = spec.kubernetes.memory
    if memory is None or quantity_bytes(shm) < quantity_bytes(memory):
        return
    message = (
        f"{memory} are not more than the {shm} of /dev/shm, which count towards them: the pod "
        "would be killed; raise memory, lower shm, or take fewer snapshots "
        "(checkpoint.memory_every_steps: 0 takes none)"
    )
    yield spec.problem("HF725", "kubernetes.memory", message)
