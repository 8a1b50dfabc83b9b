"""`agent`: starts one node's elastic agent, passes signals on, and is the caretaker.

While the batch host is lost, see care.py, it also asks for the save before the time limit.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from elastic_trainer.failures import EXIT_FAILED
from elastic_trainer.running_clock import RunningClock
from launcher.node import beat
from launcher.node.attempt import Attempt
from launcher.node.care import Caretaker
from launcher.node.end import save_by
from launcher.node.say import say
from launcher.node.taken_signals import TakenSignals

CONTAINER_PYTHON = "python3"
TAKEN = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
LAST_WORDS_S = 10.0
"""Between the first SIGTERM and SIGKILL, for an agent that has not ended in time."""


class NodeAgent:
    """One node's agent process and its caretaker.

    Args:
        attempt: which attempt this is.
        node: this node's name.
        env: of this process.
        prefix: command that runs another in a container: `apptainer exec IMAGE`; its Python is
            then the container's own.
        apart: another step has the caretaker, for there is no scontrol in this container.
    """

    def __init__(
        self,
        attempt: Attempt,
        node: str,
        env: Mapping[str, str],
        prefix: Sequence[str] = (),
        *,
        apart: bool = False,
    ) -> None:
        self._attempt, self._node, self._env, self._prefix = attempt, node, env, prefix
        self._beat_s = beat.period_s(env)
        self._care, self._apart = Caretaker(attempt, node, env), apart
        self._save_by = save_by(env)
        self._clock = RunningClock()
        self._kill_at: float | None = None
        self._asked = False

    def run(self) -> int:
        """Serve until the agent has ended, and longer if the batch host is lost.

        Returns:
            The agent's exit code.
        """
        # Before signals wait: while the environment is copied there is nothing to save.
        python, env = self._start()
        with TakenSignals(TAKEN) as signals:
            process = self._serve(self._command(python), env, signals)
        code = process.returncode if process.returncode >= 0 else EXIT_FAILED
        with contextlib.suppress(OSError):
            self._attempt.note_exit(self._node, code)
        if not self._apart:
            self._care.take_care()
        return code

    def _serve(
        self, command: Sequence[str], env: Mapping[str, str], signals: TakenSignals
    ) -> subprocess.Popen[bytes]:
        """Run the agent to its end."""
        process = subprocess.Popen(
            command,
            env=env,
            preexec_fn=_as_agent,  # noqa: PLW1509  there are no threads here
        )
        while process.poll() is None:
            taken = signals.wait(min(1.0, self._beat_s))
            if taken is not None and taken != signal.SIGCHLD:
                self._ask(taken.name)
            if self._asked:
                # Again and again: it may not listen yet. It comes from Slurm too, which signals
                # every process of the step; SIGUSR2 is the one that says no more when it repeats.
                process.send_signal(signal.SIGUSR2)
            self._look_at_clock(process)
            self._care.look()
        return process

    def _start(self) -> tuple[str, Mapping[str, str]]:
        """Return the interpreter and the environment: of this node's own copy where there is one.

        The copy is held, by a lock, as long as this process lives.
        """
        if not (self._attempt.run_dir / "env" / "archive.json").is_file():
            return sys.executable, self._env  # imports nothing that most runs do not need
        from launcher.ops.submitting.staging import agent_start

        start = agent_start(self._attempt.run_dir, node=self._node, env=self._env)
        return start.python, start.env

    def _command(self, python: str) -> list[str]:
        return [
            *((*self._prefix, CONTAINER_PYTHON) if self._prefix else (python,)),
            *("-P", "-m", "elastic_trainer.agent", "--run-dir", str(self._attempt.run_dir)),
            *("--node", self._node, "--job", self._attempt.name),
            *("--attempt", self._attempt.name),
        ]

    def _ask(self, why: str) -> None:
        """From now on ask the job, through this node's agent, to save and end."""
        if self._asked:
            return
        self._asked = True
        say(f"{self._node}: {why}: the job is asked to save and to end")
        if limit := self._env.get("HOLDFAST_SHUTDOWN_S"):
            self._kill_at = self._clock() + float(limit)

    def _look_at_clock(self, process: subprocess.Popen[bytes]) -> None:
        now = self._clock()
        if self._kill_at is not None and now >= self._kill_at:
            say(f"{self._node}: the agent has not ended in time after it was asked to")
            for _ in range(2):  # the second means: without saving
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_S / 2)
            process.kill()
        # Slurm puts the limit off by the time in which the job is suspended.
        due = self._save_by is not None and time.time() >= self._save_by + self._clock.stopped_s
        if self._care.lost and due:
            self._ask("the time limit is near and the batch host is lost")


def _as_agent() -> None:
    """Let the agent have signals as usual, but one: it would be killed before it listens."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)
    # `scontrol suspend` sends it two seconds before SIGSTOP. It would stop workers that the agent,
    # which it does not reach, then takes for hung; SIGSTOP stops all at once.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
