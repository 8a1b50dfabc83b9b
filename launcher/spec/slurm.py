"""The section `slurm:` of a job file: every option of the script. Pure.

What #SBATCH lines cannot express is refused here. sbatch splits these lines itself, without a
shell: quotes group, a backslash takes the next character as it is, # begins a comment, and
there is no way to write a line break (src/sbatch/opt.c; `render/shell.py` writes them).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from launcher.spec.source import describe
from launcher.spec.values import (
    Count,
    Many,
    Seconds,
    SpecSection,
    Text,
    form,
    is_whole,
    refuse,
    whole_as_text,
)

_TIME: Final = (
    r"(?i)[0-9]{1,7}(:[0-9]{1,2}){0,2}|[0-9]{1,5}-[0-9]{1,2}(:[0-9]{1,2}){0,2}"
    r"|UNLIMITED|INFINITE"
)
_WORD: Final = r"[^\s\"'`\\$;|&<>(){}#*?!,-][^\s\"'`\\$;|&<>(){}#*?!]*"
_MEMORY: Final = r"(?i)[0-9]{1,12}[KMGT]?"
_SWITCHES: Final = r"[0-9]{1,6}(@[0-9]{1,7}(:[0-9]{1,2}){0,2}|@[0-9]{1,4}-[0-9:]{1,8})?"
_HOST: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[0-9,-]+\][A-Za-z0-9._-]*)*"
_GRES: Final = r"[\w.-]+(:[\w.-]+){0,2}(,[\w.-]+(:[\w.-]+){0,2})*"
_INDICES: Final = r"[0-9]{1,6}(-[0-9]{1,6}(:[0-9]{1,6})?)?"
_DEPENDENCY: Final = (
    r"(singleton|[a-z]+(:[0-9]+(_([0-9]+|\*))?(\+[0-9]+)?)+)"
    r"([,?](singleton|[a-z]+(:[0-9]+(_([0-9]+|\*))?(\+[0-9]+)?)+))*"
)
_VERSION: Final = r"([0-9]{2})\.([0-9]{2})(\.[0-9]{1,3})?"
_OPTION: Final = r"-([A-Za-z])|--([a-z][a-z0-9-]*)(.?)"
_MAX_TASKS: Final = 10_000

SET_BY_US: Final = frozenset({
    "account", "array", "chdir", "comment", "constraint", "cpus-per-task", "dependency", "error",
    "exclude", "exclusive", "export", "export-file", "get-user-env", "gpus", "gpus-per-node",
    "gpus-per-socket", "gpus-per-task", "gres", "help", "job-name", "mail-type", "mail-user", "mem",
    "mem-per-cpu", "mem-per-gpu", "no-kill", "no-requeue", "nodes", "ntasks", "ntasks-per-gpu",
    "ntasks-per-node", "open-mode", "output", "parsable", "partition", "qos", "requeue",
    "reservation", "segment", "signal", "switches", "tasks-per-node", "test-only", "time", "usage",
    "version", "wait", "wrap",
})  # fmt: skip
"""sbatch's options that have a key of their own, or that the arrangement depends on."""
SHORT: Final = {
    "A": "account", "C": "constraint", "D": "chdir", "G": "gpus", "J": "job-name", "N": "nodes",
    "V": "version", "W": "wait", "a": "array", "c": "cpus-per-task", "d": "dependency",
    "e": "error", "h": "help", "k": "no-kill", "n": "ntasks", "o": "output", "p": "partition",
    "q": "qos", "t": "time", "u": "usage", "x": "exclude",
}  # fmt: skip
"""Their short forms (the manual of sbatch)."""


def _not_a_separator(value: str) -> str:
    word = re.search("packjob|hetjob", value, re.IGNORECASE)
    if word:
        raise refuse("HF015", f"some versions of sbatch take {word[0]} for a separator; leave it")
    return value


def _without_blanks(value: str) -> str:
    if re.search(r",\s|\s,", value):
        raise refuse(
            "HF015", f"expected features without blanks at commas, found {describe(value)}"
        )
    return value


def _spelled(pattern: str, expected: str, as_text: Callable[[Any], Any]) -> BeforeValidator:
    """Return what takes a value for the text that it is written as, and checks that; or none."""

    def check(value: Any) -> Any:
        text = as_text(value)
        if text is None or (isinstance(text, str) and re.fullmatch(pattern, text)):
            return text
        raise refuse("HF015", f"expected {expected}, found {describe(value)}")

    return BeforeValidator(check)


def array_indices(text: str) -> list[int]:
    """Return the task numbers that --array=`text` means, sorted; `%limit` is left out.

    Raises:
        PydanticCustomError: HF015, sbatch would refuse it, or it is more than 10,000 tasks.
    """
    listed, percent, limit = text.partition("%")
    found: set[int] = set()
    good = not percent or (limit.isascii() and limit.isdigit() and int(limit) > 0)
    for part in listed.split(","):
        if not good or not re.fullmatch(_INDICES, part):
            good = False
            break
        first, _, rest = part.partition("-")
        last, _, step = rest.partition(":")
        numbers = range(int(first), int(last or first) + 1, int(step or 1) or 10**9)
        good = len(numbers) > 0 and len(found) + len(numbers) <= _MAX_TASKS
        found.update(numbers if good else ())
    if not good:
        raise refuse("HF015", f"expected sbatch's form, as 0-3 or 1,5,9%2, found {describe(text)}")
    return sorted(found)


def _array(value: str) -> str:
    array_indices(value)
    return value


def _extra(value: str) -> str:
    match = re.match(_OPTION, value)
    name = "" if match is None else match[2] or SHORT.get(match[1], "")
    if name in SET_BY_US:
        raise refuse("HF162", f"--{name} has a key of its own, or is not to be changed")
    near = [known for known in SET_BY_US if name and known.startswith(name)]
    if near:  # getopt_long takes every unambiguous beginning
        raise refuse("HF162", f"--{name} may be read as --{min(near)}; write it out")
    if match is None or match[2] is None or match[3] not in ("", "="):
        raise refuse("HF162", f"expected --option or --option=value, found {describe(value)}")
    return value


def _written(*kinds: str) -> WithJsonSchema:
    """Say in the schema which types the value may be written in."""
    return WithJsonSchema({"anyOf": [{"type": kind} for kind in kinds]})


Time = Annotated[
    Text | None,
    _spelled(
        _TIME,
        "sbatch's days-hours:minutes:seconds",
        lambda value: str(value) if is_whole(value) and 0 < value < 10**7 else value,  # minutes
    ),
    _written("string", "integer", "null"),
]
Version = Annotated[
    Text | None,
    _spelled(
        _VERSION,
        "year.month as 23.11",
        # 23.11 without quotes is a number, and 24.10 would lose its zero.
        lambda value: f"{value:.2f}" if isinstance(value, float) else value,
    ),
    _written("string", "number", "null"),
]
Memory = Annotated[
    Text | None,
    _spelled(_MEMORY, "memory per node as 0, 512G or 2T", whole_as_text),
    _written("string", "integer", "null"),
]
Switches = Annotated[
    Annotated[Text, form(_SWITCHES, "count[@time] as 2@2:00:00")] | None,
    BeforeValidator(whole_as_text),
    _written("string", "integer", "null"),
]
Array = Annotated[
    Annotated[Text, AfterValidator(_array)] | None,
    BeforeValidator(whole_as_text),
    _written("string", "integer", "null"),
]
Word = Annotated[
    Text,
    form(_WORD, "a name without spaces, quotes and the like"),
    AfterValidator(_not_a_separator),
]
Line = Annotated[Text, AfterValidator(_not_a_separator)]
"""Any one line that sbatch can be given."""
Features = Annotated[Line, AfterValidator(_without_blanks)]
Host = Annotated[Text, form(_HOST, "a node name or list as node[07,19-21]")]


class Slurm(SpecSection):
    """Options of the Slurm job."""

    partition: Word | None = Field(None, description="--partition; several with commas.")
    account: Word | None = Field(None, description="--account")
    qos: Word | None = Field(None, description="--qos")
    time: Time = Field(None, description="--time, as 2-00:00:00; a bare number is minutes.")
    constraint: Features | None = Field(None, description="--constraint")
    reservation: Word | None = Field(None, description="--reservation")
    version: Version = Field(
        None, description="The cluster's Slurm, as '23.11'; needed for what older ones lack."
    )
    gpu_type: Word | None = Field(None, description="Asks for this type: --gpus-per-node=TYPE:8.")
    gres: Annotated[Text, form(_GRES, "gres as gpu:h100:8")] | None = Field(
        None, description="--gres, as gpu:8, instead of --gpus-per-node."
    )
    cpus: Count | None = Field(None, description="--cpus-per-task: CPUs of a node; null: all.")
    mem: Memory = Field(
        None, description="--mem of a node, as 512G; null: all of an exclusive one."
    )
    mem_per_cpu: Memory = Field(
        None, description="--mem-per-cpu, as 8G, where a site demands it; instead of mem."
    )
    exclusive: bool = Field(True, description="--exclusive: no other job on the nodes.")
    switches: Switches = Field(None, description="--switches, as 2@2:00:00 (topology/tree).")
    segment: Count | None = Field(
        None, description="--segment: nodes of one block (topology/block, Slurm 24.05)."
    )
    exclude: Many[Host] = Field((), description="--exclude: nodes not to use.")
    array: Array = Field(None, description="--array, as 0-3%2; each task is a run of its own.")
    dependency: Annotated[Text, form(_DEPENDENCY, "afterok:123 or the like")] | None = Field(
        None, description="--dependency, as afterok:123."
    )
    comment: Line | None = Field(None, description="--comment")
    mail_user: Word | None = Field(None, description="--mail-user")
    mail_type: Word | None = Field(None, description="--mail-type, as END,FAIL.")
    extra: Many[Annotated[Line, AfterValidator(_extra)]] = Field(
        (), description="Further options of sbatch, as --licenses=lustre:1."
    )
    container: Literal["pyxis", "apptainer"] | None = Field(
        None, description="What runs env.image: pyxis or apptainer."
    )
    container_mounts: Many[Text] = Field(
        (), description="Further paths in the container, as /scratch or /a:/b:ro."
    )
    python: Text | None = Field(
        None, description="Interpreter of the batch script; null: env.venv's, or the launcher's."
    )
    modules: Many[Word] = Field((), description="Environment modules to load.")
    setup: Many[Text] = Field((), description="Shell commands before anything else, in order.")
    fabric: Literal["none", "infiniband", "efa", "roce"] = Field(
        "none", description="Sets NCCL for a network: infiniband, efa, roce; none: NCCL decides."
    )
    fabric_devices: Word | None = Field(
        None, description="NCCL_IB_HCA: adapters to use, as mlx5 or =mlx5_0,mlx5_1."
    )
    restart: Literal["requeue", "chain", "none"] = Field(
        "requeue",
        description="After a save at the time limit: requeue the job, start a successor queued "
        "beforehand (chain), or none.",
    )
    max_requeues: Annotated[int, Field(ge=0, le=10**6)] = Field(
        100, description="Restarts by Slurm; then exit code 94."
    )
    save_s: Seconds | None = Field(
        None, description="Seconds a save takes; null: predicted from the checkpoint's size."
    )
    shutdown_s: Seconds | None = Field(
        None, description="Seconds workers get to save and end; null: from save_s."
    )
    signal_lead_s: Seconds | None = Field(
        None, description="Seconds before the limit at which to save; null: from shutdown_s."
    )
    umask: Annotated[Text, form("[0-7]{3,4}", "four octal digits as 0027")] | None = Field(
        None, description="Of all files of the run, in quotes, as '0027'."
    )
    group: Word | None = Field(None, description="Group that owns the run directory.")
