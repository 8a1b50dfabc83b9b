"""All-reduces within groups of nodes, in the rounds of bisection.py, with a deadline each.

One process on every node serves all rounds (elastic_trainer/collective_check.py). Processes and
driver meet in a folder that all nodes share, which only this user can write: JSON, no pickles.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from elastic_trainer.atomic_file import write_atomic
from elastic_trainer.quantities import counted
from launcher.ops.preflight.bisection import Bisection, Group, Verdicts
from launcher.ops.preflight.checks import Finding
from launcher.retries import polled

CHECK: Final = "collectives"
SERVER: Final = "elastic_trainer.collective_check"
"""Run on the nodes; the launcher itself does without torch."""
_POLL_S: Final = 0.05
_GRACE_S: Final = 3.0
"""From a round's deadline until a server's answer must be seen."""


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

        wait_s = self.deadline_s + _GRACE_S
        polled(look, lambda left: left == 0, for_s=wait_s, every_s=_POLL_S)
        return {
            group: max(answers[node] for node in group) if set(group) <= answers.keys() else None
            for group in groups
        }


@contextlib.contextmanager
def local_servers(names: Iterable[str], folder: Path, backend: str = "gloo") -> Any:
    """Run a server for each name on this machine, a session each; kill what is left at the end."""
    argv = [sys.executable, "-P", "-m", SERVER, str(folder)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name in names:
            log = (folder / f"log-{name}").open("wb")
            with log:
                running.append(
                    subprocess.Popen(
                        [*argv, name, "127.0.0.1", backend],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield running
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def findings(verdicts: Verdicts, nodes: Iterable[str]) -> dict[str, Finding]:
    """Return each node's finding. Pure."""
    return {node: _finding(verdicts, node) for node in nodes}


def _finding(verdicts: Verdicts, node: str) -> Finding:
    if node in verdicts.broken:
        text = (
            "does not end a collective with any node; take it out, look at NIC, GPUs and firewall"
        )
        return Finding(check=CHECK, level="fail", text=text)
    if node in verdicts.slow:
        text = "slow with every node; look at clocks, PCIe width, link rate and other processes"
        return Finding(check=CHECK, level="fail", text=text)
    if node in verdicts.suspects:
        others = ", ".join(sorted(verdicts.suspects))
        text = f"one of these is at fault: {others}; check them together with more nodes"
        return Finding(check=CHECK, level="warn", text=text)
    return Finding(check=CHECK, text="works with other nodes")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found
