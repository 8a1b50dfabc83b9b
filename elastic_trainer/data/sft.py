"""Examples in JSON lines or tables -> documents with counted tokens, packed into windows.

docs/finetuning.md describes the three forms of an example.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.data.packing import PackedWindows, words_of, write_packed
from elastic_trainer.data.records import Span, place, record_files, records
from elastic_trainer.data.source import Array, DataError, reading
from elastic_trainer.data.text import DOCUMENT_SEPARATOR, listing
from elastic_trainer.data.tokenised import Crew, encode_together, parts_of
from elastic_trainer.data.tokenizer import ChatError, ChatTemplate, fingerprint, load_tokenizer

_UNCOUNTED = -100
"""Label, by Hugging Face's convention."""
_MAX_TOKEN = (1 << 31) - 1
_FORMS = "messages (or conversations), prompt and completion, or input_ids and labels"
_ROLES = {"human": "user", "gpt": "assistant"}
"""What ShareGPT calls roles."""

Example = tuple[Sequence[int], Sequence[bool]]
"""Tokens, and whether each counts in the loss."""


def read_sft(
    path: Path, tokenizer: str, cache_dir: Path, *, seq_len: int, cut_long: bool, crew: Crew
) -> tuple[PackedWindows, dict[str, int | str]]:
    """Encode and pack the examples of `path`, once, all of `crew` together, and open the result.

    `path` is a file of JSON lines or a table, or a folder of such; `tokenizer` is `bytes`, or the
    path of a Hugging Face tokenizer.json. `cache_dir` keeps the result and may be deleted at any
    time. `cut_long`: cut an example that is longer than a window, instead of refusing it. Each part
    of `parts_of` is packed by itself, so that the windows do not depend on who packs.

    Returns:
        The windows, and their identity.

    Raises:
        UnreadableError: `path` cannot be read.
        DataError: HF701, HF702, HF704, HF707, HF708, HF709, HF713, HF714.
        TimeoutError: the parts of others do not come.
        OSError: the cache cannot be written.
    """
    files = record_files(path, "sft")
    with reading():
        listed = listing(files)
        parts = parts_of([(file, file.stat().st_size) for file in files])
    template, of_tokenizer = ChatTemplate(tokenizer), fingerprint(tokenizer)
    made_by = f"sft 2\n{seq_len} {cut_long}\n{of_tokenizer}\n{template.identity}\n{parts}\n"
    folder = cache_dir / hashlib.sha256((made_by + listed).encode()).hexdigest()[:32]
    targets = [folder / f"{number:06}.bin" for number in range(len(parts))]
    encoder = functools.cache(lambda: _Encoder(load_tokenizer(tokenizer), template))

    def write(at: int) -> None:
        documents = _documents(parts[at], encoder(), seq_len, cut_long=cut_long)
        write_packed(targets[at], documents, room=seq_len, beat=crew.beat)

    encode_together(targets, write, crew)
    packed = PackedWindows(targets)
    if len(packed) == 0:
        raise DataError(
            f"HF702 data.path: {path} has no example with a token that counts in the loss: "
            f"give {_FORMS}, with something for the assistant to say"
        )
    identity: dict[str, int | str] = {
        "format": "sft",
        "tokenizer": of_tokenizer,
        "documents": packed.num_documents,
        "tokens": packed.num_tokens,
        "windows": len(packed),
        "sha256": packed.digest,
    }
    return packed, identity


def _documents(
    spans: Sequence[Span], encode: _Encoder, seq_len: int, *, cut_long: bool
) -> Iterator[Array]:
    """Yield the words of each example with a counted target.

    Raises:
        DataError: HF708, HF709, and what `records` raises.
    """
    num_long, longest = 0, (0, Path(), 0)
    for span in spans:
        for at, record in records(span):
            try:
                tokens, counted = encode(record)
            except (ValueError, ChatError) as error:
                raise DataError(
                    f"HF708 data.path: {place(span.file, at)}: {error}: each record is an example "
                    f"with {_FORMS}"
                ) from error
            if len(tokens) > seq_len + 1:
                num_long += 1
                longest = max(longest, (len(tokens), span.file, at), key=lambda each: each[0])
                tokens, counted = tokens[: seq_len + 1], counted[: seq_len + 1]
            if any(counted[1:]):
                yield words_of(tokens, counted)
    if num_long and not cut_long:
        most, file, at = longest
        raise DataError(
            f"HF709 data.path: {num_long} examples do not fit train.seq_len {seq_len}, the "
            f"longest has {most} tokens ({place(file, at)}): use a seq_len of {most - 1} or more, "
            "leave them out, or cut them with data.cut_long: true"
        )


class _Encoder:
    """Makes an example's tokens."""

    def __init__(self, tokenizer: Any | None, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template

    def __call__(self, record: Any) -> Example:
        """Return the tokens of an example.

        Raises:
            ValueError: it has none of the three forms.
            ChatError: the chat template does not take it.
        """
        if isinstance(record, Exception):  # a line that is no JSON
            raise ValueError(str(record)) from record  # noqa: TRY004
        if not isinstance(record, dict):
            raise ValueError(f"a {type(record).__name__}, not a mapping")  # noqa: TRY004  the user's
        # A table has all columns in each row.
        record = {key: value for key, value in record.items() if value is not None}
        if {"chosen", "rejected"} <= record.keys():
            raise ValueError(
                "a preference pair (chosen, rejected): for DPO run its script by command:; to "
                "fine-tune on what was chosen, write it as messages"
            )
        if "input_ids" in record:
            return _tokenised(record)
        if chat := record.keys() & {"messages", "conversations"}:
            text, said = self._template.render(_messages(record[max(chat)]))
            return self._encoded(text, said, whole=False)
        prompt, completion = record.get("prompt"), record.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise ValueError(f"has the keys {', '.join(map(repr, record)) or 'none'}")  # noqa: TRY004
        return self._encoded(
            prompt + completion, [range(len(prompt), len(prompt + completion))], whole=True
        )

    def _encoded(self, text: str, said: Sequence[range], *, whole: bool) -> Example:
        """Return the tokens of `text`; those that end within `said` count.

        `whole`: it becomes a text of its own, with the tokenizer's tokens around one.
        """
        mask = np.zeros(len(text), dtype=bool)
        for each in said:
            mask[each.start : each.stop] = True
        if self._tokenizer is None:
            if not text.isascii():
                mask = np.repeat(mask, [len(char.encode(errors="replace")) for char in text])
            tokens, counts = list(text.encode(errors="replace")), mask.tolist()
            if not whole:
                return tokens, counts
            return [*tokens, DOCUMENT_SEPARATOR], [*counts, bool(said[-1])]
        found = self._tokenizer.encode(text, add_special_tokens=whole)
        tokens, counts = list(found.ids), []
        for start, stop in found.offsets:
            # What has no characters was put there by the tokenizer: it goes with what is before.
            counts.append(bool(mask[stop - 1] if stop > start else counts and counts[-1]))
        end = self._tokenizer.token_to_id(self._template.end) if whole else None
        if end is not None and tokens[-1:] != [end]:
            tokens.append(end)
            counts.append(bool(said[-1]))
        return tokens, counts


def _tokenised(record: dict[str, Any]) -> Example:
    """Return an example with input_ids and labels."""
    tokens, labels = record["input_ids"], record.get("labels")
    for name, values in (("input_ids", tokens), ("labels", labels)):
        if not (isinstance(values, list) and all(type(value) is int for value in values)):
            raise ValueError(f"{name} is not a list of integers")
    assert isinstance(labels, list)
    if len(tokens) != len(labels):
        raise ValueError(f"{len(tokens)} input_ids and {len(labels)} labels")
    if any(not 0 <= token <= _MAX_TOKEN for token in tokens):
        raise ValueError(f"input_ids has {min(tokens)} to {max(tokens)}, a token is 0 or more")
    for token, label in zip(tokens, labels, strict=True):
        if label not in (token, _UNCOUNTED):
            raise ValueError(
                f"label {label} of token {token}: labels are the tokens themselves, or "
                f"{_UNCOUNTED}; they are not shifted"
            )
    return tokens, [label != _UNCOUNTED for label in labels]


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return a chat whose messages have roles and texts; ShareGPT's `from` and `value` are taken.

    A table gives each message all keys that any has: those with null are left out.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("the chat is not a list of messages")
    chat = []
    for number, message in enumerate(value, start=1):
        given = message if isinstance(message, dict) else {}
        made = {key: item for key, item in given.items() if item is not None}
        if {"from", "value"} <= made.keys():
            role = made.pop("from")
            made = {"role": _ROLES.get(str(role), role), "content": made.pop("value"), **made}
        if not all(isinstance(made.get(key), str) for key in ("role", "content")):
            raise ValueError(f"message {number} has no role and content that are texts")
        chat.append(made)
    return chat
