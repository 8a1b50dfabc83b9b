"""`agent`: starts one node's elastic agent, passes signals on, and is the caretaker.

With --no-kill a job outlives its batch host, but Slurm starts no other batch script: the job
would stay RUNNING until its time limit. So each node watches the script's beat. Once it stands
still, the nodes ask for the save before the time limit themselves, and when the job has ended one
of them does what the script would have done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from elastic_trainer.failures import EXIT_FAILED
from launcher.node import beat, board
from launcher.node.attempt import Attempt
from launcher.node.decide import BeatWatch, OnBoard, is_over
from launcher.node.end import save_by, take_over
from launcher.node.say import say

READ_BEATS = 5
"""A caretaker reads the beat every so many beats."""
LEASE_READS = 60
"""So many readings of an unchanged lease, a second apart: nobody coordinates any more."""
CONTAINER_PYTHON = "python3"
STAND_IN_S = 60.0
"""How long a caretaker has before the next one takes its place."""
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
    """

    def __init__(
        self, attempt: Attempt, node: str, env: Mapping[str, str], prefix: Sequence[str] = ()
    ) -> None:
        self._attempt, self._node, self._env, self._prefix = attempt, node, env, prefix
        self._beat_s = beat.period_s(env)
        self._watch = BeatWatch()
        self._read_at = time.monotonic()
        self._save_by = save_by(env)
        self._kill_at: float | None = None
        self._asked = False

    def run(self) -> int:
        """Serve until the agent has ended, and longer if the batch host is lost.

        Returns:
            The agent's exit code.
        """
        # Before signals wait: while the environment is copied there is nothing to save.
        python, env = self._start()
        signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
        process = subprocess.Popen(
            self._command(python),
            env=env,
            preexec_fn=_as_agent,  # noqa: PLW1509  there are no threads here
        )
        while process.poll() is None:
            taken = signal.sigtimedwait(TAKEN, min(1.0, self._beat_s))
            if taken is not None and taken.si_signo != signal.SIGCHLD:
                self._ask(signal.Signals(taken.si_signo).name)
            if self._asked:
                # Again and again: it may not listen yet. It comes from Slurm too, which signals
                # every process of the step; SIGUSR2 is the one that says no more when it repeats.
                process.send_signal(signal.SIGUSR2)
            self._look_at_clock(process)
            self._look_at_beat()
        code = process.returncode if process.returncode >= 0 else EXIT_FAILED
        with contextlib.suppress(OSError):
            self._attempt.note_exit(self._node, code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
        if self._batch_lost():
            self._take_care()
        return code

    def _start(self) -> tuple[str, Mapping[str, str]]:
        """Return the interpreter and the environment: of this node's own copy where there is one.

        The copy is held, by a lock, as long as this process lives.
        """
        if not (self._attempt.run_dir / "env" / "archive.json").is_file():
            return sys.executable, self._env  # imports nothing that most runs do not need
        from launcher.ops.staging import agent_start

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
            self._kill_at = time.monotonic() + float(limit)

    def _look_at_clock(self, process: subprocess.Popen[bytes]) -> None:
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            say(f"{self._node}: the agent has not ended in time after it was asked to")
            for _ in range(2):  # the second means: without saving
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_S / 2)
            process.kill()
        if self._watch.lost and self._save_by is not None and time.time() >= self._save_by:
            self._ask("the time limit is near and the batch host is lost")

    def _look_at_beat(self) -> None:
        if time.monotonic() < self._read_at:
            return
        self._read_at = time.monotonic() + READ_BEATS * self._beat_s
        was_lost = self._watch.lost
        self._watch = self._watch.read(beat.read(self._attempt))
        if self._watch.lost and not was_lost:
            say(f"{self._node}: the batch script's beat stands still: its host is lost")

    def _batch_lost(self) -> bool:
        """Say for sure, at the end, whether the batch script lives. Takes about one beat."""
        if self._watch.lost:
            return True
        watch = BeatWatch().read(beat.read(self._attempt))
        value = watch.value
        reads = 0
        # Storage that cannot be read says nothing; nor can the script then do its work.
        while reads < 3 * READ_BEATS:
            time.sleep(self._beat_s)
            now = beat.read(self._attempt)
            if now is not None and now != value:
                return False
            reads += now is not None
        return True

    def _take_care(self) -> None:
        """Wait until the whole job has ended; then one node does what the script would have."""
        if not self._job_over():
            return
        for turn in range(1_000):
            if self._elected(turn):
                take_over(self._attempt, self._env)
                return
            time.sleep(STAND_IN_S)  # Slurm ends this process, unless that caretaker is lost too

    def _job_over(self) -> bool:
        lease: tuple[int, int] | None = None
        still = 0
        while True:
            with contextlib.suppress(OSError, ValueError):
                state = board.read(self._attempt.run_dir)
                seen = None if state.lease is None else (state.lease.term, state.lease.beat)
                lease, still = seen, still + 1 if seen == lease else 0
                over = is_over(
                    OnBoard(
                        finished=state.finished,
                        ended_job=None if state.ended is None else state.ended.job,
                        lease_job=None if state.lease is None else state.lease.job,
                        lease_still=still >= LEASE_READS,
                    ),
                    self._attempt.name,
                )
                if over is not None:
                    return over
            time.sleep(1.0)

    def _elected(self, turn: int) -> bool:
        path = self._attempt.dir / f"caretaker.{turn}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError:
            return False
        os.write(fd, f"{self._node}\n".encode())
        os.close(fd)
        return True


def _as_agent() -> None:
    """Let the agent have signals as usual, but one: it would be killed before it listens."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)
