from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.elastic.utils import macros
from torch.distributed.run import get_args_parser

from elastic_trainer.agent import node
from elastic_trainer.agent.__main__ import main
from elastic_trainer.agent.flags import OptionsError
from elastic_trainer.agent.hangs.hang import CPU, CUDA, DeviceLimits
from elastic_trainer.agent.options import Options, parse
from elastic_trainer.plan.command import fill
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    NetworkSection,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.storage.storage_probe import probe_storage


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


def sizes(options: Options) -> list[int]:
    return [rung.num_nodes for rung in options.ladder.rungs]


def test_a_run_directory_says_everything(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job(tmp_path).to_json())
    argv = ["--run-dir", str(tmp_path), "--node", "n1", "--attempt", "2"]
    options = parse(argv, {"SLURM_JOB_ID": "17"})
    assert (options.run_id, options.job, options.node, options.attempt) == (
        *("tiny-1", "17.0", "n1", "2"),
    )
    assert (options.workers, sizes(options)) == (2, [4, 2])
    assert options.elastic.hang_ceiling_s == 7.0
    assert options.network.ports == "29400-29409"
    assert (options.run_dir, options.record_dir) == (tmp_path, tmp_path)
    assert options.notes == ()
    assert (options.task.kind, options.task.target) == ("main", "elastic_trainer.train.main")


def test_a_run_says_what_of_torchruns_it_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job(tmp_path).to_json())
    argv = ["--run-dir", str(tmp_path), "--job", "j"]
    variables = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PYTHON_EXEC", "TORCHELASTIC_HEALTH_CHECK_PORT")
    notes = parse(argv, dict.fromkeys(variables, "9")).notes
    assert {note.split()[0] for note in notes} == {*variables}
    for flag in ("--virtual-local-rank", "--numa-binding=node", "--signals-to-handle=SIGHUP"):
        with pytest.raises(OptionsError, match="HF501"):
            parse([*argv, flag], {})


@pytest.mark.parametrize(
    ("device", "wished", "limits"),
    [
        ("cpu", None, CPU),
        ("cuda", None, CUDA),
        ("cuda", 9.0, dataclasses.replace(CUDA, hang_floor_s=9.0)),
    ],
)
def test_limits_are_those_of_the_device(
    tmp_path: Path, device: str, wished: float | None, limits: DeviceLimits
) -> None:
    elastic = ElasticSection(hang_floor_s=wished)
    config = dataclasses.replace(job(tmp_path), device=device, elastic=elastic)
    (tmp_path / "job.json").write_text(config.to_json())
    options = parse(["--run-dir", str(tmp_path), "--node", "n1", "--job", "j"], {})
    assert node.device_limits(options) == limits


def test_torchruns_flags_mean_the_same(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    argv = ["--nnodes=2:4", "--nproc_per_node", "3", "--rdzv-id", "r", "--max-restarts=5"]
    argv += ["--rdzv-endpoint", str(tmp_path), "--rdzv-conf", "join_timeout_s=1,ports=5000-5001"]
    options = parse([*argv, str(script), "--lr", "1", "--node", "x"], {})
    assert sizes(options) == [4, 3, 2]
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
        (["-m", "elastic_trainer.train.main"], "main", "elastic_trainer.train.main"),
        (["--no-python", "sh"], "command", "sh"),
    ],
)
def test_what_to_run(tmp_path: Path, argv: list[str], kind: str, target: str) -> None:
    task = parse(["--rdzv-endpoint", str(tmp_path), *argv], {}).task
    assert (task.kind, task.target) == (kind, target)


HERE = ["--rdzv-endpoint", "/tmp"]


def test_a_file_system_without_hard_links_exits_93(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def link(_file: Path, _second: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(node, "probe_storage", partial(probe_storage, link=link))
    assert main(["--rdzv-endpoint", str(tmp_path), "--no-python", "sh"]) == 93
    assert f" HF617 {tmp_path}/" in capsys.readouterr().err
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("argv", "code", "key"),
    [
        ([], "HF501", "--run-dir"),
        (["--no-such-flag", "1"], "HF501", "--no-such-flag"),
        (["--max-restarts", "x"], "HF501", "--max-restarts"),
        (["--on-term", "x"], "HF501", "--on-term"),
        (["--run-dir", "nowhere", "--job", "1"], "HF502", "nowhere/job.json"),
        (["--run-dir", "nowhere", "--nnodes", "2"], "HF501", "--nnodes"),
        (["--run-dir", "nowhere", "--rdzv-conf", "window_s=1"], "HF501", "--rdzv-conf"),
        ([*HERE, "--nnodes", "4:2", "x"], "HF501", "--nnodes 4:2"),
        ([*HERE, "--nproc-per-node", "x", "x"], "HF501", "--nproc-per-node x"),
        ([*HERE, "--rdzv-conf", "a=1", "x"], "HF501", "a=1"),
        ([*HERE, "--rdzv-conf", "a", "x"], "HF501", "--rdzv-conf a"),
        ([*HERE, "--rdzv-conf", "heartbeat_s=-1", "x"], "HF501", "heartbeat_s=-1"),
        ([*HERE, "--rdzv-conf", "ports=9-1", "x"], "HF501", "29400-29499"),
        ([*HERE, "gone.py"], "HF503", "gone.py"),
        ([*HERE, "--no-python", "no-such-x"], "HF503", "no-such-x"),
        ([*HERE, "--no-python", "-m", "x"], "HF501", "--module"),
        ([*HERE, "--rdzv-conf", "interface=none0", "--no-python", "sh"], "HF504", "none0"),
        (["--rdzv-backend", "c10d", "x"], "HF510", "c10d"),
        (["--rdzv-endpoint", "node0:29400", "x"], "HF510", "node0:29400"),
        (["--rdzv-endpoint", "[::1]:29400", "x"], "HF510", "[::1]:29400"),
        (["--rdzv-endpoint", "localhost", "x"], "HF510", "./jobs"),
        (["--rdzv-endpoint", "etcd://n0:2379", "x"], "HF510", "etcd://n0:2379"),
        (["--rdzv-endpoint", "n0:1,n1:2", "x"], "HF510", "n0:1,n1:2"),
        (["--start-method", "other", "x"], "HF501", "--start-method"),
        (["--numa_binding", "node", "--no-python", "sh"], "HF513", "--numa-binding node"),
        (["--master-port", "0", "--no-python", "sh"], "HF501", "--master-port 0"),
        (["--master-port", "65536", "--no-python", "sh"], "HF501", "--master-port 65536"),
        (
            [*HERE, "--nnodes=1:2", "--master-port=29511", "--no-python", "sh", "tcp://h:29511/"],
            *("HF512", "tcp://h:29511/"),
        ),
        ([*HERE, "--rdzv-conf", "join_timeout=-1", "x"], "HF501", "join_timeout=-1"),
        ([*HERE, "--rdzv-conf", "last_call_timeout=0", "x"], "HF501", "last_call_timeout=0"),
        ([*HERE, "--rdzv-conf", "keep_alive_interval=x", "x"], "HF501", "keep_alive_interval=x"),
        (["--max-restarts", "-1", "--no-python", "sh"], "HF501", "--max-restarts -1"),
        (["--shutdown-timeout", "-1", "--no-python", "sh"], "HF501", "--shutdown-timeout -1"),
        (["--duplicate-stdout-filters", "a,b", "x"], "HF510", "--duplicate-stdout-filters"),
        (["--logs-specs", "x", "x"], "HF510", "--log-dir"),
        (["--signals-to-handle", "SIGTERM,SIGKILL", "--no-python", "sh"], "HF501", "SIGKILL"),
        (["--signals-to-handle", "SIGHUB", "--no-python", "sh"], "HF501", "SIGHUB"),
        (["--event-log-handler", "nobodys", "--no-python", "sh"], "HF501", "nobodys"),
        (["--standalone", "--nnodes", "2", "--no-python", "sh"], "HF501", "--nnodes 2"),
        (["--nnodes", "2", "--no-python", "sh"], "HF501", "--rdzv-endpoint"),
        ([*HERE, "--rdzv-id", "../x", "--no-python", "sh"], "HF501", "--rdzv-id ../x"),
        (["-r", "4", "x"], "HF501", "--redirects 4"),
        (["-t", "0:5", "x"], "HF501", "--tee 0:5"),
        (["--local-ranks-filter", "x", "x"], "HF501", "--local-ranks-filter x"),
        (["--progress-pattern", "step", "x"], "HF501", "--progress-pattern step"),
        (["--progress-pattern", "(", "x"], "HF501", "--progress-pattern ("),
    ],
)
def test_the_users_mistakes_exit_93(
    argv: list[str], code: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 93
    says = capsys.readouterr().err
    assert f" {code} " in says
    assert key in says


def test_a_run_needs_a_job_id_and_a_readable_job_json(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job(tmp_path).to_json())
    with pytest.raises(OptionsError, match=r"HF501 .*--job\b"):
        parse(["--run-dir", str(tmp_path)], {})
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(OptionsError, match=r"HF502 .*version None"):
        parse(["--run-dir", str(tmp_path), "--job", "1"], {})


def test_flags_without_effect_are_told(tmp_path: Path) -> None:
    argv = ["--node-rank", "0", "--master-port", "29500", "--monitor-interval", "5"]
    options = parse([*argv, "--rdzv-endpoint", str(tmp_path), "--no-python", "sh"], {})
    assert [note.split()[0] for note in options.notes] == ["--monitor-interval", "--node-rank"]
    assert options.static_store == ("127.0.0.1", 29500), "one node: this is where it is"
    argv += ["--start-method=fork", "--nnodes=1:2", "--master-addr=h", "--logs-specs=default"]
    conf = "last_call_timeout=1,join_timeout=9,is_host=1,store_type=file,timeout=8"
    variables = {
        "TORCHELASTIC_HEALTH_CHECK_PORT": "8080",
        "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
        "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "60",
        "TORCH_ELASTIC_WORKER_IDENTICAL": "0",
    }
    argv += ["--rdzv-conf", conf, "--rdzv-endpoint", str(tmp_path)]
    options = parse([*argv, "--no-python", "sh", "tcp://h:29501"], variables)
    assert options.static_store is None
    assert {note.split()[0] for note in options.notes} == {
        *("--monitor-interval", "--node-rank", "--start-method", "--master-addr", "--master-port"),
        *("last_call_timeout", "is_host", "store_type", "timeout", *variables),
    } - {"TORCH_ELASTIC_WORKER_IDENTICAL"}
    assert options.elastic.join_timeout_s == 9.0


def test_torchelastics_keep_alives_are_heartbeats_of_agents(tmp_path: Path) -> None:
    argv = ["--rdzv-endpoint", str(tmp_path), "--no-python", "sh"]
    conf = "keep_alive_interval=2,keep_alive_max_attempt=4"
    elastic = parse(["--rdzv-conf", conf, *argv], {}).elastic
    assert (elastic.heartbeat_s, elastic.dead_after_s) == (2.0, 8.0)
    elastic = parse(["--rdzv-conf", "keep_alive_max_attempt=4", *argv], {}).elastic
    assert (elastic.heartbeat_s, elastic.dead_after_s) == (5.0, 20.0)
    elastic = parse(["--rdzv-conf", f"{conf},dead_after_s=3", *argv], {}).elastic
    assert (elastic.heartbeat_s, elastic.dead_after_s) == (2.0, 3.0)


def test_signals_and_the_time_to_shut_down_are_those_of_torchrun(tmp_path: Path) -> None:
    argv = ["--rdzv-endpoint", str(tmp_path), "--no-python", "sh"]
    options = parse(argv, {})
    assert options.signals == {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}
    assert options.stop_grace_s == 30.0
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    options = parse(["--signals-to-handle", "SIGTERM, SIGUSR1", *argv], env)
    assert options.signals == {"SIGTERM", "SIGUSR1"}
    assert options.stop_grace_s == 7.0
    assert parse(["--shutdown-timeout", "0", *argv], env).stop_grace_s == 0.0
    for text in ("-1", "x"):
        with pytest.raises(OptionsError, match=rf"HF501 TORCH_ELASTIC_SHUTDOWN_TIMEOUT {text}"):
            parse(argv, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": text})


def test_virtual_local_ranks_have_a_device_each(tmp_path: Path) -> None:
    argv = ["--rdzv-endpoint", str(tmp_path), "--nproc-per-node=2", "--virtual-local-rank"]
    argv += ["--no-python", "sh"]
    assert parse(argv, {}).devices == ("0", "1")
    assert parse(argv, {"CUDA_VISIBLE_DEVICES": "GPU-1, 7,3"}).devices == ("GPU-1", "7")
    with pytest.raises(OptionsError, match=r"HF501 .*CUDA_VISIBLE_DEVICES=7 .*--nproc-per-node 2"):
        parse(argv, {"CUDA_VISIBLE_DEVICES": "7"})


def test_another_interpreter_is_started_for_each_worker(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    argv = ["--rdzv-endpoint", str(tmp_path)]
    script, python = str(tmp_path / "train.py"), str(tmp_path / "python")
    Path(python).symlink_to("/bin/sh")
    task = parse([*argv, script, "-x"], {"PYTHON_EXEC": python}).task
    assert (task.kind, task.target, task.args) == ("command", python, ("-u", script, "-x"))
    task = parse([*argv, "-m", "pkg", "-x"], {"PYTHON_EXEC": python}).task
    assert (task.kind, task.target, task.args) == ("command", python, ("-u", "-m", "pkg", "-x"))
    (tmp_path / "package").mkdir()
    assert parse([*argv, str(tmp_path / "package")], {}).task.kind == "script", "python runs it"
    for others, env in (
        (["--run-path", "--no-python"], {"PYTHON_EXEC": python}),  # as torchrun: it goes first
        ([], {"PYTHON_EXEC": sys.executable}),
    ):
        task = parse([*argv, *others, script], env).task
        assert (task.kind, task.target) == ("script", script)
    with pytest.raises(OptionsError, match=r"HF503 .*nowhere/python"):
        parse([*argv, script], {"PYTHON_EXEC": "nowhere/python"})


@pytest.mark.parametrize(
    "words",
    [
        ["a", "--", "b"],
        ["--", "a"],
        ["--"],
        ["--", "--"],
        ["a", "--", "--", "b", "--", "c"],
        ["--flag=-- ", "-- "],
        ["", "a", ""],
        ["--nnodes", "3", "--standalone", "-m", "-t3"],
        ["--job", "x", "--fresh", "--run-dir", "x", "--node", "n"],
        ["--p", "1", "--f", "--h", "5"],  # what ours and others of them begin with
        ["-h", "--help"],
        ["é\nx", "@file", "a=b", "-"],
        ["{b} {{b}} ${b} ${{b}}", '{"a": {"b": 1}}'],
        ["$$", "$${local_rank}", "$local_rank", "${local_rank}}", "$local_ranks"],
    ],
)
def test_a_scripts_arguments_are_what_torchrun_makes_of_them(
    tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    for before in (["--nnodes=1"], ["--nnodes=1", "--"], ["--stand"]):
        try:
            theirs = get_args_parser().parse_args([*before, script, *words])
        except SystemExit:  # Python 3.11: a word that may begin two of its options
            given = words
        else:
            assert theirs.training_script == script or before[-1] == "--"
            given = theirs.training_script_args
        if before[-1] == "--" and words[:1] == ["--"]:
            given = words
        ours = parse(["--rdzv-endpoint", str(tmp_path), *before, script, *words], {}).task
        filled = fill(ours.args, {}, local_rank=1)
        assert list(filled) == macros.substitute(given, "1"), before


def test_names_of_ours_are_filled_and_doubled_are_text(tmp_path: Path) -> None:
    argv = ["--rdzv-endpoint", str(tmp_path), "--no-python", "sh", "{dp}{b}", "{{dp}}{{b}}"]
    assert fill(parse(argv, {}).task.args, {"dp": 4}) == ("4{b}", "{dp}{{b}}")


def test_one_machine_needs_no_endpoint_and_each_job_is_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    argv = ["--nproc-per-node", "2", "--no-python", "sh", "-c", "true"]
    options = parse(argv, {})
    assert (sizes(options), options.workers) == ([1], 2)
    assert options.record_dir == tmp_path / options.run_id
    assert str(options.record_dir) in options.notes[-1]
    assert parse(argv, {}).run_id != options.run_id, "two jobs, as under torchrun"
    named = parse(["--rdzv-id", "7", *argv], {})
    assert named.run_id == named.record_dir.name == "7"


def test_jobs_share_an_endpoint_by_their_ids(tmp_path: Path) -> None:
    argv = ["--rdzv-endpoint", str(tmp_path), "--nnodes", "1:2", "--nproc-per-node", "2"]
    options = parse([*argv, "--rdzv-id", "7", "--role", "trainer", "--no-python", "sh"], {})
    assert options.record_dir == tmp_path / "7"
    assert options.role == "trainer"
    assert [rung.layout.label for rung in options.ladder.rungs] == ["dp4", "dp2"]
    argv += ["--log-dir", str(tmp_path / "logs"), "--no-python", "sh"]
    options = parse(argv, {})
    assert (options.log_root, options.record_dir) == (tmp_path / "logs/none", tmp_path / "none")


def test_torchruns_variables_are_taken_where_no_flag_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NNODES": "2:3", "NPROC_PER_NODE": "4", "MAX_RESTARTS": "6"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    argv = ["--rdzv-endpoint", str(tmp_path), "--nproc-per-node", "1", "--no-python", "sh"]
    options = parse(argv, {})
    assert (sizes(options), options.workers, options.elastic.max_restarts) == ([3, 2], 1, 6)
    (tmp_path / "job.json").write_text(job(tmp_path).to_json())
    monkeypatch.setenv("PET_MAX_RESTARTS", "x")
    run = parse(["--run-dir", str(tmp_path), "--job", "1"], {"PET_EVENT_LOG_HANDLER": "console"})
    assert (sizes(run), run.event_log_handler) == ([4, 2], "console"), "job.json says the rest"
    with pytest.raises(OptionsError, match=r"HF501 .*--max-restarts"):
        parse(argv, {})
    monkeypatch.setenv("PET_STANDALONE", "yes")
    with pytest.raises(OptionsError, match=r"HF501 .*PET_"):
        parse(argv, {})


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


@pytest.mark.parametrize(
    ("flags", "env", "domain"),
    [
        ([], {}, ""),
        ([], {"SLURM_TOPOLOGY_ADDR": "node7"}, ""),  # no topology is configured
        ([], {"SLURM_TOPOLOGY_ADDR": "spine.leaf2.node7"}, "spine.leaf2"),
        ([], {"SLURM_TOPOLOGY_ADDR": "s.l.n", "HOLDFAST_FAILURE_DOMAIN": "rack-3"}, "rack-3"),
        (["--failure-domain", "rack-4"], {"HOLDFAST_FAILURE_DOMAIN": "rack-3"}, "rack-4"),
    ],
)
def test_the_failure_domain_is_said_or_slurms(
    tmp_path: Path, flags: list[str], env: dict[str, str], domain: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    argv = ["--nnodes", "2", "--rdzv-endpoint", str(tmp_path), *flags, str(script)]
    assert parse(argv, env).failure_domain == domain


@pytest.mark.parametrize(
    ("wish", "env", "domain"),
    [
        (None, {"SLURM_TOPOLOGY_ADDR": "root.spine.leaf.n"}, "root.spine.leaf"),
        ("1", {"SLURM_TOPOLOGY_ADDR": "block3.n"}, "block3"),
        ("2", {"SLURM_TOPOLOGY_ADDR": "root.spine.leaf.n"}, "root.spine"),
        ("9", {"SLURM_TOPOLOGY_ADDR": "root.spine.leaf.n"}, ""),  # it has fewer
        ("none", {"SLURM_TOPOLOGY_ADDR": "spine.leaf.n"}, ""),
        ("none", {"HOLDFAST_FAILURE_DOMAIN": "rack-3"}, ""),
        ("topology.kubernetes.io/zone", {"HOLDFAST_FAILURE_DOMAIN": "zone-b"}, "zone-b"),
        ("topology.kubernetes.io/zone", {"HOLDFAST_FAILURE_DOMAIN": ""}, ""),  # no such label
    ],
)
def test_the_job_file_says_which_level_is_the_failure_domain(
    tmp_path: Path, wish: str | None, env: dict[str, str], domain: str
) -> None:
    config = job(tmp_path)
    elastic = dataclasses.replace(config.elastic, failure_domain=wish)
    text = dataclasses.replace(config, elastic=elastic).to_json()
    (tmp_path / "job.json").write_text(text)
    assert ("failure_domain" in text) == (wish is not None)
    argv = ["--run-dir", str(tmp_path), "--job", "1"]
    assert parse(argv, env).failure_domain == domain
    assert parse([*argv, "--failure-domain", "x"], env).failure_domain == "x"


@pytest.mark.process
def test_modules_to_preload_come_from_the_flag_and_are_imported_before_a_fork(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").touch()
    flags = ["--standalone", "--preload", "colorsys,wave", str(tmp_path / "train.py")]
    assert parse(flags, {}).preload == "colorsys,wave"
    code = (
        "import elastic_trainer.worker.script_preload, sys\n"
        "print({'colorsys', 'wave'} <= {*sys.modules})"
    )
    env = {**os.environ, "HOLDFAST_PRELOAD": "colorsys,wave"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "True\n"


def test_a_script_is_called_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is `sys.argv[0]`, as under torchrun."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    task = parse(["--standalone", "sub/train.py"], {}).task
    assert (task.target, task.cwd) == ("sub/train.py", str(tmp_path))
