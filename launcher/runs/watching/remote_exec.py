"""Gets to the workers of a running job: where each rank is, a step beside it, its stacks."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_trainer.storage.typed import build, parse_json
from launcher.platforms.base import JobRef, JobState, RemoteExec
from launcher.platforms.commands import CommandResult, Commands, SystemCommands
from launcher.platforms.local import python_path
from launcher.platforms.slurm.backend import outside_jobs
from launcher.platforms.targets import target_named
from launcher.record.files import Worker, workers_of
from launcher.runs.fetching import fetched
from launcher.runs.run_dir import AGENTS_SCRIPT
from launcher.runs.runs import StoredRun, current_job
from launcher.runs.watching.run_status import target_of
from launcher.spec.errors import PermanentError, PlatformError, UserError

SCRIPT = "job.sbatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStart:
    """How the submitted script starts the nodes' processes."""

    python: str
    """Interpreter with holdfast, in the container if the job has one."""
    options: tuple[str, ...] = ()
    """Of srun, for the container (pyxis)."""
    prefix: tuple[str, ...] = ()
    """Command that runs another one in the container (apptainer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A running job, and what is needed to start something beside it."""

    run: StoredRun
    target: str
    job: JobRef
    nodes: tuple[str, ...]
    start: StepStart
    env: Mapping[str, str]
    run_dir: str
    """As the nodes see it."""
    remote: RemoteExec | None = None
    """The platform, where nodes are reached through it: `nodes` are pods then."""


def running_job(run: StoredRun) -> RunningJob:
    """Return the job of a run that runs now.

    Raises:
        UserError: HF662 it is not running; HF613 its script cannot be read.
        PlatformError: the platform is away.
    """
    target = target_of(run)
    job = current_job(run)
    backend = target_named(target).load_backend()
    status = backend.status([job])[job]
    if status.state is not JobState.RUNNING:
        why = f" ({status.reason})" if status.reason else ""
        raise UserError(
            "HF662",
            f"{run.shown} is {status.state}{why}: nothing of it runs now; holdfast why "
            f"{run.shown} says more",
        )
    env = {**outside_jobs(os.environ), "PYTHONPATH": python_path()}
    start, run_dir, remote = StepStart(python=sys.executable), str(run.path), None
    if isinstance(backend, RemoteExec):
        fetched(backend, job)  # who runs where is in the record
        python, run_dir = backend.remote_paths(job)
        start, remote = StepStart(python=python), backend
    elif target == "slurm":
        # A task of an array has its script a folder higher, a wrapped script what it reads.
        places = (run.path / SCRIPT, run.path / AGENTS_SCRIPT, run.path.parent / SCRIPT)
        path = next((place for place in places if place.is_file()), places[0])
        try:
            start = read_script(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError("HF613", f"{path} cannot be read: {error}") from error
    return RunningJob(
        run=run,
        target=target,
        job=job,
        nodes=status.nodes,
        start=start,
        env=env,
        run_dir=run_dir,
        remote=remote,
    )


def read_script(text: str) -> StepStart:
    """Return what a rendered script says. Pure.

    Raises:
        ValueError: it is another script.
    """
    python = re.search(r"^hf_python=(.*)$", text, re.MULTILINE)
    step = re.search(r"^ *srun (?:.*\\\n)*.*&$", text, re.MULTILINE)
    if python is None or step is None:
        raise ValueError("it is not a script of holdfast's")
    words = shlex.split(step[0].replace("\\\n", " "))
    module = words.index("launcher.node")
    container = [word for word in words[:module] if word.startswith(("--container", "--no-cont"))]
    inside = words[words.index("--") + 1 : -1] if "--" in words[module:] else []
    if inside:
        return StepStart(python="python3", prefix=tuple(inside))
    own = shlex.split(python[1])[0]
    # With pyxis the whole step is in the container, where its own Python is.
    found = words[module - 3] if container else own
    return StepStart(python=found, options=tuple(container))


def worker_of(run_dir: Path, rank: int) -> Worker:
    """Return the worker of one rank.

    Raises:
        UserError: HF662 it does not run now.
    """
    workers = workers_of(run_dir)
    if rank not in workers:
        there = f"ranks {min(workers)} to {max(workers)} run" if workers else "no worker runs"
        raise UserError("HF662", f"rank {rank} does not run now; {there}")
    return workers[rank]


def step(
    running: RunningJob, nodes: Sequence[str], command: Sequence[str], *, terminal: bool = False
) -> list[str]:
    """Return the command that runs `command` once on each of `nodes`, beside the job's own step."""
    count = len(nodes)
    return [
        *("srun", f"--jobid={running.job.id}", "--overlap", f"--nodelist={','.join(nodes)}"),
        *(f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        *("--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--export=ALL"),
        *(("--pty",) if terminal else ()),
        *running.start.options,
        *running.start.prefix,
        *command,
    ]


LOOK = "elastic_trainer.agent.hangs.look"
TIMEOUT_S = 90.0
_AT_ONCE = 32
"""Pods that are asked at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStack:
    """What one worker does."""

    rank: int
    pid: int
    epoch: int
    node: str
    host: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The stacks of all workers that were asked."""

    found: tuple[WorkerStack, ...] = ()
    silent: dict[int, str] = field(default_factory=dict)
    """Rank -> node, of workers that should run and were not found."""
    complaint: str = ""
    """What the command said, where anything is missing."""


def take_stacks(
    running: RunningJob, *, ranks: Sequence[int] = (), commands: Commands | None = None
) -> Stacks:
    """Ask the workers of a running job, all or those of `ranks`, what they do; none is stopped.

    Raises:
        UserError: HF662 a rank does not run; HF650 srun is not there.
        PermanentError: nobody answers; with what was said.
    """
    run_dir = running.run.path
    expected = {rank: worker_of(run_dir, rank) for rank in ranks} if ranks else workers_of(run_dir)
    look = [running.start.python, "-P", "-m", LOOK, running.run_dir, *map(str, ranks)]
    there = {worker.node for worker in expected.values()}
    nodes = [node for node in running.nodes if node in there or not ranks]
    if running.remote is not None:
        return _taken(_through(running, running.remote, nodes, look), expected)
    argv = step(running, nodes, look) if running.target == "slurm" else look
    answer = (commands or SystemCommands(running.env)).run(argv, timeout_s=TIMEOUT_S)
    return _taken(answer, expected)


def _taken(answer: CommandResult, expected: Mapping[int, Worker]) -> Stacks:
    """Return the answers by node, and who was silent."""
    found = sorted(_parsed(answer.out), key=lambda stack: stack.rank)
    if not found and answer.code:
        raise PermanentError(f"no worker answers: {answer.complaint}")
    answered = {stack.rank for stack in found}
    silent = {rank: one.node for rank, one in expected.items() if rank not in answered}
    complaint = answer.complaint if silent and answer.code else ""
    return Stacks(found=tuple(found), silent=silent, complaint=complaint)


def _through(
    running: RunningJob, remote: RemoteExec, nodes: Sequence[str], look: Sequence[str]
) -> CommandResult:
    """Ask each node through the platform, many at a time; return all they said as one answer."""

    def ask(node: str) -> CommandResult:
        try:
            return remote.run_on(running.job, node, look, timeout_s=TIMEOUT_S)
        except PlatformError as error:  # of one node; the others answer
            return CommandResult(argv=tuple(look), code=1, out="", err=f"{node}: {error}")

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(ask, nodes))
    said = [answer.err.strip() for answer in answers if answer.code and answer.err.strip()]
    return CommandResult(
        argv=tuple(look),
        code=max((answer.code for answer in answers), default=0),
        out="".join(answer.out for answer in answers),
        err="\n".join(dict.fromkeys(said)),
    )


def _parsed(out: str) -> list[WorkerStack]:
    """Return the workers, each put together from its lines; set-up scripts may print others."""
    found: dict[tuple[str, int], WorkerStack] = {}
    texts: dict[tuple[str, int], list[str]] = {}
    for line in out.split("\n"):
        try:
            piece = build(WorkerStack, parse_json(line))
        except ValueError:
            continue
        key = piece.node, piece.pid
        found[key] = piece
        texts.setdefault(key, []).append(piece.text)
    return [replace(stack, text="".join(texts[key])) for key, stack in found.items()]
