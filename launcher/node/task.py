"""On a node: a program of a wrapped script that starts a training somewhere inside, as a shell.

`task` runs it as it is, as one srun for all nodes would have run it, but for what starts torchrun's
agent. `launched` is what runs there: the first to know writes down what the job is, and this node's
agent takes the place.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from elastic_trainer.storage.files import read_json, write_atomic
from launcher.node.agent import TAKEN, as_of_one_srun, nodes_of, taken_signals
from launcher.node.attempt import Attempt, say
from launcher.node.launch import become, ending_in, without_first
from launcher.node.supervisor import HOOK
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.render.local import render_local
from launcher.spec.errors import UserError
from launcher.wrap.interpreter import agents_python
from launcher.wrap.launches import BY_TORCHRUN, NOT_YET, TASK, job_of, launch_of

_RUN: Final = '"$HOLDFAST_PYTHON" -P -m launcher.node launched "$HOLDFAST_TASK" $HOLDFAST_APART --'
_OF_PYTHON: Final = f"""() {{
  case " $* " in
    *" -m torch.distributed."*) {_RUN} %s "$@" ;;
    *) command %s "$@" ;;
  esac
}}"""
_WITH_HOOK: Final = """() {
  local PYTHONPATH=${PYTHONPATH-}
  case ":$PYTHONPATH:" in
    *:%(hook)s:*) ;;
    *) PYTHONPATH=%(hook)s${PYTHONPATH:+:$PYTHONPATH} ;;
  esac
  export PYTHONPATH
  command %(name)s "$@"
}"""
"""The shell may have set PYTHONPATH anew."""
_BEGIN: Final = """\
# Every process of a step gets its signals: a shell that one ends would take its agent along.
trap : HUP TERM USR1 USR2
[[ -z ${HOLDFAST_BASH_ENV-} ]] || . "$HOLDFAST_BASH_ENV"
"""
_NOT_STARTED: Final = 127
"""A program that is not there, as shells say it."""
_FOLDER: Final = "HOLDFAST_TASK_FOLDER"
_FUNCTIONS: Final = {
    "torchrun": f'() {{ {_RUN} torchrun "$@"\n}}',
    **{name: _OF_PYTHON % (name, name) for name in ("python", "python3")},
    **{name: _WITH_HOOK % {"hook": shlex.quote(HOOK), "name": name} for name in BY_TORCHRUN},
}
"""Of bash: sooner there than the hook, which first imports torch."""


def run_task(
    attempt: Attempt, node: str, env: Mapping[str, str], words: Sequence[str], *, apart: bool
) -> int:
    """Run a program; return its code, which this node has if no agent of it ends otherwise."""
    with tempfile.TemporaryDirectory(prefix="holdfast-task-") as folder:
        own = as_of_one_srun(env, node, nodes_of(env)) | {
            "HOLDFAST_PYTHON": sys.executable,
            "HOLDFAST_APART": "--apart" if apart else "",
            TASK: str(attempt.run_dir),
        }
        with taken_signals(TAKEN) as wait:
            try:
                program = subprocess.Popen(words, env=with_ours(own, folder))
            except OSError as error:
                say(f"{node}: {words[0]}: {error.strerror}")
                attempt.note_exit(node, _NOT_STARTED)
                return _NOT_STARTED
            while program.poll() is None:
                wait(1.0)  # it gets the signals as well
    code = program.returncode if program.returncode >= 0 else 128 - program.returncode
    if node not in attempt.exits():
        attempt.note_exit(node, code)
    return code


def with_ours(env: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return an environment in which programs find an agent in torchrun's place."""
    torchrun, begin = Path(folder, "torchrun"), Path(folder, "begin")
    torchrun.write_text(f'#!/bin/sh\nexec {_RUN} torchrun "$@"\n')
    torchrun.chmod(0o755)  # for exec, numactl and others
    begin.write_text(_BEGIN)
    first = {"PATH": folder, "PYTHONPATH": HOOK}
    return {
        **env,
        **{f"BASH_FUNC_{name}%%": text for name, text in _FUNCTIONS.items()},
        **{name: ":".join(filter(None, (own, env.get(name)))) for name, own in first.items()},
        "HOLDFAST_BASH_ENV": env.get("BASH_ENV", ""),
        "BASH_ENV": str(begin),
        _FOLDER: folder,
    }


def without_ours(env: Mapping[str, str]) -> dict[str, str]:
    """Return what an environment was before `with_ours`, and what has changed in it since."""
    gone = {"HOLDFAST_PYTHON", "HOLDFAST_APART", "HOLDFAST_BASH_ENV", "BASH_ENV", TASK, _FOLDER}
    gone |= {f"BASH_FUNC_{name}%%" for name in _FUNCTIONS}
    own = {name: value for name, value in env.items() if name not in gone}
    own = without_first(without_first(own, "PATH", env[_FOLDER]), "PYTHONPATH", HOOK)
    return own | ({"BASH_ENV": before} if (before := env.get("HOLDFAST_BASH_ENV")) else {})


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
    own, run_dir = without_ours(env), attempt.run_dir
    spec = load_spec(job_of(launch, env, ending_in(env, Path(env[_FOLDER]))))
    before = read_json(run_dir / "job.json").get("command")
    if before == list(NOT_YET):
        files = render_local(
            spec, plan(spec), run_id=run_dir.name, run_dir=run_dir, base_dir=spec.folder
        )
        for name, text in files.items():
            write_atomic(run_dir / name, text)
    elif before != list(launch.command):
        raise UserError("HF169", f"{run_dir} is of another training, {before}: submit a new job")
    os.environ["PATH"] = own.get("PATH", os.defpath)
    words = [agents_python(launch.torchrun), "-P", "-m", "launcher.node", "agent", str(run_dir)]
    become([*words, *(["--apart"] if apart else [])], own)
