"""IPC_LOCK of a container that does not run as root is of no use, and that is told."""

from __future__ import annotations

import json

import pytest
from k8s_cluster import Cluster

CODE = """\
import json, resource
from pathlib import Path
from elastic_trainer.plan.locked_memory import locked_memory

limit = 64 << 10
status = Path("/proc/self/status").read_text()
rows = dict(line.split(":", 1) for line in status.splitlines())
has = {name: bool(int(rows[name], 16) >> 14 & 1) for name in ("CapEff", "CapBnd")}
own = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
print(json.dumps({**has, "told": locked_memory(status, limit) is not None, "limit": own}))
"""


@pytest.mark.parametrize("user", [0, 1000])
def test_ipc_lock_is_of_use_to_root_alone(cluster: Cluster, user) -> None:
    name = f"locked-{user}"
    security = {
        "runAsUser": user,
        "runAsNonRoot": user != 0,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }
    container = {
        "name": "a",
        "image": cluster.image,
        "command": ["python3", "-c", CODE],
        "securityContext": security,
        "imagePullPolicy": "Never",
    }
    cluster.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
    )
    cluster.wait_phase(name, "Succeeded")
    # The client takes what looks like JSON for a value of Python.
    said = cluster.core.read_namespaced_pod_log(name, cluster.namespace, _preload_content=False)
    found = json.loads(said.data)
    assert found["CapBnd"]
    assert found["CapEff"] == (user == 0)
    assert found["told"] == (user != 0)
