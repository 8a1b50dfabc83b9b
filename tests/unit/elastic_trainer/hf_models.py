"""Small models in Hugging Face's format, for tests."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState, Commit
from elastic_trainer.model.decoder import build
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.state import hf_names
from elastic_trainer.state.hf_convert import Exported, export_hf
from elastic_trainer.state.storage import CheckpointStorage

SHAPE = ModelShape(num_layers=2, dim=32, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=100)


def random_weights(shape: ModelShape, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return Hugging Face's name -> values that differ from tensor to tensor."""
    out = {}
    for theirs, name in names_of(shape).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        size = build(shape).get_parameter(name).shape
        out[theirs] = torch.randn(size, generator=generator).to(dtype)
    return out


def names_of(shape: ModelShape) -> dict[str, str]:
    """Return Hugging Face's name -> ours, of every parameter."""
    model = build(shape)
    return {hf_names.to_hf(name, model.hf_names): name for name, _ in model.named_parameters()}


def file_names(num_files: int) -> list[str]:
    """Return the files' names as transformers looks for them."""
    if num_files == 1:
        return [hf_names.SINGLE_NAME]
    return [f"model-{i:05d}-of-{num_files:05d}.safetensors" for i in range(1, num_files + 1)]


def write_hf(
    path: Path, shape: ModelShape, weights: dict[str, Tensor], *, num_files: int = 1, **config
) -> Path:
    """Write a directory as `save_pretrained` does and return it."""
    path.mkdir(parents=True)
    files = file_names(num_files)
    names = list(weights)
    parts = [names[i::num_files] for i in range(num_files)]
    for file, part in zip(files, parts, strict=True):
        save_file({n: weights[n] for n in part}, path / file, metadata={"format": "pt"})
    if num_files > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (path / hf_names.INDEX_NAME).write_text(json.dumps(index))
    text = json.dumps({**hf_names.hf_config(shape, "bfloat16"), **config})
    (path / hf_names.CONFIG_NAME).write_text(text)
    return path


def read_hf(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory, each from the file that the index names."""
    if (path / hf_names.SINGLE_NAME).exists():
        return load_file(path / hf_names.SINGLE_NAME)
    weight_map = json.loads((path / hf_names.INDEX_NAME).read_text())["weight_map"]
    loaded = {file: load_file(path / file) for file in set(weight_map.values())}
    assert sum(map(len, loaded.values())) == len(weight_map)
    return {name: loaded[file][name] for name, file in weight_map.items()}


def newest(run: Path) -> Commit:
    """Return the newest commit of a run."""
    current = FileBoard(run / "board").get_state()
    assert current is not None
    return BoardState.decode(current[0]).commits[-1]


def export_run(run: Path, shape: ModelShape, out: Path, **options) -> Exported:
    """Export the newest checkpoint of a run."""
    storage = CheckpointStorage(run / "checkpoints")
    return export_hf(storage, newest(run), shape, out, **options)


def equal_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Return whether names, dtypes, sizes and bytes are equal; NaNs count as their bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))
        for name in left
    )


def partials(folder: Path) -> list[str]:
    """Return what conversions that were cut short have left beside their targets."""
    return [path.name for path in folder.iterdir() if "partial" in path.name]
