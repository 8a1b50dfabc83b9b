"""`holdfast wrap`: what it changes in a batch script, and what it makes of an srun of torchrun."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.main import run_cli
from launcher.errors import UserError
from launcher.jobspec.reading import load_spec
from launcher.planning.search import plan
from launcher.render.wrapped import job_of, launch_of, script_of, wrap_script

BATCH = """\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --signal=B:USR1@60
#SBATCH --no-requeue
module load cuda
srun --cpus-per-task=8 torchrun \\
  --nnodes "$SLURM_NNODES" train.py --name 'a; b | c' "$(date)" 2>&1 | tee log  # all of it
echo done
"""
WRAPPED = """\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@180
module load cuda
hf_batch=$(holdfast batch -- srun --cpus-per-task=8 torchrun \\
  --nnodes "$SLURM_NNODES" train.py --name 'a; b | c' "$(date)"
) || exit
source "$hf_batch"
echo done
"""
ENV = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "My_Job", "SLURM_JOB_NUM_NODES": "4"}
SRUN = ("srun", "--cpus-per-task=8", "torchrun", "--nnodes=4", "--nproc-per-node=8")


def test_a_script_changes_in_its_options_and_its_srun():
    assert wrap_script(BATCH) == WRAPPED


@pytest.mark.parametrize(
    "command",
    [
        "srun torchrun train.py",
        "  srun -N 2 /opt/venv/bin/torchrun train.py > log 2>&1",
        "srun python -m torch.distributed.run train.py &> log",
        "srun python3 -u -m torch.distributed.launch train.py",
    ],
)
def test_an_srun_is_found(command):
    first, second, third = wrap_script(f"#!/bin/bash\n{command}").splitlines()[5:]
    assert first.lstrip() == f"hf_batch=$(holdfast batch -- {command.partition('>')[0].strip(' &')}"
    assert (second.strip(), third.strip()) == (") || exit", 'source "$hf_batch"')


@pytest.mark.parametrize(
    "lines",
    [
        "python train.py",
        "# srun torchrun train.py",
        "torchrun train.py",
        "srun torchrun a.py\nsrun torchrun b.py",
        "srun torchrun a.py &\nwait",
        "srun torchrun a.py && echo done",
        "srun torchrun a.py; echo done",
        "srun torchrun a.py || exit 3",
        WRAPPED,
    ],
)
def test_a_script_that_cannot_be_wrapped(lines):
    with pytest.raises(UserError) as caught:
        wrap_script(f"#!/bin/bash\n{lines}\n")
    assert caught.value.code == "HF169"


_GONE = "#SBATCH --no-requeue"
_lines = st.lists(
    st.text(st.characters(exclude_characters="\\\n\r"), max_size=20)
    | st.sampled_from([_GONE, "#SBATCH --nodes=2", "srun hostname", "# x"])
)


@given(_lines, _lines)
def test_all_other_lines_stay_as_they_are(before, after):
    first = "#!/bin/bash"
    wrapped = wrap_script("\n".join([first, *before, "srun torchrun t.py", *after])).split("\n")
    at = max(i for i, line in enumerate(wrapped) if line == "#SBATCH --signal=B:USR2@180")
    own = [*wrapped[: at - 3], *wrapped[at + 1 :]]
    srun = own.index("hf_batch=$(holdfast batch -- srun torchrun t.py")
    kept = [line for line in before if line != _GONE]
    assert own[:srun] == [first, *kept]
    assert own[srun + 3 :] == after


@pytest.mark.parametrize(
    ("argv", "srun", "nodes", "workers", "command"),
    [
        ((*SRUN, "a.py", "--lr", "1"), ["--cpus-per-task=8"], (4, 4), 8, ["a.py", "--lr", "1"]),
        (("srun", "-N", "2", "-n2", "--label", "torchrun", "a.py"), [], (4, 4), 1, ["a.py"]),
        (
            ("srun", "--mem", "0", "-K", "-o", "x", "torchrun", "--nnodes=2:4", "-m", "pkg.train"),
            ["--mem", "0"],
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
        "srun train.py",
        "torchrun train.py",
        "srun torchrun",
        "srun torchrun --nnodes x t.py",
        "srun torchrun --nonsense t.py",
        "srun torchrun --standalone t.py",
        "srun apptainer exec image torchrun t.py",
        "srun --export=ALL env A=1 torchrun t.py",
    ],
)
def test_an_srun_that_cannot_be_taken_apart(argv):
    with pytest.raises(UserError) as caught:
        launch_of(argv.split(), ENV)
    assert caught.value.code == "HF169"


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
    assert text.endswith('return "$hf_code"\n')


def test_the_command_shows_the_change_and_writes_it(tmp_path, capsys):
    script, out = tmp_path / "a.sbatch", tmp_path / "b.sbatch"
    script.write_text(BATCH)
    assert run_cli(["wrap", str(script)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {"-#SBATCH --no-requeue", "+#SBATCH --requeue", '+source "$hf_batch"'} <= {*shown}
    assert run_cli(["wrap", str(script), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["script"] == out.read_text() == WRAPPED
    assert script.read_text() == BATCH
    assert run_cli(["wrap", str(tmp_path / "none")]) == 2
    assert "HF001" in capsys.readouterr().err


def test_a_run_is_made_once_for_all_starts_of_a_job(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        assert run_cli(["batch", "--", *SRUN, "a.py"]) == 0
        assert capsys.readouterr().out == f"{tmp_path}/runs/my-job-7/agents.sh\n"
    config = json.loads((tmp_path / "runs/my-job-7/job.json").read_text())
    assert (config["command"], config["gpus_per_node"]) == (["a.py"], 8)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert run_cli(["batch", "--", *SRUN, "a.py"]) == 2
    assert "HF673" in capsys.readouterr().err
