"""What Slurm's states, reasons and complaints mean: tables, and functions over them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

from elastic_trainer.record.failures import EXIT_SAVED
from launcher.platforms.base import EXIT_TEXTS, JobRef, JobState, JobStatus
from launcher.platforms.slurm.parse import SlurmJob, expand_nodes

SCRIPT: Final = "job.sbatch"
"""Name of the batch script in a bundle."""
SAME_S: Final = 1.0
"""Times of submission this near are the same."""
CLOCK_SLACK_S: Final = 600.0
"""Largest difference between the launcher's clock and the controller's."""

_STATES: Final[dict[str, JobState]] = {
    word: state
    for state, words in {
        JobState.PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT "
        "RESV_DEL_HOLD",
        JobState.RUNNING: "RUNNING COMPLETING RESIZING SIGNALING STAGE_OUT STOPPED SUSPENDED",
        JobState.DONE: "COMPLETED",
        JobState.CANCELLED: "CANCELLED",
        JobState.FAILED: "FAILED BOOT_FAIL DEADLINE LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY "
        "PREEMPTED RECONFIG_FAIL TIMEOUT",
        JobState.UNKNOWN: "REVOKED",
    }.items()
    for word in words.split()
}
"""Slurm's words (squeue(1), JOB STATE CODES). COMPLETING may still become PENDING by a requeue."""

_STATE_TEXT: Final[dict[str, str]] = {
    "CONFIGURING": "its nodes are being booted or set up",
    "REQUEUED": "it is being put back into the queue",
    "REQUEUE_HOLD": "it was put back and is held; let it go with: scontrol release {id}",
    "SPECIAL_EXIT": "it was put back and is held; let it go with: scontrol release {id}",
    "RESV_DEL_HOLD": "its reservation was deleted and it is held; see: scontrol show res",
    "COMPLETING": "it is ending; its nodes are being cleared",
    "STOPPED": "its processes are stopped; continue them with: scancel --signal=CONT {id}",
    "SUSPENDED": "an operator or a job of higher priority has suspended it; it continues after: "
    "scontrol resume {id}",
    "BOOT_FAIL": "its nodes could not be booted",
    "DEADLINE": "its deadline was over",
    "LAUNCH_FAILED": "it could not be started on its nodes",
    "NODE_FAIL": "a node failed and the job was not put back",
    "OUT_OF_MEMORY": "it ran out of memory; raise slurm.mem, or lower what a node holds",
    "PREEMPTED": "a job of higher priority took its nodes",
    "TIMEOUT": "its time limit was over before it had saved; raise slurm.time or the lead",
    "REVOKED": "another cluster of the federation runs it",
}

_REASONS: Final[dict[str, str]] = {
    "Resources": "enough nodes are not free yet; it is next in line",
    "Priority": "jobs of higher priority are before it",
    "Dependency": "a job it depends on has not ended yet",
    "DependencyNeverSatisfied": "a job it depends on ended in another way than it asks for: it "
    "will never start; cancel it",
    "BeginTime": "its time has not come yet; after a requeue Slurm waits a while on purpose",
    "Cleaning": "its former start is still being cleaned up",
    "JobHeldUser": "it is held by its user; let it go with: scontrol release {id}",
    "JobHeldAdmin": "it is held by an administrator; ask them",
    "Licenses": "licences it asks for are in use",
    "InvalidAccount": "its account is not valid (any more); fix slurm.account",
    "InvalidQOS": "its QOS is not valid (any more); fix slurm.qos",
    "BadConstraints": "no node has what it asks for; fix slurm.constraint or the numbers per node",
    "ReqNodeNotAvail": "nodes it needs are down, drained or reserved; a time limit that reaches "
    "into a maintenance window does this too: shorten slurm.time",
    "Reservation": "its reservation has not begun or has no room",
    "ReservationDeleted": "its reservation was deleted; fix slurm.reservation",
    "InactiveLimit": "the limit of inactivity was reached",
    "NodeDown": "a node it needs is down",
    "PartitionDown": "its partition is down; ask an administrator",
    "PartitionInactive": "its partition takes jobs but starts none; ask an administrator",
    "PartitionNodeLimit": "it asks for more nodes than its partition gives to a job, or more than "
    "are up: lower cluster.nodes or spares, or use another partition",
    "PartitionTimeLimit": "slurm.time is longer than its partition allows: shorten it",
    "PartitionConfig": "its partition does not allow what it asks for",
    "Prolog": "the prolog of its nodes is running",
    "JobArrayTaskLimit": "as many tasks of its array run as may run at once",
    "SystemFailure": "Slurm itself failed; ask an administrator",
    "FrontEndDown": "no front end node is up",
    "FedJobLock": "clusters of the federation are deciding who runs it",
    "NonZeroExitCode": "it ended with an error",
    "TimeLimit": "its time limit was over",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
    "partitions": "nodes it needs are down, drained, or kept for jobs of higher priority",
    "launch failed requeued held": "its start failed and it is held; see why on its nodes, then: "
    "scontrol release {id}",
    "launch_failed_requeued_held": "its start failed and it is held; see why on its nodes, then: "
    "scontrol release {id}",
    "job requeued in held state": "it was put back and is held; let it go with: "
    "scontrol release {id}",
    "user env retrieval failed requeued held": "the user's environment could not be read on its "
    "node and it is held; then: scontrol release {id}",
}
"""Reasons of pending jobs (squeue(1), JOB REASON CODES), as reasons for people."""

_LIMIT = re.compile(r"(QOS|Assoc|Max)\w*(Limit|PerUser|PerAccount|PerJob|Group\w*)")


_REFUSALS: Final = (
    (r"invalid partition", "slurm.partition", "`sinfo -s` lists those there are"),
    (
        r"invalid account|account/partition",
        "slurm.account",
        "`sacctmgr show assoc user=$USER format=account,partition,qos` lists yours",
    ),
    (r"invalid qos", "slurm.qos", "`sacctmgr show assoc user=$USER format=account,qos` has yours"),
    (
        r"time limit is invalid|time limit specification|exceeds? .*time limit",
        "slurm.time",
        "`sinfo -o '%P %l'` has the longest of each partition",
    ),
    (
        r"invalid generic resource|gres specification|invalid gres|invalid trestype|tres spec",
        "cluster.gpus_per_node",
        "`sinfo -o '%P %N %G'` shows what nodes have, slurm.gres how to name it",
    ),
    (r"invalid feature", "slurm.constraint", "`sinfo -o '%P %N %f'` has the nodes' features"),
    (r"reservation", "slurm.reservation", "`scontrol show reservation` lists those there are"),
    (r"dependency", "slurm.dependency", "name jobs that are there"),
    (r"invalid node name", "slurm.exclude", "`sinfo -N` lists the nodes"),
    (
        (
            r"node count specification|requested node configuration|more processors requested|"
            r"memory specification|cpu count|cpus-per|task count"
        ),
        "",
        (
            "ask for no more than nodes have: cluster.nodes, spares and gpus_per_node, slurm.cpus "
            "and mem; `sinfo -o '%P %D %G %c %m'` shows what there is"
        ),
    ),
    (
        r"violates accounting|policy|submit limit|association|exceeded|too many",
        "",
        "a limit of your account or QOS forbids it; ask for less, or ask an administrator",
    ),
    (r"array", "slurm.array", "Slurm's MaxArraySize limits it"),
    (r"permission|not permitted|access", "", "you may not do this there; ask an administrator"),
    (
        r"unrecognized option|invalid option|unknown option",
        "slurm.extra",
        "this version of sbatch does not have it; leave it out",
    ),
)
"""Pattern of sbatch's complaint, key of the job file, fix."""

_TEMPORARY = re.compile(
    r"unable to contact slurm controller|socket timed out|connection refused|zero bytes were"
    r"|backup controller in standby|connection reset|no route to host|network is unreachable"
    r"|temporarily unable|resource temporarily unavailable|connection timed out"
    r"|slurm_receive_msgs?: |insane message length|controller not responding|connect failure"
    r"|unable to connect to database|database is (down|busy)|slurm_persist_conn_open",
    re.IGNORECASE,
)
"""Complaints of a controller or slurmdbd that restarts or is busy."""

_NOT_SENT = re.compile(
    r"unable to contact slurm controller|connection refused|backup controller in standby"
    r"|no route to host|network is unreachable",
    re.IGNORECASE,
)
"""Complaints after which a job was surely not submitted."""

_NOT_CONFIGURED = re.compile(
    r"establish a configuration source|DNS SRV lookup failed|failed to fetch config"
    r"|unable to (open|process) .*slurm\.conf|ClusterName needs to be specified",
    re.IGNORECASE,
)
NO_SUCH_ID: Final = re.compile(r"invalid job id|no job found|does not exist", re.IGNORECASE)
"""The complaint that a job's id is unknown."""
ENDED_ALREADY: Final = re.compile(r"already completing or completed|invalid job id", re.IGNORECASE)
"""The complaint of scancel that it came too late."""


def is_temporary(complaint: str) -> bool:
    """Return whether the same call may succeed later."""
    return bool(_TEMPORARY.search(complaint))


def was_not_sent(complaint: str) -> bool:
    """Return whether a temporary failure of sbatch came before the job could have been taken."""
    return bool(_NOT_SENT.search(complaint)) and "timed out" not in complaint.lower()


def is_not_configured(complaint: str) -> bool:
    """Return whether Slurm's programs are here but know no cluster."""
    return bool(_NOT_CONFIGURED.search(complaint))


def refusal(complaint: str) -> tuple[str, str]:
    """Return the key of the job file that sbatch complains about, if any, and a fix."""
    for pattern, key, fix in _REFUSALS:
        if re.search(pattern, complaint, re.IGNORECASE):
            return key, fix
    return "", "fix what it names, or ask an administrator of the cluster"


def reason_text(reason: str, job_id: str = "") -> str:
    """Return a pending reason for people; an unknown one is unchanged."""
    bare = reason.split(",", maxsplit=1)[0].strip()
    words = _REASONS.get(reason) or _REASONS.get(bare)
    if words is None and _LIMIT.search(bare):
        words = (
            f"a limit of its account or QOS ({bare}) is reached; it starts when your other jobs "
            "end, or never if it alone is over it"
        )
    return (words or reason).replace("{id}", job_id)


def status_of(job: SlurmJob) -> JobStatus:
    """Return the status of `job`."""
    state = _STATES.get(job.state, JobState.UNKNOWN)
    over = state.is_final
    # Slurm writes 0 for what ended with no exit code: a lost node, the time limit.
    code = 0 if state is JobState.DONE else (job.code or None) if over else None
    if state is JobState.FAILED and code == EXIT_SAVED and not job.signal:
        state = JobState.SAVED
    pending = state is JobState.PENDING
    return JobStatus(
        state=state,
        code=code,
        reason=_reason(job),
        words=_text(job, state, code),
        expected_start=job.start if pending else None,
        submitted=job.submit,
        started=None if pending else job.start,
        ended=job.end if over else None,
        ends_by=job.end if state is JobState.RUNNING else None,
        nodes=expand_nodes(job.nodes) if job.nodes else (),
        batch_host="" if pending else job.batch_host,
        suspended=job.state in ("SUSPENDED", "STOPPED"),
        restarts=job.restarts,
        source=job.source,
    )


def same_job(job: SlurmJob, ref: JobRef) -> bool:
    """Return whether Slurm's `job` is the submitted one, not a later one of the same number.

    The same time of submission is proof. A requeue changes it, but not the path of the batch
    script. Without a path, the job must not be older than ours.
    """
    if ref.id not in (job.id, job.raw_id):
        return False
    if ref.submit_time is not None and job.submit is not None:
        if abs(job.submit - ref.submit_time) <= SAME_S:
            return True
        if job.submit < ref.submit_time - CLOCK_SLACK_S:
            return False
    if job.script is not None and ref.run_dir and not ref.own_script:
        folder = PurePosixPath(ref.run_dir)
        # A task's script is in the folder of its array.
        known = {str(folder / SCRIPT), str(folder.parent / SCRIPT)}
        return not known.isdisjoint((job.script, job.script.split(" ")[0]))
    if job.submit is not None or job.end is None or ref.submit_time is None:
        return True
    return job.end >= ref.submit_time - CLOCK_SLACK_S


def mine(jobs: Sequence[SlurmJob], ref: JobRef) -> list[SlurmJob]:
    """Return the jobs that are `ref`, in their order.

    Rows without a script count if they have the name of the row with our time of submission: a
    requeue keeps the name.
    """
    found = [job for job in jobs if same_job(job, ref)]
    if ref.submit_time is None:
        return found
    times = [(abs(job.submit - ref.submit_time), job) for job in found if job.submit is not None]
    nearest = min(times, key=lambda pair: pair[0], default=None)
    if nearest is None or nearest[0] > CLOCK_SLACK_S:
        return found
    return [job for job in found if job.script is not None or job.name == nearest[1].name]


def choose(jobs: Sequence[SlurmJob], ref: JobRef) -> SlurmJob | None:
    """Return the newest of `jobs` that is `ref`, if any."""
    found = mine(jobs, ref)
    return found[-1] if found else None


def _reason(job: SlurmJob) -> str:
    """Return Slurm's own words: the state where it says more than ours, and the reason."""
    plain = job.state in ("PENDING", "RUNNING", "COMPLETED", "CANCELLED", "FAILED")
    return ": ".join(filter(None, ("" if plain else job.state, job.reason)))


def _text(job: SlurmJob, state: JobState, code: int | None) -> str:
    known = _STATE_TEXT.get(job.state, "").replace("{id}", job.id)
    if state is JobState.PENDING and not known:
        return reason_text(job.reason, job.id)
    if not known and code in EXIT_TEXTS:
        return EXIT_TEXTS[code]
    if state is JobState.UNKNOWN and not known:
        return f"Slurm says {job.state or 'nothing'}, which is not known here"
    return known
