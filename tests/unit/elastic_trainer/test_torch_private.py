import ast
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import elastic_trainer
from elastic_trainer.worker import torch_private
from elastic_trainer.worker.torch_private import OneThreadGloo

ROOT = Path(elastic_trainer.__file__).parent
OPERATORS = ("torch.ops", "torch._foreach_")
"""Their schemas are versioned."""
SINCE_2_13 = ("all_gather_single_autograd", "reduce_scatter_single_autograd")
PRELOAD = "preload.py"
"""Imports modules by name for speed alone, and leaves out what is not there."""


def is_private(dotted):
    parts = dotted.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and p != "__version__" for p in parts)


def dotted_name(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def private_names(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted_name(node)]
        else:
            continue
        yield from (n for n in names if is_private(n) and not n.startswith(OPERATORS))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch.distributed.tensor._utils import x", ["torch.distributed.tensor._utils.x"]),
        ("from torch.distributed.run import _x", ["torch.distributed.run._x"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("torch._dynamo.reset()", ["torch._dynamo.reset", "torch._dynamo"]),
        ("torch.ops.aten._flash()\ntorch._foreach_mul_()\ntorch.__version__", []),
        ("from torch import nn", []),
    ],
)
def test_the_check_sees_private_names(source, found):
    assert list(private_names(source)) == found


def test_only_one_module_uses_private_names_of_torch():
    found = {
        str(path.relative_to(ROOT)): names
        for path in ROOT.rglob("*.py")
        if path.name not in {"torch_private.py", PRELOAD}
        if (names := sorted(set(private_names(path.read_text(encoding="utf-8")))))
    }
    assert found == {}


@pytest.mark.parametrize("name", torch_private._NAMES)
def test_this_torch_has_every_name(name):
    if name in SINCE_2_13 and torch.__version__.startswith(("2.11.", "2.12.")):
        pytest.skip("the trainer needs it, and torch 2.13")
    assert getattr(torch_private, name) is not None


def test_a_name_that_torch_has_lost_is_told_with_the_tested_versions(monkeypatch):
    monkeypatch.setitem(torch_private._NAMES, "gone", "torch.nosuch")
    with pytest.raises(ImportError) as failed:
        from elastic_trainer.worker.torch_private import gone  # noqa: F401
    assert torch.__version__ in str(failed.value)
    assert torch_private.TESTED in str(failed.value)
    with pytest.raises(AttributeError):
        _ = torch_private.never_heard_of


class FakeOptions:
    _timeout = _threads = _devices = None


class FakeGloo:
    """A gloo group of a torch whose options and arguments are others."""

    create_device = create_default_device = staticmethod(lambda **_: "device")

    def __init__(self, *args, **more):
        self.args, self.more = args, more


@pytest.mark.parametrize(
    ("options", "more", "one_thread"),
    [
        (FakeOptions, {}, True),
        (FakeOptions, {"unheard_of": 1}, False),
        (type("Known", (FakeOptions,), {"unheard_of": None}), {"unheard_of": 1}, True),
        (type("Renamed", (), {}), {}, False),
        (None, {}, False),
    ],
)
def test_a_gloo_group_of_another_torch_is_its_own_where_its_options_are_unknown(
    options, more, one_thread, monkeypatch
):
    fake = FakeGloo if options is None else type("Gloo", (FakeGloo,), {"_Options": options})
    monkeypatch.setattr(dist, "ProcessGroupGloo", fake)
    timeout = timedelta(seconds=3)
    group = OneThreadGloo("store", 0, 2, timeout, **more)
    if one_thread:
        (*_, used) = group.args
        assert (used._threads, used._timeout, used._devices) == (1, timeout, ["device"])
        assert all(getattr(used, name) == value for name, value in more.items())
    else:
        assert group.args == ("store", 0, 2, timeout)
        assert group.more == more


def test_what_is_not_there_is_done_without(monkeypatch):
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
    assert torch_private.flight_recorder("cpu")() == b""
    monkeypatch.delattr(dist.distributed_c10d, "_world")
    assert torch_private.all_groups() == []
