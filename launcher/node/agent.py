"""`agent`: one node's agent under Slurm, and its watchdog should the batch host be lost.

With --no-kill a job outlives its batch host, but Slurm starts no other batch script: the job would
stay RUNNING until its time limit. So each node watches the script's beat. Once it has stopped and
the job has ended as a whole, one node does the script's work; until then an agent's parent also
asks for the save before the time limit. Where that parent is in a container, without `scontrol`, a
second step outside it runs `watchdog`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Final

from elastic_trainer.plan.running_clock import RunningClock
from elastic_trainer.record.failures import EXIT_FAILED, EXIT_SAVED
from elastic_trainer.storage.files import publish
from launcher.node.attempt import Attempt, board_of, say
from launcher.node.batch import save_by, take_over
from launcher.node.beat import asked_to_leave, period_s
from launcher.node.decide import EXIT_LEFT, BeatWatch, is_over
from launcher.platforms.retries import polled
from launcher.platforms.slurm.parse import expand_nodes
from launcher.wrap.interpreter import python_here

NODES_VARIABLE: Final = "HOLDFAST_NODES"
"""Nodes that agents start on, as n1,n2, if not all of the job's."""
LEAVING_BEATS: Final = 2
"""Beats of the batch script between two looks whether this node is to leave."""


def run_agent(
    attempt: Attempt, node: str, env: Mapping[str, str], inside: Sequence[str], *, apart: bool
) -> int:
    """Serve until the agent has ended, or longer if the batch host is lost; return its exit code.

    `inside` is the command that runs another in a container, if any. `apart`: another step has the
    watchdog, as this container lacks scontrol.
    """
    watchdog, limit = Watchdog(attempt, node, env), save_by(env)
    shutdown = env.get("HOLDFAST_SHUTDOWN_S")
    with taken_signals(TAKEN) as wait:
        command = agent_command(attempt, node, inside=inside)
        if not inside:
            say(f"{node}: agent and workers run {python_here()}")
        shutdown_s = float(shutdown) if shutdown else None
        try:
            own = as_of_one_srun(env, node, nodes_of(env))
            agent = AgentProcess(attempt, node, command, own, shutdown_s=shutdown_s)
        except OSError as error:  # of a container: its program is not on this node
            say(f"{node}: the agent cannot be started: {error}")
            attempt.note_exit(node, EXIT_FAILED)
            return EXIT_FAILED

        look_at = 0.0

        def look() -> None:
            nonlocal look_at
            watchdog.look()
            if not agent.leaving and time.monotonic() >= look_at:
                look_at = time.monotonic() + LEAVING_BEATS * period_s(env)
                if why := asked_to_leave(attempt, node):
                    agent.leave(why)
            # Slurm puts the limit off by the time in which the job is suspended.
            if watchdog.lost and limit is not None and time.time() >= limit + agent.stopped_s:
                agent.end_job("the time limit is near and the batch host is lost")

        code = agent.serve(wait, turn_s=min(1.0, period_s(env)), each_turn=look)
    if not apart:
        watchdog.finish_job()
    return code


def nodes_of(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of all agents."""
    on = env.get(NODES_VARIABLE)
    return tuple(on.split(",")) if on else expand_nodes(env.get("SLURM_JOB_NODELIST", ""))


def as_of_one_srun(env: Mapping[str, str], node: str, nodes: Sequence[str]) -> dict[str, str]:
    """Return the environment that one srun for all nodes would have given this one's task. Pure.

    Scripts read there which node they are on, and of how many. `env` is that of an srun's task for
    one node, or a few; `nodes` are those of all agents, in Slurm's order.
    """
    if node not in nodes:
        return dict(env)
    index, count = str(nodes.index(node)), str(len(nodes))
    each = "1" if len(nodes) == 1 else f"1(x{count})"
    own = {
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_GTIDS"), index),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_NPROCS", "SLURM_NTASKS"), count),
        **dict.fromkeys(("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"), count),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), each),
        "SLURM_STEP_NODELIST": env.get(NODES_VARIABLE) or env.get("SLURM_JOB_NODELIST", node),
    }
    return {**env, **own}


# -- The watchdog ----------------------------------------------------------------------------------


READ_BEATS = 5
"""A watchdog reads the beat every so many beats."""
LEASE_READS = 60
"""Readings of an unchanged lease, a second or more apart, after which nobody coordinates."""
STAND_IN_S = 60.0
"""After which the next watchdog takes a watchdog's place."""


class Watchdog:
    """A node's work for the job when the batch host is lost."""

    def __init__(self, attempt: Attempt, node: str, env: Mapping[str, str]) -> None:
        self._attempt, self._node, self._env = attempt, node, env
        self._beat_s = period_s(env)
        self._watch = BeatWatch()
        self._read_at = time.monotonic()
        self._lease: tuple[int, int] | None = None
        self._lease_still = 0

    @property
    def lost(self) -> bool:
        """Whether the batch script's beat has stopped, as far as `look` has seen."""
        return self._watch.lost

    def look(self) -> None:
        """Read the beat when it is time to."""
        if time.monotonic() < self._read_at:
            return
        self._read_at = time.monotonic() + READ_BEATS * self._beat_s
        was_lost = self.lost
        self._watch = self._watch.read(self._attempt.read_beat())
        if self.lost and not was_lost:
            say(f"{self._node}: the batch script's beat has stopped: its host is lost")

    def serve(self) -> int:
        """Watch beside the agents' step until Slurm ends the job, or this node has; return 0."""
        # Slurm sends it to all steps: it asks for a save, which is the agents' to do.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        while True:
            time.sleep(READ_BEATS * self._beat_s)
            self.look()
            # Not over, or another job has it: Slurm ends this process, some day.
            if self.lost and self._over():
                self._stand_in()
                return 0

    def finish_job(self) -> None:
        """After the agent's end: see to the job, if the batch script cannot any more."""
        if not self._lost_for_sure():
            return
        if polled(self._over, lambda over: over is not None, for_s=math.inf, every_s=1.0):
            self._stand_in()

    def _lost_for_sure(self) -> bool:
        """Say for sure, at the end, whether the batch script is lost. Takes about one beat."""
        if self.lost:
            return True
        value = self._attempt.read_beat()
        reads = 0
        # Storage that cannot be read says nothing; nor can the script then do its work.
        while reads < 3 * READ_BEATS:
            time.sleep(self._beat_s)
            now = self._attempt.read_beat()
            if now is None:
                continue
            if value is not None and now != value:
                return False
            value = now
            reads += 1
        return True

    def _over(self) -> bool | None:
        """Look once whether the whole job has ended; see `decide.is_over`."""
        try:
            state = board_of(self._attempt.run_dir)
        except (OSError, ValueError):
            return None
        seen = None if state.lease is None else (state.lease.term, state.lease.beat)
        self._lease_still = self._lease_still + 1 if seen == self._lease else 0
        self._lease = seen
        return is_over(state, self._attempt.name, lease_still=self._lease_still >= LEASE_READS)

    def _stand_in(self) -> None:
        """Act if this node is elected; else wait, for the elected one may be lost too."""
        for turn in range(1_000):
            elected = False
            with contextlib.suppress(OSError):
                path = self._attempt.dir / f"caretaker.{turn}"
                elected = publish(path, f"{self._node}\n".encode())
            if elected:
                take_over(self._attempt, self._env)
                return
            time.sleep(STAND_IN_S)  # Slurm ends this process, unless that watchdog is lost too


# -- The agent under its parent, on Slurm and in a pod --------------------------------------------


STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TAKEN: Final = (*STOPS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
LEAVE: Final = signal.SIGRTMIN
"""Asks the agent alone to leave (elastic_trainer/agent/stop_signals.py); Slurm never sends it."""
CONTAINER_PYTHON: Final = "python3"
LAST_WORDS_S: Final = 5.0
"""After each of the last SIGINTs to an agent that has not ended in time."""


class AgentProcess:
    """The process of `node`'s agent, from its start to its end.

    It is killed `shutdown_s` after the first request to end; None: never. `leaves`, asked at each
    request to end, says whether this node alone leaves; else the whole job saves and ends.
    """

    def __init__(
        self,
        attempt: Attempt,
        node: str,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        shutdown_s: float | None,
        leaves: Callable[[], bool] = lambda: False,
    ) -> None:
        self._attempt, self._node, self._leaves = attempt, node, leaves
        self._shutdown_s, self._clock = shutdown_s, RunningClock()
        self._kill_at: float | None = None
        self._job_ends = self.leaving = False
        """Whether it was asked to leave alone, and whether the job is to end."""
        self._process = subprocess.Popen(
            command,
            env=env,
            preexec_fn=_as_agent,  # noqa: PLW1509  there are no threads here
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def stopped_s(self) -> float:
        """Seconds in all in which this process was stopped (SIGSTOP)."""
        return self._clock.stopped_s

    def serve(
        self, wait: Wait, *, turn_s: float = 1.0, each_turn: Callable[[], object] = lambda: None
    ) -> int:
        """Serve until it has ended; return its exit code, which is noted in the attempt.

        `wait` waits for one of TAKEN; `each_turn` is called every `turn_s` seconds, at most one.
        """
        while not reap(self._process):
            taken = wait(turn_s)
            if taken in STOPS and self._leaves():
                self.leave(taken.name, signal.SIGTERM)
            elif taken in (*STOPS, signal.SIGUSR2):
                self.end_job(taken.name)
            elif taken == signal.SIGUSR1:
                self._process.send_signal(taken)
            if self._job_ends:
                # Again and again: it may not listen yet. It comes from Slurm too, which signals
                # every process of the step; SIGUSR2 is the one that says no more when it repeats.
                self._process.send_signal(signal.SIGUSR2)
            now = self._clock()
            if self._kill_at is not None and now >= self._kill_at:
                self._kill(wait)
            each_turn()
        code = self._process.returncode if self._process.returncode >= 0 else EXIT_FAILED
        alone = self.leaving and not self._job_ends and code == EXIT_SAVED
        with contextlib.suppress(OSError):
            self._attempt.note_exit(self._node, EXIT_LEFT if alone else code)
        return code

    def end_job(self, why: str) -> None:
        """Ask the job, through this node's agent, to save and end, from now on."""
        if not self._job_ends:
            say(f"{self._node}: {why}: the job is asked to save and to end")
        self._job_ends = True
        self._set_clock()

    def leave(self, why: str, number: signal.Signals = LEAVE) -> None:
        """Ask the agent by this signal to leave the job, which continues without this node."""
        say(f"{self._node}: {why}: it leaves the job")
        self.leaving = True
        self._process.send_signal(number)
        self._set_clock()

    def _set_clock(self) -> None:
        if self._kill_at is None and self._shutdown_s is not None:
            self._kill_at = self._clock() + self._shutdown_s

    def _kill(self, wait: Wait) -> None:
        say(f"{self._node}: the agent did not end in time")
        for _ in range(1 if self.leaving else 2):  # the second means: without saving
            self._process.send_signal(signal.SIGINT)
            deadline = self._clock() + LAST_WORDS_S
            while not reap(self._process) and self._clock() < deadline:
                wait(LAST_WORDS_S / 25)
        self._process.kill()


def agent_command(
    attempt: Attempt, node: str, *options: str, inside: Sequence[str] = ()
) -> list[str]:
    """Return the command of a node's agent.

    `inside` is the command that runs another in a container, such as `apptainer exec IMAGE`; then
    its Python is the container's.
    """
    return [
        *((*inside, CONTAINER_PYTHON) if inside else (sys.executable,)),
        *("-P", "-u", "-m", "elastic_trainer.agent", "--run-dir", str(attempt.run_dir)),
        *("--node", node, "--job", attempt.name, "--attempt", attempt.name),
        *options,
    ]


def reap(process: subprocess.Popen[bytes]) -> bool:
    """Reap ended children, orphans of PID 1 too; return whether `process` has ended."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return process.poll() is not None
        if found is None:
            return process.returncode is not None
        if found.si_pid == process.pid:
            process.wait()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(found.si_pid, 0)


def _as_agent() -> None:
    """Let the agent have signals as usual, except four: it would be killed before it listens."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, LEAVE):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)
    # `scontrol suspend` sends it two seconds before SIGSTOP. It would stop workers that the agent,
    # which it does not reach, then takes for hung; SIGSTOP stops all at once.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)


# -- Signals, waited for with a time-out -----------------------------------------------------------
# Not by sigtimedwait: where a stop (SIGSTOP, SIGCONT) breaks its wait off and the time is over by
# then, CPython up to 3.14 returns a siginfo that nobody has filled in.


Wait = Callable[[float], signal.Signals | None]
"""Returns the next signal, waiting at most so many seconds; None: there was none."""
_READ_BYTES: Final = 512


@contextlib.contextmanager
def taken_signals(numbers: Sequence[signal.Signals]) -> Iterator[Wait]:
    """Take signals within the context, also those held back before; on the main thread."""
    taken: deque[signal.Signals] = deque()
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wait(seconds: float) -> signal.Signals | None:
        if not taken and select.select([read], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                # The interpreter writes the number of each into the pipe, as a byte.
                taken.extend(map(signal.Signals, os.read(read, _READ_BYTES)))
        return taken.popleft() if taken else None

    # Handlers first, so that none that is pending takes its default action.
    before = {number: signal.signal(number, _noted) for number in numbers}
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield wait
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def _noted(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: only with a handler is anything written into the pipe."""
