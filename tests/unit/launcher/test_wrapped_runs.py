"""A wrapped script that runs: real bash, and programs that write down how they are called."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.main import run_cli
from launcher.node.launch import outside, restarts_itself
from launcher.node.supervisor import HOOK
from launcher.platforms.retries import polled
from launcher.wrap.wrapped import wrap_script

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]
ROOT = Path(__file__).parents[3]
SAYS = """\
#!/bin/bash
printf '%s' "${0##*/}"; printf ' <%s>' "$@"; printf '\\n'
{ printf '%s' "${0##*/}"; printf ' <%s>' "$@"; printf '\\n'; } >>"$CALLS"
env >"$CALLS.env"
env >"$CALLS.env.$(($(wc -l <"$CALLS") - 1))"
"""
LAUNCH = """\
#!/bin/bash
# Stands for our Python: `batch -- ...` becomes a launch that saves when it is asked to.
trap 'asked=1' USR2
shift 5
echo "launch <$*>" >>"$CALLS"
run=$PWD/runs/x-7 asked=''
echo "$(cut -d' ' -f22 /proc/$$/stat) $run" >"$HOLDFAST_SCRIPT/launches/$$"
[[ ! -e $HOLDFAST_SCRIPT/asked ]] || asked=1
mkdir -p "$run/attempts/7.0"
until [[ -n $asked ]]; do read -rt 0.1 <> <(:); done
echo '{"code": 91}' >"$run/attempts/7.0/end.json"
echo saved >>"$CALLS"
exit 91
"""


class Job:
    """A job of one node without Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        programs = folder / "programs"
        programs.mkdir()
        for name in ("srun", "scontrol", "sbatch", "torchrun"):
            (programs / name).write_text(SAYS)
            (programs / name).chmod(0o755)
        (folder / "launch").write_text(LAUNCH)
        (folder / "launch").chmod(0o755)
        self.calls.touch()
        self.env = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CALLS": str(self.calls),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "n1",
        }

    def start(self, body: str, options: str = "") -> subprocess.Popen[str]:
        """Start a script as Slurm does, wrapped, with its lines after the options."""
        script = self.folder / "slurm_script"
        text = f"#!/bin/bash\n{options}#SBATCH -N1\n{body}\n: srun"
        script.write_text(wrap_script(text, sys.executable).text)
        # In a shell, which Slurm's own process becomes, so that it has the pid that is named.
        command = f'SLURM_TASK_PID=$$ exec bash {script} one "two  three"'
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, body: str, options: str = "") -> tuple[int, str]:
        with self.start(body, options) as process:
            out = process.communicate(timeout=50)[0]
        return process.returncode, out

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_what_starts_no_training_runs_as_before(job):
    code, out = job.run(
        """\
set -euo pipefail
echo "$1|$2|$PWD"
head=$(srun -N1 hostname --ip-address)
echo "[$head]"
export PATH=/opt/env/bin:$PATH
A=1 srun --ntasks=2 ./prepare "a  b" '' '$x' | tr '<' '('
( exec srun echo $(which torchrun) )
nohup srun x >out 2>&1 &
wait
scontrol show hostnames n1
sbatch --dependency=afterok:6 next.sh
cd / && srun y && exit 3"""
    )
    assert (code, job.called) == (
        3,
        [
            "srun <-N1> <hostname> <--ip-address>",
            "srun <--ntasks=2> <./prepare> <a  b> <> <$x>",
            "srun <echo> <torchrun>",
            "srun <x>",
            "scontrol <show> <hostnames> <n1>",
            "sbatch <--dependency=afterok:6> <next.sh>",
            "srun <y>",
        ],
    ), out
    assert f"one|two  three|{job.folder}\n" in out
    assert "[srun <-N1> <hostname> <--ip-address>]" in out
    assert "srun (--ntasks=2>" in out
    seen = (job.folder / "calls.env").read_text()
    assert "HOLDFAST" not in seen
    assert "BASH_FUNC" not in seen
    assert "PATH=/opt/env/bin:" in seen


def test_outside_slurm_it_is_the_script_that_it_was(job):
    del job.env["SLURM_JOB_ID"]
    assert job.run("srun a; exit 4")[0] == 4
    assert job.called == ["srun <a>"]


def test_a_launch_that_cannot_be_wrapped_runs_and_that_is_said(job):
    code, out = job.run("srun --pty torchrun a.py")
    assert (code, job.called) == (0, ["srun <--pty> <torchrun> <a.py>"])
    assert "HF169" in out


def test_a_secret_is_refused(job):
    code, out = job.run('T=--api-key=$(printf "sk-%040d" 1)\nsrun torchrun a.py $T; exit $?')
    assert (code, job.called) == (93, [])
    assert "HF163" in out


TRAINS = "export HOLDFAST_PYTHON=$PWD/launch\n"


@pytest.mark.parametrize(
    ("body", "launches"),
    [
        ("srun torchrun a.py", ["srun torchrun a.py"]),
        ("LAUNCH='srun  torchrun'\n$LAUNCH \\\n  a.py", ["srun torchrun a.py"]),
        ("run() { srun torchrun a.py; }; cd / && PATH=/bin run | tee log", ["srun torchrun a.py"]),
        ("torchrun a.py", ["torchrun a.py"]),
        ("bash -c 'srun torchrun a.py' || true", ["srun torchrun a.py"]),
        ("srun torchrun a.py & wait $!", ["srun torchrun a.py"]),
        ("for s in 1 2; do srun torchrun $s; done", ["srun torchrun 1", "srun torchrun 2"]),
    ],
)
def test_a_launch_is_seen_however_it_is_written_and_the_job_put_back(job, body, launches):
    """Not really: no such job is known to the program that stands for scontrol."""
    asked(job, f"{body}\necho last >>$CALLS")
    saved = [line for launch in launches for line in (f"launch <{launch}>", "saved")]
    assert job.called == [*saved, "last", "scontrol <--oneliner> <show> <job> <7>"]


def asked(job, body, options="", number=signal.SIGUSR2):
    """Run a script whose launch is asked to end; return its code and what it printed."""
    with job.start(f"{TRAINS}{body}", options) as process:
        polled(lambda: [*job.folder.glob("runs/*/attempts")], bool, for_s=20, every_s=0.05)
        process.send_signal(number)
        out = process.communicate(timeout=50)[0]
    return process.returncode, out


def test_the_scripts_last_lines_and_traps_run_before_it_is_put_back(job):
    code, out = asked(
        job,
        """\
trap 'echo exits' EXIT
trap 'echo own trap' USR2
srun torchrun a.py
echo "code $?"
exit 5""",
    )
    assert (code, out.splitlines()[-4:-1]) == (5, ["own trap", "code 91", "exits"]), out


def test_a_signal_of_the_scripts_own_asks_too_and_reaches_its_trap(job):
    body = "trap 'echo own trap' USR1\nsrun torchrun a.py; echo code $?"
    code, out = asked(job, body, "#SBATCH --signal=B:USR1@300\n", signal.SIGUSR1)
    assert (code, "own trap\ncode 91\n" in out) == (0, True), out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
@pytest.mark.parametrize("trap", ["", "trap 'echo exits' EXIT\n"])
def test_a_signal_without_a_trap_leaves_the_script_its_last_lines(job, trap, number):
    code, out = asked(job, f"{trap}srun torchrun a.py; echo code $?", number=number)
    assert (code, "code 91" in out, "exits" in out) == (0, True, bool(trap)), out


@pytest.mark.parametrize("option", ["", "#SBATCH --open-mode=append\n", "#SBATCH --open-mode a\n"])
def test_an_srun_of_the_script_opens_files_as_before(job, option):
    job.env["SLURM_OPEN_MODE"] = "a"  # as Slurm says for ours
    _, out = job.run("echo ${SLURM_OPEN_MODE-none}", option)
    assert out.splitlines()[-1] == ("a" if option else "none")


def test_a_script_ends_by_a_signal_as_before_while_nothing_trains(job):
    with job.start("touch up; sleep 60") as process:
        polled((job.folder / "up").exists, bool, for_s=20, every_s=0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ("sbatch --dependency=afterany:$SLURM_JOB_ID next.sh", "", "restarts its job itself"),
        ("", "#SBATCH --no-requeue\n", ""),
        ("mkdir -p runs/x-7; echo {} >runs/x-7/stop.json", "", ""),
    ],
)
def test_what_is_restarted_otherwise_or_not_at_all_is_not_put_back(job, line, options, said):
    python = f"HOLDFAST_PYTHON={sys.executable}\n"
    code, out = asked(job, f"{python}{line}\n{TRAINS}srun torchrun a.py; exit 6", options)
    assert (code, said in out) == (6, True), out
    assert not [line for line in job.called if line.startswith("scontrol")]


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("sbatch --dependency=afterany:7 x", True),
        ("sbatch -d afternotok:6:7 x", True),
        ("sbatch --dependency singleton x", True),
        ("sbatch --dependency=afterany:77 x", False),
        ("sbatch --begin=now x 7", False),
        ("scontrol requeue 7", True),
        ("scontrol requeue 8", False),
        ("scontrol show job 7", False),
    ],
)
def test_who_restarts_a_job(words, own):
    assert restarts_itself(words.split(), "7") == own


def test_programs_find_nothing_of_ours():
    env = {"A": "1", "PATH": "/a:/f/bin:/b", "HOLDFAST_SCRIPT": "/f", "BASH_FUNC_srun%%": "() {}"}
    assert outside({**env, "T": "/f/bin/torchrun x"}) == {
        "A": "1",
        "PATH": "/a:/b",
        "T": "torchrun x",
    }


def test_what_is_signalled_in_the_background_passes_signals_on(job):
    code, out = job.run(
        """\
cat >programs/srun <<'END'
#!/bin/bash
trap "echo got; exit 7" USR1
touch up
while :; do sleep 0.1; done
END
srun x &
until [[ -e up ]]; do sleep 0.1; done
kill -USR1 $!; wait $!; echo "code $?"
"""
    )
    assert (code, out.splitlines()[:2]) == (0, ["got", "code 7"]), out


def test_each_launch_of_a_job_has_a_run_which_its_next_start_finds(tmp_path, monkeypatch):
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    begun = []
    monkeypatch.setattr("launcher.node.launch.become", lambda argv, _: begun.append(argv[1]))
    for start, order in (("one", "aab"), ("two", "baa")):
        folder = tmp_path / f"holdfast-7-{start}"
        (folder / "launches").mkdir(parents=True)
        (folder / "where").write_text(str(tmp_path))
        monkeypatch.setenv("HOLDFAST_SCRIPT", str(folder))
        for name in order:
            assert run_cli(["batch", "--", "srun", "torchrun", f"{name}.py"]) == 0
    runs = [str(Path(path).parent.relative_to(tmp_path / "runs")) for path in begun]
    assert runs == ["job-7", "job-7-2", "job-7-3", "job-7-3", "job-7", "job-7-2"]
    told = json.loads((tmp_path / "runs/job-7-3/job.json").read_text())
    assert told["command"] == ["b.py"]


DEEPSPEED = """\
import argparse
class Accelerator:
    def set_visible_devices_envs(self, env, ids):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ids))
get_accelerator = Accelerator
def parse_args():
    parser = argparse.ArgumentParser()
    for name in ("module", "no_python", "no_local_rank", "bind_cores_to_rank"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--enable_elastic_training", action="store_true")
    parser.add_argument("--world_info")
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser.parse_args()
def main():
    print("its own")
if __name__ == "__main__":
    main()
"""
WITHOUT_SRUN = """\
export HOLDFAST_PYTHON=$PWD/says PYTHONPATH=$PWD:$PYTHONPATH
ds() {{ {python} -m deepspeed.launcher.launch --world_info="$(base64 -w0 <<<"$1")" "${{@:2}}"; }}
{python} -m torch.distributed.run --nproc_per_node 2 a.py --lr 1
PYTHONPATH=$PWD accelerate launch --multi_gpu --num_processes 2 --main_process_port 29500 b.py
ds '{{"localhost": [0, 1]}}' c.py --deepspeed x
ds '{{"localhost": [2, 5]}}' --no_local_rank --module d e
ds '{{"n1": [0], "n2": [0]}}' --node_rank 1 f.py
ds '{{"localhost": [0]}}' --bind_cores_to_rank g.py
export HOLDFAST_PYTHON={python}
srun env
"""


def test_what_calls_torchrun_without_an_srun_is_seen_where_it_does(job):
    ours = f'[[ $6 != accelerate ]] || exec {sys.executable} "$@"\n'
    (job.folder / "says").write_text(SAYS.replace("\n", f"\n{ours}", 1))
    (job.folder / "says").chmod(0o755)
    launcher = job.folder / "deepspeed" / "launcher"
    launcher.mkdir(parents=True)
    (launcher / "launch.py").write_text(DEEPSPEED)
    job.env["PATH"] = f"{job.env['PATH']}:{Path(sys.executable).parent}"
    code, out = job.run(WITHOUT_SRUN.format(python=sys.executable))
    begin = f"says <-P> <-m> <launcher.cli.main> <batch> <--> <{sys.executable}> <-m> "
    begin += "<torch.distributed.run> "
    assert [call.removeprefix(begin) for call in job.called[:4]] == [
        "<--nproc-per-node=2> <a.py> <--lr> <1>",
        "<--nproc-per-node=2> <--master-port=29500> <b.py>",
        "<--nnodes=1> <--nproc-per-node=2> <c.py> <--local_rank=${local_rank}> <--deepspeed> <x>",
        "<--nnodes=1> <--nproc-per-node=2> <-m> <d> <e>",
    ], out
    envs = [(job.folder / f"calls.env.{call}").read_text() for call in range(5)]
    assert ["CUDA_VISIBLE_DEVICES=2,5" in env for env in envs[:4]] == [*[False] * 3, True]
    assert "LOCAL_SIZE=2" in envs[2]
    assert out.count("its own") == 2, "what agents cannot start runs as before"
    assert (code, job.called[4:]) == (0, ["srun <env>"])
    assert f"PYTHONPATH={job.folder}:{ROOT}\n" in envs[4], "nothing of ours is left there"


SHELL = """\
echo "$SLURM_NODEID of $SLURM_NNODES"
export PATH=/opt/env/bin:$PATH
python --version | cut -c1-6
export HOLDFAST_PYTHON=$PWD/says
torchrun --nnodes 2 'a  b'; echo "code $?"
python3 -u -m torch.distributed.run c
nice -n 1 torchrun d
%s -m torch.distributed.run --rdzv_conf join_timeout=3 "f  g" --lr 1
PYTHONPATH=$PWD
accelerate launch --multi_gpu --num_machines 2 --num_processes 4 --machine_rank 1 \\
  --main_process_ip h --main_process_port 29500 --mixed_precision bf16 h --q
exec torchrun e
"""


@pytest.mark.parametrize("hidden", ["print('hidden')\n", None])
def test_every_python_of_a_script_starts_as_before(tmp_path, hidden):
    if hidden:
        (tmp_path / "sitecustomize.py").write_text(hidden)
    ask = f"import sys; print({HOOK!r} in sys.path, 'holdfast_start' in sys.modules)"
    env = {"HOLDFAST_PYTHON": "x", "HOLDFAST_SCRIPT": "y", "PYTHONPATH": f"{HOOK}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", ask], env=env, capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.splitlines() == [*(["hidden"] if hidden else []), "False True"]
    assert not done.stderr
    # Scripts call old ones too, such as a system's 3.6, which read this file alone.
    text = Path(HOOK, "sitecustomize.py").read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 4))
    assert text.isascii()


def test_a_program_that_is_not_on_a_node_is_said_once(job):
    run = job.folder / "run"
    (run / "attempts" / "7.0").mkdir(parents=True)
    words = [sys.executable, "-P", "-m", "launcher.node", "task", run, "--", "no-such", "a"]
    env = {**job.env, "SLURMD_NODENAME": "n1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (127, False), done.stderr
    assert "n1: no-such: No such file" in done.stdout + done.stderr
    assert (run / "attempts" / "7.0" / "exit" / "n1").read_text() == "127\n"


def test_a_shell_on_a_node_runs_as_it_is_but_for_what_starts_a_training(job):
    (job.folder / "says").write_text(f"{SAYS}exit 7\n")
    (job.folder / "says").chmod(0o755)
    run = job.folder / "run"
    (run / "attempts" / "7.0").mkdir(parents=True)
    own, bin_ = sys.executable, Path(sys.executable).parent
    env = {**job.env, "SLURM_JOB_NODELIST": "n1,n2", "SLURMD_NODENAME": "n2"}
    env["PATH"] = f"{bin_}:{env['PATH']}"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher.node", "task", run, "--", "bash", "-c", SHELL % own],
        cwd=job.folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    words = ["-P", "-m", "launcher.node", "launched", str(run), "--"]
    given = ["torchrun --nnodes 2|a  b", "python3 -u -m torch.distributed.run c", "torchrun d"]
    called = [
        "says" + "".join(f" <{word}>" for word in [*words, *each.replace("|", " ").split(" ")])
        for each in given
    ]
    assert done.stdout.splitlines()[:2] == ["1 of 2", "Python"], done.stderr
    assert "code 7" in done.stdout
    assert job.called[1:3] == called[1:], done.stderr
    assert job.called[0].endswith("<torchrun> <--nnodes> <2> <a  b>")
    python = f"<{own}> <-m> <torch.distributed.run>"
    assert job.called[3].endswith(f"{python} <--rdzv-conf=join_timeout=3> <f  g> <--lr> <1>")
    nodes = "<--nnodes=2> <--nproc-per-node=2> <--rdzv-endpoint=h:29500> <--node-rank=1>"
    assert job.called[4].endswith(f"<torch.distributed.run> {nodes} <h> <--q>")
    assert job.called[5].endswith("<torchrun> <e>")
    assert "ACCELERATE_MIXED_PRECISION=bf16" in (job.folder / "calls.env.4").read_text()
    assert done.returncode == 7
    assert (run / "attempts" / "7.0" / "exit" / "n2").read_text() == "7\n"
