"""Llama 3's own layouts, built for single ranks without their GPUs."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest
import torch

from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout, split_layers
from elastic_trainer.plan.models import PRESETS, Mixtral, ModelShape
from elastic_trainer.train.rank_part import main, rank_part

PAPER = {
    "8,192 GPUs": ("llama3-405b", ParallelLayout(tp=8, cp=1, pp=16, dp=64), 8192),
    "16,384 GPUs": ("llama3-405b", ParallelLayout(tp=8, cp=1, pp=16, dp=128), 8192),
    "16,384 GPUs, long": ("llama3-405b", ParallelLayout(tp=8, cp=16, pp=16, dp=8), 131072),
}
"""arXiv 2407.21783, table 4; of the last row the dp that gives its 16,384 GPUs."""
OTHERS = {
    "70b": ("llama3-70b", ParallelLayout(tp=8, pp=4, dp=16), 8192),
    "70b hsdp": ("llama3-70b", ParallelLayout(tp=8, pp=8, dp=8, dp_replicate=2), 8192),
    "8b": ("llama3-8b", ParallelLayout(dp=64), 8192),
    "8b tp cp": ("llama3-8b", ParallelLayout(tp=4, cp=2, dp=8), 8192),
}


QUICK = ("16,384 GPUs, long", "70b hsdp")
"""All axes at once, and replicas."""


def config_of(name, layout, seq_len, *, shape=None, interleave=1):
    rung = Rung(num_nodes=max(1, layout.world_size // 8), layout=layout, micro_batches=32)
    return TrainConfig(
        name="t",
        run_id="t",
        model_name=name,
        model=shape or PRESETS[name],
        ladder=Ladder((rung,)),
        gpus_per_node=8,
        device="cuda",
        train=TrainSection(seq_len=seq_len, global_batch=32 * layout.dp, steps=1),
        data=DataSection(path="/nowhere"),
        checkpoint=CheckpointSection(dir="/nowhere"),
        elastic=ElasticSection(),
        schedule="interleaved" if interleave > 1 else "1f1b",
        interleave=interleave,
    )


def part_of(row, rank, **options):
    config = config_of(*row, **options)
    return rank_part(config, config.ladder.rungs[0], rank)


def shard(rows, pieces, index=0):
    """Rows of piece `index` as torch cuts them: all the largest but the last."""
    size = -(-rows // pieces)
    return max(0, min(rows - index * size, size))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, row in (PAPER | OTHERS).items()
    ],
)
def test_a_published_layout_builds_for_the_first_the_last_and_a_rank_between(row):
    name, layout, _ = row
    shape, parts = PRESETS[name], layout.dp_shard * layout.cp
    for rank in (0, layout.world_size // 3, layout.world_size - 1):
        part = part_of(row, rank)
        assert part.coordinate == layout.coordinate(rank)
        (layers,) = part.stages
        block = f"layers.{layers[0]}."
        q_rows, ffn_rows = shape.num_heads * shape.head_size, shape.ffn_dim
        index = part.coordinate["dp"] % layout.dp_shard * layout.cp + part.coordinate["cp"]
        whole, local = part.shapes[f"{block}attention.wq.weight"]
        assert whole == (q_rows, shape.dim)
        assert local == (shard(q_rows // layout.tp, parts, index), shape.dim)
        whole, local = part.shapes[f"{block}ffn.w2.weight"]
        assert whole == (shape.dim, ffn_rows)
        assert local == (shard(shape.dim, parts, index), ffn_rows // layout.tp)
        assert part.optimizer_bytes == 8 * part.num_params_stored
        assert part.num_params_stored == sum(
            torch.Size(local).numel() for _, local in part.shapes.values()
        )
        assert ("embedding.weight" in part.shapes) == (part.coordinate["pp"] == 0)
        assert ("head.weight" in part.shapes) == (part.coordinate["pp"] == layout.pp - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    PAPER.values(),
    ids=PAPER,
)
def test_the_stages_of_405b_hold_its_parameters_once(row):
    _, layout, _ = row
    shape = PRESETS["llama3-405b"]
    held, layers = [], []
    for stage in range(layout.pp):
        part = part_of(row, layout.rank({"tp": 0, "cp": 0, "dp": 0, "pp": stage}))
        held.append(part.num_params_held)
        layers += part.stages[0]
    assert layers == list(range(126))
    assert sum(held) == shape.num_params() == 405_853_388_800
    block = (held[1] - 0) // 8
    table = shape.vocab_size * shape.dim
    assert held[1:-1] == [8 * block] * 14
    assert (held[0], held[-1]) == (7 * block + table, 7 * block + table + shape.dim)


@pytest.mark.process
def test_405b_fits_where_it_was_trained():
    """A middle rank of the long-context row: 1/1,024 of a stage, and the gathered stage in bf16."""
    row = PAPER["16,384 GPUs, long"]
    part = part_of(row, row[1].rank({"tp": 3, "cp": 5, "dp": 2, "pp": 7}))
    stage = part.num_params_held
    assert part.num_params_stored == pytest.approx(stage / 8 / 128, rel=1e-3)
    assert part.gathered_bytes == pytest.approx(2 * stage / 8, rel=1e-3)
    assert part.accumulated_bytes == pytest.approx(4 * stage / 8, rel=1e-3)
    assert part.parameter_bytes + part.gradient_bytes + part.optimizer_bytes < 0.5e9


@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=3, tp=2, pp=2),
        ParallelLayout(dp=2, cp=3, tp=2),
        ParallelLayout(dp=4, dp_replicate=2, pp=2),
        ParallelLayout(dp=4, ep=2, tp=2),
        ParallelLayout(dp=8, dp_replicate=2, ep=2, order=("dp", "tp", "cp", "pp")),
        ParallelLayout(dp=2, ep=2, cp=3),
    ],
    ids=str,
)
def test_all_ranks_together_store_every_parameter(layout):
    sizes = {"dim": 24, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 44, "vocab_size": 50}
    shape = ModelShape(num_layers=4, **sizes)
    if layout.ep > 1:
        shape = Mixtral(num_layers=4, **sizes, num_experts=6, experts_per_token=2)
    stored: dict[str, int] = {}
    for rank in range(layout.world_size):
        part = part_of(("x", layout, 48), rank, shape=shape)
        for name, (_, local) in part.shapes.items():
            stored[name] = stored.get(name, 0) + torch.Size(local).numel()
    total = 0
    for name, count in stored.items():
        whole = "norm" in name or "router" in name
        copies = layout.dp_replicate * (layout.tp if whole else 1)
        assert count % copies == 0, name
        total += count // copies
    assert total == shape.num_params()


def test_a_rank_keeps_its_experts_and_shards_them_over_those_that_keep_the_same():
    layout = ParallelLayout(dp=16, tp=2, pp=2, ep=8)
    for dp in (0, 7, 13):
        part = part_of(
            ("mixtral-8x7b", layout, 8192), layout.rank({"tp": 1, "cp": 0, "pp": 1, "dp": dp})
        )
        experts = {name.split(".")[4] for name in part.shapes if "experts" in name}
        assert experts == {str(dp % 8)}
        whole, local = part.shapes[f"layers.31.ffn.experts.{dp % 8}.w1.weight"]
        assert (whole, local) == ((14336, 4096), (14336 // 2 // 2, 4096))
        whole, local = part.shapes["layers.31.ffn.router.weight"]
        assert (whole, local) == ((8, 4096), (1 if dp < 8 else 0, 4096))


def test_interleaved_stages_are_every_ppth():
    shape = dataclasses.replace(PRESETS["tiny"], num_layers=8)
    row = ("x", ParallelLayout(pp=2), 48)
    spans = [tuple(span.layers) for span in split_layers(shape, 4)]
    for rank in range(2):
        assert part_of(row, rank, shape=shape, interleave=2).stages == tuple(spans[rank::2])


def test_the_command_prints_a_rank(tmp_path, monkeypatch, capsys):
    config = config_of("llama3-8b", ParallelLayout(tp=8, dp=4), 8192)
    (tmp_path / "job.json").write_text(config.to_json())

    def printed(*options):
        monkeypatch.setattr(sys, "argv", ["rank_part", str(tmp_path / "job.json"), *options])
        assert main() == 0
        return capsys.readouterr().out

    told = json.loads(printed("--rank", "9", "--json"))
    assert (told["layout"], told["coordinate"]["tp"]) == ("dp4-pp1-cp1-tp8", 1)
    text = printed("--rank", "9")
    first, second, *_ = text.splitlines()
    assert re.findall(r"\d+", first) == ["9", "4", "8", "1", "0", "0", "1"]
    assert "0-31" in second
    assert "0.935 GiB" in text
    with pytest.raises(SystemExit, match="2"):
        printed("--rank", "32")
    assert "0 to 31" in capsys.readouterr().err
