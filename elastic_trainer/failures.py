"""Failure classes: exit code, signal, error record, log tail -> Failure(kind, action). Pure."""

from __future__ import annotations

import enum
import re
import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

EXIT_DONE = 0
EXIT_FAILED = 1
"""The agent's own fault."""
EXIT_SAVED = 91
"""Stopped on request, saved or left at an older checkpoint of its own: requeue me."""
EXIT_TOO_FEW_NODES = 92
EXIT_DO_NOT_RESTART = 93
"""A user or config error, or a crash that would come back."""
EXIT_BUDGET_USED_UP = 94


class Kind(enum.StrEnum):
    """What went wrong."""

    NODE_LOST = "node_lost"
    KILLED = "killed"
    """A worker died of a signal nobody of us sent."""
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"
    CRASH = "crash"
    """A worker ended with an error of its own: an exception, an exit code."""
    FAULT = "fault"
    """The processor or the device stopped a worker (SIGSEGV, "CUDA error: unknown error"): either
    the program is wrong or the machine."""
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

_EVICTING_XIDS = (
    "38|46|48|54|61|62|64|74|79|95|109|110|119|120|136|140|14[2-9]|15[01578]|161|16[789]|17[12]"
)
"""XIDs after which the GPU needs a reset, a drain or a hand (NVIDIA's XID catalogue); the others
are the application's fault, contained, or no failure at all."""

_KERNEL_FAULT = re.compile(
    rf"NVRM: Xid \([^)]*\): ({_EVICTING_XIDS}),"
    r"|fallen off the bus|SXid \([^)]*\): \d+, Fatal|NVSwitch fatal error"
    r"|nvidia-fabricmanager\S* failed|Remounting filesystem read-only",
    re.IGNORECASE,
)
"""The machine is bad: in the words of the kernel or a daemon, which no program uses."""

_NODE_FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error|cudaErrorECCUncorrectable"
    r"|unspecified launch failure|GPU is lost|device lost"
    r"|802\W+system not yet initialized|Got async event : local catastrophic error"
    r"|Unable to determine the device handle for GPU|CUDA driver initialization failed"
    r"|no CUDA-capable device is detected|Driver/library version mismatch"
    r"|Transport endpoint is not connected|Stale file handle",
    re.IGNORECASE,
)
"""The node is bad: hardware, driver, or a file system that is gone. Not EROFS: containers whose
root is read-only say that to a program that writes where it may not."""

_DEVICE_FAULT = re.compile(
    r"CUDA error: (unknown error|hardware stack error"
    r"|(all )?CUDA-capable device\S* (is/)?are busy)",
    re.IGNORECASE,
)
"""The device or its driver gave up, and does not say for what."""

_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|OOM[- ]?Kill|oom[-_]kill|^MemoryError|Cannot allocate memory"
    r"|DefaultCPUAllocator: can't allocate|insufficient shared memory|out-of-memory handler",
    re.IGNORECASE | re.MULTILINE,
)

_COLLATERAL = re.compile(
    # gloo
    r"Connection closed by peer|Connection reset by peer|Application timeout caused pair closure"
    r"|Timed out waiting \d+ms for (recv|send|connect|synch)|gloo\S* (connect|read|write) error"
    r"|connectFullMesh failed|Broken pipe"
    # NCCL
    r"|ncclRemoteError|remote process exited|collective operation timeout"
    r"|Connection closed by remote|NET/IB : Got completion from peer"
    r"|NCCL communicator was aborted|ncclCommAbort"
    # TCPStore
    r"|DistStoreError|DistNetworkError|wait timeout after \d+ms|recvValueWithTimeout failed"
    r"|client socket has (timed out|failed)|RendezvousConnectionError|Socket Timeout",
    re.IGNORECASE,
)
"""What a worker says when a peer, or the store on a peer, went away."""

_OWN_NETWORK_FAULT = re.compile(r"Address already in use|EADDRINUSE", re.IGNORECASE)
"""DistNetworkError that is no peer's doing."""

_INFRASTRUCTURE = re.compile(
    # storage and network, as the kernel says it: EIO, ENETDOWN, ENETUNREACH, EHOSTDOWN,
    # EHOSTUNREACH, ESHUTDOWN (Lustre), EREMOTEIO
    r"Input/output error|Remote I/O error|Network is (unreachable|down)|No route to host"
    r"|Host is down"
    r"|Software caused connection abort|Cannot send after transport endpoint shutdown"
    # NCCL, but for ncclInvalidUsage and ncclInvalidArgument, which are the program's
    r"|nccl(System|Internal|UnhandledCuda)Error|NCCL (WARN|error)\b(?!.*invalid (usage|argument))",
    re.IGNORECASE,
)
"""What a worker says when something all nodes share, or its way there, has failed."""

_SERVICE = re.compile(
    r"Temporary failure in name resolution|Name or service not known"
    r"|Max retries exceeded|Read timed out|ReadTimeout|ConnectTimeout|Service Unavailable"
    r"|Bad Gateway|Gateway Time-?out|Too Many Requests"
    r"|Connection refused|Connect(ion|\(\)) timed out"
    # Python's own words for it, whatever the message
    r"|^(?:\w+\.)*(TimeoutError|ConnectionError|ConnectionRefusedError|ConnectTimeout)\b",
    re.IGNORECASE | re.MULTILINE,
)
"""What a worker says when a service that the program asks does not answer. Often one rank asks
for all, so that it is always the same node's worker that says so."""

_USER_EXCEPTION = re.compile(
    r"^(SyntaxError|IndentationError|TabError|ImportError|ModuleNotFoundError)\b"
    r"|\bHF\d{3}\b|error: unrecognized arguments|error: the following arguments are required"
)
"""Errors that would come back in every epoch, on every node."""

_USER_EXCEPTION_AT_START = re.compile(
    r"^(FileNotFoundError|NotADirectoryError|IsADirectoryError|PermissionError)\b"
)
"""The user's before the first step; later a file that was there is gone: an ordinary crash."""

_CORRUPTION = re.compile(r"^(?:\w+\.)*(SilentCorruptionError|ReplicaMismatchError): ")
"""Of `training/replicas.py`: a majority names this rank; or there is none: nobody can be named."""

_AWAY = re.compile(r"^(?:\w+\.)*BoardAwayError: ")
"""Of checkpoint/restore.py. Whatever storage or API server said in it: it is what all share."""

_EXCEPTION_LINE = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Warning)\b(?::.*)?$")

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""Before every line of a traceback, once a script has made its process group."""

_NAMES_AN_ERROR = re.compile(
    r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Failure|Interrupt|Exit|Warning)\b"
)
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")

_BOILERPLATE = re.compile(
    r"\[(?:enforce fail at |/)[^\]\s]*\.(?:cc|cpp|cu|h):\d+\] ?(?:\. ?)?"
    r"|\. This is typically caused by .*"
    r"|\s*Exception raised from .* at \S+\.(?:cc|cpp|cu|h):\d+ \(most recent call first\)(?s:.*)"
)
"""Where in torch's or gloo's build a message came from, and their general advice."""


def classify(
    *,
    code: int | None,
    signal: int | None,
    record: Mapping[str, Any] | None = None,
    log_tail: str = "",
    at_start: bool = False,
) -> Failure:
    """Say what the end of a failed worker means.

    Args:
        code: exit code; None when a signal ended the worker.
        signal: number of that signal; None otherwise.
        record: content of the error file, in torchelastic's format, if one was written.
        log_tail: last lines of the worker's log of this epoch, and of the kernel's where known.
        at_start: the worker had not completed a step of this epoch.

    Returns:
        The node's fault before the user's, the user's before a peer's: a bad node makes
        any error look like another.
    """
    assert (code is None) != (signal is None), f"code {code}, signal {signal}"
    if code is not None and code > 128 and code - 128 in set(signals.Signals):
        signal, code = code - 128, None  # a shell in between reports signals this way
    log_tail = _RANK_PREFIX.sub("", log_tail)
    message = _message_of(record) or _last_exception(log_tail)
    # With a record the log says nothing more; warnings in it must not decide.
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
        said = message or _last_line(log_tail)
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
    """Whether `detail` is an exception's own words, and not just how a process ended."""
    return _NAMES_AN_ERROR.match(detail) is not None


def _by_text(message: str, text: str, *, at_start: bool) -> Failure | None:
    # Where an exception is known it decides alone: warnings before it are common.
    said = message or text
    if known := _board_is_away(message) or _by_hardware(message, text):
        return known
    tail = _last_line(text)
    users = _USER_EXCEPTION.search(message) or _USER_EXCEPTION.search(tail)
    if users or (at_start and _USER_EXCEPTION_AT_START.search(message)):
        detail = one_line(message or tail)
        return Failure(kind=Kind.USER_ERROR, action=Action.STOP, detail=detail)
    if found := _MEMORY.search(text):
        # A crowded device or host may have room next time; the restart budget ends the rest.
        detail = one_line(_line_around(text, found.start()))
        return Failure(kind=Kind.OUT_OF_MEMORY, action=Action.RESTART, detail=detail)
    if (found := _COLLATERAL.search(text)) and not _OWN_NETWORK_FAULT.search(text):
        detail = one_line(_line_around(text, found.start()))
        return Failure(kind=Kind.COLLATERAL, action=Action.RESTART, detail=detail)
    for kind, pattern in (
        (Kind.INFRASTRUCTURE, _INFRASTRUCTURE),
        (Kind.SERVICE, _SERVICE),
        (Kind.FAULT, _DEVICE_FAULT),
    ):
        if found := pattern.search(said):
            detail = one_line(_line_around(said, found.start()))
            return Failure(kind=kind, action=Action.RESTART, detail=detail)
    return None


def _board_is_away(message: str) -> Failure | None:
    if _AWAY.match(message) is None:
        return None
    detail = one_line(message)
    return Failure(kind=Kind.INFRASTRUCTURE, action=Action.RESTART, detail=detail)


def _by_hardware(message: str, text: str) -> Failure | None:
    # What follows an exception's line is of it; before it there may be warnings.
    said = text[text.rfind(message) :] if message else text
    for pattern, where in ((_KERNEL_FAULT, text), (_NODE_FAULT, said)):
        if found := pattern.search(where):
            detail = one_line(_line_around(where, found.start()))
            return Failure(kind=Kind.NODE_FAULT, action=Action.EVICT, detail=detail)
    if found := _CORRUPTION.match(message):
        action = Action.EVICT if found[1] == "SilentCorruptionError" else Action.RESTART
        return Failure(kind=Kind.CORRUPTION, action=action, detail=one_line(message))
    return None


def _signal_name(signal: int) -> str:
    """Return a signal's name; most real-time signals have none."""
    try:
        return signals.Signals(signal).name
    except ValueError:
        return f"signal {signal}"


_KIND_OF: Final[Mapping[int, Kind]] = {
    signals.SIGSEGV: Kind.FAULT,
    signals.SIGFPE: Kind.FAULT,
    signals.SIGILL: Kind.FAULT,
    signals.SIGTRAP: Kind.CRASH,
    signals.SIGSYS: Kind.CRASH,
}


def _by_signal(signal: int, text: str, by_text: Failure | None) -> Failure:
    name = _signal_name(signal)
    if by_text is not None and by_text.kind is Kind.NODE_FAULT:
        return by_text
    if signal == signals.SIGBUS:
        detail = f"{name}: shared memory or a mapped file ran out"
        return Failure(kind=Kind.OUT_OF_MEMORY, action=Action.RESTART, detail=detail)
    if signal == signals.SIGKILL and (found := _MEMORY.search(text)):
        # The program's: it wants as much on every node, and its own cgroup is what was full.
        detail = one_line(f"{name}: {_line_around(text, found.start())}")
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


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _line_around(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : end if end >= 0 else len(text)]
