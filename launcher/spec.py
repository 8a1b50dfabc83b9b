"""YAML text -> JobSpec; every mistake in one go, with file, line and way out.

`JobSpec.from_text` is pure. `load_spec` is the one place that reads files: the
job file, and the config.json that `model` may name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, Discriminator, Field, PrivateAttr, Tag, ValidationError

from elastic_trainer.command import UNKNOWN_STEPS
from elastic_trainer.hf_config import ConfigError, parse_hf_config
from elastic_trainer.layout import ParallelLayout
from elastic_trainer.models import PRESETS, ModelShape
from launcher import spec_models as sections
from launcher import spec_values as values
from launcher.errors import Problem, UserError, Where
from launcher.hardware import tight_domain
from launcher.spec_check import cross_check
from launcher.spec_env import Env
from launcher.spec_errors import MODEL_TAGS, problems_of
from launcher.spec_kubernetes import Kubernetes, Security, Topology
from launcher.spec_numbers import Numbers
from launcher.spec_rules import Facts
from launcher.spec_slurm import Slurm
from launcher.spec_source import Source, read_source

ReadText = Callable[[str], str]
"""Path as written in the job file -> text of that file; raises OSError."""

Model = Annotated[
    Annotated[values.Text, Tag(MODEL_TAGS[0])]
    | Annotated[sections.ModelDimensions, Tag(MODEL_TAGS[1])],
    Discriminator(lambda value: MODEL_TAGS[isinstance(value, dict | sections.ModelDimensions)]),
]


class JobSpec(values.Section):
    """One job: what a user wrote, checked and complete with defaults."""

    name: values.JobName = Field(description="Name of the job, and of its runs.")
    model: Model = Field(
        description="A preset, a mapping of dimensions, or the path of a Hugging Face config.json."
    )
    layout: sections.Layout = values.optional_section("Parallelism.")
    cluster: sections.Cluster = Field(description="The machines.")
    train: sections.Train = Field(description="What is trained.")
    data: sections.Data = Field(description="Where the tokens come from.")
    checkpoint: sections.Checkpoint = values.optional_section("Checkpoints and snapshots.")
    elastic: sections.Elastic = values.optional_section("How the job lives with failures.")
    numbers: Numbers = values.optional_section("What follows from wrong numbers.")
    code: sections.Code = values.optional_section("The code frozen.")
    env: Env = values.optional_section("What workers run in.")
    network: sections.Network = values.optional_section("Addresses and ports.")
    command: values.Command = Field(
        None, description="A torchrun script with arguments, instead of the built-in trainer."
    )
    slurm: Slurm = values.optional_section("sbatch's options.")
    kubernetes: Kubernetes = values.optional_section("Where and how pods run.")

    _source: Source = PrivateAttr()
    _text: str = PrivateAttr(default="")
    _set_texts: tuple[str, ...] = PrivateAttr(default=())
    _shape: ModelShape = PrivateAttr()
    _warnings: tuple[Problem, ...] = PrivateAttr(default=())

    @classmethod
    def from_text(
        cls,
        text: str,
        file: str = "job.yaml",
        sets: Sequence[str] = (),
        *,
        read: ReadText | None = None,
    ) -> Self:
        """Return the job that `text` describes, with the overrides `sets` applied.

        Args:
            text: the YAML.
            file: name for messages.
            sets: overrides as `train.steps=50`, later ones winning.
            read: reads the config.json that `model` may name; without it such a
                model is refused.

        Raises:
            UserError: every mistake found, in the order of the file.
        """
        source = read_source(text, file, sets)
        problems = list(source.problems)
        reported = {problem.where.key for problem in problems}
        left_out = _fill_for_command(source)
        spec, found = _validate(cls, source)
        problems += [problem for problem in found if problem.where.key not in reported]
        bad = {problem.where.key for problem in problems if problem.where.key}
        if spec is not None:
            spec._remember(source, text, sets)  # noqa: SLF001  its own class
            problems += spec._complete(bad | left_out, read)  # noqa: SLF001
        mistakes = [problem for problem in problems if not problem.is_warning]
        if mistakes:
            raise UserError.many(mistakes)
        assert spec is not None, "a spec without problems is valid"
        return spec

    def _remember(self, source: Source, text: str, sets: Sequence[str]) -> None:
        """Keep what the spec was read from."""
        self._source, self._text, self._set_texts = source, text, tuple(sets)

    def _complete(self, bad: set[str], read: ReadText | None) -> list[Problem]:
        """Find the model's dimensions and check the rules that span several keys."""
        self._shape, problem = _shape_of(self, read)
        found = [problem] if problem and "model" not in bad else []
        found += cross_check(self, bad | {problem.where.key for problem in found})
        self._warnings = tuple(problem for problem in found if problem.is_warning)
        return found

    @property
    def source(self) -> Source:
        """The values as written, with their lines."""
        return self._source

    @property
    def text(self) -> str:
        """The YAML as written, before any --set."""
        return self._text

    @property
    def sets(self) -> tuple[str, ...]:
        """The overrides applied, in order."""
        return self._set_texts

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is legal but may not be meant."""
        return self._warnings

    @property
    def shape(self) -> ModelShape:
        """The model's dimensions, wherever they came from."""
        return self._shape

    @property
    def model_name(self) -> str:
        """The preset or path, or `the model` when given by its dimensions."""
        return self.model if isinstance(self.model, str) else "the model"

    @property
    def device(self) -> str:
        """`cpu` for the emulated cluster, else `cuda`."""
        return "cpu" if self.cluster.gpu == "cpu" else "cuda"

    @property
    def facts(self) -> Facts:
        """What the layout rules need to know."""
        return Facts(
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
        )

    @property
    def full_layout(self) -> ParallelLayout:
        """The layout on all nodes, with `dp: auto` solved."""
        want = self.layout
        replica = want.tp * want.cp * want.pp
        dp = self.facts.num_gpus // replica if want.dp == "auto" else want.dp
        return ParallelLayout(
            dp=dp,
            tp=want.tp,
            pp=want.pp,
            cp=want.cp,
            dp_replicate=want.dp_replicate,
            order=want.order,
        )

    @property
    def min_nodes(self) -> int:
        """Fewest nodes to train on; by default those of one dp replica."""
        if self.elastic.min_nodes is not None:
            return self.elastic.min_nodes
        replica = self.layout.tp * self.layout.cp * self.layout.pp
        return min(self.cluster.nodes, -(-replica // self.cluster.gpus_per_node))

    def problem(self, code: str, key: str, message: str) -> Problem:
        """Return a Problem at the line where `key` (as `data.path`) was written."""
        return Problem(code, self._source.where_key(key), message)


SECTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "": JobSpec,
    "model": sections.ModelDimensions,
    "layout": sections.Layout,
    "cluster": sections.Cluster,
    "train": sections.Train,
    "train.optimizer": sections.Optimizer,
    "data": sections.Data,
    "checkpoint": sections.Checkpoint,
    "elastic": sections.Elastic,
    "numbers": Numbers,
    "code": sections.Code,
    "env": Env,
    "network": sections.Network,
    "slurm": Slurm,
    "kubernetes": Kubernetes,
    "kubernetes.security": Security,
    "kubernetes.topology": Topology,
}
"""Dotted path -> model of every section."""

Spec = TypeVar("Spec", bound=JobSpec)

_PLACEHOLDERS: Final[dict[str, Any]] = {
    "name": "job",
    "model": "tiny",
    "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"},
    "train": {"seq_len": 1, "global_batch": 1, "steps": 1},
    "data": {"path": "."},
}
"""Stand in for what is missing or wrong, so that the rest can be checked in the same go."""


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


def _fill_for_command(source: Source) -> set[str]:
    """Put stand-ins for what a job with `command` leaves out into `source`; return their keys."""
    if source.data.get("command") is None:
        return set()
    left_out = set()
    for key, stand_in in FOR_COMMANDS.items():
        given = source.data.get(key)
        if given is None:
            source.data[key] = dict(stand_in)
            left_out.add(key)
        elif key == "train" and isinstance(given, dict):
            missing = {name: value for name, value in stand_in.items() if name not in given}
            source.data[key] = {**given, **missing}
            left_out |= {f"{key}.{name}" for name in missing}
    return left_out


def _validate(cls: type[Spec], source: Source) -> tuple[Spec | None, list[Problem]]:
    """Return the spec and its problems; with problems, wrong values are replaced."""
    data = {
        key: value
        for key, value in source.data.items()
        if value is not None or key not in SECTIONS  # an empty section is one with defaults
    }
    values.build(cls)
    try:
        return cls.model_validate(data), []
    except ValidationError as error:
        problems = problems_of(error, source, SECTIONS)
        bad = [tuple(detail["loc"]) for detail in error.errors(include_url=False)]
    data = copy.deepcopy(data)
    for path in bad:
        _drop(data, [part for part in path if part not in MODEL_TAGS])
    for key, stand_in in _PLACEHOLDERS.items():
        if not isinstance(stand_in, dict):
            data.setdefault(key, stand_in)
        elif isinstance(data.setdefault(key, {}), dict):
            data[key] = {**stand_in, **data[key]}
    if isinstance(data["model"], dict) and any(path[0] == "model" for path in bad):
        data["model"] = "tiny"
    try:
        return cls.model_validate(data), problems
    except ValidationError:
        return None, problems  # mistakes of mistakes: what was found must do


def _drop(data: Any, path: Sequence[str | int]) -> None:
    """Remove what lies at `path`; a bad list item takes the whole list with it."""
    for index, part in enumerate(path):
        last = index == len(path) - 1 or isinstance(path[index + 1], int)
        if not isinstance(data, dict) or part not in data:
            return
        if last:
            data.pop(part)
            return
        data = data[part]


def _shape_of(spec: JobSpec, read: ReadText | None) -> tuple[ModelShape, Problem | None]:
    """Return the model's dimensions, or a stand-in and the problem with `model`."""
    model, where = spec.model, spec.source.where_key("model")
    stand_in = PRESETS["tiny"]
    if not isinstance(model, str):
        raw = dict(model)
        heads = raw["num_heads"] if raw["num_kv_heads"] is None else raw["num_kv_heads"]
        return ModelShape(**{**raw, "num_kv_heads": heads, "head_dim": raw["head_dim"] or 0}), None
    if model in PRESETS:
        return PRESETS[model], None
    if "/" not in model and not model.endswith(".json"):
        import difflib

        near = difflib.get_close_matches(model.lower(), PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        message = (
            f"{model} is unknown; {hint}Presets: {', '.join(PRESETS)}; or give dimensions, "
            "or the path of a config.json"
        )
        return stand_in, Problem("HF020", where, message)
    try:
        return parse_hf_config((read or _read_nothing)(model)), None
    except ConfigError as error:
        code, reason = error.code, str(error)
    except UnicodeDecodeError:
        code, reason = "HF021", "not UTF-8 text"
    except OSError as error:
        code, reason = "HF021", f"cannot be read: {error.strerror or error}"
    return stand_in, Problem(code, where, f"{model}: {reason}")


def _read_nothing(name: str) -> str:
    raise ConfigError("HF021", f"files such as {name} cannot be read here")


def load_spec(path: str | Path, sets: Sequence[str] = ()) -> JobSpec:
    """Read a job file.

    Relative paths in it are relative to its folder, `Path(path).absolute().parent`.

    Raises:
        UserError: HF001 or HF002 when it cannot be read; else as `from_text`.
    """
    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"byte {error.start} is not UTF-8; save the file as UTF-8 text"
        raise UserError("HF002", message, where=Where(file)) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"cannot be read: {reason}; check the path"
        raise UserError("HF001", message, where=Where(file)) from error
    folder = Path(path).absolute().parent

    def read(name: str) -> str:
        """Read the config.json of a model, given itself or by its folder."""
        try:
            model_path = folder / Path(name).expanduser()
        except RuntimeError as error:  # ~name of somebody who is not known here
            raise FileNotFoundError(str(error)) from error
        if model_path.is_dir():
            model_path /= "config.json"
        return model_path.read_text(encoding="utf-8")

    return JobSpec.from_text(text, file, sets, read=read)
