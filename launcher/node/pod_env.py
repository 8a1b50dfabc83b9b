"""A pod's environment variables, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launcher.node.pod_decide import KINDS, job_id
from launcher.spec.errors import UserError

CONFIG_DIR: Final = Path("/etc/holdfast")
"""Where the job's ConfigMap is mounted; HOLDFAST_CONFIG_DIR changes it."""
SHM: Final = Path("/dev/shm")  # noqa: S108  a memory volume of the pod's own
SAVE_WAIT_S: Final = 60.0
"""Where nothing is said: `terminationGracePeriodSeconds` is 30 by default, so it is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnv:
    """Who this pod is; see launcher/render/pod.py for what is set."""

    kind: str
    """Of the job: one of pod_decide.KINDS."""
    job: str
    """What all generations of the submission share."""
    pod: str
    address: str | None
    """Numeric, of the pod."""
    host: str | None
    """The node it runs on."""
    config_dir: Path
    secret_file: str | None
    """Where the run's secret is mounted; None: agents make one in the run directory."""
    agent_file: Path
    """Where PID 1 leaves the agent's process id for preStop, in the pod's memory."""
    save_wait_s: float
    """How long preStop may wait for a save."""
    shutdown_s: float | None
    """From SIGTERM until what is left is killed; None: nobody has said."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> PodEnv:
        """Read it.

        Raises:
            UserError: HF674, this is no pod of a job.
        """
        kind, pod = env.get("HOLDFAST_KIND", ""), env.get("POD_NAME", "")
        shutdown = env.get("HOLDFAST_SHUTDOWN_S")
        try:
            if kind not in KINDS or not pod or "/" in pod:
                raise ValueError(  # noqa: TRY301  with those of the conversions
                    f"HOLDFAST_KIND={kind!r}, POD_NAME={pod!r}"
                )
            return cls(
                kind=kind,
                job=job_id(env.get("HOLDFAST_JOB", ""), env.get("HOLDFAST_ATTEMPT") or "0"),
                pod=pod,
                address=env.get("POD_IP") or None,
                host=env.get("NODE_NAME") or None,
                secret_file=env.get("HOLDFAST_SECRET_FILE") or None,
                config_dir=Path(env.get("HOLDFAST_CONFIG_DIR") or CONFIG_DIR),
                # The uid is new whenever a pod of that name is made anew.
                agent_file=SHM / f"holdfast-pod-{env.get('POD_UID') or pod}",
                save_wait_s=float(env.get("HOLDFAST_SAVE_WAIT_S") or SAVE_WAIT_S),
                shutdown_s=float(shutdown) if shutdown else None,
            )
        except ValueError as error:
            raise UserError(
                "HF674",
                f"{error}: only a job's pods call this; holdfast render writes their manifests",
            ) from error
