"""`job.json`: what the nodes know about a job.

Written once by the launcher's render; every script carries only its path.
Agents and workers read it and never the user's YAML.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Final

from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.plan.models import ModelShape, option, raw_of, says, shape_of
from elastic_trainer.storage.typed import build, parse_json

TRACKERS: Final = ("tensorboard", "mlflow", "wandb")
METRICS_TARGETS: Final = "targets.json"
"""In the run directory: the agents that serve metrics, in the form of Prometheus' file_sd."""
JOB_JSON_VERSION = 2
"""2: the ladder in ranges, and no defaults of how a job is operated.

Runs keep their job.json over an upgrade. To change such a default, raise the version, and read
version 2 with the former default.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay to `min_lr_ratio * lr`."""

    lr: float = option(3e-4, "Peak learning rate.")
    warmup_steps: int = option(0, "Steps of linear warm-up.")
    min_lr_ratio: float = option(0.1, "Final learning rate as a fraction of lr.")
    weight_decay: float = option(0.1, "Decay of matrices; norms have none.")
    beta1: float = option(0.9, "Decay of the first moment.")
    beta2: float = option(0.95, "Decay of the second moment.")
    eps: float = option(1e-8, "Epsilon of AdamW.")
    clip_norm: float = option(1.0, "Largest global gradient norm; 0: off.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection:
    """`train.lora` of a job file; in job.json the model's shape has what it comes to."""

    base: str = field(
        metadata=says(
            "Run with the weights that stay as they are, RUN or RUN@STEP, as `holdfast checkpoint "
            "import` makes it; relative to the job file's folder. It must stay there."
        )
    )
    rank: int = field(metadata=says("Of the adapters."))
    alpha: float | None = option(
        None, "Adapters are scaled by alpha / rank, as peft's lora_alpha; null: rank."
    )
    dropout: float = option(0.0, "0 alone: nothing random is trained.")
    targets: tuple[str, ...] | None = option(
        None,
        "Names of the linear modules with an adapter, as transformers has them: [q_proj, v_proj]; "
        "null: all but the head.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """What one run trains. `global_batch` and `micro_batch` count sequences."""

    seq_len: int = field(metadata=says("Tokens per sequence."))
    global_batch: int = field(metadata=says("Sequences per step, in every fallback layout."))
    micro_batch: int = option(1, "Sequences per forward pass of one dp rank.")
    steps: int = field(metadata=says("Optimizer steps."))
    seed: int = option(0, "Seed of initialisation and sample order.")
    precision: str = option("bf16", "bf16 (mixed: fp32 parameters and reductions) or fp32.")
    float8: bool = option(
        False, "Multiply the layers' matrices in float8, by torchao: docs/parallelism.md."
    )
    recompute: str = option("selective", "Activation checkpointing.")
    compile: bool = option(False, "Compile each layer with torch.compile.")
    no_sync: bool | None = option(
        None,
        "Reduce gradients after the last micro-batch of a step only, which needs whole fp32 "
        "gradients on every GPU; null: on rungs whose predicted memory leaves 10 % free.",
    )
    deterministic: bool = option(
        False, "On GPUs, only algorithms that do the same bit for bit (some are slower)."
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraSection | None = field(
        default=None,
        metadata=says("Train adapters of low rank, the model stays as it is: docs/finetuning.md."),
    )


RECORD_FORMATS: Final = ("jsonl", "parquet", "arrow")
"""Of `data.format`: a text at `data.key` of each record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCorpus:
    """A corpus of a mix. `path` is absolute."""

    weight: float = field(metadata=says("Its share of the samples, beside those of the others."))
    path: str | None = option(
        None, "File or folder, relative to the job file's; null: the name is the path."
    )
    format: str | None = option(None, "Its format; null: data.format.")
    key: str | None = option(None, "Its key or column with the text; null: data.key.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Where the tokens come from: `path` or `mix`. Paths are absolute."""

    path: str | None = option(None, "File or folder, relative to the job file's; this or mix.")
    mix: dict[str, MixedCorpus] | None = field(
        default=None,
        metadata=says("Several corpora: the path of each and its weight, or a name and keys."),
    )
    format: str = option(
        "text",
        "text files; texts in jsonl, parquet or arrow; nanoGPT .bin shards; Megatron .bin/.idx; or "
        "sft: examples. See docs/data.md.",
    )
    tokenizer: str = option("bytes", "bytes (vocabulary 256), or the path of a tokenizer.json.")
    key: str | None = option(
        None, "Of jsonl, parquet and arrow: the key or column with the text; null: text."
    )
    cut_long: bool = option(
        False, "Of sft: cut examples longer than seq_len + 1 tokens; false: refuse them."
    )
    as_is: bool = option(
        False, "Of text: train on files that are not text in UTF-8, or are JSON; false: refuse."
    )

    @property
    def text_key(self) -> str:
        """Where a record has its text."""
        return "text" if self.key is None else self.key

    @property
    def encodes(self) -> bool:
        """Whether `tokenizer` makes tokens of a corpus; else the files have them."""
        return any(one.format not in ("nanogpt", "megatron") for one in self.corpora.values())

    @property
    def corpora(self) -> dict[str, DataSection]:
        """Each corpus as a section with a path, by the job file's key: a mix has several."""
        if self.mix is None:
            return {"data.path": self}
        return {f"data.mix.{name}": self._mixed(name) for name in self.mix}

    def _mixed(self, name: str) -> DataSection:
        assert self.mix is not None
        one = self.mix[name]
        data_format = one.format or self.format
        has_key = data_format in RECORD_FORMATS
        return dataclasses.replace(
            self.at(one.path or name),
            format=data_format,
            key=(one.key or self.key) if has_key else None,
        )

    def at(self, path: str) -> DataSection:
        """Return this section for the one corpus at `path`."""
        return dataclasses.replace(self, path=path, mix=None)

    @property
    def packed(self) -> bool:
        """Whether a sequence holds several documents that do not attend to each other."""
        return self.format == "sft"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSection:
    """The loss on data that is not trained on; see docs/finetuning.md. `path` is absolute."""

    path: str = field(
        metadata=says("File or folder, of the format and tokenizer of data; never trained on.")
    )
    every_steps: int = field(
        metadata=says("Validate after every multiple of this many steps, and after the last one.")
    )
    batches: int | None = option(None, "Global batches each time; null: all of path, once.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Checkpoints on storage. `dir` is absolute."""

    dir: str
    every_s: float | None = option(
        600.0, "Seconds between checkpoints; null: only by every_steps and at the end."
    )
    every_steps: int | None = option(
        None, "Also checkpoint after every multiple of this many steps."
    )
    keep: int = option(3, "Newest checkpoints kept.")
    keep_every_steps: int | None = option(
        None, "Multiples of this many steps are kept for ever (for evaluation)."
    )
    memory_every_steps: int = option(1, "Steps between snapshots in memory; 0: none.")


NO_DOMAIN: Final = "none"
"""As `elastic.failure_domain`: machines fail one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSection:
    """How the job lives with failures."""

    min_nodes: int | None = option(
        None,
        "Fewest nodes to train on; null: the nodes of one dp replica, of a command all "
        "nodes, for its batch changes with them.",
    )
    sizes: tuple[int, ...] | None = option(
        None,
        "Numbers of nodes to train on, as [4, 2, 1], for a script whose batch not all numbers "
        "divide; the rest are spares. null: each from min_nodes to nodes that a layout fits.",
    )
    max_restarts: int = option(100, "Job-wide restarts within window_s; then exit code 94.")
    max_crashes: int = option(10, "Of these, restarts after errors of the program.")
    max_hangs: int = option(20, "Of these, restarts after hangs.")
    no_progress: int = option(
        3,
        "Exit code 93 after so many failures of the program, or hangs, without a newly "
        "committed step between them.",
    )
    window_s: float = option(86400.0, "Seconds that max_restarts looks back.")
    node_failures: int = option(
        2,
        "A node that fails this many times within window_s leaves the job; a program's own "
        "errors do not count.",
    )
    hang_ceiling_s: float = option(
        300.0, "Seconds without progress after which a worker counts as hung."
    )
    hang_floor_s: float | None = option(
        None,
        "Below it no shorter limit is learned from what is usual in the run; null: 2 on CPUs, "
        "30 on GPUs.",
    )
    straggler: str = option(
        "report", "A rank slower than its peers: off, report, or swap for a spare."
    )
    start_ceiling_s: float = option(1800.0, "The same until the second step of an epoch is done.")
    join_timeout_s: float = option(
        600.0, "Seconds the first epoch waits for all nodes, and a job with too few for more."
    )
    heartbeat_s: float = option(1.0, "Seconds between heartbeats of agents.")
    dead_after_s: float = option(5.0, "Seconds of silence: the agent is dead.")
    progress_pattern: str | None = option(
        None, "Of a command: where its output says the step; null: the optimizer's steps."
    )
    preload: str | None = option(
        None,
        "Of a Python command: modules, separated by commas, that each node imports once, "
        "before it forks workers: torch is anyway.",
    )
    from_scratch: bool = option(
        False,
        "Of a command: it may begin at its first step after each restart; else the second time "
        "in a row ends the job with exit code 93.",
    )
    stop_grace_s: float = option(
        30.0, "Of a command that takes no requests: seconds from stop_signal to SIGKILL."
    )
    stop_signal: str = option(
        "TERM",
        "Of a command that takes no requests: the signal that asks it to save and to end, in "
        "place of SIGTERM, as USR1.",
    )
    standby: bool = option(
        False,
        "While an epoch runs each worker has a second process that has compiled what the next "
        "epoch will need and waits for it: shorter recovery, more memory.",
    )
    failure_domain: str | None = option(
        None,
        "Nodes that are lost together; copies of the state go outside. Slurm: levels of its "
        "topology above the node, or none; null: 1, the leaf switch or block. Kubernetes: a "
        "label of nodes, as topology.kubernetes.io/zone, or none; null: none.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NumbersSection:
    """What follows from wrong numbers; see docs/numbers.md."""

    non_finite: str = option(
        "skip",
        "Loss or gradient norm is NaN or infinite: skip the batch, go back and skip, or stop "
        "(exit code 93). Such a gradient is never applied.",
    )
    loss_spike: str = option(
        "report", "A loss far above those before: ignore, report, skip, rollback, stop."
    )
    grad_spike: str = option("report", "The same, of the gradient norm.")
    loss_ratio: float = option(
        1.5, "A spike is more than this many times the median of the window."
    )
    grad_ratio: float = option(5.0, "The same, of the gradient norm.")
    window: int = option(64, "Steps of the median; no decision before half of them.")
    rollback_steps: int = option(
        10, "Steps a rollback goes back at least; their batches are passed over."
    )
    max_skips: int = option(10, "Skips and rollbacks within 1,000 steps; then exit code 93.")
    replica_check_steps: int | None = option(
        None, "Compare replicas of parameters every this many steps; null: never."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSection:
    """Which addresses and ports agents and workers use."""

    interface: str = option("auto", "Interface name, or auto.")
    cidr: str | None = option(None, "Network the addresses are taken from, as 10.0.0.0/8.")
    ports: str | None = option(None, "low-high; null: the system picks.")
    copy_interfaces: tuple[str, ...] = option(
        (),
        "Interfaces that copies of snapshots use, by local rank in turn; each in a subnet of "
        "its own. Empty: all use the one of the agents.",
    )
    metrics_port: int | None = option(
        None, "Port at which each agent serves its node's metrics; null: it does not."
    )


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
    """The whole of job.json. `run_dir` is where it is, on shared storage."""

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
    validation: ValidationSection | None = None
    """None: not validated."""
    start_from: StartFrom | None = None
    """None: from initial values."""
    base: StartFrom | None = None
    """The weights that a LoRA job's adapters are beside; None: it is no such job."""
    command: tuple[str, ...] | None = None
    """What workers run, with placeholders (command.py); None: the built-in trainer."""
    command_dir: str | None = None
    """Absolute working directory of `command`; where a plug-in of `model` is imported from."""
    fleet: str | None = None
    """Absolute folder of the fleet's ledger, or kubernetes://NAMESPACE/NAME of a ConfigMap; None:
    beside the run directory."""
    track: tuple[str, ...] | None = None
    """Experiment trackers, of TRACKERS, that `holdfast track` writes the run's curves to."""
    code: CodeSection | None = None
    """None: nothing was frozen, as by `holdfast run`."""
    version: int = JOB_JSON_VERSION

    def to_json(self) -> str:
        """Return the text of job.json, stable under a round trip.

        Of `elastic`, `network` and `numbers`, which say how the job is operated, defaults are left
        out, and of `train` and `data` what is off; what is computed is all there.
        """
        raw = dataclasses.asdict(self)
        raw |= {"ladder": self.ladder.to_ranges(), "model": raw_of(self.model)}
        raw |= {name: _changed(getattr(self, name)) for name in ("elastic", "network", "numbers")}
        raw["numbers"] = raw["numbers"] or None
        for section in ("train", "data"):
            values = raw[section].items()
            raw[section] = {name: v for name, v in values if v is not None and v is not False}
        given = {name: value for name, value in raw.items() if value is not None}
        return json.dumps(given, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Read the text of job.json.

        Raises:
            ValueError: it was written by a version this one cannot read.
        """
        raw = parse_json(text)
        version = raw.get("version") if isinstance(raw, dict) else None
        if version != JOB_JSON_VERSION:
            raise ValueError(
                f"job.json has version {version!r:.40}; this holdfast reads "
                f"{JOB_JSON_VERSION}: render the job again with the installed version"
            )
        made = {"model": shape_of(raw["model"]), "ladder": Ladder.from_ranges(raw["ladder"])}
        return build(cls, {**raw, **made})


def _changed(section: ElasticSection | NetworkSection | NumbersSection) -> dict[str, Any]:
    given = ((each, getattr(section, each.name)) for each in dataclasses.fields(section))
    return {each.name: value for each, value in given if value != each.default}
