"""`holdfast wrap`: what it changes in a batch script, and what it makes of an srun of torchrun."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.utils import macros
from torch.distributed.run import get_args_parser

from elastic_trainer.plan.command import fill
from launcher.cli.main import run_cli
from launcher.plan.search import plan
from launcher.spec.errors import UserError
from launcher.spec.reading import load_spec
from launcher.wrap.wrapped import hidden, job_of, launch_of, script_of
from launcher.wrap.wrapped import wrap_script as wrapped_script
from launcher.wrap.wrapped_ending import signalled

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


def wrap_script(text):
    return wrapped_script(text).text


ENV = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "My_Job", "SLURM_JOB_NUM_NODES": "4"}
SRUN = ("srun", "--cpus-per-task=8", "torchrun", "--nnodes=4", "--nproc-per-node=8")


@pytest.mark.parametrize(
    "words",
    [
        ("a.py", "a", "--", "b"),
        ("a.py", "--", "a"),
        ("--", "a.py", "--", "a"),
        ("a.py", "", "{b} {{b}} ${b}", '{"a": {"b": 1}}', "{dp}"),
        ("a.py", "$$HOME", "$${local_rank}", "$local_rank", "é\nx"),
    ],
)
def test_arguments_are_what_torchrun_makes_of_them(words, monkeypatch):
    taken = []
    monkeypatch.setattr("launcher.cli.scripts._agents", lambda argv, *_: taken.append(argv) or "")
    for first in (["batch", "--"], ["batch"], ["batch", "--no-requeue", "--signal=USR1@600", "--"]):
        assert run_cli([*first, *SRUN, *words]) == 0
    assert taken == [(*SRUN, *words)] * 3
    theirs = get_args_parser().parse_args(words)
    spec = load_spec(job_of(launch_of((*SRUN, *words), ENV), ENV))
    script, *args = spec.command
    values = {"dp": "{dp}"}
    assert script == theirs.training_script == "a.py"
    assert [*fill(args, values, local_rank=1)] == macros.substitute(
        theirs.training_script_args, "1"
    )


def test_an_agent_is_given_all_words(monkeypatch):
    started = []
    monkeypatch.setattr("os.execv", lambda _program, argv: started.append(argv))
    for words in (["a.py", "a", "--", "b"], ["--", "a.py", "--"], ["--help"], ["", "--node", "é"]):
        assert run_cli(["agent", *words]) == 0
        assert started[-1][-len(words) :] == words
        assert started[-1][-len(words) - 1] == "elastic_trainer.agent"


def test_a_script_changes_in_its_options_and_its_srun():
    assert wrap_script(BATCH) == WRAPPED


@pytest.mark.parametrize(
    "command",
    [
        "srun torchrun train.py",
        "  srun -N 2 /opt/venv/bin/torchrun train.py > log 2>&1",
        "srun python -m torch.distributed.run train.py &> log",
        "srun python3 -u -m torch.distributed.launch --use_env train.py",
        "srun torchrun train.py>log 2>&1 |& tee other  # all of it",
        "srun $(which torchrun) train.py",
        "srun torchrun train.py $(f $(g; h) | i) \"$(a \"x|y\" '&')\" $((1 << 2)) $'it\\'s;'",
    ],
)
def test_an_srun_is_found(command):
    first, second, third = wrap_script(f"#!/bin/bash\n{command}").splitlines()[5:]
    kept = command if "$((" in command else command.partition(">")[0].strip(" &")
    assert first.lstrip() == f"hf_batch=$(holdfast batch -- {kept}"
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
        "cat >run.sh <<'EOF'\nsrun torchrun a.py\nEOF\nsrun bash run.sh",
        "srun torchrun a.py <<EOF\nrm -r x\nEOF",
        "srun torchrun a.py > log --lr 3",
        "srun torchrun a.py --note 'two\nlines'",
        "for seed in 1 2; do\n  srun torchrun a.py --seed $seed\ndone",
        "while true\ndo\n  srun torchrun a.py\n  sleep 1\ndone",
        "srun bash -c 'torchrun a.py'",
        'srun bash -c "torchrun --node-rank $SLURM_NODEID a.py"',
        "srun numactl -N 0 torchrun a.py",
        "srun --exclusive -n 2 $OPTIONS apptainer exec image torchrun a.py",
        "srun torchrun --standalone a.py",
        "srun torchrun --nonsense=$X a.py",
        "srun torchrun --shutdown-timeout=-1 a.py",
        "srun torchrun --shutdown-timeout=soon a.py",
        "srun python -m torch.distributed.launch a.py",
        "#SBATCH hetjob\nsrun torchrun a.py",
        WRAPPED,
    ],
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
    made = wrapped_script(f"#!/bin/bash\n#SBATCH {asked}\nsrun torchrun {flags} a.py")
    option = f"--signal={batch} " if batch else ""
    assert f"\n#SBATCH --signal=B:{sbatch}\n" in made.text
    assert f"holdfast batch {option}-- srun torchrun" in made.text
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
    made = wrapped_script(f"#!/bin/bash\n#SBATCH {asked}\nsrun torchrun a.py")
    assert f"\n#SBATCH --{line}\n#SBATCH --open-mode" in made.text
    assert f"holdfast batch {option}-- srun" in made.text
    assert any("--no-requeue" in note for note in made.notes) == bool(option)


def _hosts(text):
    return text.split(",")


@pytest.mark.parametrize(
    ("options", "hosts", "nodes"),
    [
        ("", "n1,n2,n3,n4", 4),
        ("--nodelist=n2", "n1,n2,n3,n4", 4),  # srun adds the others
        ("--nodes=1 --nodelist=n2", "n2", 1),
        ("-N2 -w n4", "n1,n4", 2),
        ("-n 1 -w n3", "n3", 1),
        ("-N 1", "n1", 1),
        ("-N 1 -r 2", "n3", 1),
        ("-N3 --exclude n1", "n2,n3,n4", 3),
        ("--nodes=1-3 --ntasks-per-node=1", "n1,n2,n3", 3),
    ],
)
def test_an_srun_on_a_part_of_the_nodes(options, hosts, nodes):
    launch = launch_of(["srun", *options.split(), "torchrun", "a.py"], ENV)
    assert list(launch.options.hosts(_hosts("n1,n2,n3,n4"), _hosts)) == _hosts(hosts)
    assert (launch.nodes, launch.srun) == ((nodes, nodes), ())


def test_an_srun_on_nodes_that_the_job_does_not_have():
    for options in ("-w n9 -N1", "-N5", "-N4 -x n1", "-w n1 -x n1 -N1"):
        launch = launch_of(["srun", *options.split(), "torchrun", "a.py"], ENV)
        with pytest.raises(UserError, match="HF169"):
            launch.options.hosts(_hosts("n1,n2,n3,n4"), _hosts)


def test_gpus_that_an_srun_asks_for_in_total_are_asked_for_per_node():
    launch = launch_of(["srun", "--gpus=h100:16", "torchrun", "a.py"], ENV)
    assert launch.srun == ("--gpus-per-node=h100:4",)
    assert launch_of(["srun", "-G8", "-N2", "torchrun", "a.py"], ENV).srun == ("--gpus-per-node=4",)


def test_what_is_dropped_is_said():
    command = "srun -o x torchrun --log-dir=y a.py 2>&1 | tee log"
    made = wrapped_script(f"#!/bin/bash\n#SBATCH --signal=R:CONT@300\n{command}")
    said = "\n".join(made.notes)
    for word in ("--output", "--log-dir", "2>&1 | tee log", "CONT", "R:"):
        assert word in said
    assert not launch_of(["srun", "torchrun", "a.py"], ENV).notes


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


def test_a_loop_before_the_srun_is_none_around_it():
    wrap_script(
        "#!/bin/bash\nfor i in 1; do\n x\ndone\n# for\nfor i in 1; do x; done\nsrun torchrun a"
    )


def test_options_go_where_sbatch_reads_them_and_lines_with_others_stay():
    head = "#!/bin/bash\n\n# mine\n#SBATCH --requeue --nodes=4 --signal=USR1@60\n#SBATCH -k  # k\n"
    rest = "x <<E\n#SBATCH --requeue\nE\n#SBATCH --time=1\n"
    wrapped = wrap_script(f"{head}{rest}srun torchrun a.py\n")
    kept = head.removesuffix("#SBATCH -k  # k\n")
    assert wrapped.startswith(f"{kept}#SBATCH --no-kill\n")
    assert f"#SBATCH --signal=B:USR2@180\n{rest}hf_batch=" in wrapped


@pytest.mark.parametrize(
    "text", ["$(" * 9000, "'" + '"' * 9001, "$('" * 9000, "\\" * 9001, "`$(" * 9000]
)
def test_quotes_without_end_are_read_to_the_end(text):
    assert len(hidden(text)) == len(text)


_GONE = "#SBATCH --requeue"
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
    ends = (at for at, line in enumerate(before) if line.strip() and line.lstrip()[0] != "#")
    head = next(ends, len(before))
    kept = [line for line in before[:head] if line != _GONE]
    assert own[:srun] == [first, *kept, *before[head:]]
    assert own[srun + 3 :] == after


@pytest.mark.parametrize(
    ("argv", "srun", "nodes", "workers", "command"),
    [
        ((*SRUN, "a.py", "--lr", "1"), ["--cpus-per-task=8"], (4, 4), 8, ["a.py", "--lr", "1"]),
        (("srun", "-N", "2", "-n2", "--label", "torchrun", "a.py"), [], (2, 2), 1, ["a.py"]),
        (("srun", "--mem=0", "--", "torchrun", "a.py"), ["--mem=0"], (4, 4), 1, ["a.py"]),
        (
            ("srun", "--export", "ALL,A=1", "torchrun", "a.py"),
            ["--export", "ALL,A=1"],
            (4, 4),
            1,
            ["a.py"],
        ),
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
        "srun --export=NONE torchrun t.py",
        "srun --export HOME,PATH torchrun t.py",
        "srun --nodes=1 torchrun --nnodes=2 t.py",
        "srun --gpus=7 torchrun t.py",
        "srun --nodes=x torchrun t.py",
        "srun --nodes=0 torchrun t.py",
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


def test_braces_in_arguments_are_text_unless_they_name_something_of_ours():
    words = ("{b}", "{dp}x", '{"a": 1}', "a={lr:.2f} ${X}")
    command = load_spec(job_of(launch_of((*SRUN, "a.py", *words), ENV), ENV)).command
    assert fill(command, {"dp": 4}, local_rank=0) == ("a.py", "{b}", "4x", *words[2:])


def test_a_second_srun_of_a_start_ends_the_job_instead_of_being_left_out(tmp_path):
    python, agents, batch = tmp_path / "python", tmp_path / "agents.sh", tmp_path / "batch"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    launch = launch_of((*SRUN, "a.py"), ENV)
    spec = load_spec(job_of(launch, ENV))
    agents.write_text(
        script_of(spec, plan(spec), launch, run_dir=tmp_path / "run", python=str(python))
    )
    batch.write_text("train() { source agents.sh; }\ntrain && echo one\ntrain && echo two\n")
    env = {"PATH": os.environ["PATH"], **ENV}
    done = subprocess.run(
        ["bash", batch],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.splitlines()[-1], done.returncode) == ("one", 2)
    assert "HF169" in done.stderr


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
    assert script.read_bytes() == WRAPPED.encode()


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
    assert {"-#SBATCH --signal=TERM@60", "+#SBATCH --no-kill", '+source "$hf_batch"'} <= {*shown}
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
    assert run_cli(["batch", "--", *SRUN, "a.py"]) == 93
    assert "HF673" in capsys.readouterr().err


def test_a_time_out_that_only_the_shell_knew_and_that_does_not_fit_is_said(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    words = ["srun", "torchrun", "--shutdown-timeout=500", "a.py"]
    assert run_cli(["batch", "--", *words]) == 0
    assert "--signal=TERM@600" in capsys.readouterr().err
    assert run_cli(["batch", "--signal=TERM@600", "--", *words]) == 0
    assert "--shutdown-timeout" not in capsys.readouterr().err
