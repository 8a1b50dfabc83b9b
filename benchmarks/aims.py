"""What the benchmarks are to show, and the report of a whole run. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A limit for one number of a program's JSON line."""

    program: str
    key: str
    """Its place, keys joined by dots."""
    what: str
    limit: float
    at_least: bool = False
    """Whether the number must not be below the limit; else: not above."""
    unit: str = "s"
    """`%` for parts of one."""
    peers: tuple[str, ...] = ()
    """Places of the same number of others."""

    def met_by(self, value: float) -> bool:
        """Return whether `value` is within the limit."""
        return value >= self.limit if self.at_least else value <= self.limit


def _recovery(key: str, what: str, limit: float) -> Aim:
    systems = ("torchrun_tuned", "ft_launcher_tuned", "torchft_1s", "torchft_default")
    peers = tuple(f"{system}.{key}" for system in (*systems, "torchrun_default"))
    return Aim(
        program="recovery",
        key=f"holdfast.{key}",
        what=what,
        limit=limit,
        peers=peers,
    )


_ASKED: dict[str, float] = {"status": 0.6, "why": 1.5, "metrics": 1.0, "report": 20.0}
"""Command -> processor seconds that it may take on a run of thousands of nodes."""

AIMS: tuple[Aim, ...] = (
    Aim(program="check_time", key="check_s", what="check of 16,384 GPUs", limit=1.0),
    Aim(
        program="record",
        key="n2048.mib_per_failure",
        what="record of a failure of 2,048 nodes",
        limit=0.5,
        unit="MiB",
    ),
    *(
        Aim(
            program="record",
            key=f"n{nodes}.f419.{command}.cpu_s",
            what=f"{command} after 419 failures of {nodes:,} nodes",
            limit=limit,
        )
        for nodes in (2048, 12_500)
        for command, limit in _ASKED.items()
    ),
    *(
        Aim(
            program="record",
            key=f"n{nodes}.f419.status.mib",
            what=f"memory of status after 419 failures of {nodes:,} nodes",
            limit=150,
            unit="MiB",
        )
        for nodes in (2048, 12_500)
    ),
    Aim(
        program="record",
        key="n2048.f419.redraw_s",
        what="redraw of watch after 419 failures of 2,048 nodes",
        limit=0.1,
    ),
    *(
        Aim(
            program="daemons",
            key=f"{daemon}.{key}_ratio",
            what=f"{daemon}: {what} a look at the end of a month, of that on day 9",
            limit=limit,
            unit="x",
        )
        for daemon in ("metrics", "notify", "track", "watch")
        for key, what, limit in (("mib", "memory", 1.1), ("cpu", "processor time", 1.5))
    ),
    Aim(
        program="record",
        key="n12500.month_gb",
        what="events of a month of 2,400 failures of 12,500 nodes",
        limit=2.0,
        unit="GB",
    ),
    Aim(
        program="collectives",
        key="holdfast.syncs",
        what="times a step that the host waits for the device, at most in any layout",
        limit=1,
        unit="",
    ),
    *(
        Aim(
            program="step_time",
            key=f"processors.dp{ranks}.plain.ratio",
            what=f"step of {what}, of a plain loop's",
            limit=1.05,
            unit="x",
        )
        for ranks, what in ((1, "one process"), (4, "dp4 with FSDP2"))
    ),
    _recovery("node", "SIGKILL of a node to first step", 1.0),
    _recovery("worker", "SIGKILL of a worker to first step", 1.0),
    _recovery("coordinator", "SIGKILL of the coordinator's node to first step", 1.0),
    _recovery("trainer", "SIGKILL of a worker of Hugging Face's Trainer, preloaded", 1.5),
    _recovery("tp", "SIGKILL of a node, dp4-tp2 to dp3-tp2", 2.0),
    _recovery("standby", "the same with standbys: of a node", 0.4),
    _recovery("standby_worker", "with standbys: of a worker", 0.4),
    _recovery("standby_coordinator", "with standbys: of the coordinator's node", 0.5),
    _recovery("standby_compile", "with standbys: of a node, compiled", 1.5),
    _recovery("growth", "a returning node, at the boundary", 1.0),
    *(
        _recovery(f"beyond_a_step.{case}", f"beyond a plain step: {what}", limit)
        for case, what, limit in (
            ("standby", "SIGKILL of a node, with standbys", 0.12),
            ("standby_worker", "SIGKILL of a worker, with standbys", 0.12),
            ("standby_coordinator", "SIGKILL of the coordinator's node, with standbys", 0.12),
            ("standby_tp", "SIGKILL of a node, dp4-tp2, with standbys", 0.4),
            ("growth", "the pause when a node has returned", 0.08),
            ("drain", "the pause when a node is drained", 0.1),
            ("drain_two", "the pause when two neighbours are drained", 0.1),
            ("drain_coordinator", "the pause when the coordinator's node is drained", 0.1),
            ("swap", "the pause when a spare takes a slow node's place", 0.1),
            ("pair", "two ranks on two cores: a node, with standbys", 0.12),
            ("pair_worker", "two ranks on two cores: a worker, with standbys", 0.12),
            ("pair_coordinator", "two ranks on two cores: the coordinator's node", 0.12),
            ("pair_growth", "two ranks on two cores: a node has returned", 0.08),
            ("pair_drain", "two ranks on two cores: a node is drained", 0.1),
        )
    ),
    _recovery("rejoin", "a returning node's agent starts to first step of all", 3.0),
    _recovery("pair_rejoin", "the same, two ranks on two cores", 3.0),
    Aim(
        program="recovery",
        key="holdfast.committed_steps_redone",
        what="committed steps redone, at most in any run",
        limit=0,
        unit="",
    ),
    Aim(
        program="recovery",
        key="holdfast.explained",
        what="part of the pause that the phases explain, at least in any run",
        limit=0.99,
        at_least=True,
        unit="%",
    ),
    Aim(
        program="hang",
        key="holdfast.sigstop_s",
        what="SIGSTOP of a worker to first step",
        limit=4.0,
        peers=("torchrun.sigstop_s",),
    ),
    Aim(
        program="hang",
        key="holdfast.sigstop_node_s",
        what="SIGSTOP of a node to first step",
        limit=4.0,
        peers=("torchrun.sigstop_node_s",),
    ),
    Aim(
        program="hang",
        key="holdfast.sigstop_node_detected_s",
        what="SIGSTOP of a node until it is declared",
        limit=3.0,
    ),
    Aim(
        program="hang",
        key="holdfast.spin_detected_s",
        what="a worker that spins at 100 % until it is declared",
        limit=3.0,
    ),
    Aim(
        program="hang",
        key="holdfast.wedge_detected_s",
        what="a worker that never enters the all-reduce until it is declared",
        limit=3.0,
    ),
    Aim(
        program="hang",
        key="holdfast.starve_detected_s",
        what="a data loader that delivers no more until it is declared",
        limit=3.0,
    ),
    Aim(
        program="snapshot",
        key="training.slowdown",
        what="training slower by a snapshot and copy each step, 8 MiB and 300 ms",
        limit=0.03,
        unit="%",
    ),
    Aim(
        program="snapshot",
        key="stall.later_s",
        what="stall by a checkpoint of 770 MB to storage",
        limit=0.1,
    ),
    Aim(
        program="snapshot",
        key="stall.first_s",
        what="the same, the first of an epoch, its buffers made by a thread before",
        limit=0.1,
    ),
    Aim(
        program="snapshot",
        key="reshard.memory_speed",
        what="reshard load from memory, of dcp.load's speed",
        limit=1.0,
        at_least=True,
        unit="x",
    ),
    Aim(
        program="snapshot",
        key="reshard.storage_speed",
        what="reshard load from storage, of dcp.load's speed",
        limit=0.9,
        at_least=True,
        unit="x",
    ),
    Aim(
        program="membership",
        key="holdfast_256.form",
        what="256 agents form an epoch",
        limit=1.0,
        peers=("c10d_64.form",),
    ),
    Aim(
        program="membership",
        key="holdfast_2048.form",
        what="2,048 agents form an epoch",
        limit=2.0,
    ),
    Aim(
        program="membership",
        key="holdfast_16384.form",
        what="16,384 agents form an epoch",
        limit=20.0,
    ),
    Aim(
        program="membership",
        key="holdfast_2048.coordinator_mib",
        what="2,048 agents form an epoch: memory of the coordinator's process",
        limit=400,
        unit="MiB",
    ),
    Aim(
        program="membership",
        key="holdfast_256.member_learnt",
        what="256 agents learn of a death, the last of them",
        limit=0.2,
    ),
    Aim(
        program="membership",
        key="holdfast_2048.member_learnt",
        what="2,048 agents learn of a death, the last of them",
        limit=0.1,
    ),
    Aim(
        program="chaos",
        key="holdfast.fraction",
        what="part of the undisturbed steps done, a node killed every 15 s",
        limit=0.8,
        at_least=True,
        unit="%",
        peers=("torchrun_tuned.fraction",),
    ),
    Aim(
        program="calibration",
        key="worst_error_pct",
        what="step that a profile predicts, of the measured one: worst of four layouts",
        limit=20.0,
        unit="% off",
    ),
)


ON_A_GPU: tuple[tuple[str, str, str], ...] = (
    (
        "predicted GiB beside `max_memory_allocated`",
        "within 10 %",
        "`benchmarks/step_time.py`, peak GiB beside `holdfast plan`",
    ),
    (
        "step of 1.5 B parameters beside a plain loop",
        "≤ 1.05 x",
        "`benchmarks/step_time.py`, with `--deterministic` for its cost",
    ),
    ("step and MFU of 8B beside torchtitan", "no slower", "a job of each on the same nodes"),
    (
        "stall of 8B's step by a snapshot each step",
        "≤ 1 % (blocking copies: 0.4 of 4 s)",
        "a job with `checkpoint.memory_every_steps` 0 and 1; `make gpu`",
    ),
    (
        "a device that hangs, until its node is charged",
        "≥ 30 s, ≤ 60 s",
        "a device that hangs, in the first hour (docs/gpus.md)",
    ),
    (
        "SIGKILL of a worker to first step, with a standby's context and kernels warm",
        "one step and NCCL's connecting",
        "a worker that is killed, in the first hour; `recovery.phase`",
    ),
    ("a standby's memory on the GPU", "said", "`nvidia-smi`, in the first hour"),
    ("step in float8 beside bf16", "faster", "a job with and without `train.float8`"),
)
"""What was asked of GPUs, how much of it, and what measures it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One program that was run."""

    program: str
    where: str
    """Machine, versions, date and load when it began."""
    command: str
    seconds: float
    text: str
    """What it printed, without the JSON line."""
    result: Mapping[str, Any] | None
    """Its JSON line; None: it failed, and `text` says how."""


def look_up(result: Mapping[str, Any], key: str) -> Any:
    """Return the value at `key`.

    Raises:
        KeyError: there is none.
    """
    value: Any = result
    for part in key.split("."):
        if not isinstance(value, dict):
            raise KeyError(key)
        value = value[part]
    return value


def shown(value: Any, unit: str) -> str:
    """Return a number as the table has it."""
    if value is None:
        return "never"
    if unit == "%":
        return f"{value:.1%}"
    return f"{value:g} {unit}".rstrip()


def _beside(result: Mapping[str, Any], key: str, unit: str) -> str:
    """Return `NAME NUMBER` of a peer; empty where it was not measured."""
    try:
        return f"{key.partition('.')[0]} {shown(look_up(result, key), unit)}"
    except KeyError:
        return ""


def rows(outcomes: Sequence[Outcome], aims: Sequence[Aim] = AIMS) -> list[list[str]]:
    """Return the rows of the table of aims: what, measured, aim, met, peers."""
    results = {outcome.program: outcome.result for outcome in outcomes}
    out = []
    for aim in aims:
        limit = ("≥ " if aim.at_least else "≤ ") + shown(aim.limit, aim.unit)
        result = results.get(aim.program)
        try:
            value = look_up(result or {}, aim.key)
        except KeyError:
            out.append([aim.program, aim.what, "not measured", limit, "-", "-"])
            continue
        met = "yes" if value is not None and aim.met_by(value) else "**no**"
        beside = [text for key in aim.peers if (text := _beside(result or {}, key, aim.unit))]
        out.append([aim.program, aim.what, shown(value, aim.unit), limit, met, ", ".join(beside)])
    return out


def split_output(output: str) -> tuple[str, dict[str, Any] | None]:
    """Return (what was printed, the JSON object of the last line); None where that is none."""
    text, _, last = output.rstrip("\n").rpartition("\n")
    try:
        result = json.loads(last)
    except ValueError:
        return output.rstrip("\n"), None
    return (text.rstrip(), result) if isinstance(result, dict) else (output.rstrip("\n"), None)


def report(outcomes: Sequence[Outcome], aims: Sequence[Aim] = AIMS) -> str:
    """Return RESULTS.md."""
    header = ["benchmark", "what", "measured", "aim", "met", "beside"]
    intro = (
        "`make bench` writes this file from `results/`, which keeps the newest outcome of every "
        "program. Times are medians in seconds; each program below names its command, machine, "
        "versions and date."
    )
    on_a_gpu = [[*asked, "not run: no GPU"] for asked in ON_A_GPU]
    parts = ["# Results", intro, table(header, rows(outcomes, aims))]
    parts += ["## On a GPU", table(["what", "asked", "measured by", "measured"], on_a_gpu)]
    for outcome in outcomes:
        state = "" if outcome.result is not None else " and failed"
        parts += [
            f"## {outcome.program}",
            f"`{outcome.command}` took {outcome.seconds:.0f} s{state}: {outcome.where}.",
            outcome.text if outcome.result is not None else f"```\n{outcome.text}\n```",
        ]
    return "\n\n".join(parts) + "\n"
