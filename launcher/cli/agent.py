"""`holdfast agent`: becomes the node's agent, which takes torchrun's flags itself."""

from __future__ import annotations

import os
import sys

import click

from launcher.cli.common import AsGiven
from launcher.platforms.installed import need


@click.command(cls=AsGiven, add_help_option=False, options_metavar="[FLAGS]")
@click.argument("arguments", nargs=-1, metavar="SCRIPT [ARGS]...")
def agent(arguments: tuple[str, ...]) -> None:
    """Run this node's part of any torchrun script: join, start workers, live through failures.

    Flags are torchrun's, with the same meaning; `holdfast agent --help` lists them. On one
    machine: `holdfast agent --standalone --nproc-per-node 2 train.py`. On several, the same
    command on each: `holdfast agent --nnodes 2:4 --rdzv-id 7 --rdzv-endpoint DIR train.py`,
    where DIR is on storage that all of them share.

    See docs/scripts.md.
    """
    need("holdfast agent", "torch", extra="train")
    sys.stdout.flush()
    # -P: no module of the working directory shadows a library; scripts find theirs all the same.
    command = [sys.executable, "-P", "-u", "-m", "elastic_trainer.agent", *arguments]
    os.execv(sys.executable, command)  # noqa: S606  an argument list, no shell
