"""`holdfast track`: writes the curves of runs to experiment trackers."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click

from elastic_trainer.plan.config import TRACKERS
from elastic_trainer.storage.files import of_each
from launcher.cli.common import EXIT_DONE, EXIT_INTERRUPTED, runs_option, say
from launcher.platforms.installed import need
from launcher.runs.reports.tracking import TrackedRun
from launcher.runs.run_dir import load
from launcher.runs.runs import find_run, find_users_runs
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  holdfast track --runs /shared/runs
  holdfast track runs/llama3-8b-20260101-120000
  holdfast track RUN --to tensorboard --once
"""
_EVERY_S: Final = 5.0


@click.command("track", epilog=EPILOG)
@click.argument("run", required=False, metavar="[RUN]")
@runs_option
@click.option(
    "--to",
    "names",
    type=click.Choice(TRACKERS),
    multiple=True,
    help="These trackers; repeatable.  [default: those of the job's `track`]",
)
@click.option("--once", is_flag=True, help="Write what there is, and end.")
def track(*, run: str | None, runs: Path, names: tuple[str, ...], once: bool) -> int:
    """Write loss, gradient norm, learning rate, speed and validation of runs to trackers.

    With RUN until it has done its last step, else of all runs of a folder, until interrupted. A
    run has one id in each tracker over all restarts, and each step is written once. Of several
    processes one writes. Credentials are those of this process: MLFLOW_TRACKING_URI,
    WANDB_API_KEY. Exit codes: 0 done, 2 the input is wrong, 130 interrupted.
    """
    writer = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
    known: dict[Path, TrackedRun | None] = {}
    for name in names:
        need(f"the tracker {name}", name, extra="track")
    try:
        while True:
            found = [find_run(run, runs)] if run is not None else find_users_runs(runs)[0]
            fresh = [each.path for each in found if each.path not in known]
            if run is None:
                opened = of_each(fresh, lambda path: (path, _open(path, names, writer)))
                known |= dict(opened)
            else:
                known |= {path: _open(path, names, writer, asked=True) for path in fresh}
            left = [each for each in known.values() if each is not None]
            if run is None:
                _of_each(left, lambda each: each.poll(at_once=once))
            else:
                for each in left:
                    each.poll(at_once=once)
            known |= {each.run_dir: None for each in left if each.is_over}  # a month has hundreds
            if once or (run is not None and all(each.is_over for each in left)):
                return EXIT_DONE
            threading.Event().wait(_EVERY_S)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        _of_each([each for each in known.values() if each is not None], TrackedRun.close)


def _of_each(tracked: Sequence[TrackedRun], act: Callable[[TrackedRun], None]) -> None:
    for _ in of_each(tracked, act, lambda each: each.run_dir):
        pass


def _open(
    path: Path, names: tuple[str, ...], writer: str, *, asked: bool = False
) -> TrackedRun | None:
    try:
        config = load(path)
    except UserError:
        if asked:
            raise
        return None
    wanted = names or config.track or ()
    if not wanted and asked:
        raise UserError(
            "HF699", f"{path}: its job has no `track`; name trackers by --to {'|'.join(TRACKERS)}"
        )
    writable = os.access(path, os.W_OK)
    if asked and not writable:
        raise UserError(
            "HF612",
            f"{path} cannot be written: what was tracked is noted there; grant the permission",
        )
    if not wanted or not writable:
        return None
    return TrackedRun(
        path, run_id=config.run_id, trackers=wanted, writer=writer, wall=time.time, say=say
    )
