"""Tokenizer and chat template of a corpus: `bytes`, or a tokenizer.json and the files beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from elastic_trainer.data.source import DataError, reading
from elastic_trainer.storage.model_files import token_text


def fingerprint(tokenizer: str) -> str:
    """Return a digest of the tokenizer; a restart that finds the cache never loads it.

    Raises:
        DataError: HF704, it cannot be read.
    """
    if tokenizer == "bytes":
        return tokenizer
    try:
        return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    except OSError as error:
        raise unreadable(error) from error


def unreadable(error: OSError) -> DataError:
    """Return what a tokenizer that cannot be read is refused with."""
    return DataError(
        f"HF704 data.tokenizer: {error}: name a tokenizer.json that every node can read, or "
        "use tokenizer: bytes"
    )


def load_tokenizer(tokenizer: str) -> Any | None:
    """Return the `tokenizers.Tokenizer` of a file; None for `bytes`.

    Raises:
        DataError: HF704, the file is not one, or the package is missing.
    """
    if tokenizer == "bytes":
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(
            f"HF704 data.tokenizer: {tokenizer} needs the package tokenizers on the nodes: "
            "pip install tokenizers, or use tokenizer: bytes"
        ) from error
    try:
        encoder = Tokenizer.from_file(tokenizer)
    except Exception as error:
        # The library raises bare Exception for a missing or broken file.
        raise DataError(
            f"HF704 data.tokenizer: {tokenizer} is not a tokenizer.json ({error}): name one that "
            "Hugging Face tokenizers can load, or use tokenizer: bytes"
        ) from error
    # Many files say how a model's input is cut or filled up; a corpus is neither.
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def end_of_text(tokenizer: str) -> str:
    """Return the text of the token that ends a text, by tokenizer_config.json; empty: unknown.

    Raises:
        DataError: HF704, the file is not JSON.
        UnreadableError: it cannot be read.
    """
    folder = None if tokenizer == "bytes" else Path(tokenizer).parent
    return token_text(_config(folder).get("eos_token"))


CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of a tokenizer without one."""
ASSISTANT: Final = "assistant"


class ChatError(Exception):
    """The template does not take a chat."""


class _Generation(Extension):
    """`{% generation %}`, by which some templates mark the assistant's text: transparent."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own way

    def parse(self, parser: Parser) -> list[Node]:
        """Return what is inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The template beside a tokenizer.json: `chat_template.jinja`, `tokenizer_config.json`.

    `tokenizer` is the path of the tokenizer.json, or `bytes`, which has ChatML.

    Raises:
        DataError: HF704, a file is not a template or not JSON.
        UnreadableError: a file cannot be read.
    """

    def __init__(self, tokenizer: str) -> None:
        folder = None if tokenizer == "bytes" else Path(tokenizer).parent
        config = _config(folder)
        source = _text(folder, "chat_template.jinja") or config.get("chat_template") or CHATML
        tokens = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token")}
        self.end = tokens["eos_token"]
        """Text of the token that ends a text; empty: unknown."""
        self.identity = json.dumps([source, tokens])
        """Differs when the tokens of an example do."""
        # The options that transformers renders templates with; what reads the clock is left out.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals.update(tokens)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, TypeError) as error:
            raise DataError(
                f"HF704 data.tokenizer: the chat template beside {tokenizer} cannot be used "
                f"({error}): put one template into chat_template.jinja beside it"
            ) from error

    def render(self, messages: Sequence[dict[str, Any]]) -> tuple[str, list[range]]:
        """Return the text of a chat, and the characters of it that the assistant says.

        Raises:
            ChatError: the template refuses the chat, or changes turns that come before others.
        """
        whole, said = self._text(messages), []
        for index, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before = self._text(messages[:index], add_generation_prompt=True)
                upto = self._text(messages[: index + 1])
                if not (whole.startswith(upto) and upto.startswith(before)):
                    raise ChatError(
                        f"the chat template changes message {index + 1} when others follow it, so "
                        "what the assistant says cannot be found: give input_ids and labels"
                    )
                said.append(range(len(before), len(upto)))
        return whole, said

    def _text(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # whatever a template's own expressions raise
            raise ChatError(f"the chat template refuses it ({error})") from error


def _refuse(message: object) -> None:
    raise TemplateError(str(message))


def _text(folder: Path | None, name: str) -> str | None:
    if folder is None or not (file := folder / name).exists():
        return None
    with reading():
        return file.read_text(encoding="utf-8")


def _config(folder: Path | None) -> dict[str, Any]:
    try:
        found = json.loads(_text(folder, "tokenizer_config.json") or "{}")
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise DataError(
            f"HF704 data.tokenizer: {folder}/tokenizer_config.json is not a JSON mapping "
            f"({found}): copy it again, or remove it"
        )
    return found
