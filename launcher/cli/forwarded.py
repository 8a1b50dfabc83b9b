"""`holdfast forwarded`: on a site over SSH, what was asked elsewhere with --site."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from launcher.cli.common import exit_with_problems
from launcher.spec.errors import UserError, writing


@click.command(
    "forwarded", context_settings={"allow_interspersed_args": False, "help_option_names": []}
)
@click.option("--version", metavar="VERSION", help="Refuse if this one is another.")
@click.option(
    "--files",
    type=(str, int, str),
    metavar="NAME SIZE SHA256",
    help="Begin with a folder of files, from a tar on standard input.",
)
@click.argument("folder")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def forwarded(
    *, version: str | None, files: tuple[str, int, str] | None, folder: str, words: tuple[str, ...]
) -> int:
    """Run the command WORDS in FOLDER, relative to the home directory; all are percent-encoded.

    `--site` of a site with `ssh:` calls it. It ends with its standard input.
    """
    from launcher.cli.main import run_cli
    from launcher.runs import over_ssh

    place = Path.home() / over_ssh.decoded(folder)
    asked = [over_ssh.decoded(word) for word in words]
    try:
        if version is not None:
            over_ssh.refuse_version(over_ssh.decoded(version))
        if files is not None:
            name, size, digest = files
            over_ssh.unpack(sys.stdin.buffer, size, digest, place / over_ssh.SENT / name)
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
            os.chdir(place)
    except UserError as error:
        return exit_with_problems(error, as_json="--json" in asked)
    if not (over_ssh.takes_stdin(asked) or sys.stdin.isatty()):
        over_ssh.end_with_stdin()
    return run_cli(asked)
