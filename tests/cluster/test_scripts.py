"""Scripts of others, and one's own loop by the API: real agents, real workers, killed nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import event_files

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
HOLDFAST = [sys.executable, "-m", "launcher.cli.main"]
DEADLINE_S = 100.0
"""Two cores, and several agents that import torch at once."""
pytestmark = pytest.mark.timeout(300)


class Agents:
    """`holdfast agent` on emulated nodes that share one endpoint."""

    def __init__(self, folder):
        self.folder, self.record = folder, folder / "shared" / folder.name
        self.running = {}

    def start(self, *script, nodes=1, least=1, flags=(), job="one"):
        for index in range(1, nodes + 1):
            argv = ["--nnodes", f"{least}:{nodes}", "--rdzv-endpoint", str(self.folder / "shared")]
            argv += ["--rdzv-id", self.folder.name, "--node", f"n{index}", "--job", job]
            argv += ["--local-addr", f"127.0.2.{index}", *flags, *map(str, script)]
            out = (self.folder / f"n{index}.{job}.out").open("wb")
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            self.running[f"n{index}"] = subprocess.Popen(
                [*HOLDFAST, "agent", *argv], env=env, cwd=self.folder, stdout=out, stderr=out
            )
            out.close()

    def events(self, name):
        found = []
        for path in event_files(self.record):
            lines = path.read_text().splitlines(keepends=True)
            found += [json.loads(line) for line in lines if line[-1:] == "\n"]
        return sorted((e for e in found if e["event"] == name), key=lambda e: e["t_mono"])

    def until(self, what, condition):
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}\n{self.said()}"
            time.sleep(0.02)
        return found

    def until_step(self, step):
        self.until(
            f"no step {step}",
            lambda: [e for e in self.events("script.progress") if e["step"] >= step],
        )

    def said(self):
        return "\n".join(
            f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob("*.out"))
        )

    def logs(self):
        paths = sorted((self.record / "logs").rglob("*.stdout.log"))
        return "".join(path.read_text() for path in paths)

    def codes(self):
        return {name: agent.wait(DEADLINE_S) for name, agent in self.running.items()}

    def coordinator(self):
        return self.events("coordinator.elected")[-1]["node"]

    def close(self):
        for agent in self.running.values():
            agent.kill()
            agent.wait()


@pytest.fixture
def agents(tmp_path):
    agents = Agents(tmp_path)
    yield agents
    agents.close()


def start_job(name, run_dir, *more):
    """Return the command `holdfast run`, ended."""
    return subprocess.run(
        [*HOLDFAST, "run", str(EXAMPLES / name), "--run-dir", str(run_dir), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def run_job(name, run_dir, *more):
    done = start_job(name, run_dir, "--json", *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def losses(text):
    """Return epoch or step -> loss, as the examples print them."""
    return {int(n): float(x) for n, x in re.findall(r"(?:epoch|step) (\d+) loss (\S+)", text)}


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("how", "flags"),
    [
        ("zygote", []),
        pytest.param("fresh", ["--no-python", sys.executable], marks=pytest.mark.slow),
    ],
)
def test_an_unmodified_script_outlives_the_node_that_hosts_its_store(agents, how, flags):
    script = EXAMPLES / "ddp_tutorial.py"
    pattern = ["--progress-pattern", r"epoch (\d+) loss"] if how == "fresh" else []
    # Seconds of training: the node dies well before the end, also where this process waits.
    program = [*flags, script, "60", "1", "--batch_size", "32"]
    program += ["--snapshot_path", "{run_dir}/snapshot.pt"]
    agents.start(*program, nodes=2, flags=["-t", "3", "--max-restarts", "3", *pattern])
    agents.until_step(1)
    agents.until("no snapshot", (agents.record / "snapshot.pt").exists)
    lost = agents.coordinator()
    agents.running[lost].kill()
    codes = agents.codes()
    assert codes.pop(lost) == -signal.SIGKILL
    assert list(codes.values()) == [0], agents.said()
    assert {e["how"] for e in agents.events("workers.started")} == {how}
    assert agents.events("epoch.formed")[-1]["members"] == list(codes)
    said = (agents.folder / f"{next(iter(codes))}.one.out").read_text()
    resumed = int(
        re.search(r"^\[default0\]:rank 0: resuming at epoch (\d+)$", said, re.MULTILINE)[1]
    )
    assert 1 <= resumed < 60
    assert losses(said)[60] < 4.0
    log = next((agents.record / "logs" / "0" / next(iter(codes))).glob("0.stdout.log"))
    assert "epoch 60 loss" in log.read_text()
    # 32 steps an epoch of the data on two nodes, 64 on the one that is left.
    steps = 60 if how == "fresh" else 32 * resumed + 64 * (60 - resumed)
    reason = agents.events("job.stopped")[-1]["reason"]
    assert re.findall(r"\d+", reason) == [str(steps)], "of the training, not since the restart"
    assert agents.events("script.progress")[-1]["step"] == steps


OWN_LOOP = "holdfast run examples/own_loop.yaml --fault kill-node:1@40 --run-dir runs/own"


def test_own_loop_loses_no_step_and_computes_what_one_process_does(tmp_path):
    assert OWN_LOOP in commands(), "with a look at what it computes"
    summary = run_job(
        "own_loop.yaml", tmp_path / "run", "--set", "train.steps=200", "--fault", "kill-node:1@40",
        "--set", "command=own_loop.py --steps 200 --print_every 1",
    )  # fmt: skip
    # A step whose copies were still on their way when the node died was not committed.
    redone = summary["committed_steps_redone"]
    assert (summary["state"], summary["steps"], redone) == ("finished", 200, 0)
    assert [failure["kind"] for failure in summary["failures"]] == ["node_lost"]
    assert summary["failures"][0]["recovered_s"] is not None
    alone = subprocess.run(
        [sys.executable, EXAMPLES / "own_loop.py", "--steps", "200", "--print_every", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "holdfast: " in alone.stderr
    logs = sorted((tmp_path / "run" / "logs").rglob("[0-9].log"))
    curve = losses("".join(path.read_text() for path in logs))
    expected = losses(alone.stdout)
    assert curve.keys() == expected.keys() == set(range(1, 201))
    assert max(abs(curve[step] - expected[step]) for step in curve) < 1e-3
    assert "step 200 loss" in alone.stdout
    assert f"samples {200 * 48}" in "".join(path.read_text() for path in logs)


def test_own_loop_is_stopped_at_one_step_and_goes_on_from_storage(agents):
    program = [EXAMPLES / "own_loop.py", "--steps", "100000"]
    agents.start(*program, nodes=2)
    agents.until_step(60)
    agents.running["n1"].send_signal(signal.SIGTERM)
    assert agents.codes() == {"n1": 91, "n2": 91}, agents.said()
    stopped = agents.events("trainer.stopping")[-1]["step"]
    assert agents.events("worker.signalled") == []
    agents.start(*program, job="two", flags=["--nproc-per-node", "2"])
    agents.until("not resumed", lambda: len(agents.events("trainer.started")) == 2)
    started = agents.events("trainer.started")[-1]
    assert (started["resume_step"], started["restored_from"]) == (stopped, "storage")
    agents.running["n1"].send_signal(signal.SIGINT)
    assert agents.running["n1"].wait(DEADLINE_S) == 91


@pytest.mark.slow
def test_a_script_that_takes_no_requests_is_ended_by_sigterm(agents):
    agents.start(EXAMPLES / "ddp_tutorial.py", "100000", "100")
    agents.until_step(10)
    agents.running["n1"].send_signal(signal.SIGTERM)
    assert agents.codes() == {"n1": 91}
    assert re.match(r"SIGTERM\b.* step \d", agents.events("job.stopped")[-1]["reason"])


LEAVES = """
import json, os, signal, sys, time
from pathlib import Path
import torch

run, total, code = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # counts no steps
saved = run / "saved.json"
step = json.loads(saved.read_text()) if saved.exists() else 0
print("world", os.environ["WORLD_SIZE"], "resumed", step, flush=True)
left = []
signal.signal(signal.SIGTERM, lambda *_: left.append(True))
while step < total and not left:
    optimizer.step()
    step += 1
    time.sleep(0.02)
if os.environ["RANK"] == "0":
    saved.write_text(json.dumps(step))
sys.exit(code if left else 0)
"""


@pytest.mark.parametrize(
    ("code", "flags"),
    [
        (1, []),
        *(
            pytest.param(code, flags, marks=pytest.mark.slow)
            for code, flags in ((0, []), (0, ["--on-term", "leave"]), (143, []), (91, []))
        ),
    ],
)
def test_however_a_script_leaves_on_request_the_job_has_stopped_and_is_not_done(
    agents, code, flags
):
    (agents.folder / "leaves.py").write_text(LEAVES)
    agents.start("leaves.py", "{run_dir}", 10**6, code, nodes=2, flags=flags)
    agents.until_step(10)
    for agent in agents.running.values():
        agent.send_signal(signal.SIGTERM)
    assert agents.codes() == {"n1": 91, "n2": 91}, agents.said()
    reason = agents.events("job.stopped")[-1]["reason"]
    assert ("saved at step" in reason) == (code == 91), reason
    assert agents.events("worker.exit") == []


@pytest.mark.slow
def test_a_stopped_run_goes_on_by_resume_and_its_steps_count_on(tmp_path):
    (tmp_path / "leaves.py").write_text(LEAVES)
    (tmp_path / "job.yaml").write_text(
        "name: leaves\ncommand: leaves.py {run_dir} 300 0\ntrain: {steps: 300}\n"
        "cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}\n"
    )
    run, job = tmp_path / "run", str(tmp_path / "job.yaml")
    first = subprocess.Popen(
        [*HOLDFAST, "run", job, "--run-dir", str(run)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def shown():
        text = "".join(path.read_text() for path in (run / "events").glob("script-*"))
        return [json.loads(line)["step"] for line in text.splitlines(True) if line[-1:] == "\n"]

    deadline = time.monotonic() + DEADLINE_S
    while not shown() or max(shown()) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=DEADLINE_S)
    stopped = int((run / "saved.json").read_text())
    assert first.returncode == 130, said
    assert f"step {stopped}" in said
    assert "--resume" in said
    before = len(shown())
    done = subprocess.run(
        [*HOLDFAST, "run", "--resume", str(run), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert shown()[before] > stopped, "counted on"
    assert shown()[-1] == 300
    summary = json.loads(done.stdout)
    assert (summary["state"], summary["steps"], summary["attempts"]) == ("finished", 300, 2)


@pytest.mark.slow
def test_a_script_keeps_its_world_size_and_waits_for_the_node(tmp_path):
    (tmp_path / "leaves.py").write_text(LEAVES)
    (tmp_path / "job.yaml").write_text(
        "name: fixed\ncommand: leaves.py {run_dir} 200 0\n"
        "cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}\n"
    )
    run = tmp_path / "run"
    summary = run_job(
        tmp_path / "job.yaml", run, "--fault", "kill-node:1@20", "--fault", "return-node@100000"
    )
    assert summary["state"] == "finished"
    logs = "".join(path.read_text() for path in sorted((run / "logs").rglob("[0-9].log")))
    assert set(re.findall(r"world (\d+)", logs)) == {"2"}
    events = "".join(path.read_text() for path in (run / "events").glob("agent-*.jsonl"))
    assert '"event":"membership.parked"' in events


WORLD = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), "of", os.environ["WORLD_SIZE"], flush=True)
dist.barrier()
"""


def start_two(agents, *, first, second, nodes="2"):
    """Start two agents of one job whose command lines differ."""
    (agents.folder / "world.py").write_text(WORLD)
    for index, (flags, args) in enumerate((first, second), start=1):
        argv = ["--nnodes", nodes, "--rdzv-endpoint", str(agents.folder / "shared")]
        argv += ["--rdzv-id", agents.folder.name, "--node", f"n{index}"]
        argv += ["--local-addr", f"127.0.2.{index}", *flags, "world.py", *args]
        with (agents.folder / f"n{index}.out").open("wb") as out:
            agents.running[f"n{index}"] = subprocess.Popen(
                [*HOLDFAST, "agent", *argv],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                cwd=agents.folder,
                stdout=out,
                stderr=out,
            )


def test_nodes_with_other_numbers_of_workers_are_refused_and_both_are_named(agents):
    two, one = ["--nproc-per-node", "2"], ["--nproc-per-node", "1"]
    start_two(agents, first=(two, []), second=(one, []), nodes="1:2")
    (refused,) = agents.until("nobody is refused", lambda: agents.events("member.refused"))
    odd = agents.running[refused["member"]]
    assert odd.wait(DEADLINE_S) == 93
    exits = agents.events("agent.exit")
    for reason in (refused["reason"], exits[0]["reason"]):
        assert "HF527" in reason
        assert sorted(re.findall(r"(\d) on (\w+)", reason)) == [("1", "n2"), ("2", "n1")]
    assert agents.events("epoch.formed") == []


def test_nodes_with_other_arguments_train_and_both_are_told(agents):
    start_two(agents, first=([], ["--tag", "left"]), second=([], ["--tag", "right"]))
    assert agents.codes() == {"n1": 0, "n2": 0}, agents.said()
    for index in (1, 2):
        said = (agents.folder / f"n{index}.out").read_text()
        assert "HF528" in said
        values = [re.search(rf"--tag \((\w+)\) on {node}", said) for node in ("n1", "n2")]
        assert all(values)
        assert values[0][1] != values[1][1]
        assert not re.search("left|right", said)  # a value may be a secret


DIVISIBLE = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
world = dist.get_world_size()
assert 4 % world == 0
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
print("world", world, flush=True)
enough = torch.zeros(1)
while not enough:
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    enough.fill_((folder / "enough").exists())
    dist.all_reduce(enough)  # all see the file, or none
"""


@pytest.mark.parametrize(
    ("least", "code"),
    [(2, 0), pytest.param(3, 92, marks=pytest.mark.slow)],
    ids=["a smaller rung", "no smaller rung"],
)
def test_a_number_of_nodes_that_the_script_cannot_run_on_is_not_its_failure(agents, least, code):
    (agents.folder / "divisible.py").write_text(DIVISIBLE)
    conf = ["--rdzv-conf", "join_timeout_s=20,start_ceiling_s=60"]
    agents.start("divisible.py", agents.folder, nodes=4, least=least, flags=conf)
    agents.until_step(5)
    follower = next(name for name in ("n3", "n4") if name != agents.coordinator())
    lost = agents.running.pop(follower)
    lost.kill()
    lost.wait()
    (dropped,) = agents.until("nothing is dropped", lambda: agents.events("rung.dropped"))
    assert dropped["nodes"] == 3
    assert "AssertionError" in dropped["reason"]
    if code == 0:
        worlds = [len(e["members"]) for e in agents.events("epoch.formed")]
        assert worlds[:2] == [4, 3]
        agents.until("it does not train", lambda: "world 2" in agents.logs())
        (agents.folder / "enough").touch()
    assert set(agents.codes().values()) == {code}, agents.said()


HANGS = """
import os, sys, time
import torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
for step in range(15):
    optimizer.step()
    time.sleep(0.05)  # the agent sees more than one: the start is over
    if os.environ["HOLDFAST_EPOCH"] == "1" and step == 9:
        while True:
            pass  # busy, and gets nowhere
time.sleep(2.5)  # longer than the ceiling is said to be, but it has begun to leave
"""


BEGINS_ANEW = """
import pathlib, sys, time
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters())
path, done = pathlib.Path(sys.argv[2]), 0
if sys.argv[1] == "resumes" and path.exists():
    state = torch.load(path)
    optimizer.load_state_dict(state["optimizer"])
    done = state["done"]
for step in range(done + 1, 81):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        torch.save({"optimizer": optimizer.state_dict(), "done": step}, f"{path}.new")
        pathlib.Path(f"{path}.new").replace(path)
    time.sleep(0.03)
"""


@pytest.mark.parametrize(
    ("how", "sets", "code", "from_scratch"),
    [
        ("begins-anew", [], 93, [2, 3]),
        pytest.param(
            "begins-anew", ["elastic.from_scratch=true"], 0, [2, 3], marks=pytest.mark.slow
        ),
        ("resumes", [], 0, []),
    ],
)
def test_a_script_that_begins_from_scratch_is_told_and_the_second_time_in_a_row_ended(
    how, sets, code, from_scratch, tmp_path
):
    (tmp_path / "train.py").write_text(BEGINS_ANEW)
    job = {
        "name": "anew",
        "command": f"train.py {how} {{run_dir}}/state.pt",
        "train": {"steps": 80},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    kills = ["--fault", "kill-worker:0@25", "--fault", "kill-worker:0@50"]
    options = [word for each in sets for word in ("--set", each)]
    done = start_job(tmp_path / "job.yaml", tmp_path / "run", *kills, *options)
    assert done.returncode == (2 if code else 0), done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["code"] == code
    assert [each["epoch"] for each in summary["from_scratch"]] == from_scratch
    assert summary["steps_redone"] > (50 if from_scratch else 0)
    if not code:
        assert summary["layouts"][-1]["to_step"] == 80
    said = done.stdout + done.stderr
    assert ("HF517" in said) == bool(code)
    assert ("from scratch" in said) == bool(from_scratch)
    assert "first failure" not in said, "each kill was recovered from"


def test_a_script_without_progress_hangs_and_one_that_never_showed_any_does_not(agents):
    (agents.folder / "hangs.py").write_text(HANGS)
    agents.start("hangs.py", flags=["--rdzv-conf", "hang_ceiling_s=3,start_ceiling_s=60"])
    assert agents.codes() == {"n1": 0}, agents.said()
    hung = agents.events("worker.hung")
    assert [(e["epoch"], e["section"]) for e in hung] == [(1, "step")]
    assert [e["epoch"] for e in agents.events("epoch.formed")] == [1, 2]


FAILS_ONCE = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=sys.argv[1], world_size=world, rank=rank)
total = torch.ones(1)
dist.all_reduce(total)
mark = Path(sys.argv[2])
if rank == 0 and not mark.exists():
    mark.touch()
    sys.exit(5)
dist.barrier()
print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], total.item(), flush=True)
dist.destroy_process_group()
"""


def test_a_script_meets_at_the_port_of_the_command_line_again_after_a_restart(tmp_path):
    (tmp_path / "script.py").write_text(FAILS_ONCE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = [*HOLDFAST, "agent", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
        argv += ["--master-addr=localhost", f"--master-port={port}", "script.py"]
        argv += [f"tcp://127.0.0.1:{port}", str(tmp_path / "mark")]

        def run():
            env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
            return subprocess.run(
                argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
            )

        refused = run()
        assert refused.returncode == 93, refused.stderr
        assert f"HF512 --master-port {port}" in refused.stderr
        assert not (tmp_path / "mark").exists()
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"localhost {port} 2.0"] * 2


def test_arguments_follow_the_rung(tmp_path):
    (tmp_path / "show.py").write_text("import sys; print('args', *sys.argv[1:])")
    (tmp_path / "job.yaml").write_text(
        "name: show\n"
        "command: show.py {dp} {tp} {pp} {cp} {nodes} {world_size} {{dp}} '; false' {run_dir}\n"
        "layout: {tp: 2, dp: auto}\n"
        "cluster: {nodes: 2, gpus_per_node: 2, gpu: cpu}\n"
        "elastic: {min_nodes: 1}\n"
    )
    run_job(tmp_path / "job.yaml", tmp_path / "run", "--nodes", "1")
    log = (tmp_path / "run" / "logs" / "1" / "node0" / "1.log").read_text()
    assert f"args 1 2 1 1 1 2 {{dp}} ; false {tmp_path}/run" in log.splitlines()


def commands():
    """Return the commands of docs/scripts.md's sh blocks, but for those that install."""
    text = (ROOT / "docs" / "scripts.md").read_text()
    blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [line for line in blocks.splitlines() if line and not line.startswith(("#", "pip "))]


READERS_OWN = {
    "train.sbatch": """\
#!/bin/bash
#SBATCH --nodes=2
srun --ntasks-per-node=1 torchrun --nnodes 1:2 --nproc-per-node 8 \\
    --rdzv-backend c10d --rdzv-endpoint "$(hostname):29500" train.py
""",
    "job.yaml": """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: own}
spec:
  elasticPolicy: {rdzvBackend: c10d, minReplicas: 1, maxReplicas: 2}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: pytorch
              image: registry.local/train:1
              command: [torchrun, --nproc-per-node, "8", train.py]
              volumeMounts: [{name: shared, mountPath: /shared}]
          volumes: [{name: shared, persistentVolumeClaim: {claimName: runs}}]
""",
}
"""What the page's reader has. tests/slurm and tests/kubernetes submit such files."""


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in commands() if line != OWN_LOOP])
def test_every_command_of_the_page_works(line, tmp_path):
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs"))
    (tmp_path / "bin").mkdir()
    programs = {"holdfast": "launcher.cli.main", "torchrun": "torch.distributed.run"}
    for name, module in programs.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        program.chmod(0o755)
    for name, option in {"sbatch": "", "kubectl": "create -f "}.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\n[ "$*" = "{option}$(ls wrapped.*)" ]\n')
        program.chmod(0o755)
    for name, text in READERS_OWN.items():
        (tmp_path / name).write_text(text)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-c", line.replace("/shared", str(tmp_path))],
        cwd=tmp_path,
        env={**env, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
