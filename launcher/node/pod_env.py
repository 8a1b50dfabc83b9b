"""What a pod is told by its environment, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launcher.node.attempt import NodeError
from launcher.node.pod_decide import KINDS, job_id
from launcher.node.pod_dir import CONFIG_DIR

SHM: Final = Path("/dev/shm")  # noqa: S108  a memory volume of the pod's own
SAVE_WAIT_S: Final = 60.0
"""Where nothing is said: `terminationGracePeriodSeconds` is 30 by default, so it is cut off."""

_WAY_OUT: Final = "only the pods of a job call this; holdfast render writes their manifests"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnv:
    """Who this pod is; see launcher/render/pod.py for what is set."""

    kind: str
    """Of the job: one of pod_decide.KINDS."""
    job: str
    """What all generations of the submission share."""
    pod: str
    uid: str
    """New whenever a pod of that name is made anew."""
    address: str | None
    """Numeric, of the pod."""
    host: str | None
    """The node it runs on."""
    config_dir: Path
    save_wait_s: float
    """How long preStop may wait for a save."""
    shutdown_s: float | None
    """From SIGTERM until what is left is killed; None: nobody has said."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> PodEnv:
        """Read it.

        Raises:
            NodeError: HF674, this is no pod of a job.
        """
        kind, pod = env.get("HOLDFAST_KIND", ""), env.get("POD_NAME", "")
        name, submission = env.get("HOLDFAST_JOB", ""), env.get("HOLDFAST_ATTEMPT") or "0"
        try:
            job = job_id(name, submission)
            wait_s = float(env.get("HOLDFAST_SAVE_WAIT_S") or SAVE_WAIT_S)
            shutdown = env.get("HOLDFAST_SHUTDOWN_S")
            shutdown_s = float(shutdown) if shutdown else None
        except ValueError as error:
            raise NodeError("HF674", f"{error}: {_WAY_OUT}") from error
        if kind not in KINDS or not pod or "/" in pod:
            raise NodeError(
                "HF674",
                f"HOLDFAST_KIND={kind!r}, POD_NAME={pod!r}: {_WAY_OUT}",
            )
        return cls(
            kind=kind,
            job=job,
            pod=pod,
            uid=env.get("POD_UID") or pod,
            address=env.get("POD_IP") or None,
            host=env.get("NODE_NAME") or None,
            config_dir=Path(env.get("HOLDFAST_CONFIG_DIR") or CONFIG_DIR),
            save_wait_s=wait_s,
            shutdown_s=shutdown_s,
        )

    @property
    def agent_file(self) -> Path:
        """Where PID 1 leaves the agent's process id for preStop, in the pod's memory."""
        return SHM / f"holdfast-pod-{self.uid}"
