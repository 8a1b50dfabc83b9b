"""Whatever stands in a job file stays a value: the script is run with stubs and compared."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sbatch_lines import directives, has_sbatch, real_directives

from launcher.plan.planning import plan
from launcher.render.sbatch import render_slurm
from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec
from launcher.spec.sections import Env
from launcher.spec.slurm import Slurm

CANARY = "canary"
ATTACKS = (
    f"$(touch {CANARY})", f"`touch {CANARY}`", f"; touch {CANARY} #", f"' ; touch {CANARY}; '",
    f'" ; touch {CANARY}; "', f"\\' ; touch {CANARY}; \\'", f'\\"; touch {CANARY}; \\"',
    f"&& touch {CANARY}", f"| touch {CANARY}", f"\ntouch {CANARY}\n", f"\rtouch {CANARY}",
    f">{CANARY}", "${HOME}", "$HOME", "~", "~root", "*", "?", "[a-z]", "{a,b}", "!!", "-rf",
    "--wrap=x", "\\", "'", '"', "'\"'\"'", "#", "# x", " # x", "%j", "%%", "%", "{{ 7 * 7 }}",
    "{% raw %}", "{#", "EOF", "#SBATCH --uid=0", "\n#SBATCH --uid=0", "packjob", "a b", " ", "é",
    "\u2028", "😀", "\x85", "\ud800", "\x00", "\x1b[31m", "x" * 300, "=", "=a", "null", "a:b",
    "a,b",
)  # fmt: skip
HOSTILE = st.one_of(
    st.sampled_from(ATTACKS),
    st.lists(st.sampled_from(ATTACKS), min_size=2, max_size=3).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
)
TEXT_KEYS = (
    "slurm.partition", "slurm.account", "slurm.qos", "slurm.constraint", "slurm.reservation",
    "slurm.time", "slurm.version", "slurm.gpu_type", "slurm.gres", "slurm.mem", "slurm.switches",
    "slurm.mem_per_cpu",
    "slurm.array", "slurm.dependency", "slurm.comment", "slurm.mail_user", "slurm.mail_type",
    "slurm.container", "slurm.python", "slurm.fabric", "slurm.fabric_devices", "slurm.restart",
    "slurm.umask", "slurm.group", "slurm.exclude.0", "slurm.extra.0", "slurm.container_mounts.0",
    "slurm.modules.0", "slurm.setup.0", "env.inherit.0", "env.venv", "env.image",
    "env.variables.A", "env.secrets.S.file", "env.secrets.S.env", "network.interface",
    "network.cidr", "network.ports", "data.path", "data.tokenizer", "checkpoint.dir", "code.dir",
    "code.exclude.0", "model", "cluster.gpu", "name", "kubernetes.namespace",
)  # fmt: skip
SHOWN = {"slurm.constraint", "slurm.comment", "slurm.mail_user"}
JOB = {
    "name": "a-job",
    "model": "tiny",
    "cluster": {"nodes": 2, "gpus_per_node": 1, "gpu": "H100-80GB-SXM"},
    "train": {"seq_len": 128, "global_batch": 8, "steps": 5},
    "data": {"path": "corpus"},
}
CALLED = ("srun", "sbatch", "scancel", "scontrol")
STUB = """\
#!/bin/bash
[[ ${4-} != steps ]] || { shift 6; exec "$@"; }
# Writes down how it was called, each text with a NUL behind it, and ends as it is told to.
printf '%s\\0' "${0##*/}" "$@" '' >>"$SLURM_STUB_LOG"
[[ ${0##*/} != srun ]] || env -0 >"$SLURM_STUB_LOG.env"
exit 0
"""
FUNCTIONS = """\
eval() { printf '%s\\0' eval "$@" '' >>"$SLURM_STUB_LOG"; }
module() { printf '%s\\0' module "$@" '' >>"$SLURM_STUB_LOG"; }
"""


def job_with(values):
    """Return the job with the values of dotted keys set; a last part 0 makes a list of one."""
    job = json.loads(json.dumps(JOB))
    for key, value in values.items():
        *outer, last = key.split(".")
        here = job
        if last == "0":
            *outer, last = outer
        for part in outer:
            here = here.setdefault(part, {})
        here[last] = [value] if key.endswith(".0") else value
    return json.dumps(job)


def script_of(values, folder):
    spec = parse_spec(job_with(values))
    bundle = render_slurm(
        spec,
        plan(spec),
        run_id="r-1",
        run_dir=folder / "run",
        base_dir=folder,
        python=str(folder / "bin" / "python"),
    )
    json.loads(next(text for name, text in bundle.items() if name.endswith("job.json")))
    return spec, bundle["job.sbatch"]


def script_or_codes(values, folder):
    """Return the script, or the codes that the job is refused with."""
    try:
        return script_of(values, folder)[1]
    except UserError as error:
        return {problem.code for problem in error.problems}


def accepted(key, value, folder):
    """Whether the job file may have this value; what it may not have is not our business here."""
    return isinstance(script_or_codes({key: value}, folder), str)


def bash_reads(script, folder):
    path = folder / "job.sbatch"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run(["bash", "-n", path], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b""), script
    return path


def run_script(script, folder, *, env=()):
    """Run a script with stubs for all it calls; return the calls, the environment and its code."""
    path, log = bash_reads(script, folder), folder / "calls"
    log.unlink(missing_ok=True)
    # bash expands BASH_ENV itself, and PATH parts at colons: neither lies in a hostile place.
    functions = Path(os.environ["HOLDFAST_TEST_FUNCTIONS"])
    bin_dir = functions.parent / "stubs"
    for name in (*(bin_dir / name for name in CALLED), folder / "bin" / "python"):
        name.parent.mkdir(exist_ok=True)
        name.write_text(STUB)
        name.chmod(0o755)
    (folder / "run" / "attempts" / "7.0").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["bash", path],
        cwd=folder,
        env={
            "PATH": f"{bin_dir}:{os.environ['PATH']}", "HOME": "/home/me",
            "SLURM_STUB_LOG": str(log), "BASH_ENV": str(functions),
            "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_ARRAY_TASK_ID": "3", "SLURM_CPUS_PER_TASK": "4", **dict(env),
        },
        capture_output=True,
        check=False,
        timeout=60,
    )  # fmt: skip
    assert not list(folder.rglob(CANARY)), script
    text = log.read_bytes().decode() if log.exists() else ""
    calls = [call.split("\0") for call in text.split("\0\0") if call]
    listed = Path(f"{log}.env").read_bytes().decode() if Path(f"{log}.env").exists() else ""
    found = dict(line.split("=", 1) for line in listed.split("\0") if line)
    return calls, found, done


@pytest.fixture
def folder(tmp_path, monkeypatch):
    functions = tmp_path / "functions"
    functions.write_text(FUNCTIONS)
    monkeypatch.setenv("HOLDFAST_TEST_FUNCTIONS", str(functions))
    return tmp_path


def test_the_keys_tried_are_all_that_take_texts():
    def texts(section, path):
        for key, field in section.model_json_schema()["properties"].items():
            kinds = json.dumps({k: v for k, v in field.items() if k != "description"})
            if '"string"' in kinds:
                yield f"{path}{key}"

    found = {*texts(Slurm, "slurm."), *texts(Env, "env.")}
    tried = {".".join(key.split(".")[:2]) for key in TEXT_KEYS}
    assert found - tried == set()


@pytest.mark.parametrize("key", TEXT_KEYS)
def test_each_key_takes_an_attack_as_a_value_or_refuses_it(key, folder):
    usual = {option.partition("=")[0] for option in directives(script_of({}, folder)[1])}
    usual |= {"--gres", "--no-requeue"}
    name = "--" + (key.split(".")[1].replace("_", "-") if key.startswith("slurm.") else "")
    for attack in ATTACKS[::2] if key in SHOWN else ATTACKS[::5]:
        script = script_or_codes({key: attack}, folder)
        if isinstance(script, set):
            continue
        bash_reads(script, folder)
        for option in directives(script):
            first, equals, held = option.partition("=")
            assert first in {*usual, name} or option == attack, script
            if first == name and key in SHOWN:
                assert (equals, held) == ("=", attack)


WRITTEN = st.fixed_dictionaries({
    **{f"slurm.{key}": HOSTILE for key in ("comment", "constraint", "mail_user")},
    "slurm.setup": st.lists(HOSTILE, max_size=2),
    "env.variables": st.dictionaries(st.sampled_from(["A", "b_1", "LONG_NAME"]), HOSTILE),
    "env.venv": HOSTILE,
    "network.interface": HOSTILE,
})  # fmt: skip


@given(written=WRITTEN)
def test_what_a_script_sets_and_calls_is_what_was_written(folder, written):
    values = {key: value for key, value in written.items() if accepted(key, value, folder)}
    values["slurm.python"] = str(folder / "bin" / "python")
    spec, script = script_of(values, folder)
    calls, env, done = run_script(script, folder)
    assert done.returncode == 0, done.stderr
    for key in SHOWN & values.keys():
        option = key.removeprefix("slurm.").replace("_", "-")
        assert f"--{option}={values[key]}" in directives(script)
    evaluated = [call[1:] for call in calls if call[0] == "eval"]
    assert evaluated == [[command] for command in values.get("slurm.setup", [])]
    for name, value in spec.env.variables.items():
        assert env[name] == value
    interface = values.get("network.interface", "auto")
    if interface != "auto":
        assert env["GLOO_SOCKET_IFNAME"] == interface
        assert env["NCCL_SOCKET_IFNAME"] == f"={interface}"
    if "env.venv" in values:
        assert env["VIRTUAL_ENV"] == str(folder / Path(values["env.venv"]).expanduser())
    steps = [call[-2:] for call in calls if call[0] == "python"]
    run = str(folder / "run")
    assert [step for step in steps if step[0] != "beat"] == [["begin", run], [run, "0"]]


@given(name=st.one_of(st.sampled_from(ATTACKS), HOSTILE), secret=HOSTILE)
def test_places_with_any_name_are_reached_and_secrets_are_read_from_files(folder, name, secret):
    base = folder / "".join(name.split("/"))[:60].replace("\0", "")
    if base.name in ("", ".", "..") or "\ud800" in name + secret or "\0" in secret:
        return
    base.mkdir(exist_ok=True)
    (base / "token").write_text(secret, encoding="utf-8", newline="")
    values = {"env.secrets": {"S": {"file": str(base / "token")}, "T": {"env": "FROM_HOME"}}}
    script = script_or_codes(values, base)
    if isinstance(script, set):
        assert script <= {"HF015", "HF166"}
        return
    assert "very secret" not in script
    (base / "bin").mkdir(exist_ok=True)
    calls, env, done = run_script(script, base, env={"FROM_HOME": "very secret"})
    assert done.returncode == 0, done.stderr
    assert env["S"] == secret.rstrip("\n")
    assert env["T"] == "very secret"
    (srun,) = [call for call in calls if call[0] == "srun"]
    logs = str(base / "run").replace("%", "%%") + "/logs"
    assert f"--output={logs}/7.0/%N.log" in srun
    python = str(base / "bin" / "python")
    assert srun[-6:] == [python, "-P", "-m", "launcher.node", "agent", str(base / "run")]
    assert f"--chdir={base / 'run'}" in directives(script)
    assert f"--output={logs}/slurm-%j.out" in directives(script)


@given(image=HOSTILE, mount=HOSTILE, runtime=st.sampled_from(["pyxis", "apptainer"]))
def test_images_and_mounts_with_any_name(folder, image, mount, runtime):
    values = {"env.image": image, "slurm.container_mounts": [f"/{mount}"]}
    script = script_or_codes({**values, "slurm.container": runtime}, folder)
    if isinstance(script, set):
        assert script <= {"HF015", "HF163"}
        return
    calls, _, done = run_script(script, folder)
    assert done.returncode == 0, done.stderr
    srun = next(call for call in calls if call[0] == "srun" and "watchdog" not in call)
    run, mounted = folder / "run", f"/{mount}"
    mounts = f"{run}:{run},{folder / 'corpus'}:{folder / 'corpus'},{mounted}"
    if runtime == "pyxis":
        assert f"--container-image={image}" in srun
        assert f"--container-mounts={mounts}" in srun
        assert srun[-7:-2] == ["python3", "-P", "-m", "launcher.node", "agent"]
    else:
        inside = ["--", "apptainer", "exec", "--nv", "--bind", mounts, image]
        assert srun[-len(inside) :] == inside


def test_a_container_has_all_that_is_read(folder):
    values = {
        "env.image": "/i.sif", "slurm.container": "apptainer", "data.format": "sft",
        "data.path": "/d/a.jsonl", "data.tokenizer": "/t/tokenizer.json",
        "validation.path": "/v/b.jsonl", "validation.every_steps": 2,
    }  # fmt: skip
    _, script = script_of(values, folder)
    for place in ("/d/a.jsonl", "/v/b.jsonl", "/t"):  # the chat template is in /t too
        assert f"{place}:{place}" in script


def test_a_secret_that_is_not_there_stops_the_job(folder):
    (folder / "run").mkdir()
    for secret in ({"file": "/nowhere/token"}, {"env": "NOT_SET"}):
        _, script = script_of({"env.secrets": {"S": secret}}, folder)
        calls, _, done = run_script(script, folder)
        assert done.returncode == 93
        assert b"holdfast: secret S: cannot read" in done.stderr
        assert calls == []


LEAKS = {
    "AWS_SECRET_ACCESS_KEY": "x", "GITHUB_TOKEN": "x", "BASH_FUNC_ls%%": "() { echo x; }",
    "HOLDFAST_GENERATION": "7", "HOLDFAST_SAVE_BY": "1", "SRUN_CPUS_PER_TASK": "3",
    "SBATCH_PARTITION": "x", "SLURM_TIME_FORMAT": "%s", "SLURM_CPU_BIND": "cores",
    "SLURM_LABELIO": "1", "LC_ALL": "C", "RANK": "3", "MASTER_ADDR": "x", "WANDB": "x",
}  # fmt: skip


@pytest.mark.parametrize("restart", ["requeue", "chain"])
def test_of_the_submitting_shell_the_workers_get_what_is_named(folder, restart):
    stays = {
        "LANG": "C.UTF-8", "LD_LIBRARY_PATH": "/opt/lib", "MODULEPATH": "/m", "HF_HOME": "/hf",
        "HF_HUB_OFFLINE": "1", "WANDB_PROJECT": "mine", "TOKEN_OF_ONE": "secret",
    }  # fmt: skip
    values = {
        "env.inherit": ["WANDB_PROJECT", "HF_*"],
        "env.secrets.S.env": "TOKEN_OF_ONE",
        "slurm.restart": restart,
        "slurm.setup": ["true"],
    }
    _, script = script_of(values, folder)
    calls, found, done = run_script(script, folder, env={**LEAKS, **stays})
    assert done.returncode == 0, done.stderr
    generation = {"HOLDFAST_GENERATION"} if restart == "chain" else set()
    assert found.keys() & LEAKS.keys() == generation
    assert found.get("HOLDFAST_GENERATION", "0") == "0"
    assert {name: found[name] for name in stays} == stays
    assert (found["S"], found["SLURM_JOB_ID"], found["HOME"]) == ("secret", "7", "/home/me")
    successors = [call[-1] for call in calls if call[0] == "sbatch"]
    assert successors == (["1"] if restart == "chain" else [])


@pytest.mark.parametrize("name", ["a b", "*", "HOLDFAST_X", "SLURM_*", "A*B", "BASH_ENV"])
def test_names_to_inherit_are_names(name, folder):
    assert script_or_codes({"env.inherit.0": name}, folder) == {"HF165"}


@pytest.mark.process
def test_the_installed_sbatch_reads_what_the_parse_above_reads(folder):
    if not has_sbatch():
        pytest.skip("sbatch is not installed: apt-get install slurm-client")
    for attack in ATTACKS:
        values = {f"slurm.{key}": attack for key in ("comment", "constraint", "mail_user")}
        values = {key: value for key, value in values.items() if accepted(key, value, folder)}
        _, script = script_of(values, folder)
        assert real_directives(script, folder) == directives(script)


def test_a_command_with_shell_signs_goes_into_job_json_only(folder):
    command = ["train.py", "--name", f"$(touch {CANARY})"]
    _, script = script_of({"command": command}, folder)
    assert CANARY not in script
    assert shlex.quote(command[2]) not in script
