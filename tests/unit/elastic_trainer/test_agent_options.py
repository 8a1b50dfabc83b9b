from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.agent.main import main
from elastic_trainer.agent.options import OptionsError, parse
from elastic_trainer.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    NetworkSection,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.ladder import Ladder, Rung
from elastic_trainer.layout import ParallelLayout
from elastic_trainer.models import ModelShape


def job(run_dir: Path) -> TrainConfig:
    rungs = tuple(
        Rung(num_nodes=num, layout=ParallelLayout(dp=2 * num), micro_batches=1) for num in (4, 2)
    )
    shape = ModelShape(num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=16, vocab_size=256)
    return TrainConfig(
        name="tiny",
        run_id="tiny-1",
        model_name="tiny",
        model=shape,
        ladder=Ladder(rungs),
        gpus_per_node=2,
        device="cpu",
        train=TrainSection(seq_len=8, global_batch=8, steps=3),
        data=DataSection(path="/data"),
        checkpoint=CheckpointSection(dir=str(run_dir / "checkpoints")),
        elastic=ElasticSection(hang_ceiling_s=7.0),
        network=NetworkSection(ports="29400-29409"),
    )


def test_a_run_directory_says_everything(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job(tmp_path).to_json())
    argv = ["--run-dir", str(tmp_path), "--node", "n1", "--attempt", "2"]
    options = parse(argv, {"SLURM_JOB_ID": "17"})
    assert (options.run_id, options.job, options.node, options.attempt) == ("tiny-1", "17", "n1", 2)
    assert (options.workers, options.rung_nodes) == (2, (4, 2))
    assert options.elastic.hang_ceiling_s == 7.0
    assert options.network.ports == "29400-29409"
    assert (options.run_dir, options.board_dir) == (tmp_path, tmp_path / "board")
    assert (options.task.kind, options.task.target) == ("main", "elastic_trainer.train")


def test_torchruns_flags_mean_the_same(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    argv = ["--nnodes=2:4", "--nproc_per_node", "3", "--rdzv-id", "r", "--max-restarts=5"]
    argv += ["--rdzv-endpoint", str(tmp_path), "--rdzv-conf", "join_timeout_s=1,ports=5000-5001"]
    options = parse([*argv, str(script), "--lr", "1", "--node", "x"], {})
    assert options.rung_nodes == (4, 3, 2)
    assert (options.workers, options.run_id, options.job) == (3, "r", "r")
    assert (options.elastic.max_restarts, options.elastic.join_timeout_s) == (5, 1.0)
    assert options.network.ports == "5000-5001"
    assert options.run_dir is None
    task = options.task
    assert (task.kind, task.target) == ("script", str(script))
    assert task.args == ("--lr", "1", "--node", "x")


@pytest.mark.parametrize(
    ("argv", "kind", "target"),
    [
        (["-m", "pkg.train"], "module", "pkg.train"),
        (["-m", "elastic_trainer.train"], "main", "elastic_trainer.train"),
        (["--no-python", "sh"], "command", "sh"),
        ([], "main", "elastic_trainer.train"),
    ],
)
def test_what_to_run(tmp_path: Path, argv: list[str], kind: str, target: str) -> None:
    task = parse(["--rdzv-endpoint", str(tmp_path), *argv], {}).task
    assert (task.kind, task.target) == (kind, target)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "HF501 give --run-dir RUN, or --rdzv-endpoint DIR"),
        (["--run-dir", "nowhere", "--job", "1"], "nowhere/job.json: No such file"),
        (["--run-dir", "nowhere", "--nnodes", "2"], "HF501 --nnodes: job.json in --run-dir"),
        (["--rdzv-endpoint", "/tmp", "--nnodes", "4:2"], "HF501 --nnodes 4:2: expected MIN:MAX"),
        (["--rdzv-endpoint", "/tmp", "--nproc-per-node", "x"], "a number, gpu, cpu or auto"),
        (["--rdzv-endpoint", "/tmp", "--rdzv-conf", "a=1"], "HF501 --rdzv-conf a=1: expected"),
        (["--rdzv-endpoint", "/tmp", "--rdzv-conf", "heartbeat_s=-1"], "a positive number"),
        (["--rdzv-endpoint", "/tmp", "--rdzv-conf", "ports=9-1"], "not a range like 29400-29499"),
        (["--rdzv-endpoint", "/tmp", "gone.py"], "HF503 there is no script gone.py"),
        (["--rdzv-endpoint", "/tmp", "--no-python", "no-such-x"], "HF503 no-such-x is no exec"),
        (["--rdzv-endpoint", "/tmp", "--no-python", "-m", "x"], "exclude each other"),
        (["--rdzv-endpoint", "/tmp", "--rdzv-conf", "interface=none0"], "HF504 network.interface"),
    ],
)
def test_the_users_mistakes_exit_93(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 93
    assert says in capsys.readouterr().err


def test_unknown_flags_exit_93_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--rdzv-backend", "c10d"])
    assert caught.value.code == 93
    said = capsys.readouterr().err
    assert "error: HF501 argument --rdzv-backend/--rdzv_backend: invalid choice: 'c10d'" in said


def test_a_run_needs_a_job_id_and_a_readable_job_json(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job(tmp_path).to_json())
    with pytest.raises(OptionsError, match="HF501 give --job ID"):
        parse(["--run-dir", str(tmp_path)], {})
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(OptionsError, match=r"HF502 .*version None"):
        parse(["--run-dir", str(tmp_path), "--job", "1"], {})
