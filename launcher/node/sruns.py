"""One srun: what it is started with, what it says, and whether that is for good."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Final

NODES_VARIABLE: Final = "HOLDFAST_NODES"
"""Nodes that agents start on, as n1,n2, where these are not all of the job's."""
TOTAL_GPUS: Final = "SLURM_GPUS"
"""sbatch --gpus: of all nodes of the job, which an srun for one node would ask for."""
_ASKS_FOR_GPUS: Final = re.compile(r"--(gpus-per-\w+|gres|tres-per-\w+)(=.*)?")
_REFUSED: Final = re.compile(
    r"mutually exclusive|invalid|unrecogni[sz]ed|ambiguous|excluded list|job not submitted"
    r"|not available|not permitted|than permitted",
    re.IGNORECASE,
)
"""What Slurm says of an srun that no try would change (src/common/slurm_errno.c, opt.c)."""
_PASSING: Final = re.compile(
    r"timed? ?out|tempora|unable to con|communication|connection|busy|node fail|failure on"
    r"|aborting|zero bytes|configuring|prolog|completing|invalid job id|drained|requeue|cancelled"
    r"|credential|expired|retry|no route|unreachable|not responding|slurmctld"
    r"|error code: (429|5..)",
    re.IGNORECASE,
)
"""What it says when nodes or the controller are away, or the job ends."""
_LONGEST: Final = 2000


class Srun:
    """A started srun; what it says goes on to stderr, and is kept.

    Args:
        argv: the command.
        env: its environment.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  for as long as this lives
        self._shown = 0
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stderr=self._words, env=env
        )

    def poll(self) -> int | None:
        """Return its exit code; None: it runs. Called again and again, for what it says too."""
        code = self._process.poll()
        while new := os.pread(self._words.fileno(), 65536, self._shown):
            self._shown += len(new)
            sys.stderr.buffer.write(new)
            sys.stderr.flush()
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, which it passes on to its tasks."""
        self._process.send_signal(number)

    @property
    def said(self) -> str:
        """What it has said."""
        begin = max(0, self._shown - _LONGEST)
        text = os.pread(self._words.fileno(), _LONGEST, begin).decode(errors="replace")
        return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def refused(said: str) -> bool | None:
    """Return whether Slurm refuses an srun for good; None: its words do not say. Pure.

    Args:
        said: what the srun said.
    """
    # An srun that waited for its turn has said so, whatever came of it.
    said = "; ".join(line for line in said.split("; ") if "temporarily disabled" not in line)
    if not said or _PASSING.search(said):
        return False
    return True if _REFUSED.search(said) else None


def of_one_node(command: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return an srun's command and environment, with totals of the job as each node's part. Pure.

    Args:
        command: srun, its options of which --output is the last, and what it runs.
        env: of the batch script.
    """
    own = {name: value for name, value in env.items() if name != TOTAL_GPUS}
    kind, colon, _ = env.get(TOTAL_GPUS, "").rpartition(":")
    here = env.get("SLURM_GPUS_ON_NODE", "")
    options = itertools.takewhile(lambda word: not word.startswith("--output="), command)
    if TOTAL_GPUS not in env or not here or any(map(_ASKS_FOR_GPUS.fullmatch, options)):
        return list(command), own
    return [command[0], f"--gpus-per-node={kind}{colon}{here}", *command[1:]], own


def as_of_one_srun(env: Mapping[str, str], node: str, nodes: Sequence[str]) -> dict[str, str]:
    """Return the environment that one srun for all nodes would have given this one's task. Pure.

    Scripts read there which node they are on, and of how many.

    Args:
        env: of the task of an srun for one node, or a few.
        node: its node.
        nodes: on which agents were started, in Slurm's order.
    """
    if node not in nodes:
        return dict(env)
    index, count = str(nodes.index(node)), str(len(nodes))
    each = "1" if len(nodes) == 1 else f"1(x{count})"
    own = {
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_GTIDS"), index),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_NPROCS", "SLURM_NTASKS"), count),
        **dict.fromkeys(("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"), count),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), each),
        "SLURM_STEP_NODELIST": env.get(NODES_VARIABLE) or env.get("SLURM_JOB_NODELIST", node),
    }
    return {**env, **own}
