"""All-reduces within groups of nodes, in the rounds of bisection.py, with a deadline each.

One process on every node serves all rounds (elastic_trainer/worker/collective_check.py). Processes
and driver meet in a folder that all nodes share, which only this user can write: JSON, no pickles.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.quantities import counted
from elastic_trainer.storage.files import write_atomic
from launcher.fleet.preflight.bisection import Bisection, Group, Verdicts
from launcher.fleet.preflight.checks import CheckResult
from launcher.platforms.retries import polled

CHECK: Final = "collectives"
SERVER: Final = "elastic_trainer.worker.collective_check"
"""Run on the nodes; the launcher itself does without torch."""
_POLL_S: Final = 0.05
_GRACE_S: Final = 3.0
"""From a round's deadline until a server's answer must be seen."""
_PATIENCE: Final = 5.0
_LEAST_S: Final = 15.0
"""A round is over once it has lasted so many times as long as its faster half, and so long."""


@dataclass(slots=True, kw_only=True)
class Collectives:
    """Rounds over `nodes`, whose processes run SERVER with the same folder.

    Args:
        nodes: by the names that they serve as.
        folder: shared by all, and private.
        start_s: longest wait until all have started.
        deadline_s: of one round, a group's start included.
        say: called with progress.
    """

    nodes: Sequence[str]
    folder: Path
    start_s: float = 120.0
    deadline_s: float = 60.0
    say: Callable[[str], None] = lambda _: None
    mono: Callable[[], float] = time.monotonic
    rounds: int = 0
    missing: frozenset[str] = frozenset()
    """Nodes that never started: broken without a round."""
    bisection: Bisection = field(init=False)

    def run(self) -> Verdicts:
        """Run all rounds; the servers are told to stop, however that ends."""
        try:
            here = polled(
                self._started,
                lambda found: len(found) == len(self.nodes),
                for_s=self.start_s,
                every_s=_POLL_S,
            )
            self.missing = frozenset(self.nodes) - here
            self.bisection = Bisection(nodes=[node for node in self.nodes if node in here])
            while groups := self.bisection.next_round():
                self.rounds += 1
                largest = max(map(len, groups))
                what = f"{counted(len(groups), 'group')} of up to {counted(largest, 'node')}"
                self.say(f"collectives, round {self.rounds}: {what}")
                self.bisection.tell(self._round(groups))
        finally:
            (self.folder / "stop").touch()
        found = self.bisection.verdicts()
        return replace(found, broken=found.broken | self.missing)

    def _started(self) -> set[str]:
        return {node for node in self.nodes if (self.folder / f"hello-{node}.json").exists()}

    def _round(self, groups: Sequence[Group]) -> dict[Group, float | None]:
        number = self.rounds
        asked = {"groups": groups, "deadline_s": self.deadline_s}
        write_atomic(self.folder / f"round-{number}.json", json.dumps(asked))
        answers: dict[str, float] = {}

        def look() -> int:
            waiting = 0
            for node in (node for group in groups for node in group if node not in answers):
                found = _read(self.folder / f"answer-{number}-{node}.json")
                if found is None:
                    waiting += 1
                else:
                    answers[node] = float(found["seconds"])
            return waiting

        begun, half_s = self.mono(), None

        def is_over(left: int) -> bool:
            nonlocal half_s
            lasted = self.mono() - begun
            if half_s is None and len(answers) >= left:
                half_s = lasted
            late = half_s is not None and lasted > max(_LEAST_S, _PATIENCE * half_s)
            return left == 0 or late

        polled(look, is_over, for_s=self.deadline_s + _GRACE_S, every_s=_POLL_S)
        return {
            group: max(answers[node] for node in group) if set(group) <= answers.keys() else None
            for group in groups
        }


def serve_here(folder: str, node: str, backend: str, address: str | None) -> None:
    """Serve rounds as `node` on this machine until the driver says stop; for submitit.

    Args:
        folder: shared with the driver.
        node: its name.
        backend: gloo or nccl.
        address: where others reach it; None: that of its host name.
    """
    here = address or socket.gethostbyname(socket.gethostname())
    log = Path(folder) / f"log-{node}"
    with log.open("wb") as out:
        argv = [sys.executable, "-P", "-m", SERVER, folder, node, here, backend]
        subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False)


def findings(verdicts: Verdicts, nodes: Iterable[str]) -> dict[str, CheckResult]:
    """Return each node's finding. Pure."""
    every = list(nodes)
    alone = "; two nodes cannot tell whether both are slow" if len(every) == 2 else ""
    return {node: _finding(verdicts, node, alone) for node in every}


def _finding(verdicts: Verdicts, node: str, alone: str) -> CheckResult:
    if node in verdicts.broken:
        text = (
            "does not end a collective with any node; take it out, look at NIC, GPUs and firewall"
        )
        return CheckResult(check=CHECK, level="fail", text=text)
    if node in verdicts.slow:
        text = "slow with every node; look at clocks, PCIe width, link rate and other processes"
        return CheckResult(check=CHECK, level="fail", text=text)
    if node in verdicts.suspects:
        others = ", ".join(sorted(verdicts.suspects))
        text = f"one of these is at fault: {others}; check them together with more nodes"
        return CheckResult(check=CHECK, level="warn", text=text)
    return CheckResult(check=CHECK, text=f"works with other nodes{alone}")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found
