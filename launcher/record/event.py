"""What one event says: its fields, and a line for people. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

from elastic_trainer.plan.layout import layout_label
from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.events import Event
from elastic_trainer.record.hostlist import HostList

_MAX_LINE: Final = 150
"""Characters of one line; errors of libraries can be long, the logs have all of them."""
_MOST_NAMES: Final = 16
"""Nodes named in a line."""
_MAX_NUMBER: Final = 1e300
"""Larger values were not measured: infinite, or too long for a float."""


def node_names(raw: Any) -> Sequence[str]:
    """Return node names from an event's member list: names, mappings with `node`, or ranges."""
    if isinstance(raw, str):
        try:
            return HostList(raw)
        except ValueError:
            return ()
    if not isinstance(raw, list | tuple):
        return ()
    return tuple(str(item.get("node")) if isinstance(item, dict) else str(item) for item in raw)


def worker_rank(event: Event) -> int | None:
    """Return the global rank of the worker that an event is about."""
    rank = event.fields.get("worker_rank", event.rank)
    return rank if isinstance(rank, int) else None


def number(event: Event, field: str) -> float | None:
    """Return a field of `event` as a float; None: it is not there, or no finite number."""
    value = event.fields.get(field)
    return float(value) if isinstance(value, int | float) and abs(value) < _MAX_NUMBER else None


def whole(event: Event, field: str) -> int:
    """Return a field of `event` as a whole number; 0: it is not there, or no number."""
    return int(number(event, field) or 0)


def counts(event: Event) -> tuple[int, int]:
    """Return (have, need) of a `membership.parked`, in nodes."""
    return whole(event, "have"), whole(event, "need")


def named(node: Any, host: Any) -> str:
    """Return a node and its machine for people: one name where both are called alike."""
    return str(node) if host in (None, "", node) else f"{node} ({host})"


def parked_text(have: int, need: int) -> str:
    """Return what a run waits for that has too few nodes."""
    return f"parked: {counted(have, 'node')} left, the smallest layout needs {need:,}"


def describe(event: Event) -> str | None:
    """Return one line for people about `event`; None for routine ones."""
    tell = _TELL.get(event.event)
    if tell is None or (text := tell(event)) is None:
        return None
    flat = " ".join(text.split())
    return flat if len(flat) <= _MAX_LINE else flat[: _MAX_LINE - 1] + "…"


def _epoch_formed(event: Event) -> str:
    fields = event.fields
    layout = layout_label(str(fields.get("layout", "?")))
    text = f"epoch {event.epoch}: {layout} on {_some(node_names(fields.get('members')))}"
    if spares := node_names(fields.get("spares")):
        text += f", spare: {_some(spares)}"
    return f"{text} ({fields['reason']})" if fields.get("reason") else text


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return " ".join(names[:_MOST_NAMES]) + more


def _worker_exit(event: Event) -> str | None:
    kind = event.fields.get("kind")
    if kind in (None, "", "collateral"):
        return None
    detail = event.fields.get("detail")
    return f"rank {worker_rank(event)} on {event.node} failed: {kind}: {detail}"


_Tell = Callable[[Event], str | None]


def _fill(form: str, *, every_rank: bool = True) -> _Tell:
    """Return a teller that fills `form` with the event's fields; missing ones show as `?`."""

    def tell(event: Event) -> str | None:
        if event.rank and not every_rank:
            return None
        fields = event.fields
        who = named(fields.get("member", "?"), fields.get("host"))
        known = {"node": event.node, "step": event.step, "epoch": event.epoch, "who": who, **fields}
        return form.format_map(defaultdict(lambda: "?", known))

    return tell


def _run_started(event: Event) -> str:
    nodes = counted(whole(event, "nodes"), "node")
    return f"attempt {event.fields.get('attempt', '?')}: {nodes} started"


def _validated(event: Event) -> str:
    loss = number(event, "loss")
    shown = "not a number" if loss is None else f"{loss:.4f}"
    return f"validation loss after step {event.step}: {shown}"


def _restarted(event: Event) -> str:
    fields = event.fields
    first, newest = fields.get("first", "?"), fields.get("newest", "?")
    if fields.get("redone") is None:
        return f"steps continue after {newest}: nothing tells with which the script began again"
    what = f"{counted(whole(event, 'redone'), 'step')} redone"
    if whole(event, "from_scratch"):
        return f"warning: the script began from scratch, at step {first} after {newest}: {what}"
    return f"the script began again at step {first} after {newest}: {what}"


def _source(event: Event) -> str:
    samples, windows = whole(event, "samples"), whole(event, "windows")
    passes = f"{samples / windows:.3g} times over" if windows else "of unknown length"
    repeated = ": repeated" if samples > windows else ""
    drawn = f"{counted(samples, 'sample')} of its {counted(windows, 'window')}"
    return f"{event.fields.get('source', '?')}: {drawn}, {passes}{repeated}"


def _silent(event: Event) -> str:
    newest = event.fields.get("newest")
    before = "" if newest is None else f"; before this start it had shown step {newest}"
    return f"the script ended with 0 and showed no step{before}"


_TELL: dict[str, _Tell] = {
    "run.started": _run_started,
    "epoch.formed": _epoch_formed,
    "epoch.aborted": _fill("epoch {epoch} aborted: {reason}"),
    "epoch.delayed": _fill("the next epoch waits {seconds} s: {reason}"),
    "coordinator.elected": _fill("{node} is the coordinator"),
    "member.lost": _fill("{who} is lost: {reason}"),
    "member.evicted": _fill("{who} is excluded: {reason}"),
    "member.refused": _fill("{who} is refused: {reason}"),
    "member.differs": _fill("{who} differs: {reason}"),
    "member.waiting": _fill("{who} waits: {reason}"),
    "membership.parked": lambda event: f"{parked_text(*counts(event))}; waiting for nodes",
    "rung.dropped": _fill("{nodes} nodes are not tried again: {reason}"),
    "fault.injected": _fill("fault: {action} {target} after step {step}"),
    "worker.hung": _fill("hang: {detail}"),
    "stacks.dumped": _fill("stacks of {node} are in {folder}"),
    "worker.slow": _fill(
        "rank {worker_rank} on {member} is slow in {section}: {ratio} times its peers"
    ),
    "worker.exit": _worker_exit,
    "script.restarted": _restarted,
    "script.silent": _silent,
    "worker.unreapable": _fill("process {pid} of {node} has not ended after SIGKILL"),
    "checkpoint.committed": _fill("checkpoint of step {step} committed"),
    "checkpoint.failed": _fill("checkpoint of step {step} failed: {reason}"),
    "checkpoint.skipped": _fill("checkpoint {dir} skipped: {reason}", every_rank=False),
    "checkpoint.restored": _fill("state of step {step} loaded from {dir}", every_rank=False),
    "training.finished": _fill("training {training} finished after its step {training_step}"),
    "training.skipped": _fill("training {training} was finished before: its last state is loaded"),
    "data.encoded": _fill("part {part} of {parts} of the corpus is encoded", every_rank=False),
    "data.source": _source,
    "validation.completed": _validated,
    "numbers.anomaly": _fill("step {step}: {reason}: {action}"),
    "numbers.rollback": _fill("going back to step {back_to}; batches {skipped} are skipped"),
    "replica.mismatch": _fill("replicas differ after step {step}: {tensor} of ranks {ranks}"),
    "state.lost": _fill(
        "no complete state in memory: resuming from step {back_to} ({source}); newer steps, up to "
        "{newest}, are redone",
        every_rank=False,
    ),
    "snapshot.exposed": _fill(
        "all {nodes} nodes share the machine {machine}: only storage outlives it"
    ),
    "storage.stalled": _fill("storage stalled for {seconds} s; training continued"),
    "trainer.stopping": _fill("stopping at step {step}: {why}", every_rank=False),
    "job.stopped": _fill("job stopped with code {code}: {reason}"),
}
