"""Files of transformers' own classes: their tensors under other names, some of them in other forms.

transformers knows which: it fuses a layer's experts in memory, and its files have them apart. What
it does to a whole model when it loads and saves one is done here to a few tensors at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from elastic_trainer.model.transformers_model import TransformersModel
from elastic_trainer.plan.models import Transformers
from elastic_trainer.state.errors import InputError
from elastic_trainer.state.hf_source import DTYPES, HFSource

Load = Callable[[str], Tensor]
"""Name -> the whole tensor, on the CPU."""


class Conversion:
    """Tensors in one form made from those in the other: of files to memory, or back.

    Args:
        model: of transformers' class, on the meta device.
        given: meta tensors by name, of the right sizes and dtypes.
        load: of what is given.
        saving: from memory to files.
    """

    def __init__(
        self, model: Any, given: Mapping[str, Tensor], load: Load, *, saving: bool
    ) -> None:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

        self._model, self._load, self._loading, self._saving = model, load, loading, saving
        transforms = conversion_mapping.get_model_conversion_mapping(model, add_legacy=not saving)
        if saving:
            # As transformers does of a model that it has not loaded: no file had the prefix.
            kept = [each for each in transforms if not isinstance(each, loading.PrefixChange)]
            transforms = [each.reverse_transform() for each in reversed(kept)]
        self._renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        self._known = model.state_dict()
        self._groups: dict[str, list[tuple[str, str | None]]] = {}
        """First name that is made -> the names it is made from, each with its pattern."""
        for name in sorted(given, key=loading.dot_natural_key):
            renamed, pattern = self._renamed(name)
            self._groups.setdefault(renamed, []).append((name, pattern))
        self._group_of: dict[str, str] = {}
        self.made: dict[str, Tensor] = {}
        """Meta tensors by name."""
        for group in self._groups:
            if saving or group in self._known:
                for name, tensor in self._convert(group, given.__getitem__).items():
                    self._group_of[name], self.made[name] = group, tensor
        self.left = [
            name
            for group, members in self._groups.items()
            for name, _ in members
            if not saving and group not in self._known
        ]
        """Given, and not known of the class."""
        self._last: tuple[str, dict[str, Tensor]] = "", {}

    def read(self, name: str) -> Tensor:
        """Return what is made; what is made with it is kept until another is asked for."""
        group = self._group_of[name]
        if self._last[0] != group:
            self._last = "", {}  # its memory first
            self._last = group, self._convert(group, self._load)
        return self._last[1][name]

    def _renamed(self, name: str) -> tuple[str, str | None]:
        if self._saving:
            renamed, pattern = self._loading.apply_converters(name, self._converters)
            if pattern is None:
                renamed = self._loading.apply_renamings(name, self._renamings)
            return renamed, pattern
        around = self._model.base_model_prefix, self._known
        found: tuple[str, str | None] = self._loading.rename_source_key(
            name, self._renamings, self._converters, *around
        )
        if found[0] not in self._known and name in self._known:
            return name, None
        return found

    def _convert(self, group: str, load: Load) -> dict[str, Tensor]:
        """Return what is made of a group, by name."""
        members = self._groups[group]
        first, pattern = members[0]
        if pattern is None:
            transform = self._loading.WeightRenaming(first, group)
        else:
            transform = deepcopy(next(c for c in self._converters if pattern in c.source_patterns))
        for name, its_pattern in members:
            transform.add_tensor(group, name, its_pattern or name, partial(load, name))
        made = transform.convert(group, model=self._model, config=self._model.config)
        out = {}
        for name, value in made.items():
            renames = self._saving and pattern is not None
            final = self._loading.apply_renamings(name, self._renamings) if renames else name
            out[final] = value[0] if isinstance(value, list) else value
        return out


class TransformersSource(HFSource):
    """The weights of transformers' own class in Hugging Face's format, checked but for the values.

    `sizes` has all that a checkpoint keeps of the class, parameters and buffers, tied ones by each
    of their names.

    Raises:
        ModelError: the class cannot be built.
        InputError: HF323 to HF326, as `HFSource`.
    """

    def __init__(self, directory: Path, shape: Transformers) -> None:
        self._dir, self.shape = directory, shape
        self._file_of: dict[str, Path] = {}
        found = self._read_headers().state_dict_metadata
        model = TransformersModel(shape).theirs
        given = {name: _on_meta(entry) for name, entry in found.items()}
        self._conversion = Conversion(model, given, self._whole, saving=False)
        state = model.state_dict()
        self.sizes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in state.items()}
        self._buffers = {name: each for name, each in model.named_buffers() if name in state}
        self._name_of = {name: name for name in state}
        for target, source in model.all_tied_weights_keys.items():
            self._tie(target, source)
        self._check_names(model)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of what the class has as `name`, of its dtype.

        Raises:
            InputError: HF323, HF324, the file changed since it was checked.
        """
        tensor = self._all_of(name)
        return (tensor[start:stop] if tensor.ndim else tensor).to(self.dtypes[name])

    def _all_of(self, name: str) -> Tensor:
        name = self._name_of[name]
        if name not in self._conversion.made:
            return self._buffers[name]
        return self._conversion.read(name)

    def _whole(self, theirs: str) -> Tensor:
        path = self._file_of[theirs]
        with self._opened(path), safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(theirs)
        return tensor

    def _tie(self, target: str, source: str) -> None:
        """Have one of two tied names read what the files have of the other."""
        made = self._conversion.made
        if target not in made:
            self._name_of[target] = source
        elif source not in made:
            self._name_of[source] = target
        elif not torch.equal(self._all_of(target).clone(), self._all_of(source)):
            raise InputError(
                "HF325",
                f"{self._dir}: {target} differs from {source}, while the class ties the two: set "
                "tie_word_embeddings: false to keep both, or remove it from the file",
            )

    def _check_names(self, model: Any) -> None:
        made = self._conversion.made
        missing = [
            name
            for name, known in self._name_of.items()
            if known not in made and known not in self._buffers
        ]
        if missing:
            raise InputError(
                "HF325",
                f"{self._dir} lacks {missing[0]} and {len(missing) - 1} more: bring all files of "
                "the model, and the config.json that belongs to them",
            )
        ignored = model._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001
        extra = [
            name
            for name in self._conversion.left
            if not _like(name, ignored) and "rotary_emb.inv_freq" not in name
        ]
        if extra:
            raise InputError(
                "HF325",
                f"{self._dir} holds {extra[0]} and {len(extra) - 1} more, for which "
                f"{type(model).__name__} has no place: use the config that belongs to the files",
            )
        for name, tensor in made.items():
            if self.dtypes[name].is_floating_point and tensor.dtype not in DTYPES:
                raise InputError(
                    "HF326",
                    f"{self._dir}: {name} is {tensor.dtype}: convert it to one of {DTYPES}, or use "
                    "the published weights before quantization",
                )
            if tuple(tensor.shape) != self.sizes[name]:
                raise InputError(
                    "HF325",
                    f"{self._dir}: {name} has size {list(tensor.shape)}, config.json makes it "
                    f"{list(self.sizes[name])}: use the config that belongs to the files",
                )


def _on_meta(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")


def _like(name: str, patterns: Any) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
