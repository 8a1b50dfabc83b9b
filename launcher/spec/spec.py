"""JobSpec: one job, every section of it, what follows from them, and the JSON schema. Pure."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, Discriminator, Field, PrivateAttr, Tag
from pydantic.fields import FieldInfo

from elastic_trainer.plan import config
from elastic_trainer.plan.command import UNKNOWN_STEPS
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape, Plugin, Transformers
from launcher.spec import sections, values
from launcher.spec.errors import Offer, Problem
from launcher.spec.hardware import device_memory_gib, tight_domain
from launcher.spec.rules import JobFacts
from launcher.spec.source import SpecSource

if TYPE_CHECKING:
    from launcher.spec.kubernetes import Kubernetes
    from launcher.spec.profile import Profile
    from launcher.spec.slurm import Slurm

MODEL_TAGS: Final = ("by-name", "by-dimensions", "by-class")
"""What the `model` union adds to the path of an error."""


def _model_tag(value: Any) -> str:
    if isinstance(value, sections.OwnClass) or (isinstance(value, dict) and "hf" in value):
        return MODEL_TAGS[2]
    return MODEL_TAGS[isinstance(value, dict | sections.ModelDimensions)]


Model = Annotated[
    Annotated[values.Text, Tag(MODEL_TAGS[0])]
    | Annotated[sections.ModelDimensions, Tag(MODEL_TAGS[1])]
    | Annotated[sections.OwnClass, Tag(MODEL_TAGS[2])],
    Discriminator(_model_tag),
]


class JobSpec(values.SpecSection):
    """One job: what a user wrote, checked and complete with defaults."""

    name: values.JobName = Field(description="Name of the job, and of its runs.")
    model: Model = Field(
        description="A preset, a mapping of dimensions, the path of a Hugging Face config.json, or "
        "{hf: PATH} for transformers' own class."
    )
    layout: Annotated[sections.Layout, values.OrAuto()] = values.optional_section(
        "Parallelism; auto: the fastest layout that fits."
    )
    cluster: sections.Cluster = Field(description="The machines.")
    train: Annotated[config.TrainSection, values.Becomes(sections.Train)] = Field(
        description="What is trained."
    )
    data: Annotated[config.DataSection, values.Becomes(sections.Data)] = Field(
        description="Where the tokens come from."
    )
    validation: Annotated[config.ValidationSection, values.Becomes(sections.Validation)] | None = (
        Field(None, description="Data that is not trained on; null: none.")
    )
    checkpoint: sections.Checkpoint = values.optional_section("Checkpoints and snapshots.")
    elastic: Annotated[config.ElasticSection, values.Becomes(sections.Elastic)] = (
        values.optional_section("How the job lives with failures.")
    )
    numbers: Annotated[config.NumbersSection, values.Becomes(sections.Numbers)] = (
        values.optional_section("What follows from wrong numbers.")
    )
    code: sections.Code = values.optional_section("The code frozen.")
    env: sections.Env = values.optional_section("What workers run in.")
    network: Annotated[config.NetworkSection, values.Becomes(sections.Network)] = (
        values.optional_section("Addresses and ports.")
    )
    command: values.Command = Field(
        None, description="A torchrun script with arguments, instead of the built-in trainer."
    )
    command_values: dict[values.ValueName, values.ValueText] = Field(
        default_factory=dict,
        alias="values",
        description="What {name} in the command becomes, as {lr: 3e-4}.",
    )
    track: values.Trackers = Field(
        (), description="Experiment trackers that `holdfast track` writes to: docs/metrics.md."
    )
    slurm_section: Annotated[Any, values.PlatformSection("launcher.spec.slurm", "Slurm")] = Field(
        None, alias="slurm", description="sbatch's options."
    )
    kubernetes_section: Annotated[
        Any, values.PlatformSection("launcher.spec.kubernetes", "Kubernetes")
    ] = Field(None, alias="kubernetes", description="Where and how pods run.")

    _source: SpecSource = PrivateAttr()
    _text: str = PrivateAttr(default="")
    _sets: tuple[str, ...] = PrivateAttr(default=())
    _folder: Path = PrivateAttr(default=Path())
    _shape: ModelShape = PrivateAttr()
    _base: config.StartFrom | None = PrivateAttr(default=None)
    _no_family: str | None = PrivateAttr(default=None)
    _warnings: tuple[Problem, ...] = PrivateAttr(default=())
    _layout_was_auto: bool = PrivateAttr(default=False)
    _profile: Profile | None = PrivateAttr(default=None)

    def remember(self, **known: Any) -> None:
        """Keep what reading and loading know: source, text, folder, shape, profile and more."""
        for name, value in known.items():
            setattr(self, f"_{name}", value)

    @cached_property
    def slurm(self) -> Slurm:
        """Sbatch's options: defaults where the job file has none."""
        from launcher.spec.slurm import Slurm

        return Slurm() if self.slurm_section is None else self.slurm_section

    @cached_property
    def kubernetes(self) -> Kubernetes:
        """Where and how pods run: defaults where the job file does not say."""
        from launcher.spec.kubernetes import Kubernetes

        return Kubernetes() if self.kubernetes_section is None else self.kubernetes_section

    @property
    def source(self) -> SpecSource:
        """The values as written, with their lines."""
        return self._source

    @property
    def text(self) -> str:
        """The YAML as written, before any --set."""
        return self._text

    @property
    def folder(self) -> Path:
        """Absolute folder that relative paths are relative to; `.` for a job without a file."""
        return self._folder

    @property
    def sets(self) -> tuple[str, ...]:
        """The overrides applied, in order."""
        return self._sets

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is legal but may not be meant."""
        return self._warnings

    @property
    def layout_is_auto(self) -> bool:
        """Whether the layout is yet to be chosen: `layout` then has its defaults."""
        return self._source.data.get("layout") == values.AUTO

    @property
    def layout_was_auto(self) -> bool:
        """Whether the layout was chosen for the job, and not written in its file."""
        return self._layout_was_auto

    @property
    def profile(self) -> Profile | None:
        """What was measured on such nodes, where the job names it."""
        return self._profile

    @property
    def shape(self) -> ModelShape:
        """The model's dimensions, wherever they came from."""
        return self._shape

    @property
    def base(self) -> config.StartFrom | None:
        """The weights that adapters are beside, once they have been looked for."""
        return self._base

    @property
    def no_family(self) -> str | None:
        """Why transformers' own class takes a config.json, and none of our families."""
        return self._no_family

    @property
    def model_name(self) -> str:
        """The preset or path, or the plug-in; `the model` when given by its dimensions alone."""
        if isinstance(self.model, sections.OwnClass):
            return self.model.hf
        return self.model if isinstance(self.model, str) else self.model.plugin or "the model"

    @property
    def layers_known(self) -> bool:
        """Whether the layers are ours, so that their memory and products can be predicted."""
        return self.command is None and not isinstance(self.shape, Plugin | Transformers)

    @property
    def runs_own_code(self) -> bool:
        """Whether workers run or import what is in `code.dir`."""
        return self.command is not None or isinstance(self.shape, Plugin)

    @property
    def device(self) -> str:
        """`cpu` for the emulated cluster, else `cuda`."""
        return "cpu" if self.cluster.gpu == "cpu" else "cuda"

    @property
    def corpora(self) -> dict[str, config.DataSection]:
        """What the built-in trainer trains on and validates with, by key; paths as written."""
        found = self.data.corpora
        if self.validation is not None:
            found["validation.path"] = self.data.at(self.validation.path)
        return found

    @property
    def data_paths(self) -> dict[str, str]:
        """What the built-in trainer reads of data, as written, by key."""
        paths = {key: each.path for key, each in self.corpora.items() if each.path is not None}
        if self.data.tokenizer != "bytes":
            paths["data.tokenizer"] = self.data.tokenizer
        return paths

    @property
    def facts(self) -> JobFacts:
        """What the layout rules need to know."""
        return JobFacts(
            model_name=self.model_name,
            shape=self.shape,
            nodes=self.cluster.nodes,
            gpus_per_node=self.cluster.gpus_per_node,
            domain=tight_domain(self.cluster.gpu, self.cluster.gpus_per_node),
            seq_len=self.train.seq_len,
            global_batch=self.train.global_batch,
            micro_batch=self.train.micro_batch,
            schedule=self.layout.schedule,
            interleave=self.layout.interleave,
            allow_tp_across_nodes=self.layout.allow_tp_across_nodes,
            auto_dp=self.layout.dp == "auto",
            precision=self.train.precision,
            float8=self.train.float8 and self.command is None,
            recompute=self.train.recompute,
            packed=self.data.packed,
            compiled=self.train.compile,
            no_sync=self.train.no_sync,
            standby=self.elastic.standby,
            memory_gib=device_memory_gib(self.cluster.gpu) if self.layers_known else None,
        )

    @property
    def dp(self) -> int:
        """The data-parallel degree on all nodes; with `dp: auto` as many whole replicas as fit.

        0 where none fits, which is a problem of the job file (HF116).
        """
        want = self.layout
        if want.dp != "auto":
            return want.dp
        return self.facts.num_gpus // (want.tp * want.cp * want.pp)

    @property
    def full_layout(self) -> ParallelLayout:
        """The layout on all nodes, with `dp: auto` solved."""
        want = self.layout
        return ParallelLayout(
            dp=self.dp,
            tp=want.tp,
            pp=want.pp,
            cp=want.cp,
            dp_replicate=want.dp_replicate,
            ep=want.ep,
            order=want.order,
        )

    @property
    def min_nodes(self) -> int:
        """Fewest nodes to train on; by default those of one dp replica, of a command all.

        A script's batch is usually so much a rank: on fewer nodes it would train otherwise.
        """
        if self.elastic.min_nodes is not None:
            return self.elastic.min_nodes
        if self.elastic.sizes:
            return min(self.elastic.sizes)
        if self.command is not None:
            return self.cluster.nodes
        replica = self.layout.tp * self.layout.cp * self.layout.pp
        return min(self.cluster.nodes, -(-replica // self.cluster.gpus_per_node))

    def problem(self, code: str, key: str, message: str, *offers: Offer) -> Problem:
        """Return a Problem at the line where `key` (as `data.path`) was written."""
        found = Problem(code, self._source.where_key(key), message)
        return found.offering(offers) if offers else found


OPTIONAL: Final = frozenset({
    "layout", "checkpoint", "elastic", "numbers", "code", "env", "network", "slurm", "kubernetes",
    "train", "data", "cluster", "model",
})  # fmt: skip
"""Sections: one without content is one with its defaults."""


_DIVISIBLE: Final = 2**15 * 3**3 * 5**2 * 7
FOR_COMMANDS: Final[dict[str, Any]] = {
    "model": {
        "num_layers": 10_000,
        "dim": 2 * _DIVISIBLE,
        "num_heads": _DIVISIBLE,
        "ffn_dim": _DIVISIBLE,
        "vocab_size": _DIVISIBLE,
    },
    "train": {"seq_len": 2 * _DIVISIBLE, "global_batch": _DIVISIBLE, "steps": UNKNOWN_STEPS},
    "data": {"path": "."},
}
"""What a command may leave out, since only it knows: values that allow any layout."""


def all_sections() -> dict[str, type[BaseModel]]:
    """Return dotted path -> model of every section."""
    from launcher.spec.kubernetes import Kubernetes, Security, Topology
    from launcher.spec.slurm import Slurm

    return {
        "": JobSpec,
        "model": sections.ModelDimensions,
        "layout": sections.Layout,
        "cluster": sections.Cluster,
        "train": sections.Train,
        "train.optimizer": sections.Optimizer,
        "train.lora": sections.Adapters,
        "data": sections.Data,
        "data.mix.NAME": sections.Mixed,
        "validation": sections.Validation,
        "checkpoint": sections.Checkpoint,
        "elastic": sections.Elastic,
        "numbers": sections.Numbers,
        "code": sections.Code,
        "env": sections.Env,
        "network": sections.Network,
        "slurm": Slurm,
        "kubernetes": Kubernetes,
        "kubernetes.security": Security,
        "kubernetes.topology": Topology,
    }


def keys_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return key -> field of a section, as job files have them."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def job_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of job files, for editors; it refuses no file that we take.

    What only a script knows may be left out beside `command`, so these keys are required by an
    `else`. An empty section is one with its defaults.
    """
    schema = JobSpec.model_json_schema()
    schema["title"] = "Holdfast job file"
    without = [key for key in schema["required"] if key in FOR_COMMANDS]
    schema["required"] = [key for key in schema["required"] if key not in FOR_COMMANDS]
    steps = schema["$defs"]["Train"].pop("required")  # each has a default beside a command
    assert set(steps) <= FOR_COMMANDS["train"].keys(), steps
    has_command = {"required": ["command"], "properties": {"command": {"not": {"type": "null"}}}}
    schema["if"], schema["then"] = has_command, {}
    schema["else"] = {
        "required": without,
        "properties": {
            **{key: {"not": {"type": "null"}} for key in without},
            "train": {"type": "object", "required": steps},
        },
    }
    for key in sorted(OPTIONAL):
        if key not in schema["required"]:
            schema["properties"][key] = _or_empty(schema["properties"][key])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _or_empty(field: dict[str, Any]) -> dict[str, Any]:
    about = {name: value for name, value in field.items() if name in {"title", "description"}}
    kinds = field.get("oneOf") or [{k: v for k, v in field.items() if k not in about}]
    return {**about, "anyOf": [*kinds, {"type": "null"}]}
