"""Search of one log for signatures, chunk by chunk. Pure but for the reading.

One search for the literals of all patterns goes over the bytes (`literals.py`); only lines that
have one are looked at with the patterns. Memory does not grow with the log.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, BinaryIO, Final

from elastic_trainer.record.signatures import Rank, Signature, signatures
from launcher.doctor.literals import literals_of, names_numbers

if TYPE_CHECKING:
    from ahocorasick_rs import BytesAhoCorasick

CHUNK_BYTES: Final = 2 << 20
_LINE_BYTES: Final = 4096
"""What is looked at of a line, around the literal."""
_MOST: Final = 50
"""Findings of one signature in one log; the earliest matter."""
_TAIL_BYTES: Final = 256 << 10
"""End of the log in which progress after a failure is looked for."""
_MOST_NOTES: Final = 20_000
_FLOOD: Final = 2000
"""Matches in one chunk from which it pays to search no longer for what was found often."""
_ENOUGH: Final = 10
_DIGITS: Final = b"0123456789"
_BY_DIGITS: Final = (-1,)
_CONTROLS: Final = bytes(each for each in range(32) if each not in b"\t\n\r\f\x1b\x08\x07")
"""Bytes that logs do not have."""

_CALM: Final = re.compile(
    r"\b(?:INFO|DEBUG|TRACE|WARN|WARNING|NOTICE|Warning|warning)\b|\[[IWD]\d{0,4}\b|^[IWD]\d{4} "
    r"|\b[A-Z]\w*Warning\b|^\s*#|^\++ |warnings\.warn"
)
"""Lines logged below an error."""
_LOUD: Final = re.compile(
    r"NCCL WARN|\b(?:ERROR|CRITICAL|FATAL|Traceback)\b|\b[A-Z]\w*(?:Error|Exception): "
    r"|Unexpected error from cuda\w+\(\)"
)
"""Lines that say an error, whatever else they say. NCCL logs its errors as WARN, torch those of
CUDA's start as UserWarning."""
_SURVIVED: Final = re.compile(
    r"\b(?:retry(?! count)|retrying|retries left|will (?:be )?retr|[Rr]etry (?:in|after|\d)"
    r"|[Aa]ttempt \d+ ?(?:/|of) ?\d+"
    r"|ignor(?:ed|ing)|fall(?:ing|s)? ?back|fallback|skipp(?:ed|ing)(?! iterations|\s*[=:])"
    r"|[Ss]kip(?:ping)? (?:batch|step|sample)"
    r"|recovered|succeeded|reconnected|restored|resolved|harmless|non-fatal|not fatal"
    r"|expected behaviou?r"
    r"|deprecated|can be (?:safely )?ignored|0 errors|no errors?|without errors?"
    r"|errors?[=:] ?0\b|if you (?:see|get|encounter|run into)|to avoid|may (?:lead to|cause|result)"
    r"|might (?:cause|lead|result)|could (?:cause|lead|result)|in case of|unless|passed|tests? ok"
    r"|enabled|set to|timeout[=:])\b"
)
"""Words of a failure that was overcome, or did not happen."""
_PROGRESS: Final = re.compile(
    r"\b(?:[Ss]tep(?!Id)|STEP|[Ii]ter(?:ation)?|global_step|[Ee]poch)\w*\b\W{0,12}\d+.{0,200}?"
    r"\b(?:[Ll]oss|lr|tok|grad|ms|time|samples|elapsed|acc|TFLOP)|\d+(?:\.\d+)?(?:it/s|s/it)"
    r"|[Ll]oss\W{1,4}\d"
)
_NOT_A_NUMBER: Final = re.compile(r"\b(?:nan|NaN|inf|Inf)\b(?! iterations)")
_DONE: Final = re.compile(
    r"[Tt]raining (?:is )?(?:complete|completed|finished|done)\b|[Ff]inished training"
    r"|Succeeded\b|\bCOMPLETED\b.*\b0:0|exited with code 0\b|[Ee]xit code:? 0\b"
    r"|[Jj]ob (?:completed|finished) successfully|completed successfully"
)
_ANSI: Final = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""Colours and movements of a terminal."""
_RAISED: Final = re.compile(
    r"^(?:(?:\w+\.)*[A-Z]\w*(?:Error|Exception)|(?:\w+\.)+[A-Z]\w+): ", re.MULTILINE
)
_MESSAGES: Final = ("log", "message", "msg", "textPayload", "MESSAGE")
_LEVELS: Final = ("level", "levelname", "severity")
"""Keys of lines of JSON: Docker's, Python loggers', Cloud Logging's, journald's."""
_PREFIX: Final = re.compile(
    r"^(?:\[(?:rank|default|Rank )?\d+(?:,\d+)?\](?:<std(?:err|out)>)?: ?| ?\d+: |\[pod/[^\]]+\] "
    r"|\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d) (?:std(?:err|out) [FP] )?)+",
    re.MULTILINE,
)
"""What launchers and log collectors put before a line."""
_RANK: Final = re.compile(
    r"\[(?:rank|default|Rank )(\d+)\]|\b[Rr]ank[ =:_]{1,3}(\d+)\b|^ ?(\d+): |\| ?rank ?(\d+)"
)
_NODE: Final = re.compile(
    r"^\S{3} +\d+ \d\d:\d\d:\d\d (\S+) kernel:|srun: error: (\S+): tasks?"
    r"|\bSTEP \S+ ON (\S+) CANCELLED|\bhost *: ([\w.-]+)|^([\w.-]+):\d+:\d+ \[\d+\] NCCL"
    r"|\bJOB \S+ ON (\S+) CANCELLED|\bnode[ =:/]+\"?([\w.-]*\d[\w.-]*)"
    r"|\b[Nn]odes? ([a-z][\w.-]*\d+)\b"
)
_ISO: Final = re.compile(rb"(20\d\d-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_SYSLOG: Final = re.compile(rb"\b([A-Z][a-z]{2}) +(\d{1,2}) (\d\d:\d\d:\d\d)\b")
_WORK: Final = re.compile(
    r"(?:PG GUID (\S+?)[ (].*?)?[Rr]ank (\d+)\].*?WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
    r"(?:, NumelIn=(\d+))?(?:.*?last enqueued work: (\d+))?"
)
_SAMPLES: Final = re.compile(
    r"(?:sample|batch|data|token)s?[ _-]?(?:ids?|indices|idxs?|hash|checksum|digest|fingerprint)"
    r"[\"']?\s*[:=]\s*(\[[^\]]*\]|\w+)"
)
_STEP: Final = re.compile(r"\b(?:step|iter(?:ation)?|batch)\b\W{0,3}(\d+)", re.IGNORECASE)
_NOTES: Final = (
    "WorkNCCL(SeqNum",
    *(f"{a}{s}{b}" for a in ("sample", "batch", "data") for s in ("_", " ", "-")
      for b in ("id", "indices", "idx", "hash", "checksum", "digest", "fingerprint")),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One line that has a signature."""

    signature: Signature
    file: str
    line: int
    text: str
    order: tuple[int, int]
    """Number of the log, number of the line in it."""
    t_unix: float | None
    """Time of the line, else of the nearest line before it that has one."""
    rank: int | None
    node: str | None
    warned: bool = False
    """Logged as a warning: a failure only if something else failed too."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """A collective that ran out of time on a rank."""

    group: str
    rank: int
    number: int
    operation: str
    elements: int | None
    enqueued: int | None


@dataclass(slots=True, kw_only=True)
class Scanned:
    """What one log said."""

    file: str
    num_bytes: int = 0
    num_lines: int = 0
    found: list[Match] = field(default_factory=list)
    progress_after: int = 0
    """Lines of progress after the last finding."""
    progress: int = 0
    done: bool = False
    """The last word is of success."""
    works: list[TimedOut] = field(default_factory=list)
    samples: dict[tuple[int, int], str] = field(default_factory=dict)
    """(rank, step) -> the samples that the rank says it read."""
    binary: bool = False


@dataclass(slots=True)
class _State:
    scanned: Scanned
    number: int
    rank: int | None
    node: str | None
    counts: Counter[int] = field(default_factory=Counter)
    spent: set[int] = field(default_factory=set)
    """Signatures found often enough."""
    without: frozenset[int] = frozenset()
    """Signatures that are no longer searched for."""
    known: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """Line without its digits -> its signatures."""


@dataclass(frozen=True, slots=True)
class _Search:
    """One search for the literals of some of the signatures."""

    automaton: BytesAhoCorasick
    owners: list[frozenset[int]]
    """Number of a literal -> the signatures that need it; empty: of a note."""


@functools.cache
def _index() -> dict[str, frozenset[int]]:
    """Return literal -> the signatures that need it."""
    index: dict[str, set[int]] = defaultdict(set)
    for number, each in enumerate(signatures()):
        for word in literals_of(each.pattern.pattern):
            index[word].add(number)
    return {word: frozenset(needed) for word, needed in index.items()}


@functools.cache
def _by_digits() -> frozenset[int]:
    """Return the signatures that lines which differ in their digits may differ in."""
    named = (
        number for number, each in enumerate(signatures()) if names_numbers(each.pattern.pattern)
    )
    return frozenset(named)


@functools.cache
def _before_numbers() -> BytesAhoCorasick:
    """Return a search for literals that have a number, without it."""
    from ahocorasick_rs import BytesAhoCorasick

    numbered = {each.encode() for each in _index() if names_numbers(each)}
    return BytesAhoCorasick(sorted({each.translate(None, _DIGITS) for each in numbered}))


@functools.lru_cache(maxsize=4)
def _search(without: frozenset[int] = frozenset()) -> _Search:
    from ahocorasick_rs import BytesAhoCorasick, Implementation

    owners = {word: needed - without for word, needed in _index().items()}
    owners = {word: needed for word, needed in owners.items() if needed}
    owners |= {word: owners.get(word, frozenset()) for word in _NOTES}
    automaton = BytesAhoCorasick(
        [each.encode() for each in owners], implementation=Implementation.DFA
    )
    return _Search(automaton, list(owners.values()))


def scan(
    stream: BinaryIO, file: str, number: int, *, rank: int | None = None, node: str | None = None
) -> Scanned:
    """Return what a log says; `number` is its place among the logs, `rank` its only writer.

    Raises:
        OSError: it cannot be read.
    """
    state = _State(Scanned(file=file), number, rank, node)
    tail = b""
    for start, raw in _blocks(stream, state.scanned):
        block = _ANSI.sub(b"", raw) if b"\x1b" in raw else raw
        _scan_block(block, start, state)
        tail = (tail + block)[-_TAIL_BYTES:] if len(block) < _TAIL_BYTES else block[-_TAIL_BYTES:]
    state.without = frozenset()
    state.known.clear()
    _progress(tail, state)
    return state.scanned


def _blocks(stream: BinaryIO, scanned: Scanned) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines: number of lines before, bytes. Lines beyond a chunk are cut."""
    rest = b""
    while True:
        read = stream.read(CHUNK_BYTES)
        if scanned.num_bytes == 0:
            read = _of_utf16(read, stream) or read.removeprefix(b"\xef\xbb\xbf")
            head = read[:4096]
            said = head.translate(None, b"\0")  # a machine that crashed leaves zeros behind
            scanned.binary = len(said.translate(None, _CONTROLS)) < 0.95 * len(said)
            scanned.binary |= bool(head) and not said
        end = len(read) if not read else read.rfind(b"\n") + 1
        block = rest + read[:end] if end or not read else b""
        rest = read[end:] if block or not rest else rest + read
        if len(rest) > CHUNK_BYTES:
            block, rest = block + rest, b""
        if block:
            before = scanned.num_lines
            scanned.num_bytes += len(block)
            scanned.num_lines += block.count(b"\n") + (not block.endswith(b"\n"))
            yield before, block
        if not read:
            return


def _of_utf16(head: bytes, stream: BinaryIO) -> bytes | None:
    """Return all of a UTF-16 log, as PowerShell writes them, as UTF-8; None: another log."""
    if head[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return None
    rest = stream.read(64 << 20)
    return (head + rest).decode("utf-16", errors="replace").encode()


def _scan_block(block: bytes, lines_before: int, state: _State) -> None:
    search, known, spent = _search(state.without), state.known, state.spent
    owners, size, redrawn = search.owners, len(block), b"\r" in block
    line_end, counted_to, lines = -1, 0, lines_before
    matches = search.automaton.find_matches_as_indexes(block)
    for word, begin, _ in matches:
        if begin < line_end:
            continue
        left = block.rfind(b"\n", 0, begin) + 1
        line_end = right = block.find(b"\n", begin)
        if right < 0:
            line_end = right = size
        raw = block[left:right]
        if redrawn:  # what was written over, as by progress bars, counts as a line
            left = max(left, block.rfind(b"\r", left, begin) + 1)
            end = block.find(b"\r", begin, right)
            line_end = right = right if end < 0 else end
            raw = block[left:right]
        if right - left > _LINE_BYTES:
            raw = block[max(left, begin - _LINE_BYTES) : min(right, begin + _LINE_BYTES)]
        if not owners[word] or b"WorkNCCL(SeqNum" in raw:
            _note(raw.decode("utf-8", errors="replace"), state.scanned)
        hits = known.get(raw.translate(None, _DIGITS))
        if hits is None or hits is _BY_DIGITS:
            hits = _hits(raw, state)
        if spent.issuperset(hits) or _is_ignored(block, left):
            continue
        lines += block.count(b"\n", counted_to, left)
        counted_to = left
        _add(hits, raw, lines + 1, _time(block, left, right), state)
    if len(matches) > _FLOOD:
        state.without = frozenset(spent)


def _is_ignored(block: bytes, left: int) -> bool:
    """Whether a line is of an exception in a finalizer, which Python reports and goes on after."""
    said = block.rfind(b"Exception ignored in", max(0, left - 2048), left)
    if said < 0 or block.count(b"Traceback (most", said, left) > 1:
        return False
    return _is_raised(_text(block[left : left + 200]))


def _hits(raw: bytes, state: _State) -> tuple[int, ...]:
    """Return the signatures of a line that count."""
    key = raw.translate(None, _DIGITS)
    found = state.known.get(key)
    if found is _BY_DIGITS:
        key = raw
        found = state.known.get(raw)
    if found is None:
        search, known = _search(), signatures()
        near = {
            each
            for word, _, _ in search.automaton.find_matches_as_indexes(raw, overlapping=True)
            for each in search.owners[word]
        } - state.without
        by_digits = not near.isdisjoint(_by_digits())
        if key is not raw and (by_digits or _before_numbers().find_matches_as_indexes(key)):
            state.known[key] = _BY_DIGITS
            key = raw
        text = _text(raw) if near else ""
        found = tuple(each for each in sorted(near) if known[each].pattern.search(text))
        if len(found) > 1:  # an exception that no other rule knows
            special = (
                each
                for each in found
                if known[each].of.name != "py_error" or known[each].rank is not Rank.SUMMARY
            )
            found = tuple(special) or found[:1]
        if found and _SURVIVED.search(text) is not None and not _is_raised(text):
            found = tuple(each for each in found if known[each].rank is Rank.MACHINE)
        if len(state.known) < _MOST_NOTES:
            state.known[key] = found
    return found


def _text(raw: bytes) -> str:
    """Return what a program wrote, without what was put around it."""
    text = raw.decode("utf-8", errors="replace")
    if text.startswith("{"):
        text = _of_json(text)
    return _PREFIX.sub("", text).rstrip("\r\n\0")


def _of_json(line: str) -> str:
    """Return level and message of a line of JSON, as log collectors write it; else the line."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    message = next((entry[key] for key in _MESSAGES if isinstance(entry.get(key), str)), None)
    if message is None:
        return line
    level = next((entry[key] for key in _LEVELS if isinstance(entry.get(key), str)), "")
    plain = _ANSI.sub(b"", message.encode(errors="replace")).decode()
    lines = plain.replace("\r", "\n").strip()  # a whole traceback may be one message
    return f"{level.upper()}\n{lines}" if level else lines


def _add(hits: Sequence[int], raw: bytes, line: int, t_unix: float | None, state: _State) -> None:
    text = raw.decode("utf-8", errors="replace").strip("\r\0")
    said = _text(raw)
    calm = _CALM.search(said) is not None and _LOUD.search(said) is None
    for each in hits:
        state.counts[each] += 1
        if state.counts[each] >= _MOST:
            state.spent.add(each)
        if state.counts[each] > _MOST:
            continue
        signature = signatures()[each]
        state.scanned.found.append(
            Match(
                signature=signature,
                file=state.scanned.file,
                line=line,
                text=" ".join(text.split())[:400],
                order=(state.number, line),
                t_unix=t_unix,
                rank=state.rank if state.rank is not None else _rank_in(text),
                node=_first(_NODE, text) or state.node,
                warned=calm and not signature.quiet and signature.rank is not Rank.MACHINE,
            )
        )


def _is_raised(text: str) -> bool:
    """Whether a line is an exception's own, at the end of a traceback."""
    return _RAISED.search(text) is not None


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return next((each for each in match.groups() if each is not None), None) if match else None


def _rank_in(text: str) -> int | None:
    found = _first(_RANK, text)
    return None if found is None else int(found)


def _time(block: bytes, left: int, right: int) -> float | None:
    """Return the time of a line, or of the last line before it that has one."""
    near = block[left : min(right, left + 200)]
    stamps = _ISO.findall(near)
    if not stamps:
        near = block[max(0, left - 2048) : min(right, left + 200)]
        stamps = _ISO.findall(near)
    if stamps:
        day, clock, part = stamps[-1]
        try:
            at = datetime.fromisoformat(f"{day.decode()}T{clock.decode()}").replace(tzinfo=UTC)
        except ValueError:
            return None
        return at.timestamp() + float(b"0." + (part or b"0"))
    logged = list(_SYSLOG.finditer(near))
    if not logged:
        return None
    month, day, clock = (each.decode() for each in logged[-1].groups())
    try:  # syslog has no year; only differences are used
        at = datetime.strptime(f"2000 {month} {day} {clock} +0000", "%Y %b %d %H:%M:%S %z")
    except ValueError:
        return None
    return at.timestamp()


def _note(text: str, scanned: Scanned) -> None:
    """Keep what only several ranks together tell."""
    if "WorkNCCL(SeqNum" in text and len(scanned.works) < _MOST_NOTES:
        if match := _WORK.search(text):
            group, rank, number, operation, elements, enqueued = match.groups()
            scanned.works.append(
                TimedOut(
                    group or "",
                    int(rank),
                    int(number),
                    operation,
                    None if elements is None else int(elements),
                    None if enqueued is None else int(enqueued),
                )
            )
    elif len(scanned.samples) < _MOST_NOTES and (match := _SAMPLES.search(text)):
        rank, step = _rank_in(text), _first(_STEP, text)
        if rank is not None and step is not None:
            scanned.samples.setdefault((rank, int(step)), match[1])


def _progress(tail: bytes, state: _State) -> None:
    """Count the lines of progress at the end of a log, and those after its last finding."""
    scanned, after = state.scanned, True
    for raw in reversed(tail.splitlines()):
        line = raw[:_LINE_BYTES]
        after = after and not _hits(line, state)
        text = _text(line)
        if _PROGRESS.search(text) and not _NOT_A_NUMBER.search(text):
            scanned.progress += 1
            scanned.progress_after += after
        if after and _DONE.search(text):
            scanned.done = True
        if scanned.progress_after > _ENOUGH:
            return
