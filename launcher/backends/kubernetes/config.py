"""Finds the cluster: kubeconfig and its contexts, or the pod that this runs in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from launcher.backends.kubernetes.api import KubernetesApi, Patience
from launcher.errors import UserError
from launcher.installed import need

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What a pod is given to speak to its cluster."""


def connect(
    context: str = "",
    *,
    env: Mapping[str, str] | None = None,
    patience: Patience | None = None,
    sleep: Callable[[float], None] = time.sleep,
    pod_files: Path = SERVICE_ACCOUNT,
) -> KubernetesApi:
    """Return a client of the cluster that `context` names.

    As kubectl does: the kubeconfig ($KUBECONFIG, else ~/.kube/config); in a pod without one, the
    pod's own service account.

    Args:
        context: of the kubeconfig; empty: its current one.
        env: environment; None: this process's.
        patience: time-outs.
        sleep: waits between tries.
        pod_files: what a pod is given.

    Raises:
        UserError: HF632 the package is not installed; HF750 there is no kubeconfig; HF751 it has
            no such context; HF752 its credentials cannot be had.
    """
    need("a Kubernetes cluster", "kubernetes", extra="kubernetes")
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    base = os.environ if env is None else env
    configuration = client.Configuration()
    files = _kubeconfigs(base)
    if not any(Path(path).is_file() for path in files):
        if context or not (base.get("KUBERNETES_SERVICE_HOST") and pod_files.is_dir()):
            raise UserError(
                "HF750",
                f"there is no kubeconfig: {' and '.join(files)} is not there; bring one, or name it"
                " in KUBECONFIG. Or use `holdfast render` here and `kubectl create` elsewhere",
            )
        config.load_incluster_config(client_configuration=configuration)
        namespace = _read(pod_files / "namespace") or "default"
        found = ""
    else:
        found, namespace = _chosen(config, ConfigException, os.pathsep.join(files), context)
        try:
            config.load_kube_config(os.pathsep.join(files), found, configuration)
        except (ConfigException, OSError, KeyError, TypeError, ValueError) as error:
            message = f"context {found} of {' and '.join(files)} gives no credentials"
            raise UserError("HF752", f"{message}: {_flat(error)}; log in again") from error
    configuration.retries = False  # ours know what may be done twice
    made = client.ApiClient(configuration)
    made.user_agent = "holdfast"
    return KubernetesApi(made, context=found, namespace=namespace, patience=patience, sleep=sleep)


def _chosen(config: Any, missing: type[Exception], files: str, context: str) -> tuple[str, str]:
    """Return the name and the namespace of the context to use."""
    from yaml import YAMLError

    try:
        contexts, active = config.list_kube_config_contexts(config_file=files)
    except (missing, YAMLError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            "HF750", f"the kubeconfig {files} cannot be used: {_flat(error)}; mend it"
        ) from error
    known = {str(one["name"]): one.get("context") or {} for one in contexts or ()}
    wanted = context or str((active or {}).get("name") or "")
    if wanted not in known:
        listed = ", ".join(sorted(known)[:8]) + (", …" if len(known) > 8 else "")
        raise UserError(
            "HF751",
            f"the kubeconfig {files} has no context {wanted!r}; it has {listed or 'none'}: mend "
            "kubernetes.context, or choose one with kubectl config use-context",
        )
    return wanted, str(known[wanted].get("namespace") or "default")


def _kubeconfigs(env: Mapping[str, str]) -> list[str]:
    named = [path for path in env.get("KUBECONFIG", "").split(os.pathsep) if path]
    return named or [str(Path(env.get("HOME") or "~").expanduser() / ".kube" / "config")]


def _flat(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
