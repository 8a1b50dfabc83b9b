"""Name -> (renderer, backend): the only place that knows which platforms there are.

Modules are named, not imported: a command that needs none of them stays fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from launcher.errors import UserError

if TYPE_CHECKING:
    from launcher.backends.base import Backend


@dataclass(frozen=True, slots=True)
class Target:
    """One platform. All are `module:attribute`."""

    renderer: str
    backend: str
    sweep_renderer: str | None = None
    """None: it has no arrays."""
    sees_other_paths: bool = False
    """Its nodes see other paths than this machine, so paths cannot be looked at here."""
    nodes_return: bool = True
    """A node that the platform holds for lost can take part again in the same job."""
    exclude: str | None = None
    """Key of the job file with nodes not to use; None: its nodes are not to be chosen."""

    def load_renderer(self) -> Callable[..., dict[str, str]]:
        """Return the function (spec, plan, *, run_id, run_dir, base_dir, python) -> Bundle.

        `python` is the interpreter with holdfast, for platforms where the job names none.
        """
        renderer: Callable[..., dict[str, str]] = _load(self.renderer)
        return renderer

    def load_sweep_renderer(self) -> Callable[..., dict[str, str]] | None:
        """Return the function ([(spec, plan), …], *, …as the renderer) -> Bundle, if there is one.

        Task i of the array that is rendered runs in the folder `run_dir/i`.
        """
        if self.sweep_renderer is None:
            return None
        renderer: Callable[..., dict[str, str]] = _load(self.sweep_renderer)
        return renderer

    def load_backend(self) -> Backend:
        """Return a backend, which submits and watches."""
        backend: Backend = _load(self.backend)()
        return backend


def _on_kubernetes(renderer: str) -> Target:
    backend = "launcher.backends.kubernetes.backend:KubernetesBackend"
    return Target(renderer, backend, sees_other_paths=True, exclude="kubernetes.exclude")


TARGETS: Final[dict[str, Target]] = {
    "local": Target(
        "launcher.render.local:render_local", "launcher.backends.background:BackgroundBackend"
    ),
    "slurm": Target(
        "launcher.render.sbatch:render_slurm",
        "launcher.backends.slurm.backend:SlurmBackend",
        "launcher.render.sbatch:render_sweep",
        nodes_return=False,  # --no-kill gives a node away for good
        exclude="slurm.exclude",
    ),
    "pytorchjob": _on_kubernetes("launcher.render.pytorchjob:render_pytorchjob"),
    "jobset": _on_kubernetes("launcher.render.jobset:render_jobset"),
    "trainjob": _on_kubernetes("launcher.render.trainjob:render_trainjob"),
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
