"""Sites: one short job file for several clusters."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hostile_items as hostile
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_bench import fresh

from holdfast import find_site, load_job, submit
from launcher.cli.main import run_cli
from launcher.platforms.sites import Site
from launcher.spec.errors import UserError
from launcher.spec.site_files import VARIABLE, files
from launcher.spec.source import read_source

__all__ = ["fresh"]  # a fixture

SITES = """\
alps:
  target: slurm
  defaults:
    cluster: {gpus_per_node: 4, gpu: cpu}
    slurm: {account: a-llm, partition: main, time: "60"}
gke:
  target: jobset
  defaults:
    cluster: {gpus_per_node: 8, gpu: cpu}
    kubernetes: {context: gke_x, namespace: train, image: "registry/train:1.2", claim: runs}
"""
JOB = """\
name: tune
command: train.py --lr 3e-4
cluster: {nodes: 4}
slurm: {partition: big}
"""


@pytest.fixture
def sites(fresh, monkeypatch):
    Path("sites.yaml").write_text(SITES)
    Path("job.yaml").write_text(JOB)
    Path("train.py").write_text("")
    monkeypatch.setenv(VARIABLE, "sites.yaml")


def test_one_job_file_runs_on_two_clusters(sites, capsys):
    for site, kind in (("alps", "#SBATCH"), ("gke", "kind: JobSet")):
        assert run_cli(["check", "job.yaml", "--site", site]) == 0
        capsys.readouterr()
        assert run_cli(["render", "job.yaml", "--site", site]) == 0
        assert kind in capsys.readouterr().out
    assert load_job("job.yaml", site=find_site("gke")).kubernetes.context == "gke_x"
    job = load_job("job.yaml", ["slurm.account=mine"], site=find_site("alps"))
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (4, 4)
    assert (job.slurm.partition, job.slurm.account, job.slurm.time) == ("big", "mine", "60")


def test_what_is_kept_with_a_run_needs_no_site(sites, monkeypatch):
    run = submit("job.yaml", site=find_site("alps"), run_dir="runs/one")
    monkeypatch.delenv(VARIABLE)
    assert load_job(run.path / "job.yaml").slurm.account == "a-llm"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("alps: {}", "HF208"),
        ("gke: {targt: slurm}", "HF209"),
        ("gke: {target: nowhere}", "HF206"),
        ("gke: {defaults: {slrm: {}}}", "HF209"),
        ("gke: [1]", "HF209"),
        ("gke: {", "HF003"),
        ("gke: {}\ngke: {}", "HF006"),
        ("gke: {defaults: {slurm: !!x {}}}", "HF007"),
        ("", "HF208"),
    ],
)
def test_a_wrong_site(sites, capsys, text, code):
    Path("sites.yaml").write_text(text)
    assert run_cli(["check", "job.yaml", "--site", "gke"]) == 2
    assert code in capsys.readouterr().err


WRONG = [
    *("[1]", "{targt: slurm}", "{target: nowhere}", "{defaults: {slrm: {}}}", "!!x {}", "{? [a]}"),
    *(text for kind, text in hostile.VALUES.items() if kind[:4] not in ("deep", "surr")),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_site_keeps_nobody_from_another(sites, wrong):
    good = find_site("gke")
    Path("sites.yaml").write_text(f"a: {wrong}\n{SITES}b: {wrong}\nb: {wrong}\n")
    assert find_site("gke") == good
    with pytest.raises(UserError):
        find_site("a" if wrong != "null" else "b")


def test_an_empty_file_of_sites_hides_no_site_of_the_system(sites, monkeypatch):
    good = find_site("gke")
    monkeypatch.setattr(
        "launcher.platforms.sites.files", lambda _: map(Path, ("mine", "sites.yaml"))
    )
    for text in ("", "\n", "# none yet\n"):
        Path("mine").write_text(text)
        assert find_site("gke") == good


def test_a_file_of_sites_that_anybody_may_write_or_that_is_none(sites, capsys):
    Path("sites.yaml").chmod(0o666)
    assert run_cli(["check", "job.yaml", "--site", "alps", "--json"]) == 2
    assert [each["code"] for each in json.loads(capsys.readouterr().out)["problems"]] == ["HF209"]
    Path("sites.yaml").unlink()
    os.mkfifo("sites.yaml")
    with pytest.raises(UserError) as caught:
        find_site("alps")
    assert caught.value.code == "HF209"


def test_a_users_site_counts_before_the_systems():
    assert [str(path) for path in files({"XDG_CONFIG_HOME": "/x"})] == [
        "/x/holdfast/sites.yaml",
        "/etc/holdfast/sites.yaml",
    ]


_keys = st.sampled_from(["a", "b", "c", "cloud.google.com/x", "a=b", "a b"])
_values = st.recursive(
    st.integers() | st.booleans() | st.text("ab,:{}'\" é", max_size=4),
    lambda inner: st.dictionaries(_keys, inner, max_size=3),
    max_leaves=6,
)
_jobs = st.dictionaries(st.sampled_from("abc"), _values, min_size=1)


@given(_jobs, _jobs)
def test_defaults_fill_in_what_a_job_does_not_say_and_nothing_else(defaults, job):
    def merged(default, given):
        if isinstance(default, dict) and isinstance(given, dict):
            names = {*default, *given}
            return {name: merged(default.get(name), given.get(name)) for name in names}
        return default if given is None else given

    source = read_source(json.dumps(job), "", Site(defaults=defaults).sets(job))
    assert source.problems == []
    assert source.data == merged(defaults, job)


def test_an_unknown_site_is_named_with_those_there_are(sites):
    with pytest.raises(UserError) as caught:
        find_site("nowhere")
    assert (caught.value.code, "alps, gke" in caught.value.message) == ("HF208", True)
