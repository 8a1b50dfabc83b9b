"""`holdfast preflight`: is every node fit for the job?"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from elastic_trainer.plan.quantities import counted
from launcher.cli.common import (
    EXIT_DONE,
    EXIT_FAILED,
    json_option,
    path_option,
    print_json,
    say,
    set_option,
)
from launcher.cli.nodes import fleet_option
from launcher.cli.terminal import print_table
from launcher.fleet.node_ledger import node_ledger_at
from launcher.fleet.nodes import note_failed, note_moved
from launcher.fleet.preflight.nodes import NodeSelection, Preflight
from launcher.fleet.preflight.report import Expected, NodeReport
from launcher.plan.loading import load_spec
from launcher.render.local import checkpoint_dir, resolve
from launcher.spec.errors import HoldfastError, UserError
from launcher.spec.spec import JobSpec

EPILOG = """\b
Examples:
  holdfast preflight job.yaml
  holdfast preflight --partition train --gpus 8 --dir /lustre/ckpt
  holdfast preflight --nodes node[07,19-21] --check storage --check clock
  holdfast preflight --partition train --collectives
  holdfast preflight --to local --nodes 8 --collectives --check versions
"""


@click.command("preflight", epilog=EPILOG)
@click.argument("job", required=False)
@click.option("--to", "target", type=click.Choice(["slurm", "local"]), default="slurm")
@click.option("--partition", metavar="NAME", help="All nodes of it  [default: the job's]")
@click.option(
    "--nodes", metavar="LIST", help="Slurm's node list, as n[1-4,7]; locally how many to emulate."
)
@click.option("--gpus", type=click.IntRange(min=0), metavar="N", help="GPUs of a node.")
@click.option("--dir", "directory", metavar="DIR", help="Shared folder that is written to.")
@click.option("--free-gib", type=float, default=1.0, show_default=True, help="Free in DIR.")
@click.option("--write-mib", type=float, default=0.0, help="MiB/s that a node must write to DIR.")
@click.option("--shm-gib", type=float, default=1.0, show_default=True, help="Free in /dev/shm.")
@click.option(
    "--check", "names", multiple=True, metavar="NAME", help="Only this check; repeatable."
)
@click.option("--skip", multiple=True, metavar="NAME", help="Not this check; repeatable.")
@click.option(
    "--collectives", is_flag=True, help="Then find slow and broken nodes by all-reduces of groups."
)
@click.option("--timeout", default=300.0, show_default=True, help="Seconds for all nodes.")
@path_option(
    "--folder",
    help="For the round's files, on shared storage  [default: ./runs/.preflight/<time>-<pid>]",
)
@fleet_option
@set_option
@json_option
def preflight(  # noqa: PLR0917  click passes options by name
    job: str | None,
    target: str,
    partition: str | None,
    nodes: str | None,
    gpus: int | None,
    directory: str | None,
    free_gib: float,
    write_mib: float,
    shm_gib: float,
    names: Sequence[str],
    skip: Sequence[str],
    collectives: bool,
    timeout: float,
    folder: Path | None,
    fleet: str,
    sets: Sequence[str],
    as_json: bool,
) -> int:
    """Check every node of a partition or a list: GPUs, links, storage, clocks, versions, orphans.

    With JOB, partition, GPUs, the folder and the environment are the job's. On Slurm a node that
    fails where most are fit goes into the fleet's ledger: later jobs are kept off it. Exit codes:
    0 all nodes are fit (warnings included), 1 a node fails, 2 the input is wrong.
    """
    where, expected = _asked(
        job,
        sets,
        NodeSelection(cluster=target, partition=partition, nodes=nodes, gres_gpus=gpus or 0),
        Expected(
            gpus=gpus or 0,
            directory=str(Path(directory or ".").absolute()),
            min_free_gib=free_gib,
            min_shm_gib=shm_gib,
            min_write_mib_s=write_mib,
        ),
        given={"gpus": gpus is not None, "directory": directory is not None},
    )
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    place = (folder or Path("runs") / ".preflight" / stamp).absolute()
    tell = (lambda _: None) if as_json else say
    round_ = Preflight(where=where, folder=place, say=tell)
    reports = round_.run(expected, names=names, skip=skip, timeout_s=timeout)
    if collectives:
        reports = round_.collectives(reports)
    out = []
    if target == "slurm":
        ledger, now = node_ledger_at(fleet), time.time()
        try:
            out = [*note_failed(ledger, reports, now), *note_moved(ledger, reports, now)]
        except HoldfastError as error:
            say(f"what was found is not in the fleet's ledger: {error}")
    failed = [report for report in reports if report.level == "fail"]
    if not failed:
        round_.tidy()
    if as_json:
        nodes_found = [{**asdict(report), "level": report.level} for report in reports]
        print_json({"ok": not failed, "nodes": nodes_found})
    else:
        _print_table(reports)
        kept = f"; what they wrote is in {place}" if failed and place.is_dir() else ""
        for entry in out:
            gpu = f" ({entry.gpu})" if entry.gpu else ""
            click.echo(f"{entry.machine}{gpu}: {_FOLLOWS[entry.verdict]}")
        click.echo(f"{len(reports) - len(failed)} of {counted(len(reports), 'node')} fit{kept}")
    return EXIT_FAILED if failed else EXIT_DONE


_FOLLOWS = {
    "out": "later jobs are kept off it; see holdfast nodes release",
    "strike": "has a strike that came with this GPU; see holdfast nodes history",
}


def _asked(
    job: str | None,
    sets: Sequence[str],
    where: NodeSelection,
    expected: Expected,
    *,
    given: Mapping[str, bool],
) -> tuple[NodeSelection, Expected]:
    """Fill in from the job what is not `given` on the command line."""
    if job is None:
        if sets:
            raise UserError("HF610", "--set changes a job; name one")
        return where, expected
    spec = load_spec(job, sets)
    if not given["gpus"]:
        count = spec.cluster.gpus_per_node if spec.device == "cuda" else 0
        where, expected = replace(where, gres_gpus=count), replace(expected, gpus=count)
    if not given["directory"]:
        runs = Path("runs").absolute() / "-"
        place = Path(checkpoint_dir(spec, run_dir=runs, base_dir=spec.folder)).absolute()
        # It may not be there yet: what is above it is on the same storage.
        there = next(folder for folder in (place, *place.parents) if folder.is_dir())
        expected = replace(expected, directory=str(there))
    return as_job_asks(where, spec), expected


def as_job_asks(where: NodeSelection, spec: JobSpec) -> NodeSelection:
    """Return `where` with what a job says of Slurm and of the nodes' Python."""
    venv = spec.env.venv
    return replace(
        where,
        partition=where.partition or (None if where.nodes else spec.slurm.partition),
        account=spec.slurm.account,
        qos=spec.slurm.qos,
        reservation=spec.slurm.reservation,
        python=None if venv is None else f"{resolve(venv, spec.folder)}/bin/python",
    )


def _print_table(reports: Sequence[NodeReport]) -> None:
    rows = []
    for report in reports:
        found = [(f.level, f.check, f.text) for f in report.findings]
        found = found or [("fail", "start", report.problem)]
        rows += [(report.node if not i else "", *cells) for i, cells in enumerate(found)]
    print_table(("node", "result", "check", "what"), rows)
