"""On a node: a shell of a wrapped script that starts a training somewhere in its text.

`task` runs the shell as it is, with functions for the programs that start a training, as one srun
for all nodes would have run it. `launched` is what they run: the first to know writes down what the
job is, and this node's agent runs in the program's place.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from elastic_trainer.storage.files import read_json, write_atomic
from launcher.node.agent import TAKEN, as_of_one_srun, nodes_of, taken_signals
from launcher.node.attempt import Attempt
from launcher.node.launch import become, ending_in
from launcher.plan.search import plan
from launcher.render.local import render_local
from launcher.spec.errors import UserError
from launcher.spec.reading import load_spec
from launcher.wrap.interpreter import agents_python
from launcher.wrap.launches import NOT_YET, TASK, job_of, launch_of

_RUN: Final = '"$HOLDFAST_PYTHON" -P -m launcher.node launched "$HOLDFAST_TASK" $HOLDFAST_APART --'
_FUNCTION: Final = f"""() {{
  trap : HUP TERM USR1 USR2
  {_RUN} %s "$@"
  set -- $?
  trap - HUP TERM USR1 USR2
  return "$1"
}}"""
"""Every process of a step gets its signals, and a shell that one ends takes its agent along."""
_OF_PYTHON: Final = """() {
  case " $* " in
    *" -m torch.distributed."*) holdfast_torchrun %s "$@" ;;
    *) command %s "$@" ;;
  esac
}"""


def run_task(
    attempt: Attempt, node: str, env: Mapping[str, str], words: Sequence[str], *, apart: bool
) -> int:
    """Run a shell; return its code. One that has started no agent ends with a code all the same."""
    functions = {
        "torchrun": _FUNCTION % "torchrun",
        "holdfast_torchrun": _FUNCTION % "",
        **{name: _OF_PYTHON % (name, name) for name in ("python", "python3")},
    }
    with tempfile.TemporaryDirectory(prefix="holdfast-task-") as folder:
        program = Path(folder, "torchrun")  # for exec, numactl and others
        program.write_text(f'#!/bin/sh\nexec {_RUN} torchrun "$@"\n')
        program.chmod(0o755)
        own = {
            **as_of_one_srun(env, node, nodes_of(env)),
            **{f"BASH_FUNC_{name}%%": text for name, text in functions.items()},
            "PATH": f"{folder}:{env.get('PATH', os.defpath)}",
            "HOLDFAST_PYTHON": sys.executable,
            "HOLDFAST_APART": "--apart" if apart else "",
            TASK: str(attempt.run_dir),
            _FOLDER: folder,
        }
        with taken_signals(TAKEN) as wait:
            shell = subprocess.Popen(words, env=own)
            while shell.poll() is None:
                wait(1.0)  # the shell and what it runs get the signals too
    code = shell.returncode if shell.returncode >= 0 else 128 - shell.returncode
    if node not in attempt.exits():
        attempt.note_exit(node, code)
    return code


_FOLDER: Final = "HOLDFAST_TASK_FOLDER"
_OURS: Final = ("HOLDFAST_PYTHON", "HOLDFAST_APART", TASK, _FOLDER)


def launched(
    attempt: Attempt, env: Mapping[str, str], argv: Sequence[str], *, apart: bool
) -> NoReturn:
    """Become this node's agent, once job.json has what a torchrun's arguments say.

    Raises:
        UserError: HF169 they cannot be wrapped, or are others than those of an earlier start;
            HF678, HF163.
    """
    if (launch := launch_of(argv, env)) is None:
        raise UserError("HF169", f"this starts no training: {' '.join(argv[:8])}")
    functions = {f"BASH_FUNC_{name}%%" for name in ("torchrun", "holdfast_torchrun", "python")}
    functions.add("BASH_FUNC_python3%%")
    path = env.get("PATH", "").split(os.pathsep)
    own = {name: value for name, value in env.items() if name not in functions.union(_OURS)}
    own["PATH"] = os.pathsep.join(each for each in path if each != env.get(_FOLDER))
    spec = load_spec(job_of(launch, env, ending_in(env, Path(env[_FOLDER]))))
    run_dir = attempt.run_dir
    before = read_json(run_dir / "job.json").get("command")
    if before == list(NOT_YET):
        files = render_local(
            spec, plan(spec), run_id=run_dir.name, run_dir=run_dir, base_dir=spec.folder
        )
        for name, text in files.items():
            write_atomic(run_dir / name, text)
    elif before != list(launch.command):
        raise UserError("HF169", f"{run_dir} is of another training, {before}: submit a new job")
    os.environ["PATH"] = own["PATH"]
    python = agents_python(launch.torchrun)
    words = [python, "-P", "-m", "launcher.node", "agent", str(run_dir)]
    become([*words, *(["--apart"] if apart else [])], own)
