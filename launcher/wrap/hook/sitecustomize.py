"""Has what starts a training start agents instead (holdfast_start.py); for every Python, even 2.7.

Runs the sitecustomize that this one hides, if there is one.
"""

import importlib
import os
import sys

_OURS = {"HOLDFAST_TASK", "HOLDFAST_SCRIPT"}
if sys.version_info >= (3, 10) and "HOLDFAST_PYTHON" in os.environ and _OURS & set(os.environ):
    importlib.import_module("holdfast_start")

_FOLDER = __file__.rpartition("/")[0]
sys.path[:] = [path for path in sys.path if path != _FOLDER]
_THIS = sys.modules.pop("sitecustomize")
try:
    importlib.import_module("sitecustomize")
except ImportError:
    sys.modules["sitecustomize"] = _THIS
