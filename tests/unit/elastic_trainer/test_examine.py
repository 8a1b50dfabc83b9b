"""What files hold by their samples: what is refused, and that no text is."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import sqlite3
import struct
import tarfile
import time
import zipfile
from array import array
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus_of, megatron, packed, shard
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.data import DataError
from elastic_trainer.storage.examine import (
    CONTROL_SHARE,
    NUM_FILES,
    SAMPLE_BYTES,
    examine,
    sample,
    some_files,
)

PROSE = "Die Vögel flögen höher, wäre der Föhn nicht so müde über die Gärten gezogen. " * 40
LINES = "".join(f"{json.dumps({'text': f'page {at}', 'id': at})}\n" for at in range(99))
PIXELS = random.Random(0).randbytes(4000)


def sqlite(folder):
    base = sqlite3.connect(folder / "base")
    base.execute("create table t (a text)")
    base.commit()
    base.close()
    return (folder / "base").read_bytes()


def archive(folder):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("a.txt")
        info.size = len(PROSE.encode())
        tar.addfile(info, io.BytesIO(PROSE.encode()))
    return out.getvalue()


def zipped(folder):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        target.writestr("a.txt", PROSE)
    return out.getvalue()


def array_file(folder):
    out = io.BytesIO()
    np.save(out, np.arange(500))
    return out.getvalue()


SAFETENSORS = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
REFUSED = {
    "parquet": (b"PAR1" + PROSE.encode() + b"\x15\x04PAR1", "HF712", "parquet"),
    "arrow": (b"ARROW1\0\0" + PIXELS, "HF712", "Arrow"),
    "arrow stream": (b"\xff\xff\xff\xff\x10\1\0\0" + PIXELS, "HF712", "Arrow"),
    "avro": (b"Obj\x01" + PIXELS, "HF712", "Avro"),
    "orc": (b"ORC" + PIXELS, "HF712", "ORC"),
    "feather": (b"FEA1" + PIXELS, "HF712", "Feather"),
    "sqlite": (sqlite, "HF712", "SQLite"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + PROSE.encode(), "HF712", "HDF5"),
    "numpy": (array_file, "HF712", "NumPy"),
    "pickle": (pickle.dumps([PROSE] * 9), "HF712", "pickle"),
    "safetensors": (
        struct.pack("<Q", len(SAFETENSORS)) + SAFETENSORS + b"abcd",
        "HF712",
        "safetensors",
    ),
    "gguf": (b"GGUF\3\0\0\0" + PIXELS, "HF712", "GGUF"),
    "gzip": (gzip.compress(PROSE.encode()), "HF712", "gzip -d"),
    "zstandard": (b"\x28\xb5\x2f\xfd" + PIXELS, "HF712", "zstd -d"),
    "bzip2": (bz2.compress(PROSE.encode()), "HF712", "bzip2 -d"),
    "xz": (lzma.compress(PROSE.encode()), "HF712", "xz -d"),
    "lz4": (b"\x04\x22\x4d\x18" + PIXELS, "HF712", "lz4 -d"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + PIXELS, "HF712", "7z"),
    "zip": (zipped, "HF712", "zip"),
    "tar": (archive, "HF712", "tar -xf"),
    "pdf": (b"%PDF-1.4\n" + PIXELS, "HF712", "pdftotext"),
    "png": (b"\x89PNG\r\n\x1a\n" + PIXELS, "HF712", "PNG"),
    "jpeg": (b"\xff\xd8\xff\xe0" + PIXELS, "HF712", "JPEG"),
    "gif": (b"GIF89a" + PIXELS, "HF712", "GIF"),
    "webp": (b"RIFF" + PIXELS, "HF712", "WebP"),
    "mp4": (b"\0\0\0\x20ftypisom" + PIXELS, "HF712", "MP4"),
    "mp3": (b"ID3\4" + PIXELS, "HF712", "MP3"),
    "ogg": (b"OggS" + PIXELS, "HF712", "Ogg"),
    "flac": (b"fLaC" + PIXELS, "HF712", "FLAC"),
    "elf": (b"\x7fELF\2\1\1" + PIXELS, "HF712", "program"),
    "random": (PIXELS, "HF712", "name a file with text"),
    "utf-16": (PROSE.encode("utf-16"), "HF712", "iconv -f UTF-16"),
    "utf-16 without a mark": (PROSE.encode("utf-16-le"), "HF712", "iconv -f UTF-16LE"),
    "utf-16, big end first": (PROSE.encode("utf-16-be"), "HF712", "iconv -f UTF-16BE"),
    "utf-32": (PROSE.encode("utf-32"), "HF712", "iconv -f UTF-32"),
    "utf-32 without a mark": (PROSE.encode("utf-32-be"), "HF712", "iconv -f UTF-32BE"),
    "latin-1": (PROSE.encode("latin-1"), "HF712", "byte 5, line 1"),
    "shift-jis": (("吾輩は猫である。名前はまだ無い。" * 40).encode("shift-jis"), "HF712", "iconv"),
    "gb18030": (("大学之道，在明明德，在亲民。" * 40).encode("gb18030"), "HF712", "iconv"),
    "koi8-r": (("Все счастливые семьи похожи. " * 40).encode("koi8-r"), "HF712", "iconv"),
    "never written": (PROSE.encode()[:999] + bytes(60_000), "HF712", "byte 999, line 1"),
    "tokens": (packed("H", [at % 400 for at in range(5000)]), "HF712", "nanogpt"),
    "shard of tokens": (struct.pack("<ii", 20240520, 1) + bytes(9999), "HF712", "nanogpt"),
    "index of Megatron": (b"MMIDIDX\0\0" + bytes(99), "HF712", "megatron"),
    "JSON lines": (LINES.encode(), "HF710", "JSON lines (line 1)"),
    "JSON lines, with a mark": (b"\xef\xbb\xbf" + LINES.encode(), "HF710", "JSON lines"),
    "a long line of JSON": (json.dumps({"text": PROSE * 99}).encode(), "HF710", "JSON lines"),
    "chats": (b'{"messages": [{"role": "user", "content": "a"}]}\n', "HF710", "format: sft"),
    "a JSON array": (json.dumps([{"text": PROSE}] * 9).encode(), "HF710", "JSON array"),
    "a JSON array, indented": (json.dumps([{"a": 1}] * 9, indent=1).encode(), "HF710", "array"),
    "a JSON object": (json.dumps({"data": [PROSE] * 9}, indent=2).encode(), "HF710", "object"),
}


@pytest.mark.parametrize(("content", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_text_is_refused_with_the_way_out(content, code, words, tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_bytes(content(tmp_path) if callable(content) else content)
    found, message = examine(file, "text", vocab_size=256)
    assert found == code
    assert str(file) in message
    assert words in message
    assert ": " in message.removeprefix(str(file)), "and what to do"
    with pytest.raises(DataError, match=rf"^{code} data\.path: "):
        corpus_of(file, tmp_path)
    assert corpus_of(file, tmp_path, as_is=True).num_windows > 10


def code_of(suffix):
    root = Path(__file__).parents[3]
    return "".join(file.read_text() for file in sorted(root.glob(f"tests/**/*{suffix}"))[:9])


TEXTS = {
    "German": PROSE,
    "Japanese": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n" * 900,
    "Russian": "Все счастливые семьи похожи друг на друга.\n" * 900,
    "Arabic, right to left": "\u202bكان يا ما كان في قديم الزمان\u202c\n" * 900,
    "Hindi": "सभी मनुष्य जन्म से स्वतंत्र हैं।\n" * 900,
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 ok\n" * 5000,
    "Python": code_of(".py"),
    "YAML": code_of(".yaml"),
    "code that begins with a brace": '{ x = 1; "a": }\nfor (;;) {}\n' * 99,
    "JSON by one line, then prose": '{"a": 1}\nThen he said nothing.\n' * 9,
    "a list of numbers": "[1, 2, 3]\n" * 99,
    "a list in brackets": '["a", "b"]\n' * 99,
    "BOM": "\ufeff" + PROSE,
    "tabs and form feeds": "a\tb\fc\r\n" * 999,
    "a log with colours": "\x1b[31merror\x1b[0m: it failed\n" * 999,
    "an overstruck manual": "N\bNA\bAM\bME\bE\n" * 999,
    "fields by control-A": "name\x01address\x01a telephone number\n" * 999,
    "begins as ORC": "ORCHESTRA " * 99,
    "begins as GIF": "GIF89a is a format of pictures. " * 99,
    "begins as PDF": "%PDF-1.4 begins a PDF. " * 99,
    "begins as parquet": "PAR1 is a code. " * 99,
    "begins as bzip2": "BZhang wrote it. " * 99,
    "begins as RIFF": "RIFFS in the key of A. " * 99,
    "numbers": "0 1 2 3 4 5\n" * 9999,
    "base64": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lE\n" * 999,
    "replacement characters": "it was \ufffd\ufffd lost\n" * 999,
    "one letter": "a",
    "a line end": "\n",
    "HTML": "<html><body>é</body></html>\n" * 999,
    "half of a Megatron name": "MMIDIDX is the magic of an index. " * 99,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_pass(text, tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text(text, encoding="utf-8")
    assert examine(file, "text", vocab_size=256) is None


@pytest.mark.parametrize(
    "odd",
    [b"\xe9", b"\xff" * 16, b"\0" * 16, b"\x1a", b"\xed\xa0\x80", "ü".encode()[:1]],
    ids=["Latin-1", "16 bytes", "16 zeros", "end of file of DOS", "a surrogate", "half a letter"],
)
@pytest.mark.parametrize("at", [0, 700, -1])
def test_a_few_odd_bytes_pass(odd, at, tmp_path):
    content = PROSE.encode()
    at = len(content) if at < 0 else at
    file = tmp_path / "corpus.txt"
    file.write_bytes(content[:at] + odd + content[at:])
    if not (odd == b"\xff" * 16 and at == 0):  # which begins as a stream of Arrow does
        assert examine(file, "text", vocab_size=256) is None


WORDS = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=40)


@given(st.lists(WORDS, max_size=30), st.integers(1, 400))
def test_any_text_without_control_characters_passes(tmp_path_factory, lines, times):
    text = "\n".join(lines) * times
    if text.lstrip("\ufeff \n\t").startswith(("{", "[")):
        text = f"x{text}"
    file = tmp_path_factory.getbasetemp() / "any.txt"
    file.write_text(text, encoding="utf-8")
    assert examine(file, "text", vocab_size=256) is None


@given(st.integers(0, 3), st.integers(1, 3))
def test_letters_cut_by_a_sample_are_no_odd_bytes(tmp_path_factory, skip, width):
    letter = {1: "é", 2: "猫", 3: "👍"}[width]
    file = tmp_path_factory.getbasetemp() / "wide.txt"
    file.write_text("a" * skip + letter * (3 * SAMPLE_BYTES), encoding="utf-8")
    assert len(sample(file).parts) == 3
    assert examine(file, "text", vocab_size=256) is None


@given(st.floats(CONTROL_SHARE * 1.3, 1.0), st.integers(0, 2**32))
def test_many_control_characters_never_pass(tmp_path_factory, share, seed):
    rng = random.Random(seed)
    file = tmp_path_factory.getbasetemp() / "odd.txt"
    file.write_bytes(bytes(rng.choice(b"\1\2\6\x1c") if rng.random() < share else 97
                           for _ in range(4000)))  # fmt: skip
    code, _ = examine(file, "text", vocab_size=256)
    assert code == "HF712"


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_beginning_middle_and_end_are_looked_at(where, tmp_path):
    content = bytearray(b"Once upon a time. " * 20_000)
    at = int(where * (len(content) - SAMPLE_BYTES))
    content[at : at + SAMPLE_BYTES] = random.Random(1).randbytes(SAMPLE_BYTES)
    (tmp_path / "a.txt").write_bytes(content)
    code, _ = examine(tmp_path / "a.txt", "text", vocab_size=256)
    assert code == "HF712"


def test_a_folder_of_code_may_have_json_and_one_of_json_lines_may_not(tmp_path):
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / "data.jsonl").write_text(LINES)
    (tmp_path / "main.js").write_text("let x = 1;\n")
    assert examine(tmp_path, "text", vocab_size=256) is None
    (tmp_path / "main.js").unlink()
    (tmp_path / "README.md").write_text("About the data.\n")
    (tmp_path / "LICENSE").write_text("None.\n")
    code, message = examine(tmp_path, "text", vocab_size=256)
    assert code == "HF710"
    assert "data.jsonl" in message
    (tmp_path / "data.jsonl").unlink()
    (tmp_path / "package.json").unlink()
    assert examine(tmp_path, "text", vocab_size=256) is None


def test_on_the_node_every_file_of_a_folder_is_looked_at(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for at in range(30):
        (folder / f"{at:02}.txt").write_text("text")
    (folder / "15.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + PIXELS)
    assert examine(folder, "text", vocab_size=256) is None
    with pytest.raises(DataError, match=r"^HF712 data\.path: .*15\.txt is a PNG"):
        corpus_of(folder, tmp_path)


def test_files_are_chosen_from_beginning_to_end(tmp_path):
    assert some_files(tmp_path, lambda _: True) == []
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "0").touch()
    for at in range(100):
        (tmp_path / f"{at:03}").touch()
    chosen = [int(file.name) for file in some_files(tmp_path, lambda _: True)]
    assert len(chosen) == NUM_FILES
    assert (chosen[0], chosen[-1]) == (0, 99)
    assert some_files(tmp_path / "007", lambda _: False) == [tmp_path / "007"]


@pytest.mark.parametrize("at", [0, 70_001, 99_999])
@pytest.mark.parametrize("letter", ["H", "I"])
def test_tokens_outside_the_vocabulary_are_found_with_their_byte(letter, at, tmp_path):
    tokens = array(letter, [7] * 100_000)
    tokens[at] = 300
    if letter == "I":
        file = shard(tmp_path / "s.bin", tokens, magic=20240801, version=7, letter=letter)
    else:
        file = tmp_path / "s.bin"
        file.write_bytes(tokens.tobytes())
    byte = at * tokens.itemsize + (1024 if letter == "I" else 0)
    found = examine(file, "nanogpt", vocab_size=256)
    if at == 70_001:
        assert found is None, "not of the samples: found as it is read"
    else:
        code, message = found
        assert code == "HF703"
        assert f"token 300 at byte {byte}," in message
    assert examine(file, "nanogpt", vocab_size=301) is None


@pytest.mark.parametrize(("letter", "token"), [("i", -7), ("H", 256), ("q", 2**40), ("B", 200)])
def test_tokens_of_megatron_are_examined(letter, token, tmp_path):
    megatron(tmp_path / "c", [[1, 2, 3], [token, 5]], letter=letter)
    code, message = examine(tmp_path / "c", "megatron", vocab_size=200)
    assert code == "HF703"
    assert f"token {token} " in message
    if token > 0:
        assert examine(tmp_path / "c.idx", "megatron", vocab_size=token + 1) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (PROSE.encode(), "data.format: text"),
        (b"PAR1" + PIXELS + b"PAR1", "parquet"),
        (gzip.compress(PIXELS), "gzip -d"),
        (b"MMIDIDX\0\0" + bytes(101), "data.format: megatron"),
    ],
    ids=["text", "parquet", "gzip", "index"],
)
def test_what_holds_no_tokens_is_told_from_those_of_nanogpt(content, words, tmp_path):
    (tmp_path / "a.bin").write_bytes(content)
    code, message = examine(tmp_path / "a.bin", "nanogpt", vocab_size=65536)
    assert code == "HF710"
    assert words in message


@given(st.lists(st.integers(0, 50256), min_size=200, max_size=400))
def test_tokens_pass(tmp_path_factory, tokens):
    file = tmp_path_factory.getbasetemp() / "tokens.bin"
    file.write_bytes(array("H", [*tokens, 198]).tobytes())
    assert examine(file, "nanogpt", vocab_size=50257) is None


def test_a_look_at_a_hundred_gigabytes_is_quick(tmp_path):
    for name in range(50):
        with (tmp_path / f"{name}.txt").open("wb") as file:
            file.write(PROSE.encode() * 10)
            file.truncate(2 << 30)  # a hole: takes no room
            file.seek(-SAMPLE_BYTES, 2)
            file.write(b"a" * SAMPLE_BYTES)
    begun = time.process_time()
    found = examine(tmp_path, "text", vocab_size=256)
    assert time.process_time() - begun < 0.5, "measured: 4 ms"
    assert found is not None, "holes are zeros"
