"""What `holdfast batch` runs in a pod of a wrapped manifest.

As PID 1 it runs the container's command, whole and as before, but for the launches of a training in
it: each has a run, in which this pod's agent takes part. The container ends as the command does,
unless an agent wants its pod replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from elastic_trainer.storage.files import write_atomic
from launcher.node.agent import STOPS, Wait, reap, taken_signals
from launcher.node.as_task import of_job
from launcher.node.attempt import live_lease, say
from launcher.node.decide import AGAIN
from launcher.node.launch import become, outside, with_hook
from launcher.node.pod import RUNS, SHM, Pod, PodEnv
from launcher.node.supervisor import (
    ASKED,
    FOLDER,
    HANDED_ON,
    PROGRAMS,
    TURN_S,
    Supervisor,
    code_of,
    launches_in,
    note_code,
    note_launch,
)
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.platforms.local import start_ticks
from launcher.render.local import render_local
from launcher.spec.errors import UserError
from launcher.wrap.interpreter import agents_python
from launcher.wrap.launches import BY_TORCHRUN, WrappedLaunch, job_of, launch_of
from launcher.wrap.tasks import PODS, rank_of

LAST_S: Final = 10.0
"""From SIGTERM to SIGKILL, for a command that goes on where its pod is to be replaced."""
_LATE: Final = "late"
"""File that is there once a launch was refused since the pod is to be replaced."""


def run(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a container's command to its end and return the container's code, or become a launch.

    Raises:
        UserError: HF674 this is no pod of a wrapped job; HF169 a launch that agents cannot run;
            HF678 they cannot run in its environment; HF163 a secret in it.
    """
    who = PodEnv.of(env)
    if FOLDER in env:
        _inside(argv, env, Path(env[FOLDER]))
    launch = launch_of(argv, env) or rank_of(argv, env, sys.executable)
    if launch is not None:
        _launch(launch, argv, {**env, **of_job(env)} if launch.of_tasks else env, None)
    return _run_command(argv, env, who)


def _inside(words: Sequence[str], env: Mapping[str, str], folder: Path) -> NoReturn:
    """Become what runs in the place of a program that the container's command has started."""
    argv = [word.replace(f"{folder}/bin/", "") for word in words]  # $(which torchrun)
    if argv[0] in BY_TORCHRUN:
        become(argv, with_hook(env), outside(env).get("PATH"))
    try:
        if launch := launch_of(argv, env):
            _launch(launch, argv, outside(env), folder)
    except UserError:
        note_launch(folder, Path(env[RUNS]))
        note_code(folder, EXIT_DO_NOT_RESTART)
        raise
    become(argv, outside(env))


def _launch(
    launch: WrappedLaunch, argv: Sequence[str], env: Mapping[str, str], folder: Path | None
) -> NoReturn:
    """Become this pod's part of a launch."""
    if launch.nodes[1] == 1 < int(env.get(PODS) or "1"):
        say(f"{argv[0]} trains on one node, in each pod for itself: it runs as without holdfast")
        become(argv, env)
    name = env["HOLDFAST_JOB"]
    if folder is not None:
        if (folder / ASKED).exists() or _last_code(folder) >= AGAIN:
            (folder / _LATE).touch()
            say(f"{argv[0]}: this pod is to be replaced: it is not started")
            raise SystemExit(AGAIN)
        number = 1 + len(launches_in(folder))
        name = name if number == 1 else f"{name}-{number}"
    run_dir = Path(env[RUNS], name)
    os.environ["PATH"] = env.get("PATH", os.defpath)  # what is asked for the Python of a torchrun
    python = agents_python(launch.torchrun) if launch.torchrun else sys.executable
    for note in _made(run_dir, launch, env):
        say(note)
    if folder is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)  # until `pod` takes them
        note_launch(folder, run_dir)
        env = {**env, FOLDER: str(folder)}
    become([python, "-P", "-m", "launcher.node", "pod", str(run_dir)], env)


def _made(run_dir: Path, launch: WrappedLaunch, env: Mapping[str, str]) -> Iterator[str]:
    """Write what a launch's job is, but leave a running job's as it is; yield what is to be known.

    A job that was made again under its name may have other arguments.
    """
    spec = load_spec(job_of(launch, env))
    wish_s, grace_s = launch.shutdown_timeout_s, spec.elastic.stop_grace_s
    if wish_s is not None and wish_s > grace_s:
        more = f"terminationGracePeriodSeconds and HOLDFAST_SHUTDOWN_S by {wish_s - grace_s:g}"
        yield f"--shutdown-timeout {wish_s:g}: workers have {grace_s:g} s; raise {more}"
    yield from launch.notes
    files = render_local(
        spec, plan(spec), run_id=run_dir.name, run_dir=run_dir, base_dir=spec.folder
    )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            path = run_dir / file
            if not path.is_file() or (
                path.read_text(encoding="utf-8") != text
                and live_lease(run_dir, lambda _: False) is None
            ):
                write_atomic(path, text)
    except (OSError, ValueError) as error:
        # `pod` finds the same, waits, and has the pod made again.
        yield f"{run_dir}: {error}"


def _run_command(words: Sequence[str], env: Mapping[str, str], who: PodEnv) -> int:
    """Run a command as PID 1; return the container's code."""
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError:  # a file system that is read-only
        place = str(SHM)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-", dir=place) as made,
        taken_signals((*HANDED_ON, signal.SIGCHLD)) as wait,
    ):
        folder = Path(made)
        ours = Supervisor(folder, " ".join(words))
        try:
            command = subprocess.Popen(words, env=ours.own_env(env, PROGRAMS))
        except OSError as error:
            say(f"{words[0]}: {error.strerror}")
            command = None
        code = 127 if command is None else _served(command, ours, wait)
        if (last := _last_code(folder)) >= AGAIN:
            return last
        if code == 0 or launches_in(ours.folder):
            return code
        if (folder / ASKED).exists():
            return AGAIN
        say(f"{words[0]} has ended with {code} before it launched anything")
        run_dir = Path(env[RUNS], env["HOLDFAST_JOB"])
        return Pod(run_dir, who, env, wait).nothing_launched(int(env.get(PODS) or "1"))


def _served(command: subprocess.Popen[bytes], ours: Supervisor, wait: Wait) -> int:
    """Pass signals on until the command has ended; return its code.

    A command that goes on where its pod is to be replaced is ended: it launches again, or waits for
    what a killed launch has left.
    """
    kill_at: float | None = None
    while not reap(command):
        number = wait(TURN_S)
        if number not in (None, signal.SIGCHLD):
            _hand_on(number, command.pid, ours)
        if kill_at is None and ((ours.folder / _LATE).exists() or _is_killed(ours.folder)):
            kill_at = time.monotonic() + LAST_S
            command.terminate()
        if kill_at is not None and time.monotonic() >= kill_at:
            command.kill()
    code = command.returncode
    return code if code >= 0 else 128 - code


def _hand_on(number: signal.Signals, pid: int, ours: Supervisor) -> None:
    """Pass a signal on: to what runs in the place of launches, or else to the command.

    A command whose launches have ended is left to its last lines: the pod's grace ends them.
    """
    if number in STOPS:
        (ours.folder / ASKED).touch()
    for each in ours.live():
        os.kill(each, number)
    if ours.traps(pid, number) or not launches_in(ours.folder):
        os.kill(pid, number)


def _is_killed(folder: Path) -> bool:
    """Return whether the last launch has ended without a word."""
    return any(
        code_of(folder, pid) is None and start_ticks(pid) != ticks
        for pid, ticks, _ in launches_in(folder)[-1:]
    )


def _last_code(folder: Path) -> int:
    """Return how the last launch has ended: AGAIN if it was killed; 0 if it runs, or is none."""
    if _is_killed(folder):
        return AGAIN
    codes = [code_of(folder, pid) for pid, _, _ in launches_in(folder)[-1:]]
    return next((code for code in codes if code is not None), 0)
