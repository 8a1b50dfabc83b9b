"""A batch script of one's own that runs torchrun, wrapped, on a real Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import until
from jobs import ROOT, WAIT_S, make_run, submitted_run
from test_slurm_scripts import SCRIPT

BATCH = """\
#!/bin/bash
#SBATCH --job-name=Own_Script
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --time=20
#SBATCH --output=%x-%j.out
set -euo pipefail
export TAG="of the script's own"
export PATH={bin}:$PATH
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --ntasks-per-node=1 --mem=0 torchrun --nnodes 2:3 --nproc_per_node=1 \\
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head:29500" \\
    --rdzv_conf join_timeout=30 --max-restarts 3 \\
    train.py "$PWD" 2>&1 | tee train.log
printf '%s\\n' "$TAG" >after
"""


OWN = """\
#!/bin/bash
#SBATCH --job-name=own --output=%x-%j.out --time=20
#SBATCH --nodes=2 --ntasks-per-node=1
{options}
export PATH={bin}:$PATH
trap 'echo "own trap, saved: $(ls saved.*)"' USR1
srun torchrun --nnodes=2 {flags} train.py
echo "srun ended with $?" >after
"""
SAVES = """\
import os, signal, sys, time
from pathlib import Path

def save(number, _):
    time.sleep({save_s})
    name = signal.Signals(number).name
    Path(f"saved.{{os.environ['RANK']}}").write_text(name)
    os._exit(91)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
if list(Path().glob("saved.*")):
    sys.exit(0)
Path(f"up.{{os.environ['RANK']}}").touch()
time.sleep(600)
"""


def wrapped(slurm, folder, script):
    """Wrap a script as a user would; return the wrapped one, and what was said."""
    path, made = folder / "own.sbatch", folder / "wrapped.sbatch"
    path.write_text(script)
    words = [sys.executable, "-m", "launcher.cli.main", "wrap", str(path), "-o", str(made)]
    return made, slurm.run(*words).stderr


def submitted(slurm, folder, script, name="own"):
    """Submit a wrapped script; return its job's id and its run, once that is there."""
    job = slurm.sbatch(script, f"--chdir={folder}")
    path = folder / "runs" / f"{name}-{job}"
    until("it begins", (path / "job.json").is_file, timeout_s=WAIT_S)
    return job, submitted_run(slurm, path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("asked", "sent", "got", "grace_s"),
    [
        (("#SBATCH --signal=TERM@600", "--shutdown-timeout 500"), "USR2", "SIGTERM", 500),
        (("#SBATCH --signal=USR1@600 --no-requeue", ""), "USR2", "SIGUSR1", 500),
        (("#SBATCH --no-requeue\n#SBATCH --signal=B:USR1@300", ""), "USR1", "SIGTERM", 200),
    ],
)
def test_what_the_user_has_set_of_the_end_stays(slurm, tmp_path, *, asked, sent, got, grace_s):
    (options, flags), restarts = asked, int("no-requeue" not in asked[0])
    (tmp_path / "train.py").write_text(SAVES.format(save_s=35))  # longer than the usual grace
    script = OWN.format(options=options, flags=flags, bin=Path(sys.executable).parent)
    made, _ = wrapped(slurm, tmp_path, script)
    job, run = submitted(slurm, tmp_path, made)
    run.until("workers", lambda: len(list(tmp_path.glob("up.*"))) == 2)
    assert json.loads((run.path / "job.json").read_text())["elastic"]["stop_grace_s"] == grace_s
    assert json.loads(told(slurm, "status", run))["state"] == "running"
    slurm.run("scancel", f"--signal={sent}", "--batch", job)  # as at the time limit
    ended = run.ended(job, "COMPLETED")
    assert {(tmp_path / f"saved.{rank}").read_text() for rank in (0, 1)} == {got}, run.story()
    assert ended.restarts == restarts
    assert [e["code"] for e in run.events("run.ended")] == ([91, 0] if restarts else [91])
    said = (tmp_path / f"own-{job}.out").read_text()
    assert ("own trap, saved: saved.0" in said) == (sent == "USR1"), said
    assert (tmp_path / "after").read_text() == f"srun ended with {0 if restarts else 91}\n"


def told(slurm, command, run):
    """Return what a command of the user's says of a run."""
    words = ("-m", "launcher.cli.main", command, str(run.path), "--json")
    return slurm.run(sys.executable, *words, check=False).stdout


def test_a_wrapped_job_is_restarted_looked_into_and_cancelled_with_a_save(slurm, tmp_path):
    (tmp_path / "train.py").write_text(SAVES.format(save_s=0).replace("sys.exit(0)", "pass"))
    script = OWN.format(options="", flags="", bin=Path(sys.executable).parent)
    made, _ = wrapped(slurm, tmp_path, script)
    job, run = submitted(slurm, tmp_path, made)
    for restarts, command in enumerate(("restart", "cancel --save")):
        run.until("workers", lambda: len(list(tmp_path.glob("up.*"))) == 2)
        words = ["-m", "launcher.cli.main", *command.split(), str(run.path)]
        assert json.loads(told(slurm, "status", run))["state"] == "running"
        assert len(json.loads(told(slurm, "stacks", run))["workers"]) == 2
        assert slurm.job(job).restarts == restarts
        for path in tmp_path.glob("up.*"):
            path.unlink()
        slurm.run(sys.executable, *words)
    assert json.loads(told(slurm, "status", run))["state"] in {"saved", "cancelled"}
    assert {path.read_text() for path in tmp_path.glob("saved.*")} == {"SIGTERM"}


RANKS = """\
import os
from pathlib import Path
world, procs, me = (os.environ[name] for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID"))
assert world == procs and (world == "1" or os.uname().nodename == f"n{int(me) + 1}")
Path(f"rank.{os.environ['RANK']}").write_text(f"{os.uname().nodename} {world}")
"""


@pytest.mark.parametrize(
    ("options", "srun", "ranks", "code"),
    [
        ("#SBATCH --gpus=16", "", {"n1 2", "n2 2"}, 0),
        ("", "--nodes=1 --ntasks=1 --nodelist=n2", {"n2 1"}, 0),
        ("", "--mem=5 --mem-per-cpu=10", set(), 93),
    ],
)
def test_an_srun_starts_where_it_is_asked_to_or_is_refused_once(
    slurm, tmp_path, *, options, srun, ranks, code
):
    (tmp_path / "train.py").write_text(RANKS)
    script = OWN.format(options=options, flags="", bin=Path(sys.executable).parent)
    script = script.replace("srun torchrun --nnodes=2", f"srun {srun} torchrun")
    made, _ = wrapped(slurm, tmp_path, script)
    job, run = submitted(slurm, tmp_path, made)
    assert run.ended(job, "COMPLETED").restarts == 0
    assert {path.read_text() for path in tmp_path.glob("rank.*")} == ranks, run.story()
    [ended] = run.events("run.ended")
    assert ended["code"] == code
    assert ("HF677" in ended["reason"]) == ("mutually exclusive" in ended["reason"]) == (code == 93)
    assert (tmp_path / "after").read_text() == f"srun ended with {code}\n"
    assert len(run.events("step.lost")) == (2 if code else 0)
    why = json.loads(told(slurm, "why", run))
    assert why["state"] == ("failed" if code else "done")
    assert ("HF677" in why["why"]) == bool(code)


PREFIX = """\
import sys
from pathlib import Path
Path("prefix").write_text(sys.prefix)
"""


def other_environment(folder, *, has_holdfast):
    """Make an environment of its own, with a torchrun that starts its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    torchrun = folder / "bin" / "torchrun"
    torchrun.write_text(f"#!{folder}/bin/python\n")
    torchrun.chmod(0o755)
    if has_holdfast:
        packages = next((folder / "lib").iterdir()) / "site-packages"
        own = next(path for path in sys.path if path.endswith("site-packages"))
        (packages / "all.pth").write_text(f"{own}\n{ROOT}\n")
    return folder


@pytest.mark.parametrize("has_holdfast", [True, False])
def test_the_python_that_the_script_names_runs_or_the_launch_ends_at_once(
    slurm, tmp_path, has_holdfast
):
    folder = tmp_path / "venv2"
    (tmp_path / "train.py").write_text(PREFIX)
    script = OWN.format(options="", flags="", bin=Path(sys.executable).parent)
    script = script.replace("srun torchrun", "source venv2/bin/activate\nsrun torchrun")
    made, _ = wrapped(slurm, tmp_path, script)
    other_environment(folder, has_holdfast=has_holdfast)
    job = slurm.sbatch(made, f"--chdir={tmp_path}")
    slurm.wait_state(job, "COMPLETED", timeout_s=WAIT_S)
    said = (tmp_path / f"own-{job}.out").read_text()
    assert (tmp_path / "after").read_text() == f"srun ended with {0 if has_holdfast else 93}\n"
    assert ("HF678" in said) == (not has_holdfast), said
    if has_holdfast:
        assert (tmp_path / "prefix").read_text() == str(folder)
        logs = (tmp_path / "runs" / f"own-{job}" / "logs").rglob("n?.log")
        assert any(f"{folder}/bin/python (torch " in log.read_text() for log in logs)


@pytest.mark.parametrize("has_holdfast", [True, False])
def test_the_python_of_an_environment_that_the_set_up_activates_runs(slurm, tmp_path, has_holdfast):
    folder = other_environment(tmp_path / "venv2", has_holdfast=has_holdfast)
    (tmp_path / "train.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{PREFIX}")
    text = (
        "name: set-up\ncommand: train.py\ncluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}\n"
        f"slurm: {{time: 10, setup: ['export CONDA_PREFIX={folder}']}}\n"
    )
    run = make_run(slurm, tmp_path, steps=0, text=text)
    job = run.submit(env={"PYTHONPATH": ""})
    found = run.ended(job, "COMPLETED" if has_holdfast else "FAILED")
    said = next((run.path / "logs").glob("slurm-*.out")).read_text()
    assert (found.exit_code == 93) == ("HF678" in said) == (not has_holdfast), said
    if has_holdfast:
        assert (tmp_path / "prefix").read_text() == str(folder)


LIFE = """\
#!/bin/bash
#SBATCH --job-name=own --output=%x-%j.out --time=20
#SBATCH --nodes=2 --ntasks-per-node=1
set -uo pipefail
export PATH={bin}:$PATH
trap 'echo exits >>life' EXIT
{successor}
hosts=$(srun --ntasks=2 hostname | sort | tr '\\n' ' ')
echo "on $hosts" >>life
LAUNCH="srun nice -n 1 torchrun --nnodes=2"
for turn in 1 2; do
  $LAUNCH turns.py $turn 2>&1 | tee "log.$turn"
  echo "turn $turn: ${{PIPESTATUS[0]}}" >>life
done
torchrun --standalone turns.py alone >log.alone
cp log.2 copied && echo copied >>life
"""
TURNS = """\
import os, signal, sys, time
from pathlib import Path
turn, rank = sys.argv[1], os.environ["RANK"]
print(f"turn {{turn}}, rank {{rank}} of {{os.environ['WORLD_SIZE']}}", flush=True)
if turn == "2" and not Path(f"saved.{{rank}}").exists():
    def save(*_):
        Path(f"saved.{{rank}}").touch()
        os._exit(91)
    signal.signal(signal.SIGTERM, save)
    Path(f"up.{{rank}}").touch()
    time.sleep(600)
"""


def living(slurm, folder, successor=""):
    """Submit a script of two trainings and more; ask it to end once the second runs."""
    (folder / "turns.py").write_text(TURNS.format())
    script = LIFE.format(bin=Path(sys.executable).parent, successor=successor)
    made, _ = wrapped(slurm, folder, script)
    job, first = submitted(slurm, folder, made)
    first.until("the second", lambda: len(list(folder.glob("up.*"))) == 2)
    slurm.run("scancel", "--signal=USR2", "--batch", job)
    return job, first


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_script_of_several_trainings_lives_on_around_its_requeue(slurm, tmp_path):
    """Pipes are full, last lines and the EXIT trap run, and what has ended is not trained again."""
    job, first = living(slurm, tmp_path)
    assert first.ended(job, "COMPLETED").restarts == 1, first.story()
    one = ["on n1 n2 ", "turn 1: 0", "turn 2: 91", "copied", "exits"]
    two = ["on n1 n2 ", "turn 1: 0", "turn 2: 0", "copied", "exits"]
    assert (tmp_path / "life").read_text().splitlines() == [*one, *two], first.story()
    shown = (tmp_path / "log.2").read_text().splitlines()
    assert sorted(line for line in shown if line.startswith("turn")) == [
        "turn 2, rank 0 of 2",
        "turn 2, rank 1 of 2",
    ]
    assert "turn alone, rank 0 of 1" in (tmp_path / "log.alone").read_text()
    ends = {path.name: [e["code"] for e in submitted_run(slurm, path).events("run.ended")]
            for path in sorted((tmp_path / "runs").iterdir())}  # fmt: skip
    assert ends == {f"own-{job}": [0], f"own-{job}-2": [91, 0], f"own-{job}-3": [91, 0]}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_script_that_submits_its_own_successor_has_one_restart(slurm, tmp_path):
    again = "sbatch --dependency=afterany:$SLURM_JOB_ID --parsable wrapped.sbatch >next"
    once = f"[[ -e next ]] || {again}"
    job, first = living(slurm, tmp_path, once)
    assert first.ended(job, "COMPLETED").restarts == 0, first.story()
    assert "restarts its job itself" in (tmp_path / f"own-{job}.out").read_text()
    successor = (tmp_path / "next").read_text().strip()
    slurm.wait_state(successor, "COMPLETED", timeout_s=WAIT_S)
    assert "rank 0 of 2" in (tmp_path / "log.2").read_text()


IN_SHELL = """\
#!/bin/bash
#SBATCH --job-name=own --output=%x-%j.out --time=20
#SBATCH --nodes=3 --ntasks-per-node=1
export LAUNCHER="python -u -m torch.distributed.run --nnodes 2:3 --rdzv_conf join_timeout=30"
export TRAIN="train.py $PWD"
srun bash -c '
  export PATH={bin}:$PATH
  echo "$SLURM_NODEID of $SLURM_NNODES" >node.$SLURM_PROCID
  $LAUNCHER --node_rank $SLURM_PROCID $TRAIN
  echo "node $SLURM_PROCID ends with $?" >>ends
'
echo "srun ended with $?" >after
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_shell_on_each_node_that_starts_a_training_survives_a_lost_node(slurm, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "how").write_text("143")
    made, _ = wrapped(slurm, tmp_path, IN_SHELL.format(bin=Path(sys.executable).parent))
    job, run = submitted(slurm, tmp_path, made)
    run.until("first steps", lambda: len(run.events("script.progress")) > 2)
    assert len(run.events("epoch.formed")[-1]["members"]) == 3
    nodes = {path.name: path.read_text() for path in tmp_path.glob("node.*")}
    assert nodes == {f"node.{n}": f"{n} of 3\n" for n in range(3)}
    lost = next(node for node in slurm.names if node != slurm.job(job).batch_host)
    slurm.power_off(lost)
    run.until("without it", lambda: len(run.events("epoch.formed")[-1]["members"]) == 2)
    total = max(event["step"] for event in run.events("script.progress")) + 20
    (tmp_path / "total").write_text(str(total))
    assert run.ended(job, "COMPLETED").restarts == 0, run.story()
    assert (tmp_path / "after").read_text() == "srun ended with 0\n"
    assert all(
        line.endswith("ends with 0") for line in (tmp_path / "ends").read_text().splitlines()
    )


WAYS = """\
#!/bin/bash
#SBATCH --job-name=own --output=%x-%j.out --time=20
#SBATCH --nodes={nodes} --ntasks-per-node=1 --cpus-per-task=2
export PATH=$PWD/bin:{bin}:$PATH PYTHONPATH=$PWD
{launch}
echo "ended with $?" >after
"""
IMAGE = """\
#!/bin/bash
# Stands for an image of its own: there is no scontrol, and python3 is another one.
[[ $1 == exec && $2 == --nv && $3 == i.sif ]] || exit 9
export IN_IMAGE=1
mkdir -p "$PWD/image"
for name in python python3; do
  printf '#!/bin/sh\\nexec {python} "$@"\\n' >"$PWD/image/$name" && chmod +x "$PWD/image/$name"
done
ln -sf {bin}/accelerate "$PWD/image/"
PATH=$PWD/image:/usr/bin:/bin exec "${{@:4}}"
"""
WAY = """\
import os, sys, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
rank, first = dist.get_rank(), Path("lost")
if rank == 0 and not first.exists():
    first.touch()
    os.kill(os.getpid(), 9)
dist.barrier()
found = [dist.get_world_size(), *sys.argv[1:], "IN_IMAGE" in os.environ]
Path(f"ended.{rank}").write_text(" ".join(map(str, found)))
"""


IN_IMAGE = "srun singularity exec --nv i.sif"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("nodes", "launch"),
    [
        (2, f"{IN_IMAGE} bash -c 'python -m torch.distributed.run --nnodes=2 way.py a'"),
        (1, f"{IN_IMAGE} accelerate launch --multi_gpu --num_processes 2 way.py a"),
        (1, "accelerate launch --multi_gpu --num_processes 2 way.py a"),
    ],
)
def test_each_way_to_launch_outlives_a_lost_worker(slurm, tmp_path, nodes, launch):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "singularity").write_text(
        IMAGE.format(python=sys.executable, bin=Path(sys.executable).parent)
    )
    (programs / "singularity").chmod(0o755)
    (tmp_path / "way.py").write_text(WAY)
    text = WAYS.format(nodes=nodes, launch=launch, bin=Path(sys.executable).parent)
    made, _ = wrapped(slurm, tmp_path, text)
    job, run = submitted(slurm, tmp_path, made)
    assert run.ended(job, "COMPLETED").restarts == 0, run.story()
    assert (tmp_path / "after").read_text() == "ended with 0\n", run.story()
    found = {(tmp_path / f"ended.{rank}").read_text() for rank in range(2)}
    assert found == {f"2 a {launch.startswith(IN_IMAGE)}"}
    assert len(run.events("epoch.formed")) == 2


TASKS = """\
#!/bin/bash
#SBATCH --job-name=own --output=%x-%j.out --time=20
#SBATCH --nodelist=n1,n2 --ntasks-per-node=2 --cpus-per-task=2
export PATH={bin}:$PATH OMP_NUM_THREADS=1
export MASTER_ADDR={address} MASTER_PORT=29511 WORLD_SIZE=$SLURM_NTASKS
srun --output=%x-%j.log bash -c "RANK=\\$SLURM_PROCID python tasks.py"
echo "srun ended with $?" >after
"""
TASK = """\
import json, os, time
from pathlib import Path
import torch
import torch.distributed as dist
rank, steps = int(os.environ["RANK"]), Path("steps")
Path(f"env.{rank}").write_text(json.dumps(dict(os.environ)))
dist.init_process_group("gloo")
step = int(steps.read_text()) if steps.exists() else 0
dist.barrier()
while step < int(Path("total").read_text()):
    dist.all_reduce(torch.ones(1))
    step += 1
    if rank == 0:
        print("step", step, flush=True)
        Path("steps.new").write_text(str(step))
        os.replace("steps.new", steps)
    time.sleep(0.1)
"""
OF_THE_STEP = re.compile(
    r"SLURM_(JOB_ID|JOBID|STEP_?ID|TASK_PID|SRUN_COMM_\w+|STEP_LAUNCHER_PORT|LAUNCH_NODE_IPADDR"
    r"|JOB_(START|END)_TIME|CPU_BIND\w*|STEP_NODELIST|JOB_NODELIST|NODELIST|SUBMIT_\w+)|_|SHLVL|PWD"
)
"""Variables that two jobs or two ways of a start never share."""


def variables(folder):
    """Return what each task has found, but for what every step has of its own."""
    found = [json.loads((folder / f"env.{rank}").read_text()) for rank in range(4)]
    ours = re.compile(r"HOLDFAST_\w+|TORCH_FR_BUFFER_SIZE")
    return [
        {k: v for k, v in each.items() if not (OF_THE_STEP.fullmatch(k) or ours.fullmatch(k))}
        for each in found
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_task_for_each_worker_has_what_srun_gives_it_and_outlives_a_lost_node(slurm, tmp_path):
    own, ours = tmp_path / "own", tmp_path / "ours"
    text = TASKS.format(bin=Path(sys.executable).parent, address=slurm.address("n1"))
    for folder in (own, ours):
        folder.mkdir()
        (folder / "tasks.py").write_text(TASK)
    (own / "total").write_text("3")
    (own / "own.sbatch").write_text(text)
    job = slurm.sbatch(own / "own.sbatch", f"--chdir={own}")
    slurm.wait_state(job, "COMPLETED", timeout_s=WAIT_S)

    (ours / "total").write_text("100000")
    made, _ = wrapped(slurm, ours, text)
    job, run = submitted(slurm, ours, made)
    steps = ours / "steps"
    run.until("steps", lambda: steps.exists() and int(steps.read_text()) > 10)
    assert variables(ours) == variables(own)
    slurm.power_off("n2")
    run.until("a loss", lambda: run.events("member.lost"))
    slurm.power_on("n2")
    seen = int(steps.read_text())
    run.until("more steps", lambda: int(steps.read_text()) > seen + 10)
    (ours / "total").write_text("1")
    assert run.ended(job, "COMPLETED").restarts == 0, run.story()
    assert (ours / "after").read_text() == (own / "after").read_text() == "srun ended with 0\n"
    said = (ours / f"own-{job}.log").read_text()
    assert f"step {seen}\n" in said
    assert "step 1\n" not in (ours / f"own-{job}.out").read_text()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_wrapped_script_survives_a_lost_node_and_its_time_limit(slurm, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "how").write_text("143")
    made, _ = wrapped(slurm, tmp_path, BATCH.format(bin=Path(sys.executable).parent))
    job, run = submitted(slurm, tmp_path, made, "own-script")

    run.until("first steps", lambda: len(run.events("script.progress")) > 2)
    members = run.events("epoch.formed")[-1]["members"]
    assert len(members) == 3
    lost = next(node for node in members if node != slurm.job(job).batch_host)
    slurm.power_off(lost)
    run.until("without it", lambda: len(run.events("epoch.formed")[-1]["members"]) == 2)
    seen = len(run.events("script.progress"))
    run.until("more steps", lambda: len(run.events("script.progress")) > seen + 2)
    assert slurm.job(job).restarts == 0

    slurm.run("scancel", "--signal=USR2", "--batch", job)  # as at the time limit
    run.until("requeued", lambda: len(run.events("run.started")) == 2)
    total = max(event["step"] for event in run.events("script.progress")) + 20
    (tmp_path / "total").write_text(str(total))
    assert run.ended(job, "COMPLETED").restarts == 1, run.story()
    assert [event["code"] for event in run.events("run.ended")] == [91, 0]
    assert (tmp_path / "after").read_text() == "of the script's own\n"
