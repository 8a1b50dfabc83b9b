"""The agent's eyes on its workers: readings of heartbeats and processes for the hang watch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elastic_trainer.agent.hangs.hang import HangWatch, WorkerProgress
from elastic_trainer.agent.hangs.stacks import gather_fronts, held_s, state_of
from elastic_trainer.agent.membership.notices import RankPace, WorkersPaced, WorkersSeen, WorkerView
from elastic_trainer.agent.membership.stragglers import OWN_PARTS
from elastic_trainer.agent.settings import AgentConfig
from elastic_trainer.agent.workers.workers import Workers
from elastic_trainer.record.flight_recorder import Front
from elastic_trainer.worker.heartbeat import Pace, Section, StepPart

LEARN_S = 1.0
"""Between two looks at the histograms."""
AGAIN_S = 0.5
"""Between two reports of the same standstill."""
SUSPECT_S = 0.5
"""Without progress for so long, a worker's process is looked at."""
LATE_S = 0.15
"""Later than that after its tick, the agent itself was held up: nothing was to be seen then."""

AGREE_S = 0.2
"""Apart at least are two looks at a worker's collectives that must show the same. One alone may
catch it between two, while its device still works."""

_NONE = 0, Pace((), ())


def _each(new: Sequence[float], old: Sequence[float], steps: int) -> tuple[float, ...]:
    return tuple((after - before) / steps for after, before in zip(new, old, strict=True))


class HangMonitor:
    """Looks at the workers of one epoch; make a new one for the next."""

    def __init__(self, config: AgentConfig, workers: Workers, clock: Callable[[], float]) -> None:
        self._config, self._workers, self._clock = config, workers, clock
        self._watch = HangWatch(
            hang_ceiling_s=config.hang_ceiling_s,
            start_ceiling_s=config.start_ceiling_s,
            device=config.device,
            only_beating=not config.watch_all,
        )
        self._looked = clock()
        self._paused_s = 0.0
        self._learned = self._reported = float("-inf")
        self._progress: list[WorkerProgress] = []
        self._hangs = False
        self._hung: dict[int, int] = {}
        self._fronts: dict[int, tuple[float, Mapping[str, Front]]] = {}
        """Rank -> how far it is in its collectives, and since when it is seen to be."""
        self._paced = clock()
        self._paces: dict[int, tuple[int, Pace]] = {}
        """Local rank -> step and pace at the last report."""
        self._inside: dict[int, tuple[float, ...]] = {}
        """Local rank -> what collectives took in the steps that were timed last."""

    def look(self) -> list[WorkerProgress]:
        """Read the heartbeats and return the progress of each worker."""
        now = self._clock()
        late_s = now - self._looked - self._config.tick_s
        self._looked = now
        if late_s > LATE_S:
            self._paused_s += late_s
        own_now = now - self._paused_s
        pids = {local: found.pid for local, found in self._workers.processes().items()}
        before = {progress.local_rank: progress.idle_s for progress in self._progress}
        self._progress = self._watch.observe(
            own_now,
            self._workers.beats(),
            held={local: held_s(pid) for local, pid in pids.items()},
            states={
                local: state_of(pid)
                for local, pid in pids.items()
                if before.get(local, 0.0) > SUSPECT_S
            },
        )
        if now - self._learned >= LEARN_S:
            self._learned = now
            self._watch.learn(own_now, self._workers.paces())
        return self._progress

    def longest_idle_s(self) -> float | None:
        """Return how long the worker that is still for longest is; None: none has begun."""
        return max((progress.idle_s for progress in self._progress), default=None)

    def stalled(self) -> bool:
        """Whether a worker hangs or nearly does, or waits for one; true once in a while only."""
        hangs = any(progress.hangs for progress in self._progress)
        newly, self._hangs = hangs and not self._hangs, hangs
        if not any(progress.nearly for progress in self._progress):
            return False
        now = self._clock()
        if now - self._reported < AGAIN_S and not newly:
            return False
        self._reported = now
        return True

    def paced(self, epoch: int) -> WorkersPaced | None:
        """Return how fast the workers were lately; None most of the time."""
        now = self._clock()
        if now - self._paced < self._config.pace_s:
            return None
        self._paced = now
        beats = {s.local_rank: s.beat for s in self._progress if s.beat.section is Section.STEP}
        before = self._paces
        self._paces = {
            local: (beats[local].step, pace)
            for local, pace in self._workers.paces().items()
            if local in beats
        }
        ranks = []
        for local, target in self._workers.processes().items():
            step, new = self._paces.get(local, _NONE)
            old_step, old = before.get(local, _NONE)
            if timed := new.sampled - old.sampled:
                self._inside[local] = _each(new.inside_s, old.inside_s, timed)
            if old.totals_s and new.totals_s and step > old_step:
                spent = _each(new.totals_s, old.totals_s, step - old_step)
                ranks.append(
                    RankPace(
                        rank=target.rank,
                        lane=beats[local].lane,
                        own_s=tuple(spent[part] for part in OWN_PARTS),
                        waits_s=(spent[StepPart.GATHER], spent[StepPart.PIPELINE]),
                        inside_s=self._inside.get(local, ()),
                    )
                )
        return WorkersPaced(epoch=epoch, ranks=tuple(ranks)) if ranks else None

    def _settled(self, found: Mapping[int, Mapping[str, Front]]) -> dict[int, Mapping[str, Front]]:
        """Return the fronts that an earlier look has seen as well."""
        now = self._looked = self._clock()  # so that gathering them is no delay of the agent
        before, self._fronts = self._fronts, {}
        for rank, fronts in found.items():
            since, seen = before.get(rank, (now, fronts))
            self._fronts[rank] = (since if seen == fronts else now), fronts
        return {r: fronts for r, (since, fronts) in self._fronts.items() if now - since >= AGREE_S}

    def newly_hung(self) -> list[WorkerProgress]:
        """Return the workers that hang, or wait for one that does, once for each standstill."""
        now_hung = {s.local_rank: s for s in self._progress if s.hangs}
        new = [s for local, s in now_hung.items() if self._hung.get(local) != s.beat.counter]
        self._hung = {local: s.beat.counter for local, s in now_hung.items()}
        return new

    def overdue(self) -> WorkerProgress | None:
        """Return the worker that no coordinator has acted upon though it is past its ceiling."""
        patience_s = self._config.unattributed_s
        over = [each for each in self._progress if each.idle_s > each.ceiling_s + patience_s]
        return max(over, key=lambda each: each.idle_s, default=None)

    def seen(self, epoch: int, *, stalled: bool, committed: int | None) -> WorkersSeen:
        """Return the report of what `look` saw last; waits FRONTS_S at most for the workers.

        The processes' states are read now, of all: one that used the processor of late stands
        still for less than the others, and is the one that is busy. How far each is in its
        collectives they say themselves, and that counts once it has not changed for AGREE_S.
        """
        processes = self._workers.processes()
        fronts = self._settled(gather_fronts(list(processes.values())))
        return WorkersSeen(
            epoch=epoch,
            stalled=stalled,
            committed=committed,
            workers=tuple(
                WorkerView(
                    rank=processes[progress.local_rank].rank,
                    local_rank=progress.local_rank,
                    step=progress.beat.step,
                    section=progress.beat.section.name.lower(),
                    part=progress.beat.part.name.lower(),
                    place=progress.beat.place,
                    lane=progress.beat.lane,
                    idle_s=progress.idle_s,
                    limit_s=progress.limit_s,
                    state=progress.state or state_of(processes[progress.local_rank].pid),
                    fronts=fronts.get(processes[progress.local_rank].rank, {}),
                )
                for progress in self._progress
                if progress.local_rank in processes
            ),
        )
