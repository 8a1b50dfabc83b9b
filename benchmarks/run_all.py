"""Runs every benchmark, one after the other, and writes benchmarks/RESULTS.md.

    python benchmarks/run_all.py [--only check_time,recovery] [--quick]

The newest outcome of every program is kept in benchmarks/results/, so that one of them can be
run again without the others.

Prints one JSON line per benchmark, with its name under `benchmark`; what the programs say
meanwhile goes to stderr. The exit code is 1 when one of them failed; an aim that is missed is
told in the table, and is no failure. With `--quick` everything runs small: it tries the
programs, the numbers mean nothing.

One that is not there is left out. Of step_time.py this is the part without a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from aims import Outcome, report, split_output
from common import ROOT, environment, machine, say

HERE = Path(__file__).parent
PROGRAMS: dict[str, list[str]] = {
    "check_time": [],
    "collectives": ["--layouts", "dp4-pp2-cp1-tp1"],
    "step_time": ["--rounds", "1"],
    "recovery": ["--repeats", "1", "--only", "holdfast", "--cases", "node"],
    "hang": ["--repeats", "1", "--only", "holdfast"],
    "snapshot": ["--small", "--only", "sizes,stall,reshard"],
    "record": ["--nodes", "16", "--failures", "0,2"],
    "daemons": ["--days", "9"],
    "membership": ["--repeats", "1", "--sizes", "16", "--peer-sizes", ""],
    "chaos": ["--seconds", "20", "--mean", "10", "--only", "holdfast"],
    "calibration": ["--repeats", "1", "--steps", "12", "--quick"],
}
"""In the order in which they run -> the arguments of a quick try."""
ALWAYS: dict[str, list[str]] = {"step_time": ["--processors"]}
"""Of a whole run and of a quick try."""


def run(program: str, arguments: list[str]) -> Outcome:
    """Run one program; its stderr goes to ours."""
    command = ["benchmarks/" + program + ".py", *arguments]
    where, begun = machine(), time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment(), stdout=out, check=False
        )
        out.seek(0)
        text, result = split_output(out.read())
    if done.returncode:
        text, result = f"{text}\nexit code {done.returncode}: its stderr says why".strip(), None
    return Outcome(
        program=program,
        where=where,
        command="python " + " ".join(argument or "''" for argument in command),
        seconds=time.monotonic() - begun,
        text=text,
        result=result,
    )


def keep(outcome: Outcome) -> None:
    """Write one outcome, and RESULTS.md anew."""
    kept = HERE / "results"
    kept.mkdir(exist_ok=True)
    text = json.dumps(dataclasses.asdict(outcome), indent=1)
    (kept / f"{outcome.program}.json").write_text(text + "\n", encoding="utf-8")
    outcomes = [
        Outcome(**json.loads(path.read_text(encoding="utf-8")))
        for program in PROGRAMS
        if (path := kept / f"{program}.json").exists()
    ]
    (HERE / "RESULTS.md").write_text(report(outcomes), encoding="utf-8")


@click.command(help=__doc__.split("\n")[0])
@click.option("--only", default=",".join(PROGRAMS), show_default=True, help="Some of them.")
@click.option("--quick", is_flag=True, help="Only try the programs; nothing is kept.")
def main(only: str, quick: bool) -> None:
    """Run and write; exit with 1 where a program failed."""
    failed = 0
    for program in only.split(","):
        if not (HERE / f"{program}.py").exists():
            say(f"{program} is not there")
            continue
        say(f"--- {program}")
        arguments = [*ALWAYS.get(program, []), *(PROGRAMS[program] if quick else [])]
        outcome = run(program, arguments)
        failed += outcome.result is None
        mark = {} if outcome.result is not None else {"failed": True}
        print(json.dumps({"benchmark": program, **mark, **(outcome.result or {})}), flush=True)
        # After each: hours of measuring are not lost to the last of them.
        if not quick:
            keep(outcome)
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
