"""Failure classes: exit code, signal, error record, log tail -> Failure(kind, action). Pure."""

from __future__ import annotations

import enum
import re
import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.record.signatures import Rank, Remedy, Signature, in_line

EXIT_DONE = 0
EXIT_FAILED = 1
"""The agent failed."""
EXIT_SAVED = 91
"""Stopped on request, saved or at an older checkpoint: requeue me."""
EXIT_TOO_FEW_NODES = 92
EXIT_DO_NOT_RESTART = 93
"""A user or config error, or a crash that would come back."""
EXIT_BUDGET_USED_UP = 94


class Kind(enum.StrEnum):
    """What went wrong."""

    NODE_LOST = "node_lost"
    KILLED = "killed"
    """A worker died of a signal that Holdfast did not send."""
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"
    CRASH = "crash"
    """A worker ended with an exception or an exit code."""
    FAULT = "fault"
    """The processor or the device stopped a worker (SIGSEGV, "CUDA error: unknown error"): the
    program is wrong, or the machine."""
    COLLATERAL = "collateral"
    """A worker failed because a peer did (connection reset, time-out in a collective)."""
    USER_ERROR = "user_error"
    CORRUPTION = "corruption"
    """Replicas of the same shard differ: a device or memory computes wrong without an error."""
    NODE_FAULT = "node_fault"
    """The node itself is bad: device lost, disk, unreapable worker."""
    INFRASTRUCTURE = "infrastructure"
    """Storage, network or NCCL failed: no program's doing; one node's perhaps."""
    SERVICE = "service"
    """A service failed or was not found (a hub, a tracker, the name service): no node's doing."""


class Action(enum.StrEnum):
    """What follows."""

    RESTART = "restart"
    """A new epoch with the same nodes."""
    EVICT = "evict"
    """A new epoch without the node."""
    STOP = "stop"
    """End the job with exit code 93."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a worker's end means."""

    kind: Kind
    action: Action
    detail: str
    """One line for people: exception and message, or signal name."""
    sure: bool = False
    """The worker itself said that a restart cannot help (exit code 93): no node is charged."""


DETAIL_CHARS = 300
"""Longest `Failure.detail`."""

_BY_TEXT: Final = (
    Kind.NODE_FAULT,
    Kind.CORRUPTION,
    Kind.USER_ERROR,
    Kind.OUT_OF_MEMORY,
    Kind.COLLATERAL,
    Kind.INFRASTRUCTURE,
    Kind.SERVICE,
    Kind.FAULT,
)
"""Kinds that a text can show; the first found counts, for a bad node makes any error look like
another. A worker whose text shows another kind of the table has crashed."""

_EXCEPTION_LINE = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Warning)\b(?::.*)?$")

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""Before every line of a traceback, once a script has made its process group."""

_NAMES_AN_ERROR = re.compile(
    r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Failure|Interrupt|Exit|Warning)\b"
)
_VARIABLE = re.compile(r"GPU-[0-9a-f-]{36}|0x[0-9a-fA-F]+|\d+(?:\.\d+)?")

_BOILERPLATE = re.compile(
    r"\[(?:enforce fail at |/)[^\]\s]*\.(?:cc|cpp|cu|h):\d+\] ?(?:\. ?)?"
    r"|\. This is typically caused by .*"
    r"|\s*Exception raised from .* at \S+\.(?:cc|cpp|cu|h):\d+ \(most recent call first\)(?s:.*)"
)
"""Places in the source of torch or gloo, and their general advice."""


_DUMP = re.compile(
    r"^(?:Fatal Python error: (?:Aborted|Segmentation fault|Bus error|Illegal instruction"
    r"|Floating[- ]point exception)$|Python runtime state: |Extension modules: "
    r"|(?:Current t|T)hread\b.*\(most recent call first\):$|<no Python frame>$"
    r"|  File \".*\", line (?:\d+|\?\?\?) in |  Binary file \"|  \.\.\.$|  <|frame #\d+: "
    r"|--- \S+ epoch \d+ rank .* ---$)"
)
"""Lines of faulthandler (Python 3.11 to 3.14), written when a signal ends a worker, of torch's C++
stacks, and of the zygote at the start of each log."""

_ABORT = re.compile(
    r"^(?:terminate called after throwing an instance of '(?P<type>.+)'"
    r"(?:\n *what\(\): *(?P<what>.*))?"
    r"|(?P<said>terminate called .*|Fatal Python error: .*|.*\bAssertion [`'].* failed\b.*"
    r"|(?:malloc|calloc|realloc|free|munmap_chunk|malloc_consolidate)\(\): .*"
    r"|corrupted (?:size|double)\b.*|double free or corruption\b.*|\*\*\* .* \*\*\*: .*"
    r"|OMP: Error .*))$",
    re.MULTILINE,
)
"""What C++, glibc, Python and OpenMP say before they abort the process."""


def without_dumps(log_tail: str) -> str:
    """Return a log without the stacks that faulthandler writes."""
    return "\n".join(line for line in log_tail.splitlines() if not _DUMP.match(line))


def classify(
    *,
    code: int | None,
    signal: int | None,
    record: Mapping[str, Any] | None = None,
    log_tail: str = "",
    at_start: bool = False,
) -> Failure:
    """Return what the end of a failed worker means.

    Args:
        code: exit code; None where a signal ended the worker.
        signal: number of that signal.
        record: content of the error file, in torchelastic's format, if it was written.
        log_tail: last lines of the worker's log of this epoch, and of the kernel's where known.
        at_start: the worker had not completed a step of this epoch.
    """
    assert (code is None) != (signal is None), f"code {code}, signal {signal}"
    if code is not None and code > 128 and code - 128 in set(signals.Signals):
        signal, code = code - 128, None  # a shell in between reports signals this way
    log_tail = without_dumps(_RANK_PREFIX.sub("", log_tail))
    message = _message_of(record) or _last_exception(log_tail)
    # A record says all; warnings in the log must not decide.
    text = message if record else log_tail
    by_text = _by_text(message, text, at_start=at_start)
    if code == EXIT_DO_NOT_RESTART:
        return Failure(
            kind=Kind.USER_ERROR,
            action=Action.STOP,
            detail=one_line(message or _last_line(log_tail) or f"exit code {code}"),
            sure=True,
        )
    if signal is not None and signal != signals.SIGABRT:
        return _by_signal(signal, text, by_text)
    ending = f"exit code {code}" if signal is None else signals.Signals(signal).name
    if by_text is None:
        said = (signal and _abort_reason(log_tail)) or message or _last_line(log_tail)
        detail = f"{said} ({ending})" if said else ending
        return Failure(kind=Kind.CRASH, action=Action.RESTART, detail=one_line(detail))
    return by_text


def plain_text(text: str) -> str:
    """Return `text` on one line, without where in a library's source it comes from."""
    return " ".join(_BOILERPLATE.sub("", text).split())


def one_line(text: str) -> str:
    """Return `text` on one line, cut to `DETAIL_CHARS`."""
    flat = plain_text(text)
    return flat if len(flat) <= DETAIL_CHARS else flat[: DETAIL_CHARS - 1] + "…"


def signature(detail: str) -> str:
    """Return `detail` without its numbers: ranks' indices, sizes and addresses differ."""
    return _VARIABLE.sub("#", detail)


def names_an_error(detail: str) -> bool:
    """Whether `detail` has the words of an exception, not only how a process ended."""
    return _NAMES_AN_ERROR.match(detail) is not None


def _by_text(message: str, text: str, *, at_start: bool) -> Failure | None:
    # Lines after the exception's belong to it; before it may be warnings, so only the machine's
    # own words count there.
    before, said = text, ""
    if not message:
        before, said = "", text
    elif (position := text.rfind(message)) >= 0:
        before, said = text[:position], text[position:]
    lines = said.splitlines()
    found = [(each, line) for line in before.splitlines() for each in in_line(line)]
    found = [item for item in found if item[0].rank is Rank.MACHINE]
    found += [(each, line) for line in lines for each in in_line(line)]
    if any(each.of.name == "port_conflict" for each, _ in found):
        found = [item for item in found if item[0].kind != Kind.COLLATERAL]  # no peer's doing
    last = message or _last_line(text)
    told = [
        (Kind(each.kind), each, line)
        for each, line in found
        if each.kind != Kind.USER_ERROR
        or (line.strip() in last and (at_start or not each.at_start))
    ]
    if (away := [item for item in told if item[1].whole]) and message:
        told = away  # whatever else the message quotes
    for kind in _BY_TEXT:
        if mine := next((item for item in told if item[0] is kind), None):
            _, signature_, line = mine
            return Failure(kind=kind, action=_action(kind, signature_), detail=one_line(line))
    return None


def _action(kind: Kind, found: Signature) -> Action:
    if kind is Kind.USER_ERROR:
        return Action.STOP
    named = kind is Kind.CORRUPTION and found.action is Remedy.RESTART_ELSEWHERE
    return Action.EVICT if named or kind is Kind.NODE_FAULT else Action.RESTART


def signal_name(signal: int) -> str:
    """Return a signal's name; most real-time signals have none."""
    try:
        return signals.Signals(signal).name
    except ValueError:
        return f"signal {signal}"


_KIND_OF: Final[Mapping[int, Kind]] = {
    signals.SIGSEGV: Kind.FAULT,
    signals.SIGFPE: Kind.FAULT,
    signals.SIGILL: Kind.FAULT,
    **dict.fromkeys(
        (
            signals.SIGTRAP,
            signals.SIGSYS,
            signals.SIGINT,  # an uncaught KeyboardInterrupt: an agent's own Ctrl-C stops the job
            signals.SIGPIPE,
            signals.SIGALRM,
            signals.SIGVTALRM,
            signals.SIGPROF,
            signals.SIGXCPU,
            signals.SIGXFSZ,
        ),
        Kind.CRASH,  # the program's own timers, limits and pipes
    ),
}


def _by_signal(signal: int, text: str, by_text: Failure | None) -> Failure:
    name = signal_name(signal)
    if by_text is not None and by_text.kind is Kind.NODE_FAULT:
        return by_text
    if signal == signals.SIGBUS:
        detail = f"{name}: shared memory or a mapped file ran out"
        return Failure(kind=Kind.OUT_OF_MEMORY, action=Action.RESTART, detail=detail)
    if signal == signals.SIGKILL and (line := _of_memory(text)):
        # The program's: it wants as much on every node, and its own cgroup is what was full.
        detail = one_line(f"{name}: {line}")
        return Failure(kind=Kind.OUT_OF_MEMORY, action=Action.RESTART, detail=detail)
    kind = _KIND_OF.get(signal, Kind.KILLED)
    return Failure(kind=kind, action=Action.RESTART, detail=name)


def _message_of(record: Mapping[str, Any] | None) -> str:
    """Return the message of an error file: {"message": str | {"message": str, …}}."""
    message = record.get("message") if record else None
    if isinstance(message, Mapping):
        message = message.get("message")
    return message if isinstance(message, str) else ""


def _last_exception(log_tail: str) -> str:
    lines = [line.strip() for line in log_tail.splitlines()]
    return next((line for line in reversed(lines) if _EXCEPTION_LINE.match(line)), "")


def _abort_reason(log_tail: str) -> str:
    """Return the last words before an abort; empty: none."""
    for found in reversed(list(_ABORT.finditer(log_tail))):
        return found["said"] or ": ".join(filter(None, found.group("type", "what")))
    return ""


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _of_memory(text: str) -> str:
    """Return the first line that says that memory ran out; empty: none does."""
    for line in text.splitlines():
        if any(each.kind == Kind.OUT_OF_MEMORY for each in in_line(line)):
            return line
    return ""
