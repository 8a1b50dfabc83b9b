"""What the launcher reads of boards and checkpoint directories."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from elastic_trainer.agent.board import Commit, update
from elastic_trainer.agent.file_board import FileBoard
from elastic_trainer.checkpoint.manifest import Manifest, with_commit
from elastic_trainer.checkpoint.storage import CheckpointStorage
from launcher.cli.main import run_cli
from launcher.errors import UserError
from launcher.ops.checkpoints import Reference, RunCheckpoints


@pytest.fixture
def run(tmp_path):
    """A run without a job: two checkpoints that count, and one directory that does not."""
    storage = CheckpointStorage(tmp_path / "checkpoints")
    storage.root.mkdir()
    board = FileBoard(tmp_path / "board")
    for step in (4, 8):
        name = storage.make(step, 1)
        (storage.root / name / "__0_0.distcp").write_bytes(os.urandom(1000))
        (storage.root / name / ".metadata").write_bytes(b"index")
        manifest = Manifest(
            run_id="r",
            epoch=1,
            step=step,
            consumed_samples=step * 2,
            layout="dp1-pp1-cp1-tp1",
            world_size=1,
            files=storage.digest(name, 0),
        )
        digest = storage.write_manifest(name, manifest)
        commit = Commit(epoch=1, step=step, dir=name, manifest_sha256=digest)
        update(board, lambda state: dataclasses.replace(state, epoch=1))
        update(board, lambda state, c=commit: with_commit(state, c, keep=3))
    storage.make(9, 1)
    return tmp_path


def directory(run, step):
    return run / "checkpoints" / f"step-{step:09d}-e000001"


@pytest.mark.parametrize(
    ("text", "path", "step"),
    [
        ("runs/a", "runs/a", None),
        ("runs/a@12", "runs/a", 12),
        ("runs/me@home", "runs/me@home", None),
        ("runs/me@home@3", "runs/me@home", 3),
    ],
)
def test_references(text, path, step):
    assert (str(Reference.parse(text).run), Reference.parse(text).step) == (path, step)


def test_the_newest_or_the_one_of_a_step(run):
    found = RunCheckpoints.of(run)
    assert (found.choose(None).step, found.choose(4).step) == (8, 4)
    with pytest.raises(UserError, match=r"HF630.*no checkpoint of step 5; there are: 4, 8"):
        found.choose(5)


def test_no_run_and_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="HF613"):
        RunCheckpoints.of(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "board").mkdir()
    with pytest.raises(UserError, match=r"HF630.*no checkpoint yet"):
        RunCheckpoints.of(tmp_path).choose(None)


def test_a_damaged_board_is_an_error(run):
    newest = max((run / "board").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(UserError, match="HF302"):
        RunCheckpoints.of(run)


def test_list_tells_what_counts_from_what_does_not(run, capsys):
    assert run_cli(["checkpoint", "list", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in told["checkpoints"]] == [4, 8]
    assert told["checkpoints"][0]["size_bytes"] == 1005
    assert [(row["step"], row["kind"]) for row in told["others"]] == [(9, "left over")]
    (directory(run, 4) / "manifest.json").write_text("{}")
    assert run_cli(["checkpoint", "list", str(run)]) == 0
    out = capsys.readouterr().out
    assert "damaged" in out
    assert "not on the board: step-000000009-e000001 (left over" in out


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_verify_names_every_damaged_file(run, capsys):
    assert run_cli(["checkpoint", "verify", str(run), "--all"]) == 0
    assert capsys.readouterr().out == "step 4: good\nstep 8: good\n"
    flip(directory(run, 4) / "__0_0.distcp")
    (directory(run, 4) / ".metadata").unlink()
    assert run_cli(["checkpoint", "verify", f"{run}@8"]) == 0
    capsys.readouterr()
    assert run_cli(["checkpoint", "verify", f"{run}@4"]) == 1
    err = capsys.readouterr().err
    assert "__0_0.distcp has another sha256 than was saved" in err
    assert ".metadata: No such file" in err
    assert run_cli(["checkpoint", "verify", str(run), "--all", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [len(entry["damaged"]) for entry in told["checkpoints"]] == [2, 0]


def test_verify_finds_a_changed_manifest(run, capsys):
    flip(directory(run, 8) / "manifest.json")
    assert run_cli(["checkpoint", "verify", str(run)]) == 1
    assert "another sha256 than the board says" in capsys.readouterr().err


def test_wrong_input(run, capsys):
    assert run_cli(["checkpoint", "verify", f"{run}@5"]) == 2
    assert run_cli(["checkpoint", "verify", f"{run}@4", "--all"]) == 2
    assert run_cli(["checkpoint", "export", str(run), "-o", str(run / "out")]) == 2
    assert "HF613" in capsys.readouterr().err
