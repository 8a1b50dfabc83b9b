"""Nodes that Slurm drains leave the job at a step boundary, and the job gives them back.

A drain (`holdfast drain`, `scontrol update state=drain`, `scontrol reboot asap`, a health check)
keeps new jobs out only. One process on the batch host asks Slurm which of the job's nodes drain,
and writes attempts/<name>/leaving/<node>; that node's parent of the agent reads it. Once its agent
has left, the node is taken out of the allocation: Slurm calls it drained, or reboots it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from elastic_trainer.storage.files import look_afresh, read_json, write_json
from launcher.node.attempt import Attempt, say
from launcher.node.decide import EXIT_LEFT, a_few
from launcher.platforms.commands import Commands
from launcher.platforms.slurm.machines import TIMEOUT_S, draining
from launcher.platforms.slurm.parse import expand_nodes
from launcher.spec.errors import HoldfastError

FOLDER: Final = "leaving"


def asked_to_leave(attempt: Attempt, node: str) -> str:
    """Return why `node` is to leave the job; empty: it is not."""
    folder = attempt.dir / FOLDER
    look_afresh(folder)
    return str(read_json(folder / node).get("reason") or "")


class Drains:
    """What the batch host does for nodes that drain.

    Args:
        attempt: of the job.
        env: the batch script's.
        commands: runs Slurm's.
        wall: the clock.
    """

    def __init__(
        self,
        attempt: Attempt,
        env: Mapping[str, str],
        commands: Commands,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._attempt, self._commands, self._wall = attempt, commands, wall
        self._nodes = list(expand_nodes(env.get("SLURM_JOB_NODELIST", "")))
        self._host = env.get("SLURMD_NODENAME", "")
        self._kept: set[str] = set()
        """Nodes that have left and that Slurm does not take back."""

    def look(self) -> None:
        """Ask Slurm once, and do what follows.

        Raises:
            HoldfastError: Slurm does not answer.
            OSError: the run directory cannot be written.
        """
        folder = self._attempt.dir / FOLDER
        there = {path.name for path in folder.glob("*")}
        for node, reason in draining(self._commands, self._nodes).items():
            if node not in there:
                folder.mkdir(exist_ok=True)
                write_json(folder / node, {"v": 1, "t_unix": self._wall(), "reason": reason})
                say(f"{node}: {reason}: it is asked to leave the job")
        left = [node for node, code in self._attempt.exits().items() if code == EXIT_LEFT]
        # The batch script runs on its host to the job's end.
        if free := [n for n in left if n in self._nodes and n not in {self._host, *self._kept}]:
            self._give_back(free)

    def _give_back(self, free: Sequence[str]) -> None:
        """Shrink the job's allocation to the other nodes."""
        stay = [node for node in self._nodes if node not in free]
        update = ["scontrol", "update", f"JobId={self._attempt.slurm_id}"]
        answer = self._commands.run([*update, f"NodeList={','.join(stay)}"], timeout_s=TIMEOUT_S)
        if answer.code:
            self._kept.update(free)
            say(f"{a_few(free)}: left, but Slurm keeps it in the job: {answer.complaint}")
            return
        self._nodes = stay
        say(f"{a_few(free)}: left the job")
        # Scripts that scontrol leaves in the working directory, for variables nobody reads here.
        for kind in ("sh", "csh"):
            with contextlib.suppress(OSError):
                Path(f"slurm_job_{self._attempt.job_id}_resize.{kind}").unlink()


def look_after(attempt: Attempt, drains: Drains, every_s: float) -> None:
    """Look again and again; what fails is said once."""
    said = ""
    while True:
        time.sleep(every_s)
        try:
            drains.look()
        except (HoldfastError, OSError) as error:
            if said != (said := str(error)):
                say(f"{attempt.name}: nodes that drain are not seen: {error}")
