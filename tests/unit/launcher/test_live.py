from __future__ import annotations

import os

import pytest

from launcher.live import live_problems


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
        (["data.format=megatron"], "HF205", "data.format"),
        (["checkpoint.dir=corpus/a.txt"], "HF204", "checkpoint.dir"),
        (["checkpoint.dir=corpus/a.txt/deep"], "HF204", "checkpoint.dir"),
        (["command=train.py"], "HF205", "command"),
        (["data.path=" + "x" * 300], "HF202", "data.path"),
    ],
)
def test_each_thing_in_the_way_is_named(make_spec, corpus, sets, code, key):
    (corpus / "empty").mkdir()
    (corpus / "empty.txt").touch()
    (problem,) = live_problems(make_spec(*sets), corpus)
    assert (problem.code, problem.where.key) == (code, key)


def test_the_problem_names_the_line(make_spec, tmp_path):
    (problem,) = live_problems(make_spec(), tmp_path)
    assert str(problem).startswith(
        f"job.yaml:10: HF201 data.path: {tmp_path}/corpus does not exist"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions_are_looked_at(make_spec, corpus):
    (corpus / "corpus").chmod(0)
    locked = corpus / "locked"
    locked.mkdir(mode=0o500)
    codes = [p.code for p in live_problems(make_spec("checkpoint.dir=locked/ckpt"), corpus)]
    (corpus / "corpus").chmod(0o700)
    assert codes == ["HF202", "HF204"]
