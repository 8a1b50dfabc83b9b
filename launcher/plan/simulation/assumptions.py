"""How often what fails and how long what takes, each with where it comes from. Pure.

Rates of failures are those of Llama 3's training on 2,048 nodes of 8 H100 for 54 days (arXiv
2407.21783, section 3.3.4 and table 5): 419 unexpected interruptions, 3.79 in 1,000 node-days, which
are divided here among four classes, and 47 planned ones. Others are named where they are used;
`assumed` marks what no publication says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from launcher.spec.errors import Problem, UserError, Where

_NODE_DAYS: Final = 2048 * 54 / 1000
"""Of Llama 3's training, in thousands."""
_MOST: Final = 1e9


def _value(
    default: float | None, unit: str, source: str, *, least: float = 0.0, most: float = _MOST
) -> Any:
    about = {"unit": unit, "source": source, "least": least, "most": most}
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Rates and times; None: from the job file and its plan."""

    days: float = _value(54.0, "days", "Llama 3", least=1e-3, most=36_500)
    """How long the fleet is looked at."""
    node_losses: float = _value(
        315 / _NODE_DAYS, "1,000 node-days", "Llama 3: hardware of a node 283, host maintenance 32"
    )
    """Nodes that are lost and come back after `repair_h`. Spares are lost as often."""
    switch_losses: float = _value(35 / _NODE_DAYS, "1,000 node-days", "Llama 3: switch or cable 35")
    """Losses of `switch_nodes` nodes at once."""
    process_faults: float = _value(
        63 / _NODE_DAYS, "1,000 node-days", "Llama 3: software 54, watchdog 7, dependency 2"
    )
    """Workers that die; their node stays."""
    slow_nodes: float = _value(6 / _NODE_DAYS, "1,000 node-days", "Llama 3: thermal, sensor 6")
    """Nodes that slow the job to `slow_speed` for `slow_s`, and are then replaced."""
    planned_stops: float = _value(47 / 54, "day", "Llama 3: 47 planned interruptions")
    """Times that the job saves, ends and is queued again."""
    job_losses: float = _value(3 / 54, "day", "Llama 3: 3 interventions by hand")
    """Ends of all nodes at once: what was in memory is lost."""
    repair_h: float = _value(24.0, "hours", "assumed")
    """Mean time until a lost node is back; exponential."""
    switch_nodes: float = _value(2.0, "nodes", "Llama 3: two servers a rack", least=1.0)
    """Nodes of a rack or leaf."""
    copies_lost: float | None = _value(None, "probability", "docs/failures.md", most=1.0)
    """That nodes lost with their switch hold each other's copies."""
    detect_s: float = _value(10.0, "seconds", "ByteRobust (2509.16293): GPU or driver lost")
    """From a fault to its detection."""
    restart_s: float = _value(150.0, "seconds", "FlashRecovery (2509.03047), 4,800 devices")
    """From the detection to the first step, from memory."""
    grow_s: float | None = _value(None, "seconds", "as restart_s")
    """Pause in which nodes that have come back, or a slow one, are exchanged at a step's end."""
    slow_s: float = _value(600.0, "seconds", "assumed")
    """Until a slow node is replaced."""
    slow_speed: float = _value(0.8, "of the job's speed", "assumed", most=1.0)
    """Of the job, which waits for the slow node."""
    requeue_s: float = _value(300.0, "seconds", "DLRover: pods 5 min")
    """From the end of a job to its next start."""
    step_s: float | None = _value(None, "seconds", "the plan", least=1e-6)
    """Of all nodes."""
    interval_s: float | None = _value(None, "seconds", "the job file", least=1e-3)
    """From one checkpoint to the next."""
    stall_s: float = _value(0.59, "seconds", "ByteCheckpoint (2407.20143), 8,960 GPUs")
    """That a checkpoint stops the training."""
    write_s: float | None = _value(None, "seconds", "the plan")
    """From then on until it counts."""
    read_s: float | None = _value(None, "seconds", "as write_s")
    """To restore from storage."""


def assumptions(given: Sequence[str], measured: Mapping[str, float] | None = None) -> Assumptions:
    """Return the defaults, changed by what was measured and by what is `given` as NAME=VALUE.

    Raises:
        UserError: HF685, unknown names and values out of their range, all of them.
    """
    fields = {field.name: field for field in dataclasses.fields(Assumptions)}
    found, problems = dict(measured or {}), []
    for text in given:
        name, _, number = text.partition("=")
        where = Where(key=f"--assume {text}")
        if name not in fields:
            known = ", ".join(fields)
            problems.append(Problem("HF685", where, f"no such assumption; use one of {known}"))
            continue
        about = fields[name].metadata
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if not about["least"] <= found[name] <= about["most"]:
            limits = f"from {about['least']:g} to {about['most']:g} ({about['unit']})"
            problems.append(Problem("HF685", where, f"expected a number {limits}"))
    if problems:
        raise UserError.many(problems)
    return Assumptions(**found)
