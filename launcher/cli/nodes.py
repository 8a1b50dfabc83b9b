"""`holdfast nodes` and `drain`: machines that jobs are kept off, over all runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from launcher.cli.common import EXIT_DONE, EXIT_FAILED, json_option, print_json, say
from launcher.fleet import nodes as ops
from launcher.fleet.node_ledger import node_ledger_at
from launcher.fleet.rules import CAP, Entry
from launcher.platforms.base import Machine
from launcher.platforms.slurm.parse import expand_nodes
from launcher.platforms.targets import target_named
from launcher.spec.errors import PlatformError, UserError

NODES_EPILOG = """\b
Examples:
  holdfast nodes list
  holdfast nodes exclude node[07,19] --reason "fan broken, ticket 4711"
  holdfast nodes release node07
  holdfast nodes history node07 --json
"""
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


fleet_option = click.option(
    "--fleet",
    metavar="PLACE",
    default="runs/fleet",
    show_default=True,
    help="The fleet's ledger, as cluster.fleet of the jobs: a folder, or "
    "kubernetes://NAMESPACE/NAME.",
)
to_option = click.option(
    "--to", "target", metavar="TARGET", default="slurm", show_default=True, help="The platform."
)


@click.group("nodes", epilog=NODES_EPILOG)
def nodes() -> None:
    """Show and change which machines jobs are kept off, over all runs.

    Strikes come from runs (lost machines, stragglers, exclusions) and from preflight. Three within
    seven days put a machine out until they expire; broken hardware and `exclude` until `release`.
    """


@nodes.command("list")
@fleet_option
@to_option
@json_option
def list_nodes(*, fleet: str, target: str, as_json: bool) -> None:
    """List machines that the ledger, or the platform, holds something against."""
    machines, away = _machines(target)
    ledger = node_ledger_at(fleet)
    rows = [row.to_json() for row in ops.listed(ledger, machines, time.time())]
    for trouble in ledger.trouble:
        say(trouble)
    if as_json:
        print_json(rows)
        return
    if away:
        click.echo(f"{target} is not asked: {away}", err=True)
    for row in rows:
        state = "out" if row["out"] else f"{row['strikes']} strikes" if row["strikes"] else "-"
        until = "" if row["until_unix"] is None else f", until {_date(row['until_unix'])}"
        by = f", by {row['by']}" if row["by"] else ""
        gpus = f" ({', '.join(row['gpus'])})" if row["gpus"] else ""
        said = [f"{row['reason']}{gpus}{by}{until}"] if row["reason"] else []
        said += [f"{target}: {row['platform']}"] if row["platform"] else []
        click.echo(f"{row['machine']}  {state}  {'; '.join(said)}")
    if not rows:
        click.echo(f"nothing is held against any machine ({fleet})")


@nodes.command()
@click.argument("nodes", nargs=-1, required=True)
@click.option("--reason", required=True, help="Why, for the record.")
@click.option("--for", "duration", metavar="TIME", help="As 90m, 12h, 7d  [default: until release]")
@fleet_option
@json_option
def exclude(
    *, nodes: Sequence[str], reason: str, duration: str | None, fleet: str, as_json: bool
) -> None:
    """Keep later jobs off NODES (Slurm's lists too, as n[1-4,7]); what runs there goes on.

    `holdfast drain` lets running jobs leave as well.
    """
    for_s = None if duration is None else seconds("--for", duration)
    names = _names(nodes)
    done = ops.exclude(
        node_ledger_at(fleet), names, reason=reason, for_s=for_s, now_unix=time.time()
    )
    if not all(entry.operator for entry in done):
        say(f"no operator of {fleet} says so: at most {CAP:.0%} of the machines are kept from jobs")
    _told(done, as_json=as_json)


@nodes.command()
@click.argument("nodes", nargs=-1, required=True)
@click.option("--reason", default="released", show_default=True, help="Why, for the record.")
@click.option("--force", is_flag=True, help="Without the check.")
@click.option("--gpus", type=click.IntRange(min=0), default=0, metavar="N", help="GPUs of a node.")
@fleet_option
@to_option
@json_option
def release(
    *,
    nodes: Sequence[str],
    reason: str,
    force: bool,
    gpus: int,
    fleet: str,
    target: str,
    as_json: bool,
) -> None:
    """Let jobs use NODES again, once `holdfast preflight` passes there.

    All of them or none. Exit code 2: one fails its check, and stays out. The UUID of a GPU stands
    for what is held against that GPU alone, wherever it is.
    """
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    place = Path("runs", ".preflight", stamp).absolute()
    check = partial(ops.checked, target=target, folder=place, gpus=gpus, say=say)
    said = f"{reason} (not checked)" if force else reason
    names = _names(nodes)
    done = ops.release(
        node_ledger_at(fleet),
        names,
        check=None if force else check,
        reason=said,
        now_unix=time.time(),
    )
    for name in [
        name for name in names if not {name} & {s for e in done for s in (e.machine, e.gpu)}
    ]:
        say(f"{name}: nothing is held against it")
    _told(done, as_json=as_json)


@nodes.command()
@click.argument("nodes", nargs=-1)
@fleet_option
@json_option
def history(*, nodes: Sequence[str], fleet: str, as_json: bool) -> None:
    """Show all entries of the ledger, or those of NODES or GPUs' UUIDs, oldest first: who, why."""
    wanted = set(_names(nodes))
    ledger = node_ledger_at(fleet)
    found = ledger.entries()
    for trouble in ledger.trouble:
        say(trouble)
    entries = [e for e in found if not wanted or {e.machine, e.gpu} & wanted]
    _told(entries, as_json=as_json)


def _machines(target: str) -> tuple[list[Machine], str]:
    """Return the platform's machines, and why it cannot be asked; empty: it can."""
    backend = ops.machines_of(target_named(target).load_backend())
    try:
        return backend.machines(), ""
    except (PlatformError, UserError) as error:
        return [], str(error)


def _names(nodes: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for text in nodes for name in expand_nodes(text)))


def _told(entries: Sequence[Entry], *, as_json: bool) -> None:
    if as_json:
        print_json([entry.to_json() for entry in entries])
        return
    for entry in entries:
        until = "" if entry.until_unix is None else f" until {_date(entry.until_unix)}"
        run = f" ({entry.run})" if entry.run else ""
        source = "operator" if entry.operator else entry.source
        what = f"{entry.verdict}{until}  {source}{run}: {entry.reason}"
        where = f"{entry.machine} {entry.gpu}".rstrip()
        click.echo(f"{_date(entry.t_unix)}  {where}  {what}  by {entry.by}")


def _date(t_unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(t_unix))


def seconds(option: str, text: str) -> float:
    """Return the seconds that 90m, 12h or 7d means.

    Raises:
        UserError: HF610 it is written otherwise.
    """
    match = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    if match is None:
        raise UserError("HF610", f"{option} {text!r:.40}: write 90m, 12h or 7d")
    return int(match[1]) * _UNITS[match[2]]


DRAIN_EPILOG = """\b
Examples:
  holdfast drain node07 --reason "fan broken"
  holdfast drain rack12 --reason "power work" --by 30m
  holdfast drain node[01-08] --to jobset --json
"""


@click.command("drain", epilog=DRAIN_EPILOG)
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...|RACK")
@click.option("--reason", default="drained", show_default=True, help="For platform and record.")
@click.option(
    "--by", metavar="TIME", default="10m", show_default=True, help="Wait so long, as 90m or 12h."
)
@fleet_option
@to_option
@json_option
def drain(
    *, nodes: Sequence[str], reason: str, by: str, fleet: str, target: str, as_json: bool
) -> int:
    """Drain nodes, or all of a rack: jobs leave them at a step boundary and redo no step.

    The platform is told (Slurm: DRAIN, Kubernetes: cordon and eviction), which takes its operator's
    rights. Then jobs of Holdfast continue on their other nodes, spares first. A rack is a leaf
    switch or block of Slurm's topology, or a value of the label topology.kubernetes.io/rack. Exit
    code 1: something is left there after TIME; it is named, and the drain stays.
    """
    wait_s = seconds("--by", by)
    platform = ops.machines_of(target_named(target).load_backend())
    names = ops.named(nodes, platform.machines())
    done = ops.drain(
        platform,
        node_ledger_at(fleet),
        names,
        reason=reason,
        for_s=wait_s,
        now_unix=time.time(),
        say=(lambda _: None) if as_json else say,
    )
    if as_json:
        print_json({"left": list(done.left), "waiting": sorted(done.waiting)})
    else:
        for name in done.left:
            click.echo(f"{name}  drained, nothing is left there")
        for name, what in sorted(done.waiting.items()):
            click.echo(f"{name}  draining: {what}")
    return EXIT_FAILED if done.waiting else EXIT_DONE
