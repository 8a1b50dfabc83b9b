"""JSON lines, parquet and Arrow: each record once, the same tokens whoever encodes them."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from at_once import at_once
from corpora import corpus_of, raw_tokens, write_table
from hypothesis import given
from hypothesis import strategies as st
from test_data import tokenizer_file
from test_sft_data import CHAT

from elastic_trainer.data import Crew, DataError
from elastic_trainer.data import tokenised as module
from elastic_trainer.data.records import Span, place, records
from elastic_trainer.data.tokenised import parts_of
from elastic_trainer.storage.examine import COMPRESSED, examine

pa = pytest.importorskip("pyarrow")

TEXTS = [f"page {number} äöü 猫 " * (number % 7 + 1) for number in range(120)]
FORMATS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "stream.arrow", "arrow"]


def write(file, texts, *, key="text", rows=9):
    """Write records with texts in the format of the name."""
    lines = "".join(f"{json.dumps({'id': 1, key: text})}\n" for text in texts).encode()
    table = pa.table({key: pa.array(texts, pa.string()), "id": [1] * len(texts)})
    match file.name.split(".", 1)[1]:
        case "jsonl":
            file.write_bytes(lines)
        case "jsonl.gz":
            file.write_bytes(gzip.compress(lines))
        case "jsonl.zst":
            half = len(lines) // 2  # of two frames
            packed = (
                pa.compress(part, "zstd", asbytes=True) for part in (lines[:half], lines[half:])
            )
            file.write_bytes(b"".join(packed))
        case _:
            write_table(file, table, rows=rows)
    return file


def format_of(name):
    return name.split(".")[0] if name.startswith("jsonl") else name.split(".")[-1]


def opened(path, run, data_format, *, crew=None, **section):
    if crew is None:
        return corpus_of(path, run, format=data_format, **section)
    (run / "cache").mkdir(parents=True, exist_ok=True)
    return module.read_tokenised(
        path, data_format, key="text", tokenizer="bytes", cache_dir=run / "cache", crew=crew
    )


def expected(texts):
    return [token for text in texts if text for token in [*text.encode(), 0]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_its_texts_in_order(name, tmp_path):
    file = write(tmp_path / f"a.{name}", [*TEXTS, "", *TEXTS[:3]])
    corpus = opened(file, tmp_path / "run", format_of(name))
    assert raw_tokens(corpus) == expected([*TEXTS, *TEXTS[:3]])
    pinned = json.loads((tmp_path / "run" / "corpus.json").read_text())
    assert pinned["documents"] == len(TEXTS) + 3
    assert pinned["format"] == format_of(name)


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_is_its_files_in_the_order_of_their_names(name, tmp_path):
    folder = tmp_path / "d"
    (folder / "b").mkdir(parents=True)
    write(folder / "b" / f"1.{name}", TEXTS[:5])
    write(folder / f"a.{name}", TEXTS[5:9])
    (folder / "README.md").write_text("About.")
    assert raw_tokens(opened(folder, tmp_path, format_of(name))) == expected(
        [*TEXTS[5:9], *TEXTS[:5]]
    )


def test_another_key_is_another_corpus(tmp_path):
    file = write(tmp_path / "a.jsonl", TEXTS, key="content")
    assert raw_tokens(opened(file, tmp_path, "jsonl", key="content")) == expected(TEXTS)
    with pytest.raises(DataError, match=r"^HF713 data\.path: .*data\.key: content"):
        opened(file, tmp_path, "jsonl")


JSON_TEXTS = st.lists(st.text(max_size=30), max_size=25)


@given(JSON_TEXTS, st.lists(st.integers(0, 600), max_size=5), st.booleans())
def test_each_line_is_in_one_span(tmp_path_factory, texts, cuts, whole):
    file = tmp_path_factory.getbasetemp() / "spans.jsonl"
    content = "\n".join(json.dumps(text) for text in texts) + "\n" * whole
    file.write_bytes(content.encode())
    size = len(content.encode())
    at = sorted({0, size, *(cut for cut in cuts if cut < size)})
    spans = [Span(file=file, begin=a, end=b) for a, b in itertools.pairwise(at)]
    found = [pair for span in spans for pair in records(span)]
    assert [text for _, text in found] == texts
    lines = [int(place(file, at).rpartition(":")[2]) for at, _ in found]
    assert lines == list(range(1, len(texts) + 1))


@given(
    st.sampled_from(["a.parquet", "a.arrow", "a.stream.arrow"]),
    st.integers(1, 40),
    st.integers(1, 7),
    st.lists(st.floats(0, 1), max_size=4),
)
def test_each_row_is_in_one_span(tmp_path_factory, name, count, rows, cuts):
    texts = [f"{number}" for number in range(count)]
    file = write(tmp_path_factory.getbasetemp() / name, texts, rows=rows)
    size = file.stat().st_size
    at = sorted({0, size, *(int(cut * size) for cut in cuts)})
    spans = [Span(file=file, begin=a, end=b) for a, b in itertools.pairwise(at)]
    found = [(at, row["text"]) for span in spans for at, row in records(span, ["text"])]
    assert found == list(enumerate(texts))


SIZES = st.lists(
    st.tuples(st.sampled_from(["a.jsonl", "b.gz", "c.parquet"]), st.integers(0, 500)), max_size=20
)


@given(SIZES)
def test_parts_have_every_byte_once_and_cut_nothing_that_is_packed(sizes):
    named = [(Path(f"{at}-{name}"), size) for at, (name, size) in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_BYTES", 100)
        parts = parts_of(named)
    spans = [span for part in parts for span in part]
    for file, size in named:
        own = [span for span in spans if span.file == file]
        assert [span.begin for span in own] == [0, *(span.end for span in own)][: len(own)]
        assert (own[-1].end if own else 0) == size
        assert len(own) <= 1 or not file.name.endswith(COMPRESSED)
    for part in parts[:-1]:
        total = sum(span.end - span.begin for span in part)
        assert total == 100 or part[-1].file.name.endswith(COMPRESSED)
    assert [span.file for span in spans] == sorted(
        (span.file for span in spans), key=lambda file: int(file.name.split("-")[0])
    )


@pytest.mark.parametrize("name", ["jsonl", "parquet", "stream.arrow"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_tokens_do_not_depend_on_who_encodes(name, size, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 700)
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    file = write(tmp_path / f"a.{name}", TEXTS)
    found, beats, told = {}, [0] * size, []

    def work(rank):
        def beat():
            beats[rank] += 1

        crew = Crew(rank=rank, size=size, beat=beat, encoded=lambda *part: told.append(part))
        found[rank] = opened(file, tmp_path, format_of(name), crew=crew)

    ranks = iter(range(size))
    at_once(size, lambda: work(next(ranks)))
    for source in found.values():
        assert source.tokens[:].tolist() == expected(TEXTS)
        assert source.identity == found[0].identity
    assert all(beats)
    parts = len(list(tmp_path.glob("cache/*/*.idx")))
    assert parts > 5
    assert sorted(told) == [(part + 1, parts) for part in range(parts)]


def test_what_was_interrupted_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 700)
    file = write(tmp_path / "a.jsonl", TEXTS)
    opened(file, tmp_path, "jsonl")
    first, second, *others = sorted(tmp_path.glob("cache/*/*.idx"))
    times = [other.stat().st_mtime_ns for other in others]
    first.unlink()
    second.unlink()
    second.with_suffix(".bin").write_bytes(b"half")
    stale = first.with_name(f".{first.stem}.bin-00")
    stale.write_bytes(b"of a worker that was killed")
    assert raw_tokens(opened(file, tmp_path, "jsonl")) == expected(TEXTS)
    assert [other.stat().st_mtime_ns for other in others] == times
    assert not stale.exists()


def test_a_cached_corpus_is_opened_without_its_tokenizer(tmp_path, monkeypatch):
    file = write(tmp_path / "a.parquet", TEXTS)
    opened(file, tmp_path, "parquet")
    monkeypatch.setattr(module, "TextEncoder", None)
    monkeypatch.setattr(module, "records", None)
    assert raw_tokens(opened(file, tmp_path, "parquet")) == expected(TEXTS)


def test_who_waits_for_nothing_says_so_and_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    file = write(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(TimeoutError, match=r"000000\.idx"):
        opened(file, tmp_path, "jsonl", crew=Crew(rank=1, size=2, wait_s=0.01))


def test_another_corpus_is_refused_on_resume(tmp_path):
    file = write(tmp_path / "a.jsonl", TEXTS)
    opened(file, tmp_path, "jsonl")
    write(file, [*TEXTS[:-1], TEXTS[0]])
    with pytest.raises(DataError, match=r"^HF706 "):
        opened(file, tmp_path, "jsonl")


def test_a_part_is_a_dataset_of_megatron(tmp_path):
    file = write(tmp_path / "a.jsonl", TEXTS)
    opened(file, tmp_path, "jsonl")
    (folder,) = (tmp_path / "cache").iterdir()
    corpus = corpus_of(folder, tmp_path / "other", format="megatron")
    assert raw_tokens(corpus) == expected(TEXTS)


def test_a_tokenizer_encodes_records_and_ends_them(tmp_path):
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "sat"}}')
    file = tmp_path / "a.jsonl"
    texts = ("the cat", "cat sat", "\ud800 ran")
    file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    found = raw_tokens(opened(file, tmp_path, "jsonl", tokenizer=tokenizer))
    assert found == [0, 2, 3, 4, 0, 3, 4, 0, 1, 1, 4]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 400])
def test_a_long_text_is_encoded_in_pieces_with_its_ends_once(length, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARS", 16)
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    text = ("the cat sat " * 40)[:length].rstrip()
    (ids,) = module.TextEncoder(tokenizer, "sat")([text])
    known = {"the": 2, "cat": 3, "sat": 4}
    tokens = [0, *(known.get(word, 1) for word in text.split())]
    assert ids.tolist() == [*tokens, *([4] if tokens[-1] != 4 else [])]


@given(st.text("ab \n", max_size=99))
def test_pieces_are_the_text(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_CHARS", 8)
        pieces = list(module.pieces_of(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 8 for piece in pieces) or not text


def test_of_a_saved_data_set_the_files_are_those_it_lists(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    for at in range(2):
        write(folder / f"data-0000{at}.stream.arrow", TEXTS[at::2])
    write(folder / "cache-0123.stream.arrow", ["made by a map"])
    names = [{"filename": f"data-0000{at}.stream.arrow"} for at in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    found = raw_tokens(opened(folder, tmp_path, "arrow"))
    assert found == expected([*TEXTS[::2], *TEXTS[1::2]])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["saved"]}')
    with pytest.raises(DataError, match=r"^HF701 data\.path: .*\bsaved\b"):
        opened(tmp_path, tmp_path, "arrow")


REFUSED = {
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text": \n', "jsonl", "HF713", "a.jsonl:2"),
    "a number": ("a.jsonl", b'{"text": "a"}\n\n{"text": 1}\n', "jsonl", "HF713", "a.jsonl:3"),
    "no text later": ("a.jsonl", b'{"text": "a"}\n{"t": "b"}', "jsonl", "HF713", "its keys are t"),
    "no mapping": ("a.jsonl", b'{"text": "a"}\n"b"\n', "jsonl", "HF713", "no JSON object (str)"),
    "no text": (
        "a.jsonl",
        b'{"id": "a", "content": "long"}',
        "jsonl",
        "HF713",
        "data.key: content",
    ),
    "chats": ("a.jsonl", b'{"messages": []}\n', "jsonl", "HF713", "data.format: sft"),
    "an array": ("a.jsonl", b'[{"text": "a"}]', "jsonl", "HF710", "jq -c"),
    "an object": ("a.jsonl", b'{\n"text": "a"\n}', "jsonl", "HF710", "jq -c"),
    "prose": ("a.jsonl", b"Once upon a time\n", "jsonl", "HF710", "data.format: text"),
    "UTF-16": ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "jsonl", "HF712", "UTF-16"),
    "PNG": ("a.jsonl", b"\x89PNG\r\n\x1a\n", "jsonl", "HF710", "PNG"),
    "no gzip": ("a.jsonl.gz", b'{"text": "a"}\n', "jsonl", "HF710", "something else"),
    "gzip without its suffix": ("a.jsonl", gzip.compress(b"{}"), "jsonl", "HF710", "end its name"),
    "half of gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "a"}')[:-4], "jsonl", "HF707", "copy"),
    "half of zstd": (
        "a.jsonl.zst",
        pa.compress(b'{"text": "a"}' * 99, "zstd", asbytes=True)[:-3],
        "jsonl",
        "HF707",
        "copy",
    ),
    "half of parquet": ("a.parquet", b"PAR1" + bytes(99), "parquet", "HF710", "copy it again"),
    "parquet of nothing": (
        "a.parquet",
        b"PAR1" + bytes(99) + b"PAR1",
        "parquet",
        "HF707",
        "damaged",
    ),
    "JSON as parquet": ("a.jsonl", b'{"text": "a"}\n', "parquet", "HF710", "data.format: jsonl"),
    "parquet without its suffix": (
        "a",
        b"PAR1" + bytes(99) + b"PAR1",
        "parquet",
        "HF710",
        "ends in .parquet",
    ),
    "no Arrow": ("a.arrow", b"text" * 99, "arrow", "HF710", "something else"),
    "half of Arrow": ("a.arrow", b"ARROW1\0\0" + bytes(99), "arrow", "HF707", "damaged"),
    "empty": ("a.jsonl", b"", "jsonl", "HF702", "no text"),
    "empty texts": ("a.jsonl", b'{"text": ""}\n{"text": null}\n', "jsonl", "HF702", "no text"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_has_no_records_is_refused(case, tmp_path):
    name, content, data_format, code, words = case
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"^{code} data\.path: ") as raised:
        opened(tmp_path / name, tmp_path, data_format)
    assert words in str(raised.value)


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    for name in ("parquet", "arrow", "stream.arrow"):
        file = write(tmp_path / f"a.{name}", TEXTS, key="content")
        with pytest.raises(DataError, match=r"^HF713 .*no column text: .* content, id"):
            opened(file, tmp_path / name, format_of(name))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    file = write(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"^HF714 data\.format: .*holdfast-ml\[arrow\]"):
        opened(file, tmp_path, "parquet")


def test_check_finds_tables_without_pyarrow(tmp_path, monkeypatch):
    files = [write(tmp_path / f"a.{name}", TEXTS) for name in FORMATS]
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for file, name in zip(files, FORMATS, strict=True):
        assert examine(file, format_of(name), vocab_size=256) is None
        assert examine(file, "text", vocab_size=256) is not None


EXAMPLES = [{"messages": CHAT}, {"messages": CHAT[:2]}]


@pytest.mark.parametrize("name", ["parquet", "stream.arrow", "jsonl.gz"])
def test_chats_of_a_table_are_those_of_lines(name, tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(f"{json.dumps(example)}\n" for example in EXAMPLES))
    file = tmp_path / f"b.{name}"
    if name == "jsonl.gz":
        file.write_bytes(gzip.compress(lines.read_bytes()))
    else:
        rows = [{**example, "source": "x", "prompt": None} for example in EXAMPLES]
        write_table(file, pa.Table.from_pylist(rows))
    of_lines, of_table = (
        corpus_of(each, tmp_path / each.name.replace(".", "-"), seq_len=160, format="sft")
        for each in (lines, file)
    )
    assert of_table.windows.digest == of_lines.windows.digest


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_preference_pairs_are_refused_with_what_to_use(name, tmp_path):
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    if name == "a.jsonl":
        (tmp_path / name).write_text(json.dumps(pair) + "\n")
    else:
        write_table(tmp_path / name, pa.Table.from_pylist([pair]))
    with pytest.raises(DataError, match=r"^HF708 data\.path: .*preference pair.*messages"):
        corpus_of(tmp_path / name, tmp_path, format="sft")
