"""Steps that a profile of this machine predicts, beside steps of the trainer.

    python benchmarks/calibration.py [--repeats N] [--steps N] [--out FILE]

Prints a table, and last a JSON line. `holdfast calibrate` measures two emulated nodes of one
process; then `holdfast run` trains the tiny model in each layout, and the median of its steps, the
first ten left out, stands beside the prediction. What is measured for the profile are layers of
other sizes than the model's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from common import OUT, ROOT, environment, machine, say, table, write_out

from launcher.plan.loading import load_spec
from launcher.plan.planning import speeds_of
from launcher.plan.step_time import StepTime, step_time
from launcher.record.files import events_named
from launcher.spec.gpu_memory import Workload
from launcher.spec.spec import JobSpec

JOB = ROOT / "examples" / "tiny-cpu.yaml"
LAYOUTS = {
    "dp1": {"cluster.nodes": 1},
    "dp2": {"cluster.nodes": 2},
    "tp2": {"cluster.nodes": 2, "layout.tp": 2, "layout.allow_tp_across_nodes": "true"},
    "pp2": {"cluster.nodes": 2, "layout.pp": 2},
}
"""What is trained, each on as many processes as this machine is known to have cores for."""
FIRST = 10
"""Steps that are left out: memory is touched for the first time."""
NAME = "benchmark"


def sets_of(layout: str, steps: int) -> list[str]:
    """Return the overrides of the job for a layout."""
    given = {**LAYOUTS[layout], "train.steps": steps, "cluster.profile": NAME}
    given |= {"checkpoint.every_steps": "null", "name": layout}
    return [f"{key}={value}" for key, value in given.items()]


def predicted(spec: JobSpec) -> StepTime:
    """Return the predicted step of a job on all its nodes."""
    facts, layout = spec.facts, spec.full_layout
    work = Workload(
        shape=facts.shape,
        seq_len=facts.seq_len,
        micro_batch=facts.micro_batch,
        precision=facts.precision,
        recompute=facts.recompute,
    )
    speeds = speeds_of(spec)
    assert speeds is not None, "the job names a profile"
    return step_time(work, layout, -(-facts.num_micro_batches // layout.dp), *speeds)


def _holdfast(*words: str, env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "launcher.cli.main", *words]
    subprocess.run(command, env=env, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def _measured(layout: str, steps: int, run_dir: Path, env: dict[str, str]) -> float:
    """Train, and return the median seconds of a step."""
    sets = [word for each in sets_of(layout, steps) for word in ("--set", each)]
    _holdfast("run", str(JOB), "--quiet", "--run-dir", str(run_dir), *sets, env=env)
    events = events_named(run_dir, ["step.completed"])
    return statistics.median(
        event.fields["step_s"] for event in events if (event.step or 0) > FIRST
    )


@click.command(help=__doc__.split("\n", maxsplit=1)[0])
@click.option("--repeats", default=3, show_default=True, help="Runs of each layout.")
@click.option("--steps", default=40, show_default=True, help="Of a run; the first 10 are left out.")
@click.option("--quick", is_flag=True, help="To try the program.")
@OUT
def main(*, repeats: int, steps: int, quick: bool, out: Path | None) -> None:
    """Measure and print."""
    where = machine()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        env = environment() | {"HOLDFAST_SITES": f"{folder}/sites.yaml", "PYTHONPATH": str(ROOT)}
        os.environ["HOLDFAST_SITES"] = env["HOLDFAST_SITES"]
        say("holdfast calibrate ...")
        begun = time.monotonic()
        words = ["--to", "local", "--count", "2", "--profile", NAME, *(["--quick"] * quick)]
        _holdfast("calibrate", *words, "--folder", f"{folder}/files", env=env)
        calibrate_s = time.monotonic() - begun
        runs = {layout: list[float]() for layout in LAYOUTS}
        for number in range(repeats):
            for layout, taken in runs.items():
                say(f"{layout}, run {number + 1} of {repeats} ...")
                taken.append(_measured(layout, steps, place / f"{layout}-{number}", env))
        for layout, taken in runs.items():
            step = predicted(load_spec(JOB, sets_of(layout, steps)))
            measured_s = statistics.median(taken)
            found[layout] = {
                "predicted_s": round(step.total, 4),
                "measured_s": round(measured_s, 4),
                "least_s": round(min(taken), 4),
                "most_s": round(max(taken), 4),
                "error_pct": round(100 * (step.total / measured_s - 1), 1),
            }
            say(f"{layout}: { ({name: round(s, 5) for name, s in step.items().items() if s}) }")
    worst = max(abs(each["error_pct"]) for each in found.values())
    head = (
        f"Predicted and measured steps ({where}; {JOB.name}, {repeats} runs of {steps} steps; "
        f"calibrated in {calibrate_s:.0f} s)."
    )
    columns = ["layout", "predicted s", "measured s", "least", "most", "error %"]
    rows = [[layout, *numbers.values()] for layout, numbers in found.items()]
    told = {"benchmark": "calibration", "machine": where, "calibrate_s": round(calibrate_s, 1)}
    last = json.dumps({**told, "layouts": found, "worst_error_pct": worst})
    write_out("\n".join([head, "", table(columns, rows), last]), out)


if __name__ == "__main__":
    main()
