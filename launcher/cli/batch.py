"""`holdfast batch`: what a wrapped batch script calls in place of its srun of torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from launcher.cli.common import EXIT_DONE, exit_with_problems
from launcher.errors import UserError, writing


@click.command(
    "batch",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    options_metavar="--",
)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="srun [OPTIONS] torchrun …")
def batch(argv: tuple[str, ...]) -> int:
    """Make the run directory of this job, and print the file that the batch script reads.

    `holdfast wrap` writes the lines that call it.
    """
    from launcher.atomic_file import write_atomic
    from launcher.jobspec.reading import load_spec
    from launcher.node.attempt import Attempt
    from launcher.ops import run_dir as run_dirs
    from launcher.ops.runs import is_run
    from launcher.planning.search import plan
    from launcher.render.local import render_local
    from launcher.render.wrapped import job_of, launch_of, script_of

    env = os.environ
    try:
        launch = launch_of(argv, env)
        spec = load_spec(job_of(launch, env))
        planned = plan(spec)
        number = Attempt.of_env(Path(), env).slurm_id
        run_dir = Path("runs", f"{spec.name}-{number}").absolute()
        script = script_of(spec, planned, launch, run_dir=run_dir, python=sys.executable)
        if not is_run(run_dir):
            files = render_local(
                spec, planned, run_id=run_dir.name, run_dir=run_dir, base_dir=spec.folder
            )
            run_dirs.create(run_dir, files)
            run_dirs.check_storage(run_dir)
        with writing(run_dir):
            write_atomic(run_dir / "agents.sh", script)
    except UserError as error:
        return exit_with_problems(error, as_json=False)
    for note in launch.notes:
        click.echo(f"holdfast: torchrun: {note}", err=True)
    click.echo(run_dir / "agents.sh")
    return EXIT_DONE
