"""A PyTorchJob of one's own that runs torchrun, wrapped: pods are lost, and it trains on."""

from __future__ import annotations

import pytest
import yaml
from k8s_cluster import Cluster
from k8s_runs import K8sRun

from launcher.cli.main import run_cli

SCRIPT = """\
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
while not (Path(sys.argv[1]) / "enough").exists():
    model(torch.randn(8, 4)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
"""
MANIFEST = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {{name: own}}
spec:
  nprocPerNode: "1"
  elasticPolicy: {{rdzvBackend: c10d, minReplicas: 1, maxReplicas: 2}}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: {image}
              command: [sh, -c]
              args:
                - |
                  cd /shared
                  torchrun --nproc_per_node="$PET_NPROC_PER_NODE" --rdzv-conf=join_timeout=60 \\
                    train.py "$PWD" 2>&1 | tee log
              resources: {{limits: {{memory: 1500Mi}}}}
              volumeMounts: [{{name: shared, mountPath: /shared}}]
          volumes: [{{name: shared, persistentVolumeClaim: {{claimName: {claim}}}}}]
"""


class OwnRun(K8sRun):
    """The run of a manifest that was wrapped."""

    def __init__(self, cluster: Cluster, text: str) -> None:
        cluster.need("pytorchjob")
        self.cluster, self.kind, self.nodes, self.name = cluster, "pytorchjob", 2, "own"
        self.path = cluster.storage / "runs" / "own"
        self.selector = "training.kubeflow.org/job-name=own"
        for document in yaml.safe_load_all(text):
            cluster.create(document, fieldValidation="Strict")


@pytest.mark.timeout(600)
def test_a_wrapped_job_survives_a_lost_pod(cluster: Cluster, tmp_path) -> None:
    (cluster.storage / "train.py").write_text(SCRIPT)
    own, wrapped = tmp_path / "own.yaml", tmp_path / "wrapped.yaml"
    own.write_text(MANIFEST.format(image=cluster.image, claim=cluster.claim))
    assert run_cli(["wrap", str(own), "-o", str(wrapped)]) == 0
    run = OwnRun(cluster, wrapped.read_text())

    def formed(nodes: int, after: int = 0):
        def look():
            epochs = [event for event in run.events("epoch.formed") if event["epoch"] > after]
            return next((event for event in epochs if len(event["members"]) == nodes), None)

        return run.until(f"an epoch of {nodes} nodes", look)

    first = formed(2)
    run.until("first steps", lambda: run.events("script.progress"))
    cluster.kill_pod(next(pod for pod in run.pods() if pod != first["coordinator"]))
    second = formed(1, after=first["epoch"])
    formed(2, after=second["epoch"])
    (cluster.storage / "enough").touch()
    run.ended("Succeeded")
    assert [event["code"] for event in run.events("run.ended")] == [0], run.story()
