"""A causal model of transformers' own class, as the engine takes it.

transformers is imported where a model is built, not with this module: other jobs need none.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elastic_trainer.model.adapters import add_adapters, initial_values
from elastic_trainer.model.decoder import CausalModel, ModelError, initial_rows
from elastic_trainer.model.transformers_facts import read
from elastic_trainer.plan.models import Transformers

SMALL = 1 << 20
"""Elements of a parameter that each process can hold whole."""
SEED = 0
"""Of initial values that a class draws itself: few and small, the same in every run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialRule:
    """How a parameter begins: normal values, or `whole`."""

    mean: float = 0.0
    deviation: float = 0.0
    whole: Tensor | None = None
    zero_row: int | None = None
    """That of padding, in an embedding."""


class TransformersModel(CausalModel):
    """transformers' class of `shape.config`: parameters on the meta device, buffers on the CPU.

    With `shape.lora` all of it is frozen but adapters, which are beside.

    Raises:
        ModelError: HF334, transformers cannot be imported; HF335, the class cannot be built, or not
            trained here; HF336, peft cannot be imported.
    """

    shape: Transformers
    has_head = True
    whole_logits: ClassVar[bool] = True

    def __init__(self, shape: Transformers) -> None:
        super().__init__()
        self.shape = shape
        self._theirs, self._rules = _made(shape)  # checkpoints leave its name out
        if shape.lora is not None:
            add_adapters(self._theirs, shape.lora)
        self._takes = inspect.signature(self._theirs.forward).parameters
        owners = _owners(self)
        self._blocks = _names_of_blocks(self)
        if not all(_alone(self, [name], owners) for name in self._blocks):
            self._blocks = []  # they share weights, which only all together can gather
        self._first, self._last = _names_of_ends(self, owners)

    @property
    def theirs(self) -> Any:
        """The model of transformers' class."""
        return self._theirs

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map tokens (B, T) to logits (B, T, V).

        Args:
            tokens: int64.
            positions: (T,) int64.
            documents: see `Decoder.forward`. transformers makes the mask of each kind of layer from
                positions that begin again with each document.
        """
        given: dict[str, Any] = {"use_cache": False} if "use_cache" in self._takes else {}
        if documents is not None:
            given["position_ids"] = positions - documents
        logits: Tensor = self._theirs(input_ids=tokens, **given).logits
        return logits

    def blocks(self) -> dict[str, nn.Module]:
        """Return the layers."""
        return {name: self.get_submodule(name) for name in self._blocks}

    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return embedding and head, as far as nothing else has their parameters."""
        first, last = ([self.get_submodule(name) for name in names]
                       for names in (self._first, self._last))  # fmt: skip
        return first, last

    def allocate(self, device: torch.device) -> None:
        """Give parameters memory, and bring buffers to `device`."""
        kept = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self.to_empty(device=device)
        for module, name, buffer in kept:
            setattr(module, name, buffer.to(device))

    def tie(self) -> None:
        """Make one parameter of those that the class ties."""
        self._theirs.tie_weights(recompute_mapping=False)

    def positions(self, positions: Tensor, device: torch.device) -> Tensor:
        """Return `positions` on the device."""
        return positions.to(device)

    def initial_values(self, name: str, size: torch.Size, rows: range, seed: int) -> Tensor:
        """Return rows of the initial value of parameter `name`, drawn as the class says.

        Normal values with the mean and deviation of the class's own, of (seed, name, row) alone;
        what it computes, as the decays of a state space, is as it computes it. With adapters `name`
        is of theirs: what is frozen has no initial values.

        Raises:
            ModelError: HF335, the class says nothing of it.
        """
        if self.shape.lora is not None:
            return initial_values(name, size, rows, seed)
        rule = self._rules.get(name)
        if rule is None:
            raise ModelError(
                "HF335",
                f"{type(self._theirs).__name__} does not say how {name} begins: start from "
                "weights (start_from)",
            )
        if rule.whole is not None:
            return rule.whole[rows.start : rows.stop]
        drawn = initial_rows(name, size, rows, seed, mean=rule.mean, deviation=rule.deviation)
        if rule.zero_row is not None and rule.zero_row in rows:
            drawn[rule.zero_row - rows.start] = 0.0
        return drawn


# -- Building the class ---------------------------------------------------------------------------


def _made(shape: Transformers) -> tuple[Any, dict[str, InitialRule]]:
    """Return the class's instance, and by name how its parameters begin."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a worker asks the network for nothing
    try:
        from transformers import AutoModelForCausalLM, initialization
    except ImportError as error:
        raise ModelError(
            "HF334",
            f"transformers cannot be imported on this node ({error}): pip install "
            "'holdfast-ml[hf]'",
        ) from error
    # transformers' own default is sdpa too, but not of classes that have none.
    attention = None if shape.attention == "sdpa" else shape.attention
    notes = _Notes()
    try:
        config = read(json.loads(shape.config))
        with notes.taken(initialization), _large_on_meta():
            model = AutoModelForCausalLM.from_config(
                config,
                trust_remote_code=False,
                attn_implementation=attention,
                dtype=torch.float32,
            )
    except Exception as error:
        raise ModelError(
            "HF335",
            f"transformers cannot build a causal model of this config ({type(error).__name__}: "
            f"{error}): fix model, or use another version of transformers",
        ) from error
    _refuse(model)
    rules = {
        name: rule
        for name, param in model.named_parameters()
        if (rule := notes.rule_of(param)) is not None
    }
    _to_meta(model)
    return model, rules


def _refuse(model: Any) -> None:
    """Raise where training it here would be something else than what the class does."""
    kind = type(model).__name__
    if scalars := [name for name, param in model.named_parameters() if not param.ndim]:
        raise ModelError("HF335", f"{kind}: {scalars[0]} is a scalar, which FSDP does not cut")
    for key, value in model.config.to_dict().items():
        is_on = isinstance(value, float) and value > 0.0
        if is_on and "drop" in key and not key.startswith(("classifier", "summary")):
            raise ModelError("HF335", f"{kind}: {key} {value} is not done: set it to 0.0")
    if model.config.is_encoder_decoder:
        raise ModelError("HF335", f"{kind} has an encoder: only decoders are trained")


@contextmanager
def _large_on_meta() -> Iterator[None]:
    """Have modules register large parameters without memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        large = param is not None and param.numel() > SMALL and not param.is_meta
        register(module, name, _meta(param) if large else param)

    with mock.patch.object(nn.Module, "register_parameter", on_meta):
        yield


def _to_meta(model: nn.Module) -> None:
    """Take the memory from all parameters; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, made.setdefault(id(param), _meta(param)))


def _meta(param: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


def _owners(model: nn.Module) -> dict[int, set[int]]:
    """Return which modules have each parameter: several, where it is tied."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for _, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(param), set()).add(id(module))
    return owners


def _alone(model: nn.Module, group: list[str], owners: Mapping[int, set[int]]) -> bool:
    """Return whether no module outside `group` has one of its parameters."""
    modules = [model.get_submodule(name) for name in group]
    inside = {id(module) for each in modules for module in each.modules()}
    return all(owners[id(param)] <= inside for each in modules for param in each.parameters())


def _names_of_blocks(model: nn.Module) -> list[str]:
    """Return the names of the layers: of the list of modules with the most parameters."""
    lists = {
        name: sum(param.numel() for param in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    largest = max(lists, key=lambda name: lists[name], default=None)
    if largest is None:
        return []
    return [f"{largest}.{name}" for name, _ in model.get_submodule(largest).named_children()]


def _names_of_ends(
    model: TransformersModel, owners: Mapping[int, set[int]]
) -> tuple[list[str], list[str]]:
    """Return what `ends` does, by name."""
    name_of = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.theirs.get_input_embeddings(), model.theirs.get_output_embeddings()
    if head is None or id(embedding) not in name_of or id(head) not in name_of:
        return [], []
    first, last = [name_of[id(embedding)]], [name_of[id(head)]]
    if _alone(model, last, owners):
        simple = isinstance(embedding, nn.Embedding) and _alone(model, first, owners)
        return first if simple else [], last
    both = [*first, *last]
    return [], both if first != last and _alone(model, both, owners) else []


# -- How parameters begin -------------------------------------------------------------------------


class _Notes:
    """What is done to each parameter while its module is made and initialised.

    transformers' functions, which all classes use, do it to small parameters as ever; to large
    ones, which are on the meta device, it is only noted.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Tensor, int, InitialRule | None]] = {}
        """By id: the tensor, which keeps the id its own, and its version after what was noted."""

    @contextmanager
    def taken(self, initialization: Any) -> Iterator[None]:
        """Take notes of functions of module `initialization`, and of torch.nn.init's."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(SEED)
            for name, rule_of in _RULES.items():
                noting = self._noting(getattr(initialization, name), rule_of)
                stack.enter_context(mock.patch.object(initialization, name, noting))
            stack.enter_context(initialization.guard_torch_init_functions())
            stack.enter_context(_EmptyIsNan())
            yield

    def rule_of(self, param: Tensor) -> InitialRule | None:
        """Return how `param` begins; None: not known."""
        _, version, rule = self._noted.get(id(param), (param, -1, None))
        if version == param._version and rule is not None:  # noqa: SLF001
            return rule
        if param.is_meta or not param.isfinite().all():
            return None
        return InitialRule(whole=param.detach().float().clone())

    def _noting(self, function: Callable[..., Tensor], rule_of: _RuleOf) -> Callable[..., Tensor]:
        signature = inspect.signature(function)

        def note(*args: Any, **kwargs: Any) -> Tensor:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            tensor, *_ = given.arguments.values()
            if not tensor.is_meta:
                function(*args, **kwargs)
            rule, of = rule_of(*given.arguments.values()), tensor
            if (whole := tensor._base) is not None:  # noqa: SLF001
                of, _, rule = self._noted.get(id(whole), (whole, 0, None))
                if rule is not None and function.__name__ == "zeros_":  # of one row
                    row = tensor.storage_offset() // whole.stride(0)
                    rule = replace(rule, zero_row=row)
            self._noted[id(of)] = of, of._version, rule  # noqa: SLF001
            return tensor

        return note


class _EmptyIsNan(TorchFunctionMode):
    """Has small tensors that nobody has written to hold NaN, so that they are known."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _EMPTY and made.is_floating_point() and made.numel() <= SMALL:
            made.fill_(math.nan)
        return made


_EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


_RuleOf = Callable[..., InitialRule | None]
"""Called with the tensor and the function's other arguments, in their order."""


def _constant(_tensor: Tensor, val: float = 0.0) -> InitialRule:
    return InitialRule(mean=val)


def _normal(_tensor: Tensor, mean: float, std: float, *_: object) -> InitialRule:
    return InitialRule(mean=mean, deviation=std)


def _cut_normal(
    _tensor: Tensor, mean: float, std: float, a: float, b: float, *_: object
) -> InitialRule:
    """Return the moments of normal values of which only those from `a` to `b` are kept."""
    if std == 0.0:
        return InitialRule(mean=mean)
    low, high = (a - mean) / std, (b - mean) / std
    at_low, at_high = (math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (low, high))
    share = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
    shift = (at_low - at_high) / share
    variance = 1 + (low * at_low - high * at_high) / share - shift**2
    return InitialRule(mean=mean + std * shift, deviation=std * math.sqrt(variance))


def _uniform(_tensor: Tensor, a: float, b: float, *_: object) -> InitialRule:
    return InitialRule(mean=(a + b) / 2, deviation=(b - a) / math.sqrt(12))


def _xavier(tensor: Tensor, gain: float, *_: object) -> InitialRule:
    return InitialRule(deviation=gain * math.sqrt(2 / sum(_fans(tensor))))


def _kaiming(tensor: Tensor, a: float, mode: str, nonlinearity: str, *_: object) -> InitialRule:
    fan_in, fan_out = _fans(tensor)
    gain = nn.init.calculate_gain(nonlinearity, a)
    return InitialRule(deviation=gain / math.sqrt(fan_in if mode == "fan_in" else fan_out))


def _fans(tensor: Tensor) -> tuple[int, int]:
    """Return inputs and outputs of a matrix or convolution, as torch.nn.init counts them."""
    fan_out, fan_in, *window = tensor.shape
    return fan_in * math.prod(window), fan_out * math.prod(window)


def _given(tensor: Tensor, other: Tensor) -> InitialRule | None:
    known = tensor.is_meta and not other.is_meta  # of a small one it is known what it is then
    return InitialRule(whole=other.float().expand(tensor.shape)) if known else None


_RULES: Final[Mapping[str, _RuleOf]] = {
    "zeros_": _constant,
    "ones_": partial(_constant, val=1.0),
    "constant_": _constant,
    "normal_": _normal,
    "trunc_normal_": _cut_normal,
    "uniform_": _uniform,
    "xavier_uniform_": _xavier,
    "xavier_normal_": _xavier,
    "kaiming_uniform_": _kaiming,
    "kaiming_normal_": _kaiming,
    "copy_": _given,
}
"""Function of transformers.initialization -> what a parameter begins with after it."""
