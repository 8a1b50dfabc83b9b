"""The fleet's ledger: what counts against machines, for how long, and whom it keeps off."""

from __future__ import annotations

import json
from dataclasses import replace

import hostile_items as hostile
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.record.events import Event
from launcher.cli.main import run_cli
from launcher.fleet.node_ledger import NodeLedger, node_ledger_at, place_for
from launcher.fleet.nodes import Checked, exclude, listed, note_failed, note_moved, release
from launcher.fleet.preflight.report import CheckResult, NodeReport
from launcher.fleet.rules import (
    BURST_S,
    CAP,
    STRIKE_S,
    Entry,
    Verdict,
    entries_of,
    held_against_gpus,
    kept_off,
    moved,
    standings,
)
from launcher.platforms.base import Machine
from launcher.platforms.kubernetes.status_text import as_machines as kubernetes_machines
from launcher.platforms.slurm.queries import as_machines as slurm_machines
from launcher.record.files import LauncherLog
from launcher.runs.submitting.asking import ask_with_ledger
from launcher.spec.errors import UserError

GPUS = tuple(f"GPU-{digit * 8}-aaaa-bbbb-cccc-{digit * 12}" for digit in "012")
DAY = 86400.0
NOW = 1_700_000_000.0


def entry(machine="n1", verdict=Verdict.STRIKE, t=NOW, source="loss", **more):
    about = {"reason": "lost", "by": "me@head", **more}
    return Entry(t_unix=t, machine=machine, verdict=verdict, source=source, **about)


def release_of(*ended, t=NOW + 1, **more):
    about = {"releases": tuple(each.name for each in ended), "t": t, **more}
    return entry(ended[0].machine, Verdict.RELEASE, source="command", **about)


def strikes(machine, *days_ago):
    return [entry(machine, t=NOW - days * DAY) for days in days_ago]


def out(*entries, now=NOW):
    return {name for name, each in standings(entries, now).items() if each.is_out}


def test_three_strikes_within_seven_days_put_a_machine_out_until_the_first_expires():
    three = strikes("n1", 5, 3, 1)
    assert out(*three[1:]) == set()
    assert out(*three) == {"n1"}
    until = standings(three, NOW)["n1"].until_unix
    assert until == NOW - 5 * DAY + STRIKE_S
    assert out(*three, now=until - 1) == {"n1"}
    assert out(*three, now=until) == set()


def test_one_fault_that_many_report_is_one_strike():
    assert out(*(entry(t=NOW + k * BURST_S / 3) for k in range(3))) == set()


def test_hard_evidence_lasts_until_a_release_and_an_operators_as_long_as_was_said():
    bad = entry(verdict=Verdict.OUT, source="exclusion")
    assert out(bad, now=NOW + 80 * DAY) == {"n1"}
    assert out(bad, release_of(bad)) == set()
    assert out(replace(bad, until_unix=NOW + 9), now=NOW + 8) == {"n1"}
    assert out(replace(bad, until_unix=NOW + 9), now=NOW + 9) == set()
    again = entry(verdict=Verdict.OUT, t=NOW + 2, source="preflight")
    assert out(bad, release_of(bad), again) == {"n1"}


names = st.sampled_from([f"n{k}" for k in range(40)])
entries = st.builds(
    entry,
    names,
    st.sampled_from([*Verdict, "unheard-of"]),
    st.floats(NOW - 9 * DAY, NOW),
    operator=st.booleans(),
)


@given(st.lists(entries, max_size=120), st.integers(0, 40), st.integers(0, 45), st.randoms())
def test_what_is_kept_off_never_empties_the_pool(found, size, needed, rng):
    pool = [f"n{k}" for k in range(size)]
    held = standings(found, NOW)
    off = kept_off(held, pool, needed)
    automatic = [each for each in off if not each.by_operator]
    assert all(each.is_out and each.machine in pool for each in off)
    assert len(automatic) <= max(1, CAP * size)
    if automatic:
        assert size - len(off) >= needed, "enough are left"
    wished = {name for name in pool if name in held and held[name].by_operator}
    assert wished <= {each.machine for each in off}, "an operator's word counts"
    rng.shuffle(found)
    assert standings(found, NOW).keys() == held.keys()


def event(name, t, member, **fields):
    about = {"member": member, "host": member, **fields}
    return Event(event=name, t_unix=NOW + t, t_mono=t, node="n0", fields=about)


def formed(t):
    return event("epoch.formed", t, "n0")


def held(*events):
    found = entries_of(events, run="r", by="me@head")
    return sorted((each.machine, str(each.verdict), each.source) for each in found)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("node_fault", "out"),
        ("corruption", "out"),
        ("hang", "strike"),
        ("infrastructure", "strike"),
        (None, "strike"),
        ("crash", None),
        ("out_of_memory", None),
        ("user_error", None),
        ("fault", None),
    ],
)
def test_an_exclusion_counts_by_the_kind_of_its_failure(kind, verdict):
    excluded = event("member.evicted", 0, "n1", reason="twice", kind=kind)
    assert held(excluded) == ([("n1", verdict, "exclusion")] if verdict else [])


def test_a_machine_lost_alone_has_a_strike_if_the_run_continues():
    lost = event("member.lost", 5, "n1", reason="closed")
    assert held(lost, formed(6)) == [("n1", "strike", "loss")]
    assert held(formed(4), lost) == [], "the job ended"
    assert held(lost, event("member.lost", 7, "n2"), formed(8)) == [], "a switch, or the job's end"
    assert held(event("member.leaving", 1, "n1"), lost, formed(6)) == [], "it was asked to go"
    again = event("member.lost", 5.5, "n1", reason="another saw it later")
    assert held(lost, again, formed(6)) == [("n1", "strike", "loss")]


def test_a_straggler_and_one_readmitted():
    slow = event("worker.slow", 0, "n1", section="compute", ratio=1.9)
    back = event("member.readmitted", 1, "n1", reason="repaired")
    found = list(entries_of([slow, back], run="r", by="me@head"))
    assert [each.verdict for each in found] == ["strike", "release"]
    assert standings(found, NOW) == {}
    assert held(back) == [], "of what the run has not held against it, it says nothing"


def test_the_runs_epochs_say_what_came_before_a_readmission():
    """Two coordinators wrote them, and the first one's clock was an hour ahead."""
    bad = event("member.evicted", 3600, "n1", reason="XID 79", kind="node_fault")
    back = event("member.readmitted", 60, "n1", reason="repaired")
    for first, second, is_out in ((3, 5, set()), (5, 3, {"n1"})):
        pair = [replace(back, epoch=second), replace(bad, epoch=first)]
        assert out(*entries_of(pair, run="r", by="me@head"), now=NOW + 9999) == is_out


def test_the_ledger_keeps_each_entry_once_and_passes_over_what_is_none(tmp_path):
    folder = tmp_path / "fleet"
    fleet = NodeLedger(folder, wall=lambda: NOW)
    assert fleet.entries() == []
    assert fleet.add(entry(), entry("n9")) == [entry(), entry("n9")]
    assert fleet.add(entry()) == []
    for name, text in {"a": "{", "b": "[]", "c": '{"machine": 7}', "d": "\x00\xff"}.items():
        (folder / f"{name}.json").write_text(text, encoding="latin-1")
    assert fleet.entries() == [entry(), entry("n9")]
    [said] = fleet.trouble
    assert "4 of" in said
    old = entry(t=NOW - 100 * DAY)
    fleet.add(old)
    fleet.add(replace(old, verdict=Verdict.OUT))
    fleet.add(entry("n2"))
    assert old not in fleet.entries(), "nothing counts for so long"
    assert out(*fleet.entries()) == {"n1"}, "but what lasts until a release"


def test_a_ledger_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "fleet").write_text("a file")
    with pytest.raises(UserError, match="HF690"):
        NodeLedger(tmp_path / "fleet").add(entry())


def test_a_runs_record_is_harvested_once(tmp_path):
    run = tmp_path / "runs" / "one"
    log = LauncherLog(run, "n0", wall=lambda: NOW)
    log.emit("member.evicted", member="n1", host="n1", reason="XID 79", kind="node_fault")
    log.emit("step.completed", step=3)
    assert place_for(run) == str(tmp_path / "runs" / "fleet")
    fleet = node_ledger_at(place_for(run), wall=lambda: NOW)
    [found] = fleet.harvest(run)
    assert (found.machine, found.verdict, found.run) == ("n1", "out", "one")
    assert fleet.harvest(run) == []
    another = node_ledger_at(place_for(run), wall=lambda: NOW)
    assert another.harvest(run) == []
    assert another.harvest(run, since_unix=NOW + 1) == []
    (run / "job.json").write_text('{"fleet": "/shared/fleet"}')
    assert place_for(run) == "/shared/fleet"


def test_a_pod_reads_its_own_record_only(tmp_path):
    run = tmp_path / "runs" / "one"
    for name in ("n1", "n2"):
        log = LauncherLog(run, f"agent-{name}", wall=lambda: NOW)
        log.emit("member.evicted", member=name, host=name, reason="XID 79", kind="node_fault")
    fleet = NodeLedger(tmp_path / "fleet", wall=lambda: NOW)
    [found] = fleet.harvest(run, only="n2")
    assert found.machine == "n2"


class Register:
    """A register in memory; `meanwhile` is called before each swap."""

    name = "memory"

    def __init__(self):
        self.content, self.version, self.swaps = None, 0, 0
        self.meanwhile = lambda: None

    def get_state(self):
        return None if self.content is None else (self.content, self.version)

    def set_state(self, state, token=None):
        self.swaps += 1
        self.meanwhile()
        mine = token == (None if self.content is None else self.version)
        if mine:
            self.content, self.version = state, self.version + 1
        return self.content, self.version, mine


def test_one_bad_entry_of_a_register_hides_no_other_and_stops_no_writer():
    register = Register()
    fleet = NodeLedger(register, wall=lambda: NOW)
    good = [entry("n1", Verdict.OUT), entry("n3", Verdict.OUT)]
    fleet.add(*good)
    first, *lines = register.content.split(b"\n")
    bad = json.loads(entry("n2").encode())
    for kind, text in (*hostile.spoilt(bad), *hostile.TEXTS.items()):
        register.content = b"\n".join([first, text.replace(b"\n", b"") + b",", *lines])
        found = [each for each in fleet.entries() if each.machine in ("n1", "n3")]
        assert found == good, kind
        assert fleet.add(entry("n4")), kind


def test_a_ledger_in_a_register_keeps_what_several_write_at_once():
    register = Register()
    mine, theirs = (NodeLedger(register, wall=lambda: NOW) for _ in range(2))
    others = [entry("n2"), entry("n3")]
    register.meanwhile = lambda: others and theirs.add(others.pop())
    assert mine.add(entry()) == [entry()]
    assert mine.entries() == theirs.entries() == [entry(), entry("n2"), entry("n3")]
    swaps = register.swaps
    assert mine.add(entry(), entry("n2")) == []
    assert register.swaps == swaps, "what is there is not written again"
    mine.add(entry("n4", reason="x" * 9999))
    assert len(mine.entries()[-1].reason) < 999
    register.content = b"{"
    with pytest.raises(UserError, match="HF690"):
        mine.add(entry("n5"))
    assert register.content == b"{", "what cannot be read is not written over"


def test_who_never_gets_to_write_is_told():
    register, count = Register(), iter(range(999))

    def others():
        register.content = json.dumps({"entries": []}).encode()
        register.version += next(count) + 1

    register.meanwhile = others
    with pytest.raises(UserError, match="HF690"):
        NodeLedger(register, wall=lambda: NOW).add(entry())


class Platform:
    """Five machines; a job that finds fewer than three is refused."""

    def machines(self, files=None):
        return [Machine(name=f"n{k}") for k in range(1, 6)]

    def register_server(self, of):
        raise AssertionError

    def drain_machines(self, names, reason):
        raise AssertionError

    def still_on(self, names):
        raise AssertionError

    def find_problems(self, files, *, without=()):
        from launcher.spec.errors import NOWHERE, Problem

        left = {machine.name for machine in self.machines()} - set(without) - {"n5"}
        few = len(left) < 4
        return [Problem(code="HF680", message="too few", where=NOWHERE)] if few else []


def ask(fleet, needed=3):
    options = {"spec": None, "ledger": fleet, "needed": needed, "wall": lambda: NOW}
    answer = ask_with_ledger(Platform(), {}, **options)
    return answer.hosts, [warning.code for warning in answer.warnings]


def test_a_submission_is_kept_off_unless_it_would_never_start(tmp_path):
    fleet = NodeLedger(tmp_path / "fleet", wall=lambda: NOW)
    assert ask(fleet) == ([], [])
    fleet.add(entry("n5", Verdict.OUT))
    assert ask(fleet) == (["n5"], ["HF188"])
    assert ask(fleet, needed=5) == ([], [])
    release(fleet, ["n5"], check=None, reason="repaired", now_unix=NOW)
    fleet.add(entry("n1", Verdict.OUT))
    assert ask(fleet) == ([], ["HF189"]), "the partition has too few without it"
    (tmp_path / "fleet" / "odd.json").mkdir()
    assert ask(fleet) == ([], ["HF189", "HF189"]), "one does not count"
    exclude(fleet, ["n1"], reason="fan", for_s=None, now_unix=NOW)
    with pytest.raises(UserError, match="HF680"):
        ask(fleet)


def report(node, level, **more):
    finding = CheckResult(check="gpus", level=level, text="7 of 8", **more)
    return NodeReport(node=node, findings=(finding,))


def test_preflight_puts_out_gpus_by_name_and_knows_them_again_elsewhere(tmp_path):
    fleet = NodeLedger(tmp_path / "fleet", wall=lambda: NOW)
    good = [report(f"n{k}", "ok", seen=(GPUS[k],)) for k in (1, 2)]
    assert note_moved(fleet, good, NOW) == []
    bad = CheckResult(check="kernel", level="fail", text="XID 79", gpus=(GPUS[0],))
    other = CheckResult(check="shm", level="fail", text="full")
    third = NodeReport(node="n3", findings=(bad, other))
    assert [(each.gpu, each.reason) for each in note_failed(fleet, [*good, third], NOW)] == [
        (GPUS[0], "preflight: kernel: XID 79"),
        ("", "preflight: shm: full"),
    ]
    [told] = note_moved(fleet, [report("n1", "ok", seen=GPUS)], NOW + 1)
    assert (told.machine, told.verdict, told.gpu) == ("n1", "out", GPUS[0])


def test_preflight_puts_out_the_few_that_fail(tmp_path):
    fleet = NodeLedger(tmp_path / "fleet", wall=lambda: NOW)
    good = [report(f"n{k}", "ok") for k in (1, 2)]
    assert note_failed(fleet, [*good, report("n3", "fail"), report("n4", "fail")], NOW) == []
    [found] = note_failed(fleet, [*good, report("n3", "fail")], NOW)
    assert (found.machine, found.verdict, found.source) == ("n3", "out", "preflight")
    assert "7 of 8" in found.reason


def test_all_are_released_or_none(tmp_path):
    fleet = NodeLedger(tmp_path / "fleet", wall=lambda: NOW)
    fleet.add(entry("n1", Verdict.OUT))
    about = {"reason": "repaired", "now_unix": NOW + 1}
    failed = Checked(failed={"n2": "gpus: 7 of 8"})
    with pytest.raises(UserError, match="HF692") as error:
        release(fleet, ["n1", "n2"], check=lambda _: failed, **about)
    assert "n2" in str(error.value)
    assert out(*fleet.entries()) == {"n1"}
    release(fleet, ["n1", "n2"], check=lambda _: Checked(failed={}), **about)
    assert out(*fleet.entries()) == set()


def test_a_release_is_of_the_gpus_that_the_check_has_seen_there(tmp_path):
    fleet = NodeLedger(tmp_path / "fleet", wall=lambda: NOW)
    fleet.add(entry("n1", Verdict.OUT, gpu=GPUS[0]), entry("n1", Verdict.OUT, gpu=GPUS[1]))
    about = {"reason": "repaired", "now_unix": NOW + 1}
    checked = Checked(failed={}, gpus={"n1": {GPUS[0]}})
    release(fleet, ["n1"], check=lambda _: checked, **about)
    assert out(*fleet.entries()) == set()
    assert set(held_against_gpus(fleet.entries(), NOW + 2)) == {GPUS[1]}, "it is elsewhere"
    [told] = fleet.note_gpus(dict.fromkeys(GPUS[:2], ("n2", NOW + 3)))
    assert (told.machine, told.verdict, told.source, told.gpu) == ("n2", "out", "gpu", GPUS[1])
    assert "n1: lost" in told.reason
    assert fleet.note_gpus(dict.fromkeys(GPUS[:2], ("n2", NOW + 4))) == []
    assert out(*fleet.entries()) == {"n2"}
    release(fleet, [GPUS[1]], check=None, reason="new firmware", now_unix=NOW + 5)
    assert out(*fleet.entries()) == set()
    assert held_against_gpus(fleet.entries(), NOW + 6) == {}
    with pytest.raises(UserError, match="HF691"):
        release(fleet, [GPUS[1]], check=None, **about)


def test_a_release_of_one_gpu_leaves_what_else_is_held_against_its_machine():
    two = [entry("n1", Verdict.OUT, gpu=gpu, reason=gpu) for gpu in GPUS[:2]]
    one = standings([*two, release_of(two[0], gpu=GPUS[0])], NOW + 2)["n1"]
    assert (one.is_out, one.gpus, one.reason) == (True, (GPUS[1],), GPUS[1])
    days = [entry("n1", t=NOW - k * DAY, gpu=GPUS[k % 2]) for k in range(4)]
    assert out(*days) == {"n1"}
    assert out(*days, release_of(*days[1::2], gpu=GPUS[1])) == set()


ANY_GPU = st.builds(
    entry,
    st.sampled_from(["n1", "n2", "n3"]),
    st.sampled_from(list(Verdict)),
    st.integers(0, 9).map(lambda days: NOW - days * DAY),
    gpu=st.sampled_from(["", *GPUS]),
)
SEEN = st.dictionaries(
    st.sampled_from(GPUS),
    st.tuples(st.sampled_from(["n1", "n2", "n3"]), st.integers(-9, 1).map(lambda d: NOW + d * DAY)),
)


@given(st.lists(ANY_GPU, max_size=12, unique_by=lambda each: each.name), SEEN)
def test_what_is_held_against_a_gpu_follows_it_once(entries, seen):
    held, later = held_against_gpus(entries, NOW), NOW + 2 * DAY
    told = moved(entries, seen, NOW, by="me@head")
    assert [each.gpu for each in told] == sorted(
        gpu
        for gpu, (machine, t) in seen.items()
        if gpu in held and held[gpu].machine != machine and t > held[gpu].t_unix
    )
    for each in told:
        before = held[each.gpu]
        assert (each.machine, each.t_unix) == seen[each.gpu]
        assert (each.verdict, before.machine in each.reason) == (before.verdict, True)
    assert moved([*entries, *told], seen, NOW, by="me@head") == [], "it is told once"
    mine = [replace(each, t_unix=later) for each in told]
    before, after = standings(entries, later), standings([*entries, *mine], later)
    others = {name for name in before if name not in {each.machine for each in told}}
    assert {name: after[name] for name in others} == {name: before[name] for name in others}
    for each in mine:
        assert held_against_gpus([*entries, *mine], later)[each.gpu] == each
        assert each.machine in after
        held = [one for one in [*entries, *mine] if one.gpu == each.gpu]
        again = [*entries, *mine, release_of(*held, gpu=each.gpu)]
        assert each.gpu not in held_against_gpus(again, later + 2)
        root = [one for one in entries if one.gpu == each.gpu]
        early = [*entries, *mine, release_of(*root, gpu=each.gpu)]
        assert each.gpu not in held_against_gpus(early, later + 2), "nor what has followed it"


def test_an_exclusion_names_the_gpu_and_the_next_machine_that_has_it_is_told(tmp_path):
    run, fleet = tmp_path / "runs" / "one", NodeLedger(tmp_path / "fleet", wall=lambda: NOW)
    log = LauncherLog(run, "n0", wall=lambda: NOW - 60)
    log.emit("agent.started", node="a", host="n1", gpus=GPUS)
    reason = f"NVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus ({GPUS[2]})"
    log.emit("member.evicted", member="a", host="n1", reason=reason, kind="node_fault")
    [found] = fleet.harvest(run)
    assert (found.machine, found.verdict, found.gpu) == ("n1", "out", GPUS[2])
    later = LauncherLog(run, "n5", wall=lambda: NOW - 9)
    later.emit("agent.started", node="b", host="n7", gpus=["no UUID", 7, *GPUS])
    assert [(each.machine, each.gpu) for each in fleet.harvest(run)] == [("n7", GPUS[2])]
    assert fleet.harvest(run) == []
    assert out(*fleet.entries()) == {"n1", "n7"}


def test_the_list_has_what_the_platform_says_too(tmp_path):
    fleet = NodeLedger(tmp_path / "fleet", wall=lambda: NOW)
    fleet.add(entry("n1", Verdict.OUT))
    machines = [
        Machine(name="n1"),
        Machine(name="n2", closed="idle+drain: fan"),
        Machine(name="n3"),
    ]
    rows = [row.to_json() for row in listed(fleet, machines, NOW)]
    assert [(row["machine"], row["out"], row["platform"]) for row in rows] == [
        ("n1", True, ""),
        ("n2", False, "idle+drain: fan"),
    ]


def test_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words, code=0):
        assert run_cli(["nodes", *words, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    run("exclude", "n[1-2]", "n4", "--reason", "fan", "--for", "2d")
    told = run("history", "n1")
    assert [(each["machine"], each["verdict"], each["reason"]) for each in told] == [
        ("n1", "out", "fan")
    ]
    assert "@" in told[0]["by"]
    assert told[0]["until_unix"] == pytest.approx(told[0]["t_unix"] + 2 * DAY)
    problems = run("release", "n1", "--to", "pytorchjob", code=2)["problems"]
    assert [each["code"] for each in problems] == ["HF692"]
    run("release", "n1", "--force", "--to", "pytorchjob")
    assert [each["verdict"] for each in run("history", "n1")] == ["out", "release"]
    assert out(*NodeLedger(tmp_path / "runs" / "fleet").entries(), now=told[0]["t_unix"] + 9) == {
        "n2",
        "n4",
    }
    assert run("exclude", "n1", "--reason", "x", "--for", "soon", code=2)["problems"]


def test_what_slurm_says_of_its_nodes():
    nodes = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1 State=IDLE ThreadsPerCore=1
NodeName=n2 State=MIXED+DRAIN ThreadsPerCore=1 Reason=bad fan [root@2026-01-01T00:00]
NodeName=n3 State=DOWN* ThreadsPerCore=1 Reason=Not responding [slurm@2026]
NodeName=n4 State=ALLOCATED+REBOOT_REQUESTED
"""
    topology = "SwitchName=s1 Level=0 Nodes=n[1-2]\nSwitchName=top Level=1 Nodes=n[1-4]"
    found = {each.name: each for each in slurm_machines(nodes, topology)}
    assert [name for name, each in found.items() if not each.closed] == ["n1"]
    assert found["n2"].closed.startswith("mixed+drain: bad fan")
    assert [each.rack for each in found.values()] == ["s1", "s1", "", ""]


def test_what_kubernetes_says_of_its_nodes():
    def node(name, *, ready="True", more=(), gpus=8, **spec):
        conditions = [{"type": "Ready", "status": ready, "reason": "KubeletX"}, *more]
        labels = {"topology.kubernetes.io/rack": "r1"}
        annotations = {"holdfast.dev/drain-reason": "fan (holdfast drain, me@head)"}
        meta = {"name": name, "labels": labels, "annotations": annotations}
        capacity = {"cpu": name, "nvidia.com/gpu": gpus}
        status = {"conditions": conditions, "capacity": capacity}
        return {"metadata": meta, "spec": spec, "status": status}

    gpu = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    bad = {"key": "example.com/gpu", "value": "xid-79", "effect": "NoExecute"}
    role = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    soft = {"key": "example.com/slow", "effect": "PreferNoSchedule"}
    hung = {"type": "KernelDeadlock", "status": "True", "reason": "Hung", "message": "task\n x:1"}
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    found = kubernetes_machines(
        [
            node("n1", taints=[gpu], more=[{"type": "DiskPressure", "status": "False"}]),
            node("n2", taints=[gpu, cordon], unschedulable=True),
            node("n3", taints=[gpu], ready="Unknown"),
            node("n4", taints=[gpu, soft], more=[hung]),
            node("n5", taints=[gpu, {"key": "node.kubernetes.io/network-unavailable"}]),
            node("n6", taints=[gpu, bad]),
            node("n7", gpus=0, taints=[role]),
            *(node(f"c{k}", gpus=0) for k in range(9)),
            {"metadata": {}},
        ]
    )
    assert {each.name: each.closed for each in found if each.closed} == {
        "n2": "cordoned: fan (holdfast drain, me@head)",
        "n3": "Ready is Unknown: KubeletX",
        "n4": "KernelDeadlock is True: Hung: task x:1",
        "n5": "taint node.kubernetes.io/network-unavailable",
        "n6": "taint example.com/gpu=xid-79:NoExecute",
    }
    assert {each.rack for each in found} == {"r1"}
    assert len(found) == 16
