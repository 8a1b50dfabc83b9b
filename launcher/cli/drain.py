"""`holdfast drain`: jobs leave machines at a step boundary, and none begins there."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from launcher.cli.common import (
    EXIT_DONE,
    EXIT_FAILED,
    exit_with_problems,
    json_option,
    print_json,
)
from launcher.cli.nodes import fleet_option, seconds, to_option
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  holdfast drain node07 --reason "fan broken"
  holdfast drain rack12 --reason "power work" --by 30m
  holdfast drain node[01-08] --to jobset --json
"""


@click.command("drain", epilog=EPILOG)
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
    from launcher.fleet import nodes as ops
    from launcher.fleet.ledger import fleet_at
    from launcher.platforms.targets import target_named

    try:
        wait_s = seconds("--by", by)
        platform = ops.machines_of(target_named(target).load_backend())
        names = ops.named(nodes, platform.machines())
        done = ops.drain(
            platform,
            fleet_at(fleet),
            names,
            reason=reason,
            for_s=wait_s,
            now_unix=time.time(),
            say=(lambda _: None) if as_json else lambda text: click.echo(text, err=True),
        )
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json({"left": list(done.left), "waiting": sorted(done.waiting)})
    else:
        for name in done.left:
            click.echo(f"{name}  drained, nothing is left there")
        for name, what in sorted(done.waiting.items()):
            click.echo(f"{name}  draining: {what}")
    return EXIT_FAILED if done.waiting else EXIT_DONE
