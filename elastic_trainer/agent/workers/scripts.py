"""What the agent does for scripts that know nothing of it.

Arguments filled for each epoch, logs shown and searched, and a stop by a signal where the
script takes no requests. Of the built-in trainer only the stop's bookkeeping is used.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import Std

from elastic_trainer.agent.hangs.stacks import size_of
from elastic_trainer.agent.membership.notices import EpochFormed
from elastic_trainer.agent.membership.tasks import Launch, Task, WorkerExited
from elastic_trainer.agent.workers.tail import LogFollower, LogTail
from elastic_trainer.agent.workers.workers import Workers
from elastic_trainer.plan.command import fill, values_of
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.failures import EXIT_DONE, EXIT_SAVED, Action, Failure, Kind, classify
from elastic_trainer.record.script_steps import (
    FEW_STEPS,
    MOST_FROM_SCRATCH,
    Restart,
    Shown,
    StepSource,
    begun,
    newest_shown,
    restart,
)
from elastic_trainer.worker.heartbeat import Beat, Request, Section

PROGRESS_S = 1.0
"""Least time between two `script.progress` events."""


@dataclass(slots=True)
class _StopSent:
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

    `shown` takes the steps that the script shows, see script_steps.py; by default `log` does.
    Without a `follower` nothing in the logs is shown or looked for. With `split` stdout and stderr
    have separate logs. `grace_s` is between `stop_signal`, which asks workers to leave in place of
    SIGTERM, and SIGKILL. `from_scratch`: the script may begin at its first step after each restart.
    """

    def __init__(
        self,
        task: Task,
        log: EventLog,
        *,
        say: Callable[[str], None],
        shown: EventLog | None = None,
        record_dir: Path | None = None,
        follower: LogFollower | None = None,
        split: bool = False,
        grace_s: float = 30.0,
        stop_signal: signal.Signals = signal.SIGTERM,
        from_scratch: bool = False,
    ) -> None:
        self._task, self._log, self._say, self._shown = task, log, say, shown or log
        self._record_dir, self._follower, self._split = record_dir, follower, split
        self._grace_s, self._stop_signal = grace_s, stop_signal
        self._may_begin_anew = from_scratch
        self._stop: _StopSent | None = None
        self.signalled = False
        """This node's agent was signalled: the request follows, and a scheduler signals the workers
        beside it."""
        self._shown_step, self._shown_at = 0, float("-inf")
        self._epoch = 0
        self._before = self._newest = 0
        """Steps of the training that were done before this epoch, and by now, as far as known."""
        self._num_workers = 0
        self._speaks = False
        """This node has rank 0, so it speaks for the script."""
        self._begun: dict[int, Beat] = {}
        """Local rank -> its newest reading, of workers that have shown a step in this epoch."""
        self._reached = 0
        """The newest step of this node's workers in this epoch."""
        self._was: Shown | None = None
        self._now: Shown | None = None
        """What the script has shown in the last epoch that showed any, and in this one. Kept only
        by the node that speaks."""
        self._compared = self._uses_api = self._ended_well = False
        self.saved = True
        """Every worker of this epoch that was asked to leave said, by its code, that it saved."""

    # -- the start of an epoch --------------------------------------------------------------

    def begin(self, formed: EpochFormed, launches: Sequence[Launch]) -> list[Launch]:
        """Return `launches` with what the epoch fills in; their logs are followed from here."""
        self._stop, self.saved = None, True
        self._shown_step, self._shown_at = 0, float("-inf")
        self._num_workers = len(launches)
        self._go_on_from(formed.epoch, speaks=any(launch.rank == 0 for launch in launches))
        dressed = [self._dressed(launch, formed) for launch in launches]
        if self._follower is not None:
            logs = [
                LogTail(
                    path, size_of(path), std=std, local_rank=launch.local_rank, rank=launch.rank
                )
                for launch in dressed
                for std, path in ((Std.OUT, launch.log), (Std.ERR, launch.error_log))
                if path is not None
            ]
            self._follower.follow(formed.epoch, logs)
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

    def _go_on_from(self, epoch: int, *, speaks: bool) -> None:
        """Find out where steps continue that are counted from a worker's start.

        From what this node saw of the epoch before; a node that had no part in that, as any
        after a requeue, or did not speak for the script, from the record.
        """
        known, self._epoch = self._epoch == epoch - 1, epoch
        reached, self._reached = self._reached, 0
        heard, self._speaks = known and self._speaks, speaks
        self._was, self._now = self._now or self._was, None
        self._begun, self._compared = {}, False
        self._uses_api = self._ended_well = False
        seen = known and (heard or not speaks)
        if not seen and self._record_dir is not None and self._task.kind != "main":
            # It is for people to read: storage that fails now must not stop a script.
            with contextlib.suppress(OSError, ValueError, TypeError):
                self._was = newest_shown(self._record_dir)
                if known and self._was is not None and self._was.epoch == epoch - 1:
                    # Who spoke puts steps on record once a second, and may have died since.
                    self._was = replace(self._was, step=max(self._was.step, reached))
                if not known:
                    self._newest = self._was.step if self._was is not None else 0
        self._before = self._newest

    def since_the_beginning(self, beat: Beat) -> Beat:
        """Return a worker's reading with steps that count from the beginning of the training."""
        if beat.from_start:
            first = self._before + beat.first
            beat = replace(beat, step=self._before + beat.step, first=first, from_start=False)
        self._newest = max(self._newest, beat.step)
        self._reached = max(self._reached, beat.step)
        return beat

    def beats(self, epoch: int, beats: Mapping[int, Beat]) -> dict[int, Beat]:
        """Return the workers' readings, with the steps that were found in their logs."""
        steps = self._follower.steps(epoch) if self._follower is not None else {}
        merged = {rank: self.since_the_beginning(beat) for rank, beat in beats.items()}
        for local_rank, (step, changes, first) in steps.items():
            if (beat := merged.get(local_rank)) is not None:
                merged[local_rank] = replace(
                    beat,
                    step=max(beat.step, step),
                    section=max(beat.section, Section.STEP),
                    counter=beat.counter + changes,
                    first=first or beat.first,
                    source=StepSource.OUTPUT if first else beat.source,
                )
        return merged

    def on_console(self, local_rank: int) -> bool:
        """Return whether the agent's stderr has that of a worker too."""
        return self._follower is not None and self._follower.shows(local_rank, Std.ERR)

    def show_progress(self, step: int, now: float, *, last: bool = False) -> None:
        """Put the job's step on record, for whoever watches it: the first of an epoch at once."""
        if step > self._shown_step and (last or now - self._shown_at >= PROGRESS_S):
            self._shown_step, self._shown_at = step, now
            fields = {} if self._now is None else self._now.to_fields()
            self._shown.emit("script.progress", step=step, epoch=self._epoch, **fields)

    # -- progress that is regained ------------------------------------------------------------

    def look_back(self, beats: Mapping[int, Beat], *, ending: bool = False) -> Failure | None:
        """Compare where the script began in this epoch with what it had shown before; once.

        `beats` are readings of some workers, as `beats` returns them; `ending`: the epoch ends
        anyway.

        Returns:
            HF517, it has begun at its first step again and may not continue; else None.
        """
        if not self._speaks or self._task.kind == "main":
            return None
        self._uses_api = self._uses_api or any(beat.listens for beat in beats.values())
        self._begun |= {rank: beat for rank, beat in beats.items() if beat.first}
        if self._uses_api or not self._begun:
            return None  # its state is restored, and a restore that goes back is on record
        source = max(beat.source for beat in self._begun.values())
        counted = source <= StepSource.OPTIMIZER
        if counted:  # one that is not sure may have resumed
            source = min(beat.source for beat in self._begun.values())
        alike = [beat for beat in self._begun.values() if counted or beat.source is source]
        step, first = max(beat.step for beat in alike), max(beat.first for beat in alike)
        now = Shown(epoch=self._epoch, step=step, first=first, source=source, origin=first)
        if self._compared and self._now is not None:
            self._now = replace(self._now, step=max(step, self._now.step))
            return None
        self._now = begun(self._was, now)
        # In its first step another optimizer, or holdfast.progress, may be about to follow.
        all_here = len(self._begun) == self._num_workers and step > first
        if counted and not all_here and step < first + FEW_STEPS:
            return None
        if (found := restart(self._was, now)) is None:
            return None
        self._compared, self._now = True, found.now
        return self._restarted(found, ending=ending)

    def _restarted(self, found: Restart, *, ending: bool) -> Failure | None:
        """Put a restart on record; say it where steps of a whole run are lost."""
        reason, stops = "", False
        if found.from_scratch:
            reason = (
                f"the script began at step {found.first} again after step {found.newest}: "
                f"{found.redone} steps are redone"
            )
            too_often = found.from_scratch >= MOST_FROM_SCRATCH and not self._may_begin_anew
            stops = too_often and not ending and not self.asked
            if stops:
                reason = (
                    f"HF517 {reason}, for the second time in a row; have it resume from its "
                    "checkpoint and show its steps (docs/scripts.md), or set elastic.from_scratch: "
                    "true (--rdzv-conf from_scratch=true)"
                )
                found = replace(found, now=replace(found.now, from_scratch=0))
                self._now = found.now  # whoever starts it again has the same two tries
            self._say(reason)
        now = found.now
        self._shown.emit(
            "script.restarted",
            step=found.first,
            epoch=self._epoch,
            first=found.first,
            newest=found.newest,
            redone=found.redone,
            from_scratch=found.from_scratch,
            by=now.source.name.lower(),
            stops=stops,
            reason=reason,
        )
        self._shown.emit("script.progress", step=now.step, epoch=self._epoch, **now.to_fields())
        self._shown_step = max(self._shown_step, found.now.step)
        if not stops:
            return None
        return Failure(kind=Kind.USER_ERROR, action=Action.STOP, detail=reason, sure=True)

    def ended(self, *, finished: bool) -> None:
        """Note that the workers of this node have ended well; `finished`: with their last step."""
        self._ended_well = finished

    def _say_if_silent(self) -> None:
        """Say that a script has done nothing that anybody saw, once its output is read."""
        if self._task.kind == "main":
            return  # the trainer does not end before its last step
        shown = self._follower.steps(self._epoch) if self._follower is not None else {}
        if not (self._ended_well and self._speaks) or self._uses_api or self._begun or shown:
            return
        newest = self._was.step if self._was is not None else None
        self._shown.emit("script.silent", epoch=self._epoch, newest=newest)
        if self._task.preload:  # of another program none are counted
            before = "" if newest is None else f" after this start; it had shown step {newest}"
            self._say(f"the script ended with 0 and showed no step{before}")

    # -- requests as signals ----------------------------------------------------------------

    def ask(self, request: Request, now: float, name: str = signal.SIGTERM.name) -> None:
        """Take a request that the workers' heartbeats have already: signal `name` passes it on."""
        if self._task.kind == "main" or not request & (Request.STOP | Request.GROW):
            return
        if self._stop is None:
            number = signal.Signals[name]
            if number is signal.SIGTERM:  # whatever asked, the script may handle another
                number = self._stop_signal
            self._stop = _StopSent(request, number, now + self._grace_s)
        self._stop.request |= request

    def announce(self, name: str, *, alone: bool) -> str:
        """Return what follows a signal to the agent, for people."""
        what = "this node leaves the job" if alone else "the job stops"
        within = "" if self._task.kind == "main" else f" within {self._grace_s:g} s"
        again = "; Ctrl-C again ends it at once, without a save" if name == "SIGINT" else ""
        return f"{name}: {what}, workers are asked to save and leave{within}{again}"

    def turn(self, now: float, workers: Workers) -> None:
        """Send what is due: a signal to workers that take no requests, SIGKILL if they stay."""
        stop = self._stop
        if stop is None or self.take_requests(workers):
            return  # they leave at a step that they agree on
        for local_rank, process in workers.processes().items():
            if local_rank not in stop.signalled:
                stop.signalled.add(local_rank)
                self._log.emit(
                    "worker.signalled",
                    pid=process.pid,
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

    @property
    def asked(self) -> bool:
        """Whether scripts are being asked to leave: how they end from now on is not a failure."""
        return self._task.kind != "main" and (self._stop is not None or self.signalled)

    def classify(self, exited: WorkerExited, failure: Failure | None) -> Failure | None:
        """Return what the end of a worker means: one that was asked to leave did not fail.

        It may not have had its own signal yet: the peers that left first take it along.
        """
        if not self.asked:
            left = exited.beat.section is Section.STOPPED  # by the API: all ranks have agreed
            if exited.code == EXIT_SAVED and self._task.kind != "main" and not left:
                return classify(
                    code=EXIT_SAVED, signal=None, record=exited.record, log_tail=exited.log_tail
                )
            return failure
        self.saved = self.saved and exited.code == EXIT_SAVED
        return failure if exited.beat.listens else None

    def finished(self, exited: WorkerExited) -> bool:
        """Return whether a worker that ended well has done all there is to do.

        Its exit code 0 says so unless it was asked to leave: handlers of signals end with 0 in
        the midst of training. Then only `holdfast.WorkerRun.finish` does.
        """
        finished = exited.beat.section is Section.FINISHED
        return exited.code == EXIT_DONE and (finished or not self.asked)

    def close(self) -> None:
        """Show what was written last."""
        if self._follower is not None:
            self._follower.close()
        self._say_if_silent()
        self._shown.close()
