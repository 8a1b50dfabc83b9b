"""A job that trains a tiny model, and what its run directory tells: for tests of any platform."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOSS_REL = 2e-5
"""Sums of fp32 in another order, over the steps of a run."""

TEXT = "".join(f"{i} squared is {i * i}, cubed {i**3}; " for i in range(600))
"""The corpus: text.txt beside the job file."""

# A constant learning rate: a longer run begins with the curve of a shorter one.
JOB = """\
name: tiny
model: {{num_layers: 2, dim: 32, num_heads: 2, num_kv_heads: 2, ffn_dim: 64, vocab_size: 256}}
layout: {layout}
cluster: {{nodes: {nodes}, gpus_per_node: {workers}, gpu: cpu}}
train:
  seq_len: 32
  global_batch: 12
  micro_batch: 3
  steps: {steps}
  precision: fp32
  recompute: none
  optimizer: {{lr: 3.0e-3, min_lr_ratio: 1.0}}
data: {{path: text.txt, format: text, tokenizer: bytes}}
"""


def event_files(run_dir: Path) -> list[Path]:
    """Return the files of all that a run has on record."""
    return sorted([*run_dir.glob("events/*.jsonl"), *run_dir.glob("nodes/*.jsonl*")])


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the run's events `name` of all writers, in the order of time."""
    found = []
    for path in event_files(run_dir):
        for line in path.read_text().splitlines():
            if f'"event":"{name}"' in line:
                try:
                    found.append(json.loads(line))
                except json.JSONDecodeError:
                    continue  # the writer was killed in it
    return sorted(found, key=lambda event: event["t_unix"])


def pids_of(started: Mapping[str, Any]) -> dict[int, int]:
    """Return rank -> process of the fields of a `workers.started`."""
    return dict(enumerate(started["pids"], started["first_rank"]))


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> loss of its last execution."""
    done = events(run_dir, "step.completed")
    done.sort(key=lambda event: (event["step"], event["epoch"]))
    return {event["step"]: event["loss"] for event in done}
