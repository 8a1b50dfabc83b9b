"""Name -> (renderer, backend): the only place that knows which platforms exist.

Modules are named, not imported: a command that needs none of them stays fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

from launcher.spec.errors import UserError

if TYPE_CHECKING:
    from launcher.plan.planning import Plan
    from launcher.platforms.base import Backend
    from launcher.spec.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Target:
    """One platform; functions are named `module:attribute`."""

    renderer: str
    backend: str
    checker: str | None = None
    """None: there is nothing to check but the job file."""
    kind: str | None = None
    """What renderer and checker call it, where several targets share them."""
    sweep_renderer: str | None = None
    """None: it has no arrays."""
    sees_other_paths: bool = False
    """Its nodes see other paths than this machine, so paths cannot be looked at here."""
    nodes_return: bool = True
    """A node that the platform holds for lost can take part again in the same job."""
    lost: str = "node_lost"
    """What the loss of a node is called in `signatures.toml` (`stands_for`)."""
    exclude: str | None = None
    """Key of the job file that excludes nodes; None: nodes cannot be chosen."""

    def load_renderer(self) -> Callable[..., dict[str, str]]:
        """Return the function (spec, plan, *, run_id, run_dir, base_dir, python) -> Bundle.

        `python` is the interpreter with holdfast, for platforms where the job names none.
        """
        renderer: Callable[..., dict[str, str]] = resolve_name(self.renderer)
        return renderer if self.kind is None else partial(renderer, kind=self.kind)

    def check(self, spec: JobSpec, plan: Plan, **places: Any) -> None:
        """Check what the renderer would refuse; nothing is rendered.

        `places` are the renderer's run_id, run_dir and base_dir.

        Raises:
            UserError: as the renderer.
        """
        if self.checker is not None:
            kind = {} if self.kind is None else {"kind": self.kind}
            resolve_name(self.checker)(spec, plan, **kind, **places)

    def load_sweep_renderer(self) -> Callable[..., dict[str, str]] | None:
        """Return the function ([(spec, plan), …], *, …as the renderer) -> Bundle, if any.

        Task i of the array runs in the folder `run_dir/i`.
        """
        if self.sweep_renderer is None:
            return None
        renderer: Callable[..., dict[str, str]] = resolve_name(self.sweep_renderer)
        return renderer

    def load_backend(self) -> Backend:
        """Return a backend, which submits and watches."""
        backend: Backend = resolve_name(self.backend)()
        return backend


TARGETS: Final[dict[str, Target]] = {
    "local": Target(
        "launcher.render.local:render_local", "launcher.platforms.background:BackgroundBackend"
    ),
    "slurm": Target(
        "launcher.render.sbatch:render_slurm",
        "launcher.platforms.slurm.backend:SlurmBackend",
        checker="launcher.render.sbatch:check_slurm",
        sweep_renderer="launcher.render.sbatch:render_sweep",
        nodes_return=False,  # --no-kill gives a node away for good
        lost="slurm_node_lost",
        exclude="slurm.exclude",
    ),
    **{
        kind: Target(
            "launcher.render.kinds:render_kubernetes",
            "launcher.platforms.kubernetes.backend:KubernetesBackend",
            checker="launcher.render.kinds:check_pods",
            kind=kind,
            sees_other_paths=True,
            lost="pod_lost",
            exclude="kubernetes.exclude",
        )
        for kind in ("pytorchjob", "jobset", "trainjob")
    },
}
"""Platforms by name."""


def target_named(name: str) -> Target:
    """Return the platform called `name`.

    Raises:
        UserError: HF206 it is unknown.
    """
    if name not in TARGETS:
        raise UserError("HF206", f"{name} is not a target; use {', '.join(TARGETS)}")
    return TARGETS[name]
