"""`holdfast plan`: layout, placement of ranks by node, and the ladder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.cli.common import (
    exit_with_problems,
    job_argument,
    json_option,
    print_json,
    print_problems,
    set_option,
    site_option,
)
from launcher.spec.errors import UserError, Where

if TYPE_CHECKING:
    from elastic_trainer.plan.ladder import Ladder, Rung
    from launcher.platforms.sites import Site


@click.command(
    epilog="Example: holdfast plan examples/llama3-405b.yaml --nodes 1900",
)
@job_argument
@set_option
@site_option
@click.option("--nodes", type=click.IntRange(min=1), help="Plan for this many nodes left.")
@click.option("--all", "show_all", is_flag=True, help="Show every fallback layout and every node.")
@json_option
@click.pass_context
def plan(
    ctx: click.Context,
    *,
    job: str,
    sets: tuple[str, ...],
    site: Site | None,
    nodes: int | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Show layout, placement and ladder of a job.

    With --nodes, the layout the job would use when that many nodes are left.
    """
    from launcher.plan.search import plan as make_plan
    from launcher.plan.summary import (
        ladder_lines,
        placement_lines,
        plan_dict,
        rung_dict,
        summary_lines,
    )
    from launcher.spec.reading import load_spec

    try:
        spec = load_spec(job, sets, site=site)
        planned = make_plan(spec)
        left = spec.cluster.nodes if nodes is None else nodes
        rung = _rung(planned.ladder, left, job)
    except UserError as error:
        ctx.exit(exit_with_problems(error, as_json=as_json))
    spares = left - rung.num_nodes
    if as_json:
        chosen = {"nodes": left, "spares": spares, "rung": rung_dict(rung)}
        answer = {"ok": True, "problems": [], **plan_dict(spec, planned), "chosen": chosen}
        print_json(answer)
        return
    print_problems(planned.warnings)
    for line in summary_lines(spec, planned, rung):
        click.echo(line)
    if nodes is not None:
        click.echo(f"nodes    {left:,} left: layout of {rung.num_nodes:,}, {spares:,} spare")
    click.echo("\nPlacement (rank order: " + ", ".join(rung.layout.order) + ", innermost first)")
    for line in placement_lines(rung, spec.cluster.gpus_per_node, show_all=show_all):
        click.echo(f"  {line}")
    click.echo("\nLadder")
    batches = spec.facts.num_micro_batches if spec.command is None else None
    for line in ladder_lines(planned.ladder, batches, show_all=show_all):
        click.echo(f"  {line}")


def _rung(ladder: Ladder, num_nodes: int, job: str) -> Rung:
    """Return the rung of `num_nodes` nodes.

    Raises:
        UserError: HF125, they are too few.
    """
    from elastic_trainer.plan.quantities import counted

    if (rung := ladder.rung_for(num_nodes)) is None:
        message = f"{counted(num_nodes, 'node')} left, the last rung needs {ladder.min_nodes}"
        where = Where(job, None, "--nodes")
        raise UserError("HF125", f"{message}: waiting for replacements", where=where)
    return rung
