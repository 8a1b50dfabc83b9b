from __future__ import annotations

import os
import re
import shlex
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from problem_lines import has_parts

from launcher.plan.planning import plan
from launcher.render.fabric import fabric_variables
from launcher.render.sbatch import render_slurm, render_sweep
from launcher.spec.reading import parse_spec
from launcher.spec.requests import request_findings
from launcher.spec.slurm import array_indices
from launcher.spec.source import Where

from conftest import JOB  # isort: skip

DOC = Path(__file__).parents[3] / "docs" / "slurm.md"
PLACES = {"run_id": "r", "run_dir": "/runs/r", "base_dir": "/home/me", "python": "/opt/python"}


def script(spec):
    return render_slurm(spec, plan(spec), **PLACES)["job.sbatch"]


@pytest.mark.parametrize(
    ("set_", "message"),
    [
        ("slurm.time=1:2:3:4", "HF015 slurm.time:"),
        ("slurm.partition=a b", "HF015 slurm.partition:"),
        ("slurm.mem=lots", "HF015 slurm.mem:"),
        ("slurm.version=new", "HF015 slurm.version:"),
        ("slurm.array=3-1", "HF015 slurm.array:"),
        ("slurm.array=0-99999", "HF015 slurm.array:"),
        ("slurm.comment=a packjob", "HF015 slurm.comment:"),
        ("slurm.extra=[licenses=a]", "HF162 slurm.extra[0]: ... --option or --option=value"),
        ("slurm.extra=[--output=/x]", "HF162 slurm.extra[0]: --output"),
        ("slurm.extra=[--outp=/x]", "HF162 slurm.extra[0]: --outp ... --output"),
        ("slurm.extra=['--nodes 4']", "HF162 slurm.extra[0]: --nodes"),
        ("slurm.extra=['--nod 4']", "HF162 slurm.extra[0]: --nod ... --nodes"),
        ("slurm.extra=[-N4]", "HF162 slurm.extra[0]: --nodes"),
        ("slurm.extra=['-N 4']", "HF162 slurm.extra[0]: --nodes"),
        ("slurm.extra=[-Hkn2]", "HF162 slurm.extra[0]: ... --option or --option=value"),
        ("slurm.extra=[--export=NONE]", "HF162 slurm.extra[0]: --export"),
        ("slurm.extra=['--nice 5']", "HF162 slurm.extra[0]: ... --option or --option=value"),
        ("slurm.extra=[--nice_=5]", "HF162 slurm.extra[0]: ... --option or --option=value"),
        ("slurm.umask='9'", "HF015 slurm.umask:"),
        ("slurm.container=pyxis", "HF164 slurm.container: pyxis"),
        ("slurm.container_mounts=['a,b']", "HF015 slurm.container_mounts.0: ... /path"),
        ("slurm={mem: 1T, mem_per_cpu: 8G}", "HF016 slurm.mem_per_cpu: mem"),
        ("slurm={gres: 'gpu:8', gpu_type: h100}", "HF016 slurm.gres: ... gpu_type"),
        ("slurm={array: 0-3, restart: chain}", "HF016 slurm.restart: ... array"),
        ("slurm={fabric: efa, fabric_devices: mlx5}", "HF016 slurm.fabric_devices: fabric: efa"),
        ("slurm.segment=16", "HF161 slurm.segment: ... --segment ... 24.05"),
        ("slurm={segment: 16, version: 23.11}", "HF161 slurm.segment: ... --segment ... 24.05"),
        ("slurm={segment: 4, switches: 1, version: 24.11}", "HF016 slurm.segment: switches"),
        ("env.variables={SLURM_JOB_ID: x}", "HF165 env.variables.SLURM_JOB_ID:"),
        ("env.variables={'a b': x}", "HF165 env.variables.a b: 'a b'"),
        ("env.variables={DB_PASSWORD: x}", "HF163 env.variables.DB_PASSWORD:"),
        ("env.secrets={A: {file: /x, env: A}}", "HF163 env.secrets.A: ... {file: PATH}"),
        ("env={variables: {A: x}, secrets: {A: {env: B}}}", "HF016 env.variables.A:"),
    ],
)  # fmt: skip
def test_mistakes_are_named(mistakes, set_, message):
    assert has_parts(mistakes(set_), message), mistakes(set_)


def test_a_token_is_refused_and_not_repeated():
    token = "ghp_" + "a1B2" * 9
    with pytest.raises(Exception, match="HF163") as caught:
        parse_spec(f"{JOB}slurm: {{setup: ['export X={token}']}}\n")
    assert token not in str(caught.value)
    assert caught.value.problems[0].where.__class__ is Where


@pytest.mark.parametrize(
    ("text", "indices"),
    [("0-3", [0, 1, 2, 3]), ("1,5,9%2", [1, 5, 9]), ("0-10:5", [0, 5, 10]), ("7", [7])],
)
def test_arrays(text, indices):
    assert array_indices(text) == indices


def test_every_task_of_an_array_is_a_run_of_its_own(make_spec):
    spec = make_spec("slurm.array='1,3'")
    bundle = render_slurm(spec, plan(spec), **PLACES)
    names = ["job.sbatch", "1/job.json", "1/job.yaml", "3/job.json", "3/job.yaml"]
    assert list(bundle) == names
    assert '"run_id":"r-3"' in bundle["3/job.json"]
    assert '"dir":"/runs/r/3/checkpoints"' in bundle["3/job.json"]
    assert "\nhf_run=/runs/r/$SLURM_ARRAY_TASK_ID\n" in bundle["job.sbatch"]


def test_a_sweep_has_the_values_of_each_task(make_spec):
    specs = [make_spec(f"train.optimizer.lr={lr}") for lr in (0.1, 0.2)]
    bundle = render_sweep([(spec, plan(spec)) for spec in specs], **PLACES)
    assert "#SBATCH --array=0-1\n" in bundle["job.sbatch"]
    assert '"lr":0.1' in bundle["0/job.json"]
    assert '"lr":0.2' in bundle["1/job.json"]


def test_nodes_are_the_top_rung_and_spares(make_spec):
    assert "#SBATCH --nodes=7\n" in script(make_spec("cluster.spares=3"))


def test_resources_are_asked_for_as_written(make_spec):
    assert "#SBATCH --gpus-per-node=h100:8\n" in script(make_spec("slurm.gpu_type=h100"))
    shared = script(make_spec("slurm={gres: 'gpu:h100:8', exclusive: false, cpus: 64}"))
    assert "#SBATCH --gres=gpu:h100:8\n" in shared
    assert "--gpus-per-node" not in shared
    assert "--exclusive" not in shared
    assert "--mem" not in shared
    assert '  --cpus-per-task="$SLURM_CPUS_PER_TASK" \\\n' in shared
    assert "hf_default OMP_NUM_THREADS 8 " in shared
    by_cpu = script(make_spec("slurm={mem_per_cpu: 8G, cpus: 64}"))
    assert "#SBATCH --mem-per-cpu=8G\n" in by_cpu
    assert "--mem=" not in by_cpu


def test_restarts_by_requeue_chain_or_not_at_all(make_spec):
    again = script(make_spec())
    chain = script(make_spec("slurm={restart: chain, max_requeues: 4}"))
    none = script(make_spec("slurm.restart=none"))
    assert "#SBATCH --requeue\n" in again
    assert "hf_node again" in again
    assert "#SBATCH --no-requeue\n" in chain
    assert 'sbatch --parsable --dependency="afterany:$SLURM_JOB_ID" /runs/r/job.sbatch' in chain
    assert "HOLDFAST_MAX_REQUEUES=4" in chain
    assert "hf_node again" not in chain + none
    assert "#SBATCH --no-requeue\n" in none


@pytest.mark.parametrize(
    ("runtime", "told"),
    [
        ("pyxis", '    --container-env="${hf_names#,}" \\\n'),
        ("apptainer", 'export "APPTAINERENV_$hf_name=${!hf_name}"\n'),
    ],
)
def test_what_the_script_exports_wins_over_an_image(make_spec, runtime, told):
    env = "env={image: a.sif, variables: {MINE: x}, secrets: {KEY: {env: K}}, inherit: ['W_*']}"
    text = script(make_spec(env, f"slurm={{container: {runtime}, restart: chain}}"))
    assert told in text
    patterns = shlex.split(text.partition("hf_ours=(\n")[2].partition("\n)\n")[0])
    exported = set(re.findall(r"(?:^export | )([A-Z][A-Z0-9_]+)=", text, re.MULTILINE))
    exported |= set(re.findall(r"^(?:export|hf_default) ([A-Z_]+)", text, re.MULTILINE)) | {"W_1"}
    assert {"MINE", "KEY", "HOLDFAST_GENERATION", "TORCH_FR_DUMP_TEMP_FILE"} <= exported
    missing = {name for name in exported if not any(fnmatchcase(name, p) for p in patterns)}
    assert not missing
    assert not any(fnmatchcase("PATH", pattern) for pattern in patterns)
    assert "hf_ours" not in script(make_spec())


def variables(spec):
    return {each.name: each.value for each in fabric_variables(spec, spec.slurm, None)}


def test_fabrics_are_for_gpus(make_spec):
    assert {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= set(
        variables(make_spec("network.interface=ib0"))
    )
    on_cpus = variables(make_spec("cluster.gpu=cpu", "slurm.fabric=efa"))
    assert set(on_cpus) == {"PYTHONFAULTHANDLER"}


@pytest.mark.parametrize(
    ("fabric", "set_"),
    [
        ("infiniband", {"NCCL_IB_HCA": "mlx5", "HOLDFAST_FABRIC": "infiniband"}),
        ("roce", {"NCCL_IB_ROCE_VERSION_NUM": "2", "HOLDFAST_FABRIC": "roce"}),
        ("efa", {"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "efa", "HOLDFAST_FABRIC": "efa"}),
        ("none", {}),
    ],
)
def test_no_fabric_falls_back_to_tcp_or_shuts_plugins_out(make_spec, fabric, set_):
    found = variables(make_spec(f"slurm.fabric={fabric}"))
    assert set_.items() <= found.items()
    assert {"NCCL_NET", "HOLDFAST_FABRIC"} & found.keys() == {
        "NCCL_NET",
        "HOLDFAST_FABRIC",
    } & set_.keys()


@pytest.mark.parametrize(
    ("image", "pyxis", "apptainer"),
    [
        ("nvcr.io/nvidia/pytorch:25.01", "nvcr.io#nvidia/pytorch:25.01", "docker://nvcr.io/"),
        ("reg.site:5000/a/b", "reg.site:5000#a/b", "docker://reg.site:5000/a/b"),
        ("localhost/a", "localhost#a", "docker://localhost/a"),
        ("reg:5000/a:1", "reg:5000#a:1", "docker://reg:5000/a:1"),
        ("me@nvcr.io/a/b", "me@nvcr.io#a/b", ""),
        ("docker://nvcr.io/a/b:1", "docker://nvcr.io#a/b:1", "docker://nvcr.io/a/b:1"),
        ("nvcr.io#nvidia/pytorch:1", "nvcr.io#nvidia/pytorch:1", ""),
        ("nvidia/cuda:12.8", "nvidia/cuda:12.8", "nvidia/cuda:12.8"),
        ("/images/a.b/torch.sqsh", "/images/a.b/torch.sqsh", "/images/a.b/torch.sqsh"),
        ("./a.b/torch.sif", "./a.b/torch.sif", "./a.b/torch.sif"),
    ],
)
def test_an_image_is_named_as_its_runtime_has_it(make_spec, image, pyxis, apptainer):
    options = f"env.image='{image}'"
    text = script(make_spec(options, "slurm.container=pyxis"))
    assert f"--container-image={pyxis}" in shlex.split(
        text.partition("srun --nt")[2], comments=True
    )
    text = script(make_spec(options, "slurm.container=apptainer"))
    assert f" {apptainer}" in text.partition("apptainer exec ")[2].partition("\n")[0]


def test_what_set_up_or_nccl_conf_says_wins_and_is_said(make_spec, tmp_path):
    spec = make_spec("slurm={fabric: infiniband, setup: [x]}", "network.interface=ib0")
    begins, ends = "# What set-up, modules", "# Traces of collectives"
    text = script(spec).partition(begins)[2].partition(ends)[0]
    (tmp_path / "own.conf").write_text("# NCCL_DEBUG=x\nNCCL_IB_TIMEOUT=20\n")
    env = {
        "NCCL_IB_HCA": "mlx5_7",
        "NCCL_SOCKET_IFNAME": "eth9",
        "NCCL_CONF_FILE": str(tmp_path / "own.conf"),
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(
        ["bash", "-euc", f"#{text}\nenv"],
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert found["NCCL_IB_HCA"] == "mlx5_7"
    assert found["NCCL_DEBUG"] == "WARN"
    assert "NCCL_IB_TIMEOUT" not in found
    assert found["NCCL_SOCKET_IFNAME"] == "=ib0", "the job file's own key"
    said = [line for line in done.stdout.splitlines() if line.startswith("holdfast:")]
    assert [("HCA=mlx5_7" in line, "TIMEOUT" in line) for line in said] == [
        (True, False),
        (False, True),
    ]
    devices = make_spec("slurm={fabric: infiniband, fabric_devices: mlx5_1}")
    assert "export NCCL_IB_HCA=mlx5_1 " in script(devices)


def test_a_fabric_that_is_none_on_purpose_is_not_warned_of(make_spec):
    def codes(*sets):
        return {found.code for found in request_findings(make_spec(*sets))}

    assert "HF173" in codes("cluster.nodes=4", "slurm.partition=a")
    assert "HF173" not in codes("cluster.nodes=4", "slurm.fabric=none")


def test_the_example_of_the_page_is_a_job_file():
    (text,) = re.findall(r"```yaml\n(.*?)```", DOC.read_text(), re.DOTALL)
    base = re.sub(r"cluster: .*\n", "", JOB)
    spec = parse_spec(base + text, "slurm.md", ["train.global_batch=512"])
    assert "#SBATCH --nodes=66\n" in script(spec)
    assert "HF_TOKEN: {env: HF_TOKEN}" in text
