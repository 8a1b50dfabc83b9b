from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from launcher.render.local import HEAD
from launcher.runs import run_dir as run_dirs
from launcher.runs.checkpoints.commits import check_checkpoint_dir
from launcher.spec.errors import UserError


@pytest.fixture
def config(tmp_path):
    return TrainConfig(
        name="tiny",
        run_id="tiny-1",
        model_name="tiny",
        model=ModelShape(
            num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=16, vocab_size=256
        ),
        ladder=Ladder(
            tuple(
                Rung(num_nodes=n, layout=ParallelLayout(dp=n), micro_batches=-(-12 // n))
                for n in (4, 3, 2)
            )
        ),
        gpus_per_node=1,
        device="cpu",
        train=TrainSection(seq_len=16, global_batch=12, steps=10),
        data=DataSection(path=str(tmp_path)),
        checkpoint=CheckpointSection(dir=str(tmp_path / "checkpoints")),
        elastic=ElasticSection(),
    )


def test_fewer_nodes_use_the_lower_rungs_and_a_resume_may_use_all(tmp_path, config):
    run = tmp_path / "run"
    run_dirs.create(run, {"job.json": config.to_json(), "job.yaml": "x"})
    three = run_dirs.narrow(config, 3)
    assert [rung.num_nodes for rung in three.ladder.rungs] == [3, 2]
    assert run_dirs.write_attempt(run, config, three) == 1
    assert TrainConfig.from_json((run / "job.json").read_text()) == three
    assert run_dirs.load(run) == config
    assert run_dirs.write_attempt(run, config, config) == 2


def test_another_attempt_leaves_what_is_being_read_whole(tmp_path, config):
    run = tmp_path / "run"
    run_dirs.create(run, {"job.json": config.to_json()})
    run_dirs.write_attempt(run, config, config)
    for name in ("job.json", "job.rendered.json"):
        os.link(run / name, tmp_path / name)  # as a reader has it open
    three = run_dirs.narrow(config, 3)
    run_dirs.write_attempt(run, three, three)
    for name in ("job.json", "job.rendered.json"):
        assert TrainConfig.from_json((run / name).read_text()) == three
        assert TrainConfig.from_json((tmp_path / name).read_text()) == config


def test_too_few_nodes(config):
    with pytest.raises(UserError, match=r"HF614.* 2 "):
        run_dirs.narrow(config, 1)


def test_an_existing_run_is_never_written_over(tmp_path, config):
    run = tmp_path / "run"
    run_dirs.create(run, {"job.json": config.to_json()})
    with pytest.raises(UserError, match=f"HF611.*holdfast run --resume {run}"):
        run_dirs.create(run, {"job.json": "{}"})
    (run / "submitted.json").write_text("{}")
    with pytest.raises(UserError, match=f"HF611.*holdfast submit --resume {run}"):
        run_dirs.create(run, {"job.json": "{}"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="HF611"):
        run_dirs.create(tmp_path / "other", {})


def test_a_run_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"HF612.*--run-dir"):
        run_dirs.create(tmp_path / "file" / "run", {"job.json": "{}"})


def test_a_checkpoint_dir_that_cannot_be_written(tmp_path, config):
    check_checkpoint_dir(config)
    assert list((tmp_path / "checkpoints").iterdir()) == []  # the probe is gone
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(UserError, match=r"HF204 checkpoint.dir: .*checkpoints"):
        check_checkpoint_dir(config)


@pytest.mark.parametrize("text", [None, "{", "{}", '{"version": 99}', '{"version": 1}'])
def test_what_is_no_run_is_said(tmp_path, text):
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    with pytest.raises(UserError, match="HF613"):
        run_dirs.load(tmp_path)


def test_a_second_live_job_is_refused_and_named(tmp_path):
    with run_dirs.live_mark(tmp_path, "local-1"):
        with pytest.raises(UserError, match=f"HF615.*local-1 .process {os.getpid()}"):
            run_dirs.live_mark(tmp_path, "local-2").__enter__()
        with pytest.raises(UserError, match="HF615"):
            run_dirs.refuse_if_live(tmp_path)
    run_dirs.refuse_if_live(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_mark_of_a_killed_launcher_is_taken_over(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from launcher.runs.run_dir import live_mark;"
        "mark = live_mark(Path(sys.argv[1]), 'old'); mark.__enter__(); os.kill(os.getpid(), 9)"
    )
    root = run_dirs.__file__.rsplit("/launcher/", 1)[0]
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=False)
    assert json.loads((tmp_path / "launcher.json").read_text())["job"] == "old"
    with run_dirs.live_mark(tmp_path, "new"):
        assert json.loads((tmp_path / "launcher.json").read_text())["job"] == "new"


def test_a_torn_mark_stops_nobody(tmp_path):
    (tmp_path / "launcher.json").write_text('{"pid"')
    run_dirs.refuse_if_live(tmp_path)


@pytest.mark.parametrize("name", ["job.json", "job.sbatch", "job.yaml"])
def test_no_bundle_is_written_through_a_link(tmp_path, name):
    (tmp_path / "precious").write_text(f"{HEAD}/x\n")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / name).symlink_to("../precious")
    with pytest.raises(UserError, match="HF612"):
        run_dirs.write_bundle(run_dir, {name: "new"})
    assert (tmp_path / "precious").read_text() == f"{HEAD}/x\n"
    assert [path.name for path in run_dir.iterdir()] == [name]  # nothing else was written
    assert (run_dir / name).is_symlink()


def test_a_bundle_is_written_over_an_earlier_one_and_not_into_its_other_names(tmp_path):
    run_dirs.write_bundle(tmp_path / "run", {"job.json": "old"})
    (tmp_path / "other").hardlink_to(tmp_path / "run" / "job.json")
    run_dirs.write_bundle(tmp_path / "run", {"job.json": "new"})
    assert (tmp_path / "run" / "job.json").read_text() == "new"
    assert (tmp_path / "other").read_text() == "old"
