from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import queue
import threading
import time
from datetime import timedelta

import hostile_items as hostile
import pytest
import torch
from keeper_place import place_of
from torch import nn
from torch.distributed import checkpoint as dcp

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState, Lineage, Origin, update
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    StartFrom,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.events import Event
from elastic_trainer.state import manager as manager_module
from elastic_trainer.state import restore as restore_module
from elastic_trainer.state import state as state_module
from elastic_trainer.state import storage
from elastic_trainer.state.errors import BoardAwayError, CheckpointError
from elastic_trainer.state.manager import CheckpointManager
from elastic_trainer.state.restore import agreed_board
from elastic_trainer.state.save import CheckpointPolicy
from elastic_trainer.state.snapshot_tier import SnapshotTier
from elastic_trainer.state.snapshots.image import MAC_BYTES, PAGE, Header, file_name
from elastic_trainer.state.state import TrainingState
from elastic_trainer.worker.rank_grid import RankGrid

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


def memory_tier(images, epoch):
    return SnapshotTier(
        place_of(images),
        ParallelLayout(),
        rank=0,
        epoch=epoch,
        every_steps=1,
        emit=lambda *_, **__: None,
    )


class Run:
    """A one-rank run in a directory."""

    def __init__(
        self,
        root,
        *,
        board=None,
        at=lambda _: None,
        width=3,
        batch=12,
        start=None,
        since=None,
        epoch=0,
        images=None,
        **checkpoint,
    ):
        torch.manual_seed(0)
        self.root = root
        self.model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.board = board or FileBoard(root / "board")
        section = {"dir": str(root / "checkpoints"), "every_s": None, **checkpoint}
        config = TrainConfig(
            name="t",
            run_id="run-1",
            model_name="tiny",
            model=ModelShape(
                num_layers=1, dim=8, num_heads=1, num_kv_heads=1, ffn_dim=8, vocab_size=8
            ),
            ladder=Ladder((Rung(num_nodes=1, layout=ParallelLayout(), micro_batches=1),)),
            gpus_per_node=1,
            device="cpu",
            train=TrainSection(seq_len=8, global_batch=batch, steps=10),
            data=DataSection(path="/nowhere"),
            checkpoint=CheckpointSection(**section),
            elastic=ElasticSection(start_ceiling_s=20.0),
            start_from=start,
        )
        self.log = EventLog(root, "worker-0")
        self.manager = CheckpointManager(
            CheckpointPolicy.of(config, epoch=epoch, layout=ParallelLayout()),
            self.board,
            self.log,
            CPU,
            ranks=RankGrid(timedelta(seconds=20)),
            state=TrainingState(self.model, (self.optimizer,)),
            memory=images and memory_tier(images, epoch),
            at=at,
            since_mono=since,
        )

    def step(self):
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step, *, wait=True):
        return self.manager.save(step, wait=wait)

    def restore(self):
        return self.manager.restore()

    def keep(self, step):
        """Commit the state in memory; return the step that is committed."""
        self.manager.snapshot(step)
        self.manager.memory.wait(20)
        assert self.manager.votes() == (1.0, 0.0, 0.0)
        return self.manager.agreed(1.0, 0.0, 0.0)

    def events(self, name):
        lines = (self.root / "events" / "checkpoints-worker-0.jsonl").read_text().splitlines()
        return [e for e in map(Event.decode, lines) if e.event == name]

    def commits(self):
        current = FileBoard(self.root / "board").get_state()
        return [c.step for c in BoardState.decode(current[0]).commits] if current else []


def saved(root, *, step=1, **options):
    """Return a run that has trained and saved `step`."""
    run = Run(root, **options)
    run.step()
    assert run.save(step)
    return run


def test_save_and_restore_with_events_and_generator(tmp_path):
    run = Run(tmp_path)
    run.step()
    torch.rand(5)
    expected = torch.get_rng_state()
    assert run.save(1)
    torch.rand(5)
    fresh = Run(tmp_path)
    assert fresh.restore() == 1
    assert torch.equal(torch.get_rng_state(), expected)
    assert torch.equal(fresh.model[0].weight, run.model[0].weight)
    names = ("checkpoint.started", "checkpoint.committed", "step.committed", "checkpoint.restored")
    assert [len(run.events(name)) for name in names] == [1, 1, 1, 1]
    committed = run.events("checkpoint.committed")[0].fields
    assert committed["dir"] == "step-000000001-e000000"
    assert committed["save_s"] >= committed["stage_s"] >= 0


def test_the_generator_of_an_accelerator_is_restored_where_it_was_kept(tmp_path, monkeypatch):
    plain = Run(tmp_path)  # of a CPU, or of before
    plain.step()
    assert plain.save(1)
    device = torch.Generator().manual_seed(5)
    both = {"rng": torch.default_generator, "rng_device": device}
    monkeypatch.setattr(state_module, "generators_of", lambda _device: both)
    run = Run(tmp_path)
    assert run.restore() == 1
    assert torch.equal(device.get_state(), torch.Generator().manual_seed(5).get_state())
    run.step()
    assert run.save(2)
    expected = torch.rand(3, generator=device)
    device.manual_seed(9)
    assert Run(tmp_path).restore() == 2
    assert torch.equal(torch.rand(3, generator=device), expected)


def test_nothing_to_restore_is_step_zero(tmp_path):
    assert Run(tmp_path).restore() is None


def epoch_of(tmp_path, epoch):
    """Publish an epoch and return it."""
    board = FileBoard(tmp_path / "board")
    assert update(board, lambda state: dataclasses.replace(state, epoch=epoch)) is not None
    images = tmp_path / "images"
    images.mkdir(exist_ok=True)
    return Run(tmp_path, epoch=epoch, images=images)


def test_what_an_epoch_did_after_another_had_begun_from_an_older_state_never_counts(tmp_path):
    """Two halves of a job that were cut off from each other; the older got further."""
    older = epoch_of(tmp_path, 5)
    assert older.restore() is None
    assert older.keep(100) == 100
    newer = epoch_of(tmp_path, 6)
    assert newer.restore() == 100
    assert newer.keep(150) == 150
    assert older.keep(200) == 200, "nobody has told it"
    newest = epoch_of(tmp_path, 7)
    assert newest.restore() == 150
    assert newest.manager.restored_from == "memory"
    assert newest.keep(151) == 151
    lineage = BoardState.decode(newest.board.get_state()[0]).lineage
    assert lineage == Lineage((Origin(5, 0, 0), Origin(6, 5, 100), Origin(7, 6, 150)))
    for run in (older, newer, newest):
        run.manager.close()


def test_what_one_machine_holds_is_copied_again_at_full_priority(tmp_path, monkeypatch):
    """Beside busy cores an idle thread took 0.1 to 0.6 s where 0.02 s do."""
    run = epoch_of(tmp_path, 5)
    run.restore()
    assert run.keep(1) == 1
    run.manager.close()
    nice = queue.SimpleQueue()

    def copy_again(singles, place):
        nice.put((singles, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    monkeypatch.setattr(manager_module, "copy_again", copy_again)
    restore = manager_module.restore_snapshot
    found = lambda *args, **kwargs: restore(*args, **kwargs)._replace(singles=("it",))  # noqa: E731
    monkeypatch.setattr(manager_module, "restore_snapshot", found)
    newer = epoch_of(tmp_path, 6)
    assert newer.restore() == 1
    assert nice.get(timeout=20) == (("it",), os.getpriority(os.PRIO_PROCESS, 0))
    newer.manager.close()


def test_a_snapshot_counts_only_once_the_board_says_where_its_epoch_began(tmp_path):
    run = epoch_of(tmp_path, 5)
    assert update(run.board, lambda state: dataclasses.replace(state, epoch=6)) is not None
    assert run.restore() is None
    run.manager.snapshot(1)
    run.manager.memory.wait(0.5)
    assert run.manager.votes() == (0.0, 0.0, 0.0), "a newer epoch was published meanwhile"
    run.manager.close()
    fresh = epoch_of(tmp_path, 7)
    assert fresh.restore() is None
    fresh.manager.close()


def start_of(run):
    """The newest checkpoint of `run` as the start of another."""
    commit = BoardState.decode(run.board.get_state()[0]).commits[-1]
    fields = dataclasses.asdict(commit)
    del fields["t_unix"]
    return StartFrom(run=str(run.root), checkpoints=str(run.root / "checkpoints"), **fields)


def test_a_run_starts_from_another_ones_checkpoint_and_then_from_its_own(tmp_path):
    source = saved(tmp_path / "source", step=3)
    start = start_of(source)
    ours = Run(tmp_path / "ours", start=start)
    assert ours.restore() == 3
    assert ours.manager.restored_from == f"{tmp_path / 'source'}@3"
    assert ours.events("checkpoint.restored")[0].fields["dir"] == f"{start.checkpoints}/{start.dir}"
    assert torch.equal(ours.model[0].weight, source.model[0].weight)
    state, theirs = ours.optimizer.state_dict()["state"], source.optimizer.state_dict()["state"]
    assert all(torch.equal(state[i]["exp_avg_sq"], theirs[i]["exp_avg_sq"]) for i in theirs)
    ours.step()
    assert ours.save(4)
    assert source.commits() == [3]  # the other run's board is not ours to write
    again = Run(tmp_path / "ours", start=start)
    assert again.restore() == 4
    assert again.manager.restored_from == "storage"


def damage(root):
    for path in (root / "checkpoints").glob("*/__0_0.distcp"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


def test_a_damaged_start_is_never_a_start_from_nothing(tmp_path):
    source = saved(tmp_path / "source", step=3)
    damage(tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"HF304 .*source@3 .*sha256") as got:
        Run(tmp_path / "ours", start=start_of(source)).restore()
    assert got.value.exit_code == 93


def test_when_all_of_its_own_are_damaged_the_start_is_no_way_out(tmp_path):
    source = saved(tmp_path / "source", step=3)
    ours = Run(tmp_path / "ours", start=start_of(source))
    assert ours.restore() == 3
    assert ours.save(4)
    damage(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="HF301"):
        Run(tmp_path / "ours", start=start_of(source)).restore()


def test_where_no_other_node_can_read_a_checkpoint_the_one_before_counts(tmp_path, monkeypatch):
    ours = Run(tmp_path)
    ours.step()
    assert ours.save(3)
    assert ours.save(4)
    look = storage.open_regular

    def fails(path, *args, **kwargs):
        if "step-000000004" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return look(path, *args, **kwargs)

    monkeypatch.setattr(storage, "open_regular", fails)
    assert Run(tmp_path).restore() == 3


def test_torch_reads_our_checkpoints(tmp_path):
    run = saved(tmp_path)
    (directory,) = (tmp_path / "checkpoints").iterdir()
    target = {"model": {k: torch.zeros_like(v) for k, v in run.model.state_dict().items()}}
    dcp.load(target, checkpoint_id=directory)
    assert all(torch.equal(v, run.model.state_dict()[k]) for k, v in target["model"].items())


def test_due_by_steps_and_by_seconds(tmp_path):
    manager = Run(tmp_path, every_s=60.0, every_steps=10).manager
    assert not manager.due(1, 100.0)  # starts the clock: nobody knows since when
    assert not manager.due(2, 159.0)
    assert manager.due(3, 160.0)
    assert not manager.due(4, 161.0)
    assert manager.due(10, 170.0)
    assert not manager.due(11, 229.0)
    assert manager.due(12, 230.0)
    never = Run(tmp_path).manager
    assert not any(never.due(step, 1e9 * step) for step in range(1, 9))


def test_the_clock_goes_on_over_epochs_that_end_before_a_save_is_due(tmp_path):
    first = Run(tmp_path, every_s=60.0, since=100.0)
    assert not first.manager.due(1, 159.0)
    assert first.manager.due(2, 160.0)
    first.step()
    assert first.save(3)
    (commit,) = BoardState.decode(first.board.get_state()[0]).commits
    assert commit.t_unix == pytest.approx(time.time(), abs=60.0)
    second = Run(tmp_path, every_s=3600.0, since=100.0)
    assert not second.manager.due(4, 1e6)  # saved a moment ago, whenever the agent began


def test_poll_tells_of_a_commit_once(tmp_path):
    run = Run(tmp_path)
    run.step()
    assert run.save(1, wait=False)
    deadline = time.monotonic() + 20
    while (step := run.manager.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert step == 1
    assert run.manager.poll() is None


def test_unwritable_directory_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"HF204 checkpoint.dir: .*/file/ck ") as got:
        Run(tmp_path, dir=str(tmp_path / "file" / "ck"))
    assert got.value.exit_code == 93


def test_other_batch_is_refused(tmp_path):
    saved(tmp_path, step=2)
    with pytest.raises(CheckpointError, match=r"HF303 .*global_batch.* 12"):
        Run(tmp_path, batch=16).restore()


def test_other_model_is_refused_by_name(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"HF301 .*model\.0\.weight"):
        Run(tmp_path, width=5).restore()


class FlakyBoard:
    """A board whose swap fails `before` or `after` it happens, or that is gone for good."""

    def __init__(self, board, when):
        self.board, self.when = board, when
        self.name = board.name

    def get_state(self):
        if self.when == "gone":
            raise OSError(5, "Input/output error")
        return self.board.get_state()

    def set_state(self, state, token=None):
        if self.when == "after":
            self.board.set_state(state, token)
        if self.when:
            raise OSError(5, "Input/output error")
        return self.board.set_state(state, token)


@pytest.mark.parametrize(("when", "steps"), [("before", []), ("after", [1]), ("gone", [])])
def test_board_that_fails_during_the_commit(tmp_path, when, steps):
    board = FlakyBoard(FileBoard(tmp_path / "board"), when)
    run = Run(tmp_path, board=board)
    run.step()
    assert run.save(1) is bool(steps)
    assert run.commits() == steps
    # Where nobody can tell whether it counts, the data stays until a later commit can.
    assert (tmp_path / "checkpoints" / "step-000000001-e000000" / "manifest.json").exists()
    failed = run.events("checkpoint.failed")
    assert bool(failed) is not bool(steps)
    assert all("OSError" in e.fields["reason"] for e in failed)
    board.when = None
    assert run.save(2)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert [name[:14] for name in left] == [f"step-{s:09d}" for s in (*steps, 2)]


def test_board_that_cannot_be_read_at_restore(tmp_path, monkeypatch):
    monkeypatch.setattr(restore_module, "BOARD_WAIT_S", 0.0)
    board = FlakyBoard(FileBoard(tmp_path / "board"), "gone")
    with pytest.raises(BoardAwayError, match=r"\b0 s\b.*\[Errno 5\]"):
        Run(tmp_path, board=board).restore()


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), ValueError("version 9")])
def test_board_that_can_never_be_read_at_restore(tmp_path, monkeypatch, error):
    board = FileBoard(tmp_path / "board")

    def refuses():
        raise error

    monkeypatch.setattr(board, "get_state", refuses)
    with pytest.raises(CheckpointError, match="HF302"):
        Run(tmp_path, board=board).restore()


def test_board_that_is_away_for_a_moment_at_restore(tmp_path):
    """An API server that restarts must not end a job for good."""
    board = FlakyBoard(FileBoard(tmp_path / "board"), None)
    run = saved(tmp_path, board=board)
    board.when, now = "gone", [0.0]

    def sleep(seconds):
        now[0] += seconds
        if now[0] > restore_module.BOARD_WAIT_S - 5:
            board.when = None

    state = agreed_board(board, run.manager._group, epoch=0, mono=lambda: now[0], sleep=sleep)
    assert [commit.step for commit in state.commits] == [1]


class LaggingBoard:
    """Shows what was there before `shown`, as a file system with a stale cache does."""

    def __init__(self, board, old):
        self.board, self.old, self.shown = board, old, False

    def get_state(self):
        return self.board.get_state() if self.shown else self.old


def test_a_board_that_shows_an_older_epoch_is_read_again(tmp_path):
    """Its commits are older too: steps that were saved would be trained again."""
    run = saved(tmp_path)
    old = run.board.get_state()
    assert run.save(2)
    update(run.board, lambda state: dataclasses.replace(state, epoch=1))
    board, now = LaggingBoard(run.board, old), [0.0]

    def sleep(seconds):
        now[0] += seconds
        board.shown = now[0] > 30

    state = agreed_board(board, run.manager._group, epoch=1, mono=lambda: now[0], sleep=sleep)
    assert (state.epoch, [commit.step for commit in state.commits]) == (1, [1, 2])
    board.shown, now[0] = False, 0.0
    stays = {"mono": lambda: now[0], "sleep": lambda s: now.__setitem__(0, now[0] + s)}
    with pytest.raises(BoardAwayError, match=r"epoch 0\b.*epoch 1\b"):
        agreed_board(board, run.manager._group, epoch=1, **stays)


def test_error_of_our_own_in_the_thread_ends_saving_but_not_training(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.step()

    def broken(*_, **__):
        raise AssertionError("boom")

    monkeypatch.setattr(manager_module, "write_checkpoint", broken)
    assert not run.save(1)
    assert not run.save(2)
    first, second = run.events("checkpoint.failed")
    assert "AssertionError: boom" in first.fields["reason"]
    assert (first.step, second.step) == (1, 2)
    assert [event.step for event in run.events("checkpoint.started")] == [1]


def test_a_full_disk_is_told_as_the_disk_says_it(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.step()

    def full(*_, **__):
        error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704")
        error.__context__ = OSError(28, "No space left on device")
        raise error

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    assert not run.save(1)
    [failed] = run.events("checkpoint.failed")
    assert "OSError: [Errno 28]" in failed.fields["reason"]
    assert str(tmp_path / "checkpoints") in failed.fields["reason"]
    assert "inline_container" not in failed.fields["reason"]


def test_close_leaves_a_stuck_save_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(manager_module, "_CLOSE_WAIT_S", 0.1)
    gate = threading.Event()
    run = Run(tmp_path, at=lambda point: gate.wait(20) and None)
    run.step()
    assert run.save(1, wait=False)
    thread = run.manager._pending.thread
    started = time.monotonic()
    run.manager.close()
    assert time.monotonic() - started < 5
    assert [event.step for event in run.events("checkpoint.failed")] == [1]
    gate.set()
    thread.join(20)
    assert run.events("checkpoint.committed") == []  # nothing is written after close


def test_old_attempt_is_never_written_into(tmp_path):
    old = tmp_path / "checkpoints" / "step-000000001-e000000"
    old.mkdir(parents=True)
    (old / ".metadata").write_text("old")
    run = saved(tmp_path)
    assert run.events("checkpoint.committed")[0].fields["dir"] == f"{old.name}-a2"
    assert not old.exists()  # it was only data
    assert Run(tmp_path).restore() == 1


def test_commits_of_others_on_the_board_stay(tmp_path):
    run = Run(tmp_path)
    run.step()
    update(run.board, lambda state: dataclasses.replace(state, finished=True))
    assert run.save(1)
    assert BoardState.decode(run.board.get_state()[0]).finished


@pytest.mark.parametrize("part", ["", "manifest.json", ".metadata", "__0_0.distcp"])
def test_of_a_commit_that_is_spoilt_the_one_before_counts(tmp_path, part):
    run = Run(tmp_path)
    for step in (1, 2):
        run.step()
        assert run.save(step)
    bad = tmp_path / "checkpoints" / "step-000000002-e000000" / part
    bad.rename(tmp_path / "kept")
    for number, (kind, make) in enumerate(hostile.files(), start=1):
        make(bad)
        assert run.restore() == 1, kind
        assert [e.step for e in run.events("checkpoint.skipped")] == [2] * number, kind
        hostile.clear(bad)
    (tmp_path / "kept").rename(bad)
    assert run.restore() == 2


def test_no_neighbour_stops_a_save_or_the_removal_of_what_no_longer_counts(tmp_path):
    root, run = tmp_path / "checkpoints", Run(tmp_path, keep=1)
    run.step()
    for step, (kind, make) in enumerate(hostile.KINDS.items(), start=4):
        own = f"step-{step:09}-e000000"
        there = (own, f"{own}-a2", "step-000000000-e000000", "step-000000999-e000000-a7", "x")
        for name in there:
            make(root / name)
        assert run.save(step), kind
        for name in there:
            hostile.clear(root / name)
        assert [path.name for path in root.glob("*")] == [f"{own}-a3"], kind
    assert run.restore() == step


def headers():
    """Yield headers that an image may say it has, but for its MAC."""
    good = Header(
        epoch=6, step=300, rank=0, shard=0, num_shards=1, num_ranks=1, index_bytes=2,
        payload_bytes=2, mac="00" * MAC_BYTES,
    )  # fmt: skip
    names = [each.name for each in dataclasses.fields(Header)][:-1]
    for name, number in itertools.product(names, (0, 1, 2**32, 10**12, 2**63, 2**64 - 1)):
        yield dataclasses.replace(good, **{name: number})


def test_no_image_that_is_spoilt_hides_a_snapshot(tmp_path):
    run = epoch_of(tmp_path, 5)
    run.restore()
    assert run.keep(100) == 100
    run.manager.close()
    images = tmp_path / "images"
    for number, (_, make) in enumerate(hostile.files()):
        make(images / file_name("own", epoch=6, rank=number, slot=0))
    for number, header in enumerate(headers()):
        raw = header.encode(whole=True).ljust(3 * PAGE, b"\0")
        (images / file_name("copy", epoch=6, rank=number, slot=0)).write_bytes(raw)
    newer = epoch_of(tmp_path, 6)
    assert newer.restore() == 100
    assert newer.manager.restored_from == "memory"
    assert newer.keep(101) == 101
    newer.manager.close()
