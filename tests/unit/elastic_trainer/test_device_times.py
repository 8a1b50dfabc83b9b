"""Slow devices below hosts that are all alike, with events of a device that is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.agent.membership.notices import RankPace
from elastic_trainer.agent.membership.stragglers import OWN_PARTS, TIMES, Stragglers
from elastic_trainer.train.marks import TIMED, DeviceTimes
from elastic_trainer.worker.heartbeat import Heartbeat, Section, StepPart


class Device:
    """Works off what the host has enqueued, at its own pace."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.now_s, self.done_s, self.made = factor, 0.0, 0.0, 0

    def compute(self, seconds: float) -> None:
        self.now_s += seconds * self.factor

    def finish(self) -> None:
        self.done_s = self.now_s

    def new_event(self) -> DeviceEvent:
        self.made += 1
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, 0.0

    def record(self) -> None:
        self.at_s = self.device.now_s

    def query(self) -> bool:
        return self.device.done_s >= self.at_s

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        assert self.query()
        assert end_event.query(), "torch raises for an event that has not been reached"
        return 1e3 * (end_event.at_s - self.at_s)


def step(times: DeviceTimes, device: Device) -> None:
    """Enqueue a step of two blocks: the host takes no time."""
    times.begin_step()
    for _ in range(2):
        times.mark(StepPart.FORWARD)
        device.compute(0.1)
        times.mark(StepPart.GATHER)
        device.now_s += 0.5  # waits for the slowest
    for _ in range(2):
        times.mark(StepPart.BACKWARD)
        device.compute(0.2)
        times.mark(StepPart.GATHER)
        device.now_s += 0.5
    times.mark(StepPart.SUMS)
    times.end_step()


@pytest.fixture
def heartbeat(tmp_path: Path) -> Heartbeat:
    found = Heartbeat(tmp_path / "beat", create=True)
    found.beat(step=1, section=Section.STEP)
    return found


def test_times_are_those_of_the_device_a_step_late(heartbeat: Heartbeat) -> None:
    device = Device()
    times = DeviceTimes(heartbeat, device.new_event)
    times.mark(StepPart.FORWARD)  # a validation
    device.compute(7.0)
    step(times, device)
    device.finish()
    assert [heartbeat.pace().totals_s[part] for part in TIMED] == [0.0] * 4
    for _ in range(9):
        step(times, device)
        device.finish()
    totals = heartbeat.pace().totals_s
    assert (totals[StepPart.FORWARD], totals[StepPart.BACKWARD]) == pytest.approx(
        (9 * 0.2, 9 * 0.4)
    )
    assert totals[StepPart.GATHER] == pytest.approx(9 * 4 * 0.5)
    assert totals[StepPart.SUMS] < 1.0  # the host's
    assert device.made <= 3 * 9 + 1  # they are used again


def test_a_device_that_is_not_done_is_not_waited_for(heartbeat: Heartbeat) -> None:
    device = Device()
    times = DeviceTimes(heartbeat, device.new_event)
    for _ in range(5):
        step(times, device)
    assert heartbeat.pace().totals_s[StepPart.FORWARD] == 0.0
    device.finish()
    step(times, device)
    assert heartbeat.pace().totals_s[StepPart.FORWARD] == pytest.approx(0.2)


def test_without_events_the_hosts_times_count(heartbeat: Heartbeat) -> None:
    heartbeat.mark(StepPart.FORWARD)
    heartbeat.mark(StepPart.GATHER)
    assert heartbeat.pace().totals_s[StepPart.FORWARD] > 0.0


@pytest.mark.parametrize("slow", [None, 0, 3])
def test_a_slow_device_is_found_where_hosts_are_alike(tmp_path: Path, slow: int | None) -> None:
    ranks = []
    for rank in range(4):
        beat = Heartbeat(tmp_path / str(rank), create=True)
        beat.beat(step=1, section=Section.STEP)
        device = Device(2.0 if rank == slow else 1.0)
        ranks.append((beat, device, DeviceTimes(beat, device.new_event)))
    watch, found = Stragglers(), []
    before = [beat.pace().totals_s for beat, _, _ in ranks]
    for _ in range(TIMES + 2):
        for _, device, times in ranks:
            for _ in range(3):
                step(times, device)
                device.finish()
        after = [beat.pace().totals_s for beat, _, _ in ranks]
        for rank, (new, old) in enumerate(zip(after, before, strict=True)):
            own = tuple((new[part] - old[part]) / 3 for part in OWN_PARTS)
            found += watch.take(f"node{rank}", [RankPace(rank=rank, lane=0, own_s=own)])
        before = after
    assert [one.rank for one in found] == ([] if slow is None else [slow])
    assert not found or found[0].section == "backward"
