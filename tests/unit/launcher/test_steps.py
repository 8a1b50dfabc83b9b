"""An srun for each node: what is started again, and when all is over. Processes are made up."""

from __future__ import annotations

import signal

import pytest

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState, Commit, Ended, Lease
from launcher.node.agent import as_of_one_srun
from launcher.node.attempt import Attempt
from launcher.node.decide import attempt_result
from launcher.node.steps import (
    AWAY_PAUSE_S,
    AWAY_S,
    LONE_TRIES,
    MOST_STARTS,
    SlurmSteps,
    command_of,
    grouped,
    of_one_node,
    refused,
    to_start_again,
)
from launcher.platforms.commands import CommandResult
from launcher.record.files import RunRecord


class Srun:
    """A step that ends when it is told to."""

    def __init__(self, argv):
        self.argv, self.code, self.got, self.said = argv, None, [], ""

    @property
    def nodes(self):
        option = next(a for a in self.argv if a.startswith("--nodelist="))
        return option.partition("=")[2]

    def poll(self):
        return self.code

    def send_signal(self, number):
        self.got.append(number)


class World:
    """A batch host; `acts` happen one a turn, a second apart."""

    def __init__(self, run_dir, nodes):
        self.attempt = Attempt(run_dir, "17", 0)
        self.attempt.dir.mkdir(parents=True)
        self.sruns, self.now, self.allocated = [], 0.0, nodes
        self.steps = SlurmSteps(
            self.attempt, nodes, ["srun", "--wait=0", "agent"], start=self.start, commands=self,
            mono=lambda: self.now,
        )  # fmt: skip

    def start(self, argv):
        self.sruns.append(Srun(argv))
        return self.sruns[-1]

    def run(self, argv, *, timeout_s, stdin=""):
        assert argv[0] == "squeue"
        out = ",".join(self.allocated)
        return CommandResult(argv=argv, code=0 if out else 1, out=out, err="")

    def of(self, node):
        return next(srun for srun in reversed(self.sruns) if srun.nodes == node)

    def ends(self, node, code, *, says=True):
        if says:
            self.attempt.note_exit(node, code)
        self.of(node).code = code

    def serve(self, *acts, then=lambda: None):
        left = list(acts)

        def wait(seconds):
            self.now += seconds
            return left.pop(0)() if left else then()

        code = self.steps.serve(wait)
        assert not left, "it ended early"
        return code


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, ["n1", "n2", "n3"])


def nothing():
    return None


def test_groups_are_even_and_keep_nodes_apart_that_hold_each_others_copies():
    assert grouped(["a", "b", "c"]) == [("a",), ("b",), ("c",)]
    nodes = [f"n{i}" for i in range(2052)]
    many = grouped(nodes)
    assert len(many) == 64
    assert sorted(sum(many, ())) == sorted(nodes)
    assert {len(group) for group in many} == {32, 33}
    group_of = {node: index for index, group in enumerate(many) for node in group}
    for apart in (*range(1, 62), *(2**power for power in range(6, 11)), 192, 384, 640):
        pairs = zip(nodes, nodes[apart:], strict=False)
        assert all(group_of[one] != group_of[other] for one, other in pairs), apart


def test_the_command_has_its_nodes():
    argv = command_of(["srun", "--wait=0", "python"], ["n1", "n4"], again=False)
    assert argv == ["srun", "--nodelist=n1,n4", "--nodes=2", "--ntasks=2", "--wait=0", "python"]
    assert "--overlap" in command_of(["srun", "python"], ["n1"], again=True)


@pytest.mark.parametrize(
    ("exits", "over", "allocated", "again"),
    [
        ({}, False, None, ("n1", "n2")),
        ({}, False, {"n2", "n3"}, ("n2",)),
        ({"n1": 92}, False, None, ("n2",)),
        ({"n1": 1, "n2": 93}, False, None, ()),
        ({"n3": 91}, False, None, ()),  # from the coordinator, so it is for all
        ({"n3": 0}, False, None, ()),
        ({}, True, None, ()),
    ],
)
def test_what_is_started_again(exits, over, allocated, again):
    assert to_start_again(["n1", "n2"], exits, over=over, allocated=allocated) == again


def test_a_node_has_its_srun_and_all_end_together(world):
    ends = [lambda n=n: world.ends(n, 0) for n in ("n1", "n2", "n3")]
    assert world.serve(*ends) == 0
    assert [srun.nodes for srun in world.sruns] == ["n1", "n2", "n3"]


def test_a_step_that_was_lost_is_started_again_and_no_other_is_touched(world):
    def check():
        assert [srun.nodes for srun in world.sruns] == ["n1", "n2", "n3", "n2"]
        assert world.sruns[0].got == world.sruns[2].got == []
        for node in ("n1", "n2", "n3"):
            world.ends(node, 0)

    lost = [lambda: world.ends("n2", 137, says=False), nothing, nothing, nothing, check]
    assert world.serve(*lost) == 137
    record = RunRecord(world.attempt.run_dir)
    record.poll()
    [event] = [e for e in record.events if e.event == "step.lost"]
    assert event.fields == {"nodes": ["n2"], "code": 137, "alone": False}


def test_a_node_that_has_left_the_job_is_not_started_again(world):
    def leaves():
        world.allocated = ["n1", "n3"]
        world.ends("n2", 0, says=False)

    def end():
        for node in ("n1", "n3"):
            world.ends(node, 0)

    assert world.serve(leaves, *[nothing] * 9, end) == 0
    assert [srun.nodes for srun in world.sruns] == ["n1", "n2", "n3"]


def test_asked_to_save_it_tells_all_and_starts_nothing_more(world):
    def asked():
        world.ends("n3", 137, says=False)  # waits to be started again
        return signal.SIGUSR2

    def end():
        assert [srun.got for srun in world.sruns[:2]] == [[signal.SIGUSR2]] * 2
        for node in ("n1", "n2"):
            world.ends(node, 91)

    assert world.serve(asked, nothing, nothing, nothing, end) == 137
    assert len(world.sruns) == 3


def test_all_lost_it_says_what_storage_has_and_gives_up_after_a_few_tries(world, capsys):
    commit = Commit(epoch=1, step=40, dir="step-40", manifest_sha256="0" * 64)
    FileBoard(world.attempt.run_dir / "board").set_state(
        BoardState(commits=(commit,)).encode(), None
    )

    def all_lost():
        for srun in world.sruns:
            srun.code = 137

    assert world.serve(then=all_lost) == 137
    assert len(world.sruns) == 3 * (1 + LONE_TRIES)
    assert "step 40" in capsys.readouterr().err


def lost_steps(world):
    record = RunRecord(world.attempt.run_dir)
    record.poll()
    return [event for event in record.events if event.event == "step.lost"]


def test_an_srun_that_finds_the_controller_away_is_started_until_it_is_back(world, capsys):
    there, world.allocated = world.allocated, []

    def turn():
        if world.now < 20 * AWAY_PAUSE_S:
            for srun in world.sruns:
                srun.code = 1  # "Unable to confirm allocation for job 17"
            return
        world.allocated = there
        for node in there:
            world.ends(node, 0)

    assert world.serve(then=turn) == 1
    assert len(world.sruns) > 3 * (1 + LONE_TRIES)
    assert not lost_steps(world)
    said = capsys.readouterr().err
    assert "n1, n2, n3" in said
    assert "memory" not in said


def test_a_controller_that_stays_away_ends_the_job_some_day(world):
    world.allocated = []

    def all_fail():
        for srun in world.sruns:
            srun.code = 1

    assert world.serve(then=all_fail) == 1
    assert AWAY_S < world.now < AWAY_S + 60
    assert lost_steps(world)


def test_a_controller_that_answers_does_not_hide_a_step_that_fails(world):
    def all_fail():
        for srun in world.sruns:
            srun.code = 1  # as where the image cannot be pulled

    assert world.serve(then=all_fail) == 1
    assert len(world.sruns) == 3 * (1 + LONE_TRIES)


STEP = "srun: error: Unable to create step for job 4: "
REFUSED = STEP + "Invalid generic resource (gres) specification"
FAILS = "srun: error: n1: task 0: Exited with exit code 1"
AWAY = "srun: error: Task launch for StepId=4.0 failed on node n1: Communication connection failure"


@pytest.mark.parametrize(
    ("said", "starts", "is_refusal"),
    [(REFUSED, 1, True), (FAILS, 1 + LONE_TRIES, True), (AWAY, 1 + LONE_TRIES, False)],
)
def test_what_never_begins_is_started_a_few_times_and_a_refusal_once(
    world, said, starts, is_refusal
):
    world.attempt.logs.mkdir(parents=True)
    (world.attempt.logs / "n2.log").write_text("a\nno python3 in the image\n")

    def all_fail():
        for srun in world.sruns:
            srun.code, srun.said = 1, said

    assert world.serve(then=all_fail) == 1
    assert len(world.sruns) == 3 * starts
    refusal = world.attempt.refusal()
    assert (said in refusal) == is_refusal
    found = attempt_result(BoardState(), world.attempt.name, exits={}, refusal=refusal)
    assert found.code == (93 if is_refusal else 92)
    assert (said in found.reason) == is_refusal


def test_a_refusal_is_no_error_of_the_job_once_an_agent_has_begun(world):
    lease = Lease(holder="1", node="n1", job=world.attempt.name, address="a", port=1, term=1)

    FileBoard(world.attempt.run_dir / "board").set_state(BoardState(lease=lease).encode(), None)

    def all_fail():
        for srun in world.sruns:
            srun.code, srun.said = 1, REFUSED

    assert world.serve(then=all_fail) == 1
    assert len(world.sruns) == 3 * (1 + LONE_TRIES)
    assert not world.attempt.refusal()


def test_one_node_that_never_begins_is_left_out_after_a_few_starts(world):
    def n2_fails():
        world.of("n2").code = 1
        world.of("n2").said = REFUSED
        if world.now > 3600:
            world.ends("n1", 0)
            world.ends("n3", 0)

    assert world.serve(then=n2_fails) == 1
    assert len(world.sruns) == 2 + MOST_STARTS
    assert not world.attempt.refusal()


@pytest.mark.parametrize(
    ("said", "for_good"),
    [
        ("", False),
        (REFUSED, True),
        ("srun: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.", True),
        ("/usr/bin/srun: unrecognized option '--nosuch'; Try \"srun --help\"", True),
        (STEP + "More processors requested than permitted", True),
        ("slurmstepd: error: pyxis: [ERROR] URL https://a returned error code: 404", None),
        ("slurmstepd: error: pyxis: [ERROR] URL https://a returned error code: 503", False),
        ("srun: Job 4 step creation temporarily disabled, retrying; " + REFUSED, True),
        (FAILS, None),
        (AWAY, False),
        (STEP + "Job/step already completing or completed", False),
        ("srun: error: Unable to confirm allocation for job 4: Invalid job id specified", False),
        ("srun: error: Node failure on n2", False),
    ],
)  # fmt: skip
def test_words_of_slurm_that_no_try_changes(said, for_good):
    assert refused(said) is for_good


SRUN = ["srun", "--mem=0", "--output=x", "python", "--gres=no"]


@pytest.mark.parametrize(
    ("env", "more", "asked"),
    [
        ({"SLURM_GPUS": "16", "SLURM_GPUS_ON_NODE": "8"}, [], ["--gpus-per-node=8"]),
        ({"SLURM_GPUS": "h100:16", "SLURM_GPUS_ON_NODE": "8"}, [], ["--gpus-per-node=h100:8"]),
        ({"SLURM_GPUS": "16", "SLURM_GPUS_ON_NODE": "8"}, ["--gres=gpu:2"], []),
        ({"SLURM_GPUS": "16", "SLURM_GPUS_ON_NODE": "8"}, ["--gpus-per-task=2"], []),
        ({"SLURM_GPUS_ON_NODE": "8"}, [], []),
    ],
)
def test_the_gpus_of_a_job_are_asked_for_per_node(env, more, asked):
    command, own = of_one_node([SRUN[0], *more, *SRUN[1:]], {**env, "X": "1"})
    assert command == ["srun", *asked, *more, *SRUN[1:]]
    assert "SLURM_GPUS" not in own
    assert own["X"] == "1"


def test_a_task_sees_the_nodes_that_one_srun_for_all_would_have_shown_it():
    env = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "A": "x"}
    seen = as_of_one_srun(env, "n2", ("n1", "n2", "n3"))
    assert (seen["SLURM_PROCID"], seen["SLURM_NODEID"], seen["SLURM_NTASKS"]) == ("1", "1", "3")
    assert seen["SLURM_TASKS_PER_NODE"] == "1(x3)"
    assert (seen["SLURM_STEP_NODELIST"], seen["A"]) == ("n[1-3]", "x")
    part = as_of_one_srun({**env, "HOLDFAST_NODES": "n2"}, "n2", ("n2",))
    assert (part["SLURM_NNODES"], part["SLURM_STEP_NODELIST"]) == ("1", "n2")
    assert as_of_one_srun(env, "elsewhere", ("n1",)) == env


def test_the_board_says_that_the_job_has_ended(world):
    ended = BoardState(ended=Ended(job=world.attempt.name, code=93, reason="no use"))

    def end():
        FileBoard(world.attempt.run_dir / "board").set_state(ended.encode(), None)
        for node in ("n1", "n2", "n3"):
            world.ends(node, 137, says=False)

    assert world.serve(end) == 137
    assert len(world.sruns) == 3
