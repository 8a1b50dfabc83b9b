"""An srun whose tasks are the processes of a training."""

from __future__ import annotations

import json

import pytest

from launcher.node.as_task import as_task, cpus_of, of_job
from launcher.spec.errors import UserError
from launcher.wrap.launches import job_of, launch_of
from launcher.wrap.tasks import tasks_of

ENV = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_GPUS_ON_NODE": "4",
    "MASTER_ADDR": "n1",
}
FILES = {
    "train.py": "import torch.distributed as dist",
    "prepare.py": "import pandas",
    "pkg/train.py": "from lightning import Trainer",
    "start.sh": "#!/bin/bash\nexport RANK=$SLURM_PROCID\npython -u prepare.py",
}
SHELL = ("bash", "-c", "RANK=$SLURM_PROCID python prepare.py")


def tasks(*words, env=ENV):
    argv = ["srun", *words]
    read = lambda word: FILES.get(word, "")  # noqa: E731
    assert launch_of(argv, env, read) is None
    return tasks_of(argv, env, read, "/py")


@pytest.mark.parametrize(
    "program",
    [
        ("python", "train.py"),
        ("/env/bin/python3.11", "-u", "train.py"),
        ("uv", "run", "python", "train.py"),
        ("numactl", "-N", "0", "python", "train.py"),
        ("python", "-m", "pkg.train"),
        SHELL,
        ("sh", "-c", "$CMD"),
        ("singularity", "run", "i.sif", *SHELL),
        ("bash", "start.sh"),
        ("./start.sh",),
        ("./train",),
        ("python3", "-X", "faulthandler", "-u", "train.py"),
    ],
)
def test_what_shows_that_tasks_are_one_training(program):
    env = {k: v for k, v in ENV.items() if k != "MASTER_ADDR"} | {"CMD": "python -u train.py"}
    files = FILES | {"./start.sh": FILES["start.sh"]}
    files["./train"] = "#!/usr/bin/env python3\n" + FILES["train.py"]
    launch = tasks_of(["srun", *program], env, lambda word: files.get(word, ""), "/py")
    assert (launch.nodes, launch.workers, launch.of_tasks) == ((2, 2), 4, True)
    assert launch.command[:5] == ("--no-python", "/py", "-P", "-m", "launcher.node.as_task")
    assert launch.command[5:] == ("--", *program)
    assert job_of(launch, env)["cluster"] == {"nodes": 2, "gpus_per_node": 4, "gpu": "gpu"}


@pytest.mark.parametrize(
    "words",
    [
        ("hostname",),
        ("./all_reduce_perf", "-b", "8"),
        ("-n1", "python", "train.py"),
        ("-N1", "--ntasks-per-node=1", "python", "train.py"),
        ("cp", "python", "x"),
        ("python", "-c", "import torch; print(torch.__version__)"),
        ("bash", "-c", "python --version; ls train.py"),
    ],
)
def test_what_is_no_training_runs_as_it_is(words):
    assert tasks(*words) is None


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (("python", "prepare.py"), {"MASTER_ADDR": ""}),
        (("-n7", "python", "train.py"), {}),
        (("-m", "cyclic", "python", "train.py"), {}),
        (("python", "train.py"), {"SLURM_DISTRIBUTION": "cyclic"}),
        (("--gpu-bind=closest", "python", "train.py"), {}),
        (("--export=A=1", "python", "train.py"), {}),
    ],
)
def test_tasks_that_agents_cannot_start_are_refused(words, env):
    with pytest.raises(UserError, match="HF169"):
        tasks(*words, env=ENV | env)


@pytest.mark.parametrize(
    ("words", "env", "srun", "own"),
    [
        ((), {}, (), []),
        (("-c7",), {}, ("--cpus-per-task=28",), []),
        (("-c", "7"), {}, ("--cpus-per-task=28",), []),
        ((), {"SLURM_CPUS_PER_TASK": "7"}, ("--cpus-per-task=28",), []),
        (
            ("--gpus-per-task=a100:1", "--mem=0"),
            {},
            ("--mem=0", "--gpus-per-task=a100:4"),
            ["--gpus=1"],
        ),
        ((), {"SLURM_GPUS_PER_TASK": "1"}, ("--gpus-per-task=4",), ["--gpus=1"]),
        (
            ("--cpu-bind=v,mask_cpu=0xf,0xf0", "--gpu-bind=none"),
            {},
            (),
            ["--cpus=v,mask_cpu=0xf,0xf0"],
        ),
        (("--cpu_bind=v", "--accel-bind=gn"), {}, (), []),
    ],
)
def test_what_tasks_ask_for_is_asked_for_by_their_node(words, env, srun, own):
    launch = tasks(*words, "python", "train.py", env=ENV | env)
    assert launch.srun == srun
    assert list(launch.command[5:-2]) == [*own, "--"]


def test_in_an_image_the_python_of_the_image_starts_them():
    launch = tasks("--container-image=i", "python", "/opt/train.py")
    assert launch.command[:2] == ("--no-python", "python3")
    assert launch.srun == ("--container-image=i",)


def test_a_task_for_each_torchrun_keeps_what_it_asks_for():
    argv = ["srun", "-c", "8", "--gpus-per-task=8", "torchrun", "a.py"]
    assert launch_of(argv, ENV).srun == ("--gpus-per-task=8", "--cpus-per-task=8")


WORKER = """\
RANK=1 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=2 ROLE_RANK=1
MASTER_ADDR=10.0.0.1 MASTER_PORT=4711 TORCHELASTIC_RUN_ID=x OMP_NUM_THREADS=1 PATH=/bin
SLURM_NODEID=1 SLURM_NNODES=2 SLURM_PROCID=1 SLURM_NTASKS=2 CUDA_VISIBLE_DEVICES=4,5,6,7"""
TASK = """\
MASTER_ADDR=n1 WORLD_SIZE=4 PATH=/bin CUDA_VISIBLE_DEVICES=4,5,6,7
SLURM_NODEID=1 SLURM_NNODES=2 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_GTIDS=2,3
SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS_PER_NODE=2
SLURM_DISTRIBUTION=block SLURM_TASKS_PER_NODE=2(x2) SLURM_STEP_TASKS_PER_NODE=2(x2)"""


def variables(text):
    return dict(word.split("=") for word in text.split())


def test_a_worker_has_what_sruns_own_task_has():
    job = variables("MASTER_ADDR=n1 WORLD_SIZE=4 PATH=/bin")
    env = as_task(variables(WORKER) | of_job(job))
    assert env.pop("SLURM_TASK_PID")
    assert env == variables(TASK)
    assert json.loads(of_job(job)["HOLDFAST_OWN"]) == {"MASTER_ADDR": "n1", "WORLD_SIZE": "4"}


def test_a_worker_sees_its_own_gpus():
    assert as_task(variables(WORKER) | of_job({}), 2)["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_a_worker_runs_on_its_own_cpus():
    assert cpus_of("mask_cpu:0xf,0xf0", 1) == {4, 5, 6, 7}
    assert cpus_of("v,mask_cpu=fe,fe00", 2) == {1, 2, 3, 4, 5, 6, 7}
    assert cpus_of("map_cpu:0,0x8", 1) == {8}
