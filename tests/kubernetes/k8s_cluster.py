"""A Kubernetes cluster as tests see it: a namespace of their own, and plain API calls."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ResourceNotFoundError
from kubernetes.stream import stream

from launcher.platforms.kubernetes.status_text import DRAIN_REASON

KINDS = {
    "pytorchjob": "pytorchjobs",
    "jobset": "jobsets",
    "trainjob": "trainjobs",
    "job": "jobs",
}
_GONE_S = 180.0
_T = TypeVar("_T")


class Ran(NamedTuple):
    """What a command in a container did."""

    code: int
    out: str
    err: str


class Cluster:
    """A namespace of its own in a cluster, with a claim for shared storage.

    Args:
        kubeconfig: file whose current context is an administrator's.
        image: an image with Python and this project.
        folder: for files of the test.
        storage_class: for the claim, None: the cluster's default.
        shared: a folder that all nodes and this machine have; the claim is a folder in it.
    """

    def __init__(
        self,
        kubeconfig: Path,
        image: str,
        *,
        folder: Path,
        storage_class: str | None = None,
        shared: Path | None = None,
    ) -> None:
        self.kubeconfig, self.image = kubeconfig, image
        self.namespace = f"hf-{uuid.uuid4().hex[:8]}"
        self.claim = "storage"
        self._folder = folder
        self._storage_class, self._shared = storage_class, shared
        self._down: list[str] = []
        self._cluster_roles: list[str] = []
        self.api: client.ApiClient = config.new_client_from_config(str(kubeconfig))
        self._dynamic = DynamicClient(self.api)
        self.core = client.CoreV1Api(self.api)
        self.rbac = client.RbacAuthorizationV1Api(self.api)

    def set_up(self) -> None:
        """Create namespace and claim."""
        self.core.create_namespace({"metadata": {"name": self.namespace}})
        spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"]}
        spec["resources"] = {"requests": {"storage": "1Gi"}}
        if self._shared is not None:
            self._create_volume()
            spec |= {"storageClassName": "", "volumeName": self.namespace}
        elif self._storage_class is not None:
            spec["storageClassName"] = self._storage_class
        claim = {"metadata": {"name": self.claim}, "spec": spec}
        self.core.create_namespaced_persistent_volume_claim(self.namespace, claim)

        def has_account() -> bool:
            accounts = self.core.list_namespaced_service_account(self.namespace).items
            return any(account.metadata.name == "default" for account in accounts)

        self.wait("the default service account", has_account)
        if self._shared is not None:
            self.wait("the claim's volume", self._is_bound, every_s=0.3)

    def clear(self) -> None:
        """End all pods, bring back nodes; the namespace is left to Kubernetes to remove."""
        for node in list(self._down):
            self.restore(node)
        for name in self._cluster_roles:
            with contextlib.suppress(client.ApiException):
                self.rbac.delete_cluster_role_binding(name)
                self.rbac.delete_cluster_role(name)
        for node in self.nodes():
            gone = {"metadata": {"annotations": {DRAIN_REASON: None}}}
            self.core.patch_node(node, {**gone, "spec": {"unschedulable": None}})
        self._delete_jobs()
        self.core.delete_namespace(self.namespace, grace_period_seconds=0)
        self.wait("the end of the pods", self._has_no_pods, timeout_s=_GONE_S, every_s=0.2)

    def wait_gone(self) -> None:
        """Wait until the namespace is gone, and remove the claim's folder."""
        try:
            self.wait("the end of the namespace", self._is_gone, timeout_s=_GONE_S, every_s=0.2)
            if self._shared is not None:
                self.core.delete_persistent_volume(self.namespace)
                shutil.rmtree(self.storage)
        finally:
            self.api.close()

    def env(self, **more: str) -> dict[str, str]:
        """Return an environment in which kubectl and the launcher find this cluster."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), **more}

    @property
    def mounted(self) -> bool:
        """Whether the claim's folder is on this machine too."""
        return self._shared is not None

    @property
    def storage(self) -> Path:
        """The claim's folder on this machine; skips where it is not mounted here."""
        if self._shared is None:
            pytest.skip("HOLDFAST_TEST_SHARED_DIR: the claim is not mounted here")
        return self._shared / self.namespace

    def need(self, kind: str) -> None:
        """Skip where a kind (pytorchjob, jobset, trainjob) is not installed."""
        try:
            self._dynamic.resources.get(name=KINDS[kind])
        except ResourceNotFoundError:
            pytest.skip(f"{KINDS[kind]} are not installed in this cluster")

    # Objects

    def create(self, obj: dict[str, Any], **query: str) -> dict[str, Any]:
        """Create an object of any kind in this namespace."""
        resource = self._dynamic.resources.get(api_version=obj["apiVersion"], kind=obj["kind"])
        made = resource.create(obj, namespace=self.namespace, query_params=list(query.items()))
        return dict(made.to_dict())

    def read(self, plural: str, name: str) -> dict[str, Any]:
        """Return an object by plural and name, as `pytorchjobs` and `j`."""
        return dict(self._of(plural).get(name=name, namespace=self.namespace).to_dict())

    def list(self, plural: str) -> list[dict[str, Any]]:
        """Return the objects of a kind in this namespace."""
        return list(self._of(plural).get(namespace=self.namespace).to_dict()["items"])

    def delete(self, plural: str, name: str, *, foreground: bool = False) -> None:
        """Delete an object, and what belongs to it before or after it."""
        body = {"propagationPolicy": "Foreground" if foreground else "Background"}
        self._of(plural).delete(name=name, namespace=self.namespace, body=body)

    # Pods

    def pods(self, selector: str = "") -> list[client.V1Pod]:
        """Return the pods of the namespace."""
        found = self.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return sorted(found, key=lambda pod: str(pod.metadata.name))

    def pod(self, name: str) -> client.V1Pod:
        return self.core.read_namespaced_pod(name, self.namespace)

    def wait_phase(self, name: str, *phases: str, timeout_s: float = 60.0) -> client.V1Pod:
        """Wait until a pod is in one of these phases."""

        def look() -> client.V1Pod | None:
            pod = self.pod(name)
            return pod if pod.status.phase in phases else None

        return self.wait(f"pod {name} {'/'.join(phases)}", look, timeout_s=timeout_s)

    def kill_pod(self, name: str) -> None:
        """Delete a pod by force; its processes are killed."""
        self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)

    def log(self, name: str, **query: Any) -> str:
        """Return a pod's log."""
        answer = self.core.read_namespaced_pod_log(
            name, self.namespace, _preload_content=False, **query
        )
        try:
            return answer.data.decode()
        finally:
            answer.release_conn()

    def run(self, name: str, *command: str) -> Ran:
        """Run a command in a pod's container."""
        session = stream(
            self.core.connect_get_namespaced_pod_exec,
            name,
            self.namespace,
            command=list(command),
            stdout=True,
            stderr=True,
            stdin=False,
            tty=False,
            _preload_content=False,
        )
        try:
            session.run_forever(timeout=60)
            out, err = session.read_channel(1), session.read_channel(2)
            return Ran(session.returncode, out, err)
        finally:
            try:
                session.close()
            finally:
                session.sock.shutdown()  # close alone leaves the socket after the server's close

    def events(self, name: str) -> list[str]:
        """Return what was told of an object, as `reason: message`."""
        found = self.core.list_namespaced_event(
            self.namespace, field_selector=f"involvedObject.name={name}"
        ).items
        return [f"{event.reason}: {event.message}" for event in found]

    # Nodes

    def nodes(self) -> list[str]:
        """Return the names of all nodes."""
        return sorted(node.metadata.name for node in self.core.list_node().items)

    def cores(self) -> float:
        """Return how many cores the largest node offers to pods."""
        found = [node.status.allocatable["cpu"] for node in self.core.list_node().items]
        return max(int(n[:-1]) / 1000 if n.endswith("m") else float(n) for n in found)

    def power_off(self, node: str) -> None:
        """Take a node's power: it goes NotReady, its pods stay Terminating."""
        for name in ("HOLDFAST_TEST_NODE_DOWN", "HOLDFAST_TEST_NODE_UP"):
            if not os.environ.get(name):
                pytest.skip(f"{name} names no command for what a node is to suffer")
        self._down.append(node)
        self._command("HOLDFAST_TEST_NODE_DOWN", node)

    def restore(self, node: str) -> None:
        """Bring a node back."""
        self._command("HOLDFAST_TEST_NODE_UP", node)
        self._down.remove(node)

    def _command(self, name: str, node: str) -> None:
        words = [word.format(node=node) for word in shlex.split(os.environ[name])]
        subprocess.run(words, check=True, timeout=120)

    def wait_ready(self, node: str, *, ready: bool, timeout_s: float = 60.0) -> None:
        """Wait until a node is ready, or is not."""

        def look() -> bool:
            rows = self.core.read_node(node).status.conditions
            return any(row.type == "Ready" and row.status == "True" for row in rows) == ready

        self.wait(f"node {node} ready: {ready}", look, timeout_s=timeout_s)

    def kubeconfig_for(
        self, *rules: dict[str, Any], name: str = "limited", everywhere: bool = False
    ) -> Path:
        """Return a kubeconfig of a new service account that a Role with these rules binds.

        Args:
            rules: what it may do.
            name: of the account.
            everywhere: in all of the cluster: a ClusterRole.
        """
        space = self.namespace
        self.core.create_namespaced_service_account(space, {"metadata": {"name": name}})
        bound = f"{space}-{name}" if everywhere else name
        role = {"metadata": {"name": bound}, "rules": list(rules)}
        binding = {
            "metadata": {"name": bound},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": space}],
            "roleRef": {
                "kind": "ClusterRole" if everywhere else "Role",
                "name": bound,
                "apiGroup": "rbac.authorization.k8s.io",
            },
        }
        if everywhere:
            self._cluster_roles.append(bound)
            self.rbac.create_cluster_role(role)
            self.rbac.create_cluster_role_binding(binding)
        else:
            self.rbac.create_namespaced_role(space, role)
            self.rbac.create_namespaced_role_binding(space, binding)
        asked = {"spec": {"audiences": [], "expirationSeconds": 3600}}
        token = self.core.create_namespaced_service_account_token(name, space, asked)
        return self._kubeconfig_with(token.status.token, name)

    def wait(
        self, what: str, look: Callable[[], _T], *, timeout_s: float = 60.0, every_s: float = 0.05
    ) -> _T:
        """Return the first true answer of `look`.

        Raises:
            AssertionError: `timeout_s` is over; tells the pods there are.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {timeout_s:g} s\n{self._told()}")
            time.sleep(every_s)
        return found

    # Inside

    def _create_volume(self) -> None:
        """Make the volume of the claim: a folder of this machine that every node has too."""
        assert self._shared is not None
        folder = self._shared / self.namespace
        folder.mkdir()
        folder.chmod(0o777)
        spec = {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": self.namespace, "name": self.claim},
            "hostPath": {"path": str(folder), "type": "Directory"},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
        }
        self.core.create_persistent_volume({"metadata": {"name": self.namespace}, "spec": spec})

    def _is_bound(self) -> bool:
        """Whether the claim is bound. The scheduler may miss it for a pod made before, and then
        looks at that pod after five minutes only.

        The volumes' controller may miss the volume, and looks again after up to 15 s, or at a
        change of the claim.
        """
        looked = {"metadata": {"annotations": {"holdfast.dev/looked": f"{time.monotonic()}"}}}
        claim = self.core.patch_namespaced_persistent_volume_claim(
            self.claim, self.namespace, looked
        )
        return claim.status.phase == "Bound"

    def _delete_jobs(self) -> None:
        """Delete the jobs, and wait for the Jobs that operators have made of them.

        A namespace that goes first goes never: its pods are deleted before all else, and a Job with
        backoffLimitPerIndex keeps a failed pod until it has made another, which is forbidden there.
        """
        for kind in ("pytorchjobs", "trainjobs", "jobsets", "jobs"):
            with contextlib.suppress(
                client.ApiException, ResourceNotFoundError
            ):  # the kind may not be installed
                for job in self.list(kind):
                    with contextlib.suppress(client.ApiException):  # its owner may be gone by now
                        self.delete(kind, job["metadata"]["name"])
        self.wait("the end of the jobs", lambda: not self.list("jobs"), timeout_s=_GONE_S)

    def _has_no_pods(self) -> bool:
        pods = self.pods()
        for pod in pods:
            with contextlib.suppress(client.ApiException):
                self.kill_pod(pod.metadata.name)
        return not pods

    def _is_gone(self) -> bool:
        spaces = self.core.list_namespace().items
        return all(space.metadata.name != self.namespace for space in spaces)

    def _kubeconfig_with(self, token: str, name: str) -> Path:
        import yaml

        content = yaml.safe_load(self.kubeconfig.read_text())
        content["users"] = [{"name": name, "user": {"token": token}}]
        current = content["current-context"]
        rows = [row for row in content["contexts"] if row["name"] == current]
        rows[0]["context"] |= {"user": name, "namespace": self.namespace}
        content["contexts"] = rows
        path = self._folder / f"kubeconfig-{name}"
        path.write_text(json.dumps(content))
        path.chmod(0o600)
        return path

    def _of(self, plural: str) -> Any:
        return self._dynamic.resources.get(name=plural)

    def _told(self) -> str:
        rows = []
        for kind in ("pytorchjobs", "trainjobs", "jobsets", "jobs"):
            with contextlib.suppress(client.ApiException, ResourceNotFoundError):
                rows += [f"--- {kind} {job.get('status')}" for job in self.list(kind)]
        for pod in self.pods():
            name = pod.metadata.name
            with contextlib.suppress(client.ApiException):
                rows.append(f"--- {name} {pod.status.phase} {self.events(name)}")
                rows.append(self.log(name)[-1500:])
        return "\n".join(rows)
