"""What the batch script does, in which order: bash runs it, with stubs for all it calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launcher.plan.planning import plan
from launcher.render.sbatch import render_slurm
from launcher.spec.reading import parse_spec

JOB = """\
name: a-job
model: tiny
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 128, global_batch: 8, steps: 5}
data: {path: corpus}
"""
STUB = """\
#!/bin/bash
what=${0##*/}
[[ $what != python* ]] || { what=$4; shift 4; }
[[ $what != steps ]] || { shift 2; exec "$@"; }
[[ $what != srun || $* != *' watchdog '* ]] || what=srun-watchdog
echo "$what${2:+ $2}" >>"$SLURM_STUBS/calls"
[[ ! -r $SLURM_STUBS/$what ]] || source "$SLURM_STUBS/$what"
exit 0
"""
TOLD = 'exit "$2"\n'
"""`end` answers with the code it is called with."""
ASKED = "kill -USR2 $PPID; exit 0\n"
SAVES = "trap 'exit 91' USR2\nkill -USR2 $PPID\nfor i in {1..600}; do sleep 0.05; done\n"
"""A step that is asked to save while it runs."""


@pytest.fixture
def run(tmp_path):
    """Run the script of the job with some values set; return what it called, and its code."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("srun", "sbatch", "scancel", "python", "python3"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    (tmp_path / "run" / "attempts" / "7.0").mkdir(parents=True)

    def run(*sets: str, **acts: str) -> tuple[list[str], int]:
        spec = parse_spec(JOB, "job.yaml", sets)
        bundle = render_slurm(
            spec,
            plan(spec),
            run_id="r",
            run_dir=tmp_path / "run",
            base_dir=tmp_path,
            python=str(stubs / "python"),
        )
        script = tmp_path / "job.sbatch"
        script.write_text(bundle["job.sbatch"])
        folder = tmp_path / "acts"
        folder.mkdir()
        for name, act in {"end": TOLD, "sbatch": "echo 18\n", **acts}.items():
            (folder / name).write_text(act)
        env = {
            "PATH": f"{stubs}:{os.environ['PATH']}",
            "SLURM_STUBS": str(folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
        }
        done = subprocess.run(
            ["bash", script], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        lines = (folder / "calls").read_text().splitlines()
        called = [Path(line).name if line.startswith("/") else line for line in lines]
        # Two are started side by side.
        side = [name for name in called if name.split()[0] in {"beat", "srun-watchdog"}]
        return [name.split()[0] for name in called if name not in side] + sorted(
            {name.split()[0] for name in side}
        ), done.returncode

    return run


def test_a_job_that_trains_to_its_end(run):
    assert run() == (["begin", "srun", "end", "beat"], 0)


def test_asked_while_it_trains_it_saves_and_goes_back_into_the_queue(run):
    assert run(srun=SAVES) == (["begin", "srun", "end", "again", "beat"], 91)


@pytest.mark.parametrize(
    "begin", [ASKED, "kill -TERM $PPID; kill -TERM $$\n", "kill -TERM $PPID; exit 0\n"]
)
def test_asked_before_anything_runs_it_starts_nothing_and_goes_back_into_the_queue(run, begin):
    assert run(begin=begin) == (["begin", "end", "again"], 91)


def test_asked_in_the_set_up_of_the_site(run):
    assert run("slurm.setup=['kill -USR2 $$']") == (["begin", "end", "again"], 91)


@pytest.mark.parametrize(("code", "ends"), [(90, 0), (91, 91), (93, 93), (94, 94)])
def test_what_begin_refuses_is_final_also_when_it_was_asked_to_end(run, code, ends):
    assert run(begin=f"kill -USR2 $PPID; exit {code}\n") == (["begin"], ends)


def test_a_begin_that_is_killed_without_having_been_asked_ends_the_job(run):
    assert run(begin="kill -KILL $$\n") == (["begin"], 137)


def test_a_chain_keeps_its_successor_as_long_as_there_is_something_to_do(run):
    chain = "slurm.restart=chain"
    calls = ["begin", "sbatch", "keep-off", "srun", "end", "keep-off", "beat"]
    assert run(chain, srun=SAVES) == (calls, 91)


def test_a_chain_that_is_asked_before_anything_runs_leaves_it_to_the_successor(run):
    found = run("slurm.restart=chain", begin=ASKED)
    assert found == (["begin", "sbatch", "keep-off", "end", "keep-off"], 91)


@pytest.mark.parametrize("code", [0, 93, 94])
def test_a_chain_with_nothing_to_do_ends(run, code):
    found = run("slurm.restart=chain", end=f"exit {code}\n")
    assert found == (["begin", "sbatch", "keep-off", "srun", "end", "scancel", "beat"], code)


def test_no_restarts_left_is_94_and_no_requeue(run):
    assert run(end="exit 94\n") == (["begin", "srun", "end", "beat"], 94)


def test_agents_in_pyxis_have_their_watchdogs_in_a_step_outside(run):
    called, code = run("slurm.container=pyxis", "env.image=reg.io#a:1")
    assert (sorted(called), code) == (["beat", "begin", "end", "srun", "srun-watchdog"], 0)
