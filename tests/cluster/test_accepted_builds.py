"""What the launcher accepts can be built, and what it refuses it explains.

Job files are drawn at random; every rung of an accepted one is built for some rank under
torch's fake process group, its pipeline schedule included.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_trainer.engine import Engine
from elastic_trainer.ladder import TooFewNodes
from launcher.codes import CODES
from launcher.errors import UserError
from launcher.planning.search import plan
from launcher.render.local import to_train_config
from launcher.spec import JobSpec

MAX_WORLD = 64
CPU = torch.device("cpu")
SMALL = st.sampled_from([1, 1, 1, 2, 2, 3, 4])


@st.composite
def jobs(draw):
    """A job file, often legal: sizes are drawn from numbers that tend to divide each other."""
    kv_heads = draw(st.sampled_from([1, 2, 2, 4, 4, 4, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    degrees = {axis: draw(SMALL) for axis in ("tp", "cp", "pp")}
    interleave = draw(st.sampled_from([1, 1, 1, 2, 3]))
    layers = draw(st.sampled_from([1, 2, 4, 4, 6, 8, 12]))
    replica = degrees["tp"] * degrees["cp"] * degrees["pp"]
    per_node = draw(st.sampled_from([1, 2, 4, 4, 8, replica]))
    dp = draw(st.sampled_from([1, 2, 2, 3, 4]))
    nodes = draw(st.sampled_from([max(1, dp * replica // per_node), draw(st.integers(1, 6))]))
    micro_batch = draw(st.sampled_from([1, 1, 2, 3]))
    batch = micro_batch * dp * draw(st.sampled_from([1, degrees["pp"], 2 * degrees["pp"], 5]))
    batch = draw(st.sampled_from([batch, batch, draw(st.integers(1, 40))]))
    order = draw(st.sampled_from([None, None, draw(st.permutations(["tp", "cp", "pp", "dp"]))]))
    lines = {
        **degrees,
        "dp": draw(st.sampled_from(["auto", "auto", dp])),
        "dp_replicate": draw(st.sampled_from([1, 1, 1, 2])),
        "schedule": draw(st.sampled_from(["interleaved" if interleave > 1 else "1f1b", "1f1b"])),
        "interleave": interleave,
        "allow_tp_across_nodes": draw(st.booleans()),
        **({"order": f"[{', '.join(order)}]"} if order else {}),
    }
    layout = ", ".join(f"{key}: {str(value).lower()}" for key, value in lines.items())
    vocab, ffn = draw(st.sampled_from([256, 264, 300, 257])), draw(st.sampled_from([24, 48, 40]))
    return f"""\
name: drawn
model: {{num_layers: {layers}, dim: {heads * 8}, num_heads: {heads}, num_kv_heads: {kv_heads},
  ffn_dim: {ffn}, vocab_size: {vocab}, tie_embeddings: {str(draw(st.booleans())).lower()}}}
layout: {{{layout}}}
cluster: {{nodes: {nodes}, gpus_per_node: {per_node}, gpu: cpu}}
train: {{seq_len: {draw(st.sampled_from([48, 48, 96, 24, 20]))}, global_batch: {batch},
  micro_batch: {micro_batch}, steps: 5, precision: {draw(st.sampled_from(["fp32", "bf16"]))},
  recompute: {draw(st.sampled_from(["none", "selective", "full"]))}}}
data: {{path: text}}
elastic: {{min_nodes: {draw(st.sampled_from([1, 1, nodes]))}}}
"""


def spec_of(text):
    """Return the job, or None once its problems have been found to be explained."""
    try:
        return JobSpec.from_text(text)
    except UserError as error:
        for problem in error.problems:
            assert problem.code in CODES, problem
            assert problem.where.line, problem
            assert re.search(r"; |use |set ", problem.message), f"no way out: {problem}"
        return None


def build_every_rung(spec, data):
    try:
        planned = plan(spec)
    except TooFewNodes as error:
        raise AssertionError(f"accepted, but without a rung: {error}") from error
    config = to_train_config(spec, planned, run_id="r", run_dir="/r", base_dir="/b")
    for rung in config.ladder.rungs:
        world_size = rung.layout.world_size
        if world_size > MAX_WORLD:
            continue
        rank = data.draw(st.integers(0, world_size - 1))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            engine = Engine(config, rung, rank, CPU)
            engine.allocate()
            assert sum(p.numel() for p in engine.model.parameters()) > 0
        finally:
            dist.destroy_process_group()


def check(text, data, seen):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Set timeout is now only supported", UserWarning)
        spec = spec_of(text)
        seen["refused" if spec is None else "accepted"] += 1
        if spec is not None:
            layout = spec.full_layout
            seen.update(axis for axis in ("tp", "pp", "cp") if getattr(layout, axis) > 1)
            seen["interleaved"] += spec.layout.schedule == "interleaved"
            build_every_rung(spec, data)


def run_examples(number):
    seen = Counter()

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(jobs(), st.data())
    def drawn(text, data):
        check(text, data, seen)

    drawn()
    return seen


def test_what_is_accepted_builds_and_what_is_refused_is_explained():
    seen = run_examples(500)
    assert seen["accepted"] >= 50, seen
    assert seen["refused"] >= 50, seen
    assert min(seen[kind] for kind in ("tp", "pp", "cp", "interleaved")) >= 2, seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_same_for_many_more():
    seen = run_examples(4000)
    assert seen["accepted"] >= 400, seen
