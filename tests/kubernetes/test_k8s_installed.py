"""The package in an environment of its own, with the newest of what it needs, and the oldest.

The environment of the other tests has tools that hold libraries back. This one has only what pip
installs by the lines that our own messages name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest
from built_wheel import ROOT, build_wheel
from k8s_user import JOB, write_corpus
from packaging.requirements import Requirement

pytestmark = [pytest.mark.install, pytest.mark.timeout(1500)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: x for name, x in PROJECT["optional-dependencies"].items() if name != "dev"}
FRAMEWORKS = {"hf", "lora", "transformers", "lightning", "megatron", "torchtitan"}
"""Extras that ask for newer versions of other extras' libraries."""


def lower_bounds() -> str:
    """Return constraints that hold whatever the package asks for at its lower bound."""
    own = [wish for name, wishes in EXTRAS.items() if name not in FRAMEWORKS for wish in wishes]
    wishes = map(Requirement, own + PROJECT["dependencies"])
    return "".join(
        f"{wish.name}=={bound.version}\n"
        for wish in wishes
        for bound in wish.specifier
        # Which torch there is constraints.txt says; `make test-torches` has the oldest.
        if bound.operator == ">=" and wish.name != "torch"
    )


class Alone:
    """An environment of its own, in a folder with the examples.

    Args:
        folder: for all of it.
        constraints: what pip has to keep to.
        more: environment variables.
    """

    def __init__(self, folder: Path, constraints: str, more: dict[str, str]) -> None:
        self.folder = folder
        venv.create(folder / "env", with_pip=True, symlinks=True)
        shutil.copytree(ROOT / "examples", folder / "examples")
        (folder / "constraints.txt").write_text(constraints)
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._env = {
            **kept,
            **more,
            "PATH": f"{folder / 'env' / 'bin'}:{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(folder / "constraints.txt"),
        }

    def __call__(self, line: str, code: int = 0) -> str:
        """Run a line as a user types it; return its stdout, or its stderr where it is to fail."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == code, f"{line}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stderr if code else done.stdout


@pytest.mark.parametrize("versions", ["newest", "oldest"])
def test_a_first_day(versions, request, tmp_path):
    # torch is held: another one brings gigabytes of CUDA libraries.
    constraints = (ROOT / "constraints.txt").read_text()
    constraints += lower_bounds() if versions == "oldest" else ""
    # Where there is a cluster, a job is submitted to it; the rest needs none.
    has_cluster = bool(os.environ.get("HOLDFAST_TEST_KUBECONFIG"))
    cluster = request.getfixturevalue("cluster") if has_cluster else None
    alone = Alone(tmp_path, constraints, {} if cluster is None else cluster.env())
    wheel = build_wheel(tmp_path)
    alone(f"pip install --quiet {wheel if versions == 'oldest' else './source'}")
    assert alone("holdfast --version") == f"holdfast {PROJECT['version']}\n"

    alone("holdfast check examples/llama3-405b.yaml")
    assert "#SBATCH" in alone("holdfast render examples/llama3-405b.yaml --to slurm")
    of_pods = "examples/tiny-cpu.yaml --set data.path=/holdfast/text.txt"
    for kind in ("pytorchjob", "jobset", "trainjob"):
        assert "kind: ConfigMap" in alone(f"holdfast render {of_pods} --to {kind}")

    missing = {
        "kubernetes": f"holdfast submit {of_pods} --to jobset",
        "train": "holdfast run examples/tiny-cpu.yaml --run-dir runs/one",
    }
    for extra, command in missing.items():
        said = alone(command, code=2)
        line = re.search(r"HF632 .*: (pip install 'holdfast-ml\[(\w+)\]')\n", said)
        assert line, said
        assert line[2] == extra
        alone(f"{line[1]} --quiet")
    assert not (tmp_path / "runs").exists()

    if cluster is not None:
        write_corpus(cluster)
        in_cluster(alone, cluster)

    summary = json.loads(alone(f"{missing['train']} --nodes 2 --set train.steps=4 --json"))
    assert summary["steps"] == 4
    extras = [name for name in EXTRAS if versions == "newest" or name not in FRAMEWORKS]
    alone(f"pip install --quiet 'holdfast-ml[{','.join(extras)}]'")
    alone("holdfast report runs/one -o report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    alone("py-spy --version && python -c 'import submitit, tokenizers'")
    alone("pip check")


def in_cluster(alone: Alone, cluster) -> None:
    """Submit a job, look into it, cancel it: all of the client that is used."""
    cluster.need("jobset")
    text = JOB.format(
        nodes=1,
        steps=1_000_000,
        namespace=cluster.namespace,
        image=cluster.image,
        claim=cluster.claim,
    )
    (alone.folder / "job.yaml").write_text(text)
    alone("holdfast submit job.yaml --to jobset --run-dir pods/one")

    def steps() -> int:
        found = json.loads(alone("holdfast status pods/one --json"))
        assert found["state"] in {"pending", "running"}, found
        return found["training"]["step"] or 0

    cluster.wait("a step", steps, timeout_s=300.0, every_s=1.0)
    assert "-- step 1, loss" in alone("holdfast logs pods/one")
    assert json.loads(alone("holdfast why pods/one --json"))["state"] == "running"
    assert "jobset" in alone("holdfast describe pods/one")
    assert alone("holdfast shell pods/one --rank 0 -- echo here") == "here\n"
    alone("holdfast cancel pods/one --save")
    assert json.loads(alone("holdfast status pods/one --json"))["state"] == "saved"
