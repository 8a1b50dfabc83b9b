"""The sections of a job file: what every key may be, and what it means. Pure.

Defaults are those of the dataclasses of elastic_trainer/plan/config.py, which the sections become.

Types of single values are in `values.py`; what several values must satisfy together is in
`rules.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import core_schema

from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    LoraSection,
    MixedCorpus,
    NetworkSection,
    NumbersSection,
    OptimizerConfig,
    TrainSection,
    ValidationSection,
)
from elastic_trainer.plan.layout import AXES
from elastic_trainer.plan.models import (
    FAMILIES,
    Gemma3,
    Granite,
    LayeredShape,
    LocalRopeShape,
    MixtureShape,
    ModelShape,
    Plugin,
    Qwen3,
    Qwen3Moe,
)
from launcher.spec.values import (
    Above,
    Becomes,
    Beta,
    Cidr,
    CopyInterfaces,
    Count,
    Degree,
    DpDegree,
    FailureDomain,
    Family,
    Interface,
    LayerTypes,
    Many,
    NotNegative,
    Order,
    Pattern,
    Plain,
    PluginPath,
    Ports,
    Positive,
    Ratio,
    Schedule,
    Seconds,
    Sizes,
    SpecSection,
    Steps,
    Straggler,
    Text,
    Texts,
    form,
    optional_section,
    plain_text,
    refuse,
    setting_of,
    whole_as_text,
)

_shape, _plugin = setting_of(ModelShape), setting_of(Plugin)
_optimizer = setting_of(OptimizerConfig)
_train = setting_of(TrainSection)
_lora = setting_of(LoraSection)
_data, _mixed = setting_of(DataSection), setting_of(MixedCorpus)
_validation = setting_of(ValidationSection)
_checkpoint = setting_of(CheckpointSection)
_elastic = setting_of(ElasticSection)
_network = setting_of(NetworkSection)
_numbers = setting_of(NumbersSection)

StopSignal = Literal["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]
STOP_SIGNALS = get_args(StopSignal)
SpikeAction = Literal["ignore", "report", "skip", "rollback", "stop"]


_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_OURS: Final = (
    r"(hf_.*|SLURM_.*|SRUN_.*|SBATCH_.*|HOLDFAST_.*|TORCHELASTIC_.*|PET_.*|BASH.*"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_RANK|MASTER_ADDR|MASTER_PORT"
    r"|IFS|ENV|SHELLOPTS|POSIXLY_CORRECT|UID|EUID|PPID|PWD|OLDPWD|_|GROUPS|FUNCNAME|DIRSTACK"
    r"|RANDOM|SRANDOM|SECONDS|LINENO|HISTCMD|EPOCHSECONDS|EPOCHREALTIME|PIPESTATUS|OPT(ARG|IND|ERR)"
    r"|POD_NAME|POD_IP|POD_UID|NODE_NAME|KUBERNETES_.*"
    r"|PS[0-4]|PROMPT_COMMAND|EXECIGNORE|GLOBIGNORE|TMOUT|COMP_.*|READLINE_.*|REPLY|MAPFILE|COPROC)"
)
"""What Slurm, Kubernetes, the agents or the shell set themselves."""
_SECRET_REF: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[-._a-zA-Z0-9]{1,253}"  # noqa: S105  a form


def variable_name(value: str) -> str:
    """Check the name of an environment variable.

    Raises:
        PydanticCustomError: HF165, it is not one, or not the user's to set.
    """
    if not re.fullmatch(_NAME, value):
        raise refuse("HF165", f"{value!r} is not a variable name: letters, digits and _ only")
    if re.fullmatch(_OURS, value):
        message = f"{value} is set by the platform, the shell or the agents; leave it out"
        raise refuse("HF165", message)
    return value


def _inherited(value: str) -> str:
    if not re.fullmatch(rf"{_NAME}\*?", value):
        raise refuse("HF165", f"expected a variable's name, or its beginning with *, found {value}")
    variable_name(value.removesuffix("*"))
    return value


def _no_dropout(value: float) -> float:
    if value != 0.0:
        raise refuse("HF140", f"{value:g}: nothing random is trained; use 0")
    return value


VariableName = Annotated[str, Field(max_length=256), AfterValidator(variable_name)]
Inherited = Annotated[str, Field(max_length=256), AfterValidator(_inherited)]


Value = Annotated[
    str,
    Field(max_length=32768),
    BeforeValidator(whole_as_text),  # of 1.10 or yes it would lose how they were written
    AfterValidator(lambda value: plain_text(value) if value else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
]


class ModelDimensions(SpecSection):
    """A model by its dimensions; docs/models.md has the families, and how to bring your own."""

    family: Family = Field(
        ModelShape.family, description=f"What the dimensions are of: {', '.join(FAMILIES)}."
    )
    plugin: PluginPath | None = Field(None, description=_plugin("plugin").description)
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = _shape("num_layers")
    dim: Count = _shape("dim")
    num_heads: Count = _shape("num_heads")
    num_kv_heads: Count | None = Field(None, description="KV heads; null: as many as num_heads.")
    ffn_dim: Count = _shape("ffn_dim")
    vocab_size: Count = _shape("vocab_size")
    head_dim: Count | None = Field(None, description="Size of a head; null: dim / num_heads.")
    norm_eps: Positive = _shape("norm_eps")
    rope_theta: Positive = _shape("rope_theta")
    rope_scaling_factor: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = _shape(
        "rope_scaling_factor"
    )
    rope_low_freq_factor: Positive = _shape("rope_low_freq_factor")
    rope_high_freq_factor: Positive = _shape("rope_high_freq_factor")
    rope_original_context: Count = _shape("rope_original_context")
    rope_scaling: Literal["llama3", "linear", "yarn"] = _shape("rope_scaling")
    rope_beta_fast: Positive = _shape("rope_beta_fast")
    rope_beta_slow: Positive = _shape("rope_beta_slow")
    rope_truncate: bool = _shape("rope_truncate")
    rope_attention_factor: Positive | None = _shape("rope_attention_factor")
    tie_embeddings: bool = _shape("tie_embeddings")
    attention_bias: bool = setting_of(Qwen3)("attention_bias")
    sliding_window: Count | None = setting_of(LayeredShape)("sliding_window")
    layer_types: LayerTypes = setting_of(LayeredShape)("layer_types")
    rope_local_theta: Positive = setting_of(LocalRopeShape)("rope_local_theta")
    query_pre_attn_scalar: Count = setting_of(Gemma3)("query_pre_attn_scalar")
    num_experts: Annotated[int, Field(ge=1, le=1024)] = setting_of(MixtureShape)("num_experts")
    experts_per_token: Count = setting_of(MixtureShape)("experts_per_token")
    norm_topk_prob: bool = setting_of(Qwen3Moe)("norm_topk_prob")
    embedding_multiplier: Positive = setting_of(Granite)("embedding_multiplier")
    attention_multiplier: Positive = setting_of(Granite)("attention_multiplier")
    residual_multiplier: Positive = setting_of(Granite)("residual_multiplier")
    logits_scaling: Positive = setting_of(Granite)("logits_scaling")
    params: Annotated[int, Field(ge=1, le=10**15)] | None = _plugin("params")
    options: dict[Text, Plain] = Field(
        default_factory=dict, description=_plugin("options").description
    )


class OwnClass(SpecSection):
    """A model of transformers' own class; docs/models.md says what works with it."""

    hf: Text = Field(
        description="A config.json, or the folder with it: transformers' own class, whether or not "
        "a family has it."
    )
    attention: Text | None = Field(
        None,
        description="attn_implementation, as transformers names it: sdpa, eager, "
        "flash_attention_2; null: sdpa where the class has it, else eager.",
    )
    params: Annotated[int, Field(ge=1, le=10**15)] | None = Field(
        None,
        description="Number of parameters; null: counted, for which transformers and torch must be "
        "installed where the job is submitted from.",
    )


class Layout(SpecSection):
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
    ep: Degree = Field(
        1, description="Ranks of dp/dp_replicate that split a layer's experts among them."
    )
    order: Order = Field(
        AXES, description="Axes, innermost first: neighbours along the first have next ranks."
    )
    schedule: Schedule = Field("1f1b", description="Pipeline schedule: 1f1b or interleaved.")
    interleave: Degree = Field(1, description="Stages per rank of the interleaved schedule.")
    allow_tp_across_nodes: bool = Field(
        False, description="Allow tensor parallelism beyond one node (slow)."
    )


class Cluster(SpecSection):
    """The machines a job asks for."""

    nodes: Annotated[int, Field(ge=1, le=10**5)] = Field(description="Nodes that train.")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(
        8, description="Workers per node: one for each GPU (or CPU process)."
    )
    gpu: Text = Field(
        description="GPU name, or cpu for the emulated cluster; with a `command` any name will do."
    )
    profile: Text | None = Field(
        None,
        description="What `holdfast calibrate` has measured on such nodes, by its name; null: "
        "predictions are from vendors' figures.",
    )
    spares: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0, description="Nodes asked for on top of `nodes`, which wait for others to fail."
    )
    memory_gib: Positive | None = Field(
        None, description="Main memory of a node; null: not known, so not counted by check."
    )
    fleet: Text | None = Field(
        None,
        description="The fleet's ledger: a folder, or kubernetes://NAMESPACE/NAME of a ConfigMap; "
        "null: `fleet` beside the run directory, or on Kubernetes, where the launcher does not see "
        "the claim, kubernetes://NAMESPACE/holdfast-fleet.",
    )


class Optimizer(SpecSection):
    """AdamW with linear warm-up and cosine decay."""

    lr: Positive = _optimizer("lr")
    warmup_steps: Steps = _optimizer("warmup_steps")
    min_lr_ratio: Ratio = _optimizer("min_lr_ratio")
    weight_decay: NotNegative = _optimizer("weight_decay")
    beta1: Beta = _optimizer("beta1")
    beta2: Beta = _optimizer("beta2")
    eps: Positive = _optimizer("eps")
    clip_norm: NotNegative = _optimizer("clip_norm")


class Adapters(SpecSection):
    """Adapters of low rank (LoRA), for models of transformers' own class."""

    base: Text = _lora("base")
    rank: Annotated[int, Field(ge=1, le=65536)] = _lora("rank")
    alpha: Positive | None = _lora("alpha")
    dropout: Annotated[float, AfterValidator(_no_dropout)] = _lora("dropout")
    targets: Texts | None = _lora("targets")


class Train(SpecSection):
    """What is trained. Batches count sequences."""

    seq_len: Count = _train("seq_len")
    global_batch: Count = _train("global_batch")
    micro_batch: Count = _train("micro_batch")
    steps: Annotated[int, Field(ge=1, le=10**12)] = _train("steps")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = _train("seed")
    precision: Literal["bf16", "fp32"] = _train("precision")
    float8: bool = _train("float8")
    recompute: Literal["none", "selective", "full"] = _train("recompute")
    compile: bool = _train("compile")
    no_sync: bool | None = _train("no_sync")
    deterministic: bool = _train("deterministic")
    optimizer: Annotated[OptimizerConfig, Becomes(Optimizer)] = optional_section("AdamW.")
    lora: Annotated[LoraSection, Becomes(Adapters)] | None = _train("lora")


Format = Literal["text", "jsonl", "parquet", "arrow", "nanogpt", "megatron", "sft"]


class Mixed(SpecSection):
    """A corpus of a mix; a number in its place is its weight."""

    weight: Positive = _mixed("weight")
    path: Text | None = _mixed("path")
    format: Format | None = _mixed("format")
    key: Text | None = _mixed("key")


def _some_corpora(value: dict[str, MixedCorpus]) -> dict[str, MixedCorpus]:
    if not 0 < len(value) <= MAX_CORPORA:
        raise refuse("HF015", f"expected 1 to {MAX_CORPORA} corpora, found {len(value)}")
    return value


MAX_CORPORA: Final = 1000


class _OrWeight:
    """Annotation of a section in whose place a number may stand: its weight."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return what validates the section, or one with nothing but the weight."""
        return core_schema.no_info_before_validator_function(
            lambda value: value if isinstance(value, dict) else {"weight": value}, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        """Return the section's JSON schema, or a number's."""
        return {"anyOf": [handler(schema), {"type": "number", "exclusiveMinimum": 0}]}


class Data(SpecSection):
    """Where the tokens come from."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [key], "properties": {key: {"not": {"type": "null"}}}}
                for key in ("path", "mix")
            ]
        }
    )

    path: Text | None = _data("path")
    mix: (
        Annotated[
            dict[Text, Annotated[MixedCorpus, Becomes(Mixed), _OrWeight()]],
            AfterValidator(_some_corpora),
        ]
        | None
    ) = _data("mix")
    format: Format = _data("format")
    tokenizer: Text = _data("tokenizer")
    key: Text | None = _data("key")
    cut_long: bool = _data("cut_long")
    as_is: bool = _data("as_is")


class Validation(SpecSection):
    """The loss on data that is not trained on."""

    path: Text = _validation("path")
    every_steps: Count = _validation("every_steps")
    batches: Count | None = _validation("batches")


class Checkpoint(SpecSection):
    """Checkpoints on storage, snapshots in memory."""

    dir: Text | None = Field(
        None, description="Folder, relative to the job file's; null: RUN/checkpoints."
    )
    every_s: Seconds | None = _checkpoint("every_s")
    every_steps: Count | None = _checkpoint("every_steps")
    keep: Count = _checkpoint("keep")
    keep_every_steps: Count | None = _checkpoint("keep_every_steps")
    memory_every_steps: Annotated[int, Field(ge=0, le=10**9)] = _checkpoint("memory_every_steps")


class Elastic(SpecSection):
    """How the job lives with failures."""

    min_nodes: Annotated[int, Field(ge=1, le=10**6)] | None = _elastic("min_nodes")
    sizes: Sizes | None = _elastic("sizes")
    max_restarts: Annotated[int, Field(ge=0, le=10**9)] = _elastic("max_restarts")
    max_crashes: Annotated[int, Field(ge=0, le=10**9)] = _elastic("max_crashes")
    max_hangs: Annotated[int, Field(ge=0, le=10**9)] = _elastic("max_hangs")
    no_progress: Count = _elastic("no_progress")
    window_s: Seconds = _elastic("window_s")
    node_failures: Count = _elastic("node_failures")
    hang_ceiling_s: Seconds = _elastic("hang_ceiling_s")
    hang_floor_s: Seconds | None = _elastic("hang_floor_s")
    straggler: Straggler = _elastic("straggler")
    start_ceiling_s: Seconds = _elastic("start_ceiling_s")
    join_timeout_s: Seconds = _elastic("join_timeout_s")
    heartbeat_s: Seconds = _elastic("heartbeat_s")
    dead_after_s: Seconds = _elastic("dead_after_s")
    progress_pattern: Pattern | None = _elastic("progress_pattern")
    preload: Annotated[str, Field(pattern=r"^[\w.]+(,[\w.]+)*$")] | None = _elastic("preload")
    from_scratch: bool = _elastic("from_scratch")
    stop_grace_s: Seconds = _elastic("stop_grace_s")
    stop_signal: StopSignal = _elastic("stop_signal")
    standby: bool = _elastic("standby")
    failure_domain: FailureDomain | None = _elastic("failure_domain")


class Code(SpecSection):
    """The code that is frozen at submission."""

    dir: Text = Field(".", description="Folder, relative to the job file's.")
    exclude: Texts = Field((), description="Names or patterns left out, as data or *.ckpt.")
    include: Texts = Field(
        (),
        description="Patterns of files that are frozen although git ignores them, as *.so; and "
        "names of files that would be left out as keys or passwords, as .env.",
    )
    max_mib: Annotated[int, Field(ge=1, le=10**6)] = Field(
        256, description="Most that is frozen, in MiB; what is more is refused."
    )


class Network(SpecSection):
    """Which addresses and ports agents and workers use."""

    interface: Interface = _network("interface")
    cidr: Cidr | None = _network("cidr")
    ports: Ports | None = _network("ports")
    copy_interfaces: CopyInterfaces = _network("copy_interfaces")
    metrics_port: Annotated[int, Field(ge=1024, le=65535)] | None = _network("metrics_port")


class Numbers(SpecSection):
    """What follows from wrong numbers."""

    non_finite: Literal["skip", "rollback", "stop"] = _numbers("non_finite")
    loss_spike: SpikeAction = _numbers("loss_spike")
    grad_spike: SpikeAction = _numbers("grad_spike")
    loss_ratio: Above = _numbers("loss_ratio")
    grad_ratio: Above = _numbers("grad_ratio")
    window: Annotated[int, Field(ge=8, le=256)] = _numbers("window")
    rollback_steps: Count = _numbers("rollback_steps")
    max_skips: Steps = _numbers("max_skips")
    replica_check_steps: Count | None = _numbers("replica_check_steps")


class SecretRef(SpecSection):
    """Where a secret is read when the job starts."""

    file: Text | None = Field(None, description="A file that the job's user can read on the nodes.")
    env: VariableName | None = Field(
        None, description="A variable of the environment that the job is submitted from."
    )
    kubernetes: (
        Annotated[Text, form(_SECRET_REF, "NAME/KEY of a Secret, as wandb/api-key")] | None
    ) = Field(None, description="On Kubernetes: NAME/KEY of a Secret in the job's namespace.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.file is not None and self.env is not None:
            raise refuse("HF163", "expected {file: PATH} or {env: NAME}, one of the two")
        if self.file is None and self.env is None and self.kubernetes is None:
            raise refuse(
                "HF163",
                "expected {file: PATH}, {env: NAME} or, on Kubernetes, {kubernetes: NAME/KEY}",
            )
        return self


class Env(SpecSection):
    """What the workers run in: a venv or an image, or else the launcher's own environment."""

    venv: Text | None = Field(None, description="A virtual environment on shared storage.")
    image: Text | None = Field(None, description="A container image.")
    variables: dict[VariableName, Value] = Field(
        default_factory=dict, description="Environment variables: name -> value."
    )
    secrets: dict[VariableName, SecretRef] = Field(
        default_factory=dict,
        description="Variable -> {file: PATH}, {env: NAME} or, on Kubernetes, "
        "{kubernetes: NAME/KEY}; never the value itself.",
    )

    inherit: Many[Inherited] = Field(
        (),
        description="Further variables of the submitting shell that a Slurm job keeps, as "
        "[WANDB_PROJECT, HF_*]. A local run has them all, pods have none.",
    )
