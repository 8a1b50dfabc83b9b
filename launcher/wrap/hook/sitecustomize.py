"""Has `torch.distributed.run` become this node's agent: torchrun's, accelerate's, anybody's.

Only where a program of a wrapped script runs on a node (`launcher.node.task`). Imports nothing of
ours: the Python that runs this may have none.
"""

import importlib.abc
import importlib.util
import os
import sys
from argparse import Namespace
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_NAME = "torch.distributed.run"
_MAIN = f"import sys; from {_NAME} import main; sys.exit(main())"


def _words(torchrun: Any, args: Namespace) -> list[str]:
    """Return the command line of which torchrun's parser has made `args`."""
    found: list[str] = []
    for action in torchrun.get_args_parser()._actions:  # noqa: SLF001  argparse has no other list
        value = getattr(args, action.dest, action.default)
        if not action.option_strings or value in (action.default, None):
            continue
        name = max(action.option_strings, key=len)
        found += [name] if action.nargs == 0 else [f"{name}={value}"]
    return [*found, args.training_script, *args.training_script_args]


def _run(torchrun: Any, args: Namespace) -> None:
    python, run, apart = (os.environ[f"HOLDFAST_{name}"] for name in ("PYTHON", "TASK", "APART"))
    words = [python, "-P", "-m", "launcher.node", "launched", run, *filter(None, [apart])]
    sys.stdout.flush()
    sys.stderr.flush()
    as_torchrun = [sys.executable, "-m", _NAME, *_words(torchrun, args)]
    os.execv(python, [*words, "--", *as_torchrun])  # noqa: S606  an argument list, no shell


class _Loader(importlib.abc.Loader):
    """Loads the module as its own loader does, but for what runs."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: Any) -> None:
        self._own.exec_module(module)
        module.run = partial(_run, module)

    def get_code(self, _name: str) -> CodeType:
        """Return what `python -m` runs as __main__."""
        return compile(_MAIN, _NAME, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, _target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _NAME else None
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _run_hidden() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    own = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != own]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "HOLDFAST_TASK" in os.environ:
    sys.meta_path.insert(0, _Finder())
    _run_hidden()
