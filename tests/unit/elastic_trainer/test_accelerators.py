from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.hardware import (
    Gpu,
    answering,
    ask,
    healthy,
    local_cpus,
    numa_cpus,
    seen,
)
from elastic_trainer.worker.process import cpu_list, parse_cpus


def line(i):
    return f"{i}, GPU-{i}a2b-77, 00000000:{i}F:00.0\n"


EIGHT = "".join(map(line, range(8)))
LOST = "Unable to determine the device handle for GPU0000:4F:00.0: Unknown Error\n"


@pytest.mark.parametrize(
    ("answer", "visible", "found"),
    [
        (EIGHT, None, 8),
        (EIGHT.replace(line(3), ""), None, 7),
        (EIGHT.replace(line(3), LOST), None, 7),
        (LOST, None, 0),
        ("", None, 0),
        (EIGHT, "0,1, 2", 3),
        (EIGHT.replace(line(3), ""), "2,3", 1),
        (EIGHT, "GPU-1a2b,GPU-3a2b", 2),
        (EIGHT, "", 0),
    ],
)
def test_only_what_answers_and_may_be_seen_counts(answer, visible, found):
    assert healthy(8, answering(answer), visible) == found


def test_nobody_knows_without_the_tool():
    assert healthy(8, ask(("no-such-tool",)), None) == 8


def test_the_tool_decides(tmp_path):
    tool = tmp_path / "smi"
    tool.write_text(f"#!{sys.executable}\nprint('0, GPU-a, 0:1:0.0')\nprint('1, GPU-b, 0:2:0.0')\n")
    tool.chmod(0o755)
    gpus = ask((str(tool),))
    assert gpus == [Gpu("0", "GPU-a", "0:1:0.0"), Gpu("1", "GPU-b", "0:2:0.0")]
    assert healthy(4, gpus, None) == 2
    assert healthy(1, gpus, None) == 1
    assert healthy(4, gpus, "1") == 1


def test_a_driver_that_does_not_answer_is_broken(tmp_path, monkeypatch):
    tool = tmp_path / "smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr("elastic_trainer.agent.hardware.QUERY_TIMEOUT_S", 0.1)
    assert healthy(4, ask((str(tool),)), None) == 0


@pytest.mark.parametrize(
    ("visible", "order"),
    [
        (None, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        ("6,2", ["6", "2"]),
        ("GPU-5a2b-77,GPU-1a", ["5", "1"]),
        ("MIG-0a,3", [None, "3"]),
        ("9,3", ["3"]),
    ],
)
def test_local_ranks_are_the_devices_in_the_order_they_are_seen(visible, order):
    found = seen(answering(EIGHT), visible)
    assert [gpu and gpu.number for gpu in found] == order


@pytest.fixture
def machine(tmp_path):
    """Return a function: CPUs near each GPU as sysfs says it, those allowed -> each worker's."""

    def local(*texts, allowed):
        gpus = []
        for i, text in enumerate(texts):
            gpus.append(Gpu(str(i), f"GPU-{i}", f"0000000A:{i}F:00.0"))
            folder = tmp_path / f"000a:{i}f:00.0"
            folder.mkdir()
            if text is not None:
                (folder / "local_cpulist").write_text(f"{text}\n")
        found = local_cpus(gpus, parse_cpus(allowed), tmp_path)
        return [cpus and cpu_list(cpus) for cpus in found]

    return local


def test_workers_run_on_the_cpus_near_their_gpus_and_share_them(machine):
    near = ["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"]
    assert machine(*near, allowed="0-15") == near


def test_only_what_the_job_was_given_is_used(machine):
    assert machine("0-3,8-11", "4-7,12-15", allowed="2-5") == ["2-3", "4-5"]


@pytest.mark.parametrize(
    ("near", "allowed"),
    [
        ("0-15", "0-15"),  # one NUMA node
        ("0-15", "4-7"),
        ("0-7", "8-15"),  # the job was given none of them
        ("", "0-15"),
        (None, "0-15"),
        ("garbage", "0-15"),
    ],
)
def test_without_a_choice_workers_run_anywhere(machine, near, allowed):
    assert machine(near, allowed=allowed) == [None]


def test_many_workers_do_not_crowd_on_few_cpus(machine):
    # Seven CPUs near GPU 0, one near the three others: those run anywhere.
    assert machine("0-7", "8-15", "8-15", "8-15", allowed="0-6,8") == ["0-6", None, None, None]


def test_a_gpu_whose_address_is_not_known_has_no_cpus_of_its_own(tmp_path):
    assert local_cpus([None, Gpu("0", "GPU-0", "[N/A]")], {0, 1}, tmp_path) == [None, None]
    assert local_cpus([], {0, 1}, tmp_path) == []


@given(st.frozensets(st.integers(0, 300)))
def test_a_list_of_cpus_says_the_set(cpus):
    assert parse_cpus(cpu_list(cpus)) == cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,3-4", {0, 1, 3, 4})],
)
def test_lists_are_the_kernels(text, cpus):
    assert parse_cpus(text) == cpus
    assert cpu_list(cpus) == text.strip()


TWO_GPUS = """
import atexit, torch, torch.numa.binding as binding
torch.cuda.device_count = lambda: 2  # of a machine of one NUMA node
binding._get_numa_node_index_for_gpu_index = lambda gpu_index: [0, 0][gpu_index]
"""


@pytest.mark.process
@pytest.mark.parametrize("mode", ["node", "socket", "exclusive", "core-complex"])
def test_workers_are_bound_as_pytorch_binds_them(mode, tmp_path, monkeypatch):
    from torch.numa import binding

    (tmp_path / "sitecustomize.py").write_text(TWO_GPUS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        binding, "_get_numa_node_index_for_gpu_index", lambda gpu_index: [0, 0][gpu_index]
    )
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    bound = []
    for index in range(2):
        try:
            bound.append(
                binding._get_logical_cpus_to_bind_to(gpu_index=index, numa_options=options)
            )
        except (RuntimeError, OSError) as error:  # a machine with fewer cores, or without sysfs
            with pytest.raises(ValueError, match=type(error).__name__):
                numa_cpus(mode, 2)
            return
    assert numa_cpus(mode, 2) == bound
    assert all(cpus <= os.sched_getaffinity(0) for cpus in bound)


@pytest.mark.process
def test_without_a_gpu_there_is_nothing_to_bind_to():
    with pytest.raises(ValueError, match=r"NVIDIA|CUDA"):
        numa_cpus("node", 1)
    with pytest.raises(ValueError, match="no-such-python"):
        numa_cpus("node", 1, python="no-such-python")
