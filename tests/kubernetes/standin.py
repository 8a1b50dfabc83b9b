"""A whole cluster on this machine: API server, nodes, controllers; `python standin.py` shows one.

Everything is in this process and its children, so nothing is left when it ends.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Self

from api_faults import ADMIN, Access
from api_resources import DEFINITIONS, NAMESPACES, NODES, RESOURCES, Object
from api_server import ApiServer, certificate
from api_store import Store
from ctl_base import Manager
from ctl_cluster import Cluster
from ctl_job import Jobs
from ctl_jobset import JobSets, TrainJobs
from ctl_pytorchjob import PyTorchJobs
from ctl_queue import Queues
from pod_inside import Inside
from pod_kubelet import Kubelets
from pod_network import PodNetwork
from pod_status import condition

_ROOM = {
    "cpu": "64",
    "memory": "512Gi",
    "pods": "110",
    "nvidia.com/gpu": "8",
    "rdma/ib": "8",
    "vpc.amazonaws.com/efa": "32",
}


class StandIn:
    """A cluster; a context manager.

    Args:
        num_nodes: nodes n1..nN, each with 64 CPUs and 8 GPUs that are none.
    """

    def __init__(self, num_nodes: int = 4) -> None:
        self.nodes = [f"n{i}" for i in range(1, num_nodes + 1)]
        self.store = Store()
        self.access = Access(self.store)
        self.errors: list[BaseException] = []
        self.folder = Path()
        self._network = PodNetwork()

    def __enter__(self) -> Self:
        remove_leftovers()
        self._network.__enter__()
        self.folder = Path(tempfile.mkdtemp(prefix=f"hfkube-{os.getpid()}-"))
        self.folder.chmod(0o755)
        gateway = self._network.gateway
        self.certificate, context = certificate(self.folder, ["127.0.0.1", gateway])
        self.server = ApiServer(self.store, self.access, context)
        self.server.errors = self.errors
        self._furnish()
        self.claims = self.folder / "claims"
        inside = Inside(
            self.store,
            self.access,
            claims=self.claims,
            service=(gateway, self.server.port),
            certificate=self.certificate,
        )
        (self.folder / "pods").mkdir()
        self.kubelets = Kubelets(
            self.store,
            self._network,
            inside,
            self.folder / "pods",
            nodes=self.nodes,
            errors=self.errors,
        )
        self.server.kubelet = self.kubelets
        cluster = Cluster(self.store, self.kubelets)
        self._manager = Manager(
            self.store,
            [
                *(Queues(self.store).sync, TrainJobs(self.store).sync, JobSets(self.store).sync),
                *(Jobs(self.store).sync, PyTorchJobs(self.store).sync, cluster.bind_claims),
                *(cluster.watch_nodes, cluster.schedule, cluster.collect_garbage),
                *(cluster.end_namespaces, cluster.count_quotas),
            ],
            self.errors,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.stop()
        self.kubelets.stop()
        self.server.stop()
        self._network.__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kubeconfig(self, path: Path, *, token: str = "", namespace: str = "default") -> Path:
        """Write a kubeconfig with one context, `stand-in`; the administrator's without a token."""
        data = base64.b64encode(self.certificate.read_bytes()).decode()
        path.write_text(
            "apiVersion: v1\nkind: Config\ncurrent-context: stand-in\npreferences: {}\n"
            f"clusters: [{{name: stand-in, cluster: {{server: 'https://127.0.0.1:"
            f"{self.server.port}', certificate-authority-data: {data}}}}}]\n"
            f"users: [{{name: me, user: {{token: {token or self.access.token(ADMIN)}}}}}]\n"
            "contexts: [{name: stand-in, context: {cluster: stand-in, user: me, "
            f"namespace: {namespace}}}}}]\n"
        )
        path.chmod(0o600)
        return path

    def _furnish(self) -> None:
        for name in ("default", "kube-system"):
            self.store.create(NAMESPACES, {"metadata": {"name": name}})
            self.server.objects.furnish(name)
        for name in self.nodes:
            self.store.create(NODES, _node(name, self._network.gateway))
        for resource in RESOURCES:
            if resource.is_custom:
                self.install(resource.full_name)

    def install(self, name: str) -> None:
        """Install the definition of a custom kind, as `pytorchjobs.kubeflow.org`."""
        resource = next(r for r in RESOURCES if r.full_name == name)
        scope = "Namespaced" if resource.namespaced else "Cluster"
        names = {"plural": resource.plural, "kind": resource.kind}
        names["singular"] = resource.kind.lower()
        version = {"name": resource.version, "served": True, "storage": True}
        self.store.create(
            DEFINITIONS,
            {
                "metadata": {"name": name},
                "spec": {
                    "group": resource.group,
                    "names": names,
                    "scope": scope,
                    "versions": [version],
                },
                "status": {"conditions": [condition("Established", value=True)]},
            },
        )


def _node(name: str, address: str) -> Object:
    return {
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "topology.kubernetes.io/zone": "z1",
            },
        },
        "spec": {},
        "status": {
            "allocatable": dict(_ROOM),
            "capacity": dict(_ROOM),
            "addresses": [
                {"type": "InternalIP", "address": address},
                {"type": "Hostname", "address": name},
            ],
            "conditions": [],
            "nodeInfo": {
                "architecture": "amd64",
                "bootID": "",
                "containerRuntimeVersion": "standin://1",
                "kernelVersion": os.uname().release,
                "kubeProxyVersion": "",
                "kubeletVersion": "v1.33.1",
                "machineID": "",
                "operatingSystem": "linux",
                "osImage": "",
                "systemUUID": "",
            },
        },
    }


def remove_leftovers() -> None:
    """Remove the directories of clusters whose process was killed."""
    for path in Path(tempfile.gettempdir()).glob("hfkube-*-*"):
        owner = path.name.split("-")[1]
        if not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    """Run a cluster until Ctrl-C: `python tests/kubernetes/standin.py [NODES]`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with StandIn(int(sys.argv[1]) if len(sys.argv) > 1 else 4) as cluster:
        path = cluster.kubeconfig(cluster.folder / "kubeconfig")
        sys.stdout.write(f"export KUBECONFIG={path}\n")
        sys.stdout.flush()
        try:
            signal.pause()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
