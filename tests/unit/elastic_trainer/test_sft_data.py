"""Examples in JSON lines: their tokens, which of them count, and what is refused."""

from __future__ import annotations

import gzip
import json

import pytest
from at_once import at_once
from corpora import corpus_of, write_table
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from elastic_trainer.data import IGNORED, Crew, DataError, tokenised
from elastic_trainer.data.sft import _Encoder, read_sft
from elastic_trainer.data.tokenised import ALONE
from elastic_trainer.data.tokenizer import ChatTemplate

CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "äö?"},
    {"role": "assistant", "content": "é!"},
]
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start|>{{ m.role }}<|end|>\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n{% endif %}"
)


def written(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def opened(path, run, *, seq_len=64, **section):
    return corpus_of(path, run, seq_len=seq_len, format="sft", **section)


def byte_level(folder, **config):
    """A byte-level tokenizer with special tokens and a tokenizer_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate([*alphabet, "Ġo", "Ġok"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ġ", "o"), ("Ġo", "k")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<bos>", "<eos>", "<|start|>", "<|end|>", "<|eot|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def encoded(folder, record):
    """Return the example's tokens as text, and the text of those that count."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encode = _Encoder(tokenizer, ChatTemplate(str(folder / "tokenizer.json")))
    tokens, counted = encode(record)
    chosen = [token for token, counts in zip(tokens, counted, strict=True) if counts]
    both = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (tokens, chosen)]
    return tuple(both)


def test_bytes_of_a_chat_are_chatml_and_what_the_assistant_says_counts(tmp_path):
    corpus = opened(written(tmp_path / "a.jsonl", {"messages": CHAT}), tmp_path, seq_len=160)
    inputs, targets, _ = corpus.samples(range(1))
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    raw = text.encode()
    assert bytes(inputs[0][: len(raw) - 1].tolist()) == raw[:-1]
    counted = targets[0][targets[0] != IGNORED].tolist()
    assert bytes(counted).decode() == "2<|im_end|>\né!<|im_end|>\n"
    assert corpus.counted(range(1)) == len(counted)


def test_bytes_of_a_prompt_are_not_counted_and_the_end_is(tmp_path):
    path = written(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "cd", "other": 1})
    inputs, targets, _ = opened(path, tmp_path, seq_len=6).samples(range(1))
    assert inputs[0].tolist() == [*b"abcd", 0, 0]
    assert targets[0].tolist() == [IGNORED, *b"cd", 0, IGNORED, IGNORED]


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_template_beside_the_tokenizer_is_used_and_puts_no_second_bos(where, tmp_path):
    config = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"}
    if where == "chat_template.jinja":
        (tmp_path / where).write_text(LLAMA)
    else:
        config["chat_template"] = LLAMA
    byte_level(tmp_path, **config)
    text, counted = encoded(tmp_path, {"messages": CHAT})
    turns = [f"<|start|>{m['role']}<|end|>\n{m['content']}<|eot|>" for m in CHAT]
    assert text == "<bos>" + "".join(turns)
    assert counted == "2<|eot|>é!<|eot|>"


def test_tokens_and_what_counts_are_those_of_transformers(tmp_path):
    """Which is told by a template what the assistant says, and finds it by characters too."""
    transformers = pytest.importorskip("transformers")
    specials = {"bos_token": "<bos>", "eos_token": "<eos>"}
    byte_level(tmp_path, **specials, chat_template=LLAMA)
    file, said = str(tmp_path / "tokenizer.json"), "{{ m.content | trim }}<|eot|>"
    marked = "{% generation %}" + said + "{% endgeneration %}"
    by_role = f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{said}{{% endif %}}"
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=file, **specials, chat_template=LLAMA.replace(said, by_role)
    ).apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    tokens, counted = _Encoder(Tokenizer.from_file(file), ChatTemplate(file))({"messages": CHAT})
    assert tokens == list(theirs["input_ids"])
    assert counted == [bool(mask) for mask in theirs["assistant_masks"]]
    assert sum(counted) == 6


def test_a_tokenizer_without_a_template_gets_chatml(tmp_path):
    byte_level(tmp_path)
    text, counted = encoded(tmp_path, {"messages": CHAT[:2]})
    assert text.startswith("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2")
    assert counted == "2<|im_end|>\n"


def test_marks_of_what_is_generated_are_taken_and_the_clock_is_not(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(
        "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}\n"
        "{% endgeneration %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    byte_level(tmp_path)
    text, counted = encoded(tmp_path, {"messages": CHAT[:2]})
    assert text == "user: 1+1?\nassistant: 2\n"
    assert counted == "2\n"


@pytest.mark.parametrize(
    ("prompt", "completion", "counted"),
    [
        ("say", " ok", " ok<eos>"),
        ("say ", "ok", " ok<eos>"),  # one token of both counts, as it says something
        ("say ok", "!", "!<eos>"),
        ("say", " ok<eos>", " ok<eos>"),
        ("", "ok", "ok<eos>"),
    ],
)
def test_a_prompt_gets_the_tokenizers_ends_and_a_completion_counts(
    prompt, completion, counted, tmp_path
):
    config = {"eos_token": "<eos>"}
    byte_level(tmp_path, **config)
    found = encoded(tmp_path, {"prompt": prompt, "completion": completion})
    assert found == (f"<bos>{prompt}{completion.removesuffix('<eos>')}<eos>", counted)


def test_what_is_tokenised_already_is_taken_as_it_is(tmp_path):
    path = written(tmp_path / "a.jsonl", {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]})
    inputs, targets, _ = opened(path, tmp_path, seq_len=4).samples(range(1))
    assert inputs[0].tolist() == [5, 6, 7, 0]
    assert targets[0].tolist() == [6, IGNORED, 8, IGNORED]


SHAREGPT = [
    {"from": "human", "value": "1+1?"},
    {"from": "gpt", "value": "2"},
]


@pytest.mark.parametrize(
    "chat",
    [
        {"conversations": SHAREGPT},
        {"conversations": CHAT[:2]},
        {"messages": SHAREGPT},
        {"messages": [{**message, "tool_calls": None} for message in CHAT[:2]]},
    ],
    ids=["ShareGPT", "roles in conversations", "ShareGPT in messages", "nulls of a table"],
)
def test_chats_are_taken_as_data_sets_have_them(chat):
    encode = _Encoder(None, ChatTemplate("bytes"))
    assert encode(chat) == encode({"messages": CHAT[:2]})


def test_a_systems_word_and_other_roles_go_to_the_template_as_they_are():
    said = [{"from": "system", "value": "Be brief."}, {"from": "tool", "value": "4"}, *SHAREGPT]
    tokens, _ = _Encoder(None, ChatTemplate("bytes"))({"conversations": said})
    assert bytes(tokens).startswith(b"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>tool\n4")


@pytest.mark.parametrize("name", ["jsonl", "jsonl.gz", "parquet", "arrow"])
@pytest.mark.parametrize("size", [1, 3])
def test_the_windows_do_not_depend_on_who_encodes(name, size, tmp_path, monkeypatch):
    """Nor on a worker that was killed in the middle; each part is made once."""
    monkeypatch.setattr(tokenised, "PART_BYTES", 900)
    monkeypatch.setattr(tokenised, "_POLL_S", 0.001)
    chats = [
        {"messages": [CHAT[0], {"role": "assistant", "content": f"{number} " * (number % 5 + 1)}]}
        for number in range(90)
    ]
    path = tmp_path / f"a.{name}"
    if name in ("parquet", "arrow"):
        pa = pytest.importorskip("pyarrow")
        write_table(path, pa.Table.from_pylist(chats), rows=20)
    else:
        lines = "".join(f"{json.dumps(chat)}\n" for chat in chats).encode()
        path.write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    found, told = {}, []

    def work(rank):
        crew = Crew(rank=rank, size=size, encoded=lambda *part: told.append(part))
        found[rank] = read_sft(
            path, "bytes", tmp_path / "cache", seq_len=160, cut_long=False, crew=crew
        )

    ranks = iter(range(size))
    at_once(size, lambda: work(next(ranks)))
    files = sorted(tmp_path.glob("cache/*/*"))
    assert sorted(told) == [(part + 1, len(files)) for part in range(len(files))]
    assert len(files) > 3 or name == "jsonl.gz"
    one, identity = read_sft(
        path, "bytes", tmp_path / "alone", seq_len=160, cut_long=False, crew=ALONE
    )
    assert (identity["documents"], identity["windows"]) == (90, len(one))
    for windows, other in found.values():
        assert other == identity
        for index in range(len(one)):
            assert windows.window(index).tokens.tolist() == one.window(index).tokens.tolist()
    files[0].unlink()
    stale = files[0].with_name(f".{files[0].name}-00")
    stale.write_bytes(b"of a worker that was killed")
    told.clear()
    work(0)
    assert told == [(1, len(files))]
    assert sorted(tmp_path.glob("cache/*/*")) == files


def test_a_part_without_an_example_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenised, "PART_BYTES", 60)
    nothing = {"messages": CHAT[:1]}
    path = written(tmp_path / "a.jsonl", nothing, nothing, {"messages": CHAT[:2]}, nothing)
    corpus = opened(path, tmp_path, seq_len=100)
    assert (len(corpus.windows), corpus.windows.num_documents) == (1, 1)
    assert corpus.counted(range(1)) == len(b"2<|im_end|>\n")


@given(st.lists(st.tuples(st.text(max_size=9), st.text(min_size=1, max_size=9)), min_size=1))
def test_bytes_count_exactly_the_completion(pairs):
    for prompt, completion in pairs:
        tokens, counted = _Encoder(None, ChatTemplate("bytes"))(
            {"prompt": prompt, "completion": completion}
        )
        before = len(prompt.encode(errors="replace"))
        assert counted == [at >= before for at in range(len(tokens))]
        assert bytes(tokens) == (prompt + completion).encode(errors="replace") + b"\0"


def test_a_folder_is_its_jsonl_files_and_an_example_without_a_counted_token_is_left_out(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    written(folder / "b.jsonl", {"prompt": "x", "completion": "y"}, {"messages": CHAT[:1]})
    written(folder / "a.jsonl", {"prompt": "long", "completion": "er"})
    (folder / "README.md").write_text("not an example")
    corpus = opened(folder, tmp_path)
    assert corpus.windows.num_documents == 2
    assert corpus.windows.num_tokens == len(b"xy\0longer\0")


def test_packing_is_done_once_until_something_changes(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    byte_level(folder)
    path = written(tmp_path / "a.jsonl", {"messages": CHAT})
    options = {"tokenizer": str(folder / "tokenizer.json"), "vocab_size": 300}
    first = opened(path, tmp_path, **options)
    opened(path, tmp_path, **options)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    (folder / "chat_template.jinja").write_text(LLAMA)
    with pytest.raises(DataError, match=r"^HF706 data\.path: "):
        opened(path, tmp_path, **options)
    (tmp_path / "corpus.json").unlink()
    other = opened(path, tmp_path, **options)
    assert other.windows.digest != first.windows.digest
    assert len(list((tmp_path / "cache").iterdir())) == 2


LONG = {"prompt": "p" * 6, "completion": "c" * 10}


def test_what_is_longer_than_a_window_is_refused_or_cut(tmp_path):
    path = written(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, LONG)
    with pytest.raises(DataError, match=r"^HF709 data\.path: 1\b.*\b17\b.*jsonl:2"):
        opened(path, tmp_path, seq_len=8)
    inputs, targets, begins = opened(path, tmp_path, seq_len=8, cut_long=True).samples(range(2))
    (row,) = (i for i, begin in enumerate(begins) if not begin.any())
    assert bytes(inputs[row].tolist()) == b"ppppppcc"
    assert targets[row].tolist() == [IGNORED] * 5 + list(b"ccc")
    assert not opened(path, tmp_path / "other", seq_len=16).samples(range(1)).documents[0][0]


BAD = {
    "no JSON": ("{", "Expecting"),
    "a list": ("[]", "a list, not a mapping"),
    "keys of another form": ('{"text": "a"}', "has the keys 'text'"),
    "no completion": ('{"prompt": "a"}', "has the keys 'prompt'"),
    "nobody says it": ('{"conversations": [{"value": "a"}]}', "message 1 has no role"),
    "a message without a text": ('{"messages": [{"role": "user"}]}', "message 1 has no role"),
    "no messages": ('{"messages": []}', "not a list of messages"),
    "shifted labels": ('{"input_ids": [1, 2], "labels": [2, -100]}', "not shifted"),
    "too few labels": ('{"input_ids": [1, 2], "labels": [2]}', "2 input_ids and 1 labels"),
    "no labels": ('{"input_ids": [1, 2]}', "labels is not a list"),
    "half a token": ('{"input_ids": [1, 2.5], "labels": [1, 2]}', "input_ids is not a list"),
    "below zero": ('{"input_ids": [-1], "labels": [-1]}', "a token is 0 or more"),
    "deep": ("[" * 100_000, "recursion"),
}


@pytest.mark.parametrize(("line", "words"), BAD.values(), ids=BAD)
def test_a_line_that_is_no_example_is_named(line, words, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n\n" + line + "\n")
    with pytest.raises(DataError, match=r"^HF708 data\.path: .*a\.jsonl:3: ") as raised:
        opened(path, tmp_path)
    assert words in str(raised.value)


TEMPLATES = {
    "raises": "{{ raise_exception('roles must alternate') }}",
    "reads what is not there": "{{ messages[7].content }}",
    "reaches out of the sandbox": "{{ messages.__class__.__mro__ }}",
    "drops earlier answers": (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_that_the_template_does_not_take_is_refused(template, tmp_path):
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    path = written(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(DataError, match=r"^HF708 data\.path: .*a\.jsonl:1: "):
        opened(path, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=300)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "{% for %}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "tool_use"}]}'),
    ],
)
def test_a_broken_template_is_the_tokenizers_fault(name, content, tmp_path):
    byte_level(tmp_path)
    (tmp_path / name).write_text(content)
    path = written(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(DataError, match=r"^HF704 data\.tokenizer: "):
        opened(path, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=300)


@pytest.mark.parametrize(
    "records", [[], [{"messages": CHAT[:1]}]], ids=["no example", "nobody answers"]
)
def test_nothing_to_learn_from_is_refused(records, tmp_path):
    with pytest.raises(DataError, match=r"^HF702 "):
        opened(written(tmp_path / "a.jsonl", *records), tmp_path)


def test_a_folder_without_examples_is_refused(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"^HF701 "):
        opened(folder, tmp_path)
