"""`pod`: PID 1 of a pod. Prepares the run, runs the agent, passes signals on, reaps, sums up.

SIGTERM means that this pod goes: its agent leaves the job, which goes on without it; only when
all are told so at once does the job save and end
(elastic_trainer/agent/membership/departures.py). After `cancel --save` (RUN/stop.json is there) it
means the whole job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from elastic_trainer.config import TrainConfig
from elastic_trainer.failures import (
    EXIT_DO_NOT_RESTART,
    EXIT_FAILED,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
)
from launcher import stop_request
from launcher.node import board
from launcher.node.attempt import Attempt, NodeError
from launcher.node.begin import decide, newest_step, read_config
from launcher.node.decide import NOTHING_TO_DO, verdict
from launcher.node.pod_decide import (
    AGAIN,
    LIVED_S,
    JobEnd,
    all_refuse,
    exit_code,
    generation,
    not_here,
    pause_s,
    place,
)
from launcher.node.pod_dir import failures, prepare, publish_json
from launcher.node.pod_env import PodEnv
from launcher.node.say import note, say
from launcher.node.taken_signals import TakenSignals

PASSED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TAKEN: Final = (*PASSED, signal.SIGCHLD)
TURN_S: Final = 1.0
LAST_WORDS_S: Final = 5.0
"""Between the last SIGTERM and SIGKILL, for an agent that has not ended in time."""


class Pod:
    """One start of one pod.

    Args:
        run_dir: on the claim.
        who: this pod.
        env: of this process.
        mono: monotonic seconds.
        wait: waits so many seconds for one of TAKEN and returns it, or None.
    """

    def __init__(
        self,
        run_dir: Path,
        who: PodEnv,
        env: Mapping[str, str],
        *,
        mono: Callable[[], float] = time.monotonic,
        wait: Callable[[float], signal.Signals | None],
    ) -> None:
        self._run_dir, self._who, self._env = run_dir.absolute(), who, env
        self._mono, self._wait = mono, wait
        self._began = mono()
        self._told_to_go = False
        self._repeat = False
        """The whole job is to stop: SIGUSR2 again and again, until the agent listens."""
        self._kill_at: float | None = None

    def run(self) -> int:
        """Serve until the agent has ended; return the code of the container."""
        try:
            made = prepare(self._run_dir, self._who.config_dir)
            if made:
                say(f"{self._run_dir}: made {', '.join(made)} from {self._who.config_dir}")
            attempt = self._attempt()
            code = self._begin(attempt)
            if code is None:
                code = self._summed_up(attempt, self._agent(attempt))
        except NodeError as error:
            say(f"error: {error}")
            code = AGAIN
        except (OSError, ValueError) as error:
            say(f"error: {type(error).__name__}: {error}")
            code = AGAIN
        if code == AGAIN:
            self._pause()
        say(f"{self._who.pod} ends with {code}")
        return code

    def _board(self) -> board.State:
        return board.read_patiently(self._run_dir, mono=self._mono, wait=self._told)

    def _told(self, seconds: float) -> bool:
        """Wait; return whether this pod was told to go meanwhile."""
        told = self._wait(seconds) in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        self._told_to_go |= told
        return told

    # -- before -----------------------------------------------------------------------------

    def _attempt(self) -> Attempt:
        state = self._board()
        number = generation(
            self._who.job,
            lease_job=None if state.lease is None else state.lease.job,
            ended_job=None if state.ended is None else state.ended.job,
        )
        return Attempt(self._run_dir, self._who.job, number)

    def _begin(self, attempt: Attempt) -> int | None:
        """Decide whether the job may start; None: go on.

        A pod that comes back to a job that goes on is not asked: budgets are for starts.
        """
        config, state = read_config(self._run_dir), self._board()
        self._note_end(attempt.restart - 1)
        live = state.lease is not None and state.lease.job == attempt.name
        if not live or state.finished:
            decision = decide(attempt, config, state, now_unix=time.time())
            if decision.code:
                say(f"{self._run_dir}: {decision.reason}")
                return exit_code(
                    self._who.kind,
                    JobEnd(
                        finished=decision.code == NOTHING_TO_DO,
                        code=decision.code,
                        stop_asked=decision.code == EXIT_SAVED,
                    ),
                )
        for folder in (attempt.dir, attempt.logs):
            folder.mkdir(parents=True, exist_ok=True)
        step = newest_step(self._run_dir, config, state)
        if publish_json(attempt.dir / "begin.json", {"t_unix": time.time(), "step": step}):
            nodes = config.ladder.rungs[0].num_nodes
            note(attempt, "run.started", attempt=attempt.name, nodes=nodes)
            say(f"attempt {attempt.name} of run {config.run_id} begins")
        return None

    # -- the agent --------------------------------------------------------------------------

    def _command(self, attempt: Attempt, config: TrainConfig) -> list[str]:
        who, network = self._who, config.network
        command = [
            *(sys.executable, "-P", "-m", "elastic_trainer.agent"),
            *("--run-dir", str(self._run_dir), "--node", who.pod, "--on-term", "leave"),
            *("--job", attempt.name, "--attempt", attempt.name),
        ]
        if who.address and network.interface == "auto" and network.cidr is None:
            command += ["--local-addr", who.address]
        if who.host:
            command += ["--host", who.host]
        return command

    def _agent(self, attempt: Attempt) -> int:
        """Run the agent to its end and return its exit code."""
        command = self._command(attempt, read_config(self._run_dir))
        process = subprocess.Popen(
            command,
            env=dict(self._env),
            preexec_fn=_as_agent,  # noqa: PLW1509  there are no threads here
        )
        try:
            self._who.agent_file.write_text(f"{process.pid}\n", encoding="ascii")
            while not reap(process):
                self._turn(process, self._wait(TURN_S))
        finally:
            with contextlib.suppress(OSError):
                self._who.agent_file.unlink()
        code = process.returncode if process.returncode >= 0 else EXIT_FAILED
        with contextlib.suppress(OSError):
            attempt.note_exit(self._who.pod, code)
        return code

    def _turn(self, process: subprocess.Popen[bytes], taken: signal.Signals | None) -> None:
        if taken in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
            self._go(process, taken)
        elif taken == signal.SIGUSR2:
            self._repeat = True
            self._set_clock()
        elif taken == signal.SIGUSR1:
            process.send_signal(taken)
        if self._repeat:
            process.send_signal(signal.SIGUSR2)
        if self._kill_at is not None and self._mono() >= self._kill_at:
            say("the agent has not ended in time after it was asked to")
            process.send_signal(signal.SIGTERM)  # the second means: at once
            deadline = self._mono() + LAST_WORDS_S
            while not reap(process) and self._mono() < deadline:
                self._wait(TURN_S / 5)
            process.kill()
            self._kill_at = None

    def _go(self, process: subprocess.Popen[bytes], why: signal.Signals) -> None:
        """This pod is to go, or, after a cancel, the whole job."""
        whole = stop_request.asked(self._run_dir)
        what = "the job is asked to save and to end" if whole else "this pod leaves the job"
        say(f"{why.name}: {what}")
        self._told_to_go = True
        self._set_clock()
        if whole:
            self._repeat = True
        else:
            process.send_signal(signal.SIGTERM)

    def _set_clock(self) -> None:
        if self._kill_at is None and self._who.shutdown_s is not None:
            self._kill_at = self._mono() + self._who.shutdown_s

    # -- after ------------------------------------------------------------------------------

    def _summed_up(self, attempt: Attempt, agent_code: int) -> int:
        """Return this pod's code, after its agent has ended with `agent_code`."""
        say(f"the agent of {self._who.pod} has ended with {agent_code}")
        end = self._note_end(attempt.restart)
        if end.code is None and agent_code == EXIT_TOO_FEW_NODES and not end.finished:
            say(not_here(self._who.host or self._who.pod))
        if end.code is None and agent_code == EXIT_DO_NOT_RESTART and not end.finished:
            nodes = read_config(self._run_dir).ladder.rungs[0].num_nodes
            lease = self._board().lease
            live = lease is not None and lease.job == attempt.name
            if all_refuse(attempt.exits(), nodes, live):
                say(f"the agents of all {nodes} pods say that it would fail again")
                end = JobEnd(code=EXIT_DO_NOT_RESTART)
        return exit_code(self._who.kind, end)

    def _note_end(self, number: int) -> JobEnd:
        """Return how a generation has ended, and write it down where nobody has."""
        attempt = Attempt(self._run_dir, self._who.job, number)
        state = self._board()
        ended = state.ended if state.ended is not None and state.ended.job == attempt.name else None
        if ended is not None and attempt.dir.is_dir():
            found = verdict(
                finished=state.finished,
                ended=(ended.code, ended.reason),
                exits={},
                at_limit=False,
            )
            value = {"code": found.code, "failed": found.failed, "reason": found.reason}
            if publish_json(attempt.dir / "end.json", {**value, "t_unix": time.time()}):
                note(attempt, "run.ended", code=found.code, reason=found.reason)
                say(f"attempt {attempt.name} ended with {found.code}: {found.reason}")
        return JobEnd(
            finished=state.finished,
            code=None if ended is None else ended.code,
            stop_asked=stop_request.asked(self._run_dir),
        )

    def _pause(self) -> None:
        """Wait before the controller starts the pod again; longer with each failure in a row."""
        if self._told_to_go:
            return
        lived = self._mono() - self._began >= LIVED_S
        count = 1
        with contextlib.suppress(OSError):
            name = f"{self._who.job}.{place(self._who.kind, self._who.pod)}"
            count = failures(self._run_dir / "pods" / name, lived=lived)
        until = self._mono() + pause_s(count)
        while (left := until - self._mono()) > 0:
            if self._told(min(left, TURN_S)):
                return


def pod(run_dir: Path, env: Mapping[str, str]) -> int:
    """Be PID 1 of a pod of the run `run_dir`; return the container's exit code.

    Raises:
        NodeError: HF674, this is no pod of a job.
    """
    who = PodEnv.of(env)
    with TakenSignals(TAKEN) as signals:
        return Pod(run_dir, who, env, wait=signals.wait).run()


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
    """Let the agent have signals as usual, but two: it would be killed before it listens."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)
