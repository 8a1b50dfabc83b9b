"""A user of the launcher on a cluster, who has the kubeconfig and a folder of their own.

The launcher does not see the pods' storage here, as on a laptop: everything goes over the API.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from launcher.cli.main import run_cli

ROOT = Path(__file__).parents[2]
WAIT_S = 240.0
TEXT = "".join(f"{i} squared is {i * i}, cubed {i**3}; " for i in range(600))
JOB = """\
name: tiny
model: {{num_layers: 2, dim: 32, num_heads: 2, num_kv_heads: 2, ffn_dim: 64, vocab_size: 256}}
layout: {{dp: auto}}
cluster: {{nodes: {nodes}, gpus_per_node: 1, gpu: cpu}}
train:
  seq_len: 32
  global_batch: 12
  micro_batch: 3
  steps: {steps}
  precision: fp32
  recompute: none
  optimizer: {{lr: 3.0e-3, min_lr_ratio: 1.0}}
data: {{path: /holdfast/text.txt, format: text, tokenizer: bytes}}
checkpoint: {{every_s: null, every_steps: 1000, keep: 2}}
elastic: {{min_nodes: 1, hang_ceiling_s: 60, start_ceiling_s: 120, join_timeout_s: 60,
          heartbeat_s: 0.5, dead_after_s: 4}}
network: {{ports: 29400-29499}}
kubernetes:
  namespace: {namespace}
  image: {image}
  claim: {claim}
  shm: 256Mi
  save_s: 20
  shutdown_s: 40
"""
WRITES = "import sys; open('/holdfast/text.txt', 'w').write(sys.argv[1])"
RUN = ("--run-dir", "runs/one")


class User:
    """Runs commands in a folder of their own, on a machine that only has the kubeconfig."""

    def __init__(self, cluster, capsys) -> None:
        self.cluster, self.capsys = cluster, capsys

    def __call__(self, *words, code=0):
        self.capsys.readouterr()
        found = run_cli(list(words))
        out, err = self.capsys.readouterr()
        assert found == code, f"{words}: {found}\n{out}\n{err}\n{self.cluster._told()}"
        return out, err

    def json(self, *words, code=0):
        return json.loads(self(*words, "--json", code=code)[0])

    def submit(self, *sets, to="pytorchjob", nodes=1, steps=3, more=(), code=0):
        text = JOB.format(
            nodes=nodes,
            steps=steps,
            namespace=self.cluster.namespace,
            image=self.cluster.image,
            claim=self.cluster.claim,
        )
        Path("job.yaml").write_text(text)
        options = [word for text in sets for word in ("--set", text)]
        return self("submit", "job.yaml", "--to", to, *options, *more, code=code)

    def wait(self, *states, run="one"):
        def look():
            found = self.json("status", run)
            assert found["state"] in {*states, "pending", "running"}, self("why", run)
            return found if found["state"] in states else None

        return self.cluster.wait(f"{run} {states}", look, timeout_s=WAIT_S, every_s=0.5)

    def wait_step(self, step, run="one"):
        def look():
            found = self.json("status", run)
            assert found["state"] in {"pending", "running", "done"}, self("why", run)
            return found if found["training"]["step"] >= step else None

        return self.cluster.wait(f"{run} step {step}", look, timeout_s=WAIT_S, every_s=0.5)

    def nothing_is_left(self):
        """Check that the namespace is as a failed submission found it."""
        for kind in ("configmaps", "pytorchjobs", "poddisruptionbudgets"):
            ours = [
                one["metadata"]["name"]
                for one in self.cluster.list(kind)
                if one["metadata"].get("labels", {}).get("holdfast.dev/run")
            ]
            assert ours == [], kind
        self.cluster.wait("no pod", lambda: not self.cluster.pods("holdfast.dev/storage-of"))
        assert not Path("runs/one").exists()

    def process(self, *words, stdin=""):
        """Run a command in a process of its own, with pipes: those of tests are none."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "launcher.cli.main", *words],
            env=self.cluster.env(PYTHONPATH=str(ROOT)),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )


def write_corpus(cluster):
    """Write the training text to the claim, as whoever owns the data does."""
    if cluster.mounted:
        (cluster.storage / "text.txt").write_text(TEXT)
        return
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "writes"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "main",
                    "image": cluster.image,
                    "command": ["python3", "-c", WRITES, TEXT],
                    "volumeMounts": [{"name": "runs", "mountPath": "/holdfast"}],
                }
            ],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}},
            ],
        },
    }
    cluster.create(pod)
    cluster.wait_phase("writes", "Succeeded", timeout_s=WAIT_S)
