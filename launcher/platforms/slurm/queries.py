"""Questions to Slurm: about jobs, each asked once for all of them, and about its nodes.

A job's state comes from squeue, then scontrol (exit codes of jobs that have just ended), then
sacct, then `sacct -c`: whichever works.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from launcher.platforms.base import JobRef, Machine
from launcher.platforms.commands import CommandResult, Commands, shortened
from launcher.platforms.retries import retried
from launcher.platforms.slurm import admission, parse, status_text
from launcher.platforms.slurm.parse import SlurmJob
from launcher.spec.errors import PermanentError, PlatformError, TemporaryError, UserError

_MOST_DETAILS: Final = 64
"""Jobs that are looked up one by one in one call, for their exit codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPatience:
    """How long Slurm is waited for, in seconds."""

    query_s: float = 20.0
    """One squeue, scontrol, sacct or sinfo; clients wait 10 s each for a controller that is off."""
    act_s: float = 60.0
    """One sbatch or scancel; a busy controller takes its time."""
    retry_query_s: float = 15.0
    """Queries are not repeated after this."""
    retry_act_s: float = 60.0
    """An sbatch or scancel is not repeated after this."""
    adopt_s: float = 30.0
    """Search of the queue for a job whose sbatch broke off."""
    glance_s: float = 5.0
    """One question whose answer a submission does without."""


class SlurmQueries:
    """Asks; changes nothing."""

    def __init__(
        self, commands: Commands, patience: SlurmPatience, sleep: Callable[[float], None]
    ) -> None:
        self._commands, self._patience, self._sleep = commands, patience, sleep

    def jobs(self, jobs: Sequence[JobRef], cluster: str = "") -> tuple[dict[JobRef, SlurmJob], str]:
        """Return the known ones of `jobs`, and what kept Slurm from telling more, if anything.

        Raises:
            UserError: HF650 Slurm is not installed here.
        """
        troubles: list[PlatformError] = []
        known: dict[JobRef, SlurmJob] = {}
        by_id = parse.by_id(self._squeue(jobs, cluster, troubles))
        is_away = bool(troubles)
        for job in jobs:
            if (mine := status_text.choose(by_id.get(job.id, []), job)) is not None:
                known[job] = mine
        if not any(isinstance(trouble, TemporaryError) for trouble in troubles):
            self._look_up(known, [job for job in jobs if is_away or _wants_code(known.get(job))])
        left = [job for job in jobs if job not in known or _wants_code(known[job])]
        by_id = parse.by_id(self._sacct(left, cluster, troubles))
        for job in left:
            mine = status_text.choose(by_id.get(job.id, []), job)
            # Accounts may be behind: what has not ended there may have ended since.
            if mine is not None and (not is_away or status_text.status_of(mine).state.is_final):
                known[job] = mine
        return known, "; ".join(dict.fromkeys(str(trouble) for trouble in troubles))

    def fields(self, job: JobRef) -> dict[str, str]:
        """Return the fields of `scontrol show job` about `job`, if any."""
        argv = ["scontrol", "--oneliner", *on_cluster(job.cluster), "show", "job", job.id]
        answer = self._query(argv, [])
        for fields in [] if answer is None else parse.parse_scontrol(answer.out):
            found = parse.of_scontrol(fields)
            if found is not None and status_text.same_job(found, job):
                return fields
        return {}

    def accounts(self, job: JobRef) -> list[SlurmJob]:
        """Return accounting's rows of `job`, one for each time it was queued."""
        rows = self._sacct([job], job.cluster, [])
        return status_text.mine(parse.by_id(rows).get(job.id, []), job)

    def job_of(self, script: str) -> SlurmJob | None:
        """Return this user's job of the batch script at path `script`, or None."""
        argv = ["squeue", "--noheader", "--states=all", f"--format={parse.SQUEUE_FORMAT}"]
        answer = self._query([*argv, f"--user={os.getuid()}"], [])
        found = [] if answer is None else parse.parse_squeue(answer.out)
        return next((job for job in reversed(found) if job.script == script), None)

    def partitions(self) -> list[str]:
        """Return the names of the partitions, if sinfo says them."""
        answer = self._query(["sinfo", "--noheader", "--format=%R"], [])
        names = [] if answer is None else answer.out.split()
        return names if all(name.isprintable() for name in names) else []

    def cluster(self, job: admission.BatchRequest) -> admission.SlurmCluster:
        """Return Slurm's facts that concern `job`, within two or three glances.

        Facts that it does not say at once are left out; nothing is raised.
        """
        with ThreadPoolExecutor() as pool:
            config, partitions, nodes = pool.map(
                self._glance,
                (
                    ["scontrol", "show", "config"],
                    ["scontrol", "--all", "--oneliner", "show", "partition"],
                    ["sinfo", "--noheader", "--all", "--exact", f"--format={parse.SINFO_FORMAT}"],
                ),
            )
            found = admission.SlurmCluster(
                config=parse.settings(config or ""),
                partitions=[
                    part for part in parse.records(partitions or "") if "PartitionName" in part
                ],
                nodes=parse.parse_sinfo(nodes or ""),
            )
            name = found.config.get("ClusterName", "")
            if not name or not found.keeps_accounts:
                return found
            user = _user_name()
            mine = f"cluster={name}", f"user={user}"
            account = f"cluster={name}", f"account={job.account}"
            own, of_account, qos = pool.map(
                self._accounting,
                (
                    ["associations", "where", *mine],
                    ["associations", "where", *account] if job.account else [],
                    ["qos"],
                ),
            )
        return replace(
            found,
            user=user,
            associations=own if user else None,
            accounts=[row for row in of_account or () if not row["User"]],
            qos=qos,
        )

    def _accounting(self, what: list[str]) -> list[dict[str, str]] | None:
        """Return rows of the accounts; None: not available, or `what` is empty."""
        columns = admission.QOS_COLUMNS if what == ["qos"] else admission.ASSOCIATION_COLUMNS
        argv = ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show", *what]
        said = self._glance([*argv, f"format={','.join(columns)}"]) if what else None
        return None if said is None else admission.table(said, columns)

    def _glance(self, argv: list[str]) -> str | None:
        """Return the output of a command; None: not at once, or it fails."""
        try:
            answer = self._commands.run(argv, timeout_s=self._patience.glance_s)
        except (UserError, PlatformError):
            return None
        return None if answer.code else answer.out

    def _look_up(self, known: dict[JobRef, SlurmJob], wanted: Sequence[JobRef]) -> None:
        """Ask scontrol about jobs one by one: for exit codes, or where squeue failed."""
        for job in wanted[:_MOST_DETAILS]:
            found = parse.of_scontrol(self.fields(job))
            if found is not None:
                known[job] = found

    def _squeue(
        self, jobs: Sequence[JobRef], cluster: str, troubles: list[PlatformError]
    ) -> list[SlurmJob]:
        argv = ["squeue", "--noheader", "--array", "--states=all", *on_cluster(cluster)]
        argv += [f"--format={parse.SQUEUE_FORMAT}", f"--jobs={','.join(_numbers(jobs))}"]
        answer = self._query(argv, troubles)
        if answer is None:
            return []
        found = parse.parse_squeue(answer.out)
        if not found and answer.out.strip() and not cluster:  # with one, its name is a line
            shown = shortened(flat(answer.out), 200)
            troubles.append(PermanentError(f"squeue gave an answer that cannot be read: {shown}"))
        return found

    def _sacct(
        self, jobs: Sequence[JobRef], cluster: str, troubles: list[PlatformError]
    ) -> list[SlurmJob]:
        """Return accounting's jobs, else those of the record of completed jobs."""
        if not jobs:
            return []
        times = [job.submit_time for job in jobs if job.submit_time is not None]
        # Some versions look at today only unless given a start. A day covers any time zone.
        since = time.gmtime(max(0.0, min(times, default=0.0) - 86400.0))
        common = ["sacct", "--noheader", "--parsable2", f"--delimiter={parse.SEPARATOR}"]
        common += [f"--jobs={','.join(_numbers(jobs))}", *on_cluster(cluster)]
        common += [f"--starttime={time.strftime('%Y-%m-%dT%H:%M:%S', since)}"]
        columns = f"--format={','.join(parse.SACCT_COLUMNS)}"
        mine: list[PlatformError] = []
        answer = self._query([*common, "--duplicates", "--allocations", columns], mine)
        if answer is not None and (found := parse.parse_sacct(answer.out)):
            return found
        columns = f"--format={','.join(parse.COMPLETION_COLUMNS)}"
        completed = self._query([*common, "--completion", columns], [])
        found = [] if completed is None else parse.parse_completion(completed.out)
        if not found:
            # A site that keeps no accounts has nothing to say; one that is away has.
            troubles += [trouble for trouble in mine if isinstance(trouble, TemporaryError)]
        return found

    def _query(self, argv: list[str], troubles: list[PlatformError]) -> CommandResult | None:
        """Run a query, again after temporary failures; None: it failed, and `troubles` has why.

        An unknown job is an answer: an empty one.

        Raises:
            UserError: HF650 squeue is missing; sites do without the other programs.
        """
        try:
            return retried(
                lambda: self._asked(argv), for_s=self._patience.retry_query_s, sleep=self._sleep
            )
        except PlatformError as error:
            troubles.append(error)
        except UserError:
            if argv[0] == "squeue":
                raise
        return None

    def _asked(self, argv: list[str]) -> CommandResult:
        answer = self._commands.run(argv, timeout_s=self._patience.query_s)
        if answer.code == 0 or status_text.NO_SUCH_ID.search(answer.err):
            return answer
        raise failure(answer)


def _user_name() -> str:
    """Return the user's name in accounts; empty: this machine does not know it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


def failure(answer: CommandResult) -> PlatformError:
    """Return why a command failed, as a type that says whether to try again."""
    said = flat(answer.complaint) or f"exit code {answer.code}, and nothing said"
    text = f"{answer.argv[0]}: {said}"
    if status_text.is_not_configured(said):
        return PermanentError(f"Slurm is not configured here: {text}; set SLURM_CONF")
    if status_text.is_temporary(said):
        return TemporaryError(f"the Slurm controller does not answer: {text}")
    return PermanentError(text)


def flat(text: str) -> str:
    """Return a complaint on one line, without programs' names at the lines' beginnings."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    bare = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines]
    return "; ".join(dict.fromkeys(bare))


def _wants_code(job: SlurmJob | None) -> bool:
    return job is not None and job.code is None and status_text.status_of(job).state.is_final


def _numbers(jobs: Iterable[JobRef]) -> list[str]:
    """Return the numbers to ask for; an array is asked for once."""
    return list(dict.fromkeys(job.id.partition("_")[0] for job in jobs))


def on_cluster(cluster: str) -> list[str]:
    """Return the option for one of several clusters; empty for the default one."""
    return [f"--clusters={cluster}"] if cluster else []


# -- Nodes as machines -----------------------------------------------------------------------------


TIMEOUT_S: Final = 60.0
_CLOSED: Final = ("DRAIN", "DOWN", "FAIL", "REBOOT", "MAINT", "POWERED_DOWN", "NOT_RESPONDING")
"""Parts of states in which no job starts there (scontrol's manual, State)."""


def as_machines(nodes: str, topology: str = "") -> list[Machine]:
    """Read `scontrol --oneliner show node` and `show topology`. Pure.

    The rack of a node is its leaf switch (topology/tree) or its block.
    """
    racks: dict[str, str] = {}
    for fields in parse.records(topology):
        name = fields.get("BlockName") or (
            fields.get("SwitchName") if fields.get("Level", "0") == "0" else None
        )
        if name:
            racks.update(dict.fromkeys(parse.expand_nodes(fields.get("Nodes", "")), name))
    return [
        Machine(
            name=name,
            closed=_closed(fields.get("State", ""), fields.get("Reason", "")),
            rack=racks.get(name, ""),
        )
        for fields in parse.records(nodes)
        if (name := fields.get("NodeName"))
    ]


def _closed(state: str, reason: str) -> str:
    if not any(word in state for word in _CLOSED) and not state.endswith("*"):
        return ""
    return f"{state.lower()}: {reason}" if reason else state.lower()


def machines(commands: Commands) -> list[Machine]:
    """Return Slurm's nodes; raises as `answer_of`."""
    nodes = answer_of(commands, ["scontrol", "--all", "--oneliner", "show", "node"])
    # Without a topology plugin this fails, or says nothing.
    topology = commands.run(["scontrol", "--oneliner", "show", "topology"], timeout_s=TIMEOUT_S)
    return as_machines(nodes, "" if topology.code else topology.out)


def draining(commands: Commands, names: Sequence[str]) -> dict[str, str]:
    """Return the nodes that Slurm drains, but not the down ones, with its reason.

    It raises as `answer_of`.
    """
    said = answer_of(commands, ["scontrol", "--oneliner", "show", "node", ",".join(names)])
    return {
        machine.name: machine.closed
        for machine in as_machines(said)
        if "drain" in machine.closed.partition(":")[0] and "down" not in machine.closed[:4]
    }


def answer_of(commands: Commands, argv: Sequence[str]) -> str:
    """Return the output of one command, which is not repeated.

    Raises:
        UserError: HF650 the program is missing.
        PlatformError: it fails.
    """
    answer = commands.run(argv, timeout_s=TIMEOUT_S)
    if answer.code:
        raise failure(answer)
    return answer.out
