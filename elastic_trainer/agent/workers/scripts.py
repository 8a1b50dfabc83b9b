"""What the agent does for scripts that know nothing of it.

Arguments filled for each epoch, logs shown and searched, and a stop by a signal where the
script takes no requests. Of the built-in trainer only the stop's bookkeeping is used.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import Std

from elastic_trainer.agent.membership.notices import EpochFormed
from elastic_trainer.agent.membership.tasks import Launch, Task, WorkerExited
from elastic_trainer.agent.workers.tail import Followed, LogFollower
from elastic_trainer.agent.workers.workers import Workers, size_of
from elastic_trainer.event_log import EventLog
from elastic_trainer.failures import EXIT_DONE, EXIT_SAVED, Failure
from elastic_trainer.heartbeat import Beat, Request, Section
from elastic_trainer.script_steps import newest_step
from elastic_trainer.templates import fill, values_of

PROGRESS_S = 1.0
"""Least time between two `script.progress` events."""


@dataclass(slots=True)
class _Stop:
    """A request passed on as a signal."""

    request: Request
    number: signal.Signals
    """As the agent that was asked first got it."""
    kill_at: float
    """Clock time at which SIGKILL follows it."""
    signalled: set[int] = field(default_factory=set)
    """Local ranks that got it."""


class Scripts:
    """The part of one agent that is for scripts; one epoch after the other.

    Args:
        task: what the workers run.
        log: the agent's events.
        shown: where the steps go that the script shows, see script_steps.py; None: to `log`.
        record_dir: where the job's events and logs are; None for none.
        follower: follows the logs; None where there is nothing to show and to look for.
        split: stdout and stderr have logs of their own.
        grace_s: between the signal that asks to leave and SIGKILL.
        stop_signal: what asks workers to leave, in place of SIGTERM.
    """

    def __init__(
        self,
        task: Task,
        log: EventLog,
        *,
        shown: EventLog | None = None,
        record_dir: Path | None = None,
        follower: LogFollower | None = None,
        split: bool = False,
        grace_s: float = 30.0,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self._task, self._log, self._shown = task, log, shown or log
        self._record_dir, self._follower, self._split = record_dir, follower, split
        self._grace_s, self._stop_signal = grace_s, stop_signal
        self._stop: _Stop | None = None
        self._signalled = False
        """This node's agent was signalled: a scheduler signals the workers beside it."""
        self._shown_step, self._shown_at = 0, float("-inf")
        self._epoch = 0
        self._before = self._newest = 0
        """Steps of the training that were done before this epoch, and by now, as far as known."""
        self.saved = True
        """Every worker of this epoch that was asked to leave said, by its code, that it saved."""

    # -- the start of an epoch --------------------------------------------------------------

    def begin(self, formed: EpochFormed, launches: Sequence[Launch]) -> list[Launch]:
        """Return `launches` with what the epoch fills in; their logs are followed from here."""
        self._stop, self.saved = None, True
        self._shown_step, self._shown_at = 0, float("-inf")
        self._go_on_from(formed.epoch)
        dressed = [self._dressed(launch, formed) for launch in launches]
        if self._follower is not None:
            followed = [
                Followed(launch.local_rank, std, path, size_of(path), launch.rank)
                for launch in dressed
                for std, path in ((Std.OUT, launch.log), (Std.ERR, launch.error_log))
                if path is not None
            ]
            self._follower.follow(formed.epoch, followed)
        return dressed

    def _dressed(self, launch: Launch, formed: EpochFormed) -> Launch:
        args = self._task.args
        if self._task.kind != "main":
            values = values_of(formed.rung, str(self._record_dir or "."))
            args = fill(args, values, local_rank=launch.local_rank)
        if not self._split:
            return replace(launch, args=args)
        out, err = (launch.log.with_suffix(f".{name}.log") for name in ("stdout", "stderr"))
        return replace(launch, args=args, log=out, error_log=err)

    # -- progress ---------------------------------------------------------------------------

    def _go_on_from(self, epoch: int) -> None:
        """Find out where steps continue that are counted from a worker's start.

        From what this node saw of the epoch before; a node that had no part in that, as any
        after a requeue, from the record.
        """
        known, self._epoch = self._epoch == epoch - 1, epoch
        if not known and self._record_dir is not None and self._task.kind != "main":
            # It is for people to read: storage that fails now must not stop a script.
            with contextlib.suppress(OSError):
                self._newest = newest_step(self._record_dir) or 0
        self._before = self._newest

    def since_the_beginning(self, beat: Beat) -> Beat:
        """Return a worker's reading with steps that count from the beginning of the training."""
        if beat.from_start:
            beat = replace(beat, step=self._before + beat.step, from_start=False)
        self._newest = max(self._newest, beat.step)
        return beat

    def beats(self, epoch: int, beats: Mapping[int, Beat]) -> dict[int, Beat]:
        """Return the workers' readings, with the steps that were found in their logs."""
        steps = self._follower.steps(epoch) if self._follower is not None else {}
        merged = {rank: self.since_the_beginning(beat) for rank, beat in beats.items()}
        for local_rank, (step, changes) in steps.items():
            if (beat := merged.get(local_rank)) is not None:
                merged[local_rank] = replace(
                    beat,
                    step=max(beat.step, step),
                    section=max(beat.section, Section.STEP),
                    counter=beat.counter + changes,
                )
        return merged

    def on_console(self, local_rank: int) -> bool:
        """Return whether the agent's stderr has that of a worker too."""
        return self._follower is not None and self._follower.shows(local_rank, Std.ERR)

    def show_progress(self, step: int, now: float, *, last: bool = False) -> None:
        """Put the job's step on record, for whoever watches it: the first of an epoch at once."""
        if step > self._shown_step and (last or now - self._shown_at >= PROGRESS_S):
            self._shown_step, self._shown_at = step, now
            self._shown.emit("script.progress", step=step, epoch=self._epoch)

    # -- requests as signals ----------------------------------------------------------------

    def ask(self, request: Request, now: float, name: str = signal.SIGTERM.name) -> None:
        """Take a request that the workers' heartbeats have been given already.

        Args:
            request: of STOP and GROW.
            now: by the clock.
            name: of the signal that passes it on, the first time.
        """
        if self._task.kind == "main" or not request & (Request.STOP | Request.GROW):
            return
        if self._stop is None:
            number = signal.Signals[name]
            if number is signal.SIGTERM:  # whatever asked, the script may handle another
                number = self._stop_signal
            self._stop = _Stop(request, number, now + self._grace_s)
        self._stop.request |= request

    def announce(self, name: str, *, alone: bool) -> str:
        """Return what follows a signal to the agent, for people."""
        what = "this node leaves the job" if alone else "the job stops"
        within = "" if self._task.kind == "main" else f" within {self._grace_s:g} s"
        again = "; Ctrl-C again ends it at once, without a save" if name == "SIGINT" else ""
        return f"{name}: {what}, workers are asked to save and leave{within}{again}"

    def turn(self, now: float, workers: Workers) -> None:
        """Send what is due: a signal to those who take no requests, SIGKILL to those who stay."""
        stop = self._stop
        if stop is None:
            return
        if self.take_requests(workers):
            return  # they leave at a step that they agree on
        for local_rank, pid in workers.pids().items():
            if local_rank not in stop.signalled:
                stop.signalled.add(local_rank)
                self._log.emit(
                    "worker.signalled",
                    pid=pid,
                    local_rank=local_rank,
                    request="stop" if Request.STOP in stop.request else "growth",
                    signal=stop.number.name,
                    grace_s=self._grace_s,
                )
                workers.send(local_rank, stop.number, group=self._task.kind == "command")
            elif now >= stop.kill_at:
                workers.send(local_rank, signal.SIGKILL)

    @staticmethod
    def take_requests(workers: Workers) -> bool:
        """Return whether the script looks at what is asked for, by the API."""
        return any(beat.listens for beat in workers.beats().values())

    def agent_signalled(self) -> None:
        """Note that this node's agent was asked to stop or to leave; the request follows."""
        self._signalled = True

    @property
    def asked(self) -> bool:
        """Whether scripts are being asked to leave: how they end from now on is no failure."""
        return self._task.kind != "main" and (self._stop is not None or self._signalled)

    def classify(self, exited: WorkerExited, failure: Failure | None) -> Failure | None:
        """Return what the end of a worker means: one that was asked to leave did not fail.

        It may not have had its own signal yet: the peers that left first take it along.
        """
        if not self.asked:
            return failure
        self.saved = self.saved and exited.code == EXIT_SAVED
        return failure if exited.beat.listens else None

    def finished(self, exited: WorkerExited) -> bool:
        """Return whether a worker that ended well has done all there is to do.

        Its exit code 0 says so unless it was asked to leave: handlers of signals end with 0 in
        the midst of training. Then only `api.Run.finish` does.
        """
        finished = exited.beat.section is Section.FINISHED
        return exited.code == EXIT_DONE and (finished or not self.asked)

    def close(self) -> None:
        """Show what was written last."""
        self._shown.close()
        if self._follower is not None:
            self._follower.close()
