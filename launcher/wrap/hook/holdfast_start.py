"""Has what starts a training by torchrun, or by DeepSpeed's launcher, start agents instead.

It is `torch.distributed.run`, whoever calls it: torchrun, accelerate, axolotl, anybody. On the
PYTHONPATH of a wrapped script, where `holdfast batch` takes over, and of the programs that it
starts on each node (`launcher.node.task`), where this node's agent does. Imports nothing of ours:
the Python that runs this may have none.
"""

import base64
import importlib.abc
import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Any

_TORCHRUN = "torch.distributed.run"


def _words(torchrun: Any, args: Namespace) -> list[str]:
    """Return the command line of which torchrun's parser has made `args`."""
    found: list[str] = []
    for action in torchrun.get_args_parser()._actions:  # noqa: SLF001  argparse has no other list
        value = getattr(args, action.dest, action.default)
        if not action.option_strings or value in (action.default, None):
            continue
        name = max(action.option_strings, key=len)
        found += [name] if action.nargs == 0 else [f"{name}={value}"]
    # torch.distributed.launch calls it with a parser of its own.
    rank = ["--local-rank=${local_rank}"] if getattr(args, "use_env", True) is False else []
    return [*found, args.training_script, *rank, *args.training_script_args]


def _start(words: list[str]) -> None:
    """Become what runs in the place of a torchrun with these arguments."""
    env = os.environ
    if "HOLDFAST_TASK" in env:
        ours = ["launcher.node", "launched", env["HOLDFAST_TASK"]]
        ours += filter(None, [env["HOLDFAST_APART"]])
    else:
        ours = ["launcher.cli.main", "batch"]
    python = env["HOLDFAST_PYTHON"]
    sys.stdout.flush()
    sys.stderr.flush()
    command = [python, "-P", "-m", *ours, "--", sys.executable, "-m", _TORCHRUN, *words]
    os.execv(python, command)  # noqa: S606  an argument list, no shell


def _run(torchrun: Any, _own: Callable[..., Any], args: Namespace) -> None:
    _start(_words(torchrun, args))


def _deepspeed(launch: Any, own: Callable[[], Any]) -> None:
    """Start what DeepSpeed's launcher of one node would (deepspeed/launcher/launch.py, main)."""
    args = launch.parse_args()
    nodes = json.loads(base64.urlsafe_b64decode(args.world_info))
    devices = [*nodes.values()][args.node_rank]
    alike = len({*map(len, nodes.values())}) == 1
    here = len(nodes) == 1 or (
        "HOLDFAST_TASK" in os.environ and os.environ.get("SLURM_NNODES") == str(len(nodes))
    )
    if args.bind_cores_to_rank or args.enable_elastic_training or not (alike and here):
        own()
        return
    if devices != [*range(len(devices))]:
        launch.get_accelerator().set_visible_devices_envs(os.environ, devices)
    os.environ.update(CROSS_RANK=str(args.node_rank), CROSS_SIZE=str(len(nodes)))
    os.environ["LOCAL_SIZE"] = str(len(devices))
    kind = {"-m": args.module, "--no-python": args.no_python}
    _start([
        *(f"--nnodes={len(nodes)}", f"--nproc-per-node={len(devices)}"),
        *(option for option, is_set in kind.items() if is_set),
        args.training_script,
        *([] if args.no_local_rank else ["--local_rank=${local_rank}"]),
        *args.training_script_args,
    ])  # fmt: skip


_INSTEAD: dict[str, tuple[str, Callable[..., None]]] = {
    _TORCHRUN: ("run", _run),
    "deepspeed.launcher.launch": ("main", _deepspeed),
}
"""Module -> its function that starts the training, and what is called instead."""


class _Loader(importlib.abc.Loader):
    """Loads the module as its own loader does, but for what runs."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: Any) -> None:
        self._own.exec_module(module)
        name, ours = _INSTEAD[module.__name__]
        setattr(module, name, partial(ours, module, getattr(module, name)))

    def get_code(self, name: str) -> CodeType:
        """Return what `python -m` runs as __main__."""
        return compile(f"import sys; from {name} import main; sys.exit(main())", name, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, _target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in _INSTEAD else None
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
