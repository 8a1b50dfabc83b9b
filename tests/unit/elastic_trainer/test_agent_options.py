from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.agent.command.options import OptionsError, parse
from elastic_trainer.agent.main import main
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
    assert (options.run_id, options.job, options.node, options.attempt) == (
        *("tiny-1", "17.0", "n1", "2"),
    )
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
    ],
)
def test_what_to_run(tmp_path: Path, argv: list[str], kind: str, target: str) -> None:
    task = parse(["--rdzv-endpoint", str(tmp_path), *argv], {}).task
    assert (task.kind, task.target) == (kind, target)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "HF501 which script? Give one after the flags, or --run-dir RUN"),
        (["--run-dir", "nowhere", "--job", "1"], "nowhere/job.json cannot be read: No such"),
        (["--run-dir", "nowhere", "--nnodes", "2"], "HF501 --nnodes: job.json in --run-dir"),
        (["--rdzv-endpoint", "/tmp", "--nnodes", "4:2"], "HF501 --nnodes 4:2: expected MIN:MAX"),
        (["--rdzv-endpoint", "/tmp", "--nproc-per-node", "x"], "a number, gpu, cpu or auto"),
        (["--rdzv-endpoint", "/tmp", "--rdzv-conf", "a=1"], "HF501 --rdzv-conf a=1: expected"),
        (["--rdzv-endpoint", "/tmp", "--rdzv-conf", "heartbeat_s=-1"], "a positive number"),
        (["--rdzv-endpoint", "/tmp", "--rdzv-conf", "ports=9-1"], "not a range like 29400-29499"),
        (["--rdzv-endpoint", "/tmp", "gone.py"], "HF503 there is no script gone.py"),
        (
            ["--rdzv-endpoint", "/tmp", "--no-python", "no-such-x"],
            "HF503 there is no executable no-such",
        ),
        (["--rdzv-endpoint", "/tmp", "--no-python", "-m", "x"], "exclude each other"),
        (
            ["--rdzv-endpoint", "/tmp", "--rdzv-conf", "interface=none0", "--no-python", "sh"],
            "HF504 network.interface",
        ),
    ],
)
def test_the_users_mistakes_exit_93(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 93
    assert says in capsys.readouterr().err


def test_unknown_flags_exit_93_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--no-such-flag", "1"])
    assert caught.value.code == 93
    assert "error: HF501 unrecognized arguments: --no-such-flag" in capsys.readouterr().err


def test_a_run_needs_a_job_id_and_a_readable_job_json(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job(tmp_path).to_json())
    with pytest.raises(OptionsError, match="HF501 give --job ID"):
        parse(["--run-dir", str(tmp_path)], {})
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(OptionsError, match=r"HF502 .*version None"):
        parse(["--run-dir", str(tmp_path), "--job", "1"], {})


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rdzv-backend", "c10d"], "HF510 --rdzv-backend c10d: agents meet through a directory"),
        (["--rdzv-endpoint", "node0:29400"], "HF510 --rdzv-endpoint node0:29400: expected a direc"),
        (["--rdzv-endpoint", "[::1]:29400"], "HF510 --rdzv-endpoint [::1]:29400"),
        (["--start-method", "fork"], "HF510 --start-method does not exist here"),
        (["--numa_binding", "node"], "HF510 --numa-binding does not exist here"),
        (["--virtual-local-rank"], "HF510 --virtual-local-rank does not exist here"),
        (["--logs-specs", "x"], "use --log-dir, --redirects, --tee"),
        (["--signals-to-handle", "SIGTERM,SIGHUP"], "only SIGTERM and SIGINT ask for a stop"),
        (["--standalone", "--nnodes", "2"], "HF501 --standalone is one node"),
        (["--nnodes", "2"], "HF501 --nnodes 2 needs --rdzv-endpoint DIR"),
        (
            ["--rdzv-endpoint", "/tmp", "--rdzv-id", "../x"],
            "HF501 --rdzv-id ../x: expected letters",
        ),
        (["-r", "4"], "HF501 --redirects 4: expected 0 (none)"),
        (["-t", "0:5"], "HF501 --tee 0:5: expected 0 (none)"),
        (["--local-ranks-filter", "x"], "HF501 --local-ranks-filter x: expected local ranks"),
        (["--progress-pattern", "step"], "expected one group, the step"),
        (["--progress-pattern", "("], "HF501 --progress-pattern (:"),
    ],
)
def test_flags_that_cannot_be_taken_say_what_to_use(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--no-python", "sh"]) == 93
    assert says in capsys.readouterr().err


def test_unknown_placeholders_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--standalone", "--no-python", "sh", "--dp={dpp}"]) == 93
    assert "HF511 {dpp} is unknown; {dp} {tp}" in capsys.readouterr().err


def test_flags_without_effect_are_told(tmp_path: Path) -> None:
    argv = ["--node-rank", "0", "--master-port", "29500", "--monitor-interval", "5"]
    options = parse([*argv, "--rdzv-endpoint", str(tmp_path), "--no-python", "sh"], {})
    assert [note.split()[0] for note in options.notes] == [
        "--monitor-interval",
        "--node-rank",
        "--master-port",
    ]


def test_one_machine_needs_no_endpoint_and_each_job_is_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    argv = ["--nproc-per-node", "2", "--no-python", "sh", "-c", "true"]
    options = parse(argv, {})
    assert (options.rung_nodes, options.workers) == ((1,), 2)
    assert options.record_dir == tmp_path / options.run_id
    assert options.board_dir.parent == options.record_dir
    assert str(options.record_dir) in options.notes[-1]
    assert parse(argv, {}).run_id != options.run_id, "two jobs, as under torchrun"
    named = parse(["--rdzv-id", "7", *argv], {})
    assert named.run_id == named.record_dir.name == "7"


def test_jobs_share_an_endpoint_by_their_ids(tmp_path: Path) -> None:
    argv = ["--rdzv-endpoint", str(tmp_path), "--nnodes", "1:2", "--nproc-per-node", "2"]
    options = parse([*argv, "--rdzv-id", "7", "--role", "trainer", "--no-python", "sh"], {})
    assert options.board_dir == tmp_path / "7" / "board"
    assert options.record_dir == tmp_path / "7"
    assert options.role == "trainer"
    assert {n: str(layout) for n, layout in options.layouts.items()} == {
        2: "dp4-pp1-cp1-tp1",
        1: "dp2-pp1-cp1-tp1",
    }
    argv += ["--log-dir", str(tmp_path / "logs"), "--no-python", "sh"]
    options = parse(argv, {})
    assert (options.log_root, options.record_dir) == (tmp_path / "logs/none", tmp_path / "none")


def test_torchruns_variables_are_taken_where_no_flag_is_given(tmp_path: Path) -> None:
    env = {"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "6"}
    argv = ["--rdzv-endpoint", str(tmp_path), "--nproc-per-node", "1", "--no-python", "sh"]
    options = parse(argv, env)
    assert (options.rung_nodes, options.workers, options.elastic.max_restarts) == ((3, 2), 1, 6)
    with pytest.raises(OptionsError, match=r"HF501 \$PET_MAX_RESTARTS: 'x' is no int"):
        parse(argv, {"PET_MAX_RESTARTS": "x"})


@pytest.mark.parametrize(
    ("argv", "console", "prefix"),
    [
        ([], [3, 3], [0, 0]),
        (["-r", "3"], [0, 0], [0, 0]),
        (["-t", "3"], [3, 3], [3, 3]),
        (["-r", "3", "-t", "1"], [1, 1], [1, 1]),
        (["-r", "0:1,1:2"], [2, 1], [0, 0]),
        (["-t", "1:2"], [3, 3], [0, 2]),
        (["--local_ranks_filter", "1"], [0, 3], [0, 0]),
        (["-t", "3", "--local-ranks-filter", "0"], [3, 0], [3, 3]),
    ],
)
def test_the_console_shows_what_torchrun_would(
    tmp_path: Path, argv: list[str], console: list[int], prefix: list[int]
) -> None:
    argv = ["--rdzv-endpoint", str(tmp_path), "--nproc-per-node", "2", *argv, "--no-python", "sh"]
    shown = parse(argv, {}).streams
    assert shown is not None
    assert [int(shown[rank].console) for rank in range(2)] == console
    assert [int(shown[rank].prefix) for rank in range(2)] == prefix
