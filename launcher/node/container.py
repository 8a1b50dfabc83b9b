"""What `holdfast batch` runs in a pod of a wrapped manifest.

As PID 1 it runs the container's command, whole and as before, but for the launches of a training in
it: each has a run, in which this pod's agent takes part. The container ends as the command does,
unless an agent wants its pod replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from elastic_trainer.storage.files import write_atomic
from launcher.node.agent import STOPS, reap, taken_signals
from launcher.node.attempt import live_lease, say
from launcher.node.decide import AGAIN
from launcher.node.launch import become, outside, with_hook
from launcher.node.pod import CODE, RUNS, SHM, Pod, PodEnv
from launcher.node.supervisor import (
    ASKED,
    FOLDER,
    HANDED_ON,
    LAUNCHES,
    PROGRAMS,
    TURN_S,
    Supervisor,
    note_launch,
)
from launcher.plan.search import plan
from launcher.render.local import render_local
from launcher.spec.errors import UserError
from launcher.spec.reading import load_spec
from launcher.wrap.interpreter import agents_python
from launcher.wrap.launches import BY_TORCHRUN, WrappedLaunch, job_of, launch_of

PODS: Final = "HOLDFAST_PODS"
"""Variable with the number of the job's pods."""
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
    launch = launch_of(argv, env)
    if launch is not None:
        _launch(launch, argv, env, None)
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
        (folder / CODE).write_text(f"{EXIT_DO_NOT_RESTART}\n", encoding="ascii")
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
        if (folder / ASKED).exists() or (_code(folder) or 0) >= AGAIN:
            (folder / _LATE).touch()
            say(f"{argv[0]}: this pod is to be replaced: it is not started")
            raise SystemExit(AGAIN)
        number = 1 + len([*(folder / LAUNCHES).iterdir()])
        name = name if number == 1 else f"{name}-{number}"
    run_dir = Path(env[RUNS], name)
    os.environ["PATH"] = env.get("PATH", os.defpath)  # what is asked for the Python of a torchrun
    python = agents_python(launch.torchrun)
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
        asked, kill_at = False, None
        while command is not None and not reap(command):
            number = wait(TURN_S)
            if number in STOPS:
                asked = True
            if number not in (None, signal.SIGCHLD):
                _hand_on(number, command.pid, ours)
            if (folder / _LATE).exists() and kill_at is None:
                kill_at = time.monotonic() + LAST_S
                command.terminate()
            if kill_at is not None and time.monotonic() >= kill_at:
                command.kill()
        code = 127 if command is None else command.returncode
        code, last = code if code >= 0 else 128 - code, _code(folder)
        if (last or 0) >= AGAIN or (code and asked and last is None):
            return last or AGAIN
        if code and last is None:
            say(f"{words[0]} has ended with {code} before it launched anything")
            run_dir = Path(env[RUNS], env["HOLDFAST_JOB"])
            return Pod(run_dir, who, env, wait).nothing_launched(int(env.get(PODS) or "1"))
        return code


def _hand_on(number: signal.Signals, pid: int, ours: Supervisor) -> None:
    """Pass a signal on: to what runs in the place of launches, or else to the command.

    A command whose launches have ended is left to its last lines: the pod's grace ends them.
    """
    if number in STOPS:
        (ours.folder / ASKED).touch()
    for each in ours.live():
        os.kill(each, number)
    if ours.traps(pid, number) or not ours.launches():
        os.kill(pid, number)


def _code(folder: Path) -> int | None:
    """Return how the last launch that has ended did."""
    path = folder / CODE
    return int(path.read_text(encoding="ascii")) if path.exists() else None
