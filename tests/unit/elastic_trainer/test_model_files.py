"""What a tokenizer's files and config.json say of ids, by what the library itself gives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, processors

from elastic_trainer.storage.model_files import (
    examine_tokenizer,
    kept_files,
    read_tokenizer,
    special_mistakes,
)

WORDS = ("the", "cat", "sat")
UNKNOWN = {"unk_token": "the"}


def saved(folder, model, *, special=(), words=(), **config):
    """Save a tokenizer with added tokens, and a tokenizer_config.json."""
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.add_tokens(list(words))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json", tokenizer


MODELS = {
    "words": lambda: models.WordLevel({word: i for i, word in enumerate(WORDS)}, **UNKNOWN),
    "bpe": lambda: models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
    "unigram": lambda: models.Unigram([(word, -1.0) for word in WORDS], unk_id=0),
    "pieces": lambda: models.WordPiece({word: i for i, word in enumerate(WORDS)}, **UNKNOWN),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_ids_are_those_of_the_library(tmp_path, model):
    file, tokenizer = saved(tmp_path, model(), special=["<s>"], words=["extra"])
    found = read_tokenizer(file)
    assert dict(found.ids) == tokenizer.get_vocab(with_added_tokens=True)
    assert dict(found.special) == {"<s>": 3}


def codes(file, vocab_size):
    return [code for code, _ in examine_tokenizer(file, vocab_size)]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("vocab_size", "expected"), [(3, []), (99, []), (2, ["HF024"])])
def test_a_vocabulary_that_lacks_a_word_is_too_small(tmp_path, model, vocab_size, expected):
    assert codes(saved(tmp_path, model())[0], vocab_size) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["HF191"]),
        ({"eos_token": "the"}, ["HF191"]),
        ({"eos_token": "<x>"}, ["HF024"]),
        ({"pad_token": {"content": "<x>", "lstrip": False}}, ["HF024"]),
        ({"chat_template": "{{ '<x>' + messages[0]['content'] }}"}, ["HF024"]),
    ],
)
def test_a_special_token_that_nothing_puts_in_is_a_warning(tmp_path, config, expected):
    """As the pictures' token of a multimodal model whose text part has no row for it."""
    file, _ = saved(tmp_path, MODELS["bpe"](), special=["<x>"], **config)
    assert codes(file, 3) == expected
    assert codes(file, 4) == []


def test_what_is_put_around_texts_is_needed(tmp_path):
    file, tokenizer = saved(tmp_path, MODELS["bpe"](), special=["<x>"])
    around = processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", 3)])
    for post in (around, processors.Sequence([processors.ByteLevel(), around])):
        tokenizer.post_processor = post
        tokenizer.save(str(file))
        assert codes(file, 3) == ["HF024"]


def test_words_that_were_added_are_words(tmp_path):
    assert codes(saved(tmp_path, MODELS["bpe"](), words=["cow"])[0], 3) == ["HF024"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}'),
        ("tokenizer.json", '{"model": {"vocab": [1]}}'),
        ("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [{"content": "x"}]}'),
        ("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": 1}'),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "1"),
    ],
)
def test_files_that_are_something_else(tmp_path, name, content):
    file, _ = saved(tmp_path, MODELS["bpe"]())
    (tmp_path / name).write_text(content)
    assert codes(file, 99) == ["HF704"]


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5)), st.data())
def test_differing_ids_are_those_with_two_meanings(tmp_path_factory, vocabulary, data):
    other = data.draw(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5)))
    one, two = (inverse(each) for each in (vocabulary, other))
    folder = tmp_path_factory.mktemp("t")
    found = []
    for number, meanings in enumerate((one, two)):
        file = folder / str(number)
        vocab = {token: i for i, token in meanings.items()}
        file.write_text(json.dumps({"model": {"vocab": vocab}}))
        found.append(read_tokenizer(file))
    differing = found[0].differing(found[1])
    assert differing == [(i, one[i], two[i]) for i in sorted(one) if i in two and one[i] != two[i]]


def inverse(vocabulary):
    """Return id -> one of its tokens."""
    return {number: token for token, number in vocabulary.items()}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, []),
        ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}, []),
        ({"eos_token_id": [9, 2]}, []),
        ({"eos_token_id": [9, 8]}, ["eos"]),
        ({"bos_token_id": 2, "eos_token_id": 1}, ["bos", "eos"]),
        ({"pad_token_id": 4}, []),  # the tokenizer has none
        ({"pad_token_id": -1}, []),
        ({"eos_token_id": -1}, ["eos"]),
        ({"pad_token_id": 10}, ["pad"]),
        ({"eos_token_id": "2"}, ["eos"]),
        ({"eos_token_id": True}, ["eos"]),
        ({"eos_token_id": []}, ["eos"]),
    ],
)
def test_ids_of_a_config_beside_those_of_the_tokenizer(config, found):
    roles = {"bos_token": 1, "eos_token": 2}
    said = special_mistakes({"vocab_size": 10, **config}, roles)
    assert [each.partition("_")[0] for each in said] == found


def test_weights_and_folders_are_not_kept(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "vocab.json").mkdir()
    for name in ("model.safetensors", "config.json", "modeling_x.py"):
        (tmp_path / name).touch()
    assert kept_files(tmp_path) == {"tokenizer.json": tmp_path / "tokenizer.json"}
