"""What transformers says of a config.json, for a launcher that never imports torch.

`python -m elastic_trainer.model.transformers_facts CONFIG_JSON` (or - for standard input) prints
`transformers_config.Answer` as JSON. The class is built on the meta device: no weights, no network,
no code but transformers' own.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import nn

from elastic_trainer.plan.hf_config import WITHOUT_EFFECT
from elastic_trainer.plan.transformers_config import (
    DIMENSIONS,
    Answer,
    Facts,
    dimensions,
    refusal,
)

_EXPERTS: Final = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"
)  # fmt: skip
_CHOSEN: Final = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k",
    "moe_top_k", "top_k_experts",
)  # fmt: skip
_RECURRENT: Final = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent")
"""Of `layer_types`: what carries a state from token to token."""
_HEADS: Final = {
    ("q_proj", "qkv_proj", "query_key_value"): ("attention heads", "num_heads"),
    ("k_proj", "v_proj", "qkv_proj", "query_key_value"): ("KV heads", "num_kv_heads"),
}
"""Projections to heads, as transformers' get_kv_heads_per_rank names those of keys."""


def answer(raw: dict[str, Any]) -> Answer:
    """Return what transformers makes of a config.json; it says itself what it cannot build."""
    from transformers import CONFIG_MAPPING, __version__

    if reason := refusal(raw, raw):
        return Answer(refused=reason)
    if (kind := raw.get("model_type")) not in CONFIG_MAPPING:
        own = "auto_map: code of the model's own is not run; " if raw.get("auto_map") else ""
        none = f"{own}model_type {kind!r:.40}: transformers {__version__} has none such"
        return Answer(refused=none)
    try:
        whole = read(raw)
        cls, reason = _causal(whole)
        if reason is None:
            config = whole if cls.config_class is type(whole) else whole.get_text_config()
            reason = _refused(raw, whole, config, cls)
        if reason is None:
            with torch.device("meta"):
                model = cls._from_config(config)
            reason = _not_causal(model) or _unrotated(model)
        return Answer(facts=_facts(model)) if reason is None else Answer(refused=reason)
    except Exception as error:  # noqa: BLE001  whatever it is: the user reads it
        nothing = [
            key
            for key in raw
            if raw[key] is None and key not in WITHOUT_EFFECT and not key.endswith("_token_id")
        ]
        hint = f"; null in the file: {', '.join(nothing)}" if nothing else ""
        return Answer(error=f"{type(error).__name__}: {error}"[:300] + hint[:200])


def read(raw: Mapping[str, Any]) -> Any:
    """Return transformers' config of a config.json.

    Only from a file is it read as the published ones are meant.
    """
    from transformers import AutoConfig

    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(raw), encoding="utf-8")
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _causal(config: Any) -> tuple[Any, str | None]:
    """Return transformers' causal class of a config, or why none is trained.

    As `AutoModelForCausalLM.from_config`: of several kinds of input the text's part is taken where
    the class is of text alone.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind, parts = type(config), type(config).sub_configs
    alone = "; train its text_config alone, in a config.json of its own"
    way = alone if "text_config" in parts else ""
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None, f"model_type {config.model_type}: transformers has no causal model of it{way}"
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    if isinstance(cls, tuple):
        cls = next((each for each in cls if each.__name__ in (config.architectures or ())), cls[0])
    others = [key for key in parts if key.startswith(("vision", "audio", "text"))]
    if others and cls.config_class is kind:
        return cls, f"{', '.join(others)}: {cls.__name__} takes more than text{way}"
    return cls, None


def _refused(raw: Mapping[str, Any], whole: Any, config: Any, cls: Any) -> str | None:
    """Return what a config asks for that is not trained here, as its class completes it."""
    if (named := raw.get("architectures")) and named != [cls.__name__]:
        return f"architectures {named!r:.60}: of {raw['model_type']} only {cls.__name__} is trained"
    parts = [(raw, whole)]
    if config is not whole:
        parts += [(raw.get("text_config") or {}, config)]
    found = (
        refusal(written, _complete(part), _known(part, written, cls), type(part).__name__)
        for written, part in parts
    )
    return next(filter(None, found), None)


def _not_causal(model: Any) -> str | None:
    """Return that positions see those after them, as in an encoder that is used as a decoder."""
    causal = [each.is_causal for each in model.modules() if hasattr(each, "is_causal")]
    declared = {each.name for each in dataclasses.fields(model.config)}
    encoder = "is_decoder" in declared and not model.config.is_decoder
    if any(causal) or not (causal or encoder):
        return None
    key = "is_decoder false: " if encoder else ""
    return f"{key}positions of {type(model).__name__} see those after them"


def _complete(config: Any) -> dict[str, Any]:
    """Return all that a config says, under the usual names too; not what layers differ in."""
    found = config.to_dict()
    for name in (*config.attribute_map, *itertools.chain(*DIMENSIONS.values())):
        # What is of each layer raises an error of its own.
        with suppress(Exception):
            found[name] = getattr(config, name)
    return found


def _known(config: Any, raw: Mapping[str, Any], model: type[nn.Module]) -> frozenset[str]:
    """Return the keys of `raw` that the config's class, or the code of the model's, knows.

    The config declares them, computes them itself, or takes them away as it reads them, or else the
    model's module reads them; of any other key transformers makes an attribute that nothing reads.
    """
    kind = type(config)
    declared = {each.name for each in dataclasses.fields(kind)} | {"model_type"}
    declared |= {*kind.attribute_map, *kind.attribute_map.values(), *kind.sub_configs}
    found = {key for key in raw if key not in vars(config)}
    code = inspect.getsource(sys.modules[model.__module__])
    found |= {key for key in raw if re.search(rf"config(\.|, \"){re.escape(key)}\b", code)}
    with suppress(Exception):  # it needs the others
        bare = kind(**{key: raw[key] for key in raw if key in declared - {"model_type"}})
        found |= {*dir(bare)}
    return frozenset(declared | found)


def _unrotated(model: Any) -> str | None:
    """Return that a class rotates whole heads though its config says a part of them."""
    config = _complete(model.config)
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1)
    turned = {2 * each.numel() for name, each in model.named_buffers() if "inv_freq" in name}
    if share == 1 or not turned:
        return None
    sizes = dimensions(config)
    if turned != {sizes.get("head_dim") or sizes["dim"] // sizes["num_heads"]}:
        return None
    return f"partial_rotary_factor {share}: {type(model).__name__} rotates whole heads"


def _facts(model: Any) -> Facts:
    config = model.config
    complete = _complete(config)
    sizes = dimensions(complete)
    plan = dict(model.tp_plan or {})
    kinds = complete.get("layer_types") or ()
    return Facts(
        architecture=type(model).__name__,
        params=sum(each.numel() for each in model.parameters()),
        active=_active(model, complete),
        sizes=sizes,
        tie_embeddings=_tied(model),
        attention=config._attn_implementation or "eager",  # noqa: SLF001
        attentions=_attentions(model),
        tp_plan=plan or None,
        tp_sizes=_tp_sizes(model, plan, sizes),
        linears=_linears(model),
        recurrent=model._is_stateful or any(kind in _RECURRENT for kind in kinds),  # noqa: SLF001
    )


def _linears(model: Any) -> dict[str, int]:
    """Return `Facts.linears`: what peft takes for linear, Conv1D of GPT-2 too."""
    from transformers.pytorch_utils import Conv1D

    found: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not model.get_output_embeddings():
            name = path.rpartition(".")[2]
            found[name] = found.get(name, 0) + sum(module.weight.shape)
    return found


def _tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _attentions(model: Any) -> tuple[str, ...]:
    """Return the attn_implementation that the class has, whatever is installed here."""
    has = {
        "eager": True,
        "sdpa": model._supports_sdpa,  # noqa: SLF001
        "flash_attention_2": model._supports_flash_attn,  # noqa: SLF001
        "flash_attention_3": model._supports_flash_attn,  # noqa: SLF001
    }
    return tuple(name for name, supported in has.items() if supported)


def _active(model: nn.Module, config: Mapping[str, Any]) -> int:
    """Return the parameters that a token meets: of experts as many as it goes to."""
    inner = (each for each in config.values() if isinstance(each, Mapping))
    places = [config, *inner]
    experts, chosen = (
        next((int(at[key]) for key in keys for at in places if at.get(key)), 1)
        for keys in (_EXPERTS, _CHOSEN)
    )
    total = 0.0
    for name, param in model.named_parameters():
        split = param.dim() > 2 and param.shape[0] == experts
        of_experts = experts > 1 and (split or "experts" in name.split("."))
        total += param.numel() * (min(1.0, chosen / experts) if of_experts else 1.0)
    return round(total)


def _tp_sizes(
    model: nn.Module, plan: Mapping[str, str], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return what tp must divide, in words: heads, and widths of other modules.

    Not the vocabulary, whose parts are gathered and may differ.
    """
    found: dict[str, int] = {}
    parts, attention = dict(_cut(model, plan)), set()
    for names, (words, dimension) in _HEADS.items():
        for pattern in parts:
            parent, _, name = pattern.rpartition(".")
            if name in names and plan[pattern] == "colwise" and dimension in sizes:
                attention.add(parent)
                found[words] = sizes[dimension]
    for pattern, size in parts.items():
        known = {*found.values(), sizes.get("vocab_size")}
        if pattern.rpartition(".")[0] not in attention and size not in known:
            found[f"width of {pattern}"] = size
    return found


def _cut(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield each module that tp cuts, with * for numbers, and the size that is cut."""
    for name, module in model.named_modules():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        style, weight = plan.get(pattern, ""), getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            if style.startswith("colwise"):
                yield pattern, weight.shape[0]
            elif style.startswith("rowwise"):
                yield pattern, weight.shape[1]


def main() -> None:
    """Print the answer of the file named on the command line."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    text = sys.stdin.read() if sys.argv[1] == "-" else Path(sys.argv[1]).read_text("utf-8")
    print(json.dumps(dataclasses.asdict(answer(json.loads(text)))))  # noqa: T201


if __name__ == "__main__":
    main()
