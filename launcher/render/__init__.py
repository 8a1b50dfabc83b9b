"""Renderers: (spec, plan) to a bundle of texts. Pure.

The package is callable: `from launcher import render` is the function launcher.api.render.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A package and a function go by one name; whichever is imported first must not matter."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call launcher.api.render."""
        return import_module("launcher.api").render(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
