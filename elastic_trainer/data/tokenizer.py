"""The tokenizer of a corpus: `bytes`, or a Hugging Face tokenizer.json."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from elastic_trainer.data.errors import DataError


def fingerprint(tokenizer: str) -> str:
    """Return what changes with the tokenizer; a restart that finds the cache never loads it.

    Raises:
        DataError: HF704, it cannot be read.
    """
    if tokenizer == "bytes":
        return tokenizer
    try:
        return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(
            f"HF704 data.tokenizer: {error}: name a tokenizer.json that every node can read, or "
            "use tokenizer: bytes"
        ) from error


def load_tokenizer(tokenizer: str) -> Any | None:
    """Return the `tokenizers.Tokenizer` of a file; None for `bytes`.

    Raises:
        DataError: HF704, the file is none, or the package is missing.
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
