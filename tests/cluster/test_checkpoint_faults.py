from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint_world import (
    Trainer,
    board_state,
    commits,
    directories,
    events,
    run_world,
)

from elastic_trainer.board.state import update
from elastic_trainer.record.failures import Kind, classify
from elastic_trainer.state import storage
from elastic_trainer.state.collective import StepFailedError
from elastic_trainer.state.errors import CheckpointError
from elastic_trainer.storage import files

POINTS = ("made", "data", "written", "manifest", "committed")


def reasons(run: Path) -> list[str]:
    return [event.fields["reason"] for event in events(run, "checkpoint.failed")]


def three_saves(run):
    trainer = Trainer(run)
    out = []
    for step in (1, 2, 3):
        trainer.step()
        assert trainer.save(step)
        out.append(trainer.digests())
    trainer.close()
    return out


def restore_each(runs):
    """Return for each run (step, digests), or the error's text."""
    out = []
    for run in runs:
        trainer = Trainer(Path(run), seed=99, epoch=2)
        try:
            out.append([trainer.restore(), trainer.digests()])
        except CheckpointError as error:
            out.append(str(error))
        trainer.close()
    return out


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


GONE = os.strerror(errno.ENOENT)
DAMAGE = {
    "bit": (flip, "__1_0.distcp", "sha256"),
    "short": (truncate, "__0_0.distcp", "bytes"),
    "gone": (Path.unlink, "__0_0.distcp", GONE),
    "index": (flip, ".metadata", "sha256"),
    "no-index": (Path.unlink, ".metadata", GONE),
    "manifest": (flip, "manifest.json", "sha256"),
    "directory": (lambda path: shutil.rmtree(path.parent), "manifest.json", GONE),
}
"""Name -> (what is done, to which file, what the reason has beside the file)."""


@pytest.mark.scenario
def test_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path):
    origin = tmp_path / "origin"
    origin.mkdir()
    saved = run_world(2, tmp_path, three_saves, origin)[0]
    runs = []
    for name, (damage, file, _) in DAMAGE.items():
        run = shutil.copytree(origin, tmp_path / name)
        damage(run / "checkpoints" / "step-000000003-e000001" / file)
        runs.append(run)
    everything = shutil.copytree(origin, tmp_path / "everything")
    for path in (everything / "checkpoints").glob("*/__0_0.distcp"):
        flip(path)
    empty = tmp_path / "empty"
    empty.mkdir()

    read = run_world(3, tmp_path, restore_each, [*runs, everything, empty])[0]
    for run, (step, digests) in zip(runs, read, strict=False):
        assert (step, digests) == (2, saved[1]), run
        (skipped,) = events(run, "checkpoint.skipped")
        assert skipped.fields["dir"] == "step-000000003-e000001"
        _, file, how = DAMAGE[run.name]
        assert re.search(rf"{re.escape(file)}\b.*{how}", skipped.fields["reason"])
    assert re.match(r"HF301 .*\b3\b", read[-2])
    assert "step-000000001-e000001: rank " in read[-2]
    assert read[-1][0] is None


def unread_each(cases):
    """Restore while `culprits` cannot read `name` of step 3; if that fails, again once they can."""
    return [_unread(Path(run), name, culprits) for run, name, culprits in cases]


def _unread(run, name, culprits):
    trainer = Trainer(run, seed=99, epoch=2)
    look, told = storage.open_regular, []
    path_of_it = run / "checkpoints" / "step-000000003-e000001" / name

    def fails(path, *args, **kwargs):
        if path == path_of_it and dist.get_rank() in culprits and not told:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return look(path, *args, **kwargs)

    storage.open_regular = files.open_regular = fails
    try:
        return trainer.restore(), told
    except StepFailedError as error:
        told.append(f"{type(error).__name__}: {error}")
        return trainer.restore(), told
    finally:
        storage.open_regular = files.open_regular = look
        trainer.close()


def test_a_checkpoint_that_one_node_cannot_read_is_no_worse_for_it(tmp_path):
    origin = tmp_path / "origin"
    origin.mkdir()
    run_world(2, tmp_path, three_saves, origin)

    def cases(culprits):
        return [
            (shutil.copytree(origin, tmp_path / f"{name}-{len(culprits)}"), name, culprits)
            for name in ("manifest.json", "__0_0.distcp")
        ]

    one, both = cases([0]), cases([0, 1])
    mine, others = run_world(2, tmp_path, unread_each, [*one, *both])
    for (run, name, _), (step, [here]), (_, [there]) in zip(one, mine, others, strict=False):
        assert step == 3
        assert not events(run, "checkpoint.skipped")
        assert classify(code=1, signal=None, log_tail=here).kind is Kind.INFRASTRUCTURE
        assert classify(code=1, signal=None, log_tail=there).kind is Kind.COLLATERAL
        assert f"{name}: {os.strerror(errno.EIO)}" in here
    for (run, _, _), answer in zip(both, mine[2:], strict=True):
        assert answer == [2, []]
        assert [event.step for event in events(run, "checkpoint.skipped")] == [3]


def die_at(run, point):
    armed = []

    def at(here):
        if armed and here == point and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(run, at=at)
    trainer.step()
    assert trainer.save(1)
    armed.append(point)
    trainer.step()
    trainer.save(2)


def go_on_each(runs):
    out = []
    for run in runs:
        trainer = Trainer(Path(run), seed=99, epoch=2)
        step = trainer.restore()
        trainer.step()
        assert trainer.save(step + 1)
        out.append(step)
        trainer.close()
    return out


def test_killed_at_any_write_point_the_newest_good_one_stays(tmp_path):
    runs = []
    for point in POINTS:
        run = tmp_path / point
        run.mkdir()
        assert run_world(2, tmp_path, die_at, run, point, doomed=(0,)) == [None, None]
        assert len(directories(run)) == 2
        runs.append(run)
    assert run_world(1, tmp_path, go_on_each, runs)[0] == [1, 1, 1, 1, 2]
    for run in runs:
        dirs = [commit.dir for commit in board_state(run).commits]
        assert directories(run) == dirs  # what did not count is gone
        assert len(dirs) == (3 if run.name == "committed" else 2)


def peer_dies(run):
    def at(point):
        if point == "data" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(run, at=at)
    trainer.step()
    committed = trainer.save(1)
    trainer.close()
    return committed


def test_save_ends_by_itself_when_a_peer_dies(tmp_path):
    assert run_world(2, tmp_path, peer_dies, tmp_path, doomed=(1,)) == [False, None]
    assert len(reasons(tmp_path)) == 1
    assert commits(tmp_path) == []


def fail_at_each(run, code):
    """A save that fails at every point in turn, on rank 0 and on rank 1; then one that works."""
    failing = []

    def at(here):
        if (here, dist.get_rank()) in failing:
            raise OSError(code, os.strerror(code), "injected")

    trainer = Trainer(run, at=at)
    trainer.step()
    assert trainer.save(1)
    cases = [("made", 0), ("data", 0), ("data", 1), ("written", 1), ("manifest", 0)]
    for case in cases:
        failing[:] = [case]
        trainer.step()
        assert not trainer.save(2)
    failing.clear()
    assert trainer.save(2)
    trainer.close()
    return len(cases)


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "free space there"), (errno.EROFS, "mount it writable")],
)
def test_failed_saves_are_events_and_the_next_one_works(tmp_path, code, advice):
    cases = run_world(2, tmp_path, fail_at_each, tmp_path, code)[0]
    said = reasons(tmp_path)
    assert len(said) == cases
    for reason in said:
        assert os.strerror(code) in reason
        assert f"In {tmp_path / 'checkpoints'}: {advice}" in reason
    assert commits(tmp_path) == [1, 2]
    dirs = directories(tmp_path)
    assert dirs == [commit.dir for commit in board_state(tmp_path).commits]


def fill_then_free(run):
    trainer = Trainer(run)
    trainer.step()
    assert trainer.save(1)
    filler = run / "checkpoints" / "filler"
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
    dist.barrier()
    trainer.step()
    assert not trainer.save(2)
    if dist.get_rank() == 0:
        filler.unlink()
    dist.barrier()
    assert trainer.save(3)
    if dist.get_rank() == 0:
        remount(run / "checkpoints", "ro")
    dist.barrier()
    assert not trainer.save(4)
    trainer.close()
    said = None
    try:
        Trainer(run, epoch=2)
    except CheckpointError as error:
        said = str(error)
    dist.barrier()  # a rank that ends would break the groups that others still make
    return said


def remount(path: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(path)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "checkpoints"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs; injected errors cover the same path")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_full_and_read_only_disk(tmp_path, small_disk):
    error = run_world(2, tmp_path, fill_then_free, tmp_path)[0]
    assert error.startswith(f"HF204 checkpoint.dir: {small_disk} ")
    assert os.strerror(errno.EROFS) in error
    full, read_only = reasons(tmp_path)
    assert os.strerror(errno.ENOSPC) in full
    assert os.strerror(errno.EROFS) in read_only
    assert commits(tmp_path) == [1, 3]
    assert directories(tmp_path) == [commit.dir for commit in board_state(tmp_path).commits]


def fenced(run):
    trainer = Trainer(run)
    trainer.step()
    assert trainer.save(1)
    if dist.get_rank() == 0:
        update(trainer.board, lambda state: dataclasses.replace(state, epoch=2))
    dist.barrier()
    assert not trainer.save(2)
    trainer.close()


def test_save_of_an_older_epoch_counts_as_nothing(tmp_path):
    run_world(2, tmp_path, fenced, tmp_path)
    (reason,) = reasons(tmp_path)
    assert reason.endswith("epoch 2")
    assert commits(tmp_path) == [1]
    assert directories(tmp_path) == ["step-000000001-e000001"]


def keep_some(run):
    trainer = Trainer(run, epoch=3, keep=2, keep_every_steps=3)
    if dist.get_rank() == 0:
        for name in ("mine", "step-000000003-e000001", "step-000000009-e000004"):
            (run / "checkpoints" / name).mkdir()
    for step in range(1, 9):
        trainer.step()
        assert trainer.save(step)
    trainer.close()


def test_retention_keeps_the_newest_the_milestones_and_what_is_not_ours(tmp_path):
    run_world(2, tmp_path, keep_some, tmp_path)
    assert commits(tmp_path) == [7, 8]
    assert directories(tmp_path) == [
        "mine",
        "step-000000003-e000003",
        "step-000000006-e000003",
        "step-000000007-e000003",
        "step-000000008-e000003",
        "step-000000009-e000004",
    ]
