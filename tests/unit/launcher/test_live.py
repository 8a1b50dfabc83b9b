from __future__ import annotations

import json
import os

import pytest
from conftest import JOB

from elastic_trainer.data.megatron import read_megatron
from elastic_trainer.data.source import DataError, UnreadableError
from launcher.cli.main import run_cli
from launcher.runs.submitting.asking import live_problems


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("hello")
    return tmp_path


def test_a_job_whose_paths_are_there_has_no_problems(make_spec, corpus):
    assert live_problems(make_spec(), corpus) == []
    assert live_problems(make_spec("checkpoint.dir=new/deep"), corpus) == []
    assert sorted(path.name for path in corpus.iterdir()) == ["corpus"]


@pytest.mark.parametrize(
    ("sets", "code", "key"),
    [
        (["data.path=gone"], "HF201", "data.path"),
        (["data.path=corpus/a.txt/b"], "HF201", "data.path"),
        (["data.path=empty"], "HF203", "data.path"),
        (["data.path=empty.txt"], "HF203", "data.path"),
        (["data.tokenizer=gone.json"], "HF201", "data.tokenizer"),
        (["validation={path: gone, every_steps: 2}"], "HF201", "validation.path"),
        (["validation={path: empty.txt, every_steps: 2}"], "HF203", "validation.path"),
        (["data.format=megatron"], "HF203", "data.path"),
        (["data.format=megatron", "data.path=corpus/a.txt/b"], "HF201", "data.path"),
        (["data.format=megatron", "data.path=" + "x" * 300], "HF202", "data.path"),
        (["checkpoint.dir=corpus/a.txt"], "HF204", "checkpoint.dir"),
        (["checkpoint.dir=corpus/a.txt/deep"], "HF204", "checkpoint.dir"),
        (["command=train.py"], "HF201", "command"),
        (["command=empty"], "HF201", "command"),
        (["command=--no-python ./empty.txt"], "HF201", "command"),
        (["command=-m x", "code.dir=gone"], "HF201", "code.dir"),
        (["data.path=" + "x" * 300], "HF202", "data.path"),
    ],
)
def test_each_thing_in_the_way_is_named(make_spec, corpus, sets, code, key):
    (corpus / "empty").mkdir()
    (corpus / "empty.txt").touch()
    (problem,) = live_problems(make_spec(*sets), corpus)
    assert (problem.code, problem.where.key) == (code, key)


SMALL = "model={dim: 64, num_layers: 2, num_heads: 8, ffn_dim: 128, vocab_size: 512}"


@pytest.mark.parametrize(
    ("sets", "content", "found"),
    [
        (["data.path=odd"], b"PAR1" + bytes(99) + b"PAR1", [("HF712", "data.path")]),
        (["data.path=odd"], b'{"text": "a"}\n' * 9, [("HF710", "data.path")]),
        (["data.path=odd", "data.as_is=true"], b'{"text": "a"}\n' * 9, []),
        (["data.path=odd", "data.format=nanogpt"], b"text " * 99, [("HF710", "data.path")]),
        (
            ["data.path=odd", "data.format=nanogpt", SMALL],
            b"\xff\xfe" * 99,
            [("HF703", "data.path")],
        ),
        (["validation={path: odd, every_steps: 2}"], bytes(99), [("HF712", "validation.path")]),
        (["data.path=odd", "command=-m this"], bytes(99), []),
        (["data.path=odd", "data.format=jsonl"], b'{"text": "a"}\n', []),
        (["data.path=odd", "data.format=jsonl"], b'{"t": "a"}\n', [("HF713", "data.path")]),
        (["data.path=odd", "data.format=jsonl", "data.key=t"], b'{"t": "a"}\n', []),
        (["data.path=odd", "data.format=parquet"], b'{"t": "a"}\n', [("HF710", "data.path")]),
        (
            ["data.path=odd", "data.format=sft"],
            b'{"chosen": "a", "rejected": "b"}\n',
            [("HF708", "data.path")],
        ),
    ],
)
def test_the_content_is_looked_at(make_spec, corpus, sets, content, found):
    (corpus / "odd").write_bytes(content)
    problems = live_problems(make_spec(*sets), corpus)
    assert [(each.code, each.where.key) for each in problems] == found


@pytest.mark.parametrize(
    ("files", "path", "expected"),
    [
        ("c.bin c.idx", "c", None),
        ("c.bin c.idx", "c.bin", None),
        ("c.bin c.idx", "c.idx", None),
        ("c.bin c.idx", "", None),
        ("c.bin c.idx notes.txt", "", None),
        ("c.v2.bin c.v2.idx", "c.v2", None),
        ("c.v2.bin c.v2.idx", "c", ("HF201", "c.bin and ")),
        ("c.bin", "c", ("HF201", "c.idx")),
        ("c.idx", "c.idx", ("HF201", "c.bin")),
        ("c.bin", "", ("HF201", "c.idx")),
        ("", "", ("HF203", " 0 Megatron datasets ")),
        ("a.bin a.idx b.bin", "", ("HF203", " 2 Megatron datasets (a, b)")),
        ("a.bin a.idx b.bin b.idx", "b", None),
        ("a.bin a.idx", "b", ("HF201", "b.bin and ")),
    ],
)
def test_a_megatron_dataset_is_found_as_the_trainer_finds_it(
    make_spec, tmp_path, files, path, expected
):
    (tmp_path / "d").mkdir()
    for name in files.split():
        (tmp_path / "d" / name).write_text("x")
    problems = live_problems(make_spec("data.format=megatron", f"data.path=d/{path}"), tmp_path)
    if expected is None:
        assert problems == []
    else:
        assert [problem.code for problem in problems] == [expected[0]]
        assert expected[1] in str(problems[0])
    with pytest.raises((DataError, UnreadableError)) as caught:
        read_megatron(tmp_path / "d" / path)
    assert ("HF707" in str(caught.value)) == (expected is None)  # the content was looked at


def test_the_problem_names_the_line(make_spec, tmp_path):
    (problem,) = live_problems(make_spec(), tmp_path)
    assert str(problem).startswith(f"job.yaml:10: HF201 data.path: {tmp_path}/corpus ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions_are_looked_at(make_spec, corpus):
    (corpus / "corpus").chmod(0)
    locked = corpus / "locked"
    locked.mkdir(mode=0o500)
    codes = [p.code for p in live_problems(make_spec("checkpoint.dir=locked/ckpt"), corpus)]
    (corpus / "corpus").chmod(0o700)
    assert codes == ["HF202", "HF204"]


def test_check_for_slurm_looks_at_the_paths(tmp_path, capsys):
    job = tmp_path / "job.yaml"
    job.write_text(JOB + "slurm: {time: 60}\n")
    assert run_cli(["check", str(job)]) == 0
    assert run_cli(["check", str(job), "--to", "slurm"]) == 2
    assert "HF201 data.path" in capsys.readouterr().err
    (tmp_path / "corpus").write_text("text")
    assert run_cli(["check", str(job), "--to", "slurm"]) == 0


@pytest.mark.parametrize("key", ["data.path", "data.tokenizer"])
def test_pipes_and_devices_are_no_data(make_spec, corpus, key):
    os.mkfifo(corpus / "pipe")
    for name in ("pipe", "/dev/zero"):
        [problem] = live_problems(make_spec(f"{key}={name}"), corpus)
        assert (problem.code, problem.where.key) == ("HF202", key)


@pytest.mark.parametrize(
    ("number", "special", "config", "codes"),
    [
        (511, False, "{}", []),
        (511, True, "{}", []),
        (512, False, "{}", ["HF024"]),
        (512, True, "{}", ["HF191"]),
        (512, True, '{"eos_token": "<x>"}', ["HF024"]),
        (511, True, "[]", ["HF704"]),
    ],
)
def test_a_tokenizer_is_compared_with_the_vocabulary(
    make_spec, corpus, *, number, special, config, codes
):
    added = [{"id": number, "content": "<x>", "special": special}]
    tokenizer = {"model": {"vocab": {"a": 0, "b": 8}}, "added_tokens": added}
    (corpus / "tokenizer.json").write_text(json.dumps(tokenizer))
    (corpus / "tokenizer_config.json").write_text(config)
    sets = [SMALL, "data.tokenizer=tokenizer.json"]
    problems = live_problems(make_spec(*sets), corpus)
    assert [each.code for each in problems] == codes
    assert all(each.where.key == "data.tokenizer" for each in problems)
    assert live_problems(make_spec(*sets, "command=-m this"), corpus) == []


def test_a_warning_of_the_tokenizer_stops_a_strict_check_only(corpus, capsys):
    tokenizer = {"model": {"vocab": {}}, "added_tokens": [{"id": 512, "content": "<x>"}]}
    for special, code, exits in ((True, "HF191", [0, 2]), (False, "HF024", [2, 2])):
        tokenizer["added_tokens"][0]["special"] = special
        (corpus / "tokenizer.json").write_text(json.dumps(tokenizer))
        (corpus / "job.yaml").write_text(JOB)
        args = ["check", str(corpus / "job.yaml"), "--to", "slurm", "--set", SMALL]
        args += ["--set", "data.tokenizer=tokenizer.json"]
        assert [run_cli(args), run_cli([*args, "--strict"])] == exits
        assert capsys.readouterr().err.count(code) == 2
