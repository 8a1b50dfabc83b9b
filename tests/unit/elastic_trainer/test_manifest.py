from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.board.state import BoardState, Commit
from elastic_trainer.plan.anomalies import AnomalyRecord, Void
from elastic_trainer.state.errors import FencedError
from elastic_trainer.state.manifest import (
    FileEntry,
    Manifest,
    directory_name,
    parse_directory,
    share_of,
    superseded,
    with_commit,
)

MANIFEST = Manifest(
    run_id="r",
    epoch=3,
    step=40,
    consumed_samples=480,
    layout="dp4-pp1-cp1-tp1",
    world_size=4,
    files={"__0_0.distcp": FileEntry(10, "a" * 64), ".metadata": FileEntry(4, "b" * 64)},
)


def commit(step: int, epoch: int = 1) -> Commit:
    name = directory_name(step, epoch)
    return Commit(epoch=epoch, step=step, dir=name, manifest_sha256="0" * 64)


def test_round_trip_is_stable():
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST
    assert Manifest.decode(MANIFEST.encode()).encode() == MANIFEST.encode()


def test_other_version_is_refused():
    raw = json.loads(MANIFEST.encode()) | {"version": 9}
    with pytest.raises(ValueError, match="version 9"):
        Manifest.decode(json.dumps(raw).encode())


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ""])
def test_files_stay_inside_the_directory(name):
    bad = dataclasses.replace(MANIFEST, files={name: FileEntry(1, "")})
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        Manifest.decode(bad.encode())


@given(st.integers(0, 10**12), st.integers(0, 10**8), st.integers(1, 999))
def test_directory_names_parse_back(step, epoch, attempt):
    assert parse_directory(directory_name(step, epoch, attempt)) == (step, epoch)


@given(st.integers(0, 10**9 - 2), st.integers(0, 10**6 - 1))
def test_directory_names_sort_by_step(step, epoch):
    assert directory_name(step, epoch) < directory_name(step + 1, epoch)


@pytest.mark.parametrize("name", ["notes", "step-1-e1", "step-000000001-e000001.bak", ".probe-1"])
def test_foreign_names_are_not_ours(name):
    assert parse_directory(name) is None


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 1000)), st.integers(1, 6))
def test_every_file_is_verified_by_exactly_one_rank(sizes, world_size):
    files = {name: FileEntry(size, "") for name, size in sizes.items()}
    shares = [share_of(files, rank, world_size) for rank in range(world_size)]
    assert sorted(name for share in shares for name in share) == sorted(files)


def test_bytes_are_spread_evenly():
    files = {f"__{rank}_0.distcp": FileEntry(100, "") for rank in range(4)}
    assert [len(share_of(files, rank, 2)) for rank in range(2)] == [2, 2]


def test_commit_of_another_epoch_is_fenced():
    with pytest.raises(FencedError, match=r"epoch 2\b"):
        with_commit(BoardState(epoch=2), commit(5, epoch=1), keep=3)


def test_a_save_that_was_under_way_when_the_group_went_back_does_not_count():
    record = AnomalyRecord().with_void(Void(epoch=1, step=4))
    with pytest.raises(FencedError, match=r"step 5\b"):
        with_commit(BoardState(epoch=1, numbers=record), commit(5), keep=3)
    assert with_commit(BoardState(epoch=1, numbers=record), commit(4), keep=3).commits
    later = BoardState(epoch=2, numbers=record)
    assert with_commit(later, commit(5, epoch=2), keep=3).commits


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 4))
def test_newest_commit_is_last_and_at_most_keep_stay(steps, keep):
    state = BoardState(epoch=1)
    for step in steps:
        state = with_commit(state, commit(step), keep)
        assert state == with_commit(state, commit(step), keep)  # idempotent
        kept = [c.step for c in state.commits]
        assert kept == sorted(set(kept))
        assert kept[-1] == step
        assert len(kept) <= keep


def test_valid_older_commit_survives_a_newer_that_could_not_be_used():
    state = BoardState(epoch=2, commits=(commit(100), commit(200), commit(300)))
    kept = with_commit(state, commit(150, epoch=2), keep=2).commits
    assert [c.step for c in kept] == [100, 150]


def test_superseded_spares_commits_newer_epochs_and_foreign_names():
    names = [directory_name(s, e) for s, e in [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 3)]]
    remove, milestones = superseded(
        [*names, "notes"], [commit(4), commit(5, 2)], epoch=2, keep_every_steps=2
    )
    assert remove == names[:1] + names[2:3]
    assert milestones == names[1:2]


def test_milestone_of_a_history_given_up_is_removed():
    names = [directory_name(s, 1) for s in (10, 20, 30)]
    remove, milestones = superseded(names, [commit(15, 2)], epoch=2, keep_every_steps=10)
    assert remove == names[1:]
    assert milestones == names[:1]
