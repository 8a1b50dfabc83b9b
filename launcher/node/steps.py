"""`steps`: runs the agents' srun, once for each node or a few of them, and again where it is lost.

Slurm aborts a whole step when one of its nodes reboots before it was known to be down (srun:
"Aborting, io error and missing step"), --no-kill or not. So nodes share no step as long as
MOST_STEPS suffice. A lost step takes the memory of its agents with it; the others continue, and the
node, which is still the job's, joins them again.

An srun that starts while the controller is away ("Unable to confirm allocation", "Unable to create
step", "Socket timed out") has not begun, and loses nothing: it is started again. One that Slurm
refuses, or that a node cannot carry out, is not a loss either: where no agent has ever begun, its
words are the job's error.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from elastic_trainer.record.failures import EXIT_BUDGET_USED_UP, EXIT_DONE, EXIT_FAILED, EXIT_SAVED
from launcher.node.agent import NODES_VARIABLE, Wait, taken_signals
from launcher.node.attempt import Attempt, board_of, committed_step, note, say
from launcher.node.decide import a_few, began, end_of, pause_s
from launcher.node.output import shown
from launcher.platforms.commands import Commands, SystemCommands
from launcher.platforms.slurm.parse import expand_nodes
from launcher.spec.errors import HoldfastError, UserError

MOST_STEPS: Final = 64
"""An srun is two processes of 3.7 MB and five threads together on the batch host, and 0.02 s of the
controller (measured: 32 nodes have all begun after 1.0 s, with one srun for all after 0.4 s). With
more nodes, so many share a step."""
ASKS: Final = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
TURN_S: Final = 1.0
SQUEUE_S: Final = 60.0
FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 60.0
LIVED_S: Final = 300.0
"""A step that lived so long begins again with the shortest pause."""
LONE_TRIES: Final = 3
"""Tries of all nodes while none runs; then the job ends, and is requeued."""
MOST_STARTS: Final = 10
"""Starts in a row of a step that is lost at once; then the job continues without it."""
AWAY_PAUSE_S: Final = 10.0
"""Before an srun that could not reach the controller is started again."""
AWAY_S: Final = 3600.0
"""Then such an srun counts as lost. Ending the job any sooner would gain nothing: it takes the
controller to requeue it."""
_OF_ALL: Final = frozenset({EXIT_DONE, EXIT_SAVED, EXIT_BUDGET_USED_UP})
"""Codes that agents have from the coordinator: the job is over."""


class StepProcess(Protocol):
    """One srun."""

    @property
    def said(self) -> str:
        """Its stderr."""

    def poll(self) -> int | None:
        """Return its exit code; None: it runs."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, which it passes on to its tasks."""


@dataclass(slots=True)
class Step:
    """Nodes that share an srun."""

    nodes: tuple[str, ...]
    process: StepProcess | None = None
    said: str = ""
    """Last words of the last srun, and of the node's log."""
    began: float = 0.0
    lost: int = 0
    """Times in a row."""
    away: float | None = None
    """Since when its sruns have not reached the controller."""
    due: float = 0.0
    """When it is started again."""


def grouped(nodes: Sequence[str], most: int = MOST_STEPS) -> list[tuple[str, ...]]:
    """Return `nodes` in at most `most` groups whose sizes differ by at most one. Pure.

    Nodes that share a group are lost together, so an image in memory and its copy should not share
    one. Copies are a whole number of replicas further on: mostly one node, or a power of two. Nodes
    at such distances are in different groups, since each round of `most` begins one group later.
    """
    groups: list[list[str]] = [[] for _ in range(min(most, len(nodes)))]
    for index, node in enumerate(nodes):
        groups[(index + index // most) % len(groups)].append(node)
    return [tuple(group) for group in groups]


def command_of(command: Sequence[str], nodes: Sequence[str], *, again: bool) -> list[str]:
    """Return srun's `command` for these nodes. Pure.

    `again`: the step before may not have been cleared away there yet.
    """
    count = len(nodes)
    own = [f"--nodelist={','.join(nodes)}", f"--nodes={count}", f"--ntasks={count}"]
    return [command[0], *own, *(["--overlap"] if again else []), *command[1:]]


def to_start_again(
    nodes: Sequence[str], exits: Mapping[str, int], *, over: bool, allocated: Collection[str] | None
) -> tuple[str, ...]:
    """Return the nodes of a step whose agents are to be started again. Pure.

    `exits` has the codes of the agents that could say how they ended. `over`: the job as a whole
    has ended, or was asked to. `allocated` has the job's nodes now; None: unknown.
    """
    if over or _OF_ALL.intersection(exits.values()):
        return ()
    silent = [node for node in nodes if node not in exits]
    return tuple(node for node in silent if allocated is None or node in allocated)


class SlurmSteps:
    """All steps of an attempt.

    `command` is srun with its options and what it runs, without the nodes; `start` starts one,
    which passes SIGUSR2 on to its tasks.
    """

    def __init__(
        self,
        attempt: Attempt,
        nodes: Sequence[str],
        command: Sequence[str],
        *,
        start: Callable[[Sequence[str]], StepProcess],
        commands: Commands,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt, self._command = attempt, command
        self._start, self._commands, self._mono = start, commands, mono
        self._steps = [Step(nodes) for nodes in grouped(nodes)]
        self._asked = False
        self._code = 0

    def serve(self, wait: Wait) -> int:
        """Serve until no step is left; return the highest exit code of an srun."""
        while self._steps:
            self._look()
            if self._steps and wait(TURN_S) in ASKS:
                self._ask()
        return self._code

    def _ask(self) -> None:
        """Have the agents save and end; nothing is started any more."""
        self._asked = True
        for step in self._steps:
            if step.process is not None:
                step.process.send_signal(signal.SIGUSR2)

    def _look(self) -> None:
        """Start what is due, and see to what has ended."""
        ended = []
        for step in list(self._steps):
            if step.process is not None and (code := step.process.poll()) is not None:
                said = (step.process.said, self._attempt.last_words(step.nodes))
                step.said = "; ".join(filter(None, said))
                step.process = None
                self._code = max(self._code, code if code >= 0 else EXIT_FAILED)
                ended.append((step, code))
        if ended:
            self._see_to(ended)
        waiting = [step for step in self._steps if step.process is None]
        if waiting and len(waiting) == len(self._steps) and self._give_up():
            return
        hopeless = all(step.process is None and step.lost > LONE_TRIES for step in self._steps)
        if waiting and (hopeless or self._over()):
            self._steps = [step for step in self._steps if step not in waiting]
            return
        for step in waiting:
            if self._mono() >= step.due:
                command = command_of(self._command, step.nodes, again=step.lost > 0)
                step.process, step.began = self._start(command), self._mono()

    def _see_to(self, ended: Sequence[tuple[Step, int]]) -> None:
        """Start again what has ended without its agents' word, unless all is over."""
        exits, over = self._attempt.exits(), self._over()

        def to_start(step: Step, allocated: Collection[str] | None) -> tuple[str, ...]:
            return to_start_again(step.nodes, exits, over=over, allocated=allocated)

        silent = [to_start(step, None) for step, _ in ended]
        allocated = self._allocated() if any(silent) else None
        unreached: list[str] = []
        for (step, code), nodes in zip(ended, silent, strict=True):
            not_begun = code == EXIT_FAILED and nodes == step.nodes and allocated is None
            step.away = (step.began if step.away is None else step.away) if not_begun else None
            if step.away is not None and self._mono() - step.away < AWAY_S:
                step.due = self._mono() + AWAY_PAUSE_S
                unreached += nodes
            else:
                self._lost(step, code, nodes, to_start(step, allocated))
        if unreached:
            say(
                f"{a_few(unreached)}: srun could not start the agents, and Slurm's controller does "
                f"not answer; retrying in {AWAY_PAUSE_S:g} s"
            )

    def _lost(self, step: Step, code: int, silent: Sequence[str], again: tuple[str, ...]) -> None:
        """Start a step again on the nodes `again`, the `silent` ones that the job still has."""
        if gone := [node for node in silent if node not in again]:
            say(f"{a_few(gone)}: lost, and no longer among the job's nodes")
        if not again:
            self._steps.remove(step)
            return
        step.nodes = again
        step.lost = 1 if self._mono() - step.began >= LIVED_S else step.lost + 1
        if step.lost >= MOST_STARTS:
            say(f"{a_few(again)}: {step.lost} starts in a row have failed; it is left out")
            self._steps.remove(step)
            return
        pause = pause_s(step.lost, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        step.due = self._mono() + pause
        alone = all(other.process is None for other in self._steps)
        state = (
            self._checkpoint() if alone else "the others continue with the copies that they keep"
        )
        what = (
            f"the step ended before its agents reported (srun: {code}), and their memory is lost"
            if self._began()
            else f"no agent has begun there (srun: {code})"
        )
        say(f"{a_few(again)}: {what}; {state}; restarted there in {pause:g} s")
        note(self._attempt, "step.lost", nodes=list(again), code=code, alone=alone)

    def _give_up(self) -> bool:
        """End all if no agent has ever begun and none ever will; return whether so."""
        given_up = [
            (refused(step.said), step.lost > LONE_TRIES) for step in self._steps if step.lost
        ]
        certain = all(for_good or (tried and for_good is None) for for_good, tried in given_up)
        if len(given_up) < len(self._steps) or not certain or self._began():
            return False
        said = {step.said for step in self._steps}
        nodes = [node for step in self._steps for node in step.nodes]
        self._attempt.note_refusal(f"{a_few(nodes)}: {min(said)}")
        self._steps = []
        return True

    def _began(self) -> bool:
        """Return whether an agent of this attempt has got as far as the board."""
        try:
            state = board_of(self._attempt.run_dir)
        except (OSError, ValueError):
            return True
        return began(state, self._attempt.name)

    def _over(self) -> bool:
        if self._asked:
            return True
        try:
            state = board_of(self._attempt.run_dir)
        except (OSError, ValueError):
            return False
        return state.finished or end_of(state, self._attempt.name) is not None

    def _checkpoint(self) -> str:
        """Say where a run continues that has lost all of its agents."""
        try:
            step = committed_step(board_of(self._attempt.run_dir))
        except (OSError, ValueError) as error:
            return f"no agent is left, and the board cannot be read: {error}"
        found = "there is no checkpoint" if step < 0 else f"the newest checkpoint is step {step}"
        return f"no agent is left, so storage counts: {found}"

    def _allocated(self) -> set[str] | None:
        """Return the job's nodes now; None: the controller does not say."""
        asked = ["squeue", "--noheader", f"--jobs={self._attempt.slurm_id}", "--format=%N"]
        try:
            answer = self._commands.run(asked, timeout_s=SQUEUE_S)
        except HoldfastError:
            return None
        return None if answer.code else set(expand_nodes(answer.out.strip())) or None


def serve(
    attempt: Attempt,
    env: Mapping[str, str],
    command: Sequence[str],
    on: str | None = None,
    *,
    show: str | None = None,
) -> int:
    """Run `command`, an srun, on the nodes of the job; return the highest exit code.

    `on` names nodes, as n1,n2; None: all of the job. What they log is added to the file `show`,
    which is stdout if it is -.

    Raises:
        UserError: HF673, the environment is not that of a batch script.
    """
    nodes = tuple(on.split(",")) if on else expand_nodes(env.get("SLURM_JOB_NODELIST", ""))
    if not nodes:
        raise UserError("HF673", "SLURM_JOB_NODELIST names no node: only a batch script calls this")

    command, own = of_one_node(command, env)
    if on:
        own[NODES_VARIABLE] = on

    def start(argv: Sequence[str]) -> Srun:
        return Srun(argv, own)

    with (
        taken_signals((*ASKS, signal.SIGCHLD)) as wait,
        _opened(show or "-") as file,
        shown(attempt.logs, nodes if show else (), file),
    ):
        steps = SlurmSteps(attempt, nodes, command, start=start, commands=SystemCommands())
        return steps.serve(wait)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdout.buffer
        return
    with Path(path).open("ab") as file:
        yield file


# -- One srun -------------------------------------------------------------------------------------


TOTAL_GPUS: Final = "SLURM_GPUS"
"""sbatch --gpus: the total of the job's nodes, which an srun for one node would ask for."""
_ASKS_FOR_GPUS: Final = re.compile(r"--(gpus-per-\w+|gres|tres-per-\w+)(=.*)?")
_REFUSED: Final = re.compile(
    r"mutually exclusive|invalid|unrecogni[sz]ed|ambiguous|excluded list|job not submitted"
    r"|not available|not permitted|than permitted",
    re.IGNORECASE,
)
"""Slurm's words about an srun that no try would change (src/common/slurm_errno.c, opt.c)."""
_PASSING: Final = re.compile(
    r"timed? ?out|tempora|unable to con|communication|connection|busy|node fail|failure on"
    r"|aborting|zero bytes|configuring|prolog|completing|invalid job id|drained|requeue|cancelled"
    r"|credential|expired|retry|no route|unreachable|not responding|slurmctld"
    r"|error code: (429|5..)",
    re.IGNORECASE,
)
"""Slurm's words when nodes or the controller are away, or the job ends."""
_LONGEST: Final = 2000


class Srun:
    """A started srun, whose stderr is passed on and kept."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  for as long as this lives
        self._shown = 0
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stderr=self._words, env=env
        )

    def poll(self) -> int | None:
        """Return its exit code; None: it runs. Passes on its stderr, so call it again and again."""
        code = self._process.poll()
        while new := os.pread(self._words.fileno(), 65536, self._shown):
            self._shown += len(new)
            sys.stderr.buffer.write(new)
            sys.stderr.flush()
        return code

    def send_signal(self, number: int) -> None:
        """See StepProcess."""
        self._process.send_signal(number)

    @property
    def said(self) -> str:
        """See StepProcess."""
        begin = max(0, self._shown - _LONGEST)
        text = os.pread(self._words.fileno(), _LONGEST, begin).decode(errors="replace")
        return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def refused(said: str) -> bool | None:
    """Return whether Slurm refuses an srun for good; None: its words do not say. Pure."""
    # An srun that waited for its turn has said so, whatever came of it.
    said = "; ".join(line for line in said.split("; ") if "temporarily disabled" not in line)
    if not said or _PASSING.search(said):
        return False
    return True if _REFUSED.search(said) else None


def of_one_node(command: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return an srun's command and environment, with totals of the job as each node's part. Pure.

    The last option of `command` is --output.
    """
    own = {name: value for name, value in env.items() if name != TOTAL_GPUS}
    kind, colon, _ = env.get(TOTAL_GPUS, "").rpartition(":")
    here = env.get("SLURM_GPUS_ON_NODE", "")
    options = itertools.takewhile(lambda word: not word.startswith("--output="), command)
    if TOTAL_GPUS not in env or not here or any(map(_ASKS_FOR_GPUS.fullmatch, options)):
        return list(command), own
    return [command[0], f"--gpus-per-node={kind}{colon}{here}", *command[1:]], own
