"""The state of a run's training: a fold over its events, as far as they are known. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from elastic_trainer.plan.command import UNKNOWN_STEPS
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import Kind
from launcher.record.event import counts, describe, node_names, number, parked_text
from launcher.record.failures import EXCLUSIONS, ExcludedMachine, excluded_machines
from launcher.record.timeline import STEPS, StepDone, step_done

_RATE_STEPS: Final = 20
"""tokens/s is taken over this many steps."""
_OF_SUBMIT: Final = ("code", "environment", "operator")
"""Events of these families come before the first attempt, or between two: of a run that waits."""
_SHOWS_LIFE: Final = ("run.started", "epoch.formed", "step.completed", "agent.started")
"""An attempt has not ended, or another one has begun."""
_NOBODY: Final = "?"
"""The member of an agent's `member.lost` that has never known a coordinator."""
_NOT_LOST: Final = (
    *("agent.started", "coordinator.elected"),
    *("member.joined", "member.evicted", "member.left"),
)
"""A node is back, or was excluded or let go on purpose."""


class TrainingStatus:
    """The newest state of a run, from its events in order of time: the whole record, or its end."""

    def __init__(self, config: TrainConfig, events: Iterable[Event] = ()) -> None:
        self.config = config
        self.name, self.total_steps = config.run_id, steps_asked(config)
        self.num_nodes = config.ladder.max_nodes
        """Nodes of this attempt."""
        self.up: list[str] = []
        """Nodes whose agents run, as the backend sees them."""
        self.recent: deque[str] = deque(maxlen=6)
        """The newest lines that `apply` returned."""
        self.step = config.start_from.step if config.start_from else 0
        self.training: tuple[str, int] | None = None
        """A script's training that the newest step is of, and its count of steps."""
        self.loss: float | None = None
        self.epoch = 0
        self.layout = ""
        self.members: Sequence[str] = ()
        self.spares: Sequence[str] = ()
        self.coordinator = ""
        self.slow: dict[str, str] = {}
        """Node with a slow rank in this epoch -> the part of a step that it is slow in."""
        self.parts: Event | None = None
        """The newest `step.parts` of this epoch."""
        self.restarts = 0
        self.validation: tuple[int, float] | None = None
        """Step and loss of the newest validation; None: there was none."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint; None: nothing was saved."""
        self.last_unix: float | None = None
        """When the newest event was written; None: there is no event."""
        self.code: int | None = None
        """How the newest attempt ended; None: it has not, or nobody could say so."""
        self.reason = ""
        """Why it ended."""
        self._exit_reason = ""
        self._origin: float | None = None
        self._said = ""
        self._begin_attempt()
        self.apply(events)

    def _begin_attempt(self) -> None:
        self.state = "starting"
        self.parked: tuple[int, int] | None = None
        """(have, need) while too few nodes are left."""
        self.joined: tuple[int, int] | None = None
        """(have, need) while too few nodes have come for an attempt's first epoch."""
        self.steps: list[StepDone] = []
        """Steps of the newest epoch, each as it was first reported."""
        self.pause_unix: float | None = None
        """When a save or an evaluation began, after the newest step; None: neither has."""
        self.delay_s = 0.0
        """How long the next epoch is held back on purpose."""
        self.hosts: dict[str, str] = {}
        """Node -> its machine."""
        self.dropped: list[Event] = []
        """`rung.dropped`: numbers of nodes that were tried in vain."""
        self.lost: dict[str, Event] = {}
        """Node that was lost and has not come back -> the event that told it last."""
        self.good_save: Event | None = None
        """The newest save of the attempt that succeeded."""
        self.failed_saves: list[Event] = []
        """The saves since then, which failed."""
        self.first_failure: Event | None = None
        """The first worker's end of the last epoch that was not a consequence of another's."""
        self.first_failure_host: str | None = None
        """The machine on which that was; None: not known."""
        self._exclusions: list[Event] = []
        self._seen: set[str] = set()

    @property
    def step_text(self) -> str:
        """`step 7/100`, or `step 7` where the last one is not known.

        Of a script's second training `step 17 (training 2: step 7)`.
        """
        text = f"step {self.step}" + (f"/{self.total_steps}" if self.total_steps else "")
        if self.training in (None, ("1", self.step)):
            return text
        name, step = self.training
        return f"{text} (training {name}: step {step})"

    @property
    def state_text(self) -> str:
        """Its state; of a parked run, what it waits for."""
        return self.state if self.parked is None else parked_text(*self.parked)

    @property
    def rate_texts(self) -> list[str]:
        """`loss 2.1034`, `validation 2.2012 (step 500)` and `5,120 tokens/s`, where known."""
        loss = [] if self.loss is None else [f"loss {self.loss:.4f}"]
        if self.validation is not None:
            loss.append(f"validation {self.validation[1]:.4f} (step {self.validation[0]})")
        rate, predicted = self.tokens_per_s, self.predicted_tokens_per_s
        if rate is None:
            return loss
        said = "" if predicted is None else f" ({predicted:,.0f} predicted)"
        return [*loss, f"{rate:,.0f} tokens/s{said}"]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second over the last steps of this epoch; None before the second one."""
        last = [done for done in self.steps[-_RATE_STEPS:] if done.tokens]
        tokens = sum(done.tokens for done in last[1:])
        seconds = last[-1].t - last[0].t if last else 0.0
        return tokens / seconds if tokens and seconds > 0 else None

    @property
    def predicted_tokens_per_s(self) -> float | None:
        """What was planned for this epoch's layout; None: nothing, as of a script."""
        return predicted_rate(self.config, self.layout)

    @property
    def excluded(self) -> list[ExcludedMachine]:
        """Machines that the newest attempt has excluded."""
        return excluded_machines(self._exclusions)

    @property
    def nothing_saved(self) -> bool:
        """Whether the record shows that nothing is saved, not even by a script on its own."""
        return bool(self._seen) and self.saved_step is None and saved_nothing(self._seen)

    def apply(self, events: Iterable[Event]) -> list[str]:
        """Take in new events; return the lines worth showing."""
        lines = []
        for event in events:
            if event.event.partition(".")[0] in _OF_SUBMIT:
                continue
            self.last_unix = event.t_unix
            self._origin = event.t_unix if self._origin is None else self._origin
            self._take(event)
            coming = event.event == "membership.parked" and self.parked is None
            text = None if coming else describe(event)
            if text is not None and text != self._said:
                self._said = text
                line = f"{event.t_unix - self._origin:7.1f} s  {text}"
                lines.append(line)
                self.recent.append(line)
        return lines

    def _take(self, event: Event) -> None:  # noqa: C901, PLR0912  one flat table of cases
        if event.event == "run.started":
            self._begin_attempt()
        if event.event in _SHOWS_LIFE:
            self.code, self.reason, self._exit_reason = None, "", ""
        self._seen.add(event.event)
        if event.event in STEPS:
            self._take_step(event)
            return
        self._take_nodes(event)
        match event.event:
            case "epoch.formed":
                self._take_epoch(event)
            case "trainer.started":
                self._take_training(event)
                if self.layout in ("", "?"):
                    self.layout = str(event.fields.get("layout", "?"))
            case "epoch.aborted" if (event.epoch or 0) >= self.epoch:
                self.state = "recovering"
            case "rung.dropped":
                self.dropped.append(event)
            case "worker.slow" if (event.epoch or 0) >= self.epoch:
                member = str(event.fields.get("member") or event.node)
                self.slow[member] = str(event.fields.get("section") or "?")
            case "step.parts" if (event.epoch or 0) >= self.epoch:
                self.parts = event
            case "epoch.delayed":
                self.delay_s = number(event, "seconds") or 0.0
            case "coordinator.elected":
                self.coordinator = event.node or self.coordinator
            case "membership.parked" if self.state == "starting":  # agents are still importing
                self.joined = counts(event)
            case "membership.parked":
                self.parked, self.state = counts(event), "parked"
            case "checkpoint.started" | "evaluation.started":
                self.pause_unix = event.t_unix
            case "evaluation.ended":
                self.pause_unix = None
            case "validation.completed":
                self.pause_unix = None
                if event.step is not None and (loss := number(event, "loss")) is not None:
                    self.validation = (event.step, loss)
            case "checkpoint.committed":
                self.saved_step, self.good_save, self.failed_saves = event.step, event, []
            case "checkpoint.failed":
                self.failed_saves.append(event)
            case "worker.exit":
                self._take_exit(event)
            case "trainer.stopping":
                self.state = "saving"
            case "agent.exit" | "trainer.finished" | "job.stopped" | "run.ended":
                self._take_end(event)

    def _take_end(self, event: Event) -> None:
        """Learn how the attempt ends.

        Where no agent stopped the job as a whole `agent.exit` alone tells it; a local run's
        `run.ended` has no reason.
        """
        code, reason = event.fields.get("code"), event.fields.get("reason")
        if event.event == "agent.exit":
            self._exit_reason = str(reason or self._exit_reason)
            return
        if event.event != "run.ended":
            self.state = "ending"
        if event.event == "trainer.finished":
            self.code, self.reason = 0, ""
        elif isinstance(code, int):
            self.code, self.reason = code, str(reason or self.reason or self._exit_reason)

    def _take_nodes(self, event: Event) -> None:
        fields = event.fields
        of_writer = event.event in ("agent.started", "coordinator.elected")
        member = event.node if of_writer else fields.get("member")
        if isinstance(member, str) and isinstance(fields.get("host"), str):
            self.hosts[member] = fields["host"]
        if event.event == "member.lost" and member != _NOBODY:
            self.lost[str(member)] = event
        elif event.event == "epoch.formed":
            members, spares = node_names(fields.get("members")), node_names(fields.get("spares"))
            away = [name for name in self.lost if name not in members and name not in spares]
            self.lost = {name: self.lost[name] for name in away}
        elif event.event in _NOT_LOST:
            self.lost.pop(str(member), None)
        if event.event in EXCLUSIONS:
            self._exclusions.append(event)

    def _take_epoch(self, event: Event) -> None:
        # A new attempt's first epoch does not count as a restart.
        self.restarts += self.state != "starting"
        self.epoch = event.epoch or 0
        self.layout = str(event.fields.get("layout", "?"))
        self.members = node_names(event.fields.get("members"))
        self.spares = node_names(event.fields.get("spares"))
        self.coordinator = str(event.fields.get("coordinator") or event.node or "")
        self.parked, self.joined, self.state, self.steps = None, None, "forming", []
        self.slow, self.parts = {}, None

    def _take_step(self, event: Event) -> None:
        # Every rank may report a step; the first report of a newer one counts.
        newer = event.step is not None and (event.step > self.step or self.state != "training")
        if event.step is None or (event.epoch or 0) < self.epoch or not newer:
            return
        done = step_done(event, event.step)
        self.step, self.state = done.step, "training"
        self._take_training(event)
        self.loss = self.loss if done.loss is None else done.loss
        if not self.steps or done.step > self.steps[-1].step:
            self.steps.append(done)
            self.pause_unix = None

    def _take_training(self, event: Event) -> None:
        name, step = event.fields.get("training"), event.fields.get("training_step")
        if isinstance(name, str) and isinstance(step, int):
            self.training = name, step

    def _take_exit(self, event: Event) -> None:
        before = self.first_failure
        newer = before is None or (event.epoch or 0) > (before.epoch or 0)
        if newer and event.fields.get("kind") not in (None, "", Kind.COLLATERAL):
            self.first_failure = event
            self.first_failure_host = self.hosts.get(event.node or "")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        have_need = None
        if self.parked is not None:
            have_need = {"have": self.parked[0], "need": self.parked[1]}
        return {
            "state": self.state if self.last_unix is not None else None,
            "epoch": self.epoch,
            "step": self.step,
            "steps_asked": self.total_steps,
            "training": self.training and self.training[0],
            "training_step": self.training and self.training[1],
            "loss": self.loss,
            "validation_step": self.validation and self.validation[0],
            "validation_loss": self.validation and self.validation[1],
            "tokens_per_s": self.tokens_per_s,
            "predicted_tokens_per_s": self.predicted_tokens_per_s,
            "layout": self.layout or None,
            "nodes": list(self.members),
            "spares": list(self.spares),
            "parked": have_need,
            "excluded": [each.to_json() for each in self.excluded],
            "saved_step": self.saved_step,
            "code": self.code,
            "reason": self.reason or None,
            "last_event_unix": self.last_unix,
        }


def predicted_rate(config: TrainConfig, layout: str) -> float | None:
    """Return the tokens/s that were planned for a layout, by its text; None: nothing was."""
    rung = rung_of(config, layout)
    return None if rung is None else rung.tokens_per_s


def rung_of(config: TrainConfig, layout: str) -> Rung | None:
    """Return the rung with a layout, by its text; None: there is none."""
    return next((each for each in config.ladder.rungs if str(each.layout) == layout), None)


def steps_asked(config: TrainConfig) -> int | None:
    """Return the number of steps asked for; None where only a script knows."""
    return None if config.train.steps == UNKNOWN_STEPS else config.train.steps


def saved_nothing(seen: Collection[str]) -> bool:
    """Return whether a run with these events has no checkpoint of any kind.

    A script may have saved without a word in the record.
    """
    ours = "trainer.started" in seen or "epoch.formed" not in seen
    return ours and "checkpoint.committed" not in seen
