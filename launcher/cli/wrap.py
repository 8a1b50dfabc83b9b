"""`holdfast wrap`: a batch script of one's own that runs torchrun, so that it survives."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from launcher.cli.common import (
    EXIT_DONE,
    exit_with_problems,
    json_option,
    path_option,
    print_json,
)
from launcher.errors import UserError, Where, writing

EPILOG = """\b
Examples:
  holdfast wrap train.sbatch                    # show what would change
  holdfast wrap train.sbatch -o train.hf.sbatch && sbatch train.hf.sbatch
"""


@click.command("wrap", epilog=EPILOG)
@click.argument("script", type=click.Path(path_type=Path))
@path_option("-o", "--output", metavar="FILE", help="Write the wrapped script; else show the diff.")
@json_option
def wrap(*, script: Path, output: Path | None, as_json: bool) -> int:
    """Wrap SCRIPT, a batch script with `srun torchrun …`, so that its job survives lost nodes.

    Options, modules and environment stay. The job then has a run directory,
    runs/<name>-<job id>, for `status`, `logs`, `why` and `cancel`. It is requeued after a time
    limit, and when too few nodes are left. See docs/scripts.md.
    """
    from launcher.render.wrapped import wrap_script

    try:
        text = _text(script)
        wrapped = wrap_script(text)
        if output is not None:
            with writing(output, "choose another"):
                output.write_text(wrapped, encoding="utf-8")
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json({"ok": True, "script": wrapped, "written": str(output) if output else None})
    elif output is not None:
        click.echo(output)
    else:
        before, after = text.splitlines(), wrapped.splitlines()
        for line in difflib.unified_diff(before, after, str(script), "wrapped", lineterm="", n=1):
            colour = {"+": "green", "-": "red"}.get(line[:1])
            click.echo(click.style(line, fg=colour))
    return EXIT_DONE


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        message = f"cannot be read: {reason}; check the path"
        raise UserError("HF001", message, where=Where(str(path))) from error
