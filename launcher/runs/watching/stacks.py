"""`holdfast stacks`: what every worker of a running job is doing, from all its nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from launcher.platforms.base import RemoteExec
from launcher.platforms.commands import CommandResult, Commands, SystemCommands
from launcher.runs.watching.remote_exec import RunningJob, Worker, step, worker_of, workers_of
from launcher.spec.errors import PermanentError, PlatformError

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
    """Of all workers that were asked."""

    found: tuple[WorkerStack, ...] = ()
    silent: dict[int, str] = field(default_factory=dict)
    """Rank -> node, of workers that should run and were not found."""
    complaint: str = ""
    """What the command said, where anything is missing."""


def take_stacks(
    running: RunningJob, *, ranks: Sequence[int] = (), commands: Commands | None = None
) -> Stacks:
    """Ask the workers of a running job what they do; nothing is stopped.

    Args:
        running: the job.
        ranks: which; none: all.
        commands: how commands are run.

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
            piece = WorkerStack(**json.loads(line))
        except (ValueError, TypeError):
            continue
        key = piece.node, piece.pid
        found[key] = piece
        texts.setdefault(key, []).append(piece.text)
    return [replace(stack, text="".join(texts[key])) for key, stack in found.items()]
