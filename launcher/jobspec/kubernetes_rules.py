"""What contradicts itself in `kubernetes:`, whatever the job is run on. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from launcher.jobspec.rules import Finding
from launcher.jobspec.spec import JobSpec

_TAKEN: Final = ("/dev/shm", "/etc/holdfast")  # noqa: S108  of the pods, not of this machine


def kubernetes_findings(spec: JobSpec) -> Iterator[Finding]:
    """Yield every broken rule of the section."""
    wish = spec.kubernetes

    def finding(key: str, message: str, *needs: str) -> Finding:
        keys = {f"kubernetes.{name}" for name in (key.partition(".")[0], *needs)}
        return Finding("HF016", f"kubernetes.{key}", message, frozenset(keys))

    if wish.gang and wish.queue is not None:
        message = "Kueue's queue starts all pods or none already; leave gang out"
        yield finding("gang", message, "queue")
    if wish.fabric_devices is not None and wish.fabric not in ("infiniband", "roce"):
        message = f"fabric: {wish.fabric} has no such devices; use infiniband or roce"
        yield finding("fabric_devices", message, "fabric")
    if wish.gpu_resource in wish.rdma:
        yield finding("rdma", f"{wish.gpu_resource} is gpu_resource already", "gpu_resource")
    mounts = {wish.mount: "mount", **dict.fromkeys(_TAKEN, "holdfast's own")}
    if wish.security.read_only_root:
        mounts["/tmp"] = "holdfast's own"  # noqa: S108  of the pods
    for name, volume in wish.volumes.items():
        key = f"volumes.{name}"
        if name.startswith("holdfast-"):
            yield finding(key, "names with holdfast- are holdfast's own; use another")
        if volume.mount in mounts:
            message = f"{volume.mount} is {mounts[volume.mount]} already; mount it elsewhere"
            yield finding(f"{key}.mount", message, "mount", "security")
        mounts[volume.mount] = f"volume {name}'s"
    if wish.mount in _TAKEN:
        yield finding("mount", f"{wish.mount} is holdfast's own; mount the claim elsewhere")
