"""`python -m launcher.node.script [OPTIONS] -- SCRIPT ARGS`: runs a wrapped batch script.

The script is whole and runs as before, but for the programs that start a training. Slurm signals
this process, which asks what runs in their place to end, and hands the signal on to the script
where it has a trap for it. When the script has ended, with whatever its last lines and its EXIT
trap do, the job is put back into the queue if one of its launches is to continue.
"""

from __future__ import annotations

import os
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
from launcher.node.agent import taken_signals
from launcher.node.attempt import Attempt, say
from launcher.node.decide import REQUEUES
from launcher.node.supervisor import ASKED, HANDED_ON, PROGRAMS, TURN_S, Supervisor, launches_in
from launcher.record import stop_request

ENDING: Final = "HOLDFAST_ENDING"
"""Variable with what `wrap` has found of the script's end, for `holdfast batch`."""
WHERE: Final = "where"
"""File with the folder in which the script began; it may change to others."""
OWN_RESTART: Final = "own-restart"
ASKS: Final = (signal.SIGUSR2, signal.SIGTERM)
RESTARTS: Final = ("sbatch", "scontrol")
ON_SLURM: Final = ("srun", *PROGRAMS, *RESTARTS)
"""What asks, when it is called, what to run."""
LAST_S: Final = 20.0
"""Before the time limit: the script's last lines take too long, and the job is put back."""
_OPEN_MODE: Final = "SLURM_OPEN_MODE"
"""An srun's own --open-mode, which Slurm sets by that of the job: it is ours (wrap/ending.py)."""


class Script:
    """A wrapped script that runs, and what it has started in the place of its launches."""

    def __init__(
        self, folder: Path, options: Sequence[str], env: Mapping[str, str], words: Sequence[str]
    ) -> None:
        self.folder, self._options, self._env, self._words = folder, options, env, words
        own = next((o.partition("=B:")[2] for o in options if o.startswith("--signal=B:")), "")
        name = own.partition("@")[0]
        self._asks = {*ASKS, *([signal.Signals[f"SIG{name}"]] if name else [])}
        text = Path(words[0]).read_text(encoding="utf-8", errors="replace")
        self._supervisor = Supervisor(folder, text)
        self._put_back = "--no-requeue" not in options
        (folder / WHERE).write_text(str(Path.cwd()), encoding="utf-8")

    def run(self) -> int:
        """Run the script, and put the job back where that is due; return as Popen.returncode."""
        command = [*_interpreter(Path(self._words[0])), *self._words]
        with taken_signals((*HANDED_ON, signal.SIGCHLD)) as wait:
            child = subprocess.Popen(command, env=self._own_env())
            while child.poll() is None:
                number = wait(TURN_S)
                if number is not None and number != signal.SIGCHLD:
                    self._hand_on(number, child.pid)
                if self._seconds_left() < LAST_S:
                    self._continue("the script's last lines take too long for its time limit")
            self._continue()
        return child.returncode

    def _own_env(self) -> dict[str, str]:
        own = {name: value for name, value in self._env.items() if name != _OPEN_MODE}
        mode = next(
            (o.partition("=")[2] for o in self._options if o.startswith("--open-mode=")), ""
        )
        return {
            **self._supervisor.own_env(own, ON_SLURM),
            **({_OPEN_MODE: mode} if mode else {}),
            ENDING: shlex.join(self._options),
        }

    def _hand_on(self, number: signal.Signals, pid: int) -> None:
        """Ask what runs to end, and have the script's own trap see the signal, if it has one."""
        live = self._supervisor.live()
        if number in self._asks:
            (self.folder / ASKED).touch()
            for each in live:
                os.kill(each, signal.SIGUSR2)
        # Without a trap a signal ends a shell, as it would have ended this one; a launch that saves
        # is not to lose its script for that.
        if self._supervisor.traps(pid, number) or (number != signal.SIGUSR2 and not live):
            os.kill(pid, number)

    def _seconds_left(self) -> float:
        end = self._env.get("SLURM_JOB_END_TIME", "")
        return int(end) - time.time() if end.isdecimal() else float("inf")

    def _continue(self, why: str = "") -> None:
        """Put the job back into the queue if a launch is to go on there; then Slurm ends this."""
        runs = [run for _, _, run in launches_in(self.folder)]
        due = [attempt for run in runs if (attempt := self._due(run))]
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


def main() -> int:
    """Run the script that the command line names."""
    words = sys.argv[1:]
    cut = words.index("--")
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    # The script's first line knows by the name that it runs below this.
    prefix = f"holdfast-{os.environ.get('SLURM_JOB_ID')}-"
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        code = Script(Path(folder), words[:cut], os.environ, words[cut + 1 :]).run()
    if code < 0:  # Slurm is to see the signal, as of the script itself
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
