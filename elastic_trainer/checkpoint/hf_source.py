"""A directory in Hugging Face's format: what is in it, checked, and its tensors piece by piece.

Source of the format: https://huggingface.co/docs/safetensors (header with name, dtype, size
and offsets of every tensor; opening checks that they cover the file) and transformers'
`model.safetensors.index.json` for several files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from elastic_trainer.checkpoint.errors import InputError
from elastic_trainer.checkpoint.hf_names import (
    CONFIG_NAME,
    EMBEDDING,
    HEAD,
    INDEX_NAME,
    SINGLE_NAME,
    from_hf,
    is_derived,
    param_sizes,
    to_hf,
)
from elastic_trainer.hf_config import ConfigError, parse_hf_config
from elastic_trainer.models import ModelShape

_DTYPES = ("F32", "BF16", "F16")
"""What becomes fp32 without loss."""
_PIECE_BYTES = 256 << 20
_MAX_JSON_BYTES = 256 << 20
"""An index of the largest models has a few MB."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as a file's header describes it."""

    file: str
    size: tuple[int, ...]
    dtype: str
    """As safetensors writes it: F32, BF16, ..."""


class HFSource:
    """A model in Hugging Face's format, all of it checked but the values.

    Attributes:
        shape: of the model, from config.json.
        entries: our parameter name -> where it is. A tied model has no `head.weight`.

    Raises:
        InputError: HF021, HF022, HF023, the config; HF323, files are missing or
            cannot be read; HF324, a file is damaged; HF325, a tensor is missing,
            unknown or of another size; HF326, of another dtype.
    """

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self.shape = self._read_config()
        found = self._read_headers()
        tied_head = found.pop(to_hf(HEAD), None) if self.shape.tie_embeddings else None
        self.entries = self._checked(found)
        if tied_head is not None:
            self._check_tied(tied_head)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of our parameter `name`, as fp32; only they are read.

        Raises:
            InputError: HF323, HF324, the file changed since it was checked.
        """
        return self._rows(self.entries[name], to_hf(name), start, stop).to(torch.float32)

    def _rows(self, entry: Entry, theirs: str, start: int, stop: int) -> Tensor:
        with self._open(entry.file) as file:
            rows: Tensor = file.get_slice(theirs)[start:stop]
        return rows

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        path = self._dir / name
        try:
            # pread: a mapped file would count as this process's memory.
            with safe_open(path, framework="pt", backend="pread") as file:
                yield file
        except SafetensorError as error:
            raise InputError(
                "HF324",
                f"{path} is damaged or no safetensors file ({error}): download or copy it again "
                "and compare its sha256 with the one published",
            ) from error
        except OSError as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: OSError) -> InputError:
        return InputError(
            "HF323",
            f"{self._dir / name} cannot be read ({error.strerror or error}): bring the file "
            "there, or grant the permission",
        )

    def _read_text(self, name: str) -> str:
        path = self._dir / name
        try:
            if path.stat().st_size > _MAX_JSON_BYTES:
                raise InputError("HF323", f"{path} is over {_MAX_JSON_BYTES} bytes: no {name}")
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise self._unreadable(name, error) from error
        except UnicodeDecodeError as error:
            raise InputError("HF323", f"{path} is not UTF-8 text: download it again") from error

    def _read_config(self) -> ModelShape:
        try:
            shape = parse_hf_config(self._read_text(CONFIG_NAME))
        except ConfigError as error:
            raise InputError(error.code, f"{self._dir / CONFIG_NAME}: {error}") from error
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        if heads % kv_heads or shape.head_size % 2 or not shape.head_size:
            raise InputError(
                "HF023",
                f"{self._dir / CONFIG_NAME}: num_attention_heads {heads} must be a multiple of "
                f"num_key_value_heads {kv_heads}, and the head size {shape.head_size} even and "
                "above 0: mend the config",
            )
        return shape

    def _read_headers(self) -> dict[str, Entry]:
        """Return the tensors of all files by Hugging Face's names."""
        if (self._dir / SINGLE_NAME).exists():
            return self._read_header(SINGLE_NAME)
        if not (self._dir / INDEX_NAME).exists():
            raise InputError(
                "HF323",
                f"{self._dir} has neither {SINGLE_NAME} nor {INDEX_NAME}: name the directory "
                "that has them. Pickled weights (.bin, .pt) are not read: load them in "
                "transformers and save_pretrained them",
            )
        weight_map = self._read_index()
        found: dict[str, Entry] = {}
        for file in sorted(set(weight_map.values())):
            for name, entry in self._read_header(file).items():
                if weight_map.get(name) != file:
                    place = weight_map.get(name, "no file")
                    raise InputError(
                        "HF325",
                        f"{self._dir / file} holds {name}, which {INDEX_NAME} places in {place}: "
                        "the files are not of one model; download them all again",
                    )
                found[name] = entry
        if lost := sorted(weight_map.keys() - found.keys()):
            raise InputError(
                "HF325",
                f"{self._dir / weight_map[lost[0]]} lacks {_some(lost)}, which {INDEX_NAME} "
                "places there: download it again",
            )
        return found

    def _read_index(self) -> dict[str, str]:
        """Return Hugging Face's tensor name -> file name."""
        path = self._dir / INDEX_NAME
        try:
            raw = json.loads(self._read_text(INDEX_NAME))
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError("HF324", f"{path} is not JSON ({error}): download it again") from error
        weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError("HF324", f"{path} has no weight_map: download it again")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise InputError(
                    "HF324",
                    f"{path} places {name} in {file!r}, which is no plain file name: "
                    "mend the index",
                )
        return weight_map

    def _read_header(self, name: str) -> dict[str, Entry]:
        with self._open(name) as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  no mapping
            return {
                key: Entry(name, tuple(part.get_shape()), part.get_dtype())
                for key, part in slices.items()
            }

    def _checked(self, found: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the entries by our names, in the model's order."""
        sizes = param_sizes(self.shape)
        ours = {name: key for key in found if (name := from_hf(key)) is not None}
        if missing := [to_hf(name) for name in sizes if name not in ours]:
            tied = missing == [to_hf(HEAD)]
            raise InputError(
                "HF325",
                f"{self._dir} lacks {_some(missing)}: "
                + (
                    "if the model ties its embeddings, set tie_word_embeddings: true in "
                    f"{CONFIG_NAME}"
                    if tied
                    else f"bring all files of the model, and the {CONFIG_NAME} that belongs to them"
                ),
            )
        known = {ours[name] for name in sizes}
        if extra := [key for key in found if key not in known and not is_derived(key)]:
            raise InputError(
                "HF325",
                f"{self._dir} holds {_some(extra)}, for which a Llama of {CONFIG_NAME}'s "
                "dimensions has no place: use the config that belongs to the files, or a plain "
                "Llama checkpoint (adapters merged, not quantized)",
            )
        entries = {name: found[ours[name]] for name in sizes}
        for name, size in sizes.items():
            self._check_entry(ours[name], entries[name], size)
        return entries

    def _check_entry(self, theirs: str, entry: Entry, size: tuple[int, ...]) -> None:
        where = f"{self._dir / entry.file}: {theirs}"
        if entry.size != size:
            raise InputError(
                "HF325",
                f"{where} has size {list(entry.size)}, {CONFIG_NAME} makes it {list(size)}: use "
                "the config that belongs to the files",
            )
        if entry.dtype not in _DTYPES:
            raise InputError(
                "HF326",
                f"{where} is {entry.dtype}; read are {', '.join(_DTYPES)}: convert it with "
                "transformers, or use the published weights before quantization",
            )

    def _check_tied(self, head: Entry) -> None:
        """Refuse a head of its own where config.json ties it to the embedding."""
        embedding, theirs = self.entries[EMBEDDING], to_hf(HEAD)
        self._check_entry(theirs, head, embedding.size)
        rows = max(1, _PIECE_BYTES // (4 * self.shape.dim))
        for start in range(0, embedding.size[0], rows):
            stop = min(start + rows, embedding.size[0])
            mine = self._rows(head, theirs, start, stop).float()
            if not torch.equal(mine, self.read(EMBEDDING, start, stop)):
                raise InputError(
                    "HF325",
                    f"{self._dir / head.file}: {theirs} differs from the embedding, while "
                    f"{CONFIG_NAME} ties the two: set tie_word_embeddings: false to keep both, or "
                    "remove it from the file",
                )


def _some(names: list[str]) -> str:
    """Return the first name and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
