"""Preflight: the checks, the verdict over all nodes, and rounds of emulated nodes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import hostile_items as hostile
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.main import run_cli
from launcher.fleet.preflight import checks, nodes
from launcher.fleet.preflight.checks import run_checks
from launcher.fleet.preflight.nodes import SUBMITTERS, NodeSelection, Preflight, choose
from launcher.fleet.preflight.report import CheckResult, Expected, NodeReport, evaluate
from launcher.platforms.commands import CommandResult as Said
from launcher.spec.errors import UserError


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def report(node, **values):
    findings = tuple(CheckResult(check=name, value=value) for name, value in values.items())
    return NodeReport(node=node, findings=findings)


def levels(reports):
    return {
        report.node: [f.check for f in report.findings if f.level != "ok"] for report in reports
    }


# -- over all nodes ----------------------------------------------------------------------------


def test_who_differs_from_the_others_is_named():
    reports = [
        report("a", clock=0.1, storage=1000.0, versions="torch 1"),
        report("b", clock=0.2, storage=900.0, versions="torch 1"),
        report("c", clock=5.0, storage=950.0, versions="torch 1"),
        report("d", clock=0.1, storage=90.0, versions="torch 1"),
        report("e", clock=0.1, storage=800.0, versions="torch 2"),
        NodeReport(node="f", problem="no answer"),
    ]
    evaluated = evaluate(reports, Expected())
    assert levels(evaluated) == {
        **{name: [] for name in "abf"},
        "c": ["clock"],
        "d": ["storage"],
        "e": ["versions"],
    }
    assert [each.level for each in evaluated] == ["ok", "ok", "fail", "warn", "fail", "fail"]
    texts = " ".join(f.text for each in evaluated for f in each.findings if f.level != "ok")
    assert all(value in texts for value in ("torch 2", "torch 1", "+4.9 s", "NTP on c"))


def test_what_has_failed_already_keeps_its_words():
    failed = CheckResult(check="storage", level="fail", text="full", value=1.0)
    reports = [report("a", storage=100.0), report("b", storage=100.0)]
    reports.append(NodeReport(node="c", findings=(failed,)))
    assert evaluate(reports, Expected())[2].findings == (failed,)


@given(
    st.lists(
        st.builds(
            report,
            st.text(max_size=3),
            clock=st.floats(-1e9, 1e9),
            storage=st.floats(0, 1e6),
            versions=st.sampled_from("ab"),
        ),
        max_size=8,
        unique_by=lambda each: each.node,
    )
)
def test_the_verdict_never_makes_anything_better_or_loses_a_node(reports):
    evaluated = evaluate(reports, Expected())
    assert [each.node for each in evaluated] == [each.node for each in reports]
    assert all(len(a.findings) == len(b.findings) for a, b in zip(evaluated, reports, strict=True))
    usual = [f for each in evaluated for f in each.findings if f.check == "versions"]
    if usual:
        assert sum(f.level == "ok" for f in usual) * 2 >= len(usual)


# -- on a node ---------------------------------------------------------------------------------


def test_every_check_answers_here(tmp_path):
    findings = run_checks(checks.CHECKS, Expected(directory=str(tmp_path), min_shm_gib=0))
    assert [finding.check for finding in findings] == list(checks.CHECKS)
    assert {f.check: f.level for f in findings if f.level == "fail"} == {}
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_raises_is_a_failed_check():
    def broken(expected):
        raise ValueError("no")

    (finding,) = run_checks({"mine": broken}, Expected())
    assert (finding.check, finding.level) == ("mine", "fail")
    assert "ValueError: no" in finding.text


def tool(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder of tools, alone on PATH but for those of the system."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(checks, "_SBIN", ())
    return folder


def test_missing_gpus_fail(tools):
    tool(tools, "nvidia-smi", "printf '0\\n1\\n'")
    assert checks.check_gpus(Expected(gpus=2)).level == "ok"
    tool(tools, "nvidia-smi", "echo 0; echo Unable to determine the device handle for GPU 0000:0F")
    bad = checks.check_gpus(Expected(gpus=2))
    assert (bad.level, bad.value) == ("fail", 1)
    assert "1 of 2 GPUs" in bad.text


def test_a_tool_that_hangs_fails_its_checks_and_holds_nobody_up(tools, monkeypatch):
    monkeypatch.setattr(checks, "_QUERY_S", 0.3)
    tool(tools, "nvidia-smi", "exec sleep 600")
    for check in (checks.check_gpus, checks.check_gpu_health, checks.check_nvlink):
        found = check(Expected(gpus=2))
        assert found.level == "fail"
        assert "nvidia-smi" in found.text
        assert "0.3 s" in found.text


def test_what_a_node_has_no_tool_for_is_not_here(tools):
    tool(tools, "journalctl", "true")
    for check in (checks.check_nics, checks.check_dcgm):
        found = check(Expected(gpus=2))
        assert (found.check, found.level, found.value) == (found.check, "not here", None)
    tool(tools, "dmesg", "echo dmesg: read kernel buffer failed: Operation not permitted >&2")
    assert checks.check_kernel(Expected()).level == "not here"
    assert NodeReport(node="a", findings=(checks.check_kernel(Expected()),)).level == "ok"


def test_the_journal_is_read_where_the_kernels_buffer_is_not(tools):
    tool(tools, "dmesg", "echo dmesg: read kernel buffer failed: Operation not permitted >&2")
    line = "Nov 24 02:39:30 n7 kernel: NVRM: Xid (PCI:0000:0a:00): 79, pid=1, GPU has fallen off"
    tool(tools, "journalctl", f"echo '{line}'")
    assert checks.check_kernel(Expected()).level == "fail"
    tool(tools, "journalctl", "true")  # what it shows to a user without rights
    assert checks.check_kernel(Expected()).level == "not here"


def test_a_job_without_gpus_does_not_look_at_any(tools):
    tool(tools, "nvidia-smi", "exit 9")
    assert checks.check_gpu_health(Expected()).level == "not here"


def test_the_worst_comes_first_and_many_are_cut(tools):
    lines = ["State: Initializing", "Physical state: LinkUp"]
    text = "".join(f"CA 'mlx5_{n}'\nPort 1:\n" + "\n".join(lines) + "\n" for n in range(6))
    tool(tools, "ibstat", f"cat <<'E'\n{text}E")
    found = checks.check_nics(Expected())
    assert found.level == "warn"
    assert found.text.endswith("; and 2 more")


def test_nodes_with_other_drivers_or_slower_ports_differ():
    def node(name, driver, rates):
        return NodeReport(
            node=name,
            findings=(
                CheckResult(check="gpu-health", text=driver, value=driver),
                CheckResult(check="nics", text=rates, value=rates),
            ),
        )

    usual = [node(name, "driver 570", "400, 400 Gb/s") for name in "abc"]
    other = node("d", "driver 550", "200, 400 Gb/s")
    found = evaluate([*usual, other], Expected())
    assert [each.level for each in found] == ["ok", "ok", "ok", "fail"]
    assert [finding.level for finding in found[3].findings] == ["warn", "fail"]


def test_storage_that_cannot_be_written_or_is_full_fails(tmp_path, monkeypatch):
    bad = checks.check_storage(Expected(directory=str(tmp_path / "no")))
    assert bad.level == "fail"
    assert os.strerror(errno.ENOENT) in bad.text
    usage = Usage(100, 99, 1)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(checks, "_WRITE_BYTES", 1 << 20)
    assert checks.check_storage(Expected(directory=str(tmp_path))).level == "fail"
    assert checks.check_shm(Expected()).level == "fail"


def test_leftovers_are_told_and_live_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "SHM", tmp_path)
    assert checks.check_leftovers(Expected()).text == "none"
    for name in ("holdfast-r-n1-a", "holdfast-r-n1-b", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner").touch()
        (tmp_path / name / "image").write_bytes(b"0" * 8192)
    with (tmp_path / "holdfast-r-n1-b" / "owner").open("r+") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        finding = checks.check_leftovers(Expected())
    assert finding.level == "warn"
    assert finding.text.startswith("1 ")
    assert "holdfast-r-n1-a" in finding.text


# -- rounds ------------------------------------------------------------------------------------


def test_checks_are_chosen_by_name():
    known = ["a", "b", "c"]
    assert choose(known, [], []) == known
    assert choose(known, ["c", "a"], ["a"]) == ["c"]
    for names, skip in ((["x"], []), ([], ["x"]), (["a"], ["a"])):
        with pytest.raises(UserError) as error:
            choose(known, names, skip)
        assert error.value.code == "HF660"


CANCEL = '#!/bin/sh\nfor id; do :; done; echo "$id" >>"$BUSY.cancelled"\n'


class Slurm:
    """Says what sinfo would."""

    def __init__(self, out):
        self.out = out

    def run(self, argv, *, timeout_s, stdin=""):
        return Said(argv=tuple(argv), code=0, out=self.out, err="")


def test_nodes_that_are_down_are_not_asked(tmp_path):
    slurm = Slurm("n1|down\nn2|drained\nn3|idle*\nn4|draining\n")
    found = Preflight(where=NodeSelection(), folder=tmp_path / "f", commands=slurm).run(Expected())
    assert [(each.node, each.level) for each in found] == [
        (name, "fail") for name in ("n1", "n2", "n3", "n4")
    ]
    assert "drained" in found[1].problem


@pytest.mark.parametrize(
    "where",
    [
        NodeSelection(partition="a b"),
        NodeSelection(nodes="n1;rm"),
        NodeSelection(partition="-p"),
        NodeSelection(nodes="no"),
    ],
)
def test_wrong_names_are_refused(tmp_path, where):
    with pytest.raises(UserError) as error:
        Preflight(where=where, folder=tmp_path / "f", commands=Slurm("")).run(Expected())
    assert error.value.code == "HF661"


@pytest.mark.slow
def test_this_machine_runs_all_checks(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--dir", str(tmp_path), "--shm-gib", "0", "--timeout", "100"]
    assert run_cli(["preflight", "--to", "local", "--json", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    (node,) = answer["nodes"]
    assert answer["ok"]
    assert [finding["check"] for finding in node["findings"]] == list(checks.CHECKS)
    assert list((tmp_path / "runs" / ".preflight").iterdir()) == []  # nothing is left


@pytest.mark.slow
def test_a_node_that_fails_is_exit_code_1_and_its_files_are_private(tmp_path, capsys):
    folder = tmp_path / "files"
    options = ["--check", "shm", "--shm-gib", "1e9", "--folder", str(folder), "--timeout", "100"]
    assert run_cli(["preflight", "--to", "local", *options]) == 1
    out = capsys.readouterr().out
    assert "0 of 1 node" in out
    assert str(folder) in out
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def told(expected):
    return CheckResult(check="mine", text=f"{expected.gpus} GPUs", value=1)


def raises(expected):
    raise ValueError(expected.directory)


@pytest.mark.process
def test_functions_of_ones_own_run_on_the_nodes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    where = NodeSelection(cluster="local", nodes="2")
    asking = Preflight(where=where, folder=tmp_path / "f")
    extra = {"mine": told, "bad": raises}
    found = asking.run(Expected(gpus=3, directory="d"), names=list(extra), extra=extra)
    for report in found:
        mine, bad = report.findings
        assert (mine.text, bad.level, "ValueError: d" in bad.text) == ("3 GPUs", "fail", True)
    assert all(low <= 0 <= high for low, high in (report.clock for report in found))


def test_functions_that_nodes_cannot_import_are_refused(tmp_path):
    asking = Preflight(where=NodeSelection(cluster="local"), folder=tmp_path / "f")
    with pytest.raises(UserError) as error:
        asking.run(Expected(), extra={"mine": lambda expected: told(expected)})
    assert error.value.code == "HF660"
    assert not (tmp_path / "f").exists()


@pytest.mark.process
@pytest.mark.parametrize(("python", "said"), [("false", ""), ("cat", "cat: ")])
def test_a_process_that_ends_without_an_answer_is_told(tmp_path, python, said):
    where = NodeSelection(cluster="local", python=python)
    [found] = Preflight(where=where, folder=tmp_path / "f").run(Expected(), names=["shm"])
    assert found.level == "fail"
    assert found.problem
    assert said in found.problem


SBATCH = """\
#!/bin/bash
# Slow, and says who else is here.
mkdir "$BUSY/$$"
ls "$BUSY" | wc -l >>"$BUSY.counts"
sleep 0.4
rmdir "$BUSY/$$"
! grep -q "nodelist=n7$" "$1" || { echo "sbatch: error: n7?" >&2; exit 1; }
echo "Submitted batch job $$"
"""


@pytest.mark.slow
def test_nodes_are_asked_a_few_at_a_time_and_none_is_forgotten(tmp_path, monkeypatch):
    programs, busy = tmp_path / "bin", tmp_path / "busy"
    for folder in (programs, busy):
        folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", "#!/bin/sh\n"), ("scancel", CANCEL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("BUSY", str(busy))
    nodes = [f"n{i}" for i in range(20)]
    slurm = Slurm("".join(f"{node}|idle\n" for node in nodes))
    asking = Preflight(where=NodeSelection(), folder=tmp_path / "f", commands=slurm)
    found = asking.run(Expected(), timeout_s=0.5)
    assert [each.node for each in found] == nodes
    problems = {each.node: each.problem for each in found}
    assert "n7?" in problems.pop("n7")
    assert all("0.5 s" in problem for problem in problems.values())
    counts = [int(line) for line in (tmp_path / "busy.counts").read_text().split()]
    assert len(counts) == len(nodes)
    assert 1 < max(counts) <= SUBMITTERS
    cancelled = (tmp_path / "busy.cancelled").read_text().split()
    assert len(set(cancelled)) == len(nodes) - 1
    assert not list((tmp_path / "f").glob("*.pkl"))


def test_wrong_options_are_told(tmp_path, capsys):
    assert run_cli(["preflight", "--to", "local", "--check", "x"]) == 2
    assert "HF660" in capsys.readouterr().err
    assert run_cli(["preflight", "--to", "local", "--set", "a=b"]) == 2
    assert "HF610" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["", "{", "[1]", "7", '{"x": 1}\n{"at": 0}', '{"at": "noon"}'])
def test_a_damaged_answer_is_one_nodes_problem(tmp_path, said):
    round_ = Preflight(NodeSelection(cluster="local"), tmp_path)
    (tmp_path / "answer-n1.jsonl").write_text(said)
    asked = nodes._Asked(report=NodeReport(node="n1"))
    assert round_._ended(asked)
    assert (asked.report.level, asked.report.findings) == ("fail", ())


def test_no_answer_of_one_node_changes_what_the_others_come_to(tmp_path):
    round_ = Preflight(NodeSelection(cluster="local"), tmp_path)
    checks = ("clock", "storage", "versions", "gpus")
    good = [
        CheckResult(check=name, value="x" if name == "versions" else 5.0, gpus=("g",), seen=("g",))
        for name in checks
    ]
    text = "\n".join(json.dumps(each) for each in [*map(asdict, good), {"at": time.time()}])

    def reported(node):
        asked = nodes._Asked(report=NodeReport(node=node), at=time.time())
        assert round_._ended(asked)
        return asked.report

    for node in ("n1", "n2", "n3"):
        (tmp_path / f"answer-{node}.jsonl").write_text(text)
    others = [reported(node) for node in ("n1", "n2", "n3")]
    usual = [each.level for each in evaluate(others, Expected())]
    lines = text.splitlines()
    spoilt = [
        "\n".join([*lines[:at], json_text, *lines[at + 1 :]])
        for at in (0, 2, 4)
        for _, json_text in hostile.spoilt_inside(json.loads(lines[at]))
    ]
    makers = [partial(Path.write_text, data=each) for each in spoilt]
    for kind, make in (*hostile.files(), *enumerate(makers)):
        path = tmp_path / "answer-bad.jsonl"
        make(path)
        if kind != "gone":
            found = evaluate([*others, reported("bad")], Expected())
            assert [each.level for each in found[:3]] == usual, kind
            assert found[3].level == "fail" or kind not in hostile.KINDS
            json.dumps([each.text for each in found[3].findings], ensure_ascii=False).encode()
        hostile.clear(path)


def test_idle_nodes_are_picked_before_those_in_use(tmp_path):
    slurm = Slurm("n1|allocated\nn2|down\nn3|idle\nn4|mixed\nn5|idle*\n")
    round_ = Preflight(where=NodeSelection(), folder=tmp_path / "f", commands=slurm)
    assert round_.pick(2) == ["n3", "n1"]
    with pytest.raises(UserError) as error:
        round_.pick(4)
    assert error.value.code == "HF661"


def test_what_is_measured_has_its_nodes_alone(tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    keep = f'#!/bin/sh\ncat "$1" >>{tmp_path}/asked\necho "Submitted batch job 7"\n'
    for name, text in (("sbatch", keep), ("srun", "#!/bin/sh\n"), ("scancel", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for whole in (False, True):
        where = NodeSelection(gres_gpus=8, whole=whole)
        round_ = Preflight(where=where, folder=tmp_path / f"f{whole}")
        round_.make_folder()
        (tmp_path / "asked").write_text("")
        with round_.serving(["n1", "n2"], lambda node: ["some.module", node]) as gone:
            assert gone() == {}
        asked = (tmp_path / "asked").read_text()
        assert asked.count("some.module") == 2
        assert asked.count("#SBATCH --exclusive\n") == 2 * whole
        assert asked.count("#SBATCH --mem=0\n") == 2 * whole
        assert asked.count("#SBATCH --gpus-per-node=8\n") == 2
