"""What lies beside the weights of a model in Hugging Face's format. Standard library only.

The launcher compares it before a job starts, the trainer as it opens a corpus, and conversions
carry it along.

Sources of the formats: huggingface.co/docs/tokenizers (tokenizer.json) and transformers'
`save_pretrained` of models and tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from elastic_trainer.storage.files import read_regular

KEPT: Final = "hf"
"""Folder of an imported run that has the files beside the weights."""
CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_FILES: Final = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)
"""What tokenizers of transformers save, the slow ones too."""
ROLES: Final = ("bos_token", "eos_token", "pad_token")


@dataclass(frozen=True, kw_only=True)
class TokenizerIds:
    """Which ids a tokenizer gives to which tokens."""

    vocabulary: Mapping[str, int]
    """The model's, and ordinary words that were added."""
    special: Mapping[str, int]
    """Special tokens, which stand in a text only where it names them."""
    needed: frozenset[str]
    """Those of them that are put in by the tokenizer itself or by its chat template."""
    roles: Mapping[str, int]
    """Of `ROLES` what tokenizer_config.json names and the tokenizer has."""

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Token -> id, of all."""
        return {**self.vocabulary, **self.special}

    def beyond(self, vocab_size: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the tokens outside a model's vocabulary: those of any text, and the others."""
        outside = {token: number for token, number in self.ids.items() if number >= vocab_size}
        rare = {
            token: number
            for token, number in outside.items()
            if token in self.special and token not in self.needed
        }
        return {token: outside[token] for token in outside.keys() - rare.keys()}, rare

    def differing(self, other: TokenizerIds) -> list[tuple[int, str, str]]:
        """Return the ids that stand for another token in `other`: id, here, there; sorted."""
        here, there = (
            {number: token for token, number in each.ids.items()} for each in (self, other)
        )
        return [
            (number, here[number], there[number])
            for number in sorted(here.keys() & there.keys())
            if here[number] != there[number]
        ]


def read_tokenizer(file: Path) -> TokenizerIds:
    """Read a tokenizer.json, and tokenizer_config.json and the chat template beside it.

    Raises:
        OSError: one cannot be read.
        ValueError: one is not JSON, or not what its name says.
    """
    raw = read_mapping(file)
    try:
        vocabulary, special = _tokens(raw)
        around = set(_put_around(raw.get("post_processor")))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{file} is not a tokenizer.json: it has no tokens with ids") from error
    config, template = read_beside(file, "tokenizer_config.json"), ""
    if (jinja := file.parent / "chat_template.jinja").exists():
        template = read_regular(jinja).decode()
    template = template or json.dumps(config.get("chat_template") or "", ensure_ascii=False)
    named = {role: token_text(config.get(role)) for role in (*ROLES, "unk_token")}
    own = {*named.values(), *around}
    every = {**vocabulary, **special}
    return TokenizerIds(
        vocabulary=vocabulary,
        special=special,
        needed=frozenset(each for each in special if each in own or each in template),
        roles={role: every[named[role]] for role in ROLES if named[role] in every},
    )


def _tokens(raw: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return token -> id of a tokenizer.json: ordinary ones, and special ones.

    Raises:
        TypeError, KeyError, IndexError, AttributeError: it is none.
    """
    listed, added = raw["model"].get("vocab", {}), raw.get("added_tokens") or []
    if isinstance(listed, list):  # Unigram: pairs of token and score, in the order of ids
        listed = {pair[0]: number for number, pair in enumerate(listed)}
    special = {each["content"]: each["id"] for each in added if each.get("special")}
    words = {each["content"]: each["id"] for each in added if not each.get("special")}
    ordinary = {**listed, **words}
    if not all(type(number) is int for number in (*ordinary.values(), *special.values())):
        raise TypeError
    return {token: ordinary[token] for token in ordinary.keys() - special.keys()}, special


def _put_around(processor: Any) -> Iterator[str]:
    """Yield the tokens that a post-processor puts around a text."""
    if isinstance(processor, dict):
        for each in processor.get("processors") or ():
            yield from _put_around(each)
        yield from processor.get("special_tokens") or ()


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the JSON mapping in `file`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none.
    """
    try:
        found = json.loads(read_regular(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a JSON mapping")  # noqa: TRY004  the user's
    return found


def read_beside(file: Path, name: str) -> dict[str, Any]:
    """Return the JSON mapping in `name` beside `file`; empty where there is none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none.
    """
    beside = file.parent / name
    return read_mapping(beside) if beside.exists() else {}


def token_text(value: Any) -> str:
    """Return the text of a special token as tokenizer_config.json has it, which may be a mapping.

    Empty: there is none.
    """
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def special_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says of bos_token_id, eos_token_id and pad_token_id."""
    return {key: config[key] for role in ROLES if config.get(key := f"{role}_id") is not None}


def special_mistakes(config: Mapping[str, Any], roles: Mapping[str, int]) -> list[str]:
    """Return where config.json contradicts itself or a tokenizer's `roles`, a text each.

    Several ids may end a text. A padding id below 0 stands for none.
    """
    vocab_size, found = config.get("vocab_size"), list[str]()
    for key, value in special_ids(config).items():
        ids = value if isinstance(value, list) else [value]
        role = key.removesuffix("_id")
        if role == "pad_token" and ids[0] == -1:
            continue
        bad = [each for each in ids if type(each) is not int or each < 0]
        if isinstance(vocab_size, int):
            bad += [each for each in ids if type(each) is int and each >= vocab_size]
        if bad:
            found.append(
                f"{key} {bad[0]!r:.40} is no token of a vocabulary of {vocab_size}: fix it"
            )
        elif role in roles and roles[role] not in ids:
            found.append(
                f"{key} is {value}, the tokenizer's {role} {roles[role]}: fix the one that is wrong"
            )
    return found


def kept_files(folder: Path) -> dict[str, Path]:
    """Return name -> path of what `folder` has beside the weights, config.json left out."""
    names = (GENERATION, *TOKENIZER_FILES)
    return {name: folder / name for name in names if (folder / name).is_file()}


def examine_tokenizer(file: Path, vocab_size: int) -> list[tuple[str, str]]:
    """Return code and message of what keeps a tokenizer from a model of so large a vocabulary.

    HF704: the files cannot be used; HF024: texts would have tokens that the model has not; HF191, a
    warning: only texts that name certain special tokens would, as of multimodal models.

    Raises:
        OSError: a file cannot be read.
    """
    try:
        needed, rare = read_tokenizer(file).beyond(vocab_size)
    except ValueError as error:
        return [("HF704", f"{error}: copy it again, or use tokenizer: bytes")]
    found = []
    for code, tokens, then in (
        ("HF024", needed, "use the model's own tokenizer, or a larger vocab_size"),
        ("HF191", rare, "a text that names one of them stops the job (HF703)"),
    ):
        if tokens:
            last, number = max(tokens.items(), key=lambda each: each[1])
            said = (
                f"{file}: {len(tokens)} of its tokens are outside the model's vocabulary of "
                f"{vocab_size}, the last is {number} ({last!r:.40}): {then}"
            )
            found.append((code, said))
    return found
