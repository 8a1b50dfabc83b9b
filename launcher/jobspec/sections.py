"""The sections of a job file: every key, its unit, its default. Pure.

Types of single values are in `values.py`; what several values must satisfy
together is in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_trainer.layout import AXES
from launcher.jobspec.values import (
    Beta,
    Cidr,
    Count,
    Degree,
    DpDegree,
    NotNegative,
    Order,
    Pattern,
    Ports,
    Positive,
    Ratio,
    Schedule,
    Seconds,
    Section,
    Steps,
    Straggler,
    Text,
    Texts,
    optional_section,
)


class ModelDimensions(Section):
    """A Llama-family model by its dimensions."""

    num_layers: Annotated[int, Field(ge=1, le=10_000)] = Field(description="Decoder layers.")
    dim: Count = Field(description="Model width.")
    num_heads: Count = Field(description="Query heads.")
    num_kv_heads: Count | None = Field(None, description="KV heads; null: as many as num_heads.")
    ffn_dim: Count = Field(description="Width of the SwiGLU hidden layer.")
    vocab_size: Count = Field(description="Rows of the embedding.")
    head_dim: Count | None = Field(None, description="Size of a head; null: dim / num_heads.")
    norm_eps: Positive = Field(1e-5, description="Epsilon of RMSNorm.")
    rope_theta: Positive = Field(500000.0, description="Base of the rotary frequencies.")
    rope_scaling_factor: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = Field(
        1.0, description="Llama 3.1 long-context scaling; 1 turns it off."
    )
    rope_low_freq_factor: Positive = Field(1.0, description="Llama 3.1 RoPE scaling.")
    rope_high_freq_factor: Positive = Field(4.0, description="Llama 3.1 RoPE scaling.")
    rope_original_context: Count = Field(8192, description="Context before scaling, in tokens.")
    tie_embeddings: bool = Field(False, description="Embedding and head share their weights.")


class Layout(Section):
    """Degrees of the four axes; their product is the number of GPUs."""

    tp: Degree = Field(1, description="Tensor-parallel degree.")
    cp: Degree = Field(1, description="Context-parallel degree.")
    pp: Degree = Field(1, description="Pipeline stages.")
    dp: DpDegree = Field(
        "auto", description="Data-parallel degree; auto: all GPUs that the others leave."
    )
    dp_replicate: Degree = Field(
        1, description="Copies of the parameters (HSDP); each is sharded over dp/dp_replicate."
    )
    order: Order = Field(
        AXES, description="Axes, innermost first: neighbours along the first have next ranks."
    )
    schedule: Schedule = Field("1f1b", description="Pipeline schedule: 1f1b or interleaved.")
    interleave: Degree = Field(1, description="Stages per rank of the interleaved schedule.")
    allow_tp_across_nodes: bool = Field(
        False, description="Allow tensor parallelism beyond one node (slow)."
    )


class Cluster(Section):
    """The machines a job asks for."""

    nodes: Annotated[int, Field(ge=1, le=10**5)] = Field(description="Nodes that train.")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(
        8, description="Workers per node: one for each GPU (or CPU process)."
    )
    gpu: Text = Field(
        description="GPU name, or cpu for the emulated cluster; with a `command` any name will do."
    )
    spares: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0, description="Nodes asked for on top of `nodes`, which wait for others to fail."
    )
    memory_gib: Positive | None = Field(
        None, description="Main memory of a node; null: not known, so not counted by check."
    )


class Optimizer(Section):
    """AdamW with linear warm-up and cosine decay."""

    lr: Positive = Field(3e-4, description="Peak learning rate.")
    warmup_steps: Steps = Field(0, description="Steps of linear warm-up.")
    min_lr_ratio: Ratio = Field(0.1, description="Final learning rate as a fraction of lr.")
    weight_decay: NotNegative = Field(0.1, description="Decay of matrices; norms have none.")
    beta1: Beta = Field(0.9, description="Decay of the first moment.")
    beta2: Beta = Field(0.95, description="Decay of the second moment.")
    eps: Positive = Field(1e-8, description="Epsilon of AdamW.")
    clip_norm: NotNegative = Field(1.0, description="Largest global gradient norm; 0: off.")


class Train(Section):
    """What is trained. Batches count sequences."""

    seq_len: Count = Field(description="Tokens per sequence.")
    global_batch: Count = Field(description="Sequences per step, on every rung of the ladder.")
    micro_batch: Count = Field(1, description="Sequences per forward pass of one dp rank.")
    steps: Annotated[int, Field(ge=1, le=10**12)] = Field(description="Optimizer steps.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="Seed of initialisation and sample order."
    )
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="bf16 (mixed: fp32 parameters and reductions) or fp32."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "selective", description="Activation checkpointing."
    )
    compile: bool = Field(False, description="Compile each layer with torch.compile.")
    deterministic: bool = Field(
        True, description="On GPUs, only algorithms that do the same bit for bit (some are slower)."
    )
    optimizer: Optimizer = optional_section("AdamW.")


class Data(Section):
    """Where the tokens come from."""

    path: Text = Field(description="File or folder; relative to the job file's folder.")
    format: Literal["text", "nanogpt", "megatron"] = Field(
        "text", description="text files, nanoGPT .bin shards, or Megatron .bin/.idx."
    )
    tokenizer: Text = Field(
        "bytes", description="bytes (vocabulary 256), or the path of a tokenizer.json."
    )


class Checkpoint(Section):
    """Checkpoints on storage, snapshots in memory."""

    dir: Text | None = Field(
        None, description="Folder, relative to the job file's; null: RUN/checkpoints."
    )
    every_s: Seconds | None = Field(
        600.0, description="Seconds between checkpoints; null: only by every_steps and at the end."
    )
    every_steps: Count | None = Field(
        None, description="Also checkpoint after every multiple of this many steps."
    )
    keep: Count = Field(3, description="Newest checkpoints kept.")
    keep_every_steps: Count | None = Field(
        None, description="Multiples of this many steps are kept for ever (for evaluation)."
    )
    memory_every_steps: Annotated[int, Field(ge=0, le=10**9)] = Field(
        1, description="Steps between snapshots in memory; 0: none."
    )


class Elastic(Section):
    """How the job lives with failures."""

    min_nodes: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        None,
        description="Fewest nodes to train on; null: the nodes of one dp replica, of a command "
        "all nodes, for its batch changes with them.",
    )
    max_restarts: Annotated[int, Field(ge=0, le=10**9)] = Field(
        100, description="Job-wide restarts within window_s; then exit code 94."
    )
    max_crashes: Annotated[int, Field(ge=0, le=10**9)] = Field(
        10, description="Of these, restarts after errors of the program."
    )
    max_hangs: Annotated[int, Field(ge=0, le=10**9)] = Field(
        20, description="Of these, restarts after hangs."
    )
    no_progress: Count = Field(
        3,
        description="Exit code 93 after so many failures of the program, or hangs, "
        "without a newly committed step between them.",
    )
    window_s: Seconds = Field(86400.0, description="Seconds that max_restarts looks back.")
    node_failures: Count = Field(
        2,
        description="A node that fails this many times within window_s leaves the job; a program's "
        "own errors do not count.",
    )
    hang_ceiling_s: Seconds = Field(
        300.0, description="Seconds without progress after which a worker counts as hung."
    )
    hang_floor_s: Seconds = Field(
        2.0, description="Below it no shorter limit is learned from what is usual in the run."
    )
    straggler: Straggler = Field(
        "report", description="A rank slower than its peers: off, report, or swap for a spare."
    )
    start_ceiling_s: Seconds = Field(
        1800.0, description="The same until the second step of an epoch is done."
    )
    join_timeout_s: Seconds = Field(
        600.0,
        description="Seconds the first epoch waits for all nodes, and a job with too few for more.",
    )
    heartbeat_s: Seconds = Field(1.0, description="Seconds between heartbeats of agents.")
    dead_after_s: Seconds = Field(5.0, description="Seconds of silence: the agent is dead.")
    progress_pattern: Pattern | None = Field(
        None,
        description="Of a command: where its output says the step; null: the optimizer's steps.",
    )
    stop_grace_s: Seconds = Field(
        30.0, description="Of a command that takes no requests: seconds from SIGTERM to SIGKILL."
    )


class Code(Section):
    """The code that is frozen at submission."""

    dir: Text = Field(".", description="Folder, relative to the job file's.")
    exclude: Texts = Field((), description="Names or patterns left out, as data or *.ckpt.")
    include: Texts = Field(
        (), description="Patterns of files that are frozen although git ignores them, as *.so."
    )
    max_mib: Annotated[int, Field(ge=1, le=10**6)] = Field(
        256, description="Most that is frozen, in MiB; what is more is refused."
    )


class Network(Section):
    """Which addresses and ports agents and workers use."""

    interface: Text = Field("auto", description="Interface name, or auto.")
    cidr: Cidr | None = Field(
        None, description="Network the addresses are taken from, as 10.0.0.0/8."
    )
    ports: Ports | None = Field(None, description="low-high; null: the system picks.")
