"""Name -> (renderer, backend): the only place that knows which platforms there are.

Modules are named, not imported: a command that needs none of them stays fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from launcher.errors import UserError


@dataclass(frozen=True, slots=True)
class Target:
    """One platform. Both are `module:attribute`."""

    renderer: str
    backend: str

    def load_renderer(self) -> Callable[..., dict[str, str]]:
        """Return the function (spec, plan, *, run_id, run_dir, base_dir, python) -> Bundle.

        `python` is the interpreter with holdfast, for platforms where the job names none.
        """
        renderer: Callable[..., dict[str, str]] = _load(self.renderer)
        return renderer

    def load_backend(self) -> Any:
        """Return the class or module that submits and watches."""
        return _load(self.backend)


TARGETS: Final[dict[str, Target]] = {
    "local": Target("launcher.render.local:render_local", "launcher.backends.local"),
    "slurm": Target("launcher.render.sbatch:render_slurm", "launcher.backends.slurm:SlurmBackend"),
}
"""Platforms by name."""


def target_named(name: str) -> Target:
    """Return the platform called `name`.

    Raises:
        UserError: HF206: there is none.
    """
    if name not in TARGETS:
        raise UserError("HF206", f"{name} is no target; use {', '.join(TARGETS)}")
    return TARGETS[name]


def _load(dotted: str) -> Any:
    """Import `module` or `module:attribute`."""
    module, _, attribute = dotted.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
