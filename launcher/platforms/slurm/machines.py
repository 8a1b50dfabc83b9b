"""Slurm's nodes as machines: what it says against each, and how it is told to use one no more."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from launcher.platforms.base import Machine
from launcher.platforms.commands import Commands
from launcher.platforms.slurm.parse import expand_nodes, records
from launcher.platforms.slurm.queries import failure
from launcher.spec.errors import PermanentError, UserError

TIMEOUT_S: Final = 60.0
_CLOSED: Final = ("DRAIN", "DOWN", "FAIL", "REBOOT", "MAINT", "POWERED_DOWN", "NOT_RESPONDING")
"""Parts of a state in which no job is started there (scontrol's manual, State)."""

_USED: Final = re.compile("ALLOC|MIX|COMPLETING")


def of_scontrol(nodes: str, topology: str = "") -> list[Machine]:
    """Read `scontrol --oneliner show node` and `show topology`. Pure.

    The rack of a node is its leaf switch (topology/tree) or its block.
    """
    racks: dict[str, str] = {}
    for fields in records(topology):
        name = fields.get("BlockName") or (
            fields.get("SwitchName") if fields.get("Level", "0") == "0" else None
        )
        if name:
            racks.update(dict.fromkeys(expand_nodes(fields.get("Nodes", "")), name))
    return [
        Machine(
            name=name,
            closed=_closed(fields.get("State", ""), fields.get("Reason", "")),
            rack=racks.get(name, ""),
        )
        for fields in records(nodes)
        if (name := fields.get("NodeName"))
    ]


def _closed(state: str, reason: str) -> str:
    if not any(word in state for word in _CLOSED) and not state.endswith("*"):
        return ""
    return f"{state.lower()}: {reason}" if reason else state.lower()


def machines(commands: Commands) -> list[Machine]:
    """Return the nodes that Slurm has.

    Raises:
        UserError: HF650 there is no scontrol.
        PlatformError: the controller is away.
    """
    nodes = _answer(commands, ["scontrol", "--all", "--oneliner", "show", "node"])
    # Without a topology plugin this fails, or says nothing.
    topology = commands.run(["scontrol", "--oneliner", "show", "topology"], timeout_s=TIMEOUT_S)
    return of_scontrol(nodes, "" if topology.code else topology.out)


def draining(commands: Commands, names: Sequence[str]) -> dict[str, str]:
    """Return which of these nodes Slurm drains, with its reason; those that are down are not.

    Raises:
        UserError: HF650 there is no scontrol.
        PlatformError: the controller is away.
    """
    said = _answer(commands, ["scontrol", "--oneliner", "show", "node", ",".join(names)])
    return {
        machine.name: machine.closed
        for machine in of_scontrol(said)
        if "drain" in machine.closed.partition(":")[0] and "down" not in machine.closed[:4]
    }


def drain(commands: Commands, names: Sequence[str], reason: str) -> None:
    """Drain nodes: Slurm starts nothing there any more.

    Raises:
        UserError: HF693 Slurm refuses, as to who is no operator.
        TemporaryError: the controller is away.
    """
    argv = ["scontrol", "update", f"NodeName={','.join(names)}", "State=DRAIN", f"Reason={reason}"]
    try:
        _answer(commands, argv)
    except PermanentError as error:
        raise UserError("HF693", f"Slurm does not drain them: {error}") from error


def in_use(commands: Commands, names: Sequence[str]) -> dict[str, str]:
    """Return those of the nodes that Slurm has given to jobs, and how it calls that.

    Raises:
        UserError: HF650 there is no scontrol.
        PlatformError: the controller is away.
    """
    said = _answer(commands, ["scontrol", "--oneliner", "show", "node", ",".join(names)])
    states = {each.get("NodeName", ""): each.get("State", "") for each in records(said)}
    return {name: state.lower() for name, state in states.items() if _USED.search(state)}


def _answer(commands: Commands, argv: Sequence[str]) -> str:
    answer = commands.run(argv, timeout_s=TIMEOUT_S)
    if answer.code:
        raise failure(answer)
    return answer.out
