"""`job.json`: what the nodes are told about a job.

Written once by the launcher's render; every script carries only its path.
Agents and workers read it and never the user's YAML.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.ladder import Ladder, Rung
from elastic_trainer.layout import ParallelLayout
from elastic_trainer.models import ModelShape

JOB_JSON_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay to `min_lr_ratio * lr`."""

    lr: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of `lr`."""
    weight_decay: float = 0.1
    """Applied to matrices only, not to norms."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off (the norm is still reported)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """What one run trains. `global_batch` and `micro_batch` count sequences."""

    seq_len: int
    """Tokens per sequence."""
    global_batch: int
    micro_batch: int = 1
    steps: int
    seed: int = 0
    precision: str = "bf16"
    """bf16 (mixed: fp32 parameters and reductions) or fp32."""
    recompute: str = "selective"
    """Activation checkpointing: none, selective or full."""
    compile: bool = False
    deterministic: bool = True
    """On CUDA: only algorithms that do the same bit for bit every time. CPUs always do."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Where the tokens come from. Paths are absolute."""

    path: str
    format: str = "text"
    """text, nanogpt or megatron."""
    tokenizer: str = "bytes"
    """`bytes` (vocabulary 256), or the path of a Hugging Face tokenizer.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Checkpoints on storage. `dir` is absolute."""

    dir: str
    every_s: float | None = 600.0
    """Seconds between checkpoints; None: only by `every_steps` and at the end."""
    every_steps: int | None = None
    """Also checkpoint after every multiple of this many steps."""
    keep: int = 3
    """Newest checkpoints kept."""
    keep_every_steps: int | None = None
    """Checkpoints at multiples of this many steps are kept for ever (for evaluation)."""
    memory_every_steps: int = 1
    """Snapshot to memory after every multiple of this many steps; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSection:
    """How the job lives with failures."""

    min_nodes: int = 1
    max_restarts: int = 100
    """Job-wide restarts allowed within `window_s`; then exit 94."""
    max_crashes: int = 10
    """Of these, after errors of the program."""
    max_hangs: int = 20
    """Of these, after hangs."""
    no_progress: int = 3
    """So many failures of the program, or hangs, with no newly committed step: exit 93."""
    window_s: float = 86400.0
    node_failures: int = 2
    """A node whose workers fail this many times within `window_s` leaves the job."""
    hang_ceiling_s: float = 300.0
    """A worker without progress for this long is taken to hang."""
    hang_floor_s: float = 2.0
    """Shorter limits than that are never learned from what is usual."""
    straggler: str = "report"
    """What follows when a rank is slower than its peers: off, report, or swap its node."""
    start_ceiling_s: float = 1800.0
    """The same until the second step of an epoch is done (imports, restore, compile)."""
    join_timeout_s: float = 600.0
    """How long the first epoch waits for all nodes before going on with a lower rung, and a job
    with too few for the last rung for others, before it ends with 92."""
    heartbeat_s: float = 1.0
    """Between agents."""
    dead_after_s: float = 5.0
    """Silence after which a peer agent counts as dead."""
    progress_pattern: str | None = None
    """Where a script's output says its step: a regular expression with one group."""
    stop_grace_s: float = 30.0
    """Between SIGTERM and SIGKILL, for a script that takes no requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumbersSection:
    """What follows from wrong numbers; see docs/numbers.md."""

    non_finite: str = "skip"
    """Loss or gradient norm is no finite number: skip, rollback or stop."""
    loss_spike: str = "report"
    """ignore, report, skip, rollback or stop."""
    grad_spike: str = "report"
    """The same, of the global gradient norm before clipping."""
    loss_ratio: float = 1.5
    """A spike of the loss is more than this many times the median of the window."""
    grad_ratio: float = 5.0
    """The same, of the gradient norm."""
    window: int = 64
    """Steps in the baseline; no verdict until half of them are there."""
    rollback_steps: int = 10
    """How far a rollback goes back; that many batches are then passed over."""
    max_skips: int = 10
    """Skips and rollbacks allowed within 1,000 steps; then exit 93."""
    replica_check_steps: int | None = None
    """Compare the replicas of parameters every this many steps; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSection:
    """Which addresses and ports agents and workers use."""

    interface: str = "auto"
    cidr: str | None = None
    ports: str | None = None
    """`low-high`, or None for ports the system picks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSection:
    """The code that was frozen when the job was submitted. Paths are absolute."""

    dir: str
    """The copy in the run directory, read-only; every start runs it."""
    source: str
    """Where it was copied from."""
    digest: str
    """SHA-256 over its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFrom:
    """The checkpoint of another run that this one starts from, as that run's board has it."""

    run: str
    """Absolute run directory it came from; for people and the record."""
    checkpoints: str
    """Absolute folder of the other run's checkpoints."""
    epoch: int
    step: int
    dir: str
    """Its directory in `checkpoints`."""
    manifest_sha256: str

    @property
    def name(self) -> str:
        """`RUN@STEP`, as a user would write it."""
        return f"{self.run}@{self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The whole of job.json. `run_dir` is where it lies, on shared storage."""

    name: str
    run_id: str
    model_name: str
    model: ModelShape
    ladder: Ladder
    gpus_per_node: int
    """Workers per node."""
    device: str
    """`cuda` or `cpu`."""
    train: TrainSection
    data: DataSection
    checkpoint: CheckpointSection
    elastic: ElasticSection
    network: NetworkSection = field(default_factory=NetworkSection)
    numbers: NumbersSection = field(default_factory=NumbersSection)
    schedule: str = "1f1b"
    """Pipeline schedule: 1f1b or interleaved."""
    interleave: int = 1
    """Stages per rank of the interleaved schedule."""
    start_from: StartFrom | None = None
    """None: from initial values."""
    command: tuple[str, ...] | None = None
    """What workers run, with placeholders (command.py); None: the built-in trainer."""
    command_dir: str | None = None
    """Absolute working directory of `command`."""
    code: CodeSection | None = None
    """None: nothing was frozen, as by `holdfast run`."""
    version: int = JOB_JSON_VERSION

    def rung_of(self, num_nodes: int) -> Rung:
        """Return the rung that was planned for exactly `num_nodes` nodes."""
        return next(rung for rung in self.ladder.rungs if rung.num_nodes == num_nodes)

    def to_json(self) -> str:
        """Return the text of job.json, stable under a round trip."""
        raw = dataclasses.asdict(self)
        raw["ladder"] = [
            {**dataclasses.asdict(rung), "layout": rung.layout.to_dict()}
            for rung in self.ladder.rungs
        ]
        return json.dumps(raw, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Read the text of job.json.

        Raises:
            ValueError: it was written by a version this one cannot read.
        """
        raw: dict[str, Any] = json.loads(text)
        if raw.get("version") != JOB_JSON_VERSION:
            raise ValueError(
                f"job.json has version {raw.get('version')!r}; this holdfast reads "
                f"{JOB_JSON_VERSION}: render the job again with the installed version"
            )
        train = dict(raw["train"])
        train["optimizer"] = OptimizerConfig(**train["optimizer"])
        rungs = tuple(
            Rung(**{**rung, "layout": ParallelLayout.from_dict(rung["layout"])})
            for rung in raw["ladder"]
        )
        return cls(
            **{
                **raw,
                "model": ModelShape(**raw["model"]),
                "ladder": Ladder(rungs),
                "train": TrainSection(**train),
                "data": DataSection(**raw["data"]),
                "checkpoint": CheckpointSection(**raw["checkpoint"]),
                "elastic": ElasticSection(**raw["elastic"]),
                "network": NetworkSection(**raw["network"]),
                "command": tuple(words) if (words := raw.get("command")) else None,
                "numbers": NumbersSection(**raw.get("numbers", {})),
                "start_from": StartFrom(**start) if (start := raw.get("start_from")) else None,
                "code": CodeSection(**code) if (code := raw.get("code")) else None,
            }
        )
