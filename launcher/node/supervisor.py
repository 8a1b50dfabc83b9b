"""A program of the user that runs as before, but for what starts a training in it. Effects.

Whatever starts a training there asks `holdfast batch` what to run: bash by functions of those
names, other shells by the first programs on the PATH, any Python by the hook
(launcher/wrap/hook). What runs in the place of a launch says so in `folder`, and is asked to end
there when this process is.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from launcher import wrap
from launcher.platforms.local import start_ticks
from launcher.wrap.launches import BY_TORCHRUN

FOLDER: Final = "HOLDFAST_SCRIPT"
"""Variable of the folder of this process: what runs below it says there what it has started."""
LAUNCHES: Final = "launches"
_CODE: Final = "code-"
ASKED: Final = "asked"
"""File that is there once this process was asked to end."""
HANDED_ON: Final = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT),
)
PROGRAMS: Final = ("torchrun", *sorted(BY_TORCHRUN))
TURN_S: Final = 1.0
HOOK: Final = str(Path(wrap.__file__).with_name("hook"))
"""For every Python: what starts a training there starts agents (launcher/wrap/hook)."""
_LAUNCH: Final = '"$HOLDFAST_PYTHON" -P -m launcher.cli.main batch --'
_LONGEST_TRAP: Final = 400
"""Characters of its commands."""
_QUIET: Final = "{ local - && set +x; } 2>/dev/null"
"""With `set -x` a script shows its own commands alone; before bash 4.4 ours too."""
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


class Supervisor:
    """What a program has started in the place of its launches, and who hears of signals.

    `text` is the program's, as far as it is known: it may set traps.
    """

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self._text = folder, text
        (folder / LAUNCHES).mkdir()

    def own_env(self, env: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
        """Return the environment of a program in which `names` ask what to run."""
        programs = self.folder / "bin"
        programs.mkdir()
        functions = {RUN: _RUN}
        for name in names:
            (programs / name).write_text(f'#!/bin/sh\nexec {_LAUNCH} {name} "$@"\n')
            (programs / name).chmod(0o755)
            functions[name] = f'() {{ {_QUIET}; {RUN} {name} "$@"\n}}'
        paths = filter(None, (HOOK, env.get("PYTHONPATH")))
        return {
            **env,
            **{f"BASH_FUNC_{name}%%": text for name, text in functions.items()},
            "PATH": f"{programs}:{env.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(paths),
            "HOLDFAST_PYTHON": sys.executable,
            FOLDER: str(self.folder),
        }

    def live(self) -> list[int]:
        """Return the launches that have not ended."""
        return [pid for pid, ticks, _ in launches_in(self.folder) if start_ticks(pid) == ticks]

    def traps(self, pid: int, number: signal.Signals) -> bool:
        """Return whether the program has a trap for a signal, as its text or the kernel says."""
        form = rf"\btrap\b.{{1,{_LONGEST_TRAP}}}?\b((SIG)?{number.name[3:]}|{number.value})\b"
        named = re.search(form, self._text, re.DOTALL)
        # With a trap for EXIT bash itself catches all that would end it, to run that first.
        return _catches(pid, number) and bool(named or not _catches(pid, signal.SIGVTALRM))


def launches_in(folder: Path) -> list[tuple[int, int, Path]]:
    """Return the process of each launch, when that began, and its run, in the order they began."""
    found = []
    for path in (folder / LAUNCHES).iterdir():
        ticks, _, run = path.read_text(encoding="utf-8").strip().partition(" ")
        if run:  # else it is being written
            found.append((int(path.name), int(ticks), Path(run)))
    return sorted(found, key=lambda launch: launch[1])


def note_launch(folder: Path, run_dir: Path) -> None:
    """Have this process known as a launch of a run to the supervisor of `folder`."""
    pid = os.getpid()
    path = folder / LAUNCHES / str(pid)
    path.write_text(f"{start_ticks(pid)} {run_dir}\n", encoding="utf-8")


def note_code(folder: Path, code: int) -> None:
    """Note how this process, a launch, ends."""
    (folder / f"{_CODE}{os.getpid()}").write_text(f"{code}\n", encoding="ascii")


def code_of(folder: Path, pid: int) -> int | None:
    """Return how a launch has ended; None: it runs, or was killed."""
    path = folder / f"{_CODE}{pid}"
    return int(path.read_text(encoding="ascii")) if path.exists() else None


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal (man 5 proc, SigCgt)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    mask = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt:0")
    return bool(int(mask.split(":")[1], 16) >> (number - 1) & 1)
