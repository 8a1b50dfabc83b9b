"""The scripts of two example jobs, to be read in review; HOLDFAST_UPDATE_GOLDEN=1 writes them."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.render.sbatch import render_slurm

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "slurm"
EXAMPLES = ("llama3-405b", "finetune")
KIB = 1024


def rendered(name):
    spec = load_spec(ROOT / "examples" / f"{name}.yaml")
    return render_slurm(
        spec,
        plan(spec),
        run_id=f"{name}-1",
        run_dir=f"/shared/runs/{name}-1",
        base_dir="/home/user/jobs",
        python="/opt/holdfast/bin/python",
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_script_is_the_one_reviewed(name):
    script, golden = rendered(name)["job.sbatch"], FOLDER / f"{name}.sbatch"
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text(), (
        f"if it is meant: HOLDFAST_UPDATE_GOLDEN=1 pytest {Path(__file__).relative_to(ROOT)}"
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_bash_can_read_it(name):
    command = ["bash", "-n", FOLDER / f"{name}.sbatch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", EXAMPLES)
def test_shellcheck_has_nothing_to_say(name):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    command = ["shellcheck", "--severity=style", FOLDER / f"{name}.sbatch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_2048_nodes_and_spares_are_one_page():
    bundle = rendered("llama3-405b")
    assert "#SBATCH --nodes=2064\n" in bundle["job.sbatch"]
    assert len(bundle["job.sbatch"].encode()) < 16 * KIB
    assert sum(len(text.encode()) for text in bundle.values()) < 16 * KIB
    assert max(len(line) for line in bundle["job.sbatch"].splitlines()) <= 120


def test_2048_nodes_are_rendered_in_no_time():
    spec = load_spec(ROOT / "examples" / "llama3-405b.yaml")
    planned = plan(spec)
    places = {"run_id": "r", "run_dir": "/shared/r", "base_dir": "/jobs"}
    start = time.process_time()
    render_slurm(spec, planned, **places)
    assert time.process_time() - start <= 0.3, "the first one, which compiles the template"
    start = time.process_time()
    render_slurm(spec, planned, **places)
    assert time.process_time() - start <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("target", ["slurm", "pytorchjob", "jobset", "trainjob"])
def test_the_whole_command_costs_little_more_than_the_libraries_it_needs(target):
    """In processor time, the least of a few, taken in turns: a busy machine stretches both."""
    bare = "import click, jinja2, pydantic.main, pydantic.json_schema, yaml"
    render = ["-m", "launcher.cli.main", "render", "examples/llama3-405b.yaml", "--to", target]
    taken = [
        (cpu_s([sys.executable, "-c", bare]), cpu_s([sys.executable, *render])) for _ in range(5)
    ]
    libraries_s, command_s = map(min, zip(*taken, strict=True))
    assert command_s <= (max(0.3, 1.5 * libraries_s) if target == "slurm" else 4 * libraries_s)


def cpu_s(command):
    """Return the processor time of a command, seconds; what it has compiled is kept."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL, timeout=100)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
