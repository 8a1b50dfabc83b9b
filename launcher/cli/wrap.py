"""`holdfast wrap`: a batch script or PyTorchJob of one's own that runs torchrun, to survive."""

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
from launcher.spec.errors import UserError, Where, writing

EPILOG = """\b
Examples:
  holdfast wrap train.sbatch                    # show what would change
  holdfast wrap train.sbatch -o train.hf.sbatch && sbatch train.hf.sbatch
  holdfast wrap job.yaml -o job.hf.yaml && kubectl create -f job.hf.yaml
"""


@click.command("wrap", epilog=EPILOG)
@click.argument("file", type=click.Path(path_type=Path))
@path_option("-o", "--output", metavar="FILE", help="Write what is wrapped; else show the diff.")
@click.option(
    "--runs",
    metavar="DIR",
    help="Of a PyTorchJob: folder for its run directory, on a volume that all its pods share.  "
    "[default: runs on the only such volume]",
)
@json_option
def wrap(*, file: Path, output: Path | None, runs: str | None, as_json: bool) -> int:
    """Wrap FILE, so that its job survives lost nodes.

    FILE is a batch script with `srun torchrun …`, or a manifest with one PyTorchJob whose pods run
    torchrun. All that does not have to change stays: options, modules, environment, volumes,
    comments. The job then has a run directory, runs/<name>-<job id> or DIR/<name>. On Slurm
    `status`, `logs`, `why` and `cancel` find it, and the job is requeued after a time limit and
    when too few nodes are left. See docs/scripts.md.
    """
    from launcher.wrap.interpreter import agents_python
    from launcher.wrap.wrapped import wrap_script
    from launcher.wrap.wrapped_manifest import is_manifest, wrap_manifest

    notes: list[str] = []
    secrets: tuple[str, ...] = ()
    try:
        text = _text(file)
        if is_manifest(text):
            made = wrap_manifest(text, str(file), runs=runs)
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
            if made.backoff_limit is not None:
                notes.append(
                    f"backoffLimit: {made.backoff_limit} no longer ends the job: with "
                    "restartPolicy: ExitCode the agents' restart budget does, and nothing where no "
                    "agent can start"
                )
        else:
            script = wrap_script(text)
            wrapped, notes = script.text, list(script.notes)
            if "/" in (script.torchrun or ""):  # else only the job's PATH says which it is
                agents_python(str(script.torchrun))
        if output is not None:
            with writing(output, "choose another"):
                _write(output, wrapped, like=file)
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        written = str(output) if output else None
        print_json({"ok": True, "script": wrapped, "written": written, "notes": notes})
        return EXIT_DONE
    if output is not None:
        click.echo(output)
    else:
        before, after = text.splitlines(), wrapped.splitlines()
        for line in difflib.unified_diff(before, after, str(file), "wrapped", lineterm="", n=1):
            colour = {"+": "green", "-": "red"}.get(line[:1])
            click.echo(click.style(_shown(line, secrets), fg=colour))
    for note in notes:
        click.echo(f"holdfast: {note}", err=True)
    return EXIT_DONE


def _shown(line: str, secrets: tuple[str, ...]) -> str:
    """Return a line of what the user wrote without the secrets in it."""
    from launcher.spec.secret_forms import MASK, masked

    for secret in secrets:
        line = line.replace(secret, MASK)
    return masked(line)


def _write(path: Path, text: str, *, like: Path) -> None:
    """Write a file for those who may read `like`: both may hold a secret.

    Raises:
        OSError: it cannot be written, or a link or no plain file is there.
    """
    from elastic_trainer.storage.files import beside, check_output, write_new

    check_output(path)
    with beside(path) as temp:
        write_new(temp, b"")
        temp.chmod(like.stat().st_mode & 0o777)
        temp.write_text(text, encoding="utf-8")
        temp.replace(path)


def _text(path: Path) -> str:
    from launcher.spec.reading import job_text
    from launcher.spec.source import MAX_BYTES

    try:
        text = job_text(path).replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        message = f"cannot be read: {reason}; check the path"
        raise UserError("HF001", message, where=Where(str(path))) from error
    if len(text) > MAX_BYTES:
        message = f"longer than {MAX_BYTES:,} characters: neither a batch script nor a PyTorchJob"
        raise UserError("HF002", message, where=Where(str(path)))
    return text
