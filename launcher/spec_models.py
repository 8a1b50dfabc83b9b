"""The sections of a job file: every key, its unit, its default. Pure.

Types and ranges of single values live here; what several values must satisfy
together is in `spec_rules.py`. A validator names its code as the error type.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from elastic_trainer.command import split_command
from elastic_trainer.layout import AXES
from elastic_trainer.templates import explain, unknown_names
from launcher.spec_source import describe


def _refuse(code: str, message: str) -> PydanticCustomError:
    """Return the error that `spec.py` turns into a Problem with this code."""
    # The detour over the context keeps braces in values from being read as a template.
    return PydanticCustomError(code, "{message}", {"message": message})


def _plain_text(value: str) -> str:
    if not value.strip():
        raise _refuse("HF015", "expected some text, found none")
    if any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise _refuse("HF015", "line breaks and control characters are not allowed")
    return value


_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")


def _job_name(value: str) -> str:
    if _NAME.fullmatch(value):
        return value
    near = re.sub(r"[^a-z0-9]+", "-", value.lower())[:50].strip("-") or "my-run"
    raise _refuse(
        "HF015",
        f"{describe(value)} is not a name that every platform takes: at most 50 lower-case "
        f"letters, digits and inner hyphens, as {near}",
    )


def _dp(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise _refuse("HF012", f"expected a whole number or auto, found {describe(value)}")


def _order(value: tuple[str, ...]) -> tuple[str, ...]:
    if sorted(value) != sorted(AXES):
        listed = ", ".join(value)
        raise _refuse(
            "HF117",
            f"[{listed}] must name tp, cp, pp and dp once each, innermost first; "
            "the default is [tp, cp, pp, dp]",
        )
    return value


_SCHEDULES: Final = ("1f1b", "interleaved")


def _schedule(value: Any) -> Any:
    if not isinstance(value, str):
        raise _refuse("HF012", f"expected 1f1b or interleaved, found {describe(value)}")
    name = re.sub(r"[^a-z0-9]", "", value.lower())
    if name.startswith(("zb", "zerobubble", "dualpipe", "interleavedzerobubble", "v")):
        raise _refuse(
            "HF115",
            f"{value}: with FSDP2 the zero-bubble schedules compute wrong gradients without "
            "an error; use 1f1b, or interleaved with interleave: 2",
        )
    known = {"1f1b": "1f1b", "interleaved": "interleaved", "interleaved1f1b": "interleaved"}
    if name not in known:
        raise _refuse("HF014", f"expected 1f1b or interleaved, found {describe(value)}")
    return known[name]


_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


def _ports(value: str) -> str:
    match = _PORTS.fullmatch(value)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (1024 <= low <= high <= 65535):
        raise _refuse(
            "HF015",
            f"expected low-high within 1024-65535, as 29400-29499, found {describe(value)}",
        )
    return value


def _cidr(value: str) -> str:
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise _refuse(
            "HF015", f"expected a network such as 10.0.0.0/8, found {describe(value)}"
        ) from None
    return value


def _command(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise _refuse("HF015", f"{error}: quote the arguments as a shell wants them") from None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise _refuse(
            "HF012", f"expected a command line or a list of texts, found {describe(value)}"
        )
    try:
        command = split_command(value)
    except ValueError as error:
        raise _refuse("HF015", str(error)) from None
    for name in unknown_names(command.args):
        raise _refuse("HF511", explain(name))
    return tuple(value)


def _pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise _refuse("HF015", f"{error}: expected a regular expression") from None
    if groups != 1:
        raise _refuse("HF015", rf"expected one group, the step, as step (\d+), found {groups}")
    return value


_SLURM_TIME = re.compile(r"([0-9]+-)?[0-9]+(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


def _slurm_time(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return str(value)  # minutes
    if isinstance(value, str) and _SLURM_TIME.fullmatch(value):
        return value
    raise _refuse("HF015", f"expected sbatch's days-hours:minutes:seconds, found {describe(value)}")


Count = Annotated[int, Field(ge=1, le=10**9)]
Degree = Annotated[int, Field(ge=1, le=10**6)]
Steps = Annotated[int, Field(ge=0, le=10**12)]
Seconds = Annotated[float, Field(gt=0, le=10**9, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(_plain_text), Field(max_length=4096)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]


class Section(BaseModel):
    """What all sections share: nothing unknown, nothing converted, nothing changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


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
    dp: Annotated[Degree | Literal["auto"], BeforeValidator(_dp)] = Field(
        "auto", description="Data-parallel degree; auto: all GPUs that the others leave."
    )
    dp_replicate: Degree = Field(
        1, description="Copies of the parameters (HSDP); each is sharded over dp/dp_replicate."
    )
    order: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_order)] = Field(
        AXES, description="Axes, innermost first: neighbours along the first have next ranks."
    )
    schedule: Annotated[Literal["1f1b", "interleaved"], BeforeValidator(_schedule)] = Field(
        "1f1b", description="Pipeline schedule: 1f1b or interleaved."
    )
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
    gpu: Text = Field(description="GPU name, or cpu for the emulated cluster.")
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
    optimizer: Optimizer = Field(default_factory=Optimizer, description="AdamW.")


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


def _off(value: object) -> object:
    return "off" if value is False else value  # YAML 1.1 reads a bare off as false


class Elastic(Section):
    """How the job lives with failures."""

    min_nodes: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        None, description="Fewest nodes to train on; null: the nodes of one dp replica."
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
        2, description="A node that fails this many times within window_s leaves the job."
    )
    hang_ceiling_s: Seconds = Field(
        300.0, description="Seconds without progress after which a worker counts as hung."
    )
    hang_floor_s: Seconds = Field(
        2.0, description="Below it no shorter limit is learned from what is usual in the run."
    )
    straggler: Annotated[Literal["off", "report", "swap"], BeforeValidator(_off)] = Field(
        "report", description="A rank slower than its peers: off, report, or swap for a spare."
    )
    start_ceiling_s: Seconds = Field(
        1800.0, description="The same until the second step of an epoch is done."
    )
    join_timeout_s: Seconds = Field(
        600.0, description="Seconds the first epoch waits for all nodes."
    )
    heartbeat_s: Seconds = Field(1.0, description="Seconds between heartbeats of agents.")
    dead_after_s: Seconds = Field(5.0, description="Seconds of silence: the agent is dead.")
    progress_pattern: Annotated[Text, AfterValidator(_pattern)] | None = Field(
        None,
        description="Of a command: where its output says the step; null: the optimizer's steps.",
    )
    stop_grace_s: Seconds = Field(
        30.0, description="Of a command that takes no requests: seconds from SIGTERM to SIGKILL."
    )


class Code(Section):
    """The code that is frozen at submission."""

    dir: Text = Field(".", description="Folder, relative to the job file's.")
    exclude: Texts = Field((), description="Names left out, as .git.")


class Env(Section):
    """What the workers run in: one of the two, or the launcher's own environment."""

    venv: Text | None = Field(None, description="A virtual environment on shared storage.")
    image: Text | None = Field(None, description="A container image.")


class Network(Section):
    """Which addresses and ports agents and workers use."""

    interface: Text = Field("auto", description="Interface name, or auto.")
    cidr: Annotated[Text, AfterValidator(_cidr)] | None = Field(
        None, description="Network the addresses are taken from, as 10.0.0.0/8."
    )
    ports: Annotated[Text, AfterValidator(_ports)] | None = Field(
        None, description="low-high; null: the system picks."
    )


class Slurm(Section):
    """Options of sbatch."""

    partition: Text | None = Field(None, description="--partition")
    account: Text | None = Field(None, description="--account")
    qos: Text | None = Field(None, description="--qos")
    time: Annotated[Text | None, BeforeValidator(_slurm_time)] = Field(
        None, description="--time, as 2-00:00:00; a bare number is minutes."
    )
    constraint: Text | None = Field(None, description="--constraint")
    reservation: Text | None = Field(None, description="--reservation")


class Kubernetes(Section):
    """Where and how pods run."""

    namespace: Text = Field("default", description="Namespace of the job.")
    image: Text | None = Field(None, description="Container image with holdfast and torch.")
    queue: Text | None = Field(None, description="Kueue's local queue.")
    service_account: Text | None = Field(None, description="Service account of the pods.")


Command = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(lambda value: None if value is None else _command(value)),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "null"},
            ]
        }
    ),
]
JobName = Annotated[str, AfterValidator(_job_name)]
