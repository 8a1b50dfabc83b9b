"""Worker entry point: runs the trainer, and turns its end into an exit code and an error file.

A zygote imports this module before it forks, so everything that a step needs is
imported here: through the trainer, or by `preload`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from elastic_trainer.data import DataError
from elastic_trainer.model.decoder import ModelError
from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from elastic_trainer.state.errors import CheckpointError
from elastic_trainer.storage.files import outage_of
from elastic_trainer.train import warm_up as standby
from elastic_trainer.train.guard import NumbersError
from elastic_trainer.train.trainer import run_worker
from elastic_trainer.worker.preload import preload

preload(os.environ)

warm_up = standby.warm_up
"""Of a standby, called by the zygote."""
USER_ERRORS = (CheckpointError, DataError, ModelError, NumbersError)
"""A restart cannot help: exit 93, unless storage is away."""


def main(hold: Callable[[], float] | None = None) -> int:
    """Train; return the process's exit code. `hold` as of `run_worker`."""
    try:
        return run_worker(built=standby.forget_others, hold=hold)
    except USER_ERRORS as error:
        outage = outage_of(error)  # nobody's mistake
        write_error_file(outage or error)
        sys.stderr.write(f"{error}\n")
        return EXIT_DO_NOT_RESTART if outage is None else 1
    except BaseException as error:  # noqa: BLE001
        # CheckpointException is a BaseException: every end leaves its error file.
        write_error_file(error)
        traceback.print_exc()
        return 1


def write_error_file(error: BaseException) -> None:
    """Write torchelastic's error file, where the agent has asked for one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    record = {
        "message": {
            "message": _with_causes(error),
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
        }
    }
    Path(path).write_text(json.dumps(record), encoding="utf-8")


def _with_causes(error: BaseException | None) -> str:
    """Return an error and what it was raised from, a line or more each.

    A pipeline's stage says only that it failed; that a peer was gone is in its cause. Errors
    of the user's name theirs themselves.
    """
    lines: list[str] = []
    while error is not None:
        lines.append(f"{'caused by ' if lines else ''}{type(error).__name__}: {error}")
        error = None if isinstance(error, USER_ERRORS) else error.__cause__
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
