"""`watchdog`: stands in for the batch script once its host is lost.

With --no-kill a job outlives its batch host, but Slurm starts no other batch script: the job
would stay RUNNING until its time limit. So each node watches the script's beat. Once it stands
still, and the job has ended as a whole, one of the nodes does what the script would have done.

An agent's parent is a watchdog too, once its agent has ended. Where that parent is in a container,
which has no `scontrol`, a second step outside it runs `watchdog`.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Mapping

from elastic_trainer.storage.files import publish
from launcher.node import beat, board
from launcher.node.attempt import Attempt, say
from launcher.node.decide import BeatWatch, is_over
from launcher.platforms.retries import polled

READ_BEATS = 5
"""A watchdog reads the beat every so many beats."""
LEASE_READS = 60
"""So many readings of an unchanged lease, a second or more apart: nobody coordinates any more."""
STAND_IN_S = 60.0
"""How long a watchdog has before the next one takes its place."""


class Watchdog:
    """What a node does for the job when the batch host is lost.

    Args:
        attempt: which attempt this is.
        node: this node's name.
        env: of this process.
    """

    def __init__(self, attempt: Attempt, node: str, env: Mapping[str, str]) -> None:
        self._attempt, self._node, self._env = attempt, node, env
        self._beat_s = beat.period_s(env)
        self._watch = BeatWatch()
        self._read_at = time.monotonic()
        self._lease: tuple[int, int] | None = None
        self._lease_still = 0

    @property
    def lost(self) -> bool:
        """Whether the batch script's beat stands still, as far as `look` has seen."""
        return self._watch.lost

    def look(self) -> None:
        """Read the beat when it is time to."""
        if time.monotonic() < self._read_at:
            return
        self._read_at = time.monotonic() + READ_BEATS * self._beat_s
        was_lost = self.lost
        self._watch = self._watch.read(beat.read(self._attempt))
        if self.lost and not was_lost:
            say(f"{self._node}: the batch script's beat has stopped: its host is lost")

    def serve(self) -> int:
        """Watch beside the agents' step until Slurm ends the job, or this node has to.

        Returns:
            0: the job is put back or cancelled.
        """
        # Slurm sends it to all steps: it asks for a save, which is the agents' to do.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        while True:
            time.sleep(READ_BEATS * self._beat_s)
            self.look()
            # Not over, or another job has it: Slurm ends this process, some day.
            if self.lost and self._over():
                self._stand_in()
                return 0

    def finish_job(self) -> None:
        """After the agent's end: see to the job, if the batch script cannot any more."""
        if not self._lost_for_sure():
            return
        if polled(self._over, lambda over: over is not None, for_s=math.inf, every_s=1.0):
            self._stand_in()

    def _lost_for_sure(self) -> bool:
        """Say for sure, at the end, whether the batch script lives. Takes about one beat."""
        if self.lost:
            return True
        value = beat.read(self._attempt)
        reads = 0
        # Storage that cannot be read says nothing; nor can the script then do its work.
        while reads < 3 * READ_BEATS:
            time.sleep(self._beat_s)
            now = beat.read(self._attempt)
            if now is None:
                continue
            if value is not None and now != value:
                return False
            value = now
            reads += 1
        return True

    def _over(self) -> bool | None:
        """Look once whether the whole job has ended; see `decide.is_over`."""
        try:
            state = board.read(self._attempt.run_dir)
        except (OSError, ValueError):
            return None
        seen = None if state.lease is None else (state.lease.term, state.lease.beat)
        self._lease_still = self._lease_still + 1 if seen == self._lease else 0
        self._lease = seen
        return is_over(state, self._attempt.name, lease_still=self._lease_still >= LEASE_READS)

    def _stand_in(self) -> None:
        """Act, should this node be the one to; else wait, for that one may be lost too."""
        for turn in range(1_000):
            elected = False
            with contextlib.suppress(OSError):
                path = self._attempt.dir / f"caretaker.{turn}"
                elected = publish(path, f"{self._node}\n".encode())
            if elected:
                # Late: few nodes ever need it.
                from launcher.node.batch import take_over

                take_over(self._attempt, self._env)
                return
            time.sleep(STAND_IN_S)  # Slurm ends this process, unless that watchdog is lost too
