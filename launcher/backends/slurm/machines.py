"""Slurm's nodes as machines: what it says against each, and how it is told to use one no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from launcher.backends.base import Machine
from launcher.backends.commands import Commands
from launcher.backends.slurm.parse import expand_nodes, records
from launcher.backends.slurm.queries import failure

TIMEOUT_S: Final = 60.0
_CLOSED: Final = ("DRAIN", "DOWN", "FAIL", "REBOOT", "MAINT", "POWERED_DOWN", "NOT_RESPONDING")
"""Parts of a state in which no job is started there (scontrol's manual, State)."""


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


def close(commands: Commands, names: Iterable[str], reason: str) -> None:
    """Drain nodes: jobs that run there go on, none begins.

    Raises:
        PlatformError, UserError: Slurm refuses, as to who is no operator.
    """
    _update(commands, names, ["State=DRAIN", f"Reason={reason}"])


def reopen(commands: Commands, names: Iterable[str]) -> None:
    """Let jobs begin on nodes again.

    Raises:
        PlatformError, UserError: Slurm refuses, as to who is no operator.
    """
    _update(commands, names, ["State=RESUME"])


def _update(commands: Commands, names: Iterable[str], what: Sequence[str]) -> None:
    _answer(commands, ["scontrol", "update", f"NodeName={','.join(names)}", *what])


def _answer(commands: Commands, argv: Sequence[str]) -> str:
    answer = commands.run(argv, timeout_s=TIMEOUT_S)
    if answer.code:
        raise failure(answer)
    return answer.out
