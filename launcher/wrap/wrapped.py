"""A batch script -> one whose launches of a training survive lost nodes. Pure.

`wrap_script` changes its options and adds one line, which has `launcher.node.script` run all the
rest. What that starts is known when it is run, for only bash knows what it makes of its text:
`script_of` is the script that runs in the place of a launch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from launcher.plan.clock import clock_chain
from launcher.plan.planning import Plan
from launcher.render.sbatch import CONTAINER_PYTHON, SET_BY_SCRIPT, step_log
from launcher.render.shell import Quoted, check_path, quoted, template, words
from launcher.spec.errors import UserError
from launcher.spec.secret_forms import leaks
from launcher.spec.spec import JobSpec
from launcher.wrap.ending import ending_of
from launcher.wrap.launches import STARTS, UNKNOWN, WrappedLaunch
from launcher.wrap.sruns import cannot_wrap

_REPLACED: Final = re.compile(
    r"#SBATCH\s+(--no-kill(=\S*)?|-k|--no-requeue|--requeue|--(open-mode|signal)[=\s]\s*\S+)\s*(#.*)?"
)
"""Lines that say only what ours say; of others sbatch takes the last word, which is ours."""
_HETEROGENEOUS: Final = re.compile(r"#SBATCH\s+(het|pack)job\b")
_BASH: Final = re.compile(r"#!.*\bbash\b")
_WRAPPED: Final = "launcher.node.script"
_MAY_START: Final = re.compile(r"\b(srun|torchrun|accelerate|deepspeed|torch\.distributed\.run)\b")
_WISH: Final = re.compile(r"--shutdown[-_]timeout[= ]\s*(\d+(?:\.\d+)?)\b")


_BY_PATH: Final = re.compile(r"(?<!\S)[\w.-]*/[\w./-]*\btorchrun(?!\S)")
_CONTAINER: Final = re.compile(r"--container-|\b(apptainer|singularity|enroot)\b")
_VARIABLE: Final = re.compile(r"\$\w+|\$\{[^{}]*\}")


class WrappedScript(NamedTuple):
    """A batch script with what lets its job survive lost nodes."""

    text: str
    torchruns: tuple[str, ...]
    """Those that it names by their paths, and not in containers."""
    notes: tuple[str, ...]
    """What becomes of the user's signals and times, a line each."""


def wrap_script(text: str, python: str) -> WrappedScript:
    """Return the batch script `text` with what lets its job survive lost nodes.

    `python` is an interpreter with holdfast, which the job's first node has too.

    Raises:
        UserError: HF169, what keeps it from that; HF160, its time limit is too short; HF163, a
            secret in a command, which would be kept in job.json.
    """
    if _WRAPPED in text:
        cannot_wrap("it is wrapped already")
    lines = text.split("\n")
    head = _head(lines)
    commands = [line for line in lines if not line.lstrip().startswith("#")]
    if not any(map(_MAY_START.search, commands)):
        cannot_wrap("nothing in it starts a training: no srun, torchrun, accelerate or deepspeed")
    refuse_secrets(commands)
    wish_s = max(shutdown_timeouts("\n".join(commands)), default=None)
    ending = ending_of(lines[:head], wish_s)
    kept = [line for line in lines[:head] if not _REPLACED.fullmatch(line.rstrip())]
    start = words(python, "-P", "-m", _WRAPPED, *ending.of_batch())
    inside = '${HOLDFAST_SCRIPT-} == */holdfast-"$SLURM_JOB_ID"-*'
    own = f'[[ -z ${{SLURM_JOB_ID-}} || {inside} ]] || exec {start} -- "$0" "$@"'
    wrapped = [*kept, *ending.of_sbatch(), own, *lines[head:]]
    outside = (line for line in commands if not _CONTAINER.search(line))
    torchruns = dict.fromkeys(word for line in outside for word in _BY_PATH.findall(line))
    return WrappedScript("\n".join(wrapped), tuple(torchruns), tuple(ending.said(wish_s)))


_MOST_SHOWN: Final = 60
_RANGE: Final = re.compile(r"--nnodes[= ]\s*[\"']?(\d+):(\d+)")
_SHELL: Final = r"\b(ba)?sh\b.*(-c|\.sh)\b"
_BY_SHELL: Final = "runs on each node; agents run where it starts torchrun"
_BY_TEXT: Final = (
    (r"--multi-prog|--het-group|--pty", "runs as it is, without agents"),
    (rf"(?=.*(?:{STARTS.pattern})).*{_SHELL}", _BY_SHELL),
    (STARTS.pattern, "agents run in its place"),
    (r"\bsrun\b.*\bpython", "with several tasks of one training agents start them, else as it is"),
    (_SHELL, _BY_SHELL),
    (r"\bsrun\b", "asked when it runs: agents if it starts a training, else it runs as it is"),
)
"""What is in a line -> what becomes of it, the first that is found."""
_RESTARTS: Final = re.compile(r"\bsbatch\b.*(after\w+:|singleton)|\bscontrol\s+requeue\b")


def explained(text: str, wrapped: WrappedScript) -> list[str]:
    """Return what `wrapped` does for the script `text`, in lines that an administrator can check.

    As far as the text says: what is started is known when it is run.
    """
    said = []
    whole = text.replace("\\\n", " \0")
    number = 1
    for line in whole.split("\n"):
        bare = " ".join(line.replace("\0", "").split())
        if _MAY_START.search(bare) and not bare.startswith("#"):
            what = next((what for form, what in _BY_TEXT if re.search(form, bare)), "agents run")
            shown = bare if len(bare) <= _MOST_SHOWN else f"{bare[:_MOST_SHOWN]}{UNKNOWN}"
            said.append(f"line {number}: {shown}: {what}")
        number += 1 + line.count("\0")
    if found := _RANGE.search(text):
        said.append(f"a lost node: the others continue, down to {found[1]} of {found[2]}")
    else:
        said.append("a lost node: a fixed number of nodes waits for it, or the job is requeued")
    said.append("after a restart the script goes on from the newest checkpoint that it loads")
    said += wrapped.notes
    if _RESTARTS.search(text):
        said.append("the script restarts itself: if it does, the job is not requeued as well")
    return said


def _head(lines: Sequence[str]) -> int:
    """Return the number of lines to the last option: sbatch reads none after a command."""
    if not _BASH.match(lines[0]):
        cannot_wrap(f"line 1: {lines[0][:40]!r} starts no bash; write #!/bin/bash")
    head = 1
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if line.startswith("#SBATCH"):
            head = number + 1
        if _HETEROGENEOUS.match(line):
            what = "a heterogeneous job; its parts cannot replace each other"
            cannot_wrap(f"line {number + 1}: {what}")
    return head


def shutdown_timeouts(text: str) -> list[float]:
    """Return the seconds of each torchrun's --shutdown-timeout in the text of commands."""
    return [float(wish) for wish in _WISH.findall(text)]


def refuse_secrets(commands: Sequence[str]) -> None:
    """Refuse a secret among the words of a launch, as far as its line is whole by itself.

    Raises:
        UserError: HF163.
    """
    for line in "\n".join(commands).replace("\\\n", " ").split("\n"):
        if not _MAY_START.search(line):
            continue
        try:
            found = [*leaks(shlex.split(_VARIABLE.sub(UNKNOWN, line), comments=True))]
        except ValueError:
            continue  # it goes on in another line, or is not of a shell
        for leak in found:
            message = f"a launch holds what looks like {leak.what}, and is kept in job.json"
            raise UserError("HF163", f"{message}: let the program read a variable or a file")


def script_of(
    spec: JobSpec,
    plan: Plan,
    launch: WrappedLaunch,
    *,
    run_dir: Path,
    python: str,
    hosts: Sequence[str] = (),
    output: str | None = None,
) -> str:
    """Return the script that runs in the place of a launch.

    `spec` is that of `job_of`, `run_dir` absolute, `python` the nodes' interpreter with holdfast,
    `hosts` the nodes that it starts on: none means all of the job; `output` the file that gets what
    workers print, if not stdout.

    Raises:
        UserError: HF160 the times do not fit; HF166 a path that a script cannot carry.
    """
    run = check_path(run_dir, "run directory")
    clock = clock_chain(spec, plan.ladder)
    pyxis = launch.options.in_container
    apart = pyxis or bool(launch.program and launch.inside)
    options = [words(option) for option in launch.srun]
    return template("wrapped.sh.j2").render(
        run=run,
        python=check_path(python, "interpreter"),
        clock=clock,
        chain=str(clock),
        restart=spec.slurm.restart,
        wrapped=True,
        on=Quoted(f" --on={quoted(','.join(hosts))}" if hosts else ""),
        show=Quoted(f" --show={quoted(output or '-')}"),
        max_requeues=spec.slurm.max_requeues,
        cpus=False,
        container="pyxis" if pyxis else "apptainer" if launch.inside else None,
        ours=[words(*SET_BY_SCRIPT)],
        srun_container=options if pyxis else (),
        srun_options=() if pyxis else options,
        container_python=CONTAINER_PYTHON,
        prefix=Quoted("" if launch.inside else "".join(f"{quoted(w)} " for w in launch.prefix)),
        program=words(*launch.program) if launch.program else None,
        task_python=CONTAINER_PYTHON if apart else Quoted('"$hf_python"'),
        in_image=Quoted("".join(f"{quoted(word)} " for word in launch.prefix)),
        apart=Quoted(" --apart" if apart else ""),
        inside=words(*launch.inside) if launch.inside else None,
        logs=step_log(run, array=False),
    )
