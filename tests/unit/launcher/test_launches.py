"""What starts a training, taken apart as bash has made it of a script's text."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from torch.distributed.elastic.utils import macros
from torch.distributed.run import get_args_parser

from elastic_trainer.plan.command import fill
from launcher.cli.main import run_cli
from launcher.node.launch import output_of
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.spec.errors import UserError
from launcher.wrap.launches import NOT_YET, job_of, launch_of
from launcher.wrap.sruns import srun_of
from launcher.wrap.wrapped import script_of

ENV = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "My_Job", "SLURM_JOB_NUM_NODES": "4"}
SRUN = ("srun", "--cpus-per-task=8", "torchrun", "--nnodes=4", "--nproc-per-node=8")


@pytest.mark.parametrize(
    "words",
    [
        ("a.py", "a", "--", "b"),
        ("a.py", "--", "a"),
        ("--", "a.py", "--", "a"),
        ("a.py", "", "{b} {{b}} ${b}", '{"a": {"b": 1}}', "{dp}"),
        ("a.py", "$$HOME", "$${local_rank}", "$local_rank", "é\nx"),
    ],
)
def test_arguments_are_what_torchrun_makes_of_them(words, monkeypatch):
    taken = []
    monkeypatch.setattr("launcher.node.launch.start", lambda argv, _: taken.append(argv))
    for first in (["batch", "--"], ["batch"]):
        assert run_cli([*first, *SRUN, *words]) == 0
    assert taken == [(*SRUN, *words)] * 2
    theirs = get_args_parser().parse_args(words)
    spec = load_spec(job_of(launch_of((*SRUN, *words), ENV), ENV))
    script, *args = spec.command
    values = {"dp": "{dp}"}
    assert script == theirs.training_script == "a.py"
    assert [*fill(args, values, local_rank=1)] == macros.substitute(
        theirs.training_script_args, "1"
    )


def test_an_agent_is_given_all_words(monkeypatch):
    started = []
    monkeypatch.setattr("os.execv", lambda _program, argv: started.append(argv))
    for words in (["a.py", "a", "--", "b"], ["--", "a.py", "--"], ["--help"], ["", "--node", "é"]):
        assert run_cli(["agent", *words]) == 0
        assert started[-1][-len(words) :] == words
        assert started[-1][-len(words) - 1] == "elastic_trainer.agent"


def _hosts(text):
    return text.split(",")


@pytest.mark.parametrize(
    ("options", "hosts", "nodes"),
    [
        ("", "n1,n2,n3,n4", 4),
        ("--nodelist=n2", "n1,n2,n3,n4", 4),  # srun adds the others
        ("--nodes=1 --nodelist=n2", "n2", 1),
        ("-N2 -w n4", "n1,n4", 2),
        ("-n 1 -w n3", "n3", 1),
        ("-N 1", "n1", 1),
        ("-N 1 -r 2", "n3", 1),
        ("-N3 --exclude n1", "n2,n3,n4", 3),
        ("--nodes=1-3 --ntasks-per-node=1", "n1,n2,n3", 3),
    ],
)
def test_an_srun_on_a_part_of_the_nodes(options, hosts, nodes):
    launch = launch_of(["srun", *options.split(), "torchrun", "a.py"], ENV)
    assert list(launch.options.hosts(_hosts("n1,n2,n3,n4"), _hosts)) == _hosts(hosts)
    assert (launch.nodes, launch.srun) == ((nodes, nodes), ())


def test_an_srun_on_nodes_that_the_job_does_not_have():
    for options in ("-w n9 -N1", "-N5", "-N4 -x n1", "-w n1 -x n1 -N1"):
        launch = launch_of(["srun", *options.split(), "torchrun", "a.py"], ENV)
        with pytest.raises(UserError, match="HF169"):
            launch.options.hosts(_hosts("n1,n2,n3,n4"), _hosts)


def test_gpus_that_an_srun_asks_for_in_total_are_asked_for_per_node():
    launch = launch_of(["srun", "--gpus=h100:16", "torchrun", "a.py"], ENV)
    assert launch.srun == ("--gpus-per-node=h100:4",)
    assert launch_of(["srun", "-G8", "-N2", "torchrun", "a.py"], ENV).srun == ("--gpus-per-node=4",)


@pytest.mark.parametrize(
    ("argv", "srun", "nodes", "workers", "command"),
    [
        ((*SRUN, "a.py", "--lr", "1"), ["--cpus-per-task=8"], (4, 4), 8, ["a.py", "--lr", "1"]),
        (("srun", "-N", "2", "-n2", "--label", "torchrun", "a.py"), [], (2, 2), 1, ["a.py"]),
        (("srun", "--mem=0", "--", "torchrun", "a.py"), ["--mem=0"], (4, 4), 1, ["a.py"]),
        (
            ("srun", "--export", "ALL,A=1", "torchrun", "a.py"),
            ["--export=ALL,A=1"],
            (4, 4),
            1,
            ["a.py"],
        ),
        (
            ("srun", "--mem", "0", "-K", "-o", "x", "torchrun", "--nnodes=2:4", "-m", "pkg.train"),
            ["--mem=0"],
            (2, 4),
            1,
            ["-m", "pkg.train"],
        ),
        (
            ("srun", "python", "-m", "torch.distributed.run", "--no_python", "./run", "-x"),
            [],
            (4, 4),
            1,
            ["--no-python", "./run", "-x"],
        ),
    ],
)
def test_an_srun_is_taken_apart(argv, srun, nodes, workers, command):
    launch = launch_of(argv, ENV)
    assert (list(launch.srun), launch.nodes, launch.workers, list(launch.command)) == (
        srun,
        nodes,
        workers,
        command,
    )


def test_workers_for_each_gpu_and_the_wait_for_nodes():
    argv = ("srun", "torchrun", "--nproc-per-node=gpu", "--rdzv-conf=a=1,join_timeout=30", "t.py")
    launch = launch_of(argv, {**ENV, "SLURM_GPUS_ON_NODE": "8"})
    assert (launch.workers, launch.join_timeout_s) == (8, 30.0)
    with pytest.raises(UserError):
        launch_of(argv, ENV)


@pytest.mark.parametrize(
    "argv",
    [
        "srun torchrun",
        "srun torchrun --nnodes x t.py",
        "srun torchrun --nonsense t.py",
        "srun torchrun --shutdown-timeout=-1 t.py",
        "srun torchrun --shutdown-timeout=soon t.py",
        "torchrun --run-path t.py",
        "torchrun --nnodes=2 t.py",
        "srun --export=NONE torchrun t.py",
        "srun --export HOME,PATH torchrun t.py",
        "srun --nodes=1 torchrun --nnodes=2 t.py",
        "srun --gpus=7 torchrun t.py",
        "srun --nodes=x torchrun t.py",
        "srun --nodes=0 torchrun t.py",
        "srun --pty torchrun t.py",
        "srun --het-group=0,1 torchrun t.py",
        "srun sh -c torchrun\\ t.py",
        "srun -N2 torchrun --standalone t.py",
        "srun -N2 python -m torch.distributed.run --nnodes=1 t.py",
    ],
)
def test_a_launch_that_cannot_be_wrapped(argv):
    with pytest.raises(UserError) as caught:
        launch_of(shlex.split(argv), ENV)
    assert caught.value.code == "HF169"


@pytest.mark.parametrize(
    "argv",
    [
        "srun hostname",
        "srun -N1 -n1 -w n1 hostname --ip-address",
        "srun train.py",
        "srun python train.py --launcher torchrun",
        "srun --ntasks=4 ./a.out torchrun",
        "srun cp torchrun.log /tmp",
        "srun echo accelerate",
        "srun",
        "srun --version",
        "srun --multi-prog tasks.conf",
        "srun bash -c nvidia-smi",
        "python -m pip install x",
    ],
)
def test_what_starts_no_training_is_left_alone(argv):
    assert launch_of(shlex.split(argv), ENV) is None


@pytest.mark.parametrize(
    ("argv", "options", "prefix", "torchrun", "apart"),
    [
        ("srun numactl -N 0 torchrun a.py", [], "numactl -N 0", "torchrun", False),
        ("srun -lu env A=1 /e/bin/torchrun a.py", [], "env A=1", "/e/bin/torchrun", False),
        ("srun uv run torchrun a.py", [], "uv run", "torchrun", True),
        (
            ("srun --comment laion --exclusive apptainer exec --nv i.sif python3 -u -m "
            "torch.distributed.run a.py"),
            ["--comment=laion", "--exclusive"],
            "apptainer exec --nv i.sif",
            "python3",
            True,
        ),
        (
            "srun --container-image i --container-entrypoint torchrun a.py",
            ["--container-image=i", "--container-entrypoint"],
            "",
            "torchrun",
            True,
        ),
        ("srun -K --auto-resume=1 -c 8 torchrun a.py", ["--auto-resume=1", "--cpus-per-task=8"],
         "", "torchrun", False),
    ],
)  # fmt: skip
def test_what_runs_a_torchrun_stays(argv, options, prefix, torchrun, apart):
    launch = launch_of(argv.split(), ENV)
    assert (list(launch.srun), launch.torchrun) == (options, torchrun)
    assert (" ".join(launch.prefix), launch.has_own_python) == (prefix, apart)
    spec = load_spec(job_of(launch, ENV))
    text = script_of(spec, plan(spec), launch, run_dir=Path("/r"), python="/p")
    if launch.inside:
        assert f'agent "$hf_run" -- \\\n    {prefix} &' in text
    elif prefix:
        assert f'\n    {prefix} "$hf_python" -P -m launcher.node agent' in text


@pytest.mark.parametrize(
    "argv",
    [
        "srun -N2 bash -c 'cd x && torchrun --node_rank $SLURM_NODEID t.py'",
        "srun -N2 numactl -N 0 /bin/bash -lc 'python -m torch.distributed.run t.py'",
        "srun -N2 bash -c '$LAUNCHER t.py'",
        "srun -N2 bash start.sh a b",
        "srun -N2 accelerate launch t.py",
        "srun -N2 uv run tune run t.py",
        "srun -N2 ./start.sh a b",
    ],
)
def test_a_shell_that_starts_a_training_on_each_node(argv):
    env = {**ENV, "LAUNCHER": "python -u -m torch.distributed.run"}
    texts = {"start.sh": "#!/usr/bin/env bash\ntorchrun", "./start.sh": "#!/bin/bash -e\ntorchrun"}
    words = shlex.split(argv)
    launch = launch_of(words, env, lambda word: texts.get(word, ""))
    assert launch.program == tuple(words[2:])
    assert (launch.nodes, launch.command) == ((2, 2), NOT_YET)
    spec = load_spec(job_of(launch, env))
    text = script_of(spec, plan(spec), launch, run_dir=Path("/r"), python="/p")
    assert (
        f'"$hf_python" -P -m launcher.node task "$hf_run" -- \\\n    {shlex.join(words[2:])} &'
        in text
    )


@pytest.mark.parametrize("with_rank", [True, False])
def test_what_torch_distributed_launch_adds_is_added(with_rank):
    flags = [] if with_rank else ["--use-env"]
    words = ["srun", "python", "-m", "torch.distributed.launch", *flags, "t.py", "x"]
    command = load_spec(job_of(launch_of(words, ENV), ENV)).command
    added = ["--local-rank=1"] if with_rank else []
    assert [*fill(command, {}, local_rank=1)] == ["t.py", *added, "x"]


@pytest.mark.parametrize(
    ("image", "program"),
    [
        ("apptainer exec --nv i.sif", "bash -lc 'python -m torch.distributed.run t.py'"),
        ("singularity run i.sif", "accelerate launch t.py"),
        ("singularity exec i.sif", "deepspeed t.py"),
    ],
)
def test_a_shell_in_an_image_that_starts_a_training_on_each_node(image, program):
    launch = launch_of(shlex.split(f"srun -N2 {image} {program}"), ENV)
    assert (shlex.join(launch.prefix), shlex.join(launch.program)) == (image, program)
    spec = load_spec(job_of(launch, ENV))
    text = script_of(spec, plan(spec), launch, run_dir=Path("/r"), python="/p")
    task = f'{image} python3 -P -m launcher.node task "$hf_run" --apart -- \\\n    {program} &'
    assert f"    {task}" in text
    assert "watchdog" in text, "there is no scontrol in an image"


@pytest.mark.parametrize(
    "argv",
    ["srun bash -c 'nvidia-smi $X'", "srun ./a.sh", "srun bash prepare.sh torch", "srun sh x"],
)
def test_other_shells_are_left_alone(argv):
    assert launch_of(shlex.split(argv), {**ENV, "X": "y"}, lambda _: "#!/bin/bash\nls") is None


def test_a_torchrun_of_its_own_is_one_node():
    launch = launch_of(["torchrun", "--standalone", "--nproc-per-node", "2", "a.py"], ENV)
    assert (launch.alone, launch.nodes, launch.workers, launch.command) == (
        *(True, (1, 1), 2),
        ("a.py",),
    )


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("-N2 --label a -N3", "a -N3"),
        ("--nodes 2 --exclusive --mem 0 -- a --b", "a --b"),
        ("-K -k0 -K1 -vv -l a", "a"),
        ("--kill-on-bad-exit=1 --het-group 0 a", "a"),
        ("--export A=1,B=2 -o out-%j a", "a"),
    ],
)
def test_where_the_program_of_an_srun_begins(words, program):
    assert " ".join(srun_of(words.split())[1]) == program


def test_the_job_of_an_srun_is_legal_and_its_script_starts_agents(tmp_path):
    times = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "8200"}
    launch = launch_of((*SRUN, "a.py", "x; y"), {**ENV, **times})
    job = job_of(launch, {**ENV, **times})
    spec = load_spec(job)
    assert (spec.name, spec.slurm.time, spec.cluster.nodes) == ("my-job", "120", 4)
    text = script_of(spec, plan(spec), launch, run_dir=tmp_path, python="/opt/my env/python")
    assert "    --cpus-per-task=8 \\\n" in text
    assert "hf_python='/opt/my env/python'\n" in text
    assert "x; y" not in text, "arguments are in job.json alone"
    assert text.endswith('exit "$hf_code"\n')


def test_braces_in_arguments_are_text_unless_they_name_something_of_ours():
    words = ("{b}", "{dp}x", '{"a": 1}', "a={lr:.2f} ${X}")
    command = load_spec(job_of(launch_of((*SRUN, "a.py", *words), ENV), ENV)).command
    assert fill(command, {"dp": 4}, local_rank=0) == ("a.py", "{b}", "4x", *words[2:])


@pytest.mark.parametrize(
    ("option", "path", "notes"),
    [
        ("", None, ()),
        ("--output=all", None, ()),
        ("-o log", "log", ()),
        ("--output=logs/%x_%j-%4j%%.log", "logs/My_Job_7-0007%.log", ()),
        ("--output=%x-%t.log", None, ("srun: --output is not used",)),
        ("--error=e", None, ("srun: --error is not used",)),
    ],
)
def test_where_an_srun_writes(option, path, notes):
    launch = launch_of(["srun", *option.split(), "torchrun", "a.py"], ENV)
    assert (launch.options.output(ENV), launch.notes) == (path, notes)


def test_the_file_of_an_srun_is_emptied_as_srun_does_but_not_after_a_requeue(tmp_path):
    file = tmp_path / "log"

    def opened(*options, is_new=True, **env):
        file.write_text("before")
        launch = launch_of(["srun", f"--output={file}", *options, "torchrun", "a.py"], ENV)
        assert output_of(launch, {**ENV, **env}, is_new=is_new) == str(file)
        return file.read_text()

    assert opened() == ""
    assert opened("--open-mode=append") == opened(SLURM_OPEN_MODE="a") == "before"
    assert opened(is_new=False) == "before"
    file.unlink()
    launch = launch_of(["srun", "-o", f"{tmp_path}/none/log", "torchrun", "a.py"], ENV)
    with pytest.raises(UserError, match="HF169"):
        output_of(launch, ENV, is_new=True)
