"""`holdfast wrap`: what it changes in a batch script."""

from __future__ import annotations

import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_launches import ENV

from launcher.cli.main import run_cli
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.spec.errors import UserError
from launcher.wrap.ending import signalled
from launcher.wrap.launches import job_of, launch_of
from launcher.wrap.wrapped import wrap_script as wrapped_script

BATCH = """\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --signal=TERM@60
#SBATCH --requeue
module load cuda
srun --cpus-per-task=8 torchrun \\
  --nnodes "$SLURM_NNODES" train.py --name 'a; b | c' "$(date)" 2>&1 | tee log  # all of it
echo done
"""
OWN = (
    '[[ -z ${SLURM_JOB_ID-} || ${HOLDFAST_SCRIPT-} == */holdfast-"$SLURM_JOB_ID"-* ]] || '
    'exec /p -P -m launcher.node.script -- "$0" "$@"\n'
)
WRAPPED = BATCH.replace("#SBATCH --requeue\n", "").replace(
    "#SBATCH --signal=TERM@60\n",
    "#SBATCH --no-kill\n#SBATCH --requeue\n#SBATCH --open-mode=append\n"
    f"#SBATCH --signal=B:USR2@180\n{OWN}",
)


def wrap_script(text):
    return wrapped_script(text, "/p").text


def test_a_script_changes_in_its_options_and_by_one_line():
    assert wrap_script(BATCH) == WRAPPED


@pytest.mark.parametrize(
    "lines",
    ["python train.py", "# srun torchrun train.py", "#SBATCH hetjob\nsrun torchrun a.py", WRAPPED],
)
def test_a_script_that_cannot_be_wrapped(lines):
    with pytest.raises(UserError) as caught:
        wrap_script(f"#!/bin/bash\n{lines}\n")
    assert caught.value.code == "HF169"


@pytest.mark.parametrize("first", ["#!/bin/sh", "#!/usr/bin/env python3", "#SBATCH -N 1", ""])
def test_only_bash_is_wrapped(first):
    with pytest.raises(UserError, match="HF169"):
        wrap_script(f"{first}\nsrun torchrun a.py\n")
    wrap_script("#!/usr/bin/env bash\nsrun torchrun a.py\n")


@pytest.mark.parametrize(
    "words", ["--hf-token hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345", "--api-key $KEY", "--api-key=$KEY"]
)
def test_a_secret_in_the_command_is_refused_before_the_job_waits(words):
    with pytest.raises(UserError) as caught:
        wrap_script(f"#!/bin/bash\nsrun torchrun a.py {words}\n")
    assert caught.value.code == "HF163"
    assert "AbCdEf" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "flags", "sbatch", "batch", "lead_s", "signal", "grace_s"),
    [
        ("", "", "USR2@180", "", 180, "TERM", 80),
        ("--signal=TERM@600", "--shutdown-timeout 500", "USR2@600", "TERM@600", 600, "TERM", 500),
        ("--signal=TERM@600", "", "USR2@600", "TERM@600", 600, "TERM", 500),
        ("--signal USR1@60", "", "USR2@180", "USR1@180", 180, "USR1", 80),
        ("--signal=10@700", "", "USR2@700", "USR1@700", 700, "USR1", 600),
        ("--signal=SIGINT", "", "USR2@180", "INT@180", 180, "INT", 80),
        ("--signal=B:USR1@300", "", "USR1@300", "B:USR1@300", 300, "TERM", 200),
        ("--signal=B:12@300", "", "USR2@300", "TERM@300", 300, "TERM", 200),
        ("--signal=R:CONT@300", "", "USR2@300", "TERM@300", 300, "TERM", 200),
        ("-t 5 --signal=B:USR1@60 -t60", "", "USR1@180", "B:USR1@180", 180, "TERM", 80),
        ("", "--shutdown-timeout=400.5", "USR2@501", "TERM@501", 501, "TERM", 400.5),
        ("", "--shutdown-timeout=10", "USR2@180", "", 180, "TERM", 10),
        ("", "--shutdown-timeout=0", "USR2@180", "", 180, "TERM", 1),
    ],
)
def test_signal_lead_and_grace_are_the_users(
    *, asked, flags, sbatch, batch, lead_s, signal, grace_s
):
    made = wrapped_script(f"#!/bin/bash\n#SBATCH {asked}\nsrun torchrun {flags} a.py", "/p")
    option = f"--signal={batch} " if batch else ""
    assert f"\n#SBATCH --signal=B:{sbatch}\n" in made.text
    assert f"launcher.node.script {option}-- " in made.text
    assert f"{lead_s} s" in made.notes[0]
    assert f"SIG{signal} and have {grace_s:g} s" in made.notes[0]
    launch = launch_of(f"srun torchrun {flags} a.py".split(), ENV)
    spec = load_spec(job_of(launch, ENV, signalled(batch, requeue=True)))
    assert (spec.slurm.signal_lead_s, spec.slurm.restart) == (lead_s, "requeue")
    assert (spec.elastic.stop_signal, spec.elastic.stop_grace_s) == (signal, grace_s)
    plan(spec)


@pytest.mark.parametrize(
    ("asked", "line", "option"),
    [
        ("--no-requeue", "no-requeue", "--no-requeue "),
        ("--requeue\n#SBATCH --nodes=2 --no-requeue", "no-requeue", "--no-requeue "),
        ("--no-requeue --requeue", "requeue", ""),
    ],
)
def test_a_job_that_is_not_to_be_requeued_is_not(asked, line, option):
    made = wrapped_script(f"#!/bin/bash\n#SBATCH {asked}\nsrun torchrun a.py", "/p")
    assert f"\n#SBATCH --{line}\n#SBATCH --open-mode" in made.text
    assert f"launcher.node.script {option}-- " in made.text
    assert any("--no-requeue" in note for note in made.notes) == bool(option)


@pytest.mark.parametrize("limit", ["3", "-t 00:03:00", "180"])
def test_a_time_limit_below_the_lead_is_refused_before_the_queue(limit):
    def wrap(limit, flags):
        wrap_script(f"#!/bin/bash\n#SBATCH {limit}\nsrun torchrun {flags} a.py")

    limit = limit if limit.startswith("-") else f"--time={limit}"
    with pytest.raises(UserError) as caught:
        wrap(limit, "--shutdown-timeout=11000" if limit.endswith("180") else "")
    assert caught.value.code == "HF160"
    asked = str(caught.value).partition("ask for ")[2].partition(" ")[0]
    wrap(asked, "--shutdown-timeout=11000" if limit.endswith("180") else "")


def test_what_becomes_of_a_script_is_explained_line_by_line(tmp_path, capsys):
    script = tmp_path / "a.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH -N4\nsrun hostname\nsrun --mem=0 torchrun \\\n  --nnodes 2:4 a.py\n"
        "srun bash -c '$LAUNCHER b.py'\nsrun deepspeed c.py\n# srun torchrun d.py\n"
        "sbatch --dependency=afterany:$SLURM_JOB_ID a.sbatch\n"
    )
    assert run_cli(["wrap", str(script), "--explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [
        (
            "line 3: srun hostname: asked when it runs: agents if it starts a training, else "
            "it runs as it is"
        ),
        "line 4: srun --mem=0 torchrun --nnodes 2:4 a.py: agents run in its place",
        (
            "line 6: srun bash -c '$LAUNCHER b.py': runs on each node; agents run where it starts "
            "torchrun"
        ),
        "line 7: srun deepspeed c.py: agents run in its place",
        "a lost node: the others continue, down to 2 of 4",
        "after a restart the script goes on from the newest checkpoint that it loads",
        "180 s before the time limit workers get SIGTERM and have 80 s to save",
        "the script restarts itself: if it does, the job is not requeued as well",
    ]


def test_options_go_where_sbatch_reads_them_and_lines_with_others_stay():
    head = "#!/bin/bash\n\n# mine\n#SBATCH --requeue --nodes=4 --signal=USR1@60\n#SBATCH -k  # k\n"
    rest = "x <<E\n#SBATCH --requeue\nE\n#SBATCH --time=1\nsrun torchrun a.py\n"
    wrapped = wrap_script(f"{head}{rest}")
    kept = head.removesuffix("#SBATCH -k  # k\n")
    assert wrapped.startswith(f"{kept}#SBATCH --no-kill\n")
    own = OWN.replace("script -- ", "script --signal=USR1@180 -- ")
    assert wrapped.endswith(f"#SBATCH --signal=B:USR2@180\n{own}{rest}")


@pytest.mark.parametrize(
    "text", ["$(" * 9000, "'" + '"' * 9001, "$('" * 9000, "\\" * 9001, "`$(" * 9000]
)
def test_quotes_without_end_stay_and_take_no_time(text):
    assert wrap_script(f"#!/bin/bash\nsrun torchrun t.py {text}\n").endswith(f" {text}\n")


_GONE = "#SBATCH --requeue"
_lines = st.lists(
    st.text(st.characters(exclude_characters="\\\n\r"), max_size=20)
    | st.sampled_from([_GONE, "#SBATCH --nodes=2", "srun hostname", "# x"])
)


@given(_lines)
def test_all_other_lines_stay_as_they_are(before):
    lines = ["#!/bin/bash", *before, "srun torchrun t.py"]
    wrapped = wrap_script("\n".join(lines)).split("\n")
    at = wrapped.index(OWN.strip())
    ends = (at for at, line in enumerate(lines[1:], 1) if line.strip() and line.lstrip()[0] != "#")
    head = next(ends)
    options = [n for n in range(head) if lines[n].startswith("#SBATCH")]
    head = options[-1] + 1 if options else 1
    kept = [line for line in lines[:head] if line != _GONE]
    assert wrapped[: at - 4] + wrapped[at + 1 :] == [*kept, *lines[head:]]


def test_the_command_writes_through_no_link_and_for_nobody_else(tmp_path, capsys):
    script, link, own = tmp_path / "a", tmp_path / "link", tmp_path / "own"
    script.write_text(BATCH)
    script.chmod(0o600)
    own.write_text("mine")
    link.symlink_to(own)
    assert run_cli(["wrap", str(script), "-o", str(link)]) == 2
    assert "HF612" in capsys.readouterr().err
    assert own.read_text() == "mine"
    assert run_cli(["wrap", str(script), "-o", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    script.write_bytes(BATCH.replace("\n", "\r\n").encode())
    assert run_cli(["wrap", str(script), "-o", str(script)]) == 0
    assert script.read_text().replace(sys.executable, "/p") == WRAPPED


@pytest.mark.timeout(30)
def test_the_command_reads_no_pipe_device_or_endless_file(tmp_path, capsys):
    pipe, long = tmp_path / "pipe", tmp_path / "long"
    os.mkfifo(pipe)
    long.write_text(f"{BATCH}{'#' * 2_000_000}")
    for file, code in ((pipe, "HF001"), ("/dev/zero", "HF001"), (long, "HF002")):
        assert run_cli(["wrap", str(file)]) == 2
        assert code in capsys.readouterr().err


def test_the_command_shows_the_change_and_writes_it(tmp_path, capsys):
    script, out = tmp_path / "a.sbatch", tmp_path / "b.sbatch"
    script.write_text(BATCH)
    assert run_cli(["wrap", str(script)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {"-#SBATCH --signal=TERM@60", "+#SBATCH --no-kill"} <= {*shown}
    assert run_cli(["wrap", str(script), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["script"] == out.read_text()
    assert out.read_text().replace(sys.executable, "/p") == WRAPPED
    assert script.read_text() == BATCH
    assert run_cli(["wrap", str(tmp_path / "none")]) == 2
    assert "HF001" in capsys.readouterr().err
