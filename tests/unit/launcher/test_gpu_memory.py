from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import PRESETS, ModelShape
from launcher.plan.planning import plan
from launcher.plan.search import ROOM
from launcher.plan.summary import summary_lines
from launcher.spec.errors import UserError
from launcher.spec.gpu_memory import (
    CONTEXT_BYTES,
    GIB,
    HOLDFAST,
    StackTraits,
    Workload,
    fullest_rank,
    rank_bytes,
)
from launcher.spec.hardware import GPUS, device_memory_gib
from launcher.spec.reading import parse_spec
from launcher.spec.rules import memory_finding

LLAMA = PRESETS["llama3-8b"]


def work(**changed):
    given = {
        "shape": LLAMA, "seq_len": 8192, "micro_batch": 1, "precision": "bf16", "recompute": "none",
    }  # fmt: skip
    return Workload(**{**given, **changed})


def test_whole_gradients_that_do_not_fit_are_refused_and_reduced_ones_offered(make_spec):
    sets = ["layout.tp=1", "train.global_batch=128", "train.recompute=none"]
    with pytest.raises(UserError) as caught:
        make_spec(*sets, "train.no_sync=true")
    (problem,) = caught.value.problems
    assert problem.code == "HF131"
    assert {"train.no_sync": False} in problem.offers
    make_spec(*sets, "train.no_sync=false")


def test_fsdp_shards_sixteen_bytes_a_parameter():
    found = rank_bytes(work(), ParallelLayout(dp=64), 2)
    share = LLAMA.num_params() / 64
    assert found.weights == found.gradients == pytest.approx(4 * share, rel=1e-6)
    assert found.optimizer == pytest.approx(8 * share, rel=1e-6)


def test_hsdp_shards_over_a_part_of_dp_and_cp_shards_too():
    alone = rank_bytes(work(), ParallelLayout(dp=64), 2).weights
    replicated = rank_bytes(work(), ParallelLayout(dp=64, dp_replicate=8), 2).weights
    assert replicated == pytest.approx(8 * alone, abs=8)
    assert rank_bytes(work(), ParallelLayout(dp=16, cp=4), 2).weights == alone


@pytest.mark.parametrize(
    ("recompute", "columns"),
    [
        # x, two norms, q, k, v, attention twice, the second residual, and 4 x ffn.
        ("none", 7 * 4096 + 2 * 1024 + 4 * 14336),
        # x, attention, queries and the gate.
        ("selective", 3 * 4096 + 14336),
        ("full", 4096),
    ],
)
def test_a_layer_keeps_what_its_backward_reads(recompute, columns):
    """By the figures of 8B: 0.0625 GiB are 4,096 columns of 8,192 tokens."""
    deep, shallow = (
        rank_bytes(
            work(shape=dataclasses.replace(LLAMA, num_layers=count), recompute=recompute),
            ParallelLayout(dp=64),
            1,
        )
        for count in (9, 8)
    )
    log_sums = 0 if recompute == "full" else 4 * 32 * 8192
    assert deep.activations - shallow.activations == 2 * columns * 8192 + log_sums


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_float8_scales_the_widest_factor_of_a_product_in_fp32(recompute):
    """On a stage without a loss, and with activations enough that a layer's backward is fullest."""
    layout = ParallelLayout(pp=4, tp=8)
    plain, float8 = (
        rank_bytes(work(recompute=recompute, float8=each), layout, 8, 1) for each in (False, True)
    )
    # Tokens x D: the feed-forward of a tp rank is narrower.
    assert float8.counted - plain.counted == 8 * 8192 * 4096


def test_the_first_stage_keeps_the_most_micro_batches():
    layout = ParallelLayout(pp=4)
    first, second, *_, last = (rank_bytes(work(), layout, 8, rank) for rank in range(4))
    assert first.activations > second.activations > last.activations
    assert (first.logits, last.logits > 0) == (0, True)
    assert fullest_rank(work(), layout, 8).total == max(first.total, last.total)
    few = rank_bytes(work(), layout, 2)
    assert few.activations < first.activations


def test_interleaved_stages_keep_more():
    layout = ParallelLayout(pp=4)
    plain = rank_bytes(work(), layout, 16)
    assert rank_bytes(work(interleave=2), layout, 16).activations > plain.activations


def test_streams_keep_their_most_reserved_but_a_job_needs_less():
    """Beside the loss, of gradients all and of gathered ones two groups: table and layer."""
    layout, table = ParallelLayout(dp=64), LLAMA.vocab_size * LLAMA.dim
    needed = rank_bytes(work(), layout, 1)
    reserved = rank_bytes(work(), layout, 1, stack=dataclasses.replace(HOLDFAST, pools=True))
    outside = 2 * table + LLAMA.dim
    layer = (LLAMA.num_params() - outside) / LLAMA.num_layers
    assert reserved.gathered - needed.gathered == pytest.approx(2 * (table + layer), rel=1e-6)
    gradients = max(needed.gradients, 4 * LLAMA.num_params() / 64)
    assert reserved.gradients == pytest.approx(gradients, rel=1e-6)


def test_a_root_group_is_whole_to_the_end():
    """Where the loss is fullest: the embedding beside the head, in bf16."""
    eager = StackTraits(loss_rows=0)
    own, root = (
        rank_bytes(work(recompute="full"), ParallelLayout(dp=64), 2, stack=each)
        for each in (eager, dataclasses.replace(eager, root_group=True))
    )
    assert own.logits == root.logits > 0
    assert root.gathered - own.gathered == 2 * LLAMA.vocab_size * LLAMA.dim


@pytest.mark.parametrize(("rank", "values"), [(0, 4096), (1, 4096), (3, 128256)])
def test_stages_may_keep_what_they_sent(rank, values):
    """The last stage's are logits: of each micro-batch those of one rank of tp."""
    kept = StackTraits(outputs_kept=True)
    layout = ParallelLayout(pp=4, tp=8)
    some, more = (rank_bytes(work(), layout, 8, rank, stack) for stack in (HOLDFAST, kept))
    assert more.gathered - some.gathered == 8 * 2 * 8192 * values / 8


def test_each_axis_may_have_a_communicator():
    stack = StackTraits(communicator=5e8)
    found = rank_bytes(work(), ParallelLayout(dp=8, tp=2, pp=4), 8, stack=stack)
    assert found.context == rank_bytes(work(), ParallelLayout(), 8).context + 3 * 5 * 10**8


def test_a_chunked_loss_keeps_no_logits():
    whole, chunked = (
        rank_bytes(work(recompute="full"), ParallelLayout(dp=64), 1, stack=each)
        for each in (StackTraits(loss_rows=0), StackTraits(loss_rows=0, chunked_loss=True))
    )
    assert chunked.logits == 0 < whole.logits


@pytest.mark.parametrize(
    ("selective", "columns"),
    [
        # x, queries, values, attention, the gate and the feed-forward's output.
        ("alternate", 4 * 4096 + 1024 + 14336),
        ("read", 3 * 4096 + 1024 + 14336),
        # Half of what a layer keeps that is not done again, and half of its input.
        ("layers", (7 * 4096 + 2 * 1024 + 4 * 14336 + 4096) / 2),
    ],
)
def test_selective_recompute_of_other_stacks(selective, columns):
    deep, shallow = (
        rank_bytes(
            work(shape=dataclasses.replace(LLAMA, num_layers=count), recompute="selective"),
            ParallelLayout(dp=64),
            1,
            stack=StackTraits(selective=selective),
        )
        for count in (9, 8)
    )
    log_sums = 4 * 32 * 8192 / (2 if selective == "layers" else 1)
    assert deep.activations - shallow.activations == 2 * columns * 8192 + log_sums


def test_a_ring_keeps_its_own_keys_and_values():
    layout = ParallelLayout(dp=16, cp=4, pp=4)
    gathered, ring = (
        rank_bytes(work(seq_len=32768), layout, 8, 1, StackTraits(gathers_keys=each))
        for each in (True, False)
    )
    in_flight = 3 * 9  # three micro-batches of nine layers
    others = 2 * 1024 * (4 - 1)
    assert gathered.activations - ring.activations == in_flight * 2 * 8192 * others


@pytest.mark.parametrize("shape", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_family_and_precision_has_bytes(shape, recompute):
    for precision in ("bf16", "fp32"):
        job = work(shape=shape, recompute=recompute, precision=precision, seq_len=1024)
        assert min(rank_bytes(job, ParallelLayout(dp=2, tp=2), 2).items().values()) >= 0


MIXTRAL = PRESETS["mixtral-8x7b"]


def test_experts_are_sharded_over_all_ranks_and_gathered_by_those_that_keep_them():
    alone, split = (
        rank_bytes(work(shape=MIXTRAL, recompute="full"), ParallelLayout(dp=64, ep=ep), 2)
        for ep in (1, 8)
    )
    share = MIXTRAL.num_params() / 64
    for found in (alone, split):
        assert found.weights == found.gradients == pytest.approx(4 * share, rel=1e-6)
        assert found.optimizer == pytest.approx(8 * share, rel=1e-6)
    expert = 3 * MIXTRAL.dim * MIXTRAL.ffn_dim
    # bf16 of two layers, and the fp32 gradients of one: 8 bytes each.
    assert alone.gathered - split.gathered >= 8 * 7 * expert


def test_a_mixture_keeps_the_values_of_the_experts_a_token_goes_to():
    one, two = (
        rank_bytes(
            work(shape=dataclasses.replace(MIXTRAL, experts_per_token=count)),
            ParallelLayout(pp=4, dp=16, ep=8),
            8,
            1,
        )
        for count in (1, 2)
    )
    layers_in_flight = 3 * 8  # eight layers, of three micro-batches
    values = 4 * MIXTRAL.ffn_dim + 2 * MIXTRAL.dim
    more = two.activations - one.activations
    assert more >= layers_in_flight * 2 * 8192 * values


def test_memory_is_not_asked_about_where_a_wrong_value_leaves_no_layout(mistakes):
    lines = mistakes("cluster.nodes='4'", "layout={tp: 4, cp: 3}")
    assert ["HF012" in line for line in lines].count(True) == 1
    assert not any("HF131" in line for line in lines)


def test_fewer_copies_of_the_parameters_are_offered_first(make_spec):
    sets = ["layout={dp_replicate: 32}", "train.recompute=full"]
    with pytest.raises(UserError) as caught:
        make_spec(*sets)
    (problem,) = caught.value.problems
    assert problem.code == "HF131"
    offer, *_ = problem.offers
    assert list(offer) == ["layout.dp_replicate"]
    spec = make_spec(*sets, f"layout.dp_replicate={offer['layout.dp_replicate']}")
    assert spec.facts.fits(spec.full_layout)
    more = dataclasses.replace(spec.full_layout, dp_replicate=2 * spec.layout.dp_replicate)
    assert not spec.facts.fits(more)


@pytest.mark.parametrize(
    ("sets", "label"),
    [
        (("layout={ep: 8}", "cluster.nodes=1", "train.recompute=full"), "dp8·ep8"),
        (("layout={ep: 8}", "cluster.nodes=4", "train.recompute=none"), "dp32·ep8"),
    ],
)
def test_offers_against_a_mixture_that_does_not_fit_are_legal_with_its_ep(make_spec, sets, label):
    sets = ("model=mixtral-8x7b", "train.global_batch=256", *sets)
    with pytest.raises(UserError) as caught:
        make_spec(*sets)
    (problem,) = caught.value.problems
    assert problem.code == "HF131"
    assert label in problem.message
    assert problem.offers
    for offer in problem.offers:
        spec = make_spec(*sets, *(f"{key}={value}" for key, value in offer.items()))
        assert spec.facts.fits(spec.full_layout)


def test_the_optimizers_step_is_a_moment_of_its_own():
    plain = StackTraits(zero=3, weights=2, gradients=2, optimizer=12, dtensor=False)
    tight = dataclasses.replace(plain, step=12)
    job = work(seq_len=256, recompute="full")
    more = rank_bytes(job, ParallelLayout(dp=4), 2, 0, tight).counted
    share = LLAMA.num_params() / 4
    assert more == pytest.approx(28 * share, rel=1e-6)
    assert rank_bytes(job, ParallelLayout(dp=4), 2, 0, plain).counted < more
    assert HOLDFAST.step == 0


def test_masks_of_packed_documents_count():
    layout = ParallelLayout(dp=64)
    more = rank_bytes(work(masked=True), layout, 1).activations
    assert more - rank_bytes(work(), layout, 1).activations >= 32 * 3 * 8192 * 8192


@given(
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 32),
)
def test_more_replicas_never_need_more_and_more_tokens_never_less(recompute, tp, cp, pp, dp):
    layout = ParallelLayout(dp=dp, tp=tp, cp=cp, pp=pp)
    job = work(recompute=recompute)
    found = fullest_rank(job, layout, 8)
    assert found.total == sum(found.items().values())
    assert fullest_rank(job, dataclasses.replace(layout, dp=2 * dp), 8).total <= found.total
    assert fullest_rank(work(recompute=recompute, micro_batch=2), layout, 8).total >= found.total


@pytest.mark.parametrize(("tp", "dp", "gib"), [(2, 4, 81.59), (4, 2, 52.89), (8, 1, 38.57)])
def test_a_distributed_optimizer_as_megatron_was_measured(tp, dp, gib):
    """Four layers of 405B on B200, max_allocated: SimuMax, b200_release_v1.2_summary.md."""
    megatron = StackTraits(
        zero=1, weights=2, gradients=4, optimizer=12, gathers_again=True, dtensor=False,
        attention_copies=1, balanced=False, selective="attention", logit_bytes=6, loss_rows=0,
    )  # fmt: skip
    shape = ModelShape(
        num_layers=4, dim=16384, num_heads=128, num_kv_heads=16, ffn_dim=53248, vocab_size=128256
    )
    found = rank_bytes(
        work(shape=shape, seq_len=4096), ParallelLayout(tp=tp, dp=dp), 4, 0, megatron
    )
    assert found.counted / GIB == pytest.approx(gib, rel=0.07)
    assert HOLDFAST.zero == 3


def test_memory_is_known_of_every_gpu_and_of_nothing_else():
    assert all(device_memory_gib(name) for name in GPUS)
    assert device_memory_gib("MI250X") < 64  # of a die
    assert device_memory_gib("cpu") is None
    assert device_memory_gib("zzz") is None


def test_what_does_not_fit_is_refused_with_its_bytes_and_what_fits(make_spec, mistakes):
    sets = ["model=llama3-70b", "cluster.nodes=2", "train.recompute=none"]
    (line,) = mistakes(*sets)
    assert "HF131 layout: dp2·tp8 needs" in line
    for item in ("weights", "gradients", "optimizer", "activations", "fragmentation"):
        assert item in line
    with pytest.raises(UserError) as caught:
        make_spec(*sets)
    (problem,) = caught.value.problems
    assert problem.offers
    for offer in problem.offers:
        puts = [f"{key}={value}" for key, value in offer.items()]
        spec = make_spec(*sets, *puts)
        assert spec.facts.fits(spec.full_layout)


LARGE = "num_layers: 126, dim: 16384, num_heads: 128, num_kv_heads: 8, ffn_dim: 53248"


@pytest.mark.parametrize(
    ("model", "gpu", "reason"),
    [
        ("llama3-405b", "cpu", False),
        (f"{{plugin: 'mine:Model', {LARGE}, vocab_size: 128256}}", "H100-80GB-SXM", True),
    ],
)
def test_nothing_is_claimed_where_memory_or_model_is_not_known(make_spec, model, gpu, reason):
    spec = make_spec(f"model={model}", "layout={dp: auto}", f"cluster.gpu={gpu}")
    planned = plan(spec)
    assert {rung.memory_gib for rung in planned.ladder.rungs} == {None}
    lines = [line for line in summary_lines(spec, planned) if line.startswith("gpu ")]
    assert [("mine:Model" in line, "GiB" in line) for line in lines] == [(True, False)] * reason


def test_nothing_is_claimed_of_a_script(make_spec):
    spec = make_spec("model=llama3-405b", "layout={dp: auto}", "command=train.py")
    assert {rung.memory_gib for rung in plan(spec).ladder.rungs} == {None}


def test_copies_of_the_parameters_are_given_up_before_nodes_are(make_spec):
    spec = make_spec(
        "layout={dp: auto, dp_replicate: 16}", "cluster.nodes=8", "train.global_batch=64",
        "train.recompute=full", "elastic.min_nodes=1",
    )  # fmt: skip
    rungs = plan(spec).ladder.rungs
    assert rungs[0].layout.dp_replicate == 16
    assert rungs[-1].num_nodes == 1
    for rung in rungs:
        layout = rung.layout
        assert spec.facts.fits(layout)
        same = (layout.tp, layout.cp, layout.pp) == (1, 1, 1)
        more = [d for d in range(layout.dp_replicate + 1, 17) if layout.dp % d == 0]
        wider = [dataclasses.replace(layout, dp_replicate=degree) for degree in more]
        assert not any(spec.facts.fits(each, 1.0 if same else ROOM) for each in wider)
    assert rungs[-1].layout.dp_replicate < 8  # a whole copy on each GPU would not fit


def test_rungs_that_do_not_fit_are_left_out(make_spec):
    sets = ["model=llama3-70b", "cluster.nodes=16", "train.recompute=full"]
    ladder = plan(make_spec(*sets)).ladder
    assert 1 < ladder.min_nodes < 16
    planned = plan(make_spec(*sets, "elastic.min_nodes=1"))
    assert planned.ladder == ladder
    assert "HF151" in [found.code for found in planned.warnings]


JOB = """\
name: a
cluster: {gpu: H100-80GB-SXM, gpus_per_node: 8}
data: {path: x}
"""


@given(
    st.sampled_from(["llama3-8b", "llama3-70b", "qwen3-8b", "mistral-7b"]),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 24),
)
def test_every_rung_fits_and_says_what_it_needs(model, recompute, tp, pp, nodes):
    train = f"{{seq_len: 8192, steps: 1, global_batch: 768, recompute: {recompute}}}"
    sets = [f"model={model}", f"layout={{tp: {tp}, pp: {pp}}}", f"cluster.nodes={nodes}"]
    try:
        spec = parse_spec(JOB, sets=[*sets, f"train={train}", "elastic.min_nodes=1"])
    except UserError:
        assume(False)
    ladder = plan(spec).ladder
    for rung in ladder.rungs:
        assert 0 < rung.memory_gib <= spec.facts.memory_gib + 0.1
        assert spec.facts.fits(rung.layout)
    assert Ladder.from_ranges(ladder.to_ranges()) == ladder


def test_a_standby_has_a_context_on_the_gpu_and_is_offered_away(make_spec):
    alone, two = (
        fullest_rank(work(standby=standby), ParallelLayout(dp=64), 2) for standby in (False, True)
    )
    assert two.total - alone.total == two.context - alone.context == CONTEXT_BYTES
    spec = make_spec("train.no_sync=false")
    need = spec.facts.rank_bytes(spec.full_layout).total / GIB
    tight = dataclasses.replace(spec.facts, standby=True, memory_gib=need + 0.5)
    broken = memory_finding(tight, spec.full_layout)
    assert broken is not None
    assert broken.code == "HF131"
    assert {"elastic.standby": False} in list(broken.offers)
    without = dataclasses.replace(tight, standby=False)
    assert memory_finding(without, spec.full_layout) is None
    assert make_spec("elastic.standby=true").facts.standby
