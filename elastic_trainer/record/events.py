"""The record of a run: what an event is, and the closed list of names.

Pure: encoding and decoding only. `event_log.py` writes; the launcher reads.
docs/events.md documents every name and is checked against this list.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

from elastic_trainer.storage.typed import Unix, build, parse_json

EVENT_VERSION: Final = 1
_KNOWN: Final = ("event", "t_unix", "t_mono", "node", "rank", "epoch", "step")

EVENTS: Final[dict[str, str]] = {
    # agents: membership
    "agent.started": "An agent came up. pid, host, address, port, gpus",
    "agent.exit": "An agent ended by itself, or coordinated to the end. code, reason",
    "coordinator.elected": "This agent took the coordinator's lease. term, previous, host, address",
    "epoch.formed": "An epoch was published. members, spares, rung, layout, coordinator, reason",
    "epoch.aborted": "The coordinator ended an epoch. reason, victims, kind",
    "epoch.delayed": "What all nodes share fails again: the next epoch waits. seconds, reason",
    "epoch.preparing": "The next epoch is prepared while one runs. members, rung, layout, reason",
    "epoch.prepared": "Its workers wait: those of the epoch that runs are asked to leave. reason",
    "epoch.unprepared": "What was prepared is dropped; the epoch that runs goes on. reason",
    "member.joined": "A node asked to join. member, host, address",
    "member.lost": "A node is gone. member, host, reason, detected_s",
    "member.leaving": "A node was asked to go; the others continue. member, host, reason",
    "member.left": "A node that was asked to go has been let go. member, host, reason",
    "member.evicted": "A machine was excluded from the job. member, host, reason, kind",
    "peer.refused": (
        "A connection did not prove that it knows the run's secret, or its bytes were changed; one "
        "event in 10 s at most. "
        "address, reason, held_back"
    ),
    "board.failed": (
        "The board could not be read or written; it is tried again, one event in 10 s at most. "
        "reason, held_back"
    ),
    "storage.stalled": (
        "The run directory's storage stood still; training continued. seconds, held_back"
    ),
    "board.damaged": "A swap of the board was lost to damage, or all of it was removed. reason",
    "member.quarantined": (
        "A machine that was lost again takes no part for a while. member, host, seconds, losses"
    ),
    "member.refused": "A node may not take part. member, host, reason",
    "member.differs": "A node has otherwise what may differ. member, host, reason",
    "member.waiting": "A pod waits for the end of the one whose name it has. member, host, reason",
    "member.readmitted": "The operator readmitted an excluded machine. member, host, reason",
    "store.failed": "An epoch's store could not be hosted; it is tried again. reason",
    "membership.parked": "Too few nodes for the smallest layout: waiting. have, need",
    "rung.dropped": (
        "The script fails before its first step on so many nodes, and trained on others: they are "
        "not tried again. nodes, reason"
    ),
    "job.stopped": "The job ended as a whole. code, reason",
    # agents: workers
    "workers.started": (
        "A node's workers of an epoch were forked or started, in order of their ranks. "
        "first_rank, pids, how, why"
    ),
    "standby.ready": "It waits for the next epoch. pid, local_rank, seconds, private_mib",
    "worker.exit": (
        "A worker failed, and not for another's end. "
        "pid, local_rank, code, signal, kind, action, detail"
    ),
    "save.asked": "This node was asked for a checkpoint now; the step its workers are at",
    "worker.signalled": "A script was asked to leave. pid, local_rank, request, signal, grace_s",
    "worker.stalled": "It hangs or waits. local_rank, section, part, idle_s, limit_s, state",
    "worker.hung": "All wait for it. member, worker_rank, section, part, idle_s, state, detail",
    "stacks.dumped": "What hung workers were doing was kept. folder, files, seconds, problem",
    "worker.slow": "Slower than its peers. member, host, worker_rank, section, ratio, own_s, swap",
    "step.parts": (
        "What parts of a step take: seconds, medians of the ranks of each stage; once a minute. "
        "stages, apart"
    ),
    "worker.unreapable": "A killed worker has not ended; if stuck the node leaves. pid, stuck",
    "script.progress": (
        "The newest step that a script has shown; at most one a second. "
        "first, by, origin, from_scratch"
    ),
    "script.restarted": (
        "With which step a script began again; steps from `first` to `newest` are redone. "
        "first, newest, redone, from_scratch, by, stops, reason"
    ),
    "script.silent": "A script ended with 0 and has shown no step since it started. newest",
    "recovery.phase": "One phase of a start or recovery ended. phase, seconds, member",
    # workers
    "trainer.started": (
        "A trainer is ready to step. layout, resume_step, restored_from, training, training_step"
    ),
    "data.encoded": "This worker has encoded a part of the corpus. part, parts",
    "data.source": (
        "What the run draws of one corpus of a mix, by its end, in windows; more than it has: they "
        "are repeated. source, samples, windows"
    ),
    "step.completed": (
        "A step is done. loss, grad_norm, tokens, step_s, lr, loss_tokens, training, training_step"
    ),
    "step.committed": "This step will not be redone. source",
    "step.skipped": "A step's batch was used up without an update. reason, loss, grad_norm",
    "numbers.anomaly": "A step's numbers are wrong. kind, action, reason, loss, grad_norm",
    "numbers.rollback": "The group goes back. back_to, skipped, reason",
    "replica.checked": "Replicas of the same shards were compared and are equal. seconds",
    "replica.mismatch": "Replicas differ. ranks, group, tensor, named, back_to",
    "checkpoint.started": "Staging began",
    "checkpoint.committed": (
        "A checkpoint is on the board; save_s includes stage_s. "
        "dir, manifest_sha256, stage_s, save_s"
    ),
    "checkpoint.failed": "A save failed; training continues. reason",
    "checkpoint.skipped": "A checkpoint was not valid and was passed over. dir, reason",
    "checkpoint.restored": "State was loaded. dir, seconds",
    "evaluation.started": "An evaluation began: no step is expected until it ends",
    "evaluation.ended": "That of a script ended",
    "validation.completed": (
        "The loss on the validation data; of one step the last counts. loss, tokens, seconds"
    ),
    "snapshot.restored": "State was loaded from memory. written_in_epoch, seconds",
    "snapshot.served": "A node that left served snapshots to the others. seconds, freed",
    "snapshot.unusable": "A newer snapshot is not whole and was passed over. reason",
    "state.lost": (
        "Memory lacked part of the newest state: older state is used, steps up to `newest` are "
        "redone. newest, back_to, source"
    ),
    "snapshot.exposed": (
        "All nodes share a machine: copies are there too, and lost with it. machine, nodes"
    ),
    "snapshot.failed": "A snapshot was given up; training continues. reason, gave_up",
    "snapshot.skipped": "The snapshot before is still being copied. pending, times",
    "trainer.stopping": "The group agreed to stop at this step. why",
    "trainer.finished": "The last step is done. loss",
    "training.finished": "A script has ended one of its trainings. training, training_step",
    "training.skipped": (
        "A restarted script passes one that it had finished. training, training_step"
    ),
    # whoever injects faults
    "fault.injected": "A fault was injected on purpose. action, target",
    "code.frozen": (
        "The working directory was copied into the run. digest, revision, dirty, files, bytes, "
        "source"
    ),
    "code.upgraded": (
        "Later starts run other code. was, digest, revision, dirty, files, bytes, source"
    ),
    "environment.recorded": (
        "What the workers run in. digest, python, distributions, image, image_digest"
    ),
    "environment.changed": "It is not what was recorded. was, digest, changes, more",
    "operator.acted": "Somebody had it submitted, cancelled or restarted. action, by, job, saves",
    "run.started": "The launcher started agents. attempt, nodes",
    "step.lost": (
        "A step of Slurm's ended without its agents' word, as when its node reboots; they are "
        "started again there; `alone` where no other agent is left. nodes, code, alone"
    ),
    "run.ended": "All agents are gone, or none can start. code, reason",
}
"""Event name -> what it says and which extra fields it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the record. `epoch`, `step` and `rank` are None where they do not apply."""

    event: str
    t_unix: Unix
    t_mono: float
    """Monotonic seconds of the writer's machine; comparable within one node only."""
    node: str | None = None
    rank: int | None = None
    epoch: int | None = None
    step: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def encode(self, *, brief: bool = False) -> str:
        """Return the JSON line, newline included; `brief`: without what is None.

        What `parse_json` refuses becomes text: NaN and infinities `nan`, `inf` and `-inf`, half a
        surrogate pair, as in a path that is not UTF-8, a question mark.
        """
        assert self.event in EVENTS, f"{self.event} is not in EVENTS"
        raw = {
            "v": EVENT_VERSION,
            "t_unix": round(self.t_unix, 6),
            "t_mono": round(self.t_mono, 6),
            "epoch": self.epoch,
            "step": self.step,
            "node": self.node,
            "rank": self.rank,
            "event": self.event,
            **self.fields,
        }
        if brief:
            raw = {key: value for key, value in raw.items() if value is not None}
        dumps = functools.partial(json.dumps, separators=(",", ":"), allow_nan=False)
        try:
            text = dumps(raw)
        except ValueError:
            text = dumps(raw := _readable(raw))
        if "\\ud" in text:
            text = dumps(_readable(raw))
        return text + "\n"

    @classmethod
    def decode(cls, line: str) -> Event | None:
        """Read one line; None for one that no writer of ours has made or finished."""
        try:
            raw = parse_json(line)
            if not isinstance(raw, dict):
                return None
            raw.pop("v", None)
            known = {key: raw.pop(key, None) for key in _KNOWN}
            return build(cls, {**known, "fields": raw})
        except ValueError:
            return None


def _readable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_readable(key): _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    return value
