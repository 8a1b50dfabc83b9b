"""Names, labels and places of a job on Kubernetes: what renderer, backend and pods agree on. Pure.

Everything the launcher finds a run's objects by is here.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath
from typing import Final

KINDS: Final = {"pytorchjob": "PyTorchJob", "jobset": "JobSet", "trainjob": "TrainJob"}
"""Target -> kind of the job's own document, the last one of manifests.yaml."""
API_VERSIONS: Final = {
    "pytorchjob": "kubeflow.org/v1",
    "jobset": "jobset.x-k8s.io/v1alpha2",
    "trainjob": "trainer.kubeflow.org/v1alpha1",
}
CONTAINERS: Final = {"pytorchjob": "pytorch", "jobset": "pytorch", "trainjob": "node"}
"""Target -> the agent's container: the operators of PyTorchJob and TrainJob ask for these names."""
REPLICATED_JOB: Final = "node"
"""Name of the one replicated job of a JobSet: its Job is `<name>-node-0`."""

RUN_LABEL: Final = "holdfast.dev/run"
"""The job's name, on every object and pod of a run: the selector for all of them."""
WITHOUT_MESH: Final = {
    "labels": {"sidecar.istio.io/inject": "false"},
    "annotations": {"linkerd.io/inject": "disabled"},
}
"""Of pods: the proxies of a service mesh would answer for agents, which refuse strangers."""
ATTEMPT_LABEL: Final = "holdfast.dev/attempt"
"""Number of the submission, from 0; `submit` sets it, pods see it as HOLDFAST_ATTEMPT."""
MANAGED_LABEL: Final = "app.kubernetes.io/managed-by"
RUN_ID_ANNOTATION: Final = "holdfast.dev/run-id"
RUN_DIR_ANNOTATION: Final = "holdfast.dev/run-dir"
"""Run directory as the pods see it."""
LEDGER: Final = "holdfast-fleet"
"""ConfigMap with the fleet's ledger, for jobs whose claim the launcher does not see."""
OPERATORS: Final = "operators"
"""End of the name of the ConfigMap of a ledger's operators, which no pod may write."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"

CONFIG_DIR: Final = "/etc/holdfast"
"""Where the ConfigMap is mounted: job.json as rendered."""
SECRET_DIR: Final = "/etc/holdfast-secret"  # noqa: S105  a place
"""Where the run's Secret is mounted, with the board in a ConfigMap."""
SECRET_KEY: Final = "secret"  # noqa: S105  its name
SECRET_VOLUME: Final = "holdfast-secret"  # noqa: S105  a name
CONFIG_VOLUME: Final = "holdfast-job"
CLAIM_VOLUME: Final = "holdfast-runs"
SHM_VOLUME: Final = "holdfast-shm"
TMP_VOLUME: Final = "holdfast-tmp"

MAX_NAME: Final = 40
"""Of 63: JobSet's pods are called <name>-node-0-<index>-<5 characters>, and ours end in -board."""
_DIGEST: Final = 6


def job_name(run_id: str) -> str:
    """Return the DNS-1035 name of a run's job: `run_id` itself where that is one.

    What must be changed or is too long ends in a digest, so that two runs stay two.
    """
    plain = re.sub(r"[^a-z0-9-]+", "-", run_id.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".strip("-")
    if plain == run_id and len(plain) <= MAX_NAME:
        return plain
    digest = hashlib.sha256(run_id.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]
    return f"{plain[: MAX_NAME - _DIGEST - 1].strip('-')}-{digest}"


def config_map_name(name: str) -> str:
    """Return the name of the ConfigMap with job.json."""
    return f"{name}-job"


def board_name(name: str) -> str:
    """Return the name of the ConfigMap that is the board, with `board: kubernetes`."""
    return f"{name}-board"


def secret_name(name: str) -> str:
    """Return the name of the Secret of the agents, as rendered; `submit` adds its own number."""
    return f"{name}-secret"


def board_url(namespace: str, name: str) -> str:
    """Return what HOLDFAST_BOARD says of that board."""
    return f"kubernetes://{namespace}/{board_name(name)}"


def ledger_url(namespace: str) -> str:
    """Return where the fleet's ledger of a namespace is, unless the job file says so."""
    return f"kubernetes://{namespace}/{LEDGER}"


def own_account(name: str) -> str:
    """Return the name of ServiceAccount, Role and RoleBinding of a run that has its own."""
    return f"{name}-agent"


def pod_run_dir(*, mount: str, run_id: str, run_dir: str) -> str:
    """Return the run directory as the pods see it.

    That is `run_dir` itself where it is under the claim's mount, as on a login host that has
    the same storage at the same path; else a folder of the claim called as the run.
    """
    if PurePosixPath(run_dir).is_relative_to(mount) and run_dir != mount:
        return run_dir
    return f"{mount}/{run_id}"


def labels_of(name: str) -> dict[str, str]:
    """Return the labels that everything of a run has."""
    return {RUN_LABEL: name, ATTEMPT_LABEL: "0", MANAGED_LABEL: "holdfast"}
