"""The launcher: plans, renders, submits and watches jobs. Never imports torch.

For programs: `from launcher import load_job, plan, render, submit` (launcher/api.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.api import load_job, plan, render, submit

__all__ = ["load_job", "plan", "render", "submit"]


def __getattr__(name: str) -> Any:
    """Import the four functions when they are asked for: commands start without them.

    `render` is also a package of ours; calling it does the same (launcher/render/__init__.py).
    """
    if name in __all__ and name != "render":
        from importlib import import_module

        return getattr(import_module("launcher.api"), name)
    raise AttributeError(f"module 'launcher' has no attribute {name!r}")
