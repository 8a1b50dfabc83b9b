"""Which GPU is meant: addresses as kernel and tools write them, UUIDs, failures of workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.gpus import Gpu, answering, named, of_xid, place_of, uuids_in
from elastic_trainer.record.failures import DETAIL_CHARS, Action, Failure, Kind, signature

UUIDS = [f"GPU-{digit * 8}-aaaa-bbbb-cccc-{digit * 12}" for digit in "01"]
TWO = answering(f"0, {UUIDS[0]}, 00000000:4F:00.0\n1, {UUIDS[1]}, 00000001:5D:00.0\n")
XID = "NVRM: Xid (PCI:0001:5d:00): 79, pid=1234, name=python, GPU has fallen off the bus."


@given(st.integers(0, 0xFFFF), st.integers(0, 255), st.integers(0, 31))
def test_kernel_and_tool_write_one_address_in_two_ways(domain, bus, device):
    place = (domain, bus, device)
    assert place_of(f"PCI:{domain:04x}:{bus:02x}:{device:02x}") == place
    assert place_of(f"{domain:08X}:{bus:02X}:{device:02X}.0") == place


@pytest.mark.parametrize("text", ["", "PCI:", "4F:00.0", "[N/A]", "0000:4F:00.0:1", "x:y:z"])
def test_what_is_no_address(text):
    assert place_of(text) is None


def test_an_xid_is_about_the_gpu_at_its_address():
    assert of_xid(f"[ 512.1] {XID}", TWO) == TWO[1]
    assert of_xid(XID.replace(":5d:", ":5e:"), TWO) is None
    assert of_xid("Xid (0000:4f:00): 48, DBE", TWO) == TWO[0]
    assert of_xid("no such thing", TWO) is None
    assert of_xid(XID, [Gpu("0", UUIDS[0], "[N/A]")]) is None


def test_uuids_are_found_whole():
    assert uuids_in(f"{UUIDS[1]} and {UUIDS[0]}, {UUIDS[1]}") == [UUIDS[1], UUIDS[0]]
    assert uuids_in(f"{UUIDS[0]}f GPU-1 MIG-{UUIDS[0][4:]}") == []


def failure(detail, kind=Kind.NODE_FAULT):
    return Failure(kind=kind, action=Action.EVICT, detail=detail)


@pytest.mark.parametrize(
    ("detail", "rank", "gpu"),
    [
        ("CUDA error: uncorrectable ECC error encountered", 1, 1),
        ("CUDA error: uncorrectable ECC error encountered", 7, None),
        (XID, 0, 1),
        (XID.replace(":5d:", ":5e:"), 0, None),
        ("OSError: [Errno 5] Input/output error", 0, None),
        (f"uncorrectable ECC error on {UUIDS[0]}", 1, 0),
    ],
)
def test_a_gpus_fault_names_it_and_no_other_does(detail, rank, gpu):
    said = named(failure(detail), rank, TWO).detail
    assert uuids_in(said) == ([] if gpu is None else [UUIDS[gpu]])
    assert named(failure(detail, Kind.CRASH), rank, TWO).detail == detail
    assert named(failure(said), rank, TWO).detail == said


def test_the_same_fault_of_two_gpus_is_the_same_error():
    detail = "CUDA error: uncorrectable ECC error encountered " + "x" * 400
    one, two = (named(failure(detail), rank, TWO).detail for rank in (0, 1))
    assert one != two
    assert signature(one) == signature(two)
    assert len(one) == len(two) == DETAIL_CHARS


def test_a_gpu_that_is_not_known_is_not_named():
    detail = "uncorrectable ECC error"
    assert named(failure(detail), 0, ()).detail == detail
    assert named(failure(detail), 0, (None, TWO[0])).detail == detail
