# ruff: noqa: E501  rows of a table
"""The step time beside published runs, on a handful of rows."""

from __future__ import annotations

import csv
import io
import json

import pytest
from click.testing import CliRunner

HEAD = (
    "source,model,params_b,layers,hidden,ffn,heads,kv_heads,vocab,gpu,gpus,tp,cp,pp,vpp,dp,ep,"
    "zero_or_fsdp_stage,seq,global_batch_seqs,micro_batch,precision,recompute,sequence_parallel,"
    "tflops_per_gpu,mfu_pct,tokens_per_s_per_gpu,step_time_s,peak_mem_gb,url_or_repo_path,note"
)
SHAPE = "llama3-8b,8.03,32,4096,14336,32,8,128256"
ROWS = f"""\
torchtitan,{SHAPE},H100-96GB-HBM2e-500W,8,1,1,1,1,8,1,fsdp2(zero3),8192,16,2,bf16,selective_op,0,,,,2.8435,,,Q=A; eager
nvidia_dgxc,{SHAPE},H100-80GB-SXM,64,1,2,1,1,32,1,dist_opt(zero1),8192,1024,1,bf16,,0,,,,13.0,,,Q=A
vtrain_x,{SHAPE},A100-80GB-SXM,8,8,1,1,1,1,1,ddp,2048,16,1,bf16,full,0,,,,6.0,,,Q=A; inter-node 800Gbps; no flash attn
vtrain_x,{SHAPE},A100-80GB-SXM,8,1,1,1,1,8,1,ddp,2048,16,1,bf16,full,0,,,,4.0,,,Q=A; no flash attn
vtrain_x,{SHAPE},A100-80GB-SXM,8,2,1,1,1,4,1,ddp,2048,16,1,bf16,full,0,,,,2.0,,,Q=A; no flash attn
vtrain_x,{SHAPE},A100-80GB-SXM,8,2,1,1,1,4,1,ddp,2048,16,1,bf16,full,0,,,,,,,Q=A; no time
simumax,{SHAPE},B200,8,2,1,1,1,4,1,dist_opt(zero1),2048,16,1,bf16,none,1,,,,2.0,,,Q=C; contradicts itself
simumax,{SHAPE},B200,8,2,1,1,1,4,1,dist_opt(zero1),2048,16,1,bf16,none,1,,,,2.0,,,Q=A; moe=1
simumax,{SHAPE},B200,8,2,1,1,1,4,1,zero3+cpu_adam_offload,2048,16,1,bf16,none,1,,,,2.0,,,Q=A
"""


@pytest.fixture
def accuracy(load):
    return load("planner_accuracy")


@pytest.fixture
def cases(accuracy):
    return accuracy.cases_of(list(csv.DictReader(io.StringIO(f"{HEAD}\n{ROWS}"))))


def test_rows_that_say_too_little_or_are_not_judged_are_left_out(cases):
    assert [case.row["source"] for case in cases] == [
        "torchtitan",
        "nvidia_dgxc",
        *["vtrain_x"] * 3,
    ]


def test_what_a_rows_software_does(cases):
    titan, nvidia, old, *_ = cases
    assert [case.kind for case in (titan, nvidia, old)] == ["eager", "fused", "old"]
    assert (titan.traits["zero"], nvidia.traits["zero"], old.traits["zero"]) == (3, 1, 0)
    assert (titan.work.recompute, nvidia.work.recompute) == ("selective", "none")
    assert (titan.traits["flash"], old.traits["flash"]) == (True, False)
    assert (titan.nic_gbit, old.nic_gbit) == (None, 100)
    assert (titan.micro_batches, nvidia.micro_batches) == (1, 32)


def test_the_shipped_constants_come_near(accuracy, cases):
    for case in cases[:2]:
        found = accuracy.predicted_s(case, accuracy.SHIPPED)
        assert found == pytest.approx(case.measured_s, rel=0.2)


def test_a_fit_finds_what_rows_were_made_with(accuracy, cases):
    true = accuracy.START._replace(ampere=1.3 * accuracy.START.ampere)
    made = [accuracy.replace(case, measured_s=accuracy.predicted_s(case, true)) for case in cases]
    found = accuracy.fitted(made)
    assert found == accuracy.fitted(made), "no randomness"
    for before, after in zip(made, cases, strict=True):
        start = abs(accuracy.predicted_s(after, accuracy.START) / before.measured_s - 1)
        error = abs(accuracy.predicted_s(after, found) / before.measured_s - 1)
        assert error <= max(0.02, start / 2)


def test_regret_is_the_measured_loss_of_the_predicted_best(accuracy, cases):
    seconds = dict(enumerate([0.0, 0.0, 3.0, 1.0, 2.0]))
    assert accuracy.regrets(cases, seconds) == {"vtrain_x": [4.0 / 2.0 - 1]}
    assert accuracy.regrets(cases[:-1], seconds) == {}, "two layouts are no sweep"


def test_the_last_line_is_json_and_shipped_fits_nothing(accuracy, tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    path.write_text(f"{HEAD}\n{ROWS}")
    monkeypatch.setattr(accuracy, "fitted", None)
    result = CliRunner().invoke(accuracy.main, [str(path), "--shipped"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["rows"] == 5
    assert 0 < figures["step_time_mape_pct"] < 200
    assert figures["memory_mape_pct"] is None, "no row has a peak"


def test_by_default_each_source_is_left_out(accuracy, tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    path.write_text(f"{HEAD}\n{ROWS}")
    seen = []

    def fitted(cases):
        seen.append({case.row["source"] for case in cases})
        return accuracy.START

    monkeypatch.setattr(accuracy, "fitted", fitted)
    result = CliRunner().invoke(accuracy.main, [str(path)])
    assert result.exit_code == 0, result.output
    every = {"torchtitan", "nvidia_dgxc", "vtrain_x"}
    assert seen == [every - {source} for source in sorted(every)]
    assert "left out" in result.stdout
