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
_WENT_ON: Final = 2
"""Lines of progress after which training has gone on: one may be of a rank that lags."""
_MOST_SUSPECTS: Final = 5
_REPORT_LINES: Final = 12
"""Most lines of an exception that Python ignored."""
_SHOWN: Final = 400
"""Characters of a line that are kept."""
_DIGITS: Final = b"0123456789"
_BY_DIGITS: Final = (-1,)
_CONTROLS: Final = bytes(each for each in range(32) if each not in b"\t\n\r\f\x1b\x08\x07")
"""Bytes that logs do not have."""

_INFORMS: Final = re.compile(
    r"\b(?:INFO|DEBUG|TRACE|NOTICE)\b|\[(?:\w+ )?[ID]\d{0,4}\b|^[ID]\d{4} |: [ID] [a-z_]+/"
    r"|^\s*#|^\++ |^ *Normal +[A-Z]\w+ |^wandb: (?!ERROR)"
)
"""Lines logged below a warning, comments, a shell's trace of its commands."""
_WARNS: Final = re.compile(
    r"\b(?:WARN|WARNING|Warning|warning)\b|CCL_WARN|<warn>|\[(?:\w+ )?W\d{0,4}\b|^W\d{4} "
    r"|: W [a-z_]+/"
    r"|\b[A-Z]\w*Warning\b|warnings\.warn"
)
_KUBERNETES_WARNS: Final = re.compile(r"^\s*(?:\S+ +)?Warning +[A-Z]\w+ +")
"""An event of a cluster, whose level for errors is Warning."""
_LOUD: Final = re.compile(
    r"NCCL WARN|\b(?:ERROR|CRITICAL|FATAL|Traceback)\b|\b[A-Z]\w*(?:Error|Exception): "
    r"|Unexpected error from cuda\w+\(\)"
)
"""Lines that say an error, whatever else they say. NCCL logs its errors as WARN, torch those of
CUDA's start as UserWarning."""
_SURVIVED: Final = re.compile(
    r"\b(?:(?<!no-)retry(?! count| page)|(?<!disabled, )retrying|retries left|will (?:be )?retr"
    r"|[Rr]etry (?:in|after|\d)"
    r"|[Aa]ttempt \d+ ?(?:/|of) ?\d+"
    r"|[Ii]gnor(?:ed|ing)|[Ff]all(?:ing|s)? ?back|fallback|skipp(?:ed|ing)(?! iterations|\s*[=:])"
    r"|[Ss]kip(?:ping)? (?:batch|step|sample)"
    r"|recovered|succeeded|reconnected|restored|resolved|harmless|non-fatal|not fatal"
    r"|expected behaviou?r"
    r"|deprecated|can be (?:safely )?ignored|0 errors|no errors?|without errors?"
    r"|errors?[=:] ?0\b(?! in)|if you (?:see|get|encounter|run into)|to avoid"
    r"|may (?:lead to|cause|result)"
    r"|might (?:cause|lead|result)|could (?:cause|lead|result)|in case of|unless|passed|tests? ok"
    r"|(?<!requeue is )enabled|set to|timeout[=:]"
    r"|(?:[Nn]o|0|zero|[Ww]ithout|not any) (?:[\w-]+ ){0,3}(?:stragglers?|errors?|failures?|faults?"
    r"|hangs?|stalls?|anomal(?:y|ies)|spikes?|corruptions?|deadlocks?|issues?|problems?|throttling"
    r"|NaNs?|SDC|OOMs?|violations?|slow ranks?)|[Nn]one (?:detected|found)"
    r"|[Ss]tragglers?:? (?:none|None|\[\]|0|not (?:found|detected)))\b"
)
"""Words of a failure that was overcome, or did not happen."""
_PROGRESS: Final = re.compile(
    r"\b(?:[Ss]tep(?!Id)|STEP|[Ii]ter(?:ation)?|global_step|[Ee]poch)\w*\b\W{0,12}\d+.{0,200}?"
    r"\b(?:[Ll]oss|lr|tok|grad|ms|time|samples|elapsed|acc|TFLOP)|\d+(?:\.\d+)?(?:it/s|s/it)"
    r"|[Ll]oss\W{1,4}\d|\b(?:sec|s)/(?:step|batch|iter\w*)\b|\b(?:step|batch\w*|iter\w*)s?/s(?:ec)?\b"
)
_ERROR_WORDS: Final = re.compile(
    r"\b(?:error|err|failed|failure|fail|fails|fatal|abort(?:ed|ing)?|exception|traceback|panic|"
    r"crash(?:ed)?|corrupt(?:ed|ion)?|uncorrect\w*|killed|core dumped|segfault|denied|refused|"
    r"timed out|time-?out|assert(?:ion)?|illegal|violation|unrecoverable|poison\w*)\b|\*ERROR\*",
    re.IGNORECASE,
)
_TROUBLE_WORDS: Final = re.compile(
    r"\b(?:unable|cannot|can't|couldn't|could not|not found|invalid|lost|dead|died|kill|signal|"
    r"terminat\w*|interrupt\w*|cancell?ed|preempt\w*|evicted|hangs?|hung|hanging|stuck|stall\w*|"
    r"mismatch|missing|unreachable|unavailable|unhealthy|exceed\w*|reset|down|disconnected|broken|"
    r"throttl\w*|not ready|insufficient|degraded|unsupported|critical|out of|no such|rejected|"
    r"spik\w+|diverg\w+|nan|inf|s?xid|\w+BackOff|unresponsive|not respond\w*|"
    r"power\w*|overheat\w*|unplugged|"
    r"blocked|exit(?:ed)? (?:code|status|with)|returned|not usable|wedged|stopped)\b",
    re.IGNORECASE,
)
"""Words of trouble; a line that has one without a signature may be the failure."""
_HARMLESS: Final = re.compile(
    r"^[^,]*(?:(?<!\d)[:=|]\s*|[:=|]\s+)(?:0|No|None|Not Active|Inactive|N/A|OK|Pass)\s*"
    r"\|?\s*$|SW Power Cap|\b[Cc]orrected\b|\bCE\b"
    r"|\berror\.json|can (?:cause|lead to)|iommu=|You should|Could not estimate|^class "
    r"|[Hh]andlers\b|-inf\b"
    r"|\b(?:val|best)_\w+=|already been registered|apply your changes|took too long|cannot access"
    r"|±\s*\||op=Exists|Cannot get incoming CPU|tensorflow/core/platform|^wandb: "
    r"|(?:^|\s|\W)[Nn]o(?:t a)? (?:\w+ ){0,2}(?:errors?|failures?|problems?|issues?|anomal\w+|"
    r"stragglers?|hangs?|faults?|trouble)\b|\bwill result in\b"
)
"""Words of a count of nothing, of advice, of a report without trouble."""
_SIGNS: Final = re.compile(
    r"\b[Ss]tep\W{1,3}\d|Init COMPLETE|Connected all|Using network|succeeded"
    r"|Started container|[Ss]uccessfully "
    r"|\bRunning\b|\bReady\b|\b(?:idle|alloc|mix|mixed)\b|\bPass\b|State: Active|\bLinkUp\b"
    r"|Link \d+: [\d.]+ GB/s|Persistence-M|[Ll]oading|Num (?:examples|Epochs)|\.{5,} ?\S| R +\d"
    r"|training \.\.\.|done with setup|[Uu]sing |[Ss]etting |100%|[Ww]orld.size|[Ii]nitiali[sz]ed"
    r"|[Bb]uilding |[Ss]tarting |\bregistered\b|[Ee]poch\W{1,4}\d|\bmetrics/|\} 0(?:\.0)?$"
    r"|[Ss]av(?:ed|ing) |[Rr]estored|[Cc]onnected|[Cc]orrected"
    r"|\b[Nn]o (?:\w+ ){1,3}(?:detected|found)|✓|\b[Hh]ealthy\b"
    r"|[:=|]\s*(?:0|No|None|Not Active)\s*\|?\s*$"
)
"""Words of a normal start, or of a report that things are well."""
_NO_PROGRESS: Final = re.compile(
    r"\b(?:nan|NaN|inf|Inf)\b(?! iterations)"
    r"|\b(?:abort(?:ed|ing)|exceeds|diverged|exploded|spiked)\b"
)
"""Words of a line of a step that went wrong."""
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
class LogLine:
    """One line of a log."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Match(LogLine):
    """One line that has a signature."""

    signature: Signature
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
    went_on: int = 0
    """Training went on, or ended well, after all lines before this one; 0: it did not."""
    signs: bool = False
    """Some line is one of health: of a step, of a clean end, of a normal start."""
    suspects: list[LogLine] = field(default_factory=list)
    """Lines at the end that look like errors but have no signature."""
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
    _look_at_end(tail, state)
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
    before = block[said:left].split(b"\n")[1:]  # an exception there ends what is ignored
    return _is_raised(_text(block[left : left + 200])) and not any(
        _is_raised(_text(line[:200])) for line in before
    )


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
    except (ValueError, RecursionError):
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
    loud = _LOUD.search(said) is not None
    informs = not loud and _INFORMS.search(said) is not None
    warns = not loud and (informs or _WARNS.search(said) is not None)
    for each in hits:
        state.counts[each] += 1
        if state.counts[each] >= _MOST:
            state.spent.add(each)
        if state.counts[each] > _MOST:
            continue
        signature = signatures()[each]
        own = signature.quiet or signature.rank is Rank.MACHINE
        if informs and not own:
            continue
        state.scanned.found.append(
            Match(
                signature=signature,
                file=state.scanned.file,
                line=line,
                text=" ".join(text.split())[:_SHOWN],
                order=(state.number, line),
                t_unix=t_unix,
                rank=state.rank if state.rank is not None else _rank_in(text),
                node=_first(_NODE, text) or state.node,
                warned=warns and not own,
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


def _look_at_end(tail: bytes, state: _State) -> None:
    """Find out whether training went on, and what was said after that, from the last line back."""
    scanned, progress = state.scanned, 0
    lines = tail.removesuffix(b"\n").split(b"\n")
    suspects: list[tuple[int, LogLine]] = []
    for back, whole in enumerate(reversed(lines)):
        number = scanned.num_lines - back
        for raw in reversed(whole[-_LINE_BYTES:].split(b"\r")):
            text = _text(raw)
            if _PROGRESS.search(text) and not _NO_PROGRESS.search(text):
                progress += 1
                scanned.signs = True
            elif _DONE.search(text):
                progress = _WENT_ON
                scanned.signs = True
            elif hits := _hits(raw, state):
                _add_late(hits, raw, number, state)
            elif "Exception ignored in" in text:  # which Python reports and goes on after
                suspects = [each for each in suspects if each[1].line > number + _REPORT_LINES]
            elif weight := _suspicion(text):
                shown = " ".join(text.split())[:_SHOWN]
                suspects.append((weight, LogLine(file=scanned.file, line=number, text=shown)))
            else:
                scanned.signs |= _is_calm(text) or _SIGNS.search(text) is not None
            if progress >= _WENT_ON:
                scanned.went_on = number
                break
        if scanned.went_on:
            break
    worst = sorted(suspects, key=lambda each: (-each[0], each[1].line))[:_MOST_SUSPECTS]
    scanned.suspects = sorted((line for _, line in worst), key=lambda each: each.line)


def _add_late(hits: Sequence[int], raw: bytes, number: int, state: _State) -> None:
    """Keep a finding at the end whose signature was found too often before to be kept."""
    late = [each for each in hits if state.counts[each] >= _MOST]
    if any(each.line == number for each in state.scanned.found):
        return
    for each in late:
        state.counts[each] = 0
    _add(late, raw, number, None, state)


def _is_calm(text: str) -> bool:
    """Whether a line was logged below an error."""
    calm = _INFORMS.search(text) is not None or _WARNS.search(text) is not None
    return calm and _LOUD.search(text) is None


def _suspicion(text: str) -> int:
    """Return how much a line without a signature looks like an error; 0: not at all."""
    event = _KUBERNETES_WARNS.search(text) is not None
    overcome = _HARMLESS.search(text) or (_SURVIVED.search(text) and not _is_raised(text))
    if overcome or (_is_calm(text) and not event):
        return 0
    return (
        event
        + 2 * (_LOUD.search(text) is not None)
        + 2 * (_ERROR_WORDS.search(text) is not None)
        + (_TROUBLE_WORDS.search(text) is not None)
    )
