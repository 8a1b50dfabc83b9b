"""What keeps Slurm from ever starting a job that sbatch would take: (script, cluster) -> problems.

Pure. sbatch's own clear refusals are left to it. Unknown facts are not judged: no problem is found
where Slurm would start the job as the cluster is configured now.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from launcher.plan.clock import limit_seconds
from launcher.platforms.slurm.parse import NodeGroup, expand_nodes
from launcher.spec.errors import Problem, Where

ASSOCIATION_COLUMNS: Final = (
    "Account",
    "ParentName",
    "User",
    "Partition",
    "QOS",
    "MaxWall",
    "MaxTRES",
    "GrpTRES",
)
QOS_COLUMNS: Final = ("Name", "Flags", "MaxWall", "MaxTRES", "MaxTRESPU", "GrpTRES")
_MIB: Final = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
_NAMED: Final = 4
"""Names that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A batch script's request to Slurm."""

    nodes: int
    partitions: tuple[str, ...] = ()
    """Any of them will do; empty: the default one."""
    account: str = ""
    qos: str = ""
    time_s: int | None = None
    """None: not given, or without limit."""
    cpus: int = 0
    """Per node; 0: not given."""
    memory_mib: float = 0.0
    """Per node; 0: not given, or all."""
    gres: tuple[tuple[str, str, int], ...] = ()
    """Name, type (may be empty), number on each node."""
    gres_key: str = "slurm.gres"
    """Key of the job file that asks for them."""
    features: frozenset[str] = frozenset()
    """Nodes must have all of them."""
    excluded: frozenset[str] = frozenset()

    @property
    def tres(self) -> dict[str, int]:
        """Its least use, in the names of accounting's limits."""
        found = {"node": self.nodes}
        for name, kind, count in self.gres:
            for tres in dict.fromkeys((f"gres/{name}", f"gres/{name}{kind and ':' + kind}")):
                found[tres] = found.get(tres, 0) + count * self.nodes
        return found | ({"cpu": self.cpus * self.nodes} if self.cpus else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """Slurm's facts about itself; unknown ones are empty."""

    config: Mapping[str, str] = field(default_factory=dict)
    """`scontrol show config`."""
    partitions: Sequence[Mapping[str, str]] = ()
    """`scontrol show partition`."""
    nodes: Sequence[NodeGroup] = ()
    user: str = ""
    associations: Sequence[Mapping[str, str]] | None = None
    """The user's, by ASSOCIATION_COLUMNS; None: unknown."""
    accounts: Sequence[Mapping[str, str]] = ()
    """The job's account itself."""
    qos: Sequence[Mapping[str, str]] | None = None
    """All, by QOS_COLUMNS; None: unknown."""

    def enforces(self, *what: str) -> bool:
        """Whether one of these words is in AccountingStorageEnforce."""
        words = self.config.get("AccountingStorageEnforce", "").lower().split(",")
        return not {*what, "all"}.isdisjoint(words)

    @property
    def rewrites(self) -> bool:
        """Whether a plugin of the site may change submissions, such as their partition."""
        return any(self.config.get(key) for key in ("JobSubmitPlugins", "CliFilterPlugins"))

    @property
    def keeps_accounts(self) -> bool:
        """Whether it has a database of accounts."""
        kind = self.config.get("AccountingStorageType", "")  # later versions: (null)
        return bool(kind) and not kind.endswith("/none")

    @property
    def may_grow(self) -> bool:
        """Whether nodes may be added that no partition shows yet (dynamic nodes)."""
        most = self.config.get("MaxNodeCount", "")
        known = frozenset[str]().union(*(group.names for group in self.nodes))
        return most.isdigit() and int(most) > len(known)


def request_of(script: str, without: Iterable[str] = ()) -> BatchRequest | None:
    """Return the request of a script of ours; None: it is for another cluster, or says nothing.

    `without` names further nodes to avoid.
    """
    given: dict[str, str] = {}
    try:
        for line in re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE):
            for word in shlex.split(line):
                name, _, value = word.removeprefix("--").partition("=")
                given[name] = value
    except ValueError:  # somebody has changed it; sbatch says what is wrong with it
        return None
    if not given.get("nodes", "").isdigit() or {"clusters", "cluster"} & given.keys():
        return None
    gres, key = given.get("gres", ""), "slurm.gres"
    if gpus := given.get("gpus-per-node", ""):
        gres, key = f"gpu:{gpus}", "cluster.gpus_per_node"
    memory = re.fullmatch(r"(\d+)([KMGT]?)", given.get("mem", "0").upper())
    cpus = given.get("cpus-per-task", "")
    wanted = given.get("constraint", "")
    return BatchRequest(
        nodes=int(given["nodes"]),
        partitions=tuple(filter(None, given.get("partition", "").split(","))),
        account=given.get("account", "").lower(),  # as the database has it
        qos=given.get("qos", "").lower(),
        time_s=None if "time-min" in given else limit_seconds(given.get("time")),
        cpus=int(cpus) if cpus.isdecimal() else 0,
        memory_mib=int(memory[1]) * _MIB[memory[2]] if memory else 0.0,
        gres=tuple(_gres(gres)),
        gres_key=key,
        features=frozenset(re.split("[&,]", wanted))
        if re.fullmatch(r"[\w.&,-]+", wanted)
        else frozenset(),
        excluded=frozenset(
            name for each in (given.get("exclude", ""), *without) for name in expand_nodes(each)
        ),
    )


def problems(job: BatchRequest, cluster: SlurmCluster) -> list[Problem]:
    """Return what keeps `job` from starting on `cluster`; what it only waits for, as warnings.

    HF680 to HF682, of the partition; HF683 and HF684, of the account and its limits.
    """
    if not cluster.config:  # it might lift any limit
        return []
    known = {part.get("PartitionName", ""): part for part in cluster.partitions}
    default = [name for name, part in known.items() if part.get("Default") == "YES"]
    names = [name for name in job.partitions or default if name in known]
    by_partition = {name: list(_of_partition(job, cluster, known[name])) for name in names}
    found: list[Problem] = []
    if len(names) == len(job.partitions or default) and all(map(_errors, by_partition.values())):
        others = [
            name
            for name, part in known.items()
            if name not in names
            and _is_open(part)
            and not _errors(_of_partition(job, cluster, part))
        ]
        fit = f" ({_listed(others)} would do)" if others else ""
        found += [
            Problem(problem.code, problem.where, problem.message + fit)
            for listed in by_partition.values()
            for problem in listed
        ]
    elif names and len(job.partitions) <= 1:
        found += by_partition[names[0]]  # what it waits for
    if cluster.enforces("associations", "limits", "qos", "safe"):
        found += _of_account(job, cluster, [known[name] for name in names])
    return found


def _is_open(part: Mapping[str, str]) -> bool:
    """Return whether all users may submit to a partition."""
    said = (part.get("State"), part.get("RootOnly"), part.get("AllowGroups"))
    return said == ("UP", "NO", "ALL")


def _errors(found: Iterable[Problem]) -> bool:
    return any(not problem.is_warning for problem in found)


def _problem(code: str, key: str, message: str) -> Problem:
    return Problem(code, Where(key=key), message)


# -- the partition --------------------------------------------------------------------------


def _of_partition(
    job: BatchRequest, cluster: SlurmCluster, part: Mapping[str, str]
) -> Iterator[Problem]:
    name = part.get("PartitionName", "")
    if part.get("State") == "DOWN":
        message = f"partition {name} is DOWN: the job waits until an administrator sets it UP"
        yield _problem("HF180", "slurm.partition", message)
    yield from _not_allowed(job, cluster, part)
    yield from _too_many(job, cluster, part)
    most_s = limit_seconds(part.get("MaxTime"))
    if job.time_s and most_s and job.time_s > most_s and not _lifts(job, cluster, "TimeLimit"):
        message = (
            f"{_time(job.time_s)} is longer than partition {name} allows: {part['MaxTime']}; "
            "shorten it, or use another partition"
        )
        yield _problem("HF682", "slurm.time", message)


def _not_allowed(
    job: BatchRequest, cluster: SlurmCluster, part: Mapping[str, str]
) -> Iterator[Problem]:
    """Yield that account or QOS are not for the partition.

    From some version on an account in its list includes those below it: only accounts below root
    are judged.
    """
    if not cluster.enforces("associations", "limits", "qos", "safe"):
        return
    is_top = {row["ParentName"] for row in cluster.accounts} == {"root"}
    for what, asked, among in (
        ("account", job.account if is_top else "", "Accounts"),
        ("qos", job.qos, "Qos"),
    ):
        allowed, denied = (
            part.get(f"{how}{among}", "").lower().split(",") for how in ("Allow", "Deny")
        )
        if asked and (asked in denied or not {asked, "all", ""} & {*allowed}):
            listed = f"allows {_listed(allowed)}" if {*allowed} - {"all", ""} else "denies it"
            message = (
                f"partition {part['PartitionName']} is not for {what} {asked}: it {listed}; use "
                "another"
            )
            yield _problem("HF683", f"slurm.{what}", message)


def _too_many(
    job: BatchRequest, cluster: SlurmCluster, part: Mapping[str, str]
) -> Iterator[Problem]:
    """Yield the first reason why the partition never gives the job its nodes."""
    name, asked = part.get("PartitionName", ""), f"the job asks for {job.nodes:,} nodes"
    most, least = part.get("MaxNodes", ""), part.get("MinNodes", "")
    other = "lower cluster.nodes or cluster.spares, or use another partition"
    if most.isdigit() and job.nodes > int(most) and not _lifts(job, cluster, "MaxNodes"):
        message = f"{asked}, partition {name} gives a job at most {int(most):,}; {other}"
        yield _problem("HF680", "cluster.nodes", message)
        return
    if least.isdigit() and job.nodes < int(least) and not _lifts(job, cluster, "MinNodes"):
        message = f"{asked}, partition {name} gives a job at least {int(least):,}; use another"
        yield _problem("HF680", "cluster.nodes", message)
        return
    groups = [group for group in cluster.nodes if group.partition == name]
    shown = sum(len(group.names) for group in groups)
    configured = part.get("TotalNodes", "")
    # sinfo leaves out nodes of a cloud that are powered down (PrivateData), and future ones.
    hides = configured.isdigit() and int(configured) > shown
    if not groups or hides or cluster.may_grow:
        return
    left = [(group, len(group.names - job.excluded)) for group in groups]
    total = sum(count for _, count in left)
    if total < job.nodes:
        besides = ""
        if kept_off := shown - total:
            besides = f" besides {kept_off:,} that are excluded"
            other = f"exclude fewer (slurm.exclude, submit --resume --all-nodes), {other}"
        message = f"{asked}, partition {name} has {total:,}{besides}; {other}"
        yield _problem("HF680", "cluster.nodes", message)
        return
    for key, what, has, show in _wishes(job):
        count = sum(number for group, number in left if has(group))
        if count < job.nodes:
            there = list(dict.fromkeys(show(group) for group, _ in left))
            message = (
                f"{count:,} of {total:,} nodes of partition {name} have {what}, {asked}; its "
                f"nodes have {_listed(there, ' or ')}; ask for what {job.nodes:,} nodes have, or "
                "use another partition"
            )
            yield _problem("HF681", key, message)
            return


class _Wish(NamedTuple):
    key: str
    what: str
    has: Callable[[NodeGroup], bool]
    shown: Callable[[NodeGroup], str]


def _wishes(job: BatchRequest) -> Iterator[_Wish]:
    """Yield each demand on a node, then all of them together."""
    each = [
        _Wish(
            job.gres_key,
            ":".join(filter(None, (name, kind, str(count)))),
            partial(_has_gres, name, kind, count),
            lambda group: re.sub(r"\([^)]*\)", "", group.gres) or "no GRES",
        )
        for name, kind, count in job.gres
    ]
    if job.cpus:
        each.append(
            _Wish(
                "slurm.cpus",
                f"{job.cpus:,} CPUs",
                lambda group: group.cpus >= job.cpus,
                lambda group: f"{group.cpus:,} CPUs",
            )
        )
    if job.memory_mib:
        each.append(
            _Wish(
                "slurm.mem",
                f"{job.memory_mib:,.0f} MiB of memory",
                # 1 is what Slurm has where nobody has said how much there is.
                lambda group: group.memory_mib >= job.memory_mib or group.memory_mib <= 1,
                lambda group: f"{group.memory_mib:,} MiB",
            )
        )
    if job.features:
        each.append(
            _Wish(
                "slurm.constraint",
                "&".join(sorted(job.features)),
                lambda group: job.features <= group.features,
                lambda group: ",".join(sorted(group.features)) or "no features",
            )
        )
    yield from each
    if len(each) > 1:
        yield _Wish(
            "slurm.partition",
            ", ".join(wish.what for wish in each),
            lambda group: all(wish.has(group) for wish in each),
            lambda group: ", ".join(wish.shown(group) for wish in each),
        )


def _has_gres(name: str, kind: str, count: int, group: NodeGroup) -> bool:
    """Return whether nodes have `count` of a GRES; one without a type may be of any type."""
    there = [(k, n) for other, k, n in _gres(group.gres) if other == name]
    return sum(n for k, n in there if not kind or not k or k.lower() == kind.lower()) >= count


def _gres(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield name, type and number of each GRES of a request or of a node's configuration."""
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *more = (part for part in item.split(":") if part != "no_consume")
        amount = re.fullmatch(r"(\d+)([kmgt]?)", more[-1], re.IGNORECASE) if more else None
        kind = ":".join(more[: len(more) - (amount is not None)])
        scale = 1024 ** " KMGT".index(amount[2].upper() or " ") if amount else 1
        if name:
            yield name, kind, int(amount[1]) * scale if amount else 1


def _lifts(job: BatchRequest, cluster: SlurmCluster, limit: str) -> bool:
    """Return whether a QOS that the job may have overrides this limit of partitions."""
    if not cluster.keeps_accounts:
        return False
    candidates = _candidates(job, cluster)  # empty: an unknown one may
    return not candidates or any(f"Partition{limit}" in _flags(row) for row in candidates)


def _candidates(job: BatchRequest, cluster: SlurmCluster) -> list[Mapping[str, str]]:
    """Return each QOS that the job may get: its own, else any of the user's."""
    names = {job.qos}
    if not job.qos:
        mine = cluster.associations or ()
        listed = [row["QOS"] for row in mine if job.account in {"", row["Account"]}]
        names = {name for text in listed for name in text.split(",") if name}
    rows = cluster.qos or ()
    return [row for row in rows if row["Name"] in names or not names]


def _flags(row: Mapping[str, str]) -> list[str]:
    return row.get("Flags", "").split(",")


# -- account, QOS and their limits ----------------------------------------------------------


def _of_account(
    job: BatchRequest, cluster: SlurmCluster, partitions: Sequence[Mapping[str, str]]
) -> Iterator[Problem]:
    associations = cluster.associations or ()
    accounts = sorted({row["Account"] for row in associations})
    if not accounts:
        return  # the database may know the user by another name; if not, sbatch says so
    account = job.account or (accounts[0] if len(accounts) == 1 else "")
    if account and account not in accounts:
        message = f"{cluster.user} is not in account {account}; use one of {_listed(accounts)}"
        yield _problem("HF683", "slurm.account", message)
        return
    names = {part["PartitionName"] for part in partitions}
    mine = [
        row
        for row in associations
        if row["Account"] == account and row["Partition"] in {"", *names}
    ]
    allowed = sorted({name for row in mine for name in row["QOS"].split(",") if name})
    if job.qos and mine and allowed and job.qos not in allowed and cluster.enforces("qos"):
        message = (
            f"QOS {job.qos} is not for {cluster.user} in account {account}; use one of "
            f"{_listed(allowed)}"
        )
        yield _problem("HF683", "slurm.qos", message)
        return
    if len(partitions) == 1 and len(mine) == 1 and cluster.enforces("limits", "safe"):
        yield from _over_limits(job, cluster, partitions[0], mine[0])


def _over_limits(
    job: BatchRequest, cluster: SlurmCluster, part: Mapping[str, str], mine: Mapping[str, str]
) -> Iterator[Problem]:
    """Yield the limits that the job alone exceeds.

    Of one limit on several levels the first that is set counts, in Slurm's order: the partition's
    QOS, the job's (first with OverPartQOS), the user's association, the account.
    """
    found = [list(_over(job, cluster, part, mine, qos)) for qos in _candidates(job, cluster)]
    if found and all(found):  # else it starts with one of them
        yield from found[-1]


def _over(
    job: BatchRequest,
    cluster: SlurmCluster,
    part: Mapping[str, str],
    mine: Mapping[str, str],
    qos: Mapping[str, str],
) -> Iterator[Problem]:
    of_part = [row for row in cluster.qos or () if row["Name"] == part.get("QoS")]
    levels = [(f"QOS {row['Name']}", row) for row in (*of_part, qos)]
    if "OverPartQOS" in _flags(qos):
        levels.reverse()
    levels.append((f"the association of {cluster.user} with account {mine['Account']}", mine))
    # Its others are the user's already.
    levels += [
        (f"account {row['Account']}", {"GrpTRES": row["GrpTRES"]}) for row in cluster.accounts
    ]
    seen: set[tuple[str, str]] = set()
    for who, row in levels:
        for limit, tres, most in _limits(row):
            if (limit, tres) in seen:
                continue
            seen.add((limit, tres))
            asked = (job.time_s or 0) if tres == "time" else job.tres.get(tres, 0)
            if asked > most:
                shown = _time if tres == "time" else "{:,}".format
                message = (
                    f"{who} allows {tres}={shown(most)} ({limit}), the job alone asks for "
                    f"{shown(asked)}; ask for less, or use another account or QOS"
                )
                yield _problem("HF684", _KEYS.get(tres, "cluster.gpus_per_node"), message)


_KEYS: Final = {"time": "slurm.time", "node": "cluster.nodes", "cpu": "slurm.cpus"}


def _limits(row: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    """Yield limit, TRES (or time, in seconds) and number of a QOS or an association."""
    # Percentages then, from 23.11 on: they count before lower limits, but not in numbers.
    is_relative = "Relative" in _flags(row)
    if wall_s := limit_seconds(row.get("MaxWall")):
        yield "MaxWall", "time", wall_s
    for limit in ("MaxTRES", "MaxTRESPU", "GrpTRES"):
        for item in row.get(limit, "").split(","):
            tres, _, number = item.partition("=")
            if number.isdigit():
                yield limit, tres, sys.maxsize if is_relative else int(number)


def _time(seconds: int) -> str:
    """Return a time in sbatch's form."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def _listed(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names[:_NAMED]) + (f"{between}…" if len(names) > _NAMED else "")


def table(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """Read `sacctmgr --noheader --parsable2 show … format=COLUMNS`."""
    rows = (line.split("|") for line in text.splitlines())
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]
