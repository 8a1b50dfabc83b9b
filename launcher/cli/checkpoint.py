"""`holdfast checkpoint`: list, verify, export and import."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from elastic_trainer.plan.layout import layout_label
from elastic_trainer.plan.quantities import sized
from launcher.cli.common import (
    EXIT_DONE,
    EXIT_FAILED,
    exit_with_problems,
    json_option,
    path_option,
    print_json,
)
from launcher.cli.terminal import direct
from launcher.runs.checkpoints.commits import Commit, Reference, RetiredError, RunCheckpoints
from launcher.runs.checkpoints.convert import export_request, missing_tokenizer, run_converter
from launcher.spec.errors import UserError

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


_LINES_EVERY_S = 5.0
"""Between two lines of progress where there is no terminal."""
_WIDE = 110
"""Columns from which on the list shows the directories too."""
_OTHERS = {
    "milestone": "kept for ever (checkpoint.keep_every_steps); RUN@{step} names it",
    "unfinished": "a save under way, or one that was cut short",
    "left over": "does not count; the next checkpoint removes it",
}


@checkpoint.command("list")
@click.argument("run", metavar="RUN")
@json_option
def list_(*, run: str, as_json: bool) -> int:
    """List the checkpoints of RUN, newest last.

    Those that count are on the run's board; a directory alone is only data.
    """
    try:
        found = _all_of(Reference.parse(run))
        rows, others = found.rows(), found.others()
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    folder = str(found.storage.root)
    if as_json:
        print_json({"dir": folder, "checkpoints": rows, "others": others})
        return EXIT_DONE
    if not rows:
        click.echo(f"{run} has no checkpoint yet")
    else:
        click.echo(f"in {folder}")
        _print_table(rows)
    for other in others:
        kind = _OTHERS[other["kind"]].format(**other)
        click.echo(f"not on the board: {other['dir']}, {sized(other['size_bytes'])}: {kind}")
    return EXIT_DONE


@checkpoint.command("verify")
@click.argument("reference", metavar="RUN[@STEP]")
@click.option("--all", "every", is_flag=True, help="All that count, not only the newest.")
@json_option
def verify(*, reference: str, every: bool, as_json: bool) -> int:
    """Read every byte of a checkpoint and compare it with what was saved, as a restore does.

    Exit codes: 0 all good, 1 something is damaged, 2 the input is wrong.
    """
    try:
        found, commits = _chosen(reference, every=every)
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    results = _verified(found, commits)
    if not results:
        gone = f"{found.run} has just replaced its checkpoint of step {commits[-1].step} by newer"
        retired = UserError("HF630", f"{gone} ones; `holdfast checkpoint list` has them")
        return exit_with_problems(retired, as_json=as_json)
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
@path_option("-o", "--output", required=True, help="Folder to make.")
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

    `transformers` loads the folder. Files are at most 5 GB; twice that is held in memory.
    """
    assert target == "hf", target
    try:
        wanted = Reference.parse(reference)
        found = RunCheckpoints.of(wanted.run)
        commit = found.choose(wanted.step)
        result = _convert("export", export_request(found, commit, output, dtype))
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json({"step": commit.step, "dir": str(output), **result})
    else:
        what = f"{result['num_params']:,} parameters, {sized(result['bytes'])}, {dtype}"
        click.echo(f"step {commit.step}: {what} in {output}")
    if lost := missing_tokenizer(found):
        click.echo(f"without a tokenizer: {lost} is not there any more", err=True)
    return EXIT_DONE


@checkpoint.command("import")
@click.argument("source", metavar="HF_DIR", type=click.Path(path_type=Path))
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@json_option
def import_(*, source: Path, run_dir: Path, as_json: bool) -> int:
    """Make RUN of the safetensors in HF_DIR; `holdfast run JOB --from RUN` starts with it.

    RUN is new or empty. A model of one of the families (docs/models.md) in float32,
    bfloat16 or float16, in one file or many.
    """
    try:
        result = _convert("import", {"hf": str(source), "run": str(run_dir)})
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


def _all_of(wanted: Reference) -> RunCheckpoints:
    if wanted.step is not None:
        raise UserError("HF610", f"list takes a RUN alone; leave @{wanted.step} out")
    return RunCheckpoints.of(wanted.run)


def _chosen(reference: str, *, every: bool) -> tuple[RunCheckpoints, list[Commit]]:
    wanted = Reference.parse(reference)
    if every and wanted.step is not None:
        raise UserError("HF610", "--all goes with a RUN alone; leave @STEP out")
    found = RunCheckpoints.of(wanted.run)
    chosen = found.choose(wanted.step)
    return found, list(found.commits) if every else [chosen]


def _verified(found: RunCheckpoints, commits: Sequence[Commit]) -> list[dict[str, Any]]:
    """Return what was found of each; those that the run has retired meanwhile are left out."""
    results = []
    with _progress("verify") as report:
        total = sum(found.size_bytes(commit) for commit in commits)
        done = 0

        def add(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            report(done, total)

        for commit in commits:
            try:
                wrong = found.verify(commit, add)
            except RetiredError:
                continue
            results.append({"step": commit.step, "dir": commit.dir, "damaged": wrong})
    return results


def _convert(what: str, request: Mapping[str, Any]) -> dict[str, Any]:
    with _progress(what) as report:
        return run_converter(what, request, on_progress=report)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes done, on stderr: a bar on a terminal, now and then a line elsewhere."""
    console = Console(file=direct(sys.stderr))
    if not console.is_terminal:
        yield _lines(what, time.monotonic)
        return
    size = DownloadColumn(binary_units=True)
    columns = (TextColumn(what), BarColumn(), size, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str, mono: Callable[[], float]) -> Callable[[int, int], None]:
    """Return a reporter of lines; work that is done before the first one is due says nothing."""
    due = mono() + _LINES_EVERY_S

    def report(done: int, total: int) -> None:
        nonlocal due
        if mono() >= due:
            due = mono() + _LINES_EVERY_S
            click.echo(f"{what}: {sized(done)} of {sized(total)}", err=True)

    return report


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the list: what fits 80 columns, and the directories where there is room."""
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # whoever reads a pipe wants whole lines
    wide = console.width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "epoch", "saved", "layout", "ranks", "samples", "size"):
        right = name in ("step", "epoch", "ranks", "samples", "size")
        table.add_column(name, justify="right" if right else "left")
    if wide:
        table.add_column("directory")
    for row in rows:
        table.add_row(*_cells(row), *([row["dir"]] if wide else []))
    console.print(table, highlight=False)
    for row in rows:
        if "damaged" in row:
            click.echo(f"step {row['step']} is damaged: {row['dir']}: {row['damaged']}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = f"{row['step']:,}", f"{row['epoch']:,}"
    if "damaged" in row:
        return (*numbers, "DAMAGED", "", "", "", "")
    saved = datetime.fromtimestamp(row["saved_unix"]).astimezone()
    return (
        *numbers,
        saved.strftime("%Y-%m-%d %H:%M"),
        layout_label(row["layout"]),
        f"{row['world_size']:,}",
        f"{row['consumed_samples']:,}",
        sized(row["size_bytes"]),
    )


def _say_verified(results: Sequence[dict[str, Any]]) -> None:
    for result in results:
        if not result["damaged"]:
            click.echo(f"step {result['step']}: good")
            continue
        click.echo(f"step {result['step']}: DAMAGED, in {result['dir']}", file=sys.stderr)
        for line in result["damaged"]:
            click.echo(f"  {line}", file=sys.stderr)
