"""`holdfast stacks`: what every worker of a running job is doing, from all its nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from launcher.backends.commands import Answer, Commands, SystemCommands
from launcher.errors import PermanentError, PlatformError
from launcher.ops.watching.inside import Place, Worker, step, worker_of, workers_of

LOOK = "elastic_trainer.agent.hangs.look"
TIMEOUT_S = 90.0
_AT_ONCE = 32
"""Pods that are asked at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
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

    found: tuple[Stack, ...] = ()
    silent: dict[int, str] = field(default_factory=dict)
    """Rank -> node, of workers that should run and were not found."""
    complaint: str = ""
    """What the command said, where anything is missing."""


def take_stacks(
    place: Place, *, ranks: Sequence[int] = (), commands: Commands | None = None
) -> Stacks:
    """Ask the workers of a running job what they do; nothing is stopped.

    Args:
        place: the job.
        ranks: which; none: all.
        commands: how commands are run.

    Raises:
        UserError: HF662 a rank does not run; HF650 srun is not there.
        PermanentError: nobody answers; with what was said.
    """
    run_dir = place.run.path
    expected = {rank: worker_of(run_dir, rank) for rank in ranks} if ranks else workers_of(run_dir)
    given = [str(rank) for rank in ranks]
    if place.reach is not None:
        there = {worker.node for worker in expected.values()}
        nodes = [node for node in place.nodes if node in there or not ranks]
        return _taken(_through(place, nodes, given), expected)
    if place.target == "slurm":
        there = {worker.node for worker in expected.values()}
        nodes = [node for node in place.nodes if node in there] if ranks else list(place.nodes)
        look = [place.script.python, "-P", "-m", LOOK, str(run_dir), *given]
        argv = step(place, nodes, look)
    else:
        argv = [sys.executable, "-P", "-m", LOOK, str(run_dir), *given]
    answer = (commands or SystemCommands(place.env)).run(argv, timeout_s=TIMEOUT_S)
    return _taken(answer, expected)


def _taken(answer: Answer, expected: Mapping[int, Worker]) -> Stacks:
    """Return what was said by whom, and who was silent."""
    found = sorted(_parsed(answer.out), key=lambda stack: stack.rank)
    if not found and answer.code:
        raise PermanentError(f"no worker answers: {answer.complaint}")
    answered = {stack.rank for stack in found}
    silent = {rank: one.node for rank, one in expected.items() if rank not in answered}
    complaint = answer.complaint if silent and answer.code else ""
    return Stacks(found=tuple(found), silent=silent, complaint=complaint)


def _through(place: Place, nodes: Sequence[str], given: Sequence[str]) -> Answer:
    """Ask each node through the platform, many at a time; return all they said as one answer."""
    look = [place.script.python, "-P", "-m", LOOK, place.run_dir, *given]

    def ask(node: str) -> Answer:
        assert place.reach is not None
        assert place.job is not None
        try:
            return place.reach.run_on(place.job, node, look, timeout_s=TIMEOUT_S)
        except PlatformError as error:  # of one node; the others answer
            return Answer(argv=tuple(look), code=1, out="", err=f"{node}: {error}")

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(ask, nodes))
    said = [answer.err.strip() for answer in answers if answer.code and answer.err.strip()]
    return Answer(
        argv=tuple(look),
        code=max((answer.code for answer in answers), default=0),
        out="".join(answer.out for answer in answers),
        err="\n".join(dict.fromkeys(said)),
    )


def _parsed(out: str) -> list[Stack]:
    """Return the workers' lines; set-up scripts of a site may print others."""
    found = []
    for line in out.splitlines():
        try:
            found.append(Stack(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found
