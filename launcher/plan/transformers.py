"""Asks transformers about a config.json, in a process of its own: it imports torch.

The one module of this room that starts a process: what the plan is of depends on the answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from typing import Final

from elastic_trainer.plan.transformers_config import Answer

_LONGEST_S: Final = 300.0
"""Of one question: torch and transformers are imported, which takes seconds, on slow storage a
minute, and hundreds of layers are built without weights."""
_MODULE: Final = "elastic_trainer.model.transformers_facts"


@lru_cache(maxsize=64)  # a job is checked several times as its layout is chosen
def ask(config: str, longest_s: float = _LONGEST_S) -> Answer | None:
    """Return what transformers says of the text of a config.json.

    None: torch or transformers is not installed here. Failures of the process are answers too.
    """
    if find_spec("transformers") is None or find_spec("torch") is None:
        return None
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", _MODULE, "-"],
            input=config,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=env,
            timeout=longest_s,
            check=False,
        )
        return Answer.from_json(done.stdout)
    except subprocess.TimeoutExpired:
        return Answer(error=f"it did not answer within {longest_s:g} s")
    except OSError as error:
        return Answer(error=f"{sys.executable} cannot be started: {error.strerror or error}")
    except (TypeError, ValueError):
        said = done.stderr.strip().splitlines()
        return Answer(error=f"exit code {done.returncode}: {said[-1][:300] if said else 'silence'}")
