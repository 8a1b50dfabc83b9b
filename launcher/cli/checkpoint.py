"""`holdfast checkpoint`: list, verify, export and import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from launcher.cli.common import (
    EXIT_DONE,
    EXIT_FAILED,
    exit_with_problems,
    json_option,
    print_json,
)
from launcher.errors import UserError
from launcher.ops.checkpoints import Commit, Reference, RunCheckpoints
from launcher.ops.convert import export_options, run_converter

EPILOG = """\b
Examples:
  holdfast checkpoint list runs/tiny-20260101-120000
  holdfast checkpoint verify runs/tiny-20260101-120000@500
  holdfast checkpoint export runs/tiny-20260101-120000 --to hf -o exported
  holdfast checkpoint import Llama-3.1-8B runs/llama3-8b-weights
"""


@click.group("checkpoint", epilog=EPILOG)
def checkpoint() -> None:
    """List, verify, export and import checkpoints."""


@checkpoint.command("list")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@json_option
def list_(*, run_dir: Path, as_json: bool) -> int:
    """List the checkpoints of RUN, newest last.

    Those that count are on the run's board; a directory alone is only data.
    """
    try:
        found = RunCheckpoints.of(run_dir)
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    rows, others = found.rows(), found.others()
    if as_json:
        folder = str(found.storage.root)
        print_json({"dir": folder, "checkpoints": rows, "others": others})
        return EXIT_DONE
    if not rows:
        click.echo(f"{run_dir} has no checkpoint yet")
    else:
        Console().print(_table(rows), highlight=False)
    for other in others:
        click.echo(f"not on the board: {other['dir']} ({other['kind']}, {_size(other)})")
    return EXIT_DONE


@checkpoint.command("verify")
@click.argument("reference", metavar="RUN[@STEP]")
@click.option("--all", "every", is_flag=True, help="All that count, not only the newest.")
@json_option
def verify(*, reference: str, every: bool, as_json: bool) -> int:
    """Read every byte of a checkpoint and compare it with what was saved.

    Exit codes: 0 all good, 1 something is damaged, 2 the input is wrong.
    """
    try:
        found, commits = _chosen(reference, every=every)
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    results = []
    with _progress("verify", quiet=as_json) as report:
        total = sum(found.size_bytes(commit) for commit in commits)
        done = 0

        def add(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            report(done, total)

        for commit in commits:
            wrong = found.verify(commit, add)
            results.append({"step": commit.step, "dir": commit.dir, "damaged": wrong})
    good = not any(result["damaged"] for result in results)
    if as_json:
        print_json({"ok": good, "checkpoints": results})
    else:
        _say_verified(results)
    return EXIT_DONE if good else EXIT_FAILED


@checkpoint.command("export")
@click.argument("reference", metavar="RUN[@STEP]")
@click.option(
    "--to", "target", type=click.Choice(["hf"]), default="hf", help="The format: Hugging Face."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder to make.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="float32 is exact; bfloat16 rounds, as most published weights are.",
)
@json_option
def export(*, reference: str, target: str, output: Path, dtype: str, as_json: bool) -> int:
    """Write a checkpoint's parameters as safetensors with a config.json.

    `transformers` loads the folder. Files are at most 5 GB; no more is held in memory.
    """
    assert target == "hf", target
    try:
        wanted = Reference.parse(reference)
        found = RunCheckpoints.of(wanted.run)
        commit = found.choose(wanted.step)
        options = export_options(found, commit, output, dtype)
        result = _convert("export", options, as_json=as_json)
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json({"step": commit.step, "dir": str(output), **result})
    else:
        click.echo(
            f"step {commit.step}: {result['num_params']:,} parameters, {_size(result)} in {output}"
        )
    return EXIT_DONE


@checkpoint.command("import")
@click.argument("source", metavar="HF_DIR", type=click.Path(path_type=Path))
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@json_option
def import_(*, source: Path, run_dir: Path, as_json: bool) -> int:
    """Make RUN of the safetensors in HF_DIR; `holdfast run JOB --from RUN` starts with it.

    RUN is new or empty. A Llama in float32, bfloat16 or float16, in one file or many.
    """
    try:
        options = ["--hf", str(source), "--run", str(run_dir)]
        result = _convert("import", options, as_json=as_json)
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json({"run": str(run_dir), **result})
    else:
        click.echo(
            f"{result['num_params']:,} parameters in {run_dir}\n"
            f"next: holdfast run JOB --from {run_dir}"
        )
    return EXIT_DONE


def _chosen(reference: str, *, every: bool) -> tuple[RunCheckpoints, list[Commit]]:
    wanted = Reference.parse(reference)
    if every and wanted.step is not None:
        raise UserError("HF610", "--all goes with a RUN alone; leave @STEP out")
    found = RunCheckpoints.of(wanted.run)
    newest = found.choose(wanted.step)
    return found, list(found.commits) if every else [newest]


def _convert(what: str, options: Sequence[str], *, as_json: bool) -> dict[str, Any]:
    with _progress(what, quiet=as_json) as report:
        return run_converter([what, *options], on_progress=report)


@contextmanager
def _progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show bytes done: a bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _done, _total: None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return what fits 80 columns; --json has the rest."""
    table = Table("step", "saved", "layout", "ranks", "samples", "size")
    for row in rows:
        step = f"{row['step']:,}"
        if "damaged" in row:
            table.add_row(step, "damaged", row["damaged"], "", "", "")
            continue
        saved = datetime.fromtimestamp(row["saved_unix"]).astimezone()
        table.add_row(
            step,
            saved.strftime("%Y-%m-%d %H:%M:%S"),
            row["layout"],
            f"{row['world_size']:,}",
            f"{row['consumed_samples']:,}",
            _size(row),
        )
    return table


def _size(row: dict[str, Any]) -> str:
    """Return the size in a unit that fits."""
    size = float(row.get("size_bytes", row.get("bytes", 0)))
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _say_verified(results: Sequence[dict[str, Any]]) -> None:
    for result in results:
        if not result["damaged"]:
            click.echo(f"step {result['step']}: good")
            continue
        click.echo(f"step {result['step']}: DAMAGED, in {result['dir']}", file=sys.stderr)
        for line in result["damaged"]:
            click.echo(f"  {line}", file=sys.stderr)
