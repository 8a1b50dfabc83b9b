"""Clocks, services, versions, ports and left-over processes of a node, from real samples."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.fleet.preflight import checks
from launcher.fleet.preflight.checks import run_checks
from launcher.fleet.preflight.processes import (
    ProcStatus,
    ancestors,
    mapped_segments,
    orphans,
    read_processes,
)
from launcher.fleet.preflight.report import (
    CheckResult,
    Expected,
    NodeReport,
    clock_gaps,
    evaluate,
)
from launcher.fleet.preflight.tools import (
    CUDA,
    DRIVER,
    FABRIC_MANAGER,
    chrony_offset,
    chrony_problems,
    ethernet_speeds,
    fabric_manager_problems,
    port_problems,
    port_rates,
    sysfs_ports,
    timedatectl_problems,
    version_in,
)


def levels(problems):
    return [level for level, *_ in problems]


# -- clocks ------------------------------------------------------------------------------------

# Fedora System Administrator's Guide, 13.3.6, "Checking if chrony is Synchronized".
FOLLOWS = """\
Reference ID    : 1.2.3.4 (a.b.c)
Stratum         : 3
Ref time (UTC)  : Fri Feb  3 15:00:29 2012
System time     : 0.000001501 seconds slow of NTP time
Last offset     : -0.000001632 seconds
RMS offset      : 0.000002360 seconds
Frequency       : 331.898 ppm fast
Residual freq   : 0.004 ppm
Skew            : 0.154 ppm
Root delay      : 0.373169 seconds
Root dispersion : 0.024780 seconds
Update interval : 64.2 seconds
Leap status     : Normal
"""
# https://github.com/omniosorg/omnios-build/issues/2576
FAR_OFF = """\
Reference ID    : D9723B42 (ns0.luns.net.uk)
Stratum         : 3
Ref time (UTC)  : Sat Dec 04 15:37:15 2021
System time     : 7.810536861 seconds slow of NTP time
Last offset     : -0.243152961 seconds
Frequency       : 31244.098 ppm slow
Leap status     : Normal
"""
# What chrony 4 prints before its first answer from a server.
ALONE = """\
Reference ID    : 00000000 ()
Stratum         : 0
Ref time (UTC)  : Thu Jan 01 00:00:00 1970
System time     : 0.000000000 seconds fast of NTP time
Last offset     : +0.000000000 seconds
Root delay      : 1.000000000 seconds
Root dispersion : 1.000000000 seconds
Update interval : 0.0 seconds
Leap status     : Not synchronised
"""


@pytest.mark.parametrize(
    ("text", "found", "offset"),
    [
        (FOLLOWS, [], -1.501e-6),
        (FAR_OFF, ["fail"], -7.810536861),
        (ALONE, ["warn"], 0.0),
        ("", ["warn"], None),
        ("506 Cannot talk to daemon\n", ["warn"], None),
    ],
)
def test_chrony_tells_whether_the_clock_follows_a_server(text, found, offset):
    assert levels(chrony_problems(text, max_offset_s=1.0)) == found
    assert chrony_offset(text) == offset


# `timedatectl show` of systemd 249; NTP=no where chrony is not known to systemd
# (https://github.com/NixOS/nixpkgs/issues/48917), which is no fault.
TIMEDATECTL = """\
Timezone=Etc/UTC
LocalRTC=no
CanNTP=yes
NTP=no
NTPSynchronized=yes
TimeUSec=Mon 2026-01-12 22:28:08 UTC
RTCTimeUSec=Mon 2026-01-12 22:28:08 UTC
"""


def test_timedatectl_tells_whether_the_kernels_clock_is_kept():
    assert levels(timedatectl_problems(TIMEDATECTL)) == []
    assert levels(timedatectl_problems(TIMEDATECTL.replace("ed=yes", "ed=no"))) == ["warn"]
    assert levels(timedatectl_problems("")) == ["warn"]


def test_a_clock_is_known_from_when_a_node_answered():
    quick, queued = (-1.0, 4.0), (-1.0, 900.0)
    assert clock_gaps({"a": quick, "b": quick, "c": queued}) == {"a": 0.0, "b": 0.0, "c": 0.0}
    ahead, behind = (59.0, 64.0), (-61.0, -56.0)
    found = clock_gaps({"a": quick, "b": quick, "c": quick, "d": ahead, "e": behind})
    assert found == {"a": 0.0, "b": 0.0, "c": 0.0, "d": 55.0, "e": -55.0}
    # The asking machine's own clock is wrong: no node is.
    assert set(clock_gaps(dict.fromkeys("abc", (100.0, 105.0))).values()) == {0.0}
    assert clock_gaps({}) == {}


@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"), st.tuples(st.floats(-5, 0), st.floats(0, 60)), max_size=8
    )
)
def test_clocks_that_may_be_equal_are_never_told_apart(bounds):
    assert all(gap == 0 for gap in clock_gaps(bounds).values())


def test_a_clock_that_storage_does_not_show_is_found():
    same = CheckResult(check="clock", value=0.0)
    nodes = {"a": (-1.0, 3.0), "b": (-1.0, 3.0), "c": (-1.0, 3.0), "d": (59.0, 63.0)}
    reports = [
        NodeReport(node=node, findings=(same,), clock=clock) for node, clock in nodes.items()
    ]
    found = evaluate(reports, Expected())
    assert [each.level for each in found] == ["ok", "ok", "ok", "fail"]
    assert "fix NTP on d" in found[3].findings[0].text


# -- services and versions ---------------------------------------------------------------------

RUNS = """\
Result=success
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
"""


@pytest.mark.parametrize(
    ("healthy", "sick", "level", "word"),
    [
        ("ActiveState=active", "ActiveState=failed", "fail", "journalctl"),
        ("ActiveState=active", "ActiveState=inactive", "fail", "enable --now"),
        ("LoadState=loaded", "LoadState=not-found", "fail", "install"),
        ("UnitFileState=enabled", "UnitFileState=disabled", "warn", "at boot"),
    ],
)
def test_switches_need_their_service(healthy, sick, level, word):
    def problems(text):
        return list(fabric_manager_problems(text, version="535.161.08", driver="535.161.08"))

    assert problems(RUNS) == []
    [(found, words, _)] = problems(RUNS.replace(healthy, sick))
    assert found == level
    assert word in words


def test_a_service_without_switches_is_no_fault(tmp_path, monkeypatch):
    # "request to query NVSwitch device information ... NV_WARN_NOTHING_TO_DO"
    # (https://github.com/data-infra/cube-studio/issues/29): it ends with an error.
    monkeypatch.setattr(checks, "_SWITCHES", tmp_path / "none")
    assert checks.check_fabric_manager(Expected(gpus=8)).level == "not here"


def test_locked_memory_matters_where_there_is_rdma(tmp_path, monkeypatch):
    assert checks.check_locked_memory(Expected()).level in ("not here", "ok", "warn")
    for folder, wrong, level in (
        (tmp_path / "none", "x", "not here"),
        (tmp_path, "x", "warn"),
        (tmp_path, None, "ok"),
    ):
        monkeypatch.setattr(checks, "_VERBS", folder)
        monkeypatch.setattr(checks, "locked_memory", lambda *_, wrong=wrong: wrong)
        assert checks.check_locked_memory(Expected()).level == level


def test_the_fabric_manager_must_be_the_drivers():
    # https://github.com/leptonai/gpud (fabric-manager's parser), and
    # https://github.com/NVIDIA/gpu-operator/issues/544 for the versions.
    assert (
        version_in(FABRIC_MANAGER, "\n\n\tFabric Manager version is : 535.161.08\n\n")
        == "535.161.08"
    )
    assert version_in(FABRIC_MANAGER, "command not found") is None
    found = fabric_manager_problems(RUNS, version="530.30.02", driver="530.41.03")
    assert levels(found) == ["fail"]
    unknown = fabric_manager_problems(RUNS, version=None, driver="530.41.03")
    assert levels(unknown) == []


NVRM = "NVRM version: NVIDIA UNIX "


@pytest.mark.parametrize(
    ("text", "version"),
    [
        # The guides of Talos and SUSE on NVIDIA's drivers; Jetson; an old one.
        (
            "x86_64 Kernel Module  515.65.01  Wed Mar 16 11:24:05 UTC 2022\nGCC version:\n",
            "515.65.01",
        ),
        ("Open Kernel Module for x86_64  555.42.06  Release Build  (abuild@host)\n", "555.42.06"),
        (
            "Open Kernel Module for aarch64  540.4.0  Release Build  (buildbrain@m-6336)\n",
            "540.4.0",
        ),
        ("x86_64 Kernel Module 390.48 Thu Mar 22 00:42:57 PDT 2018\n", "390.48"),
        ("", None),
    ],
)
def test_the_drivers_version_is_read(text, version):
    assert version_in(DRIVER, NVRM + text) == version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("debug = False\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "12.8"),
        ("__version__ = '2.13.0+cu130'\ncuda = '13.0'\n", "13.0"),
        ("cuda: Optional[str] = None\n", None),
    ],
)
def test_the_cuda_that_torch_is_built_for_is_read(text, version):
    assert version_in(CUDA, text) == version


def test_parts_that_differ_are_named_alone():
    def node(name, nccl):
        text = f"python 3.12.3, torch 2.13.0, CUDA 13.0, NCCL {nccl}, holdfast-ml 0.1.0"
        return NodeReport(node=name, findings=(CheckResult(check="versions", value=text),))

    found = evaluate([*(node(name, "2.28.9") for name in "abc"), node("d", "2.27.3")], Expected())
    [odd] = found[3].findings
    assert (odd.level, "python" in odd.text) == ("fail", False)
    assert odd.text.index("NCCL 2.27.3") < odd.text.index("NCCL 2.28.9")


# -- ports -------------------------------------------------------------------------------------

SYSFS = {
    "mlx5_0/ports/1/state": "4: ACTIVE\n",
    "mlx5_0/ports/1/phys_state": "5: LinkUp\n",
    "mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "mlx5_0/ports/1/lid": "0x3\n",
    "mlx5_5/ports/1/state": "1: DOWN\n",
    "mlx5_5/ports/1/phys_state": "2: Polling\n",
    "mlx5_5/ports/1/rate": "10 Gb/sec (4X SDR)\n",
    "mlx5_6/ports/1/state": "1: DOWN\n",
    "mlx5_6/ports/1/phys_state": "3: Disabled\n",
    "mlx5_6/ports/1/rate": "40 Gb/sec (4X QDR)\n",
}


def test_ports_are_read_without_ibstat_too():
    there = sysfs_ports(SYSFS)
    assert port_rates(there) == [400.0]
    [(level, words, _)] = port_problems(there)
    assert level == "warn"
    assert words.startswith("mlx5_5/1 is Down (Polling)")


def test_speeds_of_interfaces_that_are_up_are_told():
    files = {
        "eth0/speed": "100000\n",
        "eth0/operstate": "up\n",
        "eth1/speed": "25000\n",
        "eth1/operstate": "down\n",
        "docker0/speed": "-1\n",
        "docker0/operstate": "up\n",
    }
    assert ethernet_speeds(files) == {"eth0": 100000}


# -- processes ---------------------------------------------------------------------------------


def process(pid, **known):
    return ProcStatus(**{"pid": pid, "uid": 1000, "command": "python train.py", **known})


SELF = process(1, job="7", tracked=True)


@pytest.mark.parametrize(
    ("other", "live", "values"),
    [
        (process(2, job="6", tracked=True), {"7"}, ("job 6", "kill 2")),
        (process(2, job="6", tracked=True), {"6", "7"}, None),
        (process(2, job="6", tracked=True), None, None),
        # Another user's: squeue may keep that job from us.
        (process(2, uid=1001, job="6", tracked=True), {"7"}, None),
        (process(2, job="6", stuck=True, tracked=True), {"7"}, ("job 6", "reboot")),
        (process(2, gpus=("nvidia3",)), {"7"}, ("nvidia3",)),
        (process(2, gpus=("nvidia3",), job="7"), {"7"}, None),
        (process(2, uid=1001, cpus=3.5), {"7"}, ("user 1001", "3.5 CPUs")),
        (process(2, uid=1001, cpus=0.1), {"7"}, None),
        (process(2, uid=0, cpus=3.5), {"7"}, None),
    ],
)
def test_what_is_left_of_ended_jobs_is_named(other, live, values):
    live = None if live is None else frozenset(live)
    found = list(orphans({1: SELF, 2: other}, me=1000, own=frozenset({1}), live=live))
    assert levels(found) == ([] if values is None else ["warn"])
    assert all(value in found[0][1] for value in values or ())


def test_where_no_cgroup_tells_jobs_others_are_left_alone():
    busy = process(2, uid=1001, cpus=3.5)
    alone = process(1, job="7")
    found = orphans({1: alone, 2: busy}, me=1000, own=frozenset({1}), live=frozenset({"7"}))
    assert list(found) == []


@pytest.mark.parametrize(
    ("cgroup", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_1392969/step_0/user/task_0\n", "1392969"),
        ("10:devices:/slurm/uid_2101171/job_280678/step_interactive\n", "280678"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
    ],
)
def test_a_process_is_read_with_its_job(tmp_path, cgroup, job):
    # Those of compute nodes with cgroups v2 and v1, as tests of NordicHPC/sonar have them.
    (tmp_path / "uptime").write_text("1000.00 900.00\n")
    folder = tmp_path / "4711"
    (folder / "fd").mkdir(parents=True)
    (folder / "fd" / "3").symlink_to("/dev/nvidia5")
    (folder / "fd" / "4").symlink_to("/dev/nvidiactl")
    numbers = "S 1 4711 4711 0 -1 4194560 0 0 0 0 4000 1000 0 0 20 0 1 0 90000 0 0"
    (folder / "stat").write_text(f"4711 (my (odd) name) {numbers}\n")
    (folder / "cmdline").write_bytes(b"python\0-m\0train\0")
    (folder / "cgroup").write_text(cgroup)
    (folder / "environ").write_bytes(b"A=1\0")
    [found] = read_processes(tmp_path).values()
    assert (found.job, found.tracked) == (job, job != "")
    assert (found.command, found.gpus, found.stuck) == ("python -m train", ("nvidia5",), False)
    assert found.cpus == pytest.approx(50 * 100 / os.sysconf("SC_CLK_TCK") / 100)
    assert ancestors(4711, tmp_path) == {4711, 1}


@pytest.fixture
def left_over(monkeypatch):
    """A process whose environment says that it is of job 6."""
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()


def test_a_process_of_an_ended_job_is_found_on_this_machine(left_over, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    here = {os.getpid(), left_over.pid}  # this machine may have others, and four are shown
    monkeypatch.setattr(
        checks,
        "read_processes",
        lambda: {pid: each for pid, each in read_processes().items() if pid in here},
    )
    squeue = tmp_path / "squeue"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for jobs, told in (("7\\n", True), ("6\\n7\\n", False), ("", False)):
        squeue.write_text(f"#!/bin/sh\nprintf '{jobs}'\n")
        squeue.chmod(0o755)
        [finding] = run_checks({"orphans": checks.check_orphans}, Expected())
        assert (f"process {left_over.pid} " in finding.text) == told


def test_segments_that_nobody_has_mapped_are_left_over(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "SHM", tmp_path)
    for name in ("nccl-abc", "torch_1_2_0", "other", "nccl-open"):
        (tmp_path / name).write_bytes(b"0" * 8192)
    with (tmp_path / "nccl-open").open():
        assert "nccl-open" in mapped_segments(str(tmp_path))
        text = checks.check_leftovers(Expected()).text
        assert text.startswith("2 ")
        assert f"as {tmp_path / 'nccl-abc'}" in text
    assert "nccl-open" not in mapped_segments(str(tmp_path))


# -- on the node -------------------------------------------------------------------------------


def test_a_check_that_hangs_fails_and_the_others_are_told(monkeypatch):
    monkeypatch.setattr(checks, "_CHECK_S", 0.1)
    read, write = os.pipe()
    try:
        hanging = {"storage": lambda _: os.read(read, 1), "shm": checks.check_shm}
        stuck, other = run_checks(hanging, Expected(min_shm_gib=0))
    finally:
        os.close(write)
        os.close(read)
    assert (stuck.check, stuck.level) == ("storage", "fail")
    assert other.level == "ok"


@pytest.mark.parametrize(
    ("said", "level"),
    [("cat <<'E'\n" + FOLLOWS + "E", "ok"), ("cat <<'E'\n" + ALONE + "E", "warn"),
     ("exec sleep 600", "fail"), (None, "not here")],
)  # fmt: skip
def test_the_time_daemon_is_asked(tmp_path, monkeypatch, said, level):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks, "_SBIN", ("/bin",) if said else ())
    monkeypatch.setattr(checks, "_QUERY_S", 0.3)
    if said is not None:
        (tmp_path / "chronyc").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{said}\n")
        (tmp_path / "chronyc").chmod(0o755)
    found = checks.check_time_sync(Expected())
    assert (found.check, found.level, found.value) == ("time-sync", level, None)


def test_writes_that_are_too_slow_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "_WRITE_BYTES", 1 << 20)
    found = checks.check_storage(Expected(directory=str(tmp_path), min_write_mib_s=1e9))
    assert (found.level, found.value > 0) == ("fail", True)
    assert "wanted" in found.text
