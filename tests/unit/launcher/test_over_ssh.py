"""Sites over SSH: what crosses, and commands that a real sshd runs, of a site with a fake Slurm."""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import sshd
from fake_slurm import FakeSlurm
from hypothesis import given
from hypothesis import strategies as st
from sshd import Sshd

from holdfast import find_site, load_job, submit
from launcher.cli.common import words_of
from launcher.cli.main import cli, run_cli
from launcher.platforms.installed import installed_version
from launcher.platforms.sites import Site
from launcher.runs import over_ssh
from launcher.spec.errors import UserError
from launcher.spec.site_files import VARIABLE
from launcher.spec.source import read_source

ROOT = Path(__file__).parents[3]
JOB = """\
name: tune
command: train.py --lr 3e-4
cluster: {nodes: 2}
slurm: {partition: big}
"""
DEFAULTS = """\
    cluster: {gpus_per_node: 1, gpu: cpu}
    slurm: {account: a-llm, partition: main, time: "60", save_s: 5}
"""
CPU = ["cluster.gpu=cpu", "cluster.gpus_per_node=1"]
SHELLS = [path for name in ("sh", "bash", "zsh", "fish", "tcsh") if (path := shutil.which(name))]

_words = st.text(st.characters(exclude_characters="\0", codec="utf-8")) | st.sampled_from(
    ["", "%", "~", "$(id)", "`id`", "a b", "'", '"', "!x", "=ls", "*", "-n", "\n", "#", "%20", "\\"]
)


@pytest.mark.parametrize("shell", SHELLS)
@given(st.lists(_words, min_size=1, max_size=5))
def test_a_shell_there_leaves_every_word_as_it_is(shell, words):
    line = " ".join(map(over_ssh.encoded, words))
    done = subprocess.run(
        [shell, "-c", f"/usr/bin/printf ':%s\\0' {line}"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    found = done.stdout.decode().split("\0")[:-1]
    assert [over_ssh.decoded(word.removeprefix(":")) for word in found] == words


def test_words_need_not_be_utf8():
    word = os.fsdecode(b"\xff a")
    assert over_ssh.decoded(over_ssh.encoded(word)) == word


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["status", "--json", "--runs", "a b", "one"],
        ["logs", "-f", "--rank", "3", "--rank", "all", "--grep", "-x=", "one"],
        ["shell", "--rank", "3", "one", "--", "nvidia-smi", "-L"],
        ["submit", "--resume", "one", "--set", "slurm.time=1", "--set", "x={a: 1}", "--watch"],
        ["submit", "job.yaml", "--sweep", "values.lr=1,2", "--to", "slurm", "--unseen"],
        ["cancel", "one", "--save"],
    ],
)
def test_a_command_is_asked_for_again_as_it_was(words):
    def parsed(words):
        ctx = cli.make_context("holdfast", list(words))
        name, command, rest = cli.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        return command.make_context(name, rest, parent=ctx)

    ctx = parsed(words)
    assert parsed(words_of(ctx, ctx.params)).params == ctx.params


def test_ssh_asks_for_a_password_only_where_somebody_can_answer():
    site = Site(ssh="me@login", holdfast="~/bin/holdfast")
    script = over_ssh.ssh_argv(site, ["status", "a b"], None, prompts=False, terminal=False)
    assert script[-3:] == ["--", "me@login", "~/bin/holdfast forwarded holdfast status a%20b"]
    assert {"BatchMode=yes", "ConnectTimeout=10", "-T"} < set(script)
    typed = over_ssh.ssh_argv(site, ["status"], None, prompts=True, terminal=True)
    assert "-t" in typed
    assert "BatchMode=yes" not in typed


@pytest.mark.parametrize(
    "site",
    [
        {"ssh": "-oProxyCommand=id"},
        {"ssh": "login; id"},
        {"ssh": "login", "holdfast": "holdfast; id"},
        {"ssh": "login", "holdfast": "-x"},
        {"ssh": "login", "folder": "~/runs"},
    ],
)
def test_a_site_that_no_shell_should_see(site, tmp_path, monkeypatch):
    (tmp_path / "sites.yaml").write_text(json.dumps({"alps": site}))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "sites.yaml"))
    with pytest.raises(UserError) as caught:
        find_site("alps")
    assert caught.value.code == "HF209"


def packed(job):
    sent = over_ssh.pack(load_job(job, CPU))
    with sent.archive, tarfile.open(fileobj=sent.archive) as tar:
        return sent, set(tar.getnames())


def test_what_is_sent_is_what_would_be_frozen_and_the_job_file(tmp_path):
    for name in ("train.py", 'it\'s a "file".txt', ".env", "id_rsa", "pkg/a.py", ".git/config"):
        path = tmp_path / "proj" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    job = tmp_path / "proj" / "job.yaml"
    job.write_text(JOB + "code: {exclude: [job.yaml]}\n")
    sent, names = packed(job)
    assert names == {"train.py", 'it\'s a "file".txt', "pkg/a.py", "job.yaml"}
    assert [warning.code for warning in sent.warnings] == ["HF179"]
    assert (sent.job, sent.sets) == (f"sent/{sent.name}/job.yaml", ())
    again, _ = packed(job)
    assert again.name == sent.name


@pytest.mark.parametrize("absolute", [False, True])
def test_code_beside_the_job_files_folder_stays_beside_it(tmp_path, absolute):
    for name in ("src/train.py", "jobs/notes.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    folder = str(tmp_path / "src") if absolute else "../src"
    (tmp_path / "jobs/job.yaml").write_text(JOB + f"code: {{dir: {folder}}}\n")
    sent, names = packed(tmp_path / "jobs/job.yaml")
    assert names == {"src/train.py", "jobs/job.yaml"}
    assert sent.job.endswith("/jobs/job.yaml")
    assert sent.sets == (('code.dir="../src"',) if absolute else ())


def test_the_name_of_a_folder_of_code_is_a_text(tmp_path):
    (tmp_path / "123").mkdir()
    (tmp_path / "123/train.py").touch()
    (tmp_path / "job.yaml").write_text(JOB + f"code: {{dir: {tmp_path}/123}}\n")
    sent, _ = packed(tmp_path / "job.yaml")
    assert read_source(JOB, "", sent.sets).data["code"] == {"dir": "123"}


@pytest.mark.parametrize("code_dir", [".", "..", "../src", "../linked"])
def test_links_lead_nowhere_else_in_what_is_sent(tmp_path, code_dir):
    """The job file lies in a folder that its own folder of code has under another name, too."""
    for name in ("proj/v2/train.py", "proj/train.py", "proj/src/train.py", "else/src/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "proj/current").symlink_to(tmp_path / "proj/v2")
    (tmp_path / "proj/linked").symlink_to("../else/src")
    job = tmp_path / "proj/current/job.yaml"
    job.write_text(JOB + f"code: {{dir: {code_dir}}}\n")
    spec = load_job(job, CPU)
    sent, there = over_ssh.pack(spec), tmp_path / "there"
    with sent.archive as archive:
        over_ssh.unpack(archive, sent.size, sent.digest, there / over_ssh.SENT / sent.name)
    found = load_job(there / sent.job, [*spec.sets, *sent.sets])
    assert not (there / sent.job).parent.is_symlink()
    local, remote = (
        Path(each.folder, each.code.dir, "train.py").read_text() for each in (spec, found)
    )
    assert remote == local


def test_a_job_file_without_a_folder_is_refused():
    reader, writer = os.pipe()
    os.write(writer, JOB.encode())
    os.close(writer)
    with pytest.raises(UserError) as caught:
        packed(f"/dev/fd/{reader}")
    os.close(reader)
    assert caught.value.code == "HF205"


def test_half_an_archive_leaves_nothing(tmp_path):
    with pytest.raises(UserError) as caught:
        over_ssh.unpack(io.BytesIO(b"short"), 10_240, "0" * 64, tmp_path / "sent" / "one")
    assert caught.value.code == "HF210"
    assert list(tmp_path.iterdir()) == []


def test_another_submission_of_the_same_files_was_faster(tmp_path, monkeypatch):
    for name in ("job.yaml", "train.py"):
        (tmp_path / name).write_text(JOB)
    sent, folder = over_ssh.pack(load_job(tmp_path / "job.yaml", CPU)), tmp_path / "sent" / "one"
    rename = Path.rename

    def late(self, target):
        target.mkdir()
        (target / "job.yaml").touch()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    with sent.archive as archive:
        over_ssh.unpack(archive, sent.size, sent.digest, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["one"]


def test_a_program_cannot_submit_over_ssh():
    with pytest.raises(UserError) as caught:
        submit({"name": "x"}, site=Site(ssh="login"))
    assert caught.value.code == "HF205"


# -- a real sshd ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    sshd.install()
    return Sshd(tmp_path_factory.mktemp("ssh"))


@pytest.fixture
def site(host, tmp_path, monkeypatch):
    """Return the Slurm of the site alps, seen from a folder without one."""
    slurm = FakeSlurm(tmp_path / "slurm", monkeypatch)
    path = f"{slurm.bin}:/usr/bin:/bin"
    program = host.put_holdfast(sys.executable, ROOT, tmp_path / "there", PATH=path)
    (tmp_path / "sites.yaml").write_text(
        f"alps:\n  ssh: login\n  folder: my runs\n  holdfast: {program}\n  target: slurm\n"
        f"  defaults:\n{DEFAULTS}"
        "down: {ssh: down}\n"
        f"without: {{ssh: login, holdfast: {tmp_path}/no-such-program}}\n"
        f"broken: {{ssh: login, holdfast: {host.put('broken', 'exit 255')}}}\n"
    )
    monkeypatch.setenv(VARIABLE, str(tmp_path / "sites.yaml"))
    monkeypatch.setenv("PATH", str(host.bin))
    here = tmp_path / "here it's"
    here.mkdir()
    monkeypatch.chdir(here)
    Path("job.yaml").write_text(JOB)
    Path("train.py").write_text("")
    Path('it\'s a "file".txt').write_text("x")
    Path(".env").write_text("TOKEN=x")
    slurm.there = tmp_path / "there" / "my runs"
    return slurm


def ask(capfd, *words, code=0):
    capfd.readouterr()
    found = run_cli([*words])
    out, err = capfd.readouterr()
    assert found == code, f"{words}: {found}\n{out}\n{err}"
    return out, err


@pytest.mark.process
def test_a_job_of_five_lines_is_submitted_watched_and_cancelled_there(site, capfd):
    out, err = ask(capfd, "submit", "job.yaml", "--site", "alps", "--run-dir", "runs/one", "--json")
    answer, run = json.loads(out), site.there / "runs/one"
    assert (answer["job_id"], answer["run_dir"]) == ("17", str(run))
    assert "HF179" in err
    (frozen,) = (run / "code").glob("*/")
    assert {path.name for path in frozen.iterdir()} == {
        "job.yaml",
        "train.py",
        'it\'s a "file".txt',
    }
    slurm = load_job(run / "job.yaml").slurm
    assert (slurm.account, slurm.partition) == ("a-llm", "big")
    assert not Path("runs").exists()

    status = json.loads(ask(capfd, "status", "--site", "alps", "one", "--json")[0])
    assert status["state"] == "pending"
    assert [each["run"] for each in json.loads(ask(capfd, "list", "--site=alps", "--json")[0])]
    assert "Priority" in ask(capfd, "why", "one", "--site", "alps")[0]
    ask(capfd, "logs", "one", "--site", "alps", "--grep", "a b'\"$(id)")
    site.says("scancel", then="sed -i s/PENDING/CANCELLED/ squeue.out")
    ask(capfd, "cancel", "one", "--site", "alps")
    assert site.calls("scancel")


def test_a_sweep_gives_a_command_the_values_that_the_job_file_leaves_out(site, capfd):
    Path("job.yaml").write_text(JOB.replace("3e-4", "{lr}"))
    words = ["submit", "job.yaml", "--site", "alps", "--sweep", "values.lr=1e-4,3e-4", "--json"]
    answer = json.loads(ask(capfd, *words)[0])
    jobs = [json.loads(Path(run["run"], "job.json").read_text()) for run in answer["runs"]]
    assert [job["command"][-1] for job in jobs] == ["1e-4", "3e-4"]


@pytest.mark.process
def test_the_same_files_are_kept_once_there(site, capfd):
    for name in ("one", "two"):
        ask(capfd, "submit", "job.yaml", "--site", "alps", "--run-dir", f"runs/{name}")
    assert len(list((site.there / "sent").iterdir())) == 1


@pytest.mark.process
def test_what_is_wrong_is_found_here_or_said_from_there(site, host, capfd):
    before = host.calls.read_text() if host.calls.exists() else ""
    out, _ = ask(capfd, "check", "job.yaml", "--site", "alps", "--set", "x=1", "--json", code=2)
    assert [problem["code"] for problem in json.loads(out)["problems"]] == ["HF010"]
    assert (host.calls.read_text() if host.calls.exists() else "") == before, "ssh was called"
    out, _ = ask(capfd, "status", "--site", "nowhere", "--json", code=2)
    assert [problem["code"] for problem in json.loads(out)["problems"]] == ["HF208"]
    words = ["submit", "--resume", "one", "--upgrade", "--site", "alps"]
    assert "HF205" in ask(capfd, *words, code=2)[1]
    assert "HF613" in ask(capfd, "why", "nothing", "--site", "alps", code=2)[1]
    site.says("sbatch", err="sbatch: error: invalid partition specified: big", code=1)
    assert "HF652" in ask(capfd, "submit", "job.yaml", "--site", "alps", code=2)[1]
    assert not (site.there / "runs").exists()


@pytest.mark.process
def test_check_plan_and_render_see_the_other_place(site, capfd):
    for command in ("check", "plan"):
        ask(capfd, command, "job.yaml", "--site", "alps")
    assert str(site.there) in ask(capfd, "render", "job.yaml", "--site", "alps")[0]
    dry = json.loads(ask(capfd, "submit", "job.yaml", "--site", "alps", "--dry-run", "--json")[0])
    assert dry["run_dir"].startswith(str(site.there))
    assert site.calls("sbatch") == []


@pytest.mark.parametrize(
    ("name", "code"), [("down", "HF210"), ("broken", "HF210"), ("without", "HF211")]
)
@pytest.mark.parametrize("words", [("list",), ("submit", "job.yaml", "--set", "cluster.gpu=cpu")])
def test_a_site_that_cannot_be_used(site, capfd, name, code, words):
    sets = [] if words == ("list",) else ["--set", "cluster.gpus_per_node=1"]
    out, _ = ask(capfd, *words, *sets, "--site", name, "--json", code=2)
    assert [problem["code"] for problem in json.loads(out)["problems"]] == [code]


@pytest.mark.process
def test_a_site_with_another_version(site, capfd, monkeypatch):
    assert installed_version() != "9.9"
    monkeypatch.setattr(over_ssh, "installed_version", lambda: "9.9")
    out, _ = ask(capfd, "submit", "job.yaml", "--site", "alps", "--json", code=2)
    assert [problem["code"] for problem in json.loads(out)["problems"]] == ["HF212"]
    assert not site.there.exists()
    ask(capfd, "list", "--site", "alps")


def test_a_machine_without_ssh(site, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "HF650" in ask(capfd, "list", "--site", "alps", code=2)[1]
    (tmp_path / "ssh").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "HF650" in ask(capfd, "list", "--site", "alps", code=2)[1]


def test_more_than_a_command_line_takes(site, capfd):
    words = ["check", "job.yaml", "--site", "alps", "--set"]
    assert "HF205" in ask(capfd, *words, f"env.variables.X={'é' * 30_000}", code=2)[1]


FOLLOW = [sys.executable, "-m", "launcher.cli.main", "logs", "one", "-f", "--site", "alps"]


@pytest.fixture
def followed(site, capfd):
    """Return the environment of FOLLOW, and what says whether it runs there."""
    ask(capfd, "submit", "job.yaml", "--site", "alps", "--run-dir", "runs/one")
    return {**os.environ, "PYTHONPATH": str(ROOT)}, lambda: there(str(site.folder.parent))


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_there_when_a_command_ends_here(followed, how):
    env, runs = followed
    with subprocess.Popen(FOLLOW, env=env, stdin=subprocess.DEVNULL) as process:
        until(runs)
        process.send_signal(how)
        code = process.wait(60)
    assert code == (130 if how == signal.SIGINT else -how)
    until(lambda: not runs())


@pytest.mark.process
def test_on_a_terminal_a_command_has_one_there_and_ctrl_c_goes_through(followed, host):
    env, runs = followed
    ours, its = os.openpty()
    said = b""
    with subprocess.Popen(FOLLOW, env=env, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        try:
            until(runs)
            while b"pending" not in said:
                ready, _, _ = select.select([ours], [], [], 60)
                assert ready, said
                said += os.read(ours, 4096)
            os.write(ours, b"\x03")
            assert process.wait(60) == 130
        finally:
            process.kill()
            os.close(ours)  # which ends ssh too
    until(lambda: not runs())
    options = host.calls.read_text().splitlines()[-1].split()
    assert "-t" in options
    assert "BatchMode=yes" not in options


def there(mine):
    """Return the commands of the site whose home is in the folder `mine`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"forwarded" in words and mine.encode() in (path / "environ").read_bytes():
                found.append(words)
        except OSError:
            continue
    return found


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
