"""A step of torchtitan 0.3's Llama on a processor, for benchmarks/collectives.py.

Its own model, sharding, pipeline, loss and clipping, and torch's AdamW. What a processor or a fake
group lacks is put in its place: FlexAttention's kernel, whose backward torch has for GPUs only,
becomes scaled dot product attention of the same queries, keys and values; and what the next stage
of a pipeline says of its shapes is what it was told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import schedules, stage
from torch.distributed.pipelining._utils import InferenceMode, _StageBackwardMeta
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims, utils
from torchtitan.models import llama3
from torchtitan.models.common.attention import FlexAttention, get_causal_mask_mod
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape

SPMD = "partial_dtensor"
"""Not torchtitan's default, spmd_types: FSDP2 of torch 2.13 refuses the plain tensors it makes."""


def titan_step(
    layout: ParallelLayout, shape: ModelShape, seq_len: int, num_micro_batches: int
) -> tuple[Callable[[], None], list[Tensor]]:
    """Return one step of rank 0, which sets up when it first runs, and what is on its device.

    Args:
        layout: of all ranks; the default process group has them.
        shape: a Llama's.
        seq_len: tokens of a whole sequence.
        num_micro_batches: a step, of one sequence each.
    """
    _as_on_a_gpu()
    dims = ParallelDims(
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        ep=1,
        world_size=layout.world_size,
        spmd_backend=SPMD,
    )
    dims.build_mesh()
    utils.set_spmd_backend(SPMD)
    config = _config(shape, seq_len)
    with torch.device("meta"):
        model = config.build()
    given: dict[str, Any] = {
        "parallel_dims": dims,
        "training": TrainingConfig(
            mixed_precision_param="bfloat16", local_batch_size=num_micro_batches
        ),
        "parallelism": ParallelismConfig(spmd_backend=SPMD, pipeline_parallel_degree=layout.pp),
        "compile_config": CompileConfig(),
        "ac_config": None,
        "dump_folder": "",
    }
    loss = CrossEntropyLoss(CrossEntropyLoss.Config(global_vocab_size=shape.vocab_size))
    schedule = None
    if layout.pp > 1:
        schedule, parts, *_ = llama3.pipeline_llm(
            model,
            **given,
            device=torch.device("cpu"),
            model_config=config,
            parallelize_fn=llama3.parallelize_llama,
            loss_fn=loss,
        )
    else:
        parts = [llama3.parallelize_llama(model, **given)]
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_states()
    params = [param for part in parts for param in part.parameters()]
    optimizer = torch.optim.AdamW(params)
    size = seq_len // layout.cp
    mask = create_block_mask(get_causal_mask_mod(), None, None, size, seq_len, device="cpu")
    positions = torch.arange(size).expand(num_micro_batches, -1)
    tokens = torch.ones(num_micro_batches, size, dtype=torch.int64)
    count = torch.tensor(num_micro_batches * seq_len)

    def step() -> None:
        if schedule is not None:
            schedule.step(tokens, positions=positions, attention_masks=mask, return_outputs=False)
        else:
            for batch, where in zip(tokens.split(1), positions.split(1), strict=True):
                loss(model(batch, where, mask), batch, count)[0].backward()
        pp_mesh = dims.get_optional_mesh("pp")
        utils.clip_grad_norm_(params, 1.0, foreach=True, pp_mesh=pp_mesh)
        optimizer.step()
        optimizer.zero_grad()

    return step, [*params, tokens]


def _config(shape: ModelShape, seq_len: int) -> Any:
    config = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    config.dim, config.vocab_size = shape.dim, shape.vocab_size
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = shape.vocab_size
    config.tok_embeddings.embedding_dim = config.lm_head.in_features = shape.dim
    config.norm.normalized_shape = shape.dim
    rope = llama3.ComplexRoPE.Config(
        dim=shape.head_size, max_seq_len=seq_len, theta=shape.rope_theta
    )
    config.layers = llama3._build_llama3_layers(  # noqa: SLF001
        n_layers=shape.num_layers,
        dim=shape.dim,
        n_heads=shape.num_heads,
        n_kv_heads=shape.num_kv_heads,
        hidden_dim=shape.ffn_dim,
        fuse_qkv=False,
        attn_backend="flex",
        rope=rope,
    )
    set_llama3_sharding_config(config, enable_sp=True)
    return config


def _as_on_a_gpu() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **_rest: object) -> Any:
        out = scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)
        return out, SimpleNamespace(lse=None)

    told: dict[int, Any] = {}

    def agree(_schedule: object, stages: list[Any], *_args: object) -> None:
        for each in stages:
            each._inference_mode = InferenceMode.DYNAMIC  # noqa: SLF001

    def send(_stage: object, meta: Any, to: int) -> None:
        told[to] = meta

    def receive(_stage: object, source: int) -> _StageBackwardMeta:
        """Return what the next stage says of its input's gradients: they are like its input."""
        metas = told[source].forward_metas
        return _StageBackwardMeta(
            backward_metas=tuple(dataclasses.replace(meta, requires_grad=False) for meta in metas)
        )

    parallel_dims.device_type = "cpu"
    FlexAttention.compiled_flex_attn = staticmethod(attend)
    schedules._PipelineSchedule._warmup_p2p = agree  # noqa: SLF001
    stage.PipelineStage._send_meta = send  # noqa: SLF001
    stage.PipelineStage._recv_meta = receive  # noqa: SLF001
