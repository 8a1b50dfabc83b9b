"""`holdfast agent`, `wrap` and `batch`: scripts for torchrun, and what runs them."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from launcher.cli.common import (
    AsGiven,
    exit_with_problems,
    json_option,
    path_option,
    print_json,
)
from launcher.platforms.installed import need
from launcher.spec.errors import UserError, Where, writing


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


WRAP_EPILOG = """\b
Examples:
  holdfast wrap train.sbatch                    # show what would change
  holdfast wrap train.sbatch -o train.hf.sbatch && sbatch train.hf.sbatch
  holdfast wrap job.yaml -o job.hf.yaml && kubectl create -f job.hf.yaml
"""


@click.command("wrap", epilog=WRAP_EPILOG)
@click.argument("file", type=click.Path(path_type=Path))
@path_option("-o", "--output", metavar="FILE", help="Write what is wrapped; else show the diff.")
@click.option(
    "--runs",
    metavar="DIR",
    help="Of a manifest: folder for its run directory, on a volume that all its pods share.  "
    "[default: runs on the only such volume]",
)
@click.option(
    "--claim", metavar="NAME", help="Of a manifest: claim to mount for run directories, shared."
)
@click.option("--explain", is_flag=True, help="Of a batch script: say what becomes of its lines.")
@json_option
def wrap(
    *,
    file: Path,
    output: Path | None,
    runs: str | None,
    claim: str | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Wrap FILE, so that its job survives lost nodes.

    FILE is a batch script that starts a training by torchrun, with srun or without, or a manifest
    with one PyTorchJob, JobSet, TrainJob or Job whose pods run torchrun. All that does not have to
    change stays: options, modules, environment, volumes, comments. The job then has a run
    directory, runs/<name>-<job id> or DIR/<name>. On Slurm `status`, `logs`, `why` and `cancel`
    find it, and the job is requeued after a time limit and when too few nodes are left. See
    docs/wrap.md.
    """
    from launcher.wrap.interpreter import agents_python
    from launcher.wrap.manifest import is_manifest, wrap_manifest
    from launcher.wrap.wrapped import explained, wrap_script

    notes: list[str] = []
    secrets: tuple[str, ...] = ()
    text = _text(file)
    if is_manifest(text):
        made = wrap_manifest(text, str(file), runs=runs, claim=claim)
        wrapped, secrets = made.text, made.secrets
        images = " and ".join(made.images)
        notes = [
            f"{images} must contain holdfast, in the environment that has torch",
            f"the run's directory is {made.run_dir}, as the pods see it",
            *(
                f"{name} is an init container with restartPolicy: Always now, which Kubernetes "
                "has since 1.29: in containers it would keep an ended pod from being replaced"
                for name in made.sidecars
            ),
        ]
        notes += made.notes
    else:
        script = wrap_script(text, sys.executable)
        wrapped, notes = script.text, explained(text, script) if explain else list(script.notes)
        for word in script.torchruns:  # else only the job's PATH says which it is
            agents_python(word)
    if output is not None:
        with writing(output, "choose another"):
            _write(output, wrapped, like=file)
    if as_json:
        written = str(output) if output else None
        print_json({"ok": True, "script": wrapped, "written": written, "notes": notes})
        return
    if output is not None:
        click.echo(output)
    else:
        before, after = text.splitlines(), wrapped.splitlines()
        for line in difflib.unified_diff(before, after, str(file), "wrapped", lineterm="", n=1):
            colour = {"+": "green", "-": "red"}.get(line[:1])
            click.echo(click.style(_shown(line, secrets), fg=colour))
    _tell(notes)


def _shown(line: str, secrets: tuple[str, ...]) -> str:
    from launcher.spec.secret_forms import MASK, masked

    for secret in secrets:
        line = line.replace(secret, MASK)
    return masked(line)


def _write(path: Path, text: str, *, like: Path) -> None:
    """Write a file with the rights of `like`: both may hold a secret."""
    from elastic_trainer.storage.files import beside, check_output, write_new

    check_output(path)
    with beside(path) as temp:
        write_new(temp, b"")
        temp.chmod(like.stat().st_mode & 0o777)
        temp.write_text(text, encoding="utf-8")
        temp.replace(path)


def _text(path: Path) -> str:
    from launcher.plan.loading import job_text
    from launcher.spec.source import MAX_BYTES

    try:
        text = job_text(path).replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        message = f"cannot be read: {reason}; check the path"
        raise UserError("HF001", message, where=Where(str(path))) from error
    if len(text) > MAX_BYTES:
        message = f"longer than {MAX_BYTES:,} characters: neither a batch script nor a manifest"
        raise UserError("HF002", message, where=Where(str(path)))
    return text


@click.command("batch", cls=AsGiven, add_help_option=False, options_metavar="--")
@click.argument("argv", nargs=-1, metavar="[srun [OPTIONS]] torchrun …")
def batch(*, argv: tuple[str, ...]) -> int:
    """Run what takes the place of a program that a wrapped script or pod starts.

    `holdfast wrap` has them call it.
    """
    from launcher.wrap.launches import is_pod

    argv, env = argv[argv[:1] == ("--",) :], os.environ
    try:
        if is_pod(env):
            from launcher.node.container import run

            return run(argv, env)
        from launcher.node.launch import start

        start(argv, env)
    except UserError as error:
        exit_with_problems(error, as_json=False)
        return EXIT_DO_NOT_RESTART


def _tell(notes: Iterable[str]) -> None:
    for note in notes:
        click.echo(f"holdfast: {note}", err=True)
