"""`holdfast calibrate`: measure nodes, so that predictions are of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import click

from elastic_trainer.plan.layout import layout_label
from elastic_trainer.plan.measured import Asked
from elastic_trainer.plan.quantities import counted
from elastic_trainer.storage.files import write_atomic
from launcher.cli.common import json_option, path_option, print_json, say, set_option
from launcher.cli.preflight import as_job_asks
from launcher.cli.terminal import print_table
from launcher.fleet.calibration import measure
from launcher.fleet.preflight.nodes import NodeSelection, Preflight
from launcher.plan.calibrated import compute_s, machine_from, stack_from
from launcher.plan.loading import load_spec
from launcher.plan.step_time import Hardware, Stack
from launcher.spec.errors import UserError, writing
from launcher.spec.hardware import CPU, GPUS
from launcher.spec.profile import NAME, Profile, parse_profile, profile_text
from launcher.spec.site_files import profile_folders

EPILOG = """\b
Examples:
  holdfast calibrate job.yaml --profile alps
  holdfast calibrate --gpu H100-80GB-SXM --gpus 8 --partition train --profile alps
  holdfast calibrate --to local --count 2 --profile here
"""

_FAR: Final = 0.3
"""Of a step's time: more says that its figures do not belong together."""


@click.command("calibrate", epilog=EPILOG)
@click.argument("job", required=False)
@click.option("--profile", "name", metavar="NAME", required=True, help="What it is called.")
@click.option("--to", "target", type=click.Choice(["slurm", "local"]), default="slurm")
@click.option("--gpu", metavar="NAME", help="As in cluster.gpu  [default: the job's, or cpu]")
@click.option(
    "--gpus", type=click.IntRange(1, 1024), metavar="N", help="GPUs (CPU: processes) of a node."
)
@click.option(
    "--count",
    type=click.IntRange(1, 2),
    help="Nodes; links between nodes take two  [default: 2, of a job with one node 1]",
)
@click.option("--partition", metavar="NAME", help="Any nodes of it  [default: the job's]")
@click.option("--nodes", metavar="LIST", help="Slurm's node list, as n[1-4,7]: any of these.")
@click.option("--quick", is_flag=True, help="Tiny sizes, to try the way there; of no use else.")
@path_option(
    "--folder",
    help="For the round's files, on shared storage  [default: ./runs/.calibrate/<time>-<pid>]",
)
@set_option
@json_option
def calibrate(  # noqa: PLR0917  click passes options by name
    job: str | None,
    name: str,
    target: str,
    gpu: str | None,
    gpus: int | None,
    count: int | None,
    partition: str | None,
    nodes: str | None,
    quick: bool,
    folder: Path | None,
    sets: Sequence[str],
    as_json: bool,
) -> None:
    """Measure one or two nodes for two minutes, and keep the profile with the sites.

    Products, memory, launches, collectives, and steps of the trainer itself. With JOB, the GPU,
    partition, account and environment are the job's. `cluster.profile: NAME` in a job file has
    predictions use it. --to local emulates nodes on this machine.
    """
    if not NAME.fullmatch(name):
        raise UserError("HF015", f"--profile {name!r}: use letters, digits and .+-_")
    if sets and job is None:
        raise UserError("HF610", "--set changes a job; name one")
    where, compiled = NodeSelection(cluster=target, partition=partition, nodes=nodes), False
    if job is not None:
        spec = load_spec(job, [*sets, "cluster.profile=null"])
        gpu, gpus = gpu or spec.cluster.gpu, gpus or spec.cluster.gpus_per_node
        count, compiled = count or min(2, spec.cluster.nodes), spec.train.compile
        where = as_job_asks(where, spec)
    gpu, gpus, count = gpu or CPU, gpus or 1, count or 2
    if gpu not in (*GPUS, CPU):
        raise UserError("HF122", f"--gpu {gpu} is unknown; use {', '.join((*GPUS, CPU))}")
    where = replace(
        where,
        gres_gpus=0 if gpu == CPU else gpus,
        whole=True,
        nodes=str(count) if target == "local" else nodes,
    )
    begun = time.time()
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    place = (folder or Path("runs") / ".calibrate" / stamp).absolute()
    preflight = Preflight(where=where, folder=place, say=(lambda _: None) if as_json else say)
    asked = Asked(
        nodes=tuple(preflight.pick(count)),
        workers=gpus,
        device="cpu" if gpu == CPU else "cuda",
        compiled=compiled,
        address="127.0.0.1" if target == "local" else None,
        quick=quick,
    )
    path = profile_folders(os.environ)[0] / f"{name}.json"
    text = profile_text(
        Profile(
            gpu=gpu,
            gpus_per_node=gpus,
            nodes=count,
            compiled=compiled,
            measured_at=round(begun),
            found=measure(asked, preflight),
        )
    )
    profile = parse_profile(text, str(path))
    with writing(path, "grant the permission, or set XDG_CONFIG_HOME"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    preflight.tidy()
    machine = machine_from(profile)
    stack = stack_from(profile, machine)
    if as_json:
        known = {"machine": asdict(machine), "stack": asdict(stack)}
        print_json({"ok": True, "profile": str(path), **known})
        return
    _print(profile, machine, stack)
    took = f"{time.time() - begun:.0f} s"
    click.echo(f"{path}: measured on {counted(count, 'node')} x {gpus} in {took}")
    click.echo(f"In a job file: cluster.profile: {name}")


def _print(profile: Profile, machine: Hardware, stack: Stack) -> None:
    """Print what predictions take from the profile, and its steps beside their predictions."""
    launch_s = machine.launch_s
    rates = {
        "products, bf16": f"{machine.gemm_flops / 1e12:.3g} TFLOP/s",
        "products, fp32": f"{(machine.float32_flops or 0) / 1e12:.3g} TFLOP/s",
        "memory": f"{machine.memory_bytes_s / 1e9:.3g} GB/s",
        "links within a node": f"{machine.inside_bytes_s / 1e9:.3g} GB/s a rank",
        "links between nodes": f"{machine.nic_bytes_s / 1e9:.3g} GB/s a rank",
        "a collective at least": f"{machine.latency_s * 1e6:.3g} us",
        "a launch": f"{launch_s * 1e6:.3g} us",
        "launches of a layer": f"{stack.kernels * launch_s * 1e3:.3g} ms",
        "  under FSDP more": f"{stack.shard_kernels * launch_s * 1e3:.3g} ms",
        "  under tp more": f"{stack.tp_kernels * launch_s * 1e3:.3g} ms",
        "other bytes": f"{stack.elementwise:.3g} x those of the fewest kernels",
    }
    print_table(("", profile.found.device), list(rates.items()))
    rows = [
        (
            layout_label(step.layout),
            f"{step.num_layers} x {step.dim}",
            f"{step.micro_batches} x {step.micro_batch} x {step.seq_len}",
            f"{step.compute_s * 1e3:.3g}",
            f"{compute_s(step, machine, stack) * 1e3:.3g}",
        )
        for step in profile.found.steps
    ]
    names = ("step of", "layers x width", "tokens", "measured ms", "predicted ms")
    print_table(names, rows, numbers=names[3:])
    apart = [
        abs(compute_s(step, machine, stack) / step.compute_s - 1) for step in profile.found.steps
    ]
    if max(apart) > _FAR:
        say(
            f"steps are up to {max(apart):.0%} from what the profile predicts of them: were the "
            "nodes in use?"
        )
