"""`python -m launcher.node.script [OPTIONS] -- SCRIPT ARGS`: runs a wrapped batch script.

The script is whole and runs as before, but for the programs that start a training: bash finds
functions of those names, which ask `holdfast batch` what to run. Slurm signals this process, which
asks what runs in their place to end, and hands the signal on to the script where it has a trap for
it. When the script has ended, with whatever its last lines and its EXIT trap do, the job is put
back into the queue if one of its launches is to continue.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from elastic_trainer.storage.files import read_json
from launcher import wrap
from launcher.node.agent import taken_signals
from launcher.node.attempt import Attempt, say
from launcher.node.decide import REQUEUES
from launcher.platforms.local import start_ticks
from launcher.record import stop_request
from launcher.wrap.launches import BY_TORCHRUN

FOLDER: Final = "HOLDFAST_SCRIPT"
"""Variable of the folder of this process: what runs below it says there what it has started."""
ENDING: Final = "HOLDFAST_ENDING"
"""Variable with what `wrap` has found of the script's end, for `holdfast batch`."""
WHERE: Final = "where"
"""File with the folder in which the script began; it may change to others."""
LAUNCHES: Final = "launches"
ASKED: Final = "asked"
OWN_RESTART: Final = "own-restart"
ASKS: Final = (signal.SIGUSR2, signal.SIGTERM)
HANDED_ON: Final = (*ASKS, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PROGRAMS: Final = ("srun", "torchrun", *sorted(BY_TORCHRUN))
RESTARTS: Final = ("sbatch", "scontrol")
TURN_S: Final = 1.0
LAST_S: Final = 20.0
"""Before the time limit: the script's last lines take too long, and the job is put back."""
_LAUNCH: Final = '"$HOLDFAST_PYTHON" -P -m launcher.cli.main batch --'
HOOK: Final = str(Path(wrap.__file__).with_name("hook"))
"""For every Python: what starts a training there starts agents (launcher/wrap/hook)."""
_OPEN_MODE: Final = "SLURM_OPEN_MODE"
"""An srun's own --open-mode, which Slurm sets by that of the job: it is ours (wrap/ending.py)."""
_LONGEST_TRAP: Final = 400
"""Characters of its commands."""
RUN: Final = "holdfast_run"
_RUN: Final = f"""() {{
  if [[ $BASHPID == "$$" ]]; then {_LAUNCH} "$@"; return; fi
  local hf_pid hf_name hf_code
  {_LAUNCH} "$@" <&0 &
  hf_pid=$!
  for hf_name in HUP TERM USR1 USR2; do
    # shellcheck disable=SC2064
    trap "kill -s $hf_name $hf_pid" "$hf_name"
  done
  while :; do
    wait "$hf_pid" && hf_code=0 || hf_code=$?
    kill -0 "$hf_pid" 2>/dev/null || break
  done
  trap - HUP TERM USR1 USR2
  return "$hf_code"
}}"""
"""Bash of a function that runs a program of ours. In the background `$!` is a shell around it: that
hands signals on."""


class Script:
    """A wrapped script that runs, and what it has started in the place of its launches."""

    def __init__(self, folder: Path, options: Sequence[str], env: Mapping[str, str]) -> None:
        self.folder, self._options, self._env = folder, options, env
        own = next((o.partition("=B:")[2] for o in options if o.startswith("--signal=B:")), "")
        name = own.partition("@")[0]
        self._asks = {*ASKS, *([signal.Signals[f"SIG{name}"]] if name else [])}
        self._text = ""
        self._put_back = "--no-requeue" not in options
        (folder / LAUNCHES).mkdir()
        (folder / WHERE).write_text(str(Path.cwd()), encoding="utf-8")

    def run(self, words: Sequence[str]) -> int:
        """Run the script, and put the job back where that is due; return as Popen.returncode."""
        self._text = Path(words[0]).read_text(encoding="utf-8", errors="replace")
        with taken_signals((*HANDED_ON, signal.SIGCHLD)) as wait:
            child = subprocess.Popen([*_interpreter(Path(words[0])), *words], env=self._own_env())
            while child.poll() is None:
                number = wait(TURN_S)
                if number is not None and number != signal.SIGCHLD:
                    self._hand_on(number, child.pid)
                if self._seconds_left() < LAST_S:
                    self._continue("the script's last lines take too long for its time limit")
            self._continue()
        return child.returncode

    def _own_env(self) -> dict[str, str]:
        programs = self.folder / "bin"
        programs.mkdir()
        functions = {RUN: _RUN}
        for name in (*PROGRAMS, *RESTARTS):
            (programs / name).write_text(f'#!/bin/sh\nexec {_LAUNCH} {name} "$@"\n')
            (programs / name).chmod(0o755)
            functions[name] = f'() {{ {RUN} {name} "$@"\n}}'
        paths = filter(None, (HOOK, self._env.get("PYTHONPATH")))
        own = {name: value for name, value in self._env.items() if name != _OPEN_MODE}
        mode = next(
            (o.partition("=")[2] for o in self._options if o.startswith("--open-mode=")), ""
        )
        return {
            **own,
            **({_OPEN_MODE: mode} if mode else {}),
            **{f"BASH_FUNC_{name}%%": text for name, text in functions.items()},
            "PATH": f"{programs}:{self._env.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(paths),
            "HOLDFAST_PYTHON": sys.executable,
            FOLDER: str(self.folder),
            ENDING: shlex.join(self._options),
        }

    def _hand_on(self, number: signal.Signals, pid: int) -> None:
        """Ask what runs to end, and have the script's own trap see the signal, if it has one."""
        live = [pid for pid, ticks, _ in self._launches() if start_ticks(pid) == ticks]
        if number in self._asks:
            (self.folder / ASKED).touch()
            for each in live:
                os.kill(each, signal.SIGUSR2)
        # Without a trap a signal ends a shell, as it would have ended this one; a launch that saves
        # is not to lose its script for that.
        if self._traps(pid, number) or (number != signal.SIGUSR2 and not live):
            os.kill(pid, number)

    def _traps(self, pid: int, number: signal.Signals) -> bool:
        """Return whether the script has a trap for a signal, as its text or the kernel says."""
        form = rf"\btrap\b.{{1,{_LONGEST_TRAP}}}?\b((SIG)?{number.name[3:]}|{number.value})\b"
        named = re.search(form, self._text, re.DOTALL)
        # With a trap for EXIT bash itself catches all that would end it, to run that first.
        return _catches(pid, number) and bool(named or not _catches(pid, signal.SIGVTALRM))

    def _launches(self) -> list[tuple[int, int, Path]]:
        """Return the process of each launch, when that began, and its run."""
        found = []
        for path in sorted((self.folder / LAUNCHES).iterdir()):
            ticks, _, run = path.read_text(encoding="utf-8").strip().partition(" ")
            if run:  # else it is being written
                found.append((int(path.name), int(ticks), Path(run)))
        return found

    def _seconds_left(self) -> float:
        end = self._env.get("SLURM_JOB_END_TIME", "")
        return int(end) - time.time() if end.isdecimal() else float("inf")

    def _continue(self, why: str = "") -> None:
        """Put the job back into the queue if a launch is to go on there; then Slurm ends this."""
        due = [attempt for _, _, run in self._launches() if (attempt := self._due(run))]
        if not due or not self._put_back:
            return
        self._put_back = False
        if why:
            say(why)
        if (self.folder / OWN_RESTART).exists():
            say("the script restarts its job itself: it is not put back into the queue here too")
        elif self._env.get("SLURM_TASK_PID") == str(os.getpid()):
            # Late: most scripts end without.
            from launcher.node.batch import again

            again(due[-1])

    def _due(self, run_dir: Path) -> Attempt | None:
        attempt = Attempt.of_env(run_dir, self._env)
        ended = read_json(attempt.dir / "end.json").get("code")
        return attempt if ended in REQUEUES and not stop_request.asked(run_dir) else None


def _interpreter(script: Path) -> list[str]:
    """Return what the script's first line names."""
    with script.open("rb") as file:
        first = file.readline(256).decode(errors="replace").strip()
    return first.removeprefix("#!").split() or ["/bin/bash"]


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal (man 5 proc, SigCgt)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    mask = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt:0")
    return bool(int(mask.split(":")[1], 16) >> (number - 1) & 1)


def main() -> int:
    """Run the script that the command line names."""
    words = sys.argv[1:]
    cut = words.index("--")
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    # The script's first line knows by the name that it runs below this.
    prefix = f"holdfast-{os.environ.get('SLURM_JOB_ID')}-"
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        code = Script(Path(folder), words[:cut], os.environ).run(words[cut + 1 :])
    if code < 0:  # Slurm is to see the signal, as of the script itself
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
