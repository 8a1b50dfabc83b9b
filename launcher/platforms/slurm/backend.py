"""Slurm by its own commands: submits, watches, cancels.

A controller that does not answer makes jobs UNKNOWN, never failed. Idempotent calls are repeated
after a temporary failure; sbatch is not, unless the job was surely not taken.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from elastic_trainer.storage.files import read_json
from launcher.platforms.base import (
    NO_SUCH_JOB,
    Backend,
    JobId,
    JobRef,
    JobState,
    JobStatus,
    Machine,
    PlatformEvent,
)
from launcher.platforms.commands import CommandResult, Commands, SystemCommands, TimedOutError
from launcher.platforms.retries import polled, retried
from launcher.platforms.slurm import admission, parse, queries, status_text
from launcher.platforms.slurm.parse import SlurmJob
from launcher.platforms.slurm.queries import SlurmPatience, SlurmQueries, failure, flat, on_cluster
from launcher.platforms.slurm.status_text import SCRIPT
from launcher.record import stop_request
from launcher.spec.errors import (
    PermanentError,
    PlatformError,
    Problem,
    TemporaryError,
    UserError,
    Where,
)

_FIX: Final = (
    "run this where Slurm's commands are, as on a login node, or use `holdfast render --to slurm` "
    "here and `sbatch` there"
)
_PROGRAMS: Final = ("sbatch", "squeue", "scontrol", "sacct", "scancel", "sinfo", "sacctmgr")
_KEPT: Final = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS")
"""Variables that say where Slurm is; all others would change the calls."""
_USED: Final = re.compile("ALLOC|MIX|COMPLETING")
"""States of nodes on which something of a job still is."""
_PREFIXES: Final = ("SLURM_", "SLURMD_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")


class SlurmBackend(Backend):
    """Submits RUN/job.sbatch and watches it."""

    def __init__(
        self,
        commands: Commands | None = None,
        *,
        env: Mapping[str, str] | None = None,
        patience: SlurmPatience | None = None,
        sleep: Callable[[float], None] = time.sleep,
        wall: Callable[[], float] = time.time,
    ) -> None:
        base = os.environ if env is None else env
        self.ignored = sorted(name for name in base if name.startswith("SBATCH_"))
        """Variables of sbatch that are set here and not passed on: the job file counts."""
        self._commands = commands or SystemCommands(
            slurm_environment(base), fix=dict.fromkeys(_PROGRAMS, _FIX)
        )
        self._patience = patience or SlurmPatience()
        self._elsewhere = bool(base.get("SLURM_CLUSTERS"))
        """Jobs may go to several clusters, which are not asked before."""
        self._sleep, self._wall = sleep, wall
        self._queries = SlurmQueries(self._commands, self._patience, sleep)

    def find_problems(
        self, files: Mapping[str, str], *, without: Sequence[str] = ()
    ) -> list[Problem]:
        """Return why Slurm would take the script and never start it; see `Backend`.

        HF680 to HF684. Where a plugin of the site may change the submission, an error counts only
        if `sbatch --test-only`, which passes through it, fails too.
        """
        job = None if self._elsewhere else admission.request_of(files.get(SCRIPT, ""), without)
        if job is None:
            return []
        cluster = self._queries.cluster(job)
        found = admission.problems(job, cluster)
        if cluster.rewrites and not (found and self._test_fails(files[SCRIPT])):
            return [problem for problem in found if problem.is_warning]
        return found

    def _test_fails(self, script: str) -> bool:
        try:
            answer = self._commands.run(
                ["sbatch", "--test-only"], timeout_s=self._patience.glance_s, stdin=script
            )
        except (UserError, PlatformError):
            return False
        return bool(answer.code) and not status_text.is_temporary(answer.complaint)

    def check(self, files: Mapping[str, str]) -> list[str]:
        """Ask `sbatch --test-only` whether Slurm would take it, and when it would start.

        Raises:
            UserError: HF650 sbatch is missing; HF652 Slurm would refuse it.
            TemporaryError: the controller does not answer.
        """
        answer = self._act(["sbatch", "--test-only"], stdin=files[SCRIPT])
        if answer.code:
            raise self._refused(answer)
        found = parse.parse_test_only(answer.err + answer.out)
        if found is None:
            return [f"sbatch --test-only: {flat(answer.complaint) or 'no objection'}"]
        start, nodes = found
        when = "" if start is None else f" at {_local(start)}"
        return [f"Slurm would start it{when}" + (f" on {nodes}" if nodes else "")]

    def submit(
        self,
        run_dir: Path,
        files: Mapping[str, str],
        *,
        tasks: Sequence[int] | None = None,
        without: Sequence[str] = (),
    ) -> JobRef:
        """Submit RUN/job.sbatch; when this raises, no job of ours is in the queue.

        Raises:
            UserError: HF650 sbatch is missing; HF652 sbatch refused it, in its own words.
            TemporaryError: the controller does not answer.
            PermanentError: sbatch answered without a job's id.
        """
        assert SCRIPT in files, f"the bundle has no {SCRIPT}"
        script, before = run_dir / SCRIPT, self._wall()
        only = [] if tasks is None else [f"--array={','.join(map(str, tasks))}"]
        only += [f"--exclude={parse.excluded(files[SCRIPT], without)}"] if without else []
        try:
            answer = retried(
                lambda: self._sbatch([*only, str(script)]),
                for_s=self._patience.retry_act_s,
                sleep=self._sleep,
            )
        except _UnsureError as error:
            return self._adopted(script, run_dir, TemporaryError(f"{error}; submit it again"))
        submitted = parse.parse_submitted(answer.out)
        if submitted is None:
            said = flat(answer.complaint) or "nothing"
            lost = PermanentError(f"sbatch answered with no job's id, but: {said}")
            return self._adopted(script, run_dir, lost)
        job_id, cluster = submitted
        job = JobRef(id=JobId(job_id), submit_time=before, run_dir=str(run_dir), cluster=cluster)
        # By the script alone: this machine's clock may be anything.
        timeless = dataclasses.replace(job, submit_time=None)
        found = self.status([timeless])[timeless].submitted
        return job if found is None else dataclasses.replace(job, submit_time=found)

    def machines(self, files: Mapping[str, str] | None = None) -> list[Machine]:
        """Return the nodes, with Slurm's objections to them."""
        del files
        return queries.machines(self._commands)

    def register_server(self, of: Mapping[str, str] | JobRef) -> NoReturn:
        """Refuse: Slurm's nodes share a folder."""
        del of
        raise UserError("HF690", "cluster.fleet: on Slurm the ledger is a folder; name one")

    def drain_machines(self, names: Sequence[str], reason: str) -> None:
        """Set nodes to DRAIN; each job's batch host sees it and lets its nodes leave.

        Raises:
            UserError: HF650 scontrol is missing; HF693 Slurm refuses: the user is not an operator.
            TemporaryError: the controller is away.
        """
        argv = ["scontrol", "update", f"NodeName={','.join(names)}", "State=DRAIN"]
        try:
            queries.answer_of(self._commands, [*argv, f"Reason={reason}"])
        except PermanentError as error:
            raise UserError("HF693", f"Slurm does not drain them: {error}") from error

    def still_on(self, names: Sequence[str]) -> dict[str, str]:
        """Return the nodes that Slurm has given to a job, with their states."""
        argv = ["scontrol", "--oneliner", "show", "node", ",".join(names)]
        nodes = parse.records(queries.answer_of(self._commands, argv))
        states = {node.get("NodeName", ""): node.get("State", "") for node in nodes}
        return {name: state.lower() for name, state in states.items() if _USED.search(state)}

    def task_of(self, job: JobRef, index: int, run_dir: Path) -> JobRef:
        """Return the submission of one task of an array: 123_4."""
        return dataclasses.replace(job, id=JobId(f"{job.id}_{index}"), run_dir=str(run_dir))

    def status(self, jobs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        """Return the status of each job; see `Backend.status`.

        Raises:
            UserError: HF650 Slurm is not installed here.
        """
        answers: dict[JobRef, JobStatus] = {}
        for cluster in dict.fromkeys(job.cluster for job in jobs):
            asked = [job for job in jobs if job.cluster == cluster]
            known, away = self._queries.jobs(asked, cluster)
            for job in asked:
                found = known.get(job)
                answers[job] = _unknown(away, job) if found is None else _status(found, job)
        return answers

    def ask_to_save(self, job: JobRef) -> bool:
        """Send USR2 to all steps, thus the agents, and to the batch shell; False: it does not run.

        The batch shell may be lost with its host, or may not have started its steps yet. Only a
        running job gets it: scancel tries for minutes to signal one that waits.
        """
        if self.status([job])[job].state is not JobState.RUNNING:
            return False
        steps, batch = (self._asked_to_save(job, *whom) for whom in ((), ("--batch",)))
        return steps or batch

    def _asked_to_save(self, job: JobRef, *whom: str) -> bool:
        argv = ["scancel", *whom, "--signal=USR2", *on_cluster(job.cluster), job.id]
        try:
            answer = self._commands.run(argv, timeout_s=self._patience.query_s)
        except TimedOutError:
            return False  # it was put back into the queue a moment ago
        if answer.code and not status_text.ENDED_ALREADY.search(answer.err):
            raise failure(answer)
        return answer.code == 0

    def cancel(self, job: JobRef) -> None:
        """End the job by scancel, if it has not ended already."""
        answer = self._act(["scancel", *on_cluster(job.cluster), job.id])
        if answer.code and not status_text.ENDED_ALREADY.search(answer.err):
            raise failure(answer)

    def output_files(self, job: JobRef) -> list[Path]:
        """Return the logs of the batch script, one for each submission or requeue."""
        run_dir, task = Path(job.run_dir), job.id.partition("_")[2]
        logs = run_dir.parent / "logs" if task else run_dir / "logs"
        found = logs.glob(f"slurm-*_{task}.out" if task else "slurm-*.out")
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def describe(self, job: JobRef) -> dict[str, str]:
        """Return the fields of `scontrol show job`, else those of sacct."""
        if fields := self._queries.fields(job):
            return {key: _readable(key, value) for key, value in fields.items()}
        if not (rows := self._queries.accounts(job)):
            return {}
        last = rows[-1]
        shown = {
            "JobId": last.id,
            "JobName": last.name or "",
            "JobState": last.state,
            "Reason": last.reason,
            "NodeList": last.nodes,
        }
        return {key: value for key, value in shown.items() if value}

    def events(self, job: JobRef) -> list[PlatformEvent]:
        """Return when it was queued, started and ended, by sacct and scontrol."""
        rows = self._queries.accounts(job)
        now = parse.of_scontrol(self._queries.fields(job))
        if now is not None and not any(row.submit == now.submit for row in rows):
            rows.append(now)
        found = [event for row in rows for event in _events(row)]
        return sorted(dict.fromkeys(found), key=lambda event: event.t_unix)

    def _act(self, argv: list[str], *, stdin: str = "") -> CommandResult:
        """Run an idempotent command, again after temporary failures."""

        def act() -> CommandResult:
            answer = self._commands.run(argv, timeout_s=self._patience.act_s, stdin=stdin)
            if answer.code and status_text.is_temporary(answer.complaint):
                raise failure(answer)
            return answer

        return retried(act, for_s=self._patience.retry_act_s, sleep=self._sleep)

    def _sbatch(self, argv: Sequence[str]) -> CommandResult:
        """Run sbatch once. A job that surely was not taken may be retried; else it is unsure."""
        try:
            answer = self._commands.run(
                ["sbatch", "--parsable", *argv], timeout_s=self._patience.act_s
            )
        except TimedOutError as error:
            raise _UnsureError(str(error)) from error
        if answer.code == 0:
            return answer
        if status_text.is_temporary(answer.complaint):
            if status_text.was_not_sent(answer.complaint):
                raise failure(answer)
            raise _UnsureError(str(failure(answer)))
        raise self._refused(answer)

    def _adopted(self, script: Path, run_dir: Path, lost: PlatformError) -> JobRef:
        """Look for the job of a script whose sbatch broke off: it may have been taken."""
        job = polled(
            lambda: self._queries.job_of(str(script)),
            lambda found: found is not None,
            for_s=self._patience.adopt_s,
            every_s=2.0,
            sleep=self._sleep,
        )
        if job is None:
            raise lost
        return JobRef(id=JobId(job.id), submit_time=job.submit, run_dir=str(run_dir))

    def _refused(self, answer: CommandResult) -> UserError | PlatformError:
        """Return the error for sbatch's refusal, in its own words."""
        said = flat(answer.complaint) or f"exit code {answer.code}"
        if status_text.is_not_configured(said):
            return failure(answer)
        key, fix = status_text.refusal(said)
        if key == "slurm.partition" and (names := self._queries.partitions()):
            listed = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
            fix = f"there are {listed}"
        return UserError("HF652", f"Slurm refuses the job: {said}; {fix}", where=Where(key=key))


class _UnsureError(PermanentError):
    """Sbatch broke off: the controller may have taken the job. Never retried blindly."""


def outside_jobs(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without Slurm's variables.

    They override options and scripts (SBATCH_PARTITION, SQUEUE_FORMAT), or are of another job.
    """
    return {
        name: value
        for name, value in env.items()
        if name in _KEPT or not name.startswith(_PREFIXES)
    }


def slurm_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of our queries: times in Unix seconds, messages in English."""
    return {**outside_jobs(env), "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


def _status(found: SlurmJob, job: JobRef) -> JobStatus:
    """Return the status of a job, with the nodes that it has lost."""
    status = status_text.status_of(found)
    if status.state is not JobState.RUNNING or not status.nodes:
        return status
    starts = Path(job.run_dir).glob(f"attempts/{found.raw_id}.*/begin.json")
    begun = max(map(read_json, starts), key=lambda raw: raw.get("t_unix", 0.0), default={})
    given = begun.get("nodes")
    if not isinstance(given, str) or begun["t_unix"] < (status.started or 0.0) - status_text.SAME_S:
        return status  # it has not begun yet, as after a requeue
    lost = [name for name in parse.expand_nodes(given) if name not in status.nodes]
    return dataclasses.replace(status, nodes_lost=tuple(lost))


def _unknown(away: str, job: JobRef) -> JobStatus:
    """Return the status of a job that Slurm does not know."""
    if not away and stop_request.asked(Path(job.run_dir)):
        # Slurm keeps no trace at all of a task that is cancelled while it waits with others.
        words = "it was cancelled, and Slurm knows nothing of it (any more)"
        return JobStatus(state=JobState.CANCELLED, reason=NO_SUCH_JOB, words=words)
    if away:
        return JobStatus(state=JobState.UNKNOWN, reason=away, words="nothing is known of it now")
    words = "Slurm does not know it (any more), and keeps no accounts that do"
    return JobStatus(state=JobState.UNKNOWN, reason=NO_SUCH_JOB, words=words)


def _readable(key: str, value: str) -> str:
    """Return a field of scontrol, with Unix seconds as local time."""
    t_unix = parse.parse_time(value) if key.endswith(("Time", "Eval")) else None
    return value if t_unix is None else _local(t_unix)


def _local(t_unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t_unix))


def _events(job: SlurmJob) -> list[PlatformEvent]:
    status = status_text.status_of(job)
    found = []
    if job.submit is not None:
        found.append(PlatformEvent(t_unix=job.submit, text="queued"))
    if status.started is not None:
        found.append(PlatformEvent(t_unix=status.started, text=f"started on {job.nodes}"))
    if status.ended is not None:
        code = "" if status.code is None else f" with code {status.code}"
        found.append(PlatformEvent(t_unix=status.ended, text=f"ended{code}: {job.state}"))
    return found
