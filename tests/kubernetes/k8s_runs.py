"""Tiny training runs on a cluster, and what their record on the claim says."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from k8s_cluster import KINDS, Cluster
from tiny_run import event_files

from elastic_trainer.board.state import BoardState
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record.events import EVENTS
from elastic_trainer.record.sample_ledger import SampleAudit
from launcher.plan.planning import plan
from launcher.platforms.targets import target_named
from launcher.render.kubernetes_names import (
    RUN_LABEL,
    SECRET_KEY,
    board_name,
    job_name,
    secret_name,
)
from launcher.runs.reports.data import audit_ledger
from launcher.spec.reading import parse_spec

TEXT = "".join(f"{i} squared is {i * i}, cubed {i**3}; " for i in range(600))
JOB = """\
name: tiny
model: {{num_layers: 2, dim: 32, num_heads: 2, num_kv_heads: 2, ffn_dim: 64, vocab_size: 256}}
layout: {{dp: auto}}
cluster: {{nodes: {nodes}, gpus_per_node: 1, gpu: cpu}}
train: {{seq_len: 32, global_batch: 12, micro_batch: 2, steps: {steps}, precision: fp32,
        recompute: none}}
data: {{path: /holdfast/text.txt, format: text, tokenizer: bytes}}
checkpoint: {{every_s: null, every_steps: {every}, keep: 3}}
elastic: {{min_nodes: 1, hang_ceiling_s: 60, start_ceiling_s: 120, join_timeout_s: 100,
          dead_after_s: 10}}
kubernetes: {{namespace: {namespace}, image: {image!r}, claim: {claim}, mount: /holdfast,
             shm: 512Mi, board: {board}}}
env: {{variables: {{OMP_NUM_THREADS: '1'}}}}
"""
TOLD = ("agent.started", "agent.exit", "coordinator.elected", "save.asked", "worker.exit")
_PLAIN = {"v", "t_unix", "t_mono", "node", "rank", "event"}
WAIT_S = 240.0
"""For what takes seconds: a busy machine is no failure."""


class K8sRun:
    """One run whose manifest was applied as it was rendered.

    Args:
        cluster: where.
        kind: pytorchjob, jobset or trainjob.
        steps: of the training; so many that it goes on for as long as a test lasts by default.
        nodes: pods.
        every: steps between two checkpoints.
        board: file or kubernetes.
        sets: further `--set`s.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        *,
        steps: int = 1_000_000,
        nodes: int = 2,
        every: int = 100,
        board: str = "file",
        sets: tuple[str, ...] = (),
    ) -> None:
        cluster.need(kind)
        self.cluster, self.kind, self.nodes = cluster, kind, nodes
        (cluster.storage / "text.txt").write_text(TEXT)
        text = JOB.format(
            nodes=nodes,
            steps=steps,
            every=every,
            namespace=cluster.namespace,
            image=cluster.image,
            claim=cluster.claim,
            board=board,
        )
        spec = parse_spec(text, "job.yaml", sets)
        bundle = target_named(kind).load_renderer()(
            spec,
            plan(spec),
            run_id="tiny",
            run_dir=Path("/home/me/runs/tiny"),
            base_dir=Path("/home/me"),
            python="",
        )
        self.config = TrainConfig.from_json(bundle["job.json"])
        self.path = cluster.storage / "tiny"
        self.name = job_name("tiny")
        self.selector = f"{RUN_LABEL}={self.name}"
        if board == "kubernetes":  # as the head of the manifests says; `submit` is not used here
            name, value = secret_name(self.name), {SECRET_KEY: f"{secrets.token_hex(32)}\n"}
            head = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
            cluster.create({**head, "stringData": value})
        for document in yaml.safe_load_all(bundle["manifests.yaml"]):
            cluster.create(document)

    # -- pods -------------------------------------------------------------------------------

    def pods(self) -> dict[str, str]:
        """Return the uid of each pod that is not about to end, by its name."""
        found = self.cluster.pods(self.selector)
        return {
            pod.metadata.name: pod.metadata.uid
            for pod in found
            if pod.metadata.deletion_timestamp is None
            and pod.status.phase in {"Pending", "Running"}
        }

    def node_of(self, pod: str) -> str:
        return str(self.cluster.pod(pod).spec.node_name)

    def drain(self, pod: str) -> None:
        """Delete a pod as `kubectl drain` does, with its time to save."""
        self.cluster.core.delete_namespaced_pod(pod, self.cluster.namespace)

    def ended(self, *conditions: str) -> None:
        """Wait until the job has ended with one of these conditions."""
        self.cluster.wait(
            f"{self.kind} {self.name} {'/'.join(conditions)}",
            lambda: self.conditions() & set(conditions),
            timeout_s=WAIT_S,
        )

    def conditions(self) -> set[str]:
        status = self.cluster.read(KINDS[self.kind], self.name).get("status", {})
        return {row["type"] for row in status.get("conditions", []) if row["status"] == "True"}

    # -- the record -------------------------------------------------------------------------

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events `name` of all writers, in the order of time."""
        found = []
        for path in event_files(self.path):
            for line in path.read_text().splitlines():
                if f'"event":"{name}"' in line:
                    try:
                        found.append(json.loads(line))
                    except json.JSONDecodeError:
                        continue  # the writer was killed in it, or is at it
        return sorted(found, key=lambda event: event["t_unix"])

    def step(self) -> int:
        return max((event["step"] for event in self.events("step.completed")), default=0)

    def until(self, what: str, true: Callable[[], Any]) -> Any:
        """Return the first true answer; if none comes in time, say all that is known."""
        try:
            return self.cluster.wait(what, true, timeout_s=WAIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def until_steps(self, nodes: int, *, more: int = 5, after: int = 0) -> dict[str, Any]:
        """Wait for some steps of the newest epoch, after `after`, of `nodes` nodes; return it."""

        def look() -> dict[str, Any] | None:
            formed = self.events("epoch.formed")
            if not formed or len(formed[-1]["members"]) != nodes or formed[-1]["epoch"] <= after:
                return None
            steps = [e for e in self.events("step.completed") if e["epoch"] == formed[-1]["epoch"]]
            return formed[-1] if len(steps) >= more else None

        found: dict[str, Any] = self.until(f"{more} steps of {nodes} nodes", look)
        return found

    def redone(self, epoch: int) -> int:
        """Return how many completed steps the epoch did again."""
        done = self.events("step.completed")
        before = max(e["step"] for e in done if e["epoch"] < epoch)
        return int(before + 1 - min(e["step"] for e in done if e["epoch"] == epoch))

    def board(self) -> BoardState:
        """Return what is on the board, wherever it is."""
        folder = self.path / "board"
        if (folder / "elsewhere").exists():
            found = self.cluster.read("configmaps", board_name(self.name))
            return BoardState.decode(found["data"]["state"].encode())
        newest = max(folder.glob("v*"))
        return BoardState.decode(newest.read_bytes().partition(b"\n")[2])

    def audit(self) -> SampleAudit:
        """Return the ledger's account of samples."""
        found = audit_ledger(self.path, self.config)
        assert found is not None, self.story()
        return found

    def check_ledger(self) -> None:
        account = self.audit()
        assert (account.lost, account.repeated) == (0, 0), self.story()

    def story(self) -> str:
        """Return what there is to read of the run."""
        rows = [f"pods {self.pods()}", *self._told()]
        for pod in self.cluster.pods(self.selector):
            rows += [f"--- {pod.metadata.name}", *self.cluster.events(pod.metadata.name)]
        logs = [path for path in (self.path / "logs").rglob("*.log") if path.is_file()]
        rows += [f"--- {p}\n{p.read_text(errors='replace')[-1500:]}" for p in sorted(logs)]
        return "\n".join(rows)

    def _told(self) -> list[str]:
        """Return the events of membership and workers, in the order of time."""
        names = {*TOLD, *(name for name in EVENTS if name.startswith(("member.", "epoch.")))}
        found = [event for name in names for event in self.events(name)]
        return [
            f"{event['t_unix']:.3f} {event['node']} {event['event']} "
            + " ".join(f"{key}={value}" for key, value in event.items() if key not in _PLAIN)
            for event in sorted(found, key=lambda event: event["t_unix"])
        ]
