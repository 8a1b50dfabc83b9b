from __future__ import annotations

import dataclasses
import time
import timeit

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import PRESETS
from launcher.plan.step_time import (
    COMPILED,
    FUSED,
    HOLDFAST_STACK,
    Stack,
    machine_of,
    mfu,
    step_time,
)
from launcher.spec.gpu_memory import Workload
from launcher.spec.hardware import GPUS

LLAMA = PRESETS["llama3-8b"]
H100 = machine_of("H100-80GB-SXM", 8)
SPEEDS = ("gemm_flops", "flash_flops", "memory_bytes_s", "inside_bytes_s", "nic_bytes_s")


def work(**changed):
    given = {
        "shape": LLAMA, "seq_len": 8192, "micro_batch": 1, "precision": "bf16", "recompute": "none",
    }  # fmt: skip
    return Workload(**{**given, **changed})


powers = st.sampled_from([1, 2, 4, 8])
layouts = st.builds(
    lambda dp, tp, pp, cp, order, half: ParallelLayout(
        dp=dp, tp=tp, pp=pp, cp=cp, dp_replicate=2 if half and dp > 1 else 1, order=tuple(order)
    ),
    st.sampled_from([1, 2, 16, 64]),
    powers,
    powers,
    powers,
    st.permutations(["tp", "cp", "pp", "dp"]),
    st.booleans(),
)
works = st.builds(
    work,
    seq_len=st.sampled_from([2048, 32768]),
    micro_batch=st.sampled_from([1, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    float8=st.booleans(),
    no_sync=st.booleans(),
    precision=st.sampled_from(["bf16", "fp32"]),
    shape=st.sampled_from([LLAMA, PRESETS["mistral-7b"], PRESETS["mixtral-8x7b"]]),
)
stacks = st.sampled_from([HOLDFAST_STACK, COMPILED, FUSED])


@given(work=works, layout=layouts, rounds=st.sampled_from([1, 8]), stack=stacks)
def test_items_are_seconds_and_sum_to_the_total(work, layout, rounds, stack):
    found = step_time(work, layout, rounds, H100, stack)
    assert set(found.items()) == {field.name for field in dataclasses.fields(found)}
    assert min(found.items().values()) >= 0
    assert found.total == pytest.approx(sum(found.items().values()))


@given(
    work=works,
    layout=layouts,
    stack=stacks,
    part=st.sampled_from(SPEEDS),
    factor=st.floats(1.1, 10),
)
def test_a_faster_machine_is_no_slower(work, layout, stack, part, factor):
    faster = dataclasses.replace(H100, **{part: factor * getattr(H100, part)})
    before = step_time(work, layout, 8, H100, stack).total
    assert step_time(work, layout, 8, faster, stack).total <= before * (1 + 1e-9)


@given(layout=layouts, stack=stacks, recompute=st.sampled_from(["none", "full"]))
def test_a_layer_more_takes_longer(layout, stack, recompute):
    shape = dataclasses.replace(LLAMA, num_layers=LLAMA.num_layers + layout.pp)
    before = step_time(work(recompute=recompute), layout, 8, H100, stack).total
    assert step_time(work(shape=shape, recompute=recompute), layout, 8, H100, stack).total > before


@given(tp=st.sampled_from([2, 4, 8]))
def test_more_tp_in_a_node_divides_products_and_adds_collectives(tp):
    alone = step_time(work(), ParallelLayout(dp=8), 8, H100)
    split = step_time(work(), ParallelLayout(dp=8 // tp, tp=tp), 8, H100)
    assert alone.matmul / tp < split.matmul < 1.5 * alone.matmul / tp
    assert alone.tp == 0 < split.tp


def test_tp_across_nodes_is_slower_than_in_one():
    shape = PRESETS["llama3-70b"]
    inside = step_time(work(shape=shape), ParallelLayout(tp=8, dp=8), 8, H100)
    across = step_time(work(shape=shape), ParallelLayout(tp=16, dp=4), 16, H100)
    assert across.tp > 2 * inside.tp


def test_the_order_of_ranks_says_which_groups_cross_nodes():
    inner = ParallelLayout(dp=8, tp=8, order=("tp", "cp", "pp", "dp"))
    outer = ParallelLayout(dp=8, tp=8, order=("dp", "cp", "pp", "tp"))
    assert step_time(work(), outer, 8, H100).tp > 5 * step_time(work(), inner, 8, H100).tp


def test_nics_of_a_rings_ranks_in_a_node_add_up():
    stack = dataclasses.replace(HOLDFAST_STACK, zero=0, dp_overlaps=False)
    quiet = dataclasses.replace(machine_of("A100-80GB-SXM", 8), latency_s=0.0)
    whole = step_time(work(), ParallelLayout(dp=16), 8, quiet, stack).dp
    half = step_time(work(), ParallelLayout(dp=16, tp=2), 8, quiet, stack).dp
    assert whole == pytest.approx(half, rel=0.001), "half the parameters, and half as many NICs"


def test_a_rack_is_one_domain():
    machine = machine_of("GB200", 4)
    assert machine.domain == 72
    assert machine_of("A100-80GB-PCIe", 8).domain == 2


def test_replicas_of_shards_move_less_between_nodes():
    job = work(no_sync=True)
    slow = dataclasses.replace(H100, nic_bytes_s=H100.nic_bytes_s / 20)
    sharded = step_time(job, ParallelLayout(dp=64), 8, slow)
    replicated = step_time(job, ParallelLayout(dp=64, dp_replicate=8), 8, slow)
    assert replicated.dp < sharded.dp / 2


def test_full_recompute_does_the_forward_again():
    found = step_time(work(recompute="full"), ParallelLayout(dp=8), 8, H100)
    head = 6 * 8 * 8192 * LLAMA.dim * LLAMA.vocab_size / H100.gemm_flops
    assert found.recompute > (found.matmul - 1.1 * head) / 3
    assert found.recompute < (found.matmul + found.attention + found.elementwise) / 3


@given(pp=powers, rounds=st.sampled_from([8, 64]))
def test_the_bubble_of_even_stages(pp, rounds):
    assume(pp > 1)
    shape = dataclasses.replace(LLAMA, vocab_size=64)
    layout = ParallelLayout(pp=pp, dp=8 // pp)
    found = step_time(work(shape=shape), layout, rounds, H100, FUSED)
    stage = found.matmul + found.attention + found.elementwise + found.launch
    assert found.bubble == pytest.approx(stage * (pp - 1) / rounds, rel=0.02)
    halved = step_time(work(shape=shape, interleave=2), layout, rounds, H100, FUSED)
    assert halved.bubble == pytest.approx(found.bubble / 2, rel=0.02)


def test_a_small_layer_waits_for_launches():
    tiny = work(shape=PRESETS["tiny"], seq_len=128)
    found = step_time(tiny, ParallelLayout(), 8, H100)
    expected = 8 * 4 * HOLDFAST_STACK.kernels * H100.launch_s
    computed = found.matmul + found.attention + found.elementwise
    assert found.launch == pytest.approx(expected - computed, rel=0.1)
    assert step_time(work(), ParallelLayout(), 8, H100).launch == 0


def test_float8_is_for_gpus_that_have_it():
    layout = ParallelLayout(dp=8)
    a100 = machine_of("A100-80GB-SXM", 8)
    gain = [
        step_time(work(), layout, 8, machine).matmul
        / step_time(work(float8=True), layout, 8, machine).matmul
        for machine in (H100, a100)
    ]
    assert 1.5 < gain[0] < 2
    assert gain[1] == 1


def test_a_mixture_computes_what_its_tokens_meet():
    dense, mixture = PRESETS["mistral-7b"], PRESETS["mixtral-8x7b"]
    layout = ParallelLayout(dp=8, ep=8)
    one = step_time(work(shape=dense), ParallelLayout(dp=8), 8, H100)
    many = step_time(work(shape=mixture), layout, 8, H100)
    ratio = mixture.active_params() / dense.num_params()
    assert many.matmul == pytest.approx(ratio * one.matmul, rel=0.1)
    assert one.ep == 0 < many.ep


def test_mfu_is_of_the_vendors_peak():
    flops = 1000 * LLAMA.flops_per_token(8192)
    assert mfu(LLAMA, 8192, 1000, 8, "H100-80GB-SXM") == pytest.approx(flops / 8 / 989e12)
    assert mfu(LLAMA, 8192, 1000, 8, "H100-96GB-HBM2e-500W") is None
    assert mfu(LLAMA, 8192, 1000, 8, "cpu") is None


@pytest.mark.parametrize(
    ("dp", "cp", "seq", "rounds", "published"),
    [(64, 1, 8192, 32, 0.43), (128, 1, 8192, 16, 0.41), (8, 16, 131072, 16, 0.38)],
)
def test_llama_3s_training(dp, cp, seq, rounds, published):
    """Table 4 of arXiv 2407.21783, by causal FLOPs; one stage a layer, of a fused stack."""
    layout = ParallelLayout(dp=dp, tp=8, pp=16, cp=cp)
    job = work(shape=PRESETS["llama3-405b"], seq_len=seq, interleave=7)
    own = {
        "zero": 3,
        "balanced": True,
        "gradient_bytes": 4,
        "tp_exposed": 1.0,
        "cp_overlaps": False,
    }
    stack = dataclasses.replace(FUSED, **own)
    seconds = step_time(job, layout, rounds, H100, stack).total
    tokens = rounds * dp * seq
    found = mfu(job.shape, seq, tokens / seconds, layout.world_size, "H100-80GB-SXM")
    assert found == pytest.approx(published, rel=0.1)


def test_every_gpu_of_the_table_has_a_machine():
    machines = [machine_of(name, 8) for name in GPUS]
    assert all(machine and machine.gemm_flops > 1e13 for machine in machines)
    for name, machine in zip(GPUS, machines, strict=True):
        peak, dies = GPUS[name].bf16_tflops, 2 if name == "MI250X" else 1
        assert peak is None or machine.gemm_flops < 0.9e12 * peak / dies, name
    assert machine_of("cpu", 8) is None


def test_a_call_is_quick():
    job, stack = work(), Stack()
    choices = [ParallelLayout(dp=8, tp=tp, pp=pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4)]

    def search():
        for layout in choices:
            step_time(job, layout, 8, H100, stack)

    best = min(timeit.repeat(search, number=20, repeat=5, timer=time.process_time))
    assert best / 20 / len(choices) < 40e-6, "12 us on an idle core"
