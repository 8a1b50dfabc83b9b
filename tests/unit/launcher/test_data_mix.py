"""`data.mix`: what is written, what is refused, and what is drawn of each corpus."""

from __future__ import annotations

import json
import struct

import pytest

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.storage.examine import NUM_ENTRIES, count_tokens
from launcher.cli.main import run_cli
from launcher.plan.planning import plan
from launcher.render.local import to_train_config
from launcher.render.sbatch import _mounts
from launcher.runs.submitting.asking import live_problems
from launcher.runs.submitting.passes import drawn, drawn_lines
from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec

JOB = """\
name: mixed
model: {num_layers: 2, dim: 32, num_heads: 4, ffn_dim: 48, vocab_size: 256}
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 8, global_batch: 4, steps: 10}
"""


def job(mix, **keys):
    return JOB + f"data: {json.dumps({'mix': mix, **keys})}\n"


def test_a_weight_alone_is_of_a_path_and_the_keys_of_data_count_for_all():
    spec = parse_spec(
        job(
            {"web.txt": 3, "pages": {"path": "p", "format": "jsonl", "weight": 1}},
            key="body",
        )
    )
    web, pages = spec.data.corpora.values()
    assert list(spec.data.corpora) == ["data.mix.web.txt", "data.mix.pages"]
    assert (web.path, web.format, web.key) == ("web.txt", "text", None)
    assert (pages.path, pages.format, pages.key) == ("p", "jsonl", "body")
    assert spec.data_paths == {"data.mix.web.txt": "web.txt", "data.mix.pages": "p"}


def test_job_json_has_absolute_paths_and_comes_back(tmp_path):
    spec = parse_spec(job({"web.txt": 3, "b": {"path": "/data/b", "weight": 0.5}}))
    config = to_train_config(spec, plan(spec), run_id="r", run_dir="/r", base_dir=tmp_path)
    again = TrainConfig.from_json(config.to_json())
    assert again == config
    assert [each.path for each in again.data.corpora.values()] == [
        str(tmp_path / "web.txt"),
        "/data/b",
    ]
    assert '"path"' not in json.dumps({**json.loads(config.to_json())["data"], "mix": 0})


SFT = {"weight": 1, "format": "sft"}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({"mix": {"a": 0.7, "b": 0}}, [("HF013", "data.mix.b.weight")]),
        ({"mix": {"a": -1}}, [("HF013", "data.mix.a.weight")]),
        ({"mix": {"a": True}}, [("HF012", "data.mix.a.weight")]),
        ({"mix": {"a": "much"}}, [("HF012", "data.mix.a.weight")]),
        ({"mix": {"a": {"path": "b"}}}, [("HF011", "data.mix.a.weight")]),
        ({"mix": {"a": {"weight": 1, "formt": "text"}}}, [("HF010", "data.mix.a.formt")]),
        ({"mix": {"a": {"weight": 1, "format": "csv"}}}, [("HF014", "data.mix.a.format")]),
        ({"mix": {}}, [("HF015", "data.mix")]),
        ({"mix": {f"c{at}": 1 for at in range(1001)}}, [("HF015", "data.mix")]),
        ({"mix": ["a", "b"]}, [("HF012", "data.mix")]),
        ({"mix": {"a": 1}, "path": "a"}, [("HF016", "data.mix")]),
        ({}, [("HF011", "data.path")]),
        ({"mix": {"a": 1, "b": SFT}}, [("HF715", "data.mix.b")]),
        ({"mix": {"a": SFT, "b": SFT}}, [("HF715", "data.mix.a"), ("HF715", "data.mix.b")]),
        (
            {"mix": {"a": {"weight": 1, "format": "text"}, "b": 1}, "format": "sft"},
            [("HF715", "data.mix.a")],
        ),
        ({"mix": {"a": {"weight": 1, "key": "t"}}}, [("HF016", "data.mix.a.key")]),
        ({"mix": {"a": 1}, "key": "t"}, [("HF016", "data.key")]),
        ({"mix": {"a": 1}, "as_is": True, "format": "jsonl"}, [("HF016", "data.as_is")]),
        ({"mix": {"a": 1}, "cut_long": True}, [("HF016", "data.cut_long")]),
    ],
)
def test_what_is_refused(data, found):
    with pytest.raises(UserError) as caught:
        parse_spec(JOB + f"data: {json.dumps(data)}\n")
    assert [(each.code, each.where.key) for each in caught.value.problems] == found


def test_a_wrong_mix_hides_no_other_mistake_and_brings_none():
    with pytest.raises(UserError) as caught:
        parse_spec(job({"a": 0}).replace("steps: 10", "steps: 0"))
    assert [each.code for each in caught.value.problems] == ["HF013", "HF013"]


def test_sft_all_over_is_offered_where_every_corpus_is():
    with pytest.raises(UserError) as caught:
        parse_spec(job({"a": SFT, "b": SFT}))
    assert "data.format: sft" in str(caught.value)
    assert parse_spec(job({"a": SFT, "b": SFT}, format="sft")).data.packed
    assert parse_spec(job({"a": 1, "b": 2}, format="sft")).facts.packed


def test_validation_on_a_corpus_of_the_mix_is_a_warning():
    spec = parse_spec(job({"a": 1, "b": 2}) + "validation: {path: b, every_steps: 2}\n")
    assert [each.code for each in spec.warnings] == ["HF187"]


def test_each_corpus_is_looked_at_before_submission(tmp_path):
    (tmp_path / "a.txt").write_text("words " * 99)
    (tmp_path / "b.jsonl").write_text('{"body": "words"}\n')
    one = {"path": "b.jsonl", "format": "jsonl", "weight": 1}
    problems = live_problems(parse_spec(job({"a.txt": 1, "b": one, "gone": 1})), tmp_path)
    assert [(each.code, each.where.key) for each in problems] == [
        ("HF713", "data.mix.b"),
        ("HF201", "data.mix.gone"),
    ]
    assert "data.mix.b.key: body" in problems[0].message
    assert live_problems(parse_spec(job({"a.txt": 1, "b": {**one, "key": "body"}})), tmp_path) == []


def test_containers_get_each_corpus(tmp_path):
    pair = {"path": "pairs/m", "format": "megatron", "weight": 1}
    spec = parse_spec(job({"a.txt": 1, "b": pair}, tokenizer="t/tokenizer.json"))
    mounts = _mounts(spec, run="/runs/r", base_dir="/base")
    for place in ("/base/a.txt", "/base/pairs", "/base/t/tokenizer.json"):
        assert f"{place}:{place}" in mounts


def test_tokens_and_passes_are_told_where_sizes_say_them(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 99)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.txt").write_text("x" * 30)
    (tmp_path / "b" / "2.txt").write_text("x" * 40)
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n')
    mix = {"a.txt": 2, "b": 1, "c": {"path": "c.jsonl", "format": "jsonl", "weight": 1}}
    spec = parse_spec(job(mix))
    spec.remember(folder=tmp_path)
    a, b, c = drawn(spec)
    assert (a.share, a.tokens, a.has, a.passes) == (0.5, 160, 100, pytest.approx(20 / 12))
    assert (b.share, b.tokens, b.has, b.passes) == (0.25, 80, 72, 10 / 8)
    assert (c.tokens, c.has, c.passes) == (80, None, None)
    lines = drawn_lines([a, b, c])
    assert lines[0].startswith("data     a.txt, ")
    assert [line.endswith("passes: repeated") for line in lines] == [True, True, False]
    assert drawn(parse_spec(JOB + "command: train.py\n")) == []


def test_check_and_plan_tell_them(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("words " * 999)
    (tmp_path / "job.yaml").write_text(job({"a.txt": 0.25, "b": {"path": "a.txt", "weight": 0.75}}))
    for command in ("check", "plan"):
        assert run_cli([command, str(tmp_path / "job.yaml"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["data"]
        assert [(each["name"], each["share"], each["has"]) for each in found] == [
            ("a.txt", 0.25, 5995),
            ("b", 0.75, 5995),
        ]
        assert run_cli([command, str(tmp_path / "job.yaml")]) == 0
        assert "b, 0.75 of the samples" in capsys.readouterr().out


def test_sizes_say_the_tokens_of_tokens_and_of_bytes(tmp_path):
    head = struct.pack("<3i", 20240520, 1, 5).ljust(1024, b"\0")
    (tmp_path / "shards").mkdir()
    for name in ("x_1.bin", "x_2.bin"):
        (tmp_path / "shards" / name).write_bytes(head + bytes(10))
    (tmp_path / "plain.bin").write_bytes(bytes(14))
    (tmp_path / "m.bin").write_bytes(bytes(36))
    (tmp_path / "m.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 2))
    assert count_tokens(tmp_path / "shards", "nanogpt", "bytes") == 10
    assert count_tokens(tmp_path / "plain.bin", "nanogpt", "bytes") == 7
    assert count_tokens(tmp_path / "m", "megatron", "bytes") == 9
    assert count_tokens(tmp_path / "plain.bin", "text", "bytes") == 15
    assert count_tokens(tmp_path / "plain.bin", "text", "t.json") is None
    assert count_tokens(tmp_path / "plain.bin", "sft", "bytes") is None
    many = tmp_path / "many"
    many.mkdir()
    for number in range(NUM_ENTRIES):
        (many / f"{number}.txt").touch()
    assert count_tokens(many, "text", "bytes") is None
