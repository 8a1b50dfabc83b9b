"""`agent`: one node's agent under Slurm, and its watchdog should the batch host be lost.

While the batch host is lost, see watchdog.py, it also asks for the save before the time limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from elastic_trainer.plan.running_clock import RunningClock
from elastic_trainer.record.failures import EXIT_FAILED, EXIT_SAVED
from launcher.node import beat
from launcher.node.attempt import Attempt, say
from launcher.node.batch import save_by
from launcher.node.decide import EXIT_LEFT
from launcher.node.leaving import asked_to_leave
from launcher.node.steps import NODES_VARIABLE, as_of_one_srun
from launcher.node.taken_signals import Wait, taken_signals
from launcher.node.watchdog import Watchdog
from launcher.platforms.slurm.parse import expand_nodes
from launcher.wrap.interpreter import python_here

LEAVING_BEATS: Final = 2
"""So many of the batch script's beats are between two looks whether this node is to leave."""


def run_agent(
    attempt: Attempt, node: str, env: Mapping[str, str], inside: Sequence[str], *, apart: bool
) -> int:
    """Serve until the agent has ended, and longer if the batch host is lost.

    Args:
        attempt: which attempt this is.
        node: this node's name.
        env: of this process.
        inside: command that runs another in a container; empty: there is none.
        apart: another step has the watchdog, for there is no scontrol in this container.

    Returns:
        The agent's exit code.
    """
    watchdog, limit = Watchdog(attempt, node, env), save_by(env)
    shutdown = env.get("HOLDFAST_SHUTDOWN_S")
    with taken_signals(TAKEN) as wait:
        command = agent_command(attempt, node, inside=inside)
        if not inside:
            say(f"{node}: agent and workers run {python_here()}")
        shutdown_s = float(shutdown) if shutdown else None
        try:
            own = as_of_one_srun(env, node, _nodes(env))
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
                look_at = time.monotonic() + LEAVING_BEATS * beat.period_s(env)
                if why := asked_to_leave(attempt, node):
                    agent.leave(why)
            # Slurm puts the limit off by the time in which the job is suspended.
            if watchdog.lost and limit is not None and time.time() >= limit + agent.stopped_s:
                agent.end_job("the time limit is near and the batch host is lost")

        code = agent.serve(wait, turn_s=min(1.0, beat.period_s(env)), each_turn=look)
    if not apart:
        watchdog.finish_job()
    return code


def _nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that agents were started on."""
    on = env.get(NODES_VARIABLE)
    return tuple(on.split(",")) if on else expand_nodes(env.get("SLURM_JOB_NODELIST", ""))


# -- The agent under its parent, on Slurm and in a pod --------------------------------------------


STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TAKEN: Final = (*STOPS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
LEAVE: Final = signal.SIGRTMIN
"""Asks the agent alone to leave (elastic_trainer/agent/stop_signals.py); Slurm never sends it."""
CONTAINER_PYTHON: Final = "python3"
LAST_WORDS_S: Final = 5.0
"""After each SIGINT of the last ones, for an agent that has not ended in time."""


class AgentProcess:
    """An agent's process, from its start to its end.

    Args:
        attempt: which attempt this is.
        node: this node's, or pod's, name.
        command: see `agent_command`.
        env: of the agent.
        shutdown_s: from the first request to end until it is killed; None: it never is.
        leaves: whether a request to end means this node alone, asked each time one comes; else
            the whole job is to save and to end.
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
        self._left = self._job_ends = False
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
        """Seconds in which this process was stopped (SIGSTOP), in all."""
        return self._clock.stopped_s

    def serve(
        self, wait: Wait, *, turn_s: float = 1.0, each_turn: Callable[[], object] = lambda: None
    ) -> int:
        """Serve until it has ended; return its exit code, which is noted in the attempt.

        Args:
            wait: for one of TAKEN.
            turn_s: seconds between two looks, at most one.
            each_turn: called that often.
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
        alone = self._left and not self._job_ends and code == EXIT_SAVED
        with contextlib.suppress(OSError):
            self._attempt.note_exit(self._node, EXIT_LEFT if alone else code)
        return code

    def end_job(self, why: str) -> None:
        """From now on ask the job, through this node's agent, to save and end."""
        if not self._job_ends:
            say(f"{self._node}: {why}: the job is asked to save and to end")
        self._job_ends = True
        self._set_clock()

    def leave(self, why: str, number: signal.Signals = LEAVE) -> None:
        """Ask the agent by this signal to leave the job, which goes on without this node."""
        say(f"{self._node}: {why}: it leaves the job")
        self._left = True
        self._process.send_signal(number)
        self._set_clock()

    @property
    def leaving(self) -> bool:
        """Whether it was asked to leave alone."""
        return self._left

    def _set_clock(self) -> None:
        if self._kill_at is None and self._shutdown_s is not None:
            self._kill_at = self._clock() + self._shutdown_s

    def _kill(self, wait: Wait) -> None:
        say(f"{self._node}: the agent did not end in time")
        for _ in range(1 if self._left else 2):  # the second means: without saving
            self._process.send_signal(signal.SIGINT)
            deadline = self._clock() + LAST_WORDS_S
            while not reap(self._process) and self._clock() < deadline:
                wait(LAST_WORDS_S / 25)
        self._process.kill()


def agent_command(
    attempt: Attempt, node: str, *options: str, inside: Sequence[str] = ()
) -> list[str]:
    """Return the command of a node's agent.

    Args:
        attempt: which attempt this is.
        node: this node's, or pod's, name.
        options: more of them.
        inside: command that runs another in a container, as `apptainer exec IMAGE`; its Python
            is then the container's own.
    """
    return [
        *((*inside, CONTAINER_PYTHON) if inside else (sys.executable,)),
        *("-P", "-u", "-m", "elastic_trainer.agent", "--run-dir", str(attempt.run_dir)),
        *("--node", node, "--job", attempt.name, "--attempt", attempt.name),
        *options,
    ]


def reap(process: subprocess.Popen[bytes]) -> bool:
    """Reap what has ended, orphans too, which are PID 1's; return whether `process` has."""
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
    """Let the agent have signals as usual, but four: it would be killed before it listens."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, LEAVE):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)
    # `scontrol suspend` sends it two seconds before SIGSTOP. It would stop workers that the agent,
    # which it does not reach, then takes for hung; SIGSTOP stops all at once.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
