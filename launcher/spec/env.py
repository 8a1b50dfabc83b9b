"""The section `env:` of a job file: what the workers run in. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from launcher.spec.values import Many, SpecSection, Text, form, plain_text, refuse, whole_as_text

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
        PydanticCustomError: HF165, it is none, or one that is not the user's to set.
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


VariableName = Annotated[str, Field(max_length=256), AfterValidator(variable_name)]
Inherited = Annotated[str, Field(max_length=256), AfterValidator(_inherited)]


def _value(value: str) -> str:
    return plain_text(value) if value else value


Value = Annotated[
    str,
    Field(max_length=32768),
    BeforeValidator(whole_as_text),  # of 1.10 or yes it would lose how they were written
    AfterValidator(_value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
]


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
