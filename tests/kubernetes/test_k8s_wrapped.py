"""Jobs of one's own that run torchrun, wrapped: pods are lost, and they train on."""

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
                    train.py "$PWD" 2>&1 | tee "log-$POD"
                  echo "after the training" >>"log-$POD"
              env: [{{name: POD, valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}}}]
              resources: {{limits: {{memory: 1500Mi}}}}
              volumeMounts: [{{name: shared, mountPath: /shared}}]
          volumes: [{{name: shared, persistentVolumeClaim: {{claimName: {claim}}}}}]
"""
POD_OF_A_JOB = """\
parallelism: 2
completions: 2
backoffLimit: 0
template:
  spec:
    restartPolicy: Never
    containers:
    - name: trainer
      image: {image}
      command: [bash, -c, "cd /shared && ./start.sh 1:2"]
      env: [{{name: POD, valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}}}]
      resources: {{limits: {{memory: 1500Mi}}}}
      volumeMounts: [{{name: shared, mountPath: /shared}}]
    volumes: [{{name: shared, persistentVolumeClaim: {{claimName: {claim}}}}}]
"""
TRAINJOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata:
  name: torch-distributed
  labels: {{trainer.kubeflow.org/framework: torch}}
  uid: 11111111-2222-3333-4444-555555555555
  resourceVersion: "9"
spec:
  mlPolicy: {{numNodes: 1, torch: {{}}}}
  template:
    spec:
      replicatedJobs:
      - name: node
        template:
          metadata: {{labels: {{trainer.kubeflow.org/trainjob-ancestor-step: trainer}}}}
          spec:
            template:
              spec:
                containers: [{{name: node, image: {image}}}]
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {{name: own}}
spec:
  runtimeRef: {{name: torch-distributed}}
  trainer:
    numNodes: 2
    numProcPerNode: 1
    command: [bash, -c]
    args: ["cd /holdfast && torchrun --rdzv-conf=join_timeout=60 train.py . &> log-$(hostname); \
      echo after the training >>log-$(hostname)"]
    resourcesPerNode: {{limits: {{memory: 1500Mi}}}}
"""
START = """\
#!/bin/bash
set -euo pipefail
export NNODES=$1
accelerate() { echo "not this one"; }
python -u -m torch.distributed.run --nnodes="$NNODES" --rdzv-conf=join_timeout=60 \\
  train.py "$PWD" > "log-$POD" 2>&1
echo "after the training" >>"log-$POD"
"""


def manifest_of(kind: str, cluster: Cluster, *, ranks: bool) -> str:
    if kind == "pytorchjob" and ranks:
        job = yaml.safe_load(MANIFEST.format(image=cluster.image, claim=cluster.claim))
        del job["spec"]["elasticPolicy"]
        pods = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        pods["containers"][0] |= {"command": ["python3", "/shared/train.py"], "args": ["/shared"]}
        return yaml.safe_dump(job)
    if kind == "pytorchjob":
        return MANIFEST.format(image=cluster.image, claim=cluster.claim)
    if kind == "trainjob":
        return TRAINJOB.format(image=cluster.image)
    job = yaml.safe_load(POD_OF_A_JOB.format(image=cluster.image, claim=cluster.claim))
    head = {"metadata": {"name": "own"}}
    if kind == "job":
        return yaml.safe_dump({"apiVersion": "batch/v1", "kind": "Job", **head, "spec": job})
    rows = [{"name": "workers", "template": {"spec": job}}]
    spec = {"failurePolicy": {"maxRestarts": 2}, "replicatedJobs": rows}
    jobset = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", **head, "spec": spec}
    return yaml.safe_dump(jobset)


class OwnRun(K8sRun):
    """The run of a manifest that was wrapped."""

    def __init__(self, cluster: Cluster, kind: str, text: str) -> None:
        self.cluster, self.kind, self.nodes, self.name = cluster, kind, 2, "own"
        self.path = cluster.storage / "runs" / "own"
        of_jobset = "jobset.sigs.k8s.io/jobset-name"
        label = {
            **dict.fromkeys(("jobset", "trainjob"), of_jobset),
            "job": "batch.kubernetes.io/job-name",
        }
        self.selector = f"{label.get(kind, 'training.kubeflow.org/job-name')}=own"
        for document in yaml.safe_load_all(text):
            cluster.create(document, fieldValidation="Strict")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *((kind, False) for kind in ("pytorchjob", "jobset", "trainjob", "job")),
        ("pytorchjob", True),
    ],
)
def test_a_wrapped_job_survives_a_lost_pod(cluster: Cluster, tmp_path, kind, ranks) -> None:
    cluster.need(kind)
    (cluster.storage / "train.py").write_text(SCRIPT)
    (cluster.storage / "start.sh").write_text(START)
    (cluster.storage / "start.sh").chmod(0o755)
    own, wrapped = tmp_path / "own.yaml", tmp_path / "wrapped.yaml"
    own.write_text(manifest_of(kind, cluster, ranks=ranks))
    claim = ["--claim", cluster.claim] if kind == "trainjob" else []
    assert run_cli(["wrap", str(own), "-o", str(wrapped), *claim]) == 0
    run = OwnRun(cluster, kind, wrapped.read_text())

    def formed(nodes: int, after: int = 0):
        def look():
            epochs = [event for event in run.events("epoch.formed") if event["epoch"] > after]
            return next((event for event in epochs if len(event["members"]) == nodes), None)

        return run.until(f"an epoch of {nodes} nodes", look)

    first = formed(2)
    if not ranks:  # of another program than torchrun's no steps are seen
        run.until("first steps", lambda: run.events("script.progress"))
    cluster.kill_pod(next(pod for pod in run.pods() if pod != first["coordinator"]))
    if ranks or kind == "trainjob":  # its operator says how many nodes there are
        formed(2, after=first["epoch"])
    else:
        second = formed(1, after=first["epoch"])
        formed(2, after=second["epoch"])
    (cluster.storage / "enough").touch()
    run.ended("Succeeded", "Completed", "Complete")
    assert [event["code"] for event in run.events("run.ended")] == [0], run.story()
    logs = [path.read_text() for path in cluster.storage.glob("log-*")]
    assert ranks or any("after the training" in log for log in logs), logs
