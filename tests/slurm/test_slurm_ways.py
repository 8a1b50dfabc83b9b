"""The ways in which public batch scripts launch a training: each outlives a lost node or worker.

Written anew after the launch lines of scripts of CSC, LUMI, NVIDIA, AWS, BigScience, PyTorch,
Hugging Face, Princeton, Mila and others. Programs that are not at hand have stand-ins.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster import until
from jobs import WAIT_S, submitted_run
from test_slurm_wrapped import wrapped

BIN = Path(sys.executable).parent
TRAIN = """\
import os, time
from pathlib import Path

names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
for name, other in names.items():
    if other in os.environ:
        os.environ.setdefault(name, os.environ[other])
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, more = dist.get_rank(), torch.ones(1)
Path(f"started.{rank}.{time.time_ns()}").touch()
while more.item():
    more = torch.tensor([0.0 if Path("enough").exists() else 1.0])
    dist.all_reduce(more, op=dist.ReduceOp.MIN)
    time.sleep(0.1)
    if rank and Path("kill").exists() and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), 9)
Path(f"ended.{rank}").write_text(str(dist.get_world_size()))
"""
SKIP_OPTIONS = 'while [[ $1 == -* ]]; do shift; done; exec "$@"\n'
PROGRAMS = {
    # pyxis: the options are taken, the image is the node itself.
    "srun": """\
args=()
while (($#)); do
  case $1 in
    --container-*=* | --*container-mount-home | --container-entrypoint | --auto-resume=*) ;;
    --container-image | --container-mounts) shift ;;
    *) args+=("$1") ;;
  esac
  shift
done
exec /usr/bin/srun "${args[@]}"
""",
    "singularity": f"shift; {SKIP_OPTIONS.replace('exec', 'shift; exec')}",
    "numactl": SKIP_OPTIONS,
    "nsys": 'while [[ $1 != python3 ]]; do shift; done; exec "$@"\n',
    "accelerate.sh": "accelerate launch --machine_rank=$SLURM_NODEID $*\n",
    "trl": "sleep 5\n",
    # As torchtune/_cli/run.py and axolotl/cli do: in the same process, and as a child.
    "tune": f"""\
exec {sys.executable} - "$@" <<'END'
import sys
from torch.distributed.run import get_args_parser, run
run(get_args_parser().parse_args([*sys.argv[2:-1], "train.py"]))
END
""",
    "axolotl": '[[ $1 == train ]] || exit 0; shift 5; torchrun "$@" train.py\n',
}
HEAD = """\
#!/bin/bash
#SBATCH --job-name=own --output=%x-%j.out --time=20
#SBATCH {options}
export PATH=$PWD/bin:{bin}:$PATH PYTHONPATH=$PWD MASTER_PORT=29533
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
MASTER_ADDR=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address | cut -d' ' -f1)
export MASTER_ADDR
"""
TWO = "--nodes=2 --ntasks-per-node=1"
RDZV = "--rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:6000"
ARRAYS = f"""\
set -exuo pipefail
ARGS=(--container-image i.sqsh --container-mounts "/a:/b" --container-mount-home)
TORCHRUN_ARGS=(--nproc_per_node=1 --nnodes=$SLURM_JOB_NUM_NODES {RDZV})
srun "${{ARGS[@]}}" --auto-resume=1 -l """
LAUNCHER = """\
export LAUNCHER="python -u -m torch.distributed.{} --nproc_per_node 1 --nnodes 2 {}"
export CMD="train.py --lr 1"
srun --jobid $SLURM_JOBID bash -c """
ACCELERATE = (
    "--multi_gpu --num_processes 2 --num_machines 2 --main_process_ip $MASTER_ADDR "
    "--main_process_port 6000 --mixed_precision no --dynamo_backend no"
)
WAYS = {
    "standalone": ("--nodes=1", "srun torchrun --standalone --nproc_per_node=2 train.py"),
    "pyxis": (TWO, ARRAYS + 'torchrun "${TORCHRUN_ARGS[@]}" train.py'),
    "module": (TWO, ARRAYS + 'python -m torch.distributed.run "${TORCHRUN_ARGS[@]}" train.py'),
    "by path": (TWO, f"srun {BIN}/python3 -m torch.distributed.run --nnodes=2 {RDZV} train.py"),
    "launch, in a string": (
        TWO,
        LAUNCHER.format("launch", "--master_addr $MASTER_ADDR --master_port 6000")
        + "'true; $LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee log",
    ),
    "run, in a string": (
        TWO,
        LAUNCHER.format("run", f"{RDZV} --max_restarts 0 --role a: --tee 3")
        + '"$LAUNCHER --node_rank \\$SLURM_PROCID --role \\$SLURMD_NODENAME: $CMD" | tee -a log',
    ),
    "in the background, with a trap": (
        f"{TWO} --signal=B:USR1@300",
        (
            "trap 'echo USR1' USR1\nsrun --container-image=i --export=ALL bash -c "
            '"torchrun --nproc_per_node=\\${GPUS:-1} --nnodes=2 train.py" &\n'
            "pid=$!; wait $pid; trap '' USR1; wait $pid"
        ),
    ),
    "a server beside": (
        "--nodes=3 --ntasks-per-node=1",
        (
            "srun --nodes=2 --ntasks=2 --nodelist=n1,n2 bash -c "
            f'"accelerate launch {ACCELERATE} --machine_rank \\$SLURM_NODEID train.py" &\n'
            "srun --nodes=1 --ntasks=1 --nodelist=n3 bash -c 'trl vllm-serve' &\nwait"
        ),
    ),
    "numactl": (
        f"{TWO} --cpus-per-task=2",
        (
            "srun -lu --cpus-per-task $SLURM_CPUS_PER_TASK --wait 60 bash -c "
            f'"numactl --membind=0-3 torchrun --nnodes 2 {RDZV} --tee 3 train.py"'
        ),
    ),
    "an image": (
        "--nodes=2 --tasks-per-node=1",
        (
            "srun singularity run i.sif bash -c 'python -m torch.distributed.run "
            f"--nnodes=$SLURM_JOB_NUM_NODES --node_rank $SLURM_PROCID {RDZV} train.py'"
        ),
    ),
    "tasks in an image": (
        TWO,
        (
            "srun --cpu-bind=v,mask_cpu=0x1 singularity run i.sif bash -c "
            '"export RANK=\\$SLURM_PROCID && python train.py"'
        ),
    ),
    "tasks, profiled": (
        TWO,
        "srun --container-image i bash -c 'cd $PWD; nsys profile -o a python3 train.py'",
    ),
    "tasks": (TWO, "srun --comment laion python3 train.py --num-nodes 2"),
    "accelerate": (
        TWO,
        (
            f'CMD="accelerate launch {ACCELERATE} --machine_rank $SLURM_PROCID train.py\n  --a b"\n'
            "srun $CMD"
        ),
    ),
    "accelerate in a script": (TWO, f"srun accelerate.sh {ACCELERATE} train.py"),
    "torchtune": (TWO, f"srun tune run --nnodes 2 --nproc_per_node 1 {RDZV} full"),
    "axolotl": (
        TWO,
        (
            "srun axolotl preprocess a.yaml\n"
            f"srun axolotl train a.yaml --launcher torchrun -- --nnodes=2 {RDZV}"
        ),
    ),
    "torchrun alone": (
        "--nodes=1",
        "torchrun --nnodes=${SLURM_NNODES} --nproc-per-node=2 train.py",
    ),
    "accelerate alone": ("--nodes=1", "accelerate launch --multi_gpu --num_processes 2 train.py"),
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", WAYS)
def test_a_launch_outlives_a_lost_node(slurm, tmp_path, way):
    options, launch = WAYS[way]
    (tmp_path / "train.py").write_text(TRAIN)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}")
        (programs / name).chmod(0o755)
    script = f'{HEAD.format(options=options, bin=BIN)}{launch}\necho "ended with $?" >after\n'
    made, _ = wrapped(slurm, tmp_path, script)
    job = slurm.sbatch(made, f"--chdir={tmp_path}")

    def started(times: int) -> bool:
        ranks = [path.name.split(".")[1] for path in tmp_path.glob("started.*")]
        return min(ranks.count("0"), ranks.count("1")) >= times

    until("the workers", lambda: started(1), timeout_s=WAIT_S)
    if options == "--nodes=1":
        (tmp_path / "kill").touch()
    else:
        path = max((tmp_path / "runs").iterdir())  # what prepares data may have one
        run = submitted_run(slurm, path)
        lost = next(node for node in ("n1", "n2") if node != slurm.job(job).batch_host)
        slurm.power_off(lost)
        run.until("a loss", lambda: run.events("member.lost"))
        slurm.power_on(lost)
    until("the workers again", lambda: started(2), timeout_s=WAIT_S)
    (tmp_path / "enough").touch()
    slurm.wait_state(job, "COMPLETED", timeout_s=WAIT_S)
    assert slurm.job(job).restarts == 0
    assert {path.read_text() for path in tmp_path.glob("ended.*")} == {"2"}
    assert (tmp_path / "after").read_text() == "ended with 0\n"
