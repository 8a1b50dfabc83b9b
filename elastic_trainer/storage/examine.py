"""What the files of a corpus hold, told by samples of each. Standard library only.

The launcher asks before a job is submitted, the trainer as it opens the corpus. Magic bytes that
could begin a text count only where the samples are no text.
"""

from __future__ import annotations

import codecs
import itertools
import json
import os
import re
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from elastic_trainer.storage.files import MEGATRON_PAIR, megatron_prefixes, open_regular

SAMPLE_BYTES: Final = 16 << 10
"""At the beginning, in the middle and at the end of a file."""
NUM_FILES: Final = 8
"""Examined of a folder, spread over the names in order."""
NUM_ENTRIES: Final = 2000
"""Of a folder are looked at to choose them: a listing of millions takes minutes."""
FEW_BYTES: Final = 16
"""So many odd bytes of the samples are no reason to refuse a text."""
ODD_SHARE: Final = 0.01
"""Share of bytes that are not UTF-8. Latin-1 has 4 % of them in French, 2 % in Spanish."""
CONTROL_SHARE: Final = 0.1
"""Share of control characters that no text needs. Random bytes have 10 %, logs of terminals and
overstruck manuals none: escape and backspace do not count."""
NUM_LINES: Final = 8
"""Lines that are read to tell JSON lines."""
NOT_TEXT: Final = (".pyc", ".so", ".bin")
"""Suffixes of files in a folder of text that are passed over."""

SUFFIXES: Final = {
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json.gz", ".json.zst"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "sft": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow"),
}
"""Files of a folder that a format takes."""
_OF_EXAMPLES: Final = frozenset({"messages", "conversations", "completion", "input_ids"})
"""Keys by which a record is an example of sft."""
TABLES: Final = (".parquet", ".arrow")
COMPRESSED: Final = (".gz", ".zst")

_CONTROLS: Final = bytes({*range(32), 127} - set(b"\b\t\n\v\f\r\x1b"))
_CONTROL: Final = re.compile(b"[" + re.escape(_CONTROLS) + b"]")
_ABOUT: Final = re.compile(r"(readme|licen[cs]e|copying|notice)\b.*|.*\.md", re.IGNORECASE)
"""Names of what lies beside the data of a data set."""
_ZIP: Final = "a zip archive (or a checkpoint of torch, or .npz)"
_PARQUET: Final = "write data.format: parquet"
_ARROW: Final = "write data.format: arrow"
_LINES: Final = "make it lines, an object each: jq -c '.[]'"
_AS_TEXT: Final = "of texts write data.format: text"
_UNPACK: Final = "unpack it"
_CONVERT: Final = "write its texts to text files in UTF-8"
_REMOVE: Final = "name a file or folder with text, and move this file elsewhere"


class Magic(NamedTuple):
    """Bytes by which a format is known."""

    prefix: bytes
    name: str
    advice: str
    at: int = 0
    printable: bool = False
    """A text may begin so too."""


MAGIC: Final = (
    Magic(b"ARROW1\0\0", "an Arrow file", _ARROW),
    Magic(b"\xff\xff\xff\xff", "an Arrow stream, as Hugging Face datasets saves", _ARROW),
    Magic(b"FEA1", "a Feather file", _CONVERT, printable=True),
    Magic(b"ORC", "an ORC file", _CONVERT, printable=True),
    Magic(b"Obj\x01", "an Avro file", _CONVERT),
    Magic(b"SQLite format 3\0", "an SQLite database", _CONVERT),
    Magic(b"\x89HDF\r\n\x1a\n", "an HDF5 file", _CONVERT),
    Magic(b"\x93NUMPY", "a NumPy array", "write its tokens as uint16 with data.format: nanogpt"),
    Magic(b"MMIDIDX\0\0", "the index of a Megatron dataset", "write data.format: megatron"),
    Magic(struct.pack("<i", 20240520), "a shard of tokens", "write data.format: nanogpt"),
    Magic(struct.pack("<i", 20240801), "a shard of tokens", "write data.format: nanogpt"),
    Magic(b"GGUF", "a GGUF model", _REMOVE, printable=True),
    Magic(b"PK\x03\x04", _ZIP, _UNPACK),
    Magic(b"PK\x05\x06", _ZIP, _UNPACK),
    Magic(b"\x1f\x8b", "compressed by gzip", "unpack it: gzip -d"),
    Magic(b"\x28\xb5\x2f\xfd", "compressed by Zstandard", "unpack it: zstd -d"),
    Magic(b"BZh", "compressed by bzip2", "unpack it: bzip2 -d", printable=True),
    Magic(b"\xfd7zXZ\0", "compressed by xz", "unpack it: xz -d"),
    Magic(b"\x04\x22\x4d\x18", "compressed by LZ4", "unpack it: lz4 -d"),
    Magic(b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    Magic(b"ustar", "a tar archive", "unpack it: tar -xf", at=257),
    Magic(b"%PDF-", "a PDF", "convert it to text: pdftotext", printable=True),
    Magic(b"\x89PNG\r\n\x1a\n", "a PNG picture", _REMOVE),
    Magic(b"\xff\xd8\xff", "a JPEG picture", _REMOVE),
    Magic(b"GIF8", "a GIF picture", _REMOVE, printable=True),
    Magic(b"RIFF", "a WebP, WAV or AVI file", _REMOVE, printable=True),
    Magic(b"OggS", "an Ogg file", _REMOVE, printable=True),
    Magic(b"fLaC", "a FLAC file", _REMOVE, printable=True),
    Magic(b"ID3", "an MP3 file", _REMOVE, printable=True),
    Magic(b"ftyp", "an MP4 file", _REMOVE, at=4, printable=True),
    Magic(b"\x7fELF", "a program", _REMOVE),
)
_PICKLE: Final = re.compile(rb"\x80[\x02-\x05].")
_SAFETENSORS: Final = re.compile(rb'.{6}\0\0\{\s*"', re.DOTALL)
_MARKS: Final = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_OBJECT: Final = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:')
_ARRAY: Final = re.compile(rb'\[\s*\{\s*("(?:[^"\\]|\\.)*"\s*:|\}\s*[,\]])')
IDX_MAGIC: Final = b"MMIDIDX\0\0"
IDX_HEAD: Final = struct.Struct("<9sQBQQ")
"""Of Megatron's index (elastic_trainer/data/megatron.py): magic, version, code of the tokens' type,
numbers of sequences and of document indices."""
IDX_LETTERS: Final = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
"""Code -> type of the tokens, as `array` has it."""
SHARD_HEAD_BYTES: Final = 1024
SHARDS: Final = {(20240520, 1): "H", (20240801, 7): "I"}
"""(magic, version) of llm.c's shards (elastic_trainer/data/nanogpt.py) -> type of the tokens."""

Wrong = tuple[str, str]
"""Code and message, which names the file, the place and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A file, and bytes of it."""

    file: Path
    size_bytes: int
    parts: tuple[tuple[int, bytes], ...]
    """First byte, and content; the first begins the file, the last ends it."""

    @property
    def head(self) -> bytes:
        """Its beginning."""
        return self.parts[0][1]

    @property
    def is_whole(self) -> bool:
        """Whether the first part is all of it."""
        return len(self.head) == self.size_bytes


def sample(file: Path) -> Sampled:
    """Read a file's samples: all of a small one.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        starts, length = [0], size
        if size > 3 * SAMPLE_BYTES:  # of tokens whole ones: 8 bytes at most
            starts = [0, (size - SAMPLE_BYTES) // 16 * 8, (size - SAMPLE_BYTES) // 8 * 8]
            length = SAMPLE_BYTES + 8
        parts = []
        for start in starts:
            stream.seek(start)
            parts.append((start, stream.read(length)))
    return Sampled(file=file, size_bytes=size, parts=tuple(parts))


def some_files(path: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """Return `path`, or up to `NUM_FILES` of the files below it whose names are `wanted`.

    Hidden files and folders are left out. Only the first `NUM_ENTRIES` entries are looked at.

    Raises:
        OSError: a folder cannot be read.
    """
    if not path.is_dir():
        return [path]
    found, _ = _listed(path, wanted)
    last = len(found) - 1
    chosen = {last * index // (NUM_FILES - 1) for index in range(NUM_FILES)} if found else set()
    return [Path(found[index]) for index in sorted(chosen)]


def _listed(path: Path, wanted: Callable[[str], bool]) -> tuple[list[str], bool]:
    """Return the wanted files below a folder, and whether that is all of them: see `some_files`."""
    found, folders, left = list[str](), [str(path)], NUM_ENTRIES
    while folders and left > 0:
        with os.scandir(folders.pop()) as entries:
            for entry in itertools.islice(entries, left):
                left -= 1
                if entry.name.startswith((".", "__pycache__")):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif wanted(entry.name) and entry.is_file():
                    found.append(entry.path)
    return sorted(found), left > 0


def examine_text(files: Sequence[Path]) -> Wrong | None:
    """Return what is wrong with text files, or None.

    A folder may have files of JSON among others, as source code does. If all that are looked at are
    JSON, but for what tells about a data set, the texts lie in them.

    Raises:
        OSError: one cannot be read.
    """
    samples = [each for each in map(sample, files) if each.size_bytes]
    for each in samples:
        if wrong := no_text(each):
            return wrong
    told = [each for each in samples if len(samples) == 1 or not _ABOUT.fullmatch(each.file.name)]
    kinds = [json_of(each) for each in told]
    return _instead_of_json(told[0], kinds[0]) if told and all(kinds) else None


def no_text(sampled: Sampled) -> Wrong | None:
    """Return why a file is not text in UTF-8; None if it is, up to a few odd bytes."""
    file = sampled.file
    odd = _odd(sampled)
    if found := binary_kind(sampled, printable=odd is not None):
        return "HF712", f"{file} is {found[0]} (by its first bytes), not text: {found[1]}"
    return ("HF712", f"{file} {odd}") if odd else None


def binary_kind(sampled: Sampled, *, printable: bool) -> tuple[str, str] | None:
    """Return what a file is by its magic bytes, and what to do; None: not known.

    `printable`: those that a text could begin with count as well.
    """
    head = sampled.head
    if head[:4] == b"PAR1" == sampled.parts[-1][1][-4:] and sampled.size_bytes >= 12:
        return "a parquet file", _PARQUET
    for magic in MAGIC:
        if head.startswith(magic.prefix, magic.at) and (printable or not magic.printable):
            return magic.name, magic.advice
    if _PICKLE.match(head):
        return "a pickle of Python", _CONVERT
    if _SAFETENSORS.match(head) and int.from_bytes(head[:8], "little") < sampled.size_bytes:
        return "a safetensors file", _REMOVE
    return None


def _odd(sampled: Sampled) -> str | None:
    """Return what is wrong with a file's bytes as text in UTF-8, and the way out."""
    for mark, name in _MARKS.items():
        if sampled.head.startswith(mark):
            return f"is in {name} (by its first bytes), not UTF-8: iconv -f {name} -t UTF-8"
    total = sum(len(part) for _, part in sampled.parts)
    if wide := _wide(sampled):
        return f"looks like {wide[0]} (zero bytes in order), not UTF-8: iconv -f {wide[1]} -t UTF-8"
    if (controls := _count_controls(sampled)) > max(FEW_BYTES, CONTROL_SHARE * total):
        found = ((start, _CONTROL.search(part)) for start, part in sampled.parts)
        at = _place(sampled, next(start + each.start() for start, each in found if each))
        return (
            f"is not text: {controls} of {total} bytes looked at are control characters, the first "
            f"is {at}: name a file with text; of tokens write data.format: nanogpt"
        )
    decoded = [_decoded(sampled, start, part) for start, part in sampled.parts]
    bad = sum(count for count, _ in decoded)
    if bad > max(FEW_BYTES, ODD_SHARE * total):
        at = _place(sampled, next(at for count, at in decoded if count))
        return (
            f"is not UTF-8: {bad} of {total} bytes looked at do not decode, the first is {at}: "
            "give its encoding to iconv -f ENCODING -t UTF-8, or name a file with text"
        )
    return None


def _count_controls(sampled: Sampled) -> int:
    return sum(len(part) - len(part.translate(None, _CONTROLS)) for _, part in sampled.parts)


def _place(sampled: Sampled, at: int) -> str:
    """Return `byte 1200, line 3`; the line where it is known."""
    if at >= len(sampled.head):
        return f"byte {at}"
    line = sampled.head.count(b"\n", 0, at) + 1
    return f"byte {at}, line {line}"


def _wide(sampled: Sampled) -> tuple[str, str] | None:
    """Return the encoding of two or four bytes a character that the zero bytes show."""
    head = sampled.head[: len(sampled.head) // 4 * 4]
    if len(head) < FEW_BYTES:
        return None
    zeros = [head[at::4].count(0) * 4 / len(head) for at in range(4)]
    letters = head.translate(None, b"\0")
    if len(_CONTROL.findall(letters)) > 0.05 * len(letters):
        return None  # numbers
    for name, empty, full in (
        ("UTF-32LE", (2, 3), (0,)),
        ("UTF-32BE", (0, 1), (3,)),
        ("UTF-16LE", (1, 3), (0, 2)),
        ("UTF-16BE", (0, 2), (1, 3)),
    ):
        if all(zeros[at] > 0.4 for at in empty) and all(zeros[at] < 0.1 for at in full):
            return name[:-2], name
    return None


def _decoded(sampled: Sampled, start: int, part: bytes) -> tuple[int, int]:
    """Return how many places of a part are not UTF-8, and where in the file the first is."""
    # A part may begin and end within a character.
    skip = len(part[:3]) - len(part[:3].lstrip(bytes(range(0x80, 0xC0)))) if start else 0
    final = start + len(part) == sampled.size_bytes
    own = part[skip:]
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(own, final)
    bad = text.count("\ufffd") - own.count("\ufffd".encode())
    if not bad:
        return 0, 0
    try:
        codecs.getincrementaldecoder("utf-8")().decode(own, final)
    except UnicodeDecodeError as error:
        return bad, start + skip + error.start
    return 0, 0


def json_of(sampled: Sampled) -> Literal["lines", "array", "object"] | None:
    """Return how a file is JSON, by its beginning; None: it is not."""
    head = sampled.head.removeprefix(codecs.BOM_UTF8).lstrip()
    if _ARRAY.match(head):
        return "array"
    if not _OBJECT.match(head):
        return None
    lines = [line for line in _whole_lines(sampled, head) if line.strip()]
    if not lines:
        return "lines"  # one that is longer than the sample
    if all(_is_object(line) for line in lines[:NUM_LINES]):
        return "lines"
    if not sampled.is_whole:
        return "object" if not lines[0].rstrip().endswith(b"}") else None
    return "object" if _is_object(head) else None


def _whole_lines(sampled: Sampled, head: bytes) -> list[bytes]:
    lines = head.split(b"\n")
    return lines if sampled.is_whole else lines[:-1]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _instead_of_json(sampled: Sampled, kind: str | None) -> Wrong:
    """Return what is wrong where texts were said and JSON lies, with the way out."""
    file = sampled.file
    keys = re.findall(rb'"((?:[^"\\]|\\.){1,40})"\s*:', sampled.head.split(b"\n")[0] or b"")
    names = {key.decode(errors="replace") for key in keys}
    if names & _OF_EXAMPLES:
        advice = "write data.format: sft"
    else:
        advice = "write data.format: jsonl"
        if "text" not in names:
            advice += ", and in data.key the key of its texts"
    as_is = "to train on it as it is, write data.as_is: true"
    if kind == "lines":
        return "HF710", f"{file} is JSON lines (line 1), not text: {advice}; {as_is}"
    return (
        "HF710",
        f"{file} is one JSON {kind} (line 1), not text: {_LINES}, then {advice}; {as_is}",
    )


def examine_records(files: Sequence[Path], data_format: str, key: str) -> Wrong | None:
    """Return what is wrong with files of records, or None. `key`: where jsonl has its texts.

    Raises:
        OSError: one cannot be read.
    """
    for each in filter(lambda one: one.size_bytes, map(sample, files)):
        file = each.file
        kind = binary_kind(each, printable=False)
        is_named = next((end for end in _MUST_BE if file.name.endswith(end)), "")
        if is_named and (kind is None or _MUST_BE[is_named] not in kind[0]):
            holds = kind[0] if kind else "something else, or damaged"
            return "HF710", (
                f"{file} holds {holds} (by its first and last bytes): copy it again, or give it "
                "the name of what it is"
            )
        if is_named in TABLES:
            if data_format not in ("sft", is_named[1:]):
                return "HF710", f"{file} is not {data_format}: write data.format: {is_named[1:]}"
            continue
        if data_format in ("parquet", "arrow"):
            found = kind or ("no table", "name a file that is, by its suffix")
            if _MUST_BE[f".{data_format}"] in found[0]:
                found = ("unnamed", f"give it a name that ends in .{data_format}")
            elif json_of(each):
                found = ("JSON", "write data.format: jsonl")
            return "HF710", f"{file} is {found[0]}, not {data_format} by its name: {found[1]}"
        if kind and not is_named:
            packed = "compressed" in kind[0] and kind[0].endswith(("gzip", "Zstandard"))
            advice = "unpack it, or end its name in .gz or .zst" if packed else kind[1]
            return "HF710", f"{file} is {kind[0]}, not JSON lines: {advice}"
        if not is_named and (wrong := _wrong_lines(each, data_format, key)):
            return wrong
    return None


_MUST_BE: Final = {
    ".parquet": "parquet",
    ".arrow": "Arrow",
    ".gz": "gzip",
    ".zst": "Zstandard",
}
"""What the bytes of files with these suffixes say that they are."""


def _wrong_lines(sampled: Sampled, data_format: str, key: str) -> Wrong | None:
    """Return what is wrong with a file of JSON lines, by its first one."""
    file, head = sampled.file, sampled.head.removeprefix(codecs.BOM_UTF8).lstrip()
    kind = json_of(sampled)
    if kind in ("array", "object"):
        return "HF710", f"{file} is one JSON {kind} (line 1), not a line a record: {_LINES}"
    if not head.startswith(b"{") and data_format == "jsonl":
        if odd := _odd(sampled):
            return "HF712", f"{file} {odd}"
        return "HF710", f"{file}: line 1 is no JSON object: {_AS_TEXT}"
    line = head.split(b"\n")[0]
    record = json.loads(line) if _is_object(line) else {}
    if {"chosen", "rejected"} <= record.keys():
        return "HF708", (
            f"{file}: line 1 is a preference pair (chosen, rejected), on which nothing here is "
            "trained: for DPO run its script by command:; to fine-tune on what was chosen, write "
            "it as messages"
        )
    if record and data_format == "jsonl" and key not in record:
        by_length = sorted(
            (name for name, value in record.items() if isinstance(value, str)),
            key=lambda name: -len(record[name]),
        )
        advice = f"write data.key: {by_length[0]}" if by_length else "no key has a text"
        if _OF_EXAMPLES & record.keys():
            advice = "write data.format: sft"
        return "HF713", f"{file}: line 1 has no {key!r} among {', '.join(record)}: {advice}"
    return None


def examine_nanogpt(files: Sequence[Path], vocab_size: int) -> Wrong | None:
    """Return what is wrong with token files of nanoGPT or llm.c, or None.

    Raises:
        OSError: one cannot be read.
    """
    for each in filter(lambda one: one.size_bytes, map(sample, files)):
        head = array("i", each.head[:8].ljust(8, b"\0"))
        letter = SHARDS.get((head[0], head[1]))
        if letter is None and (found := _no_tokens(each)):
            return "HF710", f"{each.file} is {found[0]}, not tokens: {found[1]}"
        parts = list(each.parts)
        if letter is not None:
            parts[0] = (SHARD_HEAD_BYTES, each.head[SHARD_HEAD_BYTES:])
        if wrong := _outside(each.file, parts, letter or "H", vocab_size):
            return wrong
    return None


def _no_tokens(sampled: Sampled) -> tuple[str, str] | None:
    """Return what a plain file of uint16 is instead, and what to do; None: it may be tokens."""
    if found := binary_kind(sampled, printable=False):
        return found
    # Tokens below 8192 have a control character for one byte, and no corpus is without those.
    if sampled.size_bytes >= 256 and not _count_controls(sampled) and _odd(sampled) is None:
        return "text", "write data.format: text"
    return None


def examine_megatron(path: Path, vocab_size: int) -> Wrong | None:
    """Return what is wrong with tokens of some sequences of a Megatron dataset, or None.

    A pair that cannot be opened, or is damaged, is left to the reader.

    Raises:
        OSError: a file cannot be read.
    """
    prefix = megatron_prefixes(path)[0]
    bin_file, idx_file = (Path(f"{prefix}{suffix}") for suffix in MEGATRON_PAIR)
    with open_regular(idx_file) as idx, open_regular(bin_file) as tokens:
        head = idx.read(IDX_HEAD.size).ljust(IDX_HEAD.size, b"\0")
        magic, _, code, number, _ = IDX_HEAD.unpack(head)
        letter = IDX_LETTERS.get(code)
        if magic != IDX_MAGIC or letter is None:
            return None
        parts = []
        for sequence in sorted({(number - 1) * index // 7 for index in range(8)} if number else ()):
            idx.seek(IDX_HEAD.size + 4 * sequence)
            size = int.from_bytes(idx.read(4), "little", signed=True)
            idx.seek(IDX_HEAD.size + 4 * number + 8 * sequence)
            pointer = int.from_bytes(idx.read(8), "little", signed=True)
            if size > 0 <= pointer:
                tokens.seek(pointer)
                length = min(size * array(letter).itemsize, SAMPLE_BYTES)
                parts.append((pointer, tokens.read(length)))
    return _outside(bin_file, parts, letter, vocab_size)


def _outside(
    file: Path, parts: Iterable[tuple[int, bytes]], letter: str, vocab_size: int
) -> Wrong | None:
    """Return where a token is outside the vocabulary; None: nowhere in the parts."""
    for at, part in parts:
        tokens = array(letter)
        tokens.frombytes(part[: len(part) // tokens.itemsize * tokens.itemsize])
        if sys.byteorder == "big":
            tokens.byteswap()
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < vocab_size:
                place = at + tokens.index(token) * tokens.itemsize
                return "HF703", (
                    f"{file} has token {token} at byte {place}, the model's vocabulary is "
                    f"{vocab_size}: use the tokenizer the corpus was made with, or a larger "
                    "vocab_size"
                )
    return None


def examine(
    path: Path, data_format: str, *, vocab_size: int, key: str = "text", as_is: bool = False
) -> Wrong | None:
    """Return why the corpus `path` is not what `data_format` says, or None.

    Reads at most `NUM_FILES` files, three samples of each. `key`: where records have their texts.
    `as_is`: texts are taken as they are.

    Raises:
        OSError: a file or folder cannot be read.
    """
    if data_format == "megatron":
        return examine_megatron(path, vocab_size)
    if data_format == "nanogpt":
        return examine_nanogpt(some_files(path, lambda name: name.endswith(".bin")), vocab_size)
    if data_format in SUFFIXES:
        if (path / "dataset_dict.json").exists():
            splits = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir()))
            return "HF701", f"{path} holds the splits of a data set: name one of {splits}"
        ends = SUFFIXES[data_format]
        return examine_records(some_files(path, lambda name: name.endswith(ends)), data_format, key)
    if data_format == "text" and not as_is:
        return examine_text(some_files(path, lambda name: not name.endswith(NOT_TEXT)))
    return None


def count_tokens(path: Path, data_format: str, tokenizer: str) -> int | None:
    """Return how many tokens a corpus has, or None where the sizes of its files do not say it.

    They do of tokens, and of text under `bytes`, in folders of less than `NUM_ENTRIES` entries.

    Raises:
        OSError: a file or folder cannot be read.
    """
    if data_format == "megatron":
        bin_file, idx_file = (Path(f"{megatron_prefixes(path)[0]}{end}") for end in MEGATRON_PAIR)
        with open_regular(idx_file) as idx:
            _, _, code, *_ = IDX_HEAD.unpack(idx.read(IDX_HEAD.size).ljust(IDX_HEAD.size, b"\0"))
        letter = IDX_LETTERS.get(code)
        return None if letter is None else bin_file.stat().st_size // array(letter).itemsize
    if data_format == "nanogpt":
        files, is_all = _files_of(path, lambda name: name.endswith(".bin"))
        return sum(map(_shard_tokens, files)) if is_all else None
    if data_format == "text" and tokenizer == "bytes":
        files, is_all = _files_of(path, lambda name: not name.endswith(NOT_TEXT))
        separators = len(files)
        return sum(each.stat().st_size for each in files) + separators if is_all else None
    return None


def _files_of(path: Path, wanted: Callable[[str], bool]) -> tuple[list[Path], bool]:
    if not path.is_dir():
        return [path], True
    found, is_all = _listed(path, wanted)
    return [Path(each) for each in found], is_all


def _shard_tokens(file: Path) -> int:
    with open_regular(file) as stream:
        magic, version, count = struct.unpack("<3i", stream.read(12).ljust(12, b"\0"))
        return count if (magic, version) in SHARDS else os.fstat(stream.fileno()).st_size // 2


def told_of(key: str, message: str) -> str:
    """Return a message about `data.path`, told of the corpus at `key` of the job file instead."""
    if not key.startswith("data.mix."):
        return message.replace("data.path", key, 1)
    for name in ("path", "key", "format"):
        message = message.replace(f"data.{name}", key if name == "path" else f"{key}.{name}", 1)
    return message
