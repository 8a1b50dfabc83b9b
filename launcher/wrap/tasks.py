"""A launch by srun with several tasks and no torchrun: `srun python train.py`. Pure.

Each task is a process of the training. Agents start as many on each node, and
`launcher.node.as_task` gives each what srun's own task has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Final

from elastic_trainer.plan.command import literal
from launcher.render.sbatch import CONTAINER_PYTHON
from launcher.wrap.launches import VARIABLE, WrappedLaunch, unused
from launcher.wrap.sruns import SrunOptions, cannot_wrap, srun_of

_PYTHON: Final = re.compile(
    r"(?:^|[\s/;&|('\"])python[\d.]*\s+(?:(?!-c\s)[^\s;&|]+\s+){0,6}?(?:-m\s|\S+\.py\b|[\"']?\$)"
    r"|^#!.*\bpython[\d.]*$",
    re.MULTILINE,
)
"""It runs a file or a module; some words of its own may stand before."""
_MODULE: Final = re.compile(r"\s-m\s+([\w.]+)")
_FILE: Final = re.compile(r"[^\s;&|'\"=]+\.(?:py|sh)\b")
_MOST_FILES: Final = 16
_TOGETHER: Final = re.compile(
    r"\bMASTER_ADDR\b|\bSLURM_PROCID\b|\btorch\.distributed\b|init_process_group|init_distributed"
    r"|\b(?:pytorch_)?lightning\b|\bdeepspeed\b|(?:\b|_)megatron\b|DistributedDataParallel"
    r"|\bnum[-_]nodes\b",
    re.IGNORECASE,
)
"""What a program has whose tasks are one training; tasks that know nothing of others have not."""
_BIND: Final = re.compile(r"--(cpu|gpu|accel)[-_]bind=(.*)")
_CPUS: Final = re.compile(r"(?:\w+,)*(?:mask|map)_cpu[:=].+")
_NO_BIND: Final = re.compile(r"(?:(?:none|no|quiet|q|verbose|v),?)*")
AS_TASK: Final = "launcher.node.as_task"
PODS: Final = "HOLDFAST_PODS"
"""Variable of wrapped pods: how many the job has."""


def tasks_of(
    argv: Sequence[str], env: Mapping[str, str], read: Callable[[str], str], python: str
) -> WrappedLaunch | None:
    """Take apart an srun whose tasks are the processes of a training; None: it is none.

    `env` and `read` are as for `launch_of`, which has found no launch in it; `python` is the
    interpreter with holdfast of the nodes; an image has its own.

    Raises:
        UserError: HF169, it is one that cannot be wrapped.
    """
    if PurePath(argv[0]).name != "srun":
        return None
    options, program = srun_of(argv[1:])
    num_nodes = options.num_nodes or int(env.get("SLURM_JOB_NUM_NODES") or "1")
    total, text = _tasks(options, env, num_nodes), _text(program, env, read)
    if total == 1 or not _PYTHON.search(text):
        return None
    options.check()
    if not (env.get("MASTER_ADDR") or _TOGETHER.search(text)):
        cannot_wrap(
            f"srun starts {total} tasks of Python, and nothing shows that they are one training: "
            "export MASTER_ADDR, if they are"
        )
    each, rest = divmod(total, num_nodes)
    way = options.given.get("distribution") or env.get("SLURM_DISTRIBUTION", "block")
    if rest or way.partition(":")[0] not in ("block", "*"):
        cannot_wrap(f"srun: {total} tasks on {num_nodes} nodes are not in blocks of one size")
    kept, own, notes = _unbound(options.kept)
    gpus = options.per_task("gpus", env)[1]
    return WrappedLaunch(
        srun=(*kept, *options.gpus_per_node(num_nodes), *options.of_tasks(each, env)),
        options=options,
        of_tasks=True,
        nodes=(num_nodes, num_nodes),
        workers=each,
        command=(
            "--no-python",
            *(
                CONTAINER_PYTHON if options.in_container else python,
                "-P",
                "-m",
                AS_TASK,
                *([f"--gpus={gpus}"] if gpus else []),
                *own,
                "--",
            ),
            *literal(program),
        ),
        notes=(*notes, *unused(options, env)),
    )


def runs_python(words: Sequence[str]) -> bool:
    """Return whether a command is a program of Python."""
    named = words and re.fullmatch(r"python[\d.]*", PurePath(words[0]).name)
    return bool(named) and any(word == "-m" or word.endswith(".py") for word in words[1:])


def rank_of(argv: Sequence[str], env: Mapping[str, str], python: str) -> WrappedLaunch | None:
    """Return the launch of a PyTorchJob whose pods are one process each; None: this is none.

    The operator gives each its RANK (training-operator, pkg/controller.v1/pytorch/envvar.go).
    """
    num_pods = int(env.get(PODS) or "1")
    if env.get("HOLDFAST_KIND") != "pytorchjob" or num_pods < 2 or not runs_python(argv):
        return None
    options, program = srun_of(("--", *argv))
    return WrappedLaunch(
        srun=(),
        options=options,
        of_tasks=True,
        nodes=(num_pods, num_pods),
        workers=1,
        command=("--no-python", python, "-P", "-m", AS_TASK, "--of-pod", "--", *literal(program)),
    )


def _tasks(options: SrunOptions, env: Mapping[str, str], num_nodes: int) -> int:
    """Return how many tasks an srun starts (man srun: --ntasks, --ntasks-per-node)."""
    each = options.given.get("ntasks-per-node", "")
    total = options.given.get("ntasks") or env.get("SLURM_NTASKS", "")
    if each.isdecimal():
        return int(each) * num_nodes
    return int(total) if total.isdecimal() else num_nodes


def _text(program: Sequence[str], env: Mapping[str, str], read: Callable[[str], str]) -> str:
    """Return a command, and what its variables, scripts and modules say."""
    texts = [f"{' '.join(program)} "]
    texts += [env.get(name, "") for name in VARIABLE.findall(texts[0])]
    said = " ".join(texts)
    folders = ["", *env.get("PYTHONPATH", "").split(":")]
    files = {*_FILE.findall(said), *program[:1]}
    for module in _MODULE.findall(said):
        inside = module.replace(".", "/")
        names = (f"{inside}.py", f"{inside}/__main__.py")
        files |= {str(PurePath(folder, name)) for folder in folders for name in names}
    return "\n".join([said, *map(read, islice(sorted(files), _MOST_FILES))])


def _unbound(kept: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the options of the agents' srun, those of `as_task`, and a line for each unused one.

    What binds a task would bind all of its node's.
    """
    left, own, notes = [], [], []
    for option in kept:
        found = _BIND.fullmatch(option)
        if found is None:
            left.append(option)
        elif found[1] == "cpu" and _CPUS.fullmatch(found[2]):
            own.append(f"--cpus={found[2]}")
        elif _NO_BIND.fullmatch(found[2]):
            pass
        elif found[1] == "gpu":
            cannot_wrap(f"srun {option}: agents bind no GPUs; write --gpus-per-task")
        else:
            notes.append(f"srun: {option} is not used")
    return left, own, notes
