"""JobSpec -> Plan: the layout on all nodes, the ladder below it, and snapshots. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.plan.quantities import counted
from launcher.plan.clock import save_warnings
from launcher.plan.rungs import rungs
from launcher.plan.search import Speeds, TimedLayout, fastest
from launcher.plan.simulation.spares import spare_warnings
from launcher.plan.snapshots import Snapshots, snapshots
from launcher.plan.step_time import COMPILED, HOLDFAST_STACK, machine_of
from launcher.spec.errors import Offer, Problem, UserError
from launcher.spec.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Plan:
    """All that recovery will look up."""

    ladder: Ladder
    """Its top rung has the layout on all nodes."""
    snapshots: Snapshots
    """What is kept in memory, and how often."""
    speeds: Speeds | None
    """What the speeds were predicted from; None: they were not."""
    warnings: tuple[Problem, ...]
    """What is legal but may not be meant, the spec's own warnings included."""


def plan(spec: JobSpec) -> Plan:
    """Return the plan of a checked job. Depends on its argument alone."""
    facts = spec.facts
    sizes = spec.elastic.sizes or range(spec.min_nodes, facts.nodes + 1)
    speeds = speeds_of(spec)
    top, standby = spec.full_layout, spec.elastic.standby
    ladder = Ladder(tuple(rungs(facts, top, spec.min_nodes, sizes, speeds, standby=standby)))
    warnings = list(spec.warnings)
    if spec.profile is not None:
        from launcher.plan.calibrated import profile_warnings

        warnings += profile_warnings(spec)
    # By default the ladder ends where memory does, and nothing was asked for that is not there.
    if ladder.min_nodes > spec.min_nodes and spec.elastic.min_nodes is not None:
        gpu = facts.memory_gib
        short = "" if gpu is None else f" (layouts that need more than {gpu:.1f} GiB are left out)"
        warnings.append(
            spec.problem(
                "HF151",
                "elastic.min_nodes",
                f"fewer than {counted(ladder.min_nodes, 'node')} cannot be used, though "
                f"min_nodes is {spec.min_nodes}: the job waits for nodes there{short}",
                {"elastic.min_nodes": ladder.min_nodes},
            )
        )
    cost, problems = snapshots(spec, ladder)
    warnings += [*problems, *save_warnings(spec, ladder), *spare_warnings(spec, ladder, cost)]
    return Plan(ladder, cost, speeds, tuple(warnings))


def speeds_of(spec: JobSpec) -> Speeds | None:
    """Return what a job's machines and our trainer on them do, measured or by vendors' figures.

    None where neither is known: of scripts, and of processors and GPUs that are in no table.
    """
    if spec.command is not None:
        return None
    if spec.profile is not None:
        from launcher.plan.calibrated import machine_from, stack_from  # most jobs name none

        measured = machine_from(spec.profile, spec.cluster.gpus_per_node)
        return measured, stack_from(spec.profile, measured)
    machine = machine_of(spec.cluster.gpu, spec.cluster.gpus_per_node)
    return (
        None if machine is None else (machine, COMPILED if spec.train.compile else HOLDFAST_STACK)
    )


def find_fastest(spec: JobSpec, count: int, nodes: int | None = None) -> list[TimedLayout]:
    """Return the `count` fastest layouts of so many nodes that fit, best first.

    The micro-batch and recomputation vary too. `nodes` None: those of the job.

    Raises:
        UserError: HF131 none fits; HF136 the speed of layouts is not known.
    """
    speeds = speeds_of(spec)
    if speeds is None:
        raise UserError.many([unknown_speed(spec)])
    facts = replace(spec.facts, nodes=nodes or spec.cluster.nodes)
    found = fastest(facts, speeds, count=count, of_training=True)
    if not found:
        raise UserError.many([nothing_fits(spec, num_gpus=facts.num_gpus)])
    return found


def unknown_speed(spec: JobSpec) -> Problem:
    """Return why layouts of a job cannot be compared."""
    what = "a script" if spec.command is not None else spec.cluster.gpu
    return spec.problem("HF136", "layout", f"the speed of {what} is not known").offering(())


def nothing_fits(spec: JobSpec, *offers: Offer, num_gpus: int | None = None) -> Problem:
    """Return that no layout of so many GPUs, or of all the job's, can be used."""
    facts = spec.facts
    memory = f" and fits {facts.memory_gib:.1f} GiB" if facts.memory_gib is not None else ""
    gpus = counted(num_gpus or facts.num_gpus, "GPU")
    message = f"no layout of {gpus} is legal{memory}"
    return spec.problem("HF131", "layout", message).offering(offers)
