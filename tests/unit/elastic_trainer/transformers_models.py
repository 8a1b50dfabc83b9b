"""Tiny models of transformers' own classes, and their training here and by plain torch."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.data import IGNORED
from elastic_trainer.data.index import micro_batch_samples
from elastic_trainer.model.transformers_probe import SIZES, small_config
from elastic_trainer.parallel.apply import initialise
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    OptimizerConfig,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout, micro_batches_per_rank
from elastic_trainer.plan.models import FAMILIES, Transformers
from elastic_trainer.state.state import clean_name
from elastic_trainer.train.engine import Engine
from elastic_trainer.train.feed import MicroBatch
from elastic_trainer.train.optimizer import (
    build_optimizer,
    clip_gradients,
    gradient_square_sum,
    learning_rate,
    set_learning_rate,
)

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    # Of its imports, not of what is tested.
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CPU = torch.device("cpu")
STEPS, GLOBAL_BATCH, SEQ_LEN = 3, 4, 24
VOCABULARY = SIZES["vocab_size"]


def tiny_shape(kind: str, **values: object) -> Transformers:
    """Return the shape of a small model of `kind`, transformers' `model_type`, without dropout."""
    config = _tiny(kind, **values)
    text = json.dumps(config.to_dict(), sort_keys=True, separators=(",", ":"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(param.numel() for param in model.parameters())
    tied = bool(getattr(model, "all_tied_weights_keys", None))
    return Transformers(
        num_layers=2, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=VOCABULARY,
        tie_embeddings=tied, config=text, params=count, active=count,
    )  # fmt: skip


def _tiny(kind: str, **values: object) -> transformers.PreTrainedConfig:
    default = vars(CONFIG_MAPPING[kind]())
    random = ("drop", "jitter")  # is not trained here
    off = {k: 0.0 for k, v in default.items() if isinstance(v, float) and any(map(k.count, random))}
    return small_config(kind, {**off, **values}, num_hidden_layers=2)


def kinds(seed: int) -> Iterator[str]:
    """Yield the kinds of causal models that no family here is, in the order of `seed`."""
    found = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING) - set(FAMILIES))
    random.Random(seed).shuffle(found)
    yield from found


def small_models(seed: int) -> Iterator[tuple[str, Transformers, transformers.PreTrainedModel]]:
    """Yield those that transformers makes small ones of that train; sizes may not fit together."""
    found = []
    for kind in kinds(seed):
        with suppress(Exception):
            shape = tiny_shape(kind)
            if shape.params < 2e6:
                model = plain(shape)
                model(input_ids=tokens(1)[:, :-1], use_cache=False).logits.sum().backward()
                model.zero_grad(set_to_none=True)
                found.append((kind, shape, model))
        yield from found
        found.clear()


def plain(shape: Transformers) -> transformers.PreTrainedModel:
    """Return transformers' model as transformers makes it, in fp32."""
    raw = json.loads(shape.config)
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tokens(step: int) -> Tensor:
    """Return the global batch of `step`, with one token more for the targets."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(2, VOCABULARY, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)


def config_of(shape: Transformers, layout: ParallelLayout, **train: object) -> TrainConfig:
    """Return the job: micro-batches of one sequence, warm-up, and a norm that is always clipped."""
    given = {"precision": "fp32", "recompute": "none", **train}
    rounds = micro_batches_per_rank(GLOBAL_BATCH, layout.dp)
    return TrainConfig(
        name="t", run_id="run-1", model_name="tiny", model=shape, gpus_per_node=1, device="cpu",
        ladder=Ladder((Rung(num_nodes=layout.world_size, layout=layout, micro_batches=rounds),)),
        train=TrainSection(
            seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, steps=STEPS, seed=7,
            optimizer=OptimizerConfig(lr=3e-4, warmup_steps=1, clip_norm=0.5), **given,
        ),
        data=DataSection(path="/nowhere"), checkpoint=CheckpointSection(dir="/nowhere"),
        elastic=ElasticSection(start_ceiling_s=40.0),
    )  # fmt: skip


def train(
    config: TrainConfig,
    weights: dict[str, Tensor] | None = None,
    begin: Callable[[torch.nn.Module], object] = lambda _: None,
) -> list[list[float]]:
    """Return loss and gradient norm of each step of this rank's engine; collective.

    `weights`: what it begins with, whole; None: its initial values, and what `begin` gives it.
    """
    layout = config.ladder.rungs[0].layout
    engine = Engine(config, config.ladder.rungs[0], dist.get_rank(), CPU)
    engine.allocate()
    initialise(engine.model, config.train.seed)
    if weights is not None:
        for name, param in engine.model.theirs.named_parameters():
            param.data.copy_(weights[clean_name(name)])
    begin(engine.model)
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    found = []
    for step in range(1, STEPS + 1):
        loss_sum = engine.forward_backward(_batches(step, layout.dp, engine.coordinate["dp"]),
                                           GLOBAL_BATCH * SEQ_LEN)  # fmt: skip
        sums = torch.stack([loss_sum, gradient_square_sum(engine.model, tp=layout.tp)])
        dist.all_reduce(sums)
        loss, norm = sums[0].item() / (GLOBAL_BATCH * SEQ_LEN), sums[1].item() ** 0.5
        _update(engine.model, optimizer, norm, step, config)
        found.append([loss, norm])
    return found


def _batches(step: int, dp: int, rank: int) -> Iterator[MicroBatch]:
    """Yield this rank's sequences, as the trainer's feed does: the last may fill up the step."""
    batch, first = tokens(step), (step - 1) * GLOBAL_BATCH
    rounds = micro_batches_per_rank(GLOBAL_BATCH, dp)
    for samples in micro_batch_samples(
        step, global_batch=GLOBAL_BATCH, micro_batch=1, dp=dp, dp_rank=rank, rounds=rounds
    ):
        rows = batch[:1] if samples is None else batch[samples.start - first :][:1]
        targets = rows[:, 1:]
        yield MicroBatch(
            rows[:, :-1], torch.full_like(targets, IGNORED) if samples is None else targets
        )


def _update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    norm: float,
    step: int,
    config: TrainConfig,
) -> None:
    clip_gradients(model, norm, config.train.optimizer.clip_norm)
    set_learning_rate(optimizer, learning_rate(step, steps=STEPS, config=config.train.optimizer))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train_plain(model: transformers.PreTrainedModel, config: TrainConfig) -> list[list[float]]:
    """Return the same of transformers and torch.optim.AdamW alone, all of a batch at once."""
    given = config.train.optimizer
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": given.weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(given.beta1, given.beta2),
        eps=given.eps,
    )
    found = []
    for step in range(1, STEPS + 1):
        batch = tokens(step)
        logits = model.train()(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, given.clip_norm).item()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=STEPS, config=given)
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item(), norm])
    return found


def train_each(
    names: list[str], layout: ParallelLayout, values: dict[str, object], options: dict[str, object]
) -> dict[str, list[list[float]]]:
    """Return what `train` does of small models of these kinds; a job of `run_world`.

    `values` are of their configs, `options` of the job's `train`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of slow kernels and the like
        return {
            name: train(config_of(tiny_shape(name, **values), layout, **options)) for name in names
        }


def weights_of(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Return copies of a model's parameters by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}
