"""The output of squeue, scontrol, sacct and sbatch -> values. Pure.

Garbage gives nothing, never an error. The columns exist from Slurm 20.11 on. JSON is not used:
squeue and sacct have had it only since 21.08, in a form that changes with the version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

SEPARATOR: Final = "\x1f"
"""Separates columns; paths, names and reasons do not contain it."""

SQUEUE_FORMAT: Final = SEPARATOR.join(
    ("%i", "%A", "%T", "%r", "%V", "%S", "%e", "%N", "%B", "%j", "%o")
)
SQUEUE_COLUMNS: Final = (
    *("JobID", "JobIDRaw", "State", "Reason", "Submit", "Start", "End"),
    *("NodeList", "BatchHost", "JobName", "Command"),
)
"""Columns of SQUEUE_FORMAT, in sacct's and scontrol's names.

Nodes that went down are left out, the batch host too.
"""
SINFO_FORMAT: Final = SEPARATOR.join(("%R", "%N", "%c", "%m", "%G", "%f"))
"""Partition, nodes, and of each node CPUs, memory in MiB, GRES, features."""
SACCT_COLUMNS: Final = (
    *("JobID", "JobIDRaw", "State", "ExitCode", "Reason", "Submit", "Start", "End"),
    *("NodeList", "JobName", "WorkDir"),
)
COMPLETION_COLUMNS: Final = ("JobID", "JobName", "State", "NodeList", "End")
"""Columns of `sacct -c` with every plugin of job completion."""

MAX_NODES: Final = 100_000
"""Longer lists are not node lists."""

_ID = re.compile(r"[0-9]+(_[0-9]+)?")
_SBATCH_ID = re.compile(r"([0-9]+)(?:;([\w.-]+))?")
_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9_/:]*)=")
_EXIT = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")
_EXCLUDED = re.compile(r'^#SBATCH --exclude="?([^"\s]+)"?$', re.MULTILINE)
_NODE_LIST = re.compile(r"(?:[^\[\]]|\[[^\[\]]*\])*", re.DOTALL)
_NODE_LIST_PART = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+", re.DOTALL)
_WILL_START = re.compile(r"to start at (\S+)(?: using .*? on (?:nodes? )?(\S+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One job, or one task of an array, as one of the commands shows it."""

    id: str
    """The id that users see: 123, or 123_4 for a task of an array."""
    raw_id: str = ""
    """The number of the task alone; the same as `id` without an array."""
    state: str = ""
    """Slurm's word, in capitals, as PENDING or NODE_FAIL."""
    reason: str = ""
    code: int | None = None
    signal: int | None = None
    submit: float | None = None
    start: float | None = None
    end: float | None = None
    nodes: str = ""
    """A node list in Slurm's form: n[1-3]."""
    batch_host: str = ""
    restarts: int | None = None
    name: str | None = None
    script: str | None = None
    """Path of the batch script."""
    source: str = ""


def parse_squeue(text: str) -> list[SlurmJob]:
    """Read the output of `squeue --noheader --format=SQUEUE_FORMAT`."""
    return _jobs(text, SQUEUE_COLUMNS, "squeue")


def parse_sacct(text: str) -> list[SlurmJob]:
    """Read `sacct --parsable2 --noheader --delimiter=SEPARATOR --format=SACCT_COLUMNS`.

    With --duplicates a requeued job has several rows; the newest by its time of submission is last.
    """
    return sorted(_jobs(text, SACCT_COLUMNS, "sacct"), key=lambda job: job.submit or 0.0)


def parse_completion(text: str) -> list[SlurmJob]:
    """Read `sacct --completion` with COMPLETION_COLUMNS, for a site without accounting."""
    return sorted(_jobs(text, COMPLETION_COLUMNS, "sacct -c"), key=lambda job: job.end or 0.0)


def _jobs(text: str, columns: Sequence[str], source: str) -> list[SlurmJob]:
    """Return jobs; neither steps (123.batch) nor tasks that wait together (123_[0-3])."""
    rows = [dict(zip(columns, row, strict=True)) for row in _rows(text, num_columns=len(columns))]
    return [_job(row, source) for row in rows if _ID.fullmatch(row["JobID"])]


def _job(row: Mapping[str, str], source: str) -> SlurmJob:
    code, number = parse_exit(row.get("ExitCode", ""))
    script = row.get("Command", "")
    return SlurmJob(
        id=row["JobID"],
        raw_id=row.get("JobIDRaw") or row["JobID"],
        state=_state(row.get("State", "")),
        reason=_reason(row.get("Reason", "")),
        code=code,
        signal=number,
        submit=parse_time(row.get("Submit", "")),
        start=parse_time(row.get("Start", "")),
        end=parse_time(row.get("End", "")),
        nodes=_known(row.get("NodeList", "")),
        batch_host=_known(row.get("BatchHost", "")),
        name=row.get("JobName"),
        script=script if script.startswith("/") else None,
        source=source,
    )


def parse_scontrol(text: str) -> list[dict[str, str]]:
    """Read `scontrol --oneliner show job`: a mapping of fields for each job."""
    return [fields for fields in records(text) if "JobId" in fields and "JobState" in fields]


def records(text: str) -> list[dict[str, str]]:
    """Read `scontrol --oneliner show`: one mapping of fields for each line.

    Values may hold blanks; a key begins with a capital after a blank. Of a repeated key the first
    counts.
    """
    listed = []
    for line in text.splitlines():
        _, *found = _KEY.split(line)
        fields: dict[str, str] = {}
        for key, value in zip(found[::2], found[1::2], strict=True):
            fields.setdefault(key, value.strip())
        if fields:
            listed.append(fields)
    return listed


def settings(text: str) -> dict[str, str]:
    """Read `scontrol show config`: name -> value, which may be empty."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): _known(value) for name, equals, value in pairs if equals}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of a partition that are alike, whatever their state."""

    partition: str
    names: frozenset[str]
    cpus: int
    memory_mib: int
    gres: str
    """The configured ones: gpu:h100:8(S:0-1),nvme:2; empty: none."""
    features: frozenset[str]


def parse_sinfo(text: str) -> list[NodeGroup]:
    """Read `sinfo --noheader --all --exact --format=SINFO_FORMAT`."""
    return [
        NodeGroup(
            partition=partition,
            names=frozenset(expand_nodes(nodes)),
            cpus=int(cpus),
            memory_mib=int(memory),
            gres=_known(gres),
            features=frozenset(_known(features).split(",")) - {""},
        )
        for partition, nodes, cpus, memory, gres, features in _rows(text, num_columns=6)
        if cpus.isdigit() and memory.isdigit()
    ]


def of_scontrol(fields: Mapping[str, str]) -> SlurmJob | None:
    """Return the job of a mapping of `parse_scontrol`, if it is one."""
    raw = fields.get("JobId", "")
    if not raw.isdigit():
        return None
    array, task = fields.get("ArrayJobId", ""), fields.get("ArrayTaskId", "")
    names = {"JobState": "State", "SubmitTime": "Submit", "StartTime": "Start", "EndTime": "End"}
    row = {names.get(name, name): value for name, value in fields.items()}
    row["JobID"] = f"{array}_{task}" if array.isdigit() and task.isdigit() else raw
    row["JobIDRaw"] = raw
    restarts = fields.get("Restarts", "")
    job = _job(row, "scontrol")
    return replace(job, restarts=int(restarts)) if restarts.isdigit() else job


def parse_submitted(text: str) -> tuple[str, str] | None:
    """Read `sbatch --parsable`: the job's id and its cluster, which may be empty.

    Sites' submit plugins may print lines before it. None: garbage.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    match = _SBATCH_ID.fullmatch(lines[-1]) if lines else None
    return (match[1], match[2] or "") if match else None


def parse_test_only(text: str) -> tuple[float | None, str] | None:
    """Read `sbatch --test-only`: when the job would start, and where; None: it does not say."""
    match = _WILL_START.search(text)
    return (parse_time(match[1]), match[2] or "") if match else None


def excluded(script: str, more: Sequence[str]) -> str:
    """Return the value of --exclude that replaces a script's: its excluded nodes and `more`."""
    match = _EXCLUDED.search(script)
    return ",".join([*([match[1]] if match else []), *more])


def parse_time(text: str) -> float | None:
    """Return Unix seconds of a time as Slurm prints it; None for N/A, Unknown and garbage.

    We ask for seconds (SLURM_TIME_FORMAT=%s). Wrappers that do not pass it on give local time in
    Slurm's standard form.
    """
    text = text.strip()
    if text.isascii() and text.isdigit():
        # Slurm's "never" is 0 or 2^32-1 and the like.
        return float(text) if len(text) <= 10 and 0 < int(text) < 2**32 - 16 else None
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", text, re.ASCII):
        return None
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def parse_exit(text: str) -> tuple[int | None, int | None]:
    """Read `91:0`: exit code, and number of the signal or None."""
    match = _EXIT.fullmatch(text.strip())
    return (int(match[1]), int(match[2]) or None) if match else (None, None)


def expand_nodes(text: str) -> tuple[str, ...]:
    """Return the names that a node list such as `n[1-3,07],gpu[0-1]-ib` means, in its order.

    Other texts, and lists of over MAX_NODES, come back unchanged.
    """
    if not _NODE_LIST.fullmatch(text):
        return (text,)
    names: list[str] = []
    try:
        for part in _NODE_LIST_PART.findall(text):
            names.extend(_expand(part, MAX_NODES - len(names)))
    except ValueError:
        return (text,)
    return tuple(names)


def _expand(part: str, most: int) -> list[str]:
    """Return the names of one part; several brackets multiply."""
    names = [""]
    pieces = re.split(r"\[([^\]]*)\]", part)
    for index, piece in enumerate(pieces):
        choices = list(_numbers(piece, most)) if index % 2 else [piece]
        if len(names) * len(choices) > most:
            raise ValueError(part)
        names = [name + choice for name in names for choice in choices]
    return [name for name in names if name]


def _numbers(text: str, most: int) -> Iterator[str]:
    """Yield the texts of `1-3,007-009`, with their leading zeros."""
    for item in text.split(","):
        low, dash, high = item.partition("-")
        is_range = low.isascii() and low.isdigit() and (not dash or high.isdigit())
        if not is_range or len(item) > 40:
            raise ValueError(text)
        first, last = int(low), int(high if dash else low)
        if not 0 <= last - first < most:
            raise ValueError(text)
        for number in range(first, last + 1):
            yield str(number).zfill(len(low))


def _rows(text: str, *, num_columns: int) -> Iterator[Sequence[str]]:
    """Yield the lines with all columns; a line break in a value spoils its own line only."""
    for line in text.split("\n"):
        fields = [field.strip() for field in line.split(SEPARATOR)]
        if len(fields) == num_columns:
            yield fields


def _state(text: str) -> str:
    """Return the word of a state; `CANCELLED by 1000` has more, and `RUNNING+` is cut off."""
    words = text.split()
    return words[0].rstrip("+").upper() if words else ""


def _reason(text: str) -> str:
    text = text.strip().removeprefix("(").removesuffix(")")
    return "" if text in ("None", "N/A", "null") else text


def _known(text: str) -> str:
    text = text.strip()
    return "" if text in ("(null)", "None assigned", "Unknown", "N/A", "n/a") else text


def by_id(jobs: Iterable[SlurmJob]) -> dict[str, list[SlurmJob]]:
    """Return jobs by `id` and by `raw_id`; the order of `jobs` is kept."""
    found: dict[str, list[SlurmJob]] = {}
    for job in jobs:
        for key in dict.fromkeys((job.id, job.raw_id)):
            found.setdefault(key, []).append(job)
    return found
