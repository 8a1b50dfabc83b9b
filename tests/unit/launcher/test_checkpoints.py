"""What the launcher reads of boards and checkpoint directories."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
from functools import partial

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from elastic_trainer.board import file_board
from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import Commit, update
from elastic_trainer.plan.config import StartFrom
from elastic_trainer.state.manifest import Manifest, with_commit
from elastic_trainer.state.storage import CheckpointStorage
from launcher.cli.checkpoint import _export_request, _lines, missing_tokenizer, run_converter
from launcher.cli.main import run_cli
from launcher.plan.planning import plan
from launcher.render.local import to_train_config
from launcher.runs.checkpoints.commits import (
    Reference,
    RetiredError,
    RunCheckpoints,
    refuse_foreign,
)
from launcher.runs.checkpoints.start_from import import_warnings, model_warnings
from launcher.spec.errors import PermanentError, UserError
from launcher.spec.reading import parse_spec

INDEX = pickle.dumps(Metadata({}, storage_data={"t": _StorageInfo("__0_0.distcp", 0, 1000)}))
WHOLE_BYTES = 1000 + len(INDEX)


def save(run, step, *, keep=3, index=INDEX):
    """Save and commit a checkpoint as the trainer does, without its retirement of old ones."""
    storage = CheckpointStorage(run / "checkpoints")
    storage.root.mkdir(exist_ok=True, parents=True)
    board = FileBoard(run / "board")
    name = storage.make(step, 1)
    (storage.root / name / "__0_0.distcp").write_bytes(os.urandom(1000))
    (storage.root / name / ".metadata").write_bytes(index)
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
    update(board, lambda state: with_commit(state, commit, keep=keep))
    return storage


@pytest.fixture
def run(tmp_path):
    """A run without a job: two checkpoints that count, and one directory that does not."""
    for step in (4, 8):
        storage = save(tmp_path, step)
    storage.make(9, 1)
    return tmp_path


def directory(run, step):
    return run / "checkpoints" / f"step-{step:09d}-e000001"


def write_commit(run, raw, **changes):
    """Put a manifest of these bytes on the board, whatever they are."""
    storage = CheckpointStorage(run / "checkpoints")
    storage.root.mkdir()
    name = storage.make(5, 1)
    (storage.root / name / "manifest.json").write_bytes(raw)
    digest = hashlib.sha256(raw).hexdigest()
    commit = Commit(**{"epoch": 1, "step": 5, "dir": name, "manifest_sha256": digest, **changes})
    board = FileBoard(run / "board")
    update(board, lambda state: dataclasses.replace(state, epoch=1))
    update(board, lambda state: with_commit(state, commit, keep=3))
    return storage.root / name


def manifest(**changes):
    """Return the bytes of a manifest without files, changed."""
    plain = Manifest(
        run_id="r", epoch=1, step=5, consumed_samples=1, layout="dp1", world_size=1, files={}
    )
    return json.dumps({**json.loads(plain.encode()), **changes}).encode()


EMPTY = {"size_bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 200_000,
        b"NaN",
        b"[]",
        b"\xff",
        b"1" * 5000,
        manifest(files=[]),
        manifest(files={"a": 5}),
        manifest(files={"a": {"x": 1}}),
        manifest(files={"a": {**EMPTY, "size_bytes": 10**30}}),
        manifest(files={"../a": EMPTY}),
        manifest(model={"a": 1}),
        manifest(world_size="x"),
        manifest(consumed_samples=float("nan")),
        manifest(version="\x1b[31m" * 1000),
        manifest(),  # without .metadata
    ],
)
def test_no_manifest_breaks_verify_and_list(tmp_path, capsys, raw):
    write_commit(tmp_path, raw)
    assert run_cli(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "DAMAGED" in capsys.readouterr().err
    assert run_cli(["checkpoint", "list", str(tmp_path)]) == 0


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [os.mkfifo, partial(os.symlink, "/dev/zero")])
@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp"])
def test_pipes_and_devices_are_no_checkpoint(tmp_path, capsys, name, make):
    path = write_commit(tmp_path, manifest(files={"__0_0.distcp": EMPTY})) / name
    path.unlink(missing_ok=True)
    make(path)
    assert run_cli(["checkpoint", "verify", str(tmp_path)]) == 1
    assert name in capsys.readouterr().err


def test_a_board_leads_to_no_other_folder(tmp_path, capsys):
    write_commit(tmp_path, manifest(), dir="../checkpoints/step-000000005-e000001")
    assert run_cli(["checkpoint", "verify", str(tmp_path), "--json"]) == 1
    (entry,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert entry["dir"] in entry["damaged"][0]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [os.mkfifo, partial(os.symlink, "/dev/zero")])
def test_a_board_that_is_no_file_is_named(tmp_path, capsys, make):
    (tmp_path / "board").mkdir()
    make(tmp_path / "board" / "v000000000001")
    assert run_cli(["checkpoint", "list", str(tmp_path)]) == 2
    assert "HF302" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b'{"version":1}', b"[" * 200_000, manifest(numbers=[5])])
def test_a_board_that_says_nonsense_is_named(tmp_path, capsys, content):
    board = FileBoard(tmp_path / "board")
    board.set_state(content)
    assert run_cli(["checkpoint", "list", str(tmp_path)]) == 2
    assert "HF302" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "path", "step"),
    [
        ("runs/a", "runs/a", None),
        ("runs/a@12", "runs/a", 12),
        ("runs/me@home", "runs/me@home", None),
        ("runs/me@home@3", "runs/me@home", 3),
        ("runs/a@5/", "runs/a@5", None),
        ("runs/a@", "runs/a@", None),
        ("runs/a@-1", "runs/a@-1", None),
        ("runs/a@" + "9" * 5000, "runs/a@" + "9" * 5000, None),
    ],
)
def test_references(text, path, step):
    assert (str(Reference.parse(text).run), Reference.parse(text).step) == (path, step)


def test_the_newest_or_the_one_of_a_step(run):
    found = RunCheckpoints.of(run)
    assert (found.choose(None).step, found.choose(4).step) == (8, 4)
    with pytest.raises(UserError, match=r"HF630.* 5.* 4, 8"):
        found.choose(5)


def test_no_run_and_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="HF613"):
        RunCheckpoints.of(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "board").mkdir()
    with pytest.raises(UserError, match="HF630"):
        RunCheckpoints.of(tmp_path).choose(None)


def test_a_damaged_board_is_an_error_at_once(run, monkeypatch):
    monkeypatch.setattr(file_board.time, "sleep", lambda _: pytest.fail("it waits"))
    newest = max((run / "board").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(UserError, match="HF302"):
        RunCheckpoints.of(run)


def test_list_tells_what_counts_from_what_does_not(run, capsys):
    assert run_cli(["checkpoint", "list", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in told["checkpoints"]] == [4, 8]
    assert told["checkpoints"][0]["size_bytes"] == WHOLE_BYTES
    assert [(row["step"], row["kind"]) for row in told["others"]] == [(9, "unfinished")]
    (directory(run, 4) / "manifest.json").write_text("{}")
    assert run_cli(["checkpoint", "list", str(run)]) == 0
    out = capsys.readouterr().out
    (four,) = [line for line in out.splitlines() if line.strip().startswith("4 ")]
    assert "DAMAGED" in four
    assert "step-000000004-e000001: manifest.json" in out
    (eight,) = [line for line in out.splitlines() if line.strip().startswith("8 ")]
    for cell in ("dp1", "16", "1.25 KiB", "step-000000008-e000001"):
        assert cell in eight
    assert "step-000000009-e000001, 0 B" in out


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
    assert run_cli(["checkpoint", "verify", str(run), "--all", "--json"]) == 1
    four, eight = (e["damaged"] for e in json.loads(capsys.readouterr().out)["checkpoints"])
    assert (len(four), eight) == (2, [])
    for name in ("__0_0.distcp", ".metadata"):
        assert name in err
        assert any(name in line for line in four)


def test_verify_fails_where_a_restore_would(run, capsys):
    """What was saved is there byte for byte, and no restore could read it."""
    save(run, 12, index=pickle.dumps(print))
    assert run_cli(["checkpoint", "verify", str(run), "--json"]) == 1
    (entry,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert ".metadata" in entry["damaged"][0]


def test_verify_finds_a_changed_manifest(run, capsys):
    flip(directory(run, 8) / "manifest.json")
    assert run_cli(["checkpoint", "verify", str(run)]) == 1
    assert "manifest.json" in capsys.readouterr().err


def test_wrong_input(run, capsys):
    assert run_cli(["checkpoint", "verify", f"{run}@5"]) == 2
    assert run_cli(["checkpoint", "verify", f"{run}@4", "--all"]) == 2
    capsys.readouterr()
    assert run_cli(["checkpoint", "list", f"{run}@4"]) == 2
    assert "HF610" in capsys.readouterr().err
    assert run_cli(["checkpoint", "verify", f"{run}@latest"]) == 2
    assert f"{run}@STEP" in capsys.readouterr().err
    assert run_cli(["checkpoint", "export", str(run), "-o", str(run / "out")]) == 2
    assert "HF613" in capsys.readouterr().err


JOB = """\
name: tiny
model: {num_layers: 2, dim: 32, num_heads: 4, ffn_dim: 48, vocab_size: 256}
cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 32, global_batch: 4, steps: 10}
data: {path: text, tokenizer: t.json}
checkpoint: {keep_every_steps: 4}
"""


@pytest.fixture
def config(tmp_path):
    spec = parse_spec(JOB)
    return to_train_config(spec, plan(spec), run_id="new", run_dir=tmp_path, base_dir=tmp_path)


def test_milestones_are_told_from_what_is_left_over(tmp_path, config, capsys):
    (tmp_path / "job.json").write_text(config.to_json())
    for step in (4, 5, 8, 10):
        save(tmp_path, step, keep=1)
    found = RunCheckpoints.of(tmp_path)
    kinds = {row["step"]: row["kind"] for row in found.others()}
    assert kinds == {4: "milestone", 5: "left over", 8: "milestone"}
    assert found.choose(4).dir == "step-000000004-e000001"
    with pytest.raises(UserError, match=r"HF630.* 4, 8, 10"):
        found.choose(5)
    assert run_cli(["checkpoint", "verify", f"{tmp_path}@4"]) == 0
    flip(directory(tmp_path, 4) / "__0_0.distcp")
    assert run_cli(["checkpoint", "verify", f"{tmp_path}@4"]) == 1
    capsys.readouterr()


def test_what_a_live_run_retires_meanwhile_is_no_damage(run, capsys, monkeypatch):
    before = RunCheckpoints.of(run)
    storage = save(run, 12, keep=2)
    storage.remove("step-000000004-e000001")
    assert [row["step"] for row in before.rows()] == [8]
    with pytest.raises(RetiredError):
        before.verify(before.choose(4))
    monkeypatch.setattr(RunCheckpoints, "of", lambda _: before)
    assert run_cli(["checkpoint", "verify", str(run), "--all"]) == 0
    assert capsys.readouterr().out == "step 8: good\n"
    assert run_cli(["checkpoint", "verify", f"{run}@4"]) == 2
    assert "HF630" in capsys.readouterr().err


def test_progress_adds_up_to_the_whole_whatever_is_wrong(run):
    found = RunCheckpoints.of(run)
    for damage in (lambda path: None, flip, lambda path: path.write_bytes(b""), os.unlink):
        damage(directory(run, 8) / "__0_0.distcp")
        read = []
        found.verify(found.choose(8), read.append)
        assert sum(read) == found.size_bytes(found.choose(8)) == WHOLE_BYTES


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys):
    now = 0.0
    report = _lines("verify", lambda: now)
    for now in (0.1, 4.9, 5.0, 6.0, 9.9, 10.0):
        report(int(now * 2**30), 20 * 2**30)
    assert capsys.readouterr().err == "verify: 5 GiB of 20 GiB\nverify: 10 GiB of 20 GiB\n"


def test_two_runs_do_not_share_a_checkpoint_directory(run, config):
    section = dataclasses.replace(config.checkpoint, dir=str(run / "checkpoints"))
    shared = dataclasses.replace(config, checkpoint=section)
    with pytest.raises(UserError, match=r"HF207.*--set checkpoint.dir=.*/checkpoints/new"):
        refuse_foreign(shared)
    for folder in (run, run / "nowhere"):
        own = dataclasses.replace(section, dir=str(folder))
        refuse_foreign(dataclasses.replace(config, checkpoint=own))
    assert not (run / "nowhere").exists()


def test_a_tokenizer_that_is_gone_is_left_out(run, config):
    found = dataclasses.replace(RunCheckpoints.of(run), config=config)
    assert missing_tokenizer(found) == config.data.tokenizer
    (run / "t.json").write_text("{}")
    assert missing_tokenizer(found) is None
    assert missing_tokenizer(RunCheckpoints.of(run)) is None


@pytest.mark.slow
def test_what_the_converter_says_of_the_input_reaches_the_user(tmp_path):
    request = {"hf": "/nowhere", "run": str(tmp_path / "x")}
    with pytest.raises(UserError, match="HF323"):
        run_converter("import", request, on_progress=lambda *_: None)


def test_a_converter_that_dies_is_no_mistake_of_the_user(tmp_path, monkeypatch):
    """Its own words are shown; a code of Python's, as 2, is not taken for the contract's."""
    script = tmp_path / "python"
    monkeypatch.setattr("sys.executable", str(script))
    for body, said in (
        ("echo a remark; echo boom >&2; exit 2", "export.*: boom"),
        ("exit 7", "export.* 7"),
        ("kill -9 $$", "export.*memory"),
    ):
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o700)
        with pytest.raises(PermanentError, match=said):
            run_converter("export", {}, on_progress=lambda *_: None)


def test_without_torch_the_way_out_is_an_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"HF632.*holdfast-ml\[train\]"):
        run_converter("export", {}, on_progress=lambda *_: None)


# What an import keeps beside the weights.


def imported(folder, *, eos=3, tokens="ab"):
    """Make what an import leaves, but for the weights, and return the run."""
    (folder / "board").mkdir(parents=True)
    write_model_files(folder / "hf", tokens)
    config = {"vocab_size": 256, "eos_token_id": eos}
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    return folder


def write_model_files(folder, tokens):
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate([*tokens, "</s>"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return str(folder / "tokenizer.json")


def started(config, run, **data):
    """Return the job of a run that starts from `run`."""
    start = StartFrom(
        run=str(run), checkpoints="/c", epoch=0, step=0, dir="d", manifest_sha256="0" * 64
    )
    section = dataclasses.replace(config.data, **data)
    return dataclasses.replace(config, start_from=start, data=section)


def test_runs_that_started_from_each_other_lead_to_the_import(tmp_path, config):
    source = imported(tmp_path / "imported")
    for before, name in (("imported", "first"), ("first", "second")):
        (tmp_path / name / "board").mkdir(parents=True)
        job = started(config, tmp_path / before).to_json()
        (tmp_path / name / "job.json").write_text(job)
    for name in ("imported", "first", "second"):
        assert RunCheckpoints.of(tmp_path / name).model_files() == source / "hf"
    shutil.rmtree(source)
    assert RunCheckpoints.of(tmp_path / "second").model_files() is None
    job = started(config, tmp_path / "second").to_json()  # a ring
    (tmp_path / "first" / "job.json").write_text(job)
    assert RunCheckpoints.of(tmp_path / "second").model_files() is None


@pytest.mark.parametrize(
    ("tokens", "eos", "codes"),
    [
        ("ab", 2, []),
        ("ab", [2, 7], []),
        ("ab", 7, ["HF193"]),
        ("xy", 2, ["HF192"]),
        ("abc", 2, ["HF192", "HF193"]),  # a token more: the end moved
        (None, 2, ["HF192"]),
    ],
)
def test_the_tokenizer_is_compared_with_the_imported_models(tmp_path, config, tokens, eos, codes):
    source = imported(tmp_path / "imported", eos=eos)
    own = "bytes" if tokens is None else write_model_files(tmp_path / "own", tokens)
    spec = parse_spec(JOB)
    found = model_warnings(started(config, source, tokenizer=own), spec)
    assert sorted(each.code for each in found) == codes
    assert all(each.is_warning for each in found)
    # The files have the tokens; a script has a tokenizer of its own; nothing was imported.
    tokenised = started(config, source, format="nanogpt")
    of_script = dataclasses.replace(started(config, source), command="train.py")
    assert [model_warnings(each, spec) for each in (tokenised, of_script, config)] == [[], [], []]


def test_a_tokenizer_that_cannot_be_compared_stops_the_start(tmp_path, config):
    source = imported(tmp_path / "imported")
    for content, code in (("{", "HF704"), (None, "HF202")):
        own = tmp_path / "own.json"
        own.unlink(missing_ok=True)
        if content:
            own.write_text(content)
        with pytest.raises(UserError, match=code):
            model_warnings(started(config, source, tokenizer=str(own)), parse_spec(JOB))


def test_an_import_says_where_config_and_tokenizer_contradict_each_other(tmp_path):
    for eos, codes in ((2, []), (1, ["HF193"]), (256, ["HF193"])):
        folder = imported(tmp_path / str(eos), eos=eos) / "hf"
        assert [each.code for each in import_warnings(folder)] == codes
    (folder / "tokenizer.json").write_text("{")
    assert [each.code for each in import_warnings(folder)] == ["HF193"]


@pytest.mark.parametrize(
    ("data", "beside"),
    [
        ({"tokenizer": "bytes"}, False),
        ({"tokenizer": "bytes", "format": "nanogpt"}, True),
        ({"tokenizer": "/t.json"}, True),
    ],
)
def test_an_export_of_bytes_has_no_tokenizer_of_the_imported_model(tmp_path, config, data, beside):
    source, run = imported(tmp_path / "imported"), tmp_path / "run"
    save(run, 4)
    job = started(config, source, **data)
    section = dataclasses.replace(job.checkpoint, dir=str(run / "checkpoints"))
    (run / "job.json").write_text(dataclasses.replace(job, checkpoint=section).to_json())
    found = RunCheckpoints.of(run)
    request = _export_request(found, found.choose(4), tmp_path / "out", "float32")
    assert request.get("beside") == (str(source / "hf") if beside else None)
