"""`holdfast-agent`: imports what agent and zygote share, runs the agent, says how it ended.

`python -m elastic_trainer.agent` is the same.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence

from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from elastic_trainer.worker import fresh_process as fresh_process  # noqa: PLC0414  first of all
from elastic_trainer.worker.process import no_threads


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent and return its exit code.

    As a program (`argv` None) it ends at once then: a thread that waits for storage which
    never answers must not hold the node.
    """
    _import_torch()
    from elastic_trainer.agent.flags import OptionsError
    from elastic_trainer.agent.hardware import FabricError
    from elastic_trainer.agent.node import die_of_a_thread, run
    from elastic_trainer.agent.options import parse
    from elastic_trainer.board.address import BoardPlaceError
    from elastic_trainer.storage.storage_probe import StorageError
    from elastic_trainer.worker.secret import SecretError

    if argv is None:
        threading.excepthook = die_of_a_thread
    try:
        code = run(parse(argv, os.environ))
    except (OptionsError, FabricError, SecretError, BoardPlaceError, StorageError) as error:
        sys.stderr.write(f"holdfast agent: error: {error}\n")
        code = error.exit_code if isinstance(error, FabricError) else EXIT_DO_NOT_RESTART
    except Exception:  # noqa: BLE001  the last frame: say what happened, then end at once
        traceback.print_exc()
        code = 1
    if argv is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _import_torch() -> None:
    """Import all that the agent uses, as the zygote needs it: without threads.

    torch first of all, for the command line is read by torchrun's own parser.
    """
    # What is imported stays: the collector looks at none of it, now or later.
    gc.disable()
    with no_threads():
        importlib.import_module("elastic_trainer.agent.node")
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    main()
