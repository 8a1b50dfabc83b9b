"""Names of nodes as ranges: the same names in the same order, in little text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_trainer.record.hostlist import FEW, MOST, HostList, folded

NUMBERS = st.integers(0, 10**9).map(str) | st.integers(0, 999).map("{:03}".format)
NAMES = st.builds("{}{}".format, st.sampled_from(["", "n", "gpu-r01-n", "a.b-"]), NUMBERS)
LISTS = st.lists(
    st.builds(
        lambda prefix, first, count, width: [
            f"{prefix}{number:0{width}}" for number in range(first, first + count)
        ],
        st.sampled_from(["n", "gpu-r01-n", "x9-"]),
        st.integers(0, 120),
        st.integers(1, 40),
        st.integers(0, 4),
    )
    | st.lists(NAMES, min_size=1, max_size=4),
    min_size=1,
    max_size=8,
).map(lambda parts: [name for part in parts for name in part])


@given(LISTS)
def test_a_list_that_was_folded_has_the_same_names_in_the_same_order(names):
    text = folded(names)
    if len(names) <= FEW:
        assert text == names
        return
    found = HostList(text)
    assert list(found) == names
    assert len(found) == len(names)
    assert all(name in found for name in names)
    assert found[:16] == tuple(names[:16])
    assert (found[0], found[-1]) == (names[0], names[-1])


@example(["n1"], "pad" + "1" * 5000)
@given(LISTS, NAMES)
def test_a_name_is_in_it_exactly_if_it_is_one_of_them(names, name):
    names = [*names, *(f"pad{number}" for number in range(FEW))]
    assert (name in HostList(folded(names))) == (name in names)


def test_a_flagship_takes_little_text_and_any_number_of_digits():
    racks = [f"gpu-r{rack:03}-n{node:02}" for rack in range(128) for node in range(16)]
    assert len(folded(racks)) < len(json.dumps(racks)) / 10
    assert folded([f"node{number}" for number in range(1, 12_501)]) == "node[1-12500]"
    lost = [f"n{number:04}" for number in range(100) if number not in (7, 50)]
    assert folded(lost) == "n[0000-0006],n[0008-0049],n[0051-0099]"


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's commands")
def test_slurm_lists_the_same_names(tmp_path):
    names = [f"r{rack:02}-n{node}" for rack in range(20) for node in range(12) if rack % 7 != node]
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=c\nSlurmctldHost=localhost\nNodeName=n1\n")
    command = ["scontrol", "show", "hostnames", folded(names)]
    env = {**os.environ, "SLURM_CONF": str(conf)}
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == names


@pytest.mark.parametrize("odd", ["a b", "n[1-3]", "a,b", "ü1", ""])
def test_names_that_ranges_cannot_carry_are_left_as_they_are(odd):
    names = [*(f"n{number}" for number in range(FEW)), odd]
    assert folded(names) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n[3-1]",
        "n[1-2",
        "n[]",
        "a,,b",
        "n[1-2]x",
        f"n[0-{MOST}]",
        "n," * MOST + "n",
        "n[0-9999999999]",
    ],
)
def test_a_damaged_list_is_none(text):
    with pytest.raises(ValueError, match="list of"):
        HostList(text)
