"""Drains: who is meant, what the batch host does for nodes that Slurm drains."""

from __future__ import annotations

import pytest

from launcher.fleet.node_ledger import NodeLedger
from launcher.fleet.nodes import drain, named
from launcher.fleet.rules import standings
from launcher.node.attempt import Attempt
from launcher.node.beat import Drains, asked_to_leave
from launcher.node.decide import EXIT_LEFT
from launcher.node.steps import to_start_again
from launcher.platforms.base import Machine
from launcher.platforms.commands import CommandResult
from launcher.spec.errors import UserError

MACHINES = [Machine(name=f"n{k}", rack="r1" if k < 3 else "r2") for k in range(1, 5)]


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["n2"], ["n2"]),
        (["n[4,1]", "n2"], ["n1", "n2", "n4"]),
        (["r2"], ["n3", "n4"]),
        (["r1", "n2"], ["n1", "n2"]),
    ],
)
def test_nodes_lists_and_racks(texts, names):
    assert named(texts, MACHINES) == names


@pytest.mark.parametrize("text", ["n5", "r3", "n[1-9]"])
def test_what_is_neither(text):
    with pytest.raises(UserError, match="HF691") as error:
        named([text], MACHINES)
    assert "r1, r2" in str(error.value)


class Platform:
    """Its machines are free one after the other."""

    def __init__(self):
        self.told, self.looks = [], [{"n1": "allocated", "n2": "allocated"}, {"n2": "mixed"}]

    def machines(self):
        return MACHINES

    def drain_machines(self, names, reason):
        self.told.append((list(names), reason))

    def still_on(self, names):
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


@pytest.mark.process
def test_a_drain_tells_the_platform_and_is_on_record(tmp_path):
    platform, fleet = Platform(), NodeLedger(tmp_path / "fleet", wall=lambda: 1e9)
    about = {"reason": "fan", "now_unix": 1e9, "say": lambda _: None}
    done = drain(platform, fleet, ["n1", "n2"], for_s=2.5, **about)
    assert (done.left, done.waiting) == (("n1",), {"n2": "mixed"})
    [(names, reason)] = platform.told
    assert names == ["n1", "n2"]
    assert reason.startswith("fan (holdfast drain, ")
    assert [(each.machine, each.verdict) for each in fleet.entries()] == [
        ("n1", "drain"),
        ("n2", "drain"),
    ]
    assert not any(each.is_out for each in standings(fleet.entries(), 1e9).values())


class Slurm:
    """Answers scontrol; `states` of the nodes."""

    def __init__(self, refuses=False):
        self.states, self.updates, self.refuses = {}, [], refuses

    def run(self, argv, *, timeout_s, stdin=""):
        assert argv[0] == "scontrol"
        if argv[1] == "update":
            self.updates.append(argv[2:])
            return CommandResult(argv=tuple(argv), code=int(self.refuses), out="", err="no")
        names = argv[-1].split(",")
        lines = [f"NodeName={n} State={self.states.get(n, 'ALLOCATED')} Reason=fan" for n in names]
        return CommandResult(argv=tuple(argv), code=0, out="\n".join(lines), err="")


@pytest.fixture
def attempt(tmp_path):
    found = Attempt(tmp_path, "17", 0)
    found.dir.mkdir(parents=True)
    return found


def batch_host(attempt, slurm):
    env = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURMD_NODENAME": "n1"}
    return Drains(attempt, env, slurm, wall=lambda: 0.0)


def test_nodes_that_drain_are_asked_once_and_given_back_when_they_have_left(attempt):
    slurm = Slurm()
    drains = batch_host(attempt, slurm)
    drains.look()
    assert [asked_to_leave(attempt, node) for node in ("n1", "n2")] == ["", ""]
    slurm.states = {
        "n1": "MIXED+DRAIN",
        "n2": "ALLOCATED+DRAIN+REBOOT_REQUESTED",
        "n3": "DOWN*+DRAIN",
    }
    drains.look()
    assert asked_to_leave(attempt, "n2").endswith("fan")
    assert asked_to_leave(attempt, "n1"), "it stops training there too"
    assert [asked_to_leave(attempt, node) for node in ("n3", "n4")] == ["", ""]
    assert slurm.updates == []
    for node in ("n1", "n2"):
        attempt.note_exit(node, EXIT_LEFT)
    drains.look()
    drains.look()
    assert slurm.updates == [["JobId=17", "NodeList=n1,n3,n4"]], "the batch host stays"
    exits = attempt.exits()
    assert to_start_again(["n2"], exits, over=False, allocated=None) == ()
    assert to_start_again(["n4"], exits, over=False, allocated=None) == ("n4",)


def test_a_node_that_slurm_keeps_is_asked_for_once(attempt):
    slurm = Slurm(refuses=True)
    drains = batch_host(attempt, slurm)
    attempt.note_exit("n2", EXIT_LEFT)
    drains.look()
    drains.look()
    assert len(slurm.updates) == 1
