"""`holdfast checkpoint`: list, verify, export and import.

A child process converts: it has torch, which the launcher has not.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from elastic_trainer.board.state import Commit
from elastic_trainer.plan.hf_config import ConfigError
from elastic_trainer.plan.layout import layout_label
from elastic_trainer.plan.models import Transformers, raw_of
from elastic_trainer.plan.quantities import sized
from elastic_trainer.storage.files import read_regular
from launcher.cli.common import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_USER,
    json_option,
    path_option,
    print_json,
    say,
)
from launcher.cli.terminal import direct, print_table, wide_console
from launcher.plan.loading import MAX_MODEL_BYTES
from launcher.plan.transformers import ask
from launcher.platforms.installed import need
from launcher.runs.checkpoints.commits import Reference, RetiredError, RunCheckpoints
from launcher.spec.codes import CODES
from launcher.spec.errors import PermanentError, UserError
from launcher.spec.reading import shape_of_config
from launcher.spec.sections import OwnClass

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
"""Between lines of progress without a terminal."""
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
def list_(*, run: str, as_json: bool) -> None:
    """List the checkpoints of RUN, newest last.

    Those that count are on the run's board; a directory alone is only data.
    """
    wanted = Reference.parse(run)
    if wanted.step is not None:
        raise UserError("HF610", f"list takes a RUN alone; leave @{wanted.step} out")
    found = RunCheckpoints.of(wanted.run)
    rows, others = found.rows(), found.others()
    folder = str(found.storage.root)
    if as_json:
        print_json({"dir": folder, "checkpoints": rows, "others": others})
        return
    if not rows:
        click.echo(f"{run} has no checkpoint yet")
    else:
        click.echo(f"in {folder}")
        _print_table(rows)
    for other in others:
        kind = _OTHERS[other["kind"]].format(**other)
        click.echo(f"not on the board: {other['dir']}, {sized(other['size_bytes'])}: {kind}")


@checkpoint.command("verify")
@click.argument("reference", metavar="RUN[@STEP]")
@click.option("--all", "every", is_flag=True, help="All that count, not only the newest.")
@json_option
def verify(*, reference: str, every: bool, as_json: bool) -> int:
    """Read every byte of a checkpoint and compare it with what was saved, as a restore does.

    Exit codes: 0 all good, 1 something is damaged, 2 the input is wrong.
    """
    wanted = Reference.parse(reference)
    if every and wanted.step is not None:
        raise UserError("HF610", "--all goes with a RUN alone; leave @STEP out")
    found = RunCheckpoints.of(wanted.run)
    chosen = found.choose(wanted.step)
    commits = list(found.commits) if every else [chosen]
    results = _verified(found, commits)
    if not results:
        gone = f"{found.run} has just replaced its checkpoint of step {commits[-1].step} by newer"
        raise UserError("HF630", f"{gone} ones; `holdfast checkpoint list` has them")
    good = not any(result["damaged"] for result in results)
    if as_json:
        print_json({"ok": good, "checkpoints": results})
    else:
        for result in results:
            if not result["damaged"]:
                click.echo(f"step {result['step']}: good")
                continue
            say(f"step {result['step']}: DAMAGED, in {result['dir']}")
            for line in result["damaged"]:
                say(f"  {line}")
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
def export(*, reference: str, target: str, output: Path, dtype: str, as_json: bool) -> None:
    """Write a checkpoint's parameters as safetensors with a config.json.

    `transformers` loads the folder. Files are at most 5 GB; twice that is held in memory.
    """
    assert target == "hf", target
    wanted = Reference.parse(reference)
    found = RunCheckpoints.of(wanted.run)
    commit = found.choose(wanted.step)
    result = _convert("export", _export_request(found, commit, output, dtype))
    if as_json:
        print_json({"step": commit.step, "dir": str(output), **result})
    else:
        what = f"{result['num_params']:,} parameters, {sized(result['bytes'])}, {dtype}"
        click.echo(f"step {commit.step}: {what} in {output}")
    if lost := missing_tokenizer(found):
        click.echo(f"without a tokenizer: {lost} is not there any more", err=True)


@checkpoint.command("import")
@click.argument("source", metavar="HF_DIR", type=click.Path(path_type=Path))
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--own-class",
    is_flag=True,
    help="For `model: {hf: HF_DIR}`: transformers' own class, also where a family has the model.",
)
@json_option
def import_(*, source: Path, run_dir: Path, own_class: bool, as_json: bool) -> None:
    """Make RUN of the safetensors in HF_DIR; `holdfast run JOB --from RUN` starts with it.

    RUN is new or empty. A model of one of the families, or else of transformers' own class
    (docs/models.md), in float32, bfloat16 or float16, in one file or many.
    """
    request: dict[str, Any] = {"hf": str(source), "run": str(run_dir)}
    if (shape := _own_class(source, always=own_class)) is not None:
        request["model"] = raw_of(shape)
    result = _convert("import", request)
    if as_json:
        print_json({"run": str(run_dir), **result})
    else:
        click.echo(
            f"{result['num_params']:,} parameters in {run_dir}\n"
            f"next: holdfast run JOB --from {run_dir}"
        )


def _own_class(source: Path, *, always: bool) -> Transformers | None:
    """Return the shape of transformers' own class of a model's folder; None: a family has it.

    Raises:
        UserError: as `shape_of_config`.
    """
    config = source / "config.json"
    try:
        text = read_regular(config, MAX_MODEL_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        return None  # the conversion says so
    wanted = OwnClass(hf=str(source)) if always else str(source)
    try:
        shape, _ = shape_of_config(text, wanted, ask)
    except ConfigError as error:
        raise UserError(error.code, f"{config}: {error}") from error
    return shape if isinstance(shape, Transformers) else None


def _verified(found: RunCheckpoints, commits: Sequence[Commit]) -> list[dict[str, Any]]:
    """Return what was found; checkpoints that the run has retired meanwhile are left out."""
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
    """Print the list: what fits 80 columns, and the directories if they fit."""
    wide = wide_console().width >= _WIDE
    numbers = ("step", "epoch", "ranks", "samples", "size")
    names = ("step", "epoch", "saved", "layout", *numbers[2:], *(("directory",) if wide else ()))
    cells = [(*_cells(row), *([row["dir"]] if wide else [])) for row in rows]
    print_table(names, cells, numbers=numbers)
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


def _export_request(found: RunCheckpoints, commit: Commit, out: Path, dtype: str) -> dict[str, Any]:
    config = found.config
    shape = found.manifest(commit).model or (config.model if config else None)
    if shape is None:
        raise UserError(
            "HF613",
            f"{found.run} does not say of which model its weights are: neither its job.json nor "
            "the checkpoint's manifest has the dimensions; save it again with this version",
        )
    request: dict[str, Any] = {
        "checkpoints": str(found.storage.root),
        "commit": dataclasses.asdict(commit),
        "model": raw_of(shape),
        "out": str(out),
        "dtype": dtype,
    }
    if config is not None:
        request |= {"context": config.train.seq_len, "code": config.command_dir}
        if config.data.tokenizer != "bytes" and missing_tokenizer(found) is None:
            request["tokenizer"] = config.data.tokenizer
    return request


def missing_tokenizer(found: RunCheckpoints) -> str | None:
    """Return the run's tokenizer if it is not there any more: weights go without it."""
    name = found.config.data.tokenizer if found.config else "bytes"
    return name if name != "bytes" and not Path(name).is_file() else None


def run_converter(
    what: str, request: Mapping[str, Any], *, on_progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Run `elastic_trainer.state.convert` and return its result.

    `what` is `export` or `import`; `on_progress` is called with bytes done and bytes in all. An
    interrupt reaches the child too; it leaves nothing half done.

    Raises:
        UserError: HF632 torch or safetensors is missing; what the child said of the input.
        PermanentError: the child failed; its words.
    """
    need(f"holdfast checkpoint {what}", "torch", "safetensors", extra="train")
    module = "elastic_trainer.state.convert"
    command = [sys.executable, "-m", module, what, json.dumps(request)]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as complaints,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, encoding="utf-8"
        ) as child,
    ):
        try:
            result = _follow(child, on_progress)
            code = child.wait()
        except BaseException:
            # Ctrl-C was sent to the child too: let it remove what it has begun.
            child.terminate()
            child.wait()
            raise
        complaints.seek(0)
        said = complaints.read().strip()
    if code == 0 and result is not None:
        return result
    last = said.splitlines()[-1] if said else ""
    error_code, _, message = last.partition(" ")
    if code == EXIT_USER and error_code in CODES:
        raise UserError(error_code, message)
    if code == -signal.SIGKILL:
        last = "it was killed by the system, most likely for want of memory; use a larger machine"
    raise PermanentError(f"{what} failed: {last or f'exit code {code}'}")


def _follow(
    child: subprocess.Popen[str], on_progress: Callable[[int, int], None]
) -> dict[str, Any] | None:
    assert child.stdout is not None
    result: dict[str, Any] | None = None
    for line in child.stdout:
        if not line.startswith("{"):
            continue  # a library's remark
        message = json.loads(line)
        if "result" in message:
            result = message["result"]
        else:
            on_progress(message["done_bytes"], message["total_bytes"])
    return result
