"""Tiny runs for the emulated cluster: a run directory with job.json and an sbatch script."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import SlurmCluster, until

from elastic_trainer.config import TrainConfig
from elastic_trainer.ledger_audit import LedgerAudit
from launcher.ops import run_dir as run_dirs
from launcher.ops.bundles import write_bundle
from launcher.ops.local_job import audit_ledger
from launcher.planning.search import plan
from launcher.render.sbatch import render_slurm
from launcher.spec import load_spec

ROOT = Path(__file__).parents[2]
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
data: {{path: text.txt, format: text, tokenizer: bytes}}
checkpoint: {{every_s: null, every_steps: 10, keep: 3}}
elastic: {{min_nodes: 1, hang_ceiling_s: 60, start_ceiling_s: 120, join_timeout_s: 60,
          heartbeat_s: 0.5, dead_after_s: 4}}
network: {{ports: 29400-29499}}
slurm: {{time: 30, shutdown_s: 300, signal_lead_s: 500}}
"""
LOSS_REL = 2e-5
"""Sums of fp32 in another order, over the steps of a run."""
WAIT_S = 200.0
"""For what takes seconds: a busy machine is no failure."""


@dataclass(frozen=True, slots=True)
class TinyRun:
    """A run directory on the cluster."""

    cluster: SlurmCluster
    path: Path
    config: TrainConfig

    def submit(self, *flags: str) -> str:
        """Return the job's id."""
        env = self.cluster.env(HOLDFAST_BEAT_S="0.5", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        return self.cluster.sbatch(self.path / "job.sbatch", *flags, env=env)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events `name` of all writers, in the order of time."""
        found = []
        for path in (self.path / "events").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                if f'"event":"{name}"' in line:
                    try:
                        found.append(json.loads(line))
                    except json.JSONDecodeError:
                        continue  # the writer was killed in it
        return sorted(found, key=lambda event: event["t_unix"])

    def losses(self) -> dict[int, float]:
        """Return step -> loss of its last execution."""
        done = self.events("step.completed")
        done.sort(key=lambda event: (event["step"], event["epoch"]))
        return {event["step"]: event["loss"] for event in done}

    def step(self) -> int:
        """Return the newest step that is done; 0: none."""
        return max((event["step"] for event in self.events("step.completed")), default=0)

    def wait_step(self, step: int, timeout_s: float = WAIT_S) -> None:
        """Wait until `step` is done."""
        self.until(f"step {step}", lambda: self.step() >= step, timeout_s)

    def until(self, what: str, condition: Any, timeout_s: float = WAIT_S) -> Any:
        """Return the first true answer; if none comes in time, say all that is known."""
        try:
            return until(what, condition, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def ended(self, job: str, *states: str, timeout_s: float = WAIT_S) -> Any:
        """Wait for the end of a job."""
        try:
            return self.cluster.wait_state(job, *states, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def audit(self) -> LedgerAudit:
        """Return the ledger's account."""
        found = audit_ledger(self.path, self.config)
        assert found is not None, self.story()
        return found

    def check_done(self, plain: dict[int, float], steps: int) -> None:
        """See that all steps were done, on the curve of the undisturbed run, each sample once."""
        curve, told = self.losses(), self.story()
        assert sorted(curve) == list(range(1, steps + 1)), told
        account = self.audit()
        assert (account.lost, account.repeated) == (0, 0), told
        for step in curve.keys() & plain.keys():
            off = abs(curve[step] - plain[step]) / plain[step]
            assert off <= LOSS_REL, f"step {step}: {curve[step]} is not {plain[step]}\n{told}"

    def story(self) -> str:
        """Return what there is to read of the run."""
        logs = sorted((self.path / "logs").rglob("*.*"))
        tails = [
            f"--- {path}\n{path.read_text(errors='replace')[-2000:]}"
            for path in logs
            if path.is_file()
        ]
        return "\n".join(tails)


def make_run(
    cluster: SlurmCluster,
    folder: Path,
    *,
    steps: int,
    nodes: int = 4,
    sets: tuple[str, ...] = (),
) -> TinyRun:
    """Render a run directory under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    (folder / "job.yaml").write_text(JOB.format(nodes=nodes, steps=steps))
    spec = load_spec(folder / "job.yaml", sets)
    path = folder / "run"
    bundle = render_slurm(
        spec, plan(spec), run_id="tiny", run_dir=path, base_dir=folder, python=sys.executable
    )
    write_bundle(path, bundle)
    return TinyRun(cluster, path, run_dirs.load(path))
