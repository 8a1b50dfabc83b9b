"""`python -m launcher.node.as_task [--gpus K] [--cpus FORM:LIST] -- PROGRAM`: a worker as a task.

A program that srun, or a PyTorchJob, starts once for each process of a training finds what that
would have given it. Nothing that an agent has set for torchrun's workers is left: with it,
libraries would take the job for torchrun's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Final

OWN: Final = "HOLDFAST_OWN"
"""Variable with what tasks have of OF_AGENTS, in JSON."""
OF_AGENTS: Final = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING|OMP_NUM_THREADS"
    r"|(GLOO|NCCL)_SOCKET_IFNAME|PYTORCH_NVML_BASED_CUDA_CHECK|SLURM_[CG]PUS_PER_TASK"
)
_OF_RANKS: Final = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
)
"""What the operator of PyTorchJobs sets, which agents know better, and by which torch finds their
store there (torch/distributed/rendezvous.py). Libraries tell torchrun by TORCHELASTIC_RUN_ID."""
_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def of_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return a variable that keeps what tasks would have of OF_AGENTS. Pure."""
    return {OWN: json.dumps({k: v for k, v in env.items() if OF_AGENTS.fullmatch(k)})}


def as_task(env: Mapping[str, str], gpus: int = 0) -> dict[str, str]:
    """Return the environment of srun's task in a worker's place. Pure.

    `gpus` is how many of its node's GPUs it sees; 0: all.
    """
    each, local = int(env["LOCAL_WORLD_SIZE"]), int(env["LOCAL_RANK"])
    node, nodes = int(env["SLURM_NODEID"]), int(env["SLURM_NNODES"])
    first, total = node * each, str(nodes * each)
    of_node = str(each) if nodes == 1 else f"{each}(x{nodes})"
    kept = {k: v for k, v in env.items() if k != OWN and not OF_AGENTS.fullmatch(k)}
    for name in _DEVICES if gpus else ():
        if name in env:
            devices = env[name].split(",")
            kept[name] = ",".join(devices[local * gpus : (local + 1) * gpus])
    return {
        **kept,
        **json.loads(env[OWN]),
        "SLURM_PROCID": str(first + local),
        "SLURM_LOCALID": str(local),
        "SLURM_GTIDS": ",".join(str(first + i) for i in range(each)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), total),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), of_node),
        "SLURM_NTASKS_PER_NODE": str(each),
        "SLURM_DISTRIBUTION": "block" if each > 1 else "cyclic",
        "SLURM_TASK_PID": str(os.getpid()),
    }


def as_pod(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the process of a PyTorchJob's pod in a worker's place. Pure."""
    kept = {k: v for k, v in env.items() if k != OWN and not OF_AGENTS.fullmatch(k)}
    return {**kept, **json.loads(env[OWN]), **{k: env[k] for k in _OF_RANKS}}


def cpus_of(text: str, local: int) -> set[int]:
    """Return the CPUs of a task, by srun's `[v,]mask_cpu:0xf,0xf0` or `map_cpu:0,4`. Pure."""
    form, _, listed = text.replace("=", ":", 1).rpartition(":")
    lists = listed.split(",")
    word = lists[local % len(lists)]
    if form.endswith("map_cpu"):
        return {int(word, 0)}
    mask = int(word, 16)
    return {cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1}


def main() -> None:
    """Become the program."""
    words = sys.argv[1:]
    cut = words.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpus")
    parser.add_argument("--of-pod", action="store_true")
    given, program = parser.parse_args(words[:cut]), words[cut + 1 :]
    if given.cpus:
        os.sched_setaffinity(0, cpus_of(given.cpus, int(os.environ["LOCAL_RANK"])))
    own = as_pod(os.environ) if given.of_pod else as_task(os.environ, given.gpus)
    os.execvpe(program[0], program, own)  # noqa: S606  no shell


if __name__ == "__main__":
    main()
