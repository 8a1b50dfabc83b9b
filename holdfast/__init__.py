"""What users import, on login nodes and in training scripts: docs/api.md, docs/scripts.md.

    holdfast.submit("job.yaml", to="slurm").result()    # from a program; needs no torch
    run = holdfast.start()                              # in a training loop; see docs/scripts.md

Each name is imported when it is used: a training script pays for no launcher, a launcher for no
torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_trainer.api import ApiError, WorkerRun, progress, start
    from launcher.api import (
        FailedRunError,
        Run,
        find_site,
        load_job,
        open_run,
        plan,
        render,
        submit,
        submit_sweep,
    )
    from launcher.spec.errors import HoldfastError, PlatformError, TemporaryError, UserError

__all__ = [
    "ApiError",
    "FailedRunError",
    "HoldfastError",
    "PlatformError",
    "Run",
    "TemporaryError",
    "UserError",
    "WorkerRun",
    "find_site",
    "load_job",
    "open_run",
    "plan",
    "progress",
    "render",
    "start",
    "submit",
    "submit_sweep",
]
_FROM = {
    **dict.fromkeys(("ApiError", "WorkerRun", "progress", "start"), "elastic_trainer.api"),
    **dict.fromkeys(
        ("HoldfastError", "PlatformError", "TemporaryError", "UserError"), "launcher.spec.errors"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(ours(_FROM.get(name, "launcher.api")), name)


def __dir__() -> list[str]:
    return __all__


def ours(module: str) -> ModuleType:
    """Import a module of this distribution.

    Raises:
        ImportError: a file of the user's hides it, as launcher.py beside a script.
    """
    package = importlib.import_module(module.partition(".")[0])
    name, found = package.__name__, package.__file__ or str(list(package.__path__))
    expected = Path(__file__).resolve().parents[1] / name / "__init__.py"
    if Path(found).resolve() != expected:
        raise ImportError(
            f"{found} hides Holdfast's own package {name} ({expected.parent}): rename it, or run "
            "Python with -P, which leaves the script's folder out of the search",
            name=name,
            path=found,
        )
    return importlib.import_module(module)
