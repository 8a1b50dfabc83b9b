"""`beat`: raises a number in a file as long as the batch script lives.

Beside it, the batch host's other work while the job runs: failing machines get their strikes in the
fleet's ledger, and nodes that Slurm drains are asked to leave.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elastic_trainer.storage.files import look_afresh, read_json, write_json
from launcher.fleet.node_ledger import NodeLedger, node_ledger_at, place_for
from launcher.fleet.rules import SURVIVED_S
from launcher.node.attempt import Attempt, say
from launcher.node.decide import EXIT_LEFT, a_few
from launcher.platforms.commands import Commands, SystemCommands
from launcher.platforms.local import start_ticks
from launcher.platforms.slurm.parse import expand_nodes
from launcher.platforms.slurm.queries import TIMEOUT_S, draining
from launcher.spec.errors import HoldfastError

if TYPE_CHECKING:
    from elastic_trainer.board.kubernetes_board import ApiServer

BEAT_S = 2.0
"""One small write to shared storage by one node; watchdogs read it five times as rarely."""
HARVESTS: Final = 30
"""Beats, a minute, between two updates of the ledger."""
DRAINS: Final = 5
"""Beats, 10 s, between two looks for nodes of the job that drain."""


def period_s(env: Mapping[str, str]) -> float:
    """Return seconds between two beats; HOLDFAST_BEAT_S changes them, for tests."""
    return float(env.get("HOLDFAST_BEAT_S") or BEAT_S)


def beat(attempt: Attempt, env: Mapping[str, str]) -> int:
    """Beat until the batch script is gone; failing storage is tried again.

    Slurm's signals to the whole job do not end it: the script still waits for its agents.
    """
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Slurm names the batch shell's process. Our parent may be a subshell of it.
    named = env.get("SLURM_TASK_PID", "")
    script = int(named) if named.isdigit() and start_ticks(int(named)) else os.getppid()
    born = start_ticks(script)
    # Other threads: what stalls them must not stop the beat.
    Strikes(attempt.run_dir, env, every_s=HARVESTS * period_s(env)).start()
    drains = Drains(attempt, env, SystemCommands(env))
    args = (attempt, drains, DRAINS * period_s(env))
    threading.Thread(target=look_after, args=args, daemon=True).start()
    count = 0
    while born is not None and start_ticks(script) == born:
        count += 1
        # Readers take failing storage for a lost beat, until it is back.
        with contextlib.suppress(OSError):
            # Written over, never replaced: readers on NFS see a new inode late.
            fd = os.open(attempt.beat, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(fd, b"%012d\n" % count, 0)
            finally:
                os.close(fd)
        time.sleep(period_s(env))
    return 0


# -- Nodes that Slurm drains leave the job at a step boundary --------------------------------------
# A drain (`holdfast drain`, `scontrol update state=drain`, `scontrol reboot asap`, a health check)
# keeps new jobs out only. The batch host asks Slurm which of the job's nodes drain, and writes
# attempts/<name>/leaving/<node>; that node's parent of the agent reads it. Once its agent has left,
# the node is taken out of the allocation: Slurm calls it drained, or reboots it.


FOLDER: Final = "leaving"


def asked_to_leave(attempt: Attempt, node: str) -> str:
    """Return why `node` is to leave the job; empty: it is not."""
    folder = attempt.dir / FOLDER
    look_afresh(folder)
    return str(read_json(folder / node).get("reason") or "")


class Drains:
    """The batch host's work for nodes that drain."""

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
        """Nodes that have left but that Slurm does not take back."""

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
    """Look again and again; a repeated error is said once."""
    said = ""
    while True:
        time.sleep(every_s)
        try:
            drains.look()
        except Exception as error:  # noqa: BLE001  the next look may be better
            if said != (said := str(error)):
                say(f"{attempt.name}: nodes that drain are not seen: {error}")


# -- Strikes: what the run finds out about machines goes into the fleet's ledger -------------------


EVERY_S = 60.0
LAST_S = 5.0
"""The last look may take so long: the pod is about to end."""


class Strikes:
    """Takes a run's record over into the ledger, again and again, in a thread.

    `only` limits it to what one node has said; a pod's `env` says how its API server is reached.
    """

    def __init__(
        self,
        run_dir: Path,
        env: Mapping[str, str] = os.environ,
        *,
        only: str | None = None,
        every_s: float = EVERY_S,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._run_dir, self._env, self._only, self._every_s = run_dir, env, only, every_s
        self._since = wall() - SURVIVED_S
        self._over, self._said = threading.Event(), ""
        self._thread = threading.Thread(target=self._serve, name="holdfast-strikes", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Look once more, for the last events; not for long."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_S)

    def _serve(self) -> None:
        try:
            fleet = node_ledger_at(place_for(self._run_dir), self._server, in_pod=True)
        except FileNotFoundError:
            return  # it has no token: the launcher does this, when it fetches the record
        except (HoldfastError, ValueError) as error:
            say(f"the fleet's ledger is not used: {error}")
            return
        # Thousands of pods begin at once, and each asks the ledger about its GPUs.
        wait_s = self._every_s * random.random()
        while not self._over.wait(wait_s):
            self._look(fleet)
            wait_s = self._every_s
        self._look(fleet)

    def _server(self) -> ApiServer:
        # Late: who has a folder needs no HTTP and no TLS.
        from elastic_trainer.board.kubernetes_board import ApiServer

        return ApiServer.of_pod(self._env)

    def _look(self, fleet: NodeLedger) -> None:
        try:
            fleet.harvest(self._run_dir, since_unix=self._since, only=self._only)
        except Exception as error:  # noqa: BLE001  the job goes on without
            if self._said != (said := str(error)):
                say(f"the fleet's ledger misses what happens here: {error}")
                self._said = said
